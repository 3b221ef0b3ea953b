// Products with a matrix as torch sees them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "checks.hpp"
#include "few_rows.h"
#include "functions.hpp"

namespace kda::ops {
namespace {

using namespace kda::checks;

constexpr int64_t kWorthAThread = 1 << 16;  // numbers of the matrix
constexpr int64_t kPassRows = 8;            // of more rows torch's product is faster

void check_matrix(const char* name, const Tensor& x, at::ScalarType dtype) {
  check_dtype(name, x, dtype);
  TORCH_CHECK_VALUE(x.dim() == 2 && (x.size(1) < 2 || x.stride(1) == 1), name,
                    " must have two axes, the last one contiguous; got ", x.sizes(), " strided ",
                    x.strides());
}

Tensor few_rows(const Tensor& x, const Tensor& weight) {
  const auto dtype = x.scalar_type();
  check_matrix("x", x, dtype);
  check_matrix("weight", weight, dtype);
  const int64_t M = x.size(0), N = weight.size(0), K = x.size(1);
  TORCH_CHECK_VALUE(weight.size(1) == K, "x has rows of ", K, " numbers, weight of ",
                    weight.size(1));
  Tensor out = empty({M, N}, dtype);
  with_types("x", dtype, [&](auto number, auto element) {
    using T = decltype(number);
    using A = decltype(element);
    const Tensor wide_x = typed(x, wide(dtype));
    const kda::FewRows<T, A, A> product{data<T>(wide_x), wide_x.stride(0),     M,
                                     data<A>(weight), weight.stride(0),     K,
                                     mutable_data<A>(out), N};
    at::parallel_for(0, N, kWorthAThread / (K + 1) + 1,
                     [&](int64_t first, int64_t last) { kda::few_rows(product, first, last); });
  });
  return out;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight) {
  const bool few = x.dim() == 2 && x.size(0) <= kPassRows;
  return few ? few_rows(x, weight) : at::linear(x, weight);
}

}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def("few_rows(Tensor x, Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor weight) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) {
  m.impl("few_rows", TORCH_FN(few_rows));
  m.impl("linear", TORCH_FN(linear));
}
