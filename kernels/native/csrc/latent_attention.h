// Latent attention over pages: the twin of kernels/latent_attention.py (architecture 6).
//
//     absorbed       q^ = W_UK^T q_nope;  scores = q^ c + q_rope r;  o = W_UV (p c)
//     materialised   k = [W_UK c | r],  v = W_UV c;  o = softmax(q k^T) v
//
// Latent rows are read where they lie, kKeys at a time, under a running softmax: scores of more are
// never held. Absorbing costs 2L+R a query and row, materialising (nope+V) L a row and then
// nope+R+V a query: few queries of a row, a decode step or a draft to verify, are absorbed, many
// are not. The number of a row's own queries decides, and a query's bits depend on nothing else but
// the row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few_rows.h"
#include "scratch.h"
#include "weighted_rows.h"

namespace kda {

inline constexpr int64_t kKeys = 64;  // latent rows of one block

struct LatentShape {
  int64_t heads, nope, shared, V, latent;  // H, nope, R, V, L

  int64_t query() const { return nope + shared; }
  int64_t row() const { return latent + shared; }
  bool absorbs(int64_t queries) const {
    return queries * (2 * latent + shared) <= (nope + V) * latent + queries * (query() + V);
  }
};

// Queries first .. first + count - 1 of a batch over `total` latent rows in `pages`; query t sees
// the first total - count + t + 1 of them.
struct AttentionRow {
  int64_t first, count, total;
  const int64_t* pages;

  int64_t visible(int64_t query) const { return total - count + query + 1; }
};

// q [N, H, nope+R], heads side by side; pool [pages, page, L+R], a page's rows side by side;
// kv_b [H, nope+V, L]; o [N, H, V].
template <class T, class A>
struct LatentAttention {
  LatentShape shape;
  const A* q;
  int64_t q_stride;
  const A* pool;
  int64_t page_stride, page;
  const A* kv_b;
  T* o;

  const A* keys_of(int64_t head) const {
    return kv_b + head * (shape.nope + shape.V) * shape.latent;
  }
  const A* values_of(int64_t head) const { return keys_of(head) + shape.nope * shape.latent; }

  // A query of one head, scaled.
  void copy_query(T* to, int64_t token, int64_t head) const {
    const T scale = T(1) / std::sqrt(static_cast<T>(shape.query()));
    const A* from = q + token * q_stride + head * shape.query();
    for (int64_t d = 0; d < shape.query(); ++d) to[d] = widen<T>(from[d]) * scale;
  }

  // act(rows, begin, count) for the stretches of latent rows first .. first + count - 1 that lie
  // one behind the other.
  template <class Act>
  void each_stretch(const AttentionRow& row, int64_t first, int64_t count, Act&& act) const {
    const auto address = [&](int64_t i) {
      return pool + row.pages[i / page] * page_stride + i % page * shape.row();
    };
    for (int64_t i = first, end; i < first + count; i = end) {
      const A* begin = address(i);
      const auto rest = [&] { return std::min(page - end % page, first + count - end); };
      end = i, end += rest();
      while (end < first + count && address(end) == begin + (end - i) * shape.row()) end += rest();
      act(begin, i - first, end - i);
    }
  }
};

// The queries of several tokens, absorbed: q^ | q_rope [tokens, H, L+R], and what comes back for
// them, p c [tokens, H, L].
template <class T>
struct Absorbed {
  const int64_t* tokens;
  int64_t count;
  T *queries, *latent;
};

template <class T>
struct AttentionRoom {
  Buffer<T> queries, scores, scale, sums, block, latent, expanded, keys;
  std::vector<RunningSoftmax<T>> softmax;
};

// One head of all absorbed tokens: their queries, scaled.
template <class T, class A>
void absorb(const LatentAttention<T, A>& call, const Absorbed<T>& absorbed, int64_t head,
            AttentionRoom<T>& room) {
  const LatentShape& s = call.shape;
  T* q = room.queries.at_least(absorbed.count * s.query());
  T* to = absorbed.queries + head * s.row();
  const int64_t stride = s.heads * s.row();
  for (int64_t i = 0; i < absorbed.count; ++i) {
    call.copy_query(q + i * s.query(), absorbed.tokens[i], head);
    std::fill_n(to + i * stride, s.latent, T(0));
    std::copy_n(q + i * s.query() + s.nope, s.shared, to + i * stride + s.latent);
  }
  add_weighted(WeightedRows<T, A>{to, stride, absorbed.count, s.latent, q, s.query(), s.nope,
                                  call.keys_of(head), s.latent});
}

// Queries (token, head) number first .. first + count - 1 of a row, at most kFewRows, in their
// absorbed form → p c. `offset`: the row's first token among the absorbed.
template <class T, class A>
void attend_absorbed(const LatentAttention<T, A>& call, const Absorbed<T>& absorbed,
                     const AttentionRow& row, int64_t offset, int64_t first, int64_t count,
                     AttentionRoom<T>& room) {
  const LatentShape& s = call.shape;
  const int64_t at = offset * s.heads + first;
  T *scores = room.scores.at_least(kFewRows * kKeys), *scale = room.scale.at_least(kFewRows);
  T *sums = absorbed.latent + at * s.latent, *block = room.block.at_least(kFewRows * s.latent);
  room.softmax.assign(count, {});
  std::fill_n(sums, count * s.latent, T(0));
  const int64_t seen = row.visible((first + count - 1) / s.heads);
  for (int64_t key = 0; key < seen; key += kKeys) {
    const int64_t keys = std::min(kKeys, seen - key);
    call.each_stretch(row, key, keys, [&](const A* rows, int64_t begin, int64_t n) {
      const FewRows<T, A, T> product{absorbed.queries + at * s.row(), s.row(), count, rows, s.row(),
                                     s.row(), scores + begin, kKeys};
      few_rows(product, 0, n);
    });
    for (int64_t m = 0; m < count; ++m) {
      const int64_t own = row.visible((first + m) / s.heads) - key;
      scale[m] = room.softmax[m].weigh(scores + m * kKeys, std::clamp<int64_t>(own, 0, keys), keys);
    }
    std::fill_n(block, count * s.latent, T(0));
    call.each_stretch(row, key, keys, [&](const A* rows, int64_t begin, int64_t n) {
      add_weighted(WeightedRows<T, A>{block, s.latent, count, s.latent, scores + begin, kKeys, n,
                                      rows, s.row()});
    });
    join(sums, block, scale, count, s.latent);
  }
  for (int64_t m = 0; m < count; ++m) {
    for (int64_t d = 0; d < s.latent; ++d) sums[m * s.latent + d] /= room.softmax[m].sum;
  }
}

// One head of all absorbed tokens: p c → o.
template <class T, class A>
void expand(const LatentAttention<T, A>& call, const Absorbed<T>& absorbed, int64_t head,
            AttentionRoom<T>& room) {
  const LatentShape& s = call.shape;
  T* out = room.expanded.at_least(absorbed.count * s.V);
  const FewRows<T, A, T> product{absorbed.latent + head * s.latent, s.heads * s.latent,
                                 absorbed.count, call.values_of(head), s.latent, s.latent, out,
                                 s.V};
  few_rows(product, 0, s.V);
  for (int64_t i = 0; i < absorbed.count; ++i) {
    std::copy_n(out + i * s.V, s.V, call.o + (absorbed.tokens[i] * s.heads + head) * s.V);
  }
}

// All queries of a row for one head, keys and values materialised block by block.
template <class T, class A>
void attend_materialised(const LatentAttention<T, A>& call, const AttentionRow& row, int64_t head,
                         AttentionRoom<T>& room) {
  const LatentShape& s = call.shape;
  const int64_t width = s.query(), both = s.nope + s.V;
  T *q = room.queries.at_least(row.count * width), *sums = room.sums.at_least(row.count * s.V);
  T *scores = room.scores.at_least(kFewRows * kKeys), *scale = room.scale.at_least(kFewRows);
  T *latent = room.latent.at_least(kKeys * s.row()), *keys = room.keys.at_least(kKeys * width);
  T *expanded = room.expanded.at_least(kKeys * both), *block = room.block.at_least(kFewRows * s.V);
  for (int64_t t = 0; t < row.count; ++t) call.copy_query(q + t * width, row.first + t, head);
  std::fill_n(sums, row.count * s.V, T(0));
  room.softmax.assign(row.count, {});
  for (int64_t key = 0; key < row.total; key += kKeys) {
    const int64_t n = std::min(kKeys, row.total - key);
    call.each_stretch(row, key, n, [&](const A* rows, int64_t begin, int64_t count) {
      T* to = latent + begin * s.row();
      for (int64_t i = 0; i < count * s.row(); ++i) to[i] = widen<T>(rows[i]);
    });
    for (int64_t i = 0; i < n; i += kFewRows) {
      const FewRows<T, A, T> product{latent + i * s.row(), s.row(), std::min(kFewRows, n - i),
                                     call.keys_of(head), s.latent, s.latent, expanded + i * both,
                                     both};
      few_rows(product, 0, both);
    }
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(expanded + i * both, s.nope, keys + i * width);
      std::copy_n(latent + i * s.row() + s.latent, s.shared, keys + i * width + s.nope);
    }
    // queries before the first one that sees the block are done with
    const int64_t from = std::max<int64_t>(0, key - (row.total - row.count));
    for (int64_t t = from / kFewRows * kFewRows; t < row.count; t += kFewRows) {
      const int64_t count = std::min(kFewRows, row.count - t);
      few_rows(FewRows<T, T, T>{q + t * width, width, count, keys, width, width, scores, kKeys}, 0,
               n);
      for (int64_t m = 0; m < count; ++m) {
        const int64_t own = std::clamp<int64_t>(row.visible(t + m) - key, 0, n);
        scale[m] = room.softmax[t + m].weigh(scores + m * kKeys, own, n);
      }
      std::fill_n(block, count * s.V, T(0));
      add_weighted(WeightedRows<T, T>{block, s.V, count, s.V, scores, kKeys, n, expanded + s.nope,
                                      both});
      join(sums + t * s.V, block, scale, count, s.V);
    }
  }
  for (int64_t t = 0; t < row.count; ++t) {
    T* to = call.o + ((row.first + t) * s.heads + head) * s.V;
    for (int64_t d = 0; d < s.V; ++d) to[d] = sums[t * s.V + d] / room.softmax[t].sum;
  }
}

}  // namespace kda
