// What every operator asks of its tensors before it touches memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <vector>

#include "elementwise.h"
#include "tensors.hpp"

namespace kda::checks {

template <class Sequence>
int64_t count(const Sequence& numbers) {
  return static_cast<int64_t>(numbers.size());
}

inline void check_shape(const char* name, const Tensor& x, IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.sizes() == shape, name, " must be ", shape, ", got ", x.sizes());
}

inline void check_dtype(const char* name, const Tensor& x, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.scalar_type() == dtype, name, " must be ", dtype, ", got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.device().is_cpu(), name, " must be on the CPU, got ", x.device());
}

// Rows of a packed batch: row r owns tokens query_start[r] .. query_start[r + 1] - 1.
inline void check_starts(IntArrayRef query_start, int64_t tokens) {
  TORCH_CHECK_VALUE(!query_start.empty() && query_start.front() == 0 &&
                        query_start.back() == tokens &&
                        std::is_sorted(query_start.begin(), query_start.end()),
                    "query_start must rise from 0 to the ", tokens, " tokens, got ", query_start);
}

// Exports after `after` tokens of their rows.
inline void check_exports(IntArrayRef rows, IntArrayRef after, IntArrayRef query_start) {
  TORCH_CHECK_VALUE(rows.size() == after.size(), "exports must name as many rows as offsets");
  const int64_t B = count(query_start) - 1;
  for (size_t e = 0; e < rows.size(); ++e) {
    TORCH_CHECK_VALUE(rows[e] >= 0 && rows[e] < B, "an export names row ", rows[e], " of ", B);
    const int64_t length = query_start[rows[e] + 1] - query_start[rows[e]];
    TORCH_CHECK_VALUE(after[e] >= 1 && after[e] <= length, "export of row ", rows[e], " after ",
                      after[e], " tokens: offset must be 1..", length);
  }
}

inline std::vector<int64_t> integers(const char* name, const Tensor& x, int64_t count) {
  check_dtype(name, x, at::kLong);
  check_shape(name, x, {count});
  const Tensor whole = x.contiguous();
  const int64_t* from = whole.const_data_ptr<int64_t>();
  return {from, from + count};
}

// States of a pool: entries of one slot side by side, slots any distance apart.
inline void check_pool(const char* name, const Tensor& pool, IntArrayRef slot_shape) {
  TORCH_CHECK_VALUE(pool.dim() > 0 && pool.sizes().slice(1) == slot_shape, name,
                    " must be [slots] + ", slot_shape, ", got ", pool.sizes());
  int64_t expected = 1;
  for (int64_t d = pool.dim() - 1; d > 0; expected *= pool.size(d--)) {
    TORCH_CHECK_VALUE(pool.size(d) == 1 || pool.stride(d) == expected, name,
                      " must have slots that are contiguous inside, got strides ", pool.strides());
  }
  TORCH_CHECK_VALUE(pool.size(0) < 2 || pool.stride(0) >= expected, name,
                    " must have slots that do not overlap, got strides ", pool.strides());
}

// Columns of x in parts of these widths.
template <size_t count>
std::array<Tensor, count> split(const Tensor& x, IntArrayRef widths) {
  TORCH_CHECK_VALUE(widths.size() == count, "widths must be ", count, " numbers, got ", widths);
  std::array<Tensor, count> parts;
  int64_t first = 0;
  for (size_t i = 0; i < count; first += widths[i++]) {
    TORCH_CHECK_VALUE(widths[i] >= 0 && first + widths[i] <= x.size(1), "widths must add up to the ",
                      x.size(1), " rows of in_proj, got ", widths);
    parts[i] = columns(x, first, widths[i]);
  }
  TORCH_CHECK_VALUE(first == x.size(1), "widths must add up to the ", x.size(1),
                    " rows of in_proj, got ", widths);
  return parts;
}

// [N, heads * width] → [N, heads, width].
inline Tensor by_heads(const Tensor& x, int64_t heads) {
  TORCH_CHECK_VALUE(heads > 0 && x.size(1) % heads == 0, x.size(1), " channels are not ", heads,
                    " equal heads");
  const int64_t width = x.size(1) / heads;
  return view_of(x, {x.size(0), heads, width}, {x.stride(0), width * x.stride(1), x.stride(1)}, 0);
}

// Calls act(T{}, A{}) with the number type of a tensor's memory, A, and the wide one, T.
template <class Act>
void with_types(const char* name, at::ScalarType dtype, Act&& act) {
  switch (dtype) {
    case at::kFloat: return act(float{}, float{});
    case at::kDouble: return act(double{}, double{});
    case at::kBFloat16: return act(float{}, BFloat16{});
    default:
      TORCH_CHECK_VALUE(false, name, " must be Float, Double or BFloat16, got ", dtype);
  }
}

// The type that arithmetic on a type is done in.
inline at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

template <class A>
const A* data(const Tensor& x) {
  return static_cast<const A*>(x.const_data_ptr());
}

template <class A>
A* mutable_data(const Tensor& x) {
  return static_cast<A*>(x.mutable_data_ptr());
}

}  // namespace kda::checks
