// x W^T: for few rows one pass over the matrix, for many torch's product.
#pragma once

#include <ATen/core/Tensor.h>

namespace kda {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace kda
