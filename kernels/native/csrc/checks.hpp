// What every operator asks of its tensors before it touches memory.
#pragma once

#include <ATen/core/Tensor.h>

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

inline std::vector<int64_t> integers(const char* name, const Tensor& x, int64_t count) {
  check_dtype(name, x, at::kLong);
  check_shape(name, x, {count});
  const Tensor whole = x.contiguous();
  const int64_t* from = whole.const_data_ptr<int64_t>();
  return {from, from + count};
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
