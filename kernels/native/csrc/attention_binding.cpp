// Latent attention as torch sees it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "checks.hpp"
#include "functions.hpp"
#include "latent_attention.h"

namespace kda::ops {
namespace {

using namespace kda::checks;

// Queries first .. first + count - 1, (token, head) in that order, of an absorbed row whose first
// token is number `offset` among the absorbed.
struct AbsorbedPiece {
  const kda::AttentionRow* row;
  int64_t offset, first, count;
};

void check_tables(const Tensor& spans, const Tensor& pages) {
  check_dtype("spans", spans, at::kLong);
  check_dtype("pages", pages, at::kLong);
  TORCH_CHECK_VALUE(pages.dim() == 2, "pages must have two axes, got ", pages.sizes());
  check_shape("spans", spans, {pages.size(0), 3});
}

// spans [B, 3] and pages [B, P] as rows, if they lie within N tokens and the pool.
std::vector<kda::AttentionRow> checked_rows(const Tensor& spans, const Tensor& pages, int64_t N,
                                            int64_t pool_pages, int64_t page) {
  std::vector<kda::AttentionRow> rows;
  const int64_t B = spans.size(0), P = pages.size(1);
  const int64_t *span = data<int64_t>(spans), *named = data<int64_t>(pages);
  int64_t end = 0;
  for (int64_t b = 0; b < B; ++b, span += 3, named += P) {
    const kda::AttentionRow row{span[0], span[1], span[2], named};
    TORCH_CHECK_VALUE(row.first >= end && row.count > 0 && row.total >= row.count &&
                          row.count <= N - row.first,
                      "spans must be (first token, tokens, latent rows) in order, within ", N,
                      " tokens; got (", row.first, ", ", row.count, ", ", row.total, ") in row ",
                      b);
    end = row.first + row.count;
    const int64_t needed = row.total / page + (row.total % page > 0);  // no sum to overflow
    TORCH_CHECK_VALUE(needed <= P, "row ", b, " needs ", needed, " pages, got ", P);
    for (int64_t i = 0; i < needed; ++i) {
      TORCH_CHECK_VALUE(named[i] >= 0 && named[i] < pool_pages, "row ", b, " names page ",
                        named[i], " of 0..", pool_pages - 1);
    }
    rows.push_back(row);
  }
  return rows;
}

template <class T>
kda::AttentionRoom<T>& room() {
  thread_local kda::AttentionRoom<T> mine;
  return mine;
}

// act(i) for i of 0 .. count - 1, each on whichever thread is free.
template <class Act>
void each(int64_t count, Act&& act) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) act(i);
  });
}

template <class T, class A>
void run_absorbed(const kda::LatentAttention<T, A>& call,
                  const std::vector<kda::AttentionRow>& rows, at::ScalarType wide) {
  const kda::LatentShape& s = call.shape;
  std::vector<int64_t> tokens;
  for (const auto& row : rows) {
    for (int64_t t = 0; t < row.count; ++t) tokens.push_back(row.first + t);
  }
  // a query's bits do not depend on how many are taken together
  const int64_t queries = count(tokens) * s.heads, threads = at::get_num_threads();
  const int64_t together = std::clamp<int64_t>((queries + threads - 1) / threads, 1, kda::kFewRows);
  std::vector<AbsorbedPiece> pieces;
  int64_t offset = 0;
  for (const auto& row : rows) {
    const int64_t own = row.count * s.heads;
    for (int64_t first = 0; first < own; first += together) {
      pieces.push_back({&row, offset, first, std::min(together, own - first)});
    }
    offset += row.count;
  }
  const Tensor q = empty({count(tokens), s.heads, s.row()}, wide);
  const Tensor latent = empty({count(tokens), s.heads, s.latent}, wide);
  const kda::Absorbed<T> absorbed{tokens.data(), count(tokens), mutable_data<T>(q),
                                  mutable_data<T>(latent)};
  each(s.heads, [&](int64_t head) { kda::absorb(call, absorbed, head, room<T>()); });
  each(count(pieces), [&](int64_t i) {
    const AbsorbedPiece& piece = pieces[i];
    kda::attend_absorbed(call, absorbed, *piece.row, piece.offset, piece.first, piece.count,
                         room<T>());
  });
  each(s.heads, [&](int64_t head) { kda::expand(call, absorbed, head, room<T>()); });
}

}  // namespace

void check_paged_rows(const Tensor& spans, const Tensor& pages, int64_t tokens,
                      int64_t pool_pages, int64_t page) {
  check_tables(spans, pages);
  checked_rows(spans.contiguous(), pages.contiguous(), tokens, pool_pages, page);
}

Tensor latent_attention(const Tensor& q, const Tensor& pool, const Tensor& kv_b,
                        const Tensor& spans, const Tensor& pages) {
  TORCH_CHECK_VALUE(q.dim() == 3 && pool.dim() == 3 && kv_b.dim() == 3,
                    "q, pool and kv_b must have three axes, got ", q.sizes(), ", ", pool.sizes(),
                    " and ", kv_b.sizes());
  const int64_t N = q.size(0), H = q.size(1), L = kv_b.size(2), R = pool.size(2) - L;
  const int64_t nope = q.size(2) - R, V = kv_b.size(1) - nope, page = pool.size(1);
  TORCH_CHECK_VALUE(H > 0 && L > 0 && R >= 0 && nope >= 0 && V > 0 && page > 0,
                    "q [N, H, nope+R], pool [pages, page, L+R] and kv_b [H, nope+V, L] do not ",
                    "fit: ", q.sizes(), ", ", pool.sizes(), " and ", kv_b.sizes());
  check_shape("kv_b", kv_b, {H, nope + V, L});
  const auto element = q.scalar_type(), type = wide(element);
  check_dtype("q", q, element);
  check_dtype("pool", pool, element);
  check_dtype("kv_b", kv_b, element);
  TORCH_CHECK_VALUE((pool.size(2) < 2 || pool.stride(2) == 1) &&
                        (page < 2 || pool.stride(1) == pool.size(2)),
                    "pool must have pages that are contiguous inside, got strides ",
                    pool.strides());
  check_tables(spans, pages);
  const Tensor table = pages.contiguous(), numbers = spans.contiguous();
  const auto rows = checked_rows(numbers, table, N, pool.size(0), page);

  const kda::LatentShape shape{H, nope, R, V, L};
  std::vector<kda::AttentionRow> few, many;
  int64_t tokens = 0;
  for (const auto& row : rows) {
    (shape.absorbs(row.count) ? few : many).push_back(row);
    tokens += row.count;
  }
  const Tensor heads = q.stride(2) == 1 && q.stride(1) == q.size(2) ? q : q.contiguous();
  const Tensor matrix = kv_b.contiguous();
  Tensor o = empty({N, H, V}, type);
  if (tokens < N) o.zero_();  // tokens of no row
  with_types("q", element, [&](auto number, auto memory) {
    using T = decltype(number);
    using A = decltype(memory);
    const kda::LatentAttention<T, A> call{shape,          data<A>(heads), heads.stride(0),
                                          data<A>(pool),  pool.stride(0), page,
                                          data<A>(matrix), mutable_data<T>(o)};
    if (!few.empty()) run_absorbed(call, few, type);
    each(count(many) * H, [&](int64_t i) {
      kda::attend_materialised(call, many[i / H], i % H, room<T>());
    });
  });
  return o;
}

}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def(
      "latent_attention(Tensor q, Tensor pool, Tensor kv_b, Tensor spans, Tensor pages) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) { m.impl("latent_attention", TORCH_FN(latent_attention)); }
