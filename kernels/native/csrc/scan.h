// Packed rows through the recurrence, with exports.
//
// A task is one (part, row), a part being a range of value channels of one head. Tasks share
// nothing that any of them writes, and a channel's bits do not depend on how channels are shared
// out: rows, neighbours and threads change nothing. Parts of a row go through it together, a block
// of tokens at a time, so that the operands of a token, which lie side by side, are read side by
// side. Where the operands of a block come from is a `Source`: given as they are, or made from raw
// projections.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "elementwise.h"
#include "recurrence.h"
#include "scratch.h"

namespace kda {

inline constexpr int64_t kBlock = 32;                  // tokens prepared together
inline constexpr int64_t kTogetherBytes = 512 * 1024;  // of states that go through a row together

struct Shape {
  int64_t heads, K, V;
};

// One row: its tokens in the batch, and the states [H, V, K] that it starts from (null: zeros) and
// ends in (null: dropped). Both may be the same memory.
template <class T>
struct Row {
  int64_t first, count;
  const T* initial;
  T* final;
};

// Keep a row's state after its first `after` tokens.
template <class T>
struct Export {
  int64_t row, after;
  T* to;
};

// Value channels column .. column + channels - 1 of one head.
struct Part {
  int64_t head, column, channels;
};

// A call: rows, exports (sorted by row, then by `after`), and where read-outs [N, H, V] go.
template <class T>
struct Scan {
  Shape shape;
  const Row<T>* rows;
  int64_t row_count;
  const Export<T>* exports;
  int64_t export_count;
  T* o;
  int64_t parts;  // ranges that the value channels of a head are split into

  int64_t tasks() const { return shape.heads * parts * row_count; }

  // Channels of the widest part, in whole vectors.
  int64_t part_width() const {
    constexpr int64_t L = kLanes<T>;
    return ((shape.V + L - 1) / L + parts - 1) / parts * L;
  }

  // Ranges of whole vectors, as even as they come; the last ones may be empty.
  Part part(int64_t group) const {
    const int64_t column = std::min(group % parts * part_width(), shape.V);
    return {group / parts, column, std::min(part_width(), shape.V - column)};
  }
};

// As many parts as give every thread a task, but none without a vector.
template <class T>
int64_t parts_for(const Shape& shape, int64_t rows, int64_t threads) {
  const int64_t vectors = (shape.V + kLanes<T> - 1) / kLanes<T>;
  const int64_t tasks = std::max<int64_t>(1, shape.heads * rows);
  return std::clamp<int64_t>((threads + tasks - 1) / tasks, 1, std::max<int64_t>(1, vectors));
}

template <class T>
int64_t whole_vectors(int64_t channels) {
  return (channels + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// Room for a block; the source fills all of it for `count` tokens but `o`.
template <class T>
struct Block {
  T *alpha, *k, *q, *v, *o, *beta, *kq;
  int64_t v_stride;

  Block(Scratch<T>& scratch, int64_t K, int64_t channels)
      : alpha(scratch.alpha.at_least(kBlock * K)),
        k(scratch.k.at_least(kBlock * K)),
        q(scratch.q.at_least(kBlock * K)),
        v(scratch.v.at_least(kBlock * whole_vectors<T>(channels))),
        o(scratch.o.at_least(kBlock * whole_vectors<T>(channels))),
        beta(scratch.beta.at_least(kBlock)),
        kq(scratch.kq.at_least(kBlock)),
        v_stride(whole_vectors<T>(channels)) {}

  Tokens<T> tokens(int64_t K) const { return {alpha, k, q, v, beta, kq, K, v_stride}; }
};

namespace detail {

// Where a part of the state of a row begins in the row's state.
template <class T>
T* part_of(T* state, const Shape& shape, const Part& part) {
  return state == nullptr ? nullptr : state + (part.head * shape.V + part.column) * shape.K;
}

// Tokens of a row and what is to be done with one part of its state: tokens first .. first+count-1,
// and the exports begin .. end-1, which fall within them.
template <class T>
struct Stretch {
  const Row<T>& row;
  int64_t first, count;
  const Export<T>*begin, *end;
};

// A stretch over one part's state, kept key-first in slices from block to block. `following`: what
// will be read after the part's state.
template <class T>
void run_slices(const Scan<T>& scan, const Part& part, const Stretch<T>& stretch,
                const Block<T>& block, T* state, const T* following) {
  constexpr int64_t L = kLanes<T>;
  const int64_t K = scan.shape.K, padded = whole_vectors<T>(part.channels);
  const int64_t slice_width = slice_vectors(K) * L;
  const T* initial = part_of(stretch.row.initial, scan.shape, part);
  T* final = part_of(stretch.row.final, scan.shape, part);
  const Tokens<T> tokens = block.tokens(K);
  for (int64_t at = 0; at < padded; at += slice_width) {
    T* slice = state + at * KeyOrder<T>{K}.rows();
    const int64_t width = std::min(slice_width, padded - at);
    const int64_t channels = std::min(width, part.channels - at);
    int64_t t = 0;
    const auto advance_to = [&](int64_t stop) {
      if (stop == t) return;
      advance(slice, static_cast<int>(width / L), tokens, at, t, stop, block.o + at,
              block.v_stride);
      t = stop;
    };

    if (stretch.first == 0) {
      const T* here = initial == nullptr ? nullptr : initial + at * K;
      const T* ahead = at + width < padded && here != nullptr ? here + width * K : following;
      load_slice(slice, width, here, channels, K, ahead);
    }
    for (const Export<T>* e = stretch.begin; e < stretch.end; ++e) {
      advance_to(e->after - stretch.first);
      store_slice(slice, width, part_of(e->to, scan.shape, part) + at * K, channels, K);
    }
    advance_to(stretch.count);
    if (stretch.first + stretch.count == stretch.row.count && final != nullptr) {
      store_slice(slice, width, final + at * K, channels, K);
    }
  }
}

// A row of one token over one part's state, where it lies.
template <class T>
void run_step(const Scan<T>& scan, const Part& part, const Stretch<T>& stretch,
              const Block<T>& block) {
  const T* initial = part_of(stretch.row.initial, scan.shape, part);
  const Tokens<T> token = block.tokens(scan.shape.K);
  for (const Export<T>* e = stretch.begin; e < stretch.end; ++e) {
    step(initial, part_of(e->to, scan.shape, part), token, part.channels, block.o);
  }
  step(initial, part_of(stretch.row.final, scan.shape, part), token, part.channels, block.o);
}

// A stretch of row number `index` over one part.
template <class T, class Source>
void run_block(const Scan<T>& scan, const Source& source, int64_t index, const Stretch<T>& stretch,
               T* state, const T* following, Scratch<T>& scratch) {
  const Part& part = source.part;
  const Block<T> block(scratch, scan.shape.K, part.channels);
  source.fill(block, stretch.row, index, stretch.first, stretch.count);
  if (stretch.row.count == 1) {
    run_step(scan, part, stretch, block);
  } else {
    run_slices(scan, part, stretch, block, state, following);
  }
  for (int64_t t = 0; t < stretch.count; ++t) {
    const int64_t token = stretch.row.first + stretch.first + t;
    T* to = scan.o + (token * scan.shape.heads + part.head) * scan.shape.V + part.column;
    std::copy_n(block.o + t * block.v_stride, part.channels, to);
  }
}

// One row through `parts` parts; `following`: what will be read after the last one's state.
template <class T, class Source>
void run_row(const Scan<T>& scan, const Source* sources, int64_t parts, int64_t index,
             const T* following, Scratch<T>& scratch) {
  const Row<T>& row = scan.rows[index];
  const int64_t stride = scan.part_width() * KeyOrder<T>{scan.shape.K}.rows();
  T* states = scratch.state.at_least(parts * stride);
  const auto before = [](const Export<T>& e, int64_t r) { return e.row < r; };
  const Export<T>* end = scan.exports + scan.export_count;
  const Export<T>* next = std::lower_bound(scan.exports, end, index, before);
  int64_t first = 0;
  do {  // a row of no tokens still hands its state on
    const int64_t count = std::min(kBlock, row.count - first);
    const Export<T>* begin = next;
    while (next < end && next->row == index && next->after <= first + count) ++next;
    for (int64_t p = 0; p < parts; ++p) {
      const T* ahead =
          p + 1 < parts ? part_of(row.initial, scan.shape, sources[p + 1].part) : following;
      run_block(scan, sources[p], index, {row, first, count, begin, next}, states + p * stride,
                ahead, scratch);
    }
    first += count;
  } while (first < row.count);
}

}  // namespace detail

// Tasks begin .. end-1 of a call, task = part * rows + row. make_source(part) → a Source with that
// `part`, whose fill(block, row, row number, first, count) prepares tokens first .. first+count-1
// of a row.
template <class T, class MakeSource>
void run_tasks(const Scan<T>& scan, MakeSource&& make_source, int64_t begin, int64_t end,
               Scratch<T>& scratch) {
  const int64_t B = scan.row_count, last = (end + B - 1) / B;
  const int64_t bytes = scan.part_width() * scan.shape.K * static_cast<int64_t>(sizeof(T));
  const int64_t together = std::max<int64_t>(1, kTogetherBytes / std::max<int64_t>(1, bytes));
  for (int64_t group = begin / B; group < last; group += together) {
    const int64_t stop = std::min(group + together, last);
    std::vector<decltype(make_source(Part{}))> sources;
    scratch.sources = 0;
    for (int64_t g = group; g < stop; ++g) sources.push_back(make_source(scan.part(g)));
    for (int64_t r = 0; r < B; ++r) {
      // the parts of this row that are among the tasks
      const int64_t from = std::max(group, (begin - r + B - 1) / B) - group;
      const int64_t to = std::min(stop, (end - r + B - 1) / B) - group;
      if (from >= to) continue;
      const T* following = r + 1 < B ? scan.rows[r + 1].initial : nullptr;
      detail::run_row(scan, sources.data() + from, to - from, r,
                      detail::part_of(following, scan.shape, sources[from].part), scratch);
    }
  }
}

// q . k, and zeros behind the value channels, once the rest of a block is there.
template <class T>
void complete(const Block<T>& block, int64_t K, int64_t channels, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    block.kq[t] = dot(block.k + t * K, block.q + t * K, K);
    std::fill(block.v + t * block.v_stride + channels, block.v + (t + 1) * block.v_stride, T(0));
  }
}

// Operands as the recurrence is written: q, k (normalised), g [N, H, K]; v [N, H, V]; beta [N, H].
template <class T>
struct GivenOperands {
  const T *q, *k, *g, *v, *beta;
  T scale;
  Shape shape;
  Part part;

  void fill(const Block<T>& block, const Row<T>& row, int64_t, int64_t first,
            int64_t count) const {
    const int64_t H = shape.heads, K = shape.K, V = shape.V;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t head = (row.first + first + t) * H + part.head;
      for (int64_t d = 0; d < K; ++d) block.q[t * K + d] = q[head * K + d] * scale;
      for (int64_t d = 0; d < K; ++d) block.alpha[t * K + d] = exponential(g[head * K + d]);
      std::copy_n(k + head * K, K, block.k + t * K);
      std::copy_n(v + head * V + part.column, part.channels, block.v + t * block.v_stride);
      block.beta[t] = beta[head];
      if (first + kBlock + t < row.count) {
        const int64_t next = head + kBlock * H;
        for (const T* x : {q, k, g}) prefetch(x + next * K, K);
        prefetch(v + next * V + part.column, part.channels);
      }
    }
    complete(block, K, part.channels, count);
  }
};

}  // namespace kda
