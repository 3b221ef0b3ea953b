// What sublayers do around their states, one operator each: kernels/sublayers.py with the other
// operators in its functions' places. Of one token the calls between them are most of the time.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include "checks.hpp"
#include "functions.hpp"

namespace kda::ops {
namespace {

using namespace kda::checks;

void check_tokens(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x must be [tokens, hidden], got ", x.sizes());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> kda_inputs(const Tensor& x, const Tensor& in_proj,
                                              IntArrayRef widths, const Tensor& f_b,
                                              const MaybeTensor& g_b, int64_t heads) {
  check_tokens(x);
  const Tensor fused = linear(x, in_proj);
  const auto [qkv, f_a, beta, g] = split<4>(fused, widths);
  return {fused, by_heads(linear(f_a, f_b), heads),
          g_b ? linear(g, *g_b) : empty({0}, x.scalar_type())};
}

Tensor kda_output(const Tensor& o, const Tensor& gate, const Tensor& norm, double eps,
                  const Tensor& o_proj) {
  return linear(gated_norm(o, gate, norm, eps), o_proj);
}

std::tuple<Tensor, Tensor, Tensor> mla_inputs(const Tensor& x, const Tensor& in_proj,
                                              IntArrayRef widths, const MaybeTensor& q_norm,
                                              const MaybeTensor& q_b, const Tensor& kv_norm,
                                              double eps, int64_t heads) {
  check_tokens(x);
  TORCH_CHECK_VALUE(q_norm.has_value() == q_b.has_value(), "q_norm and q_b go together");
  const Tensor fused = linear(x, in_proj);
  const auto [q_a, c, r, gate] = split<4>(fused, widths);
  const Tensor q = q_b ? by_heads(linear(rms_norm(q_a, *q_norm, eps), *q_b), heads)
                       : empty({0}, x.scalar_type());
  return {fused, q, at::cat({rms_norm(c, kv_norm, eps), r}, 1)};
}

Tensor mla_output(const Tensor& o, const Tensor& gate, const Tensor& o_proj) {
  const Tensor flat = o.flatten(1);
  return linear(gate.size(1) > 0 ? gated(flat, gate) : typed(flat, gate.scalar_type()), o_proj);
}

Tensor mlp(const Tensor& x, const Tensor& gate_up, const Tensor& down, bool situ, double beta,
           std::optional<double> linear_beta) {
  check_tokens(x);
  return linear(glu(linear(x, gate_up), situ, beta, linear_beta), down);
}

Tensor moe(const Tensor& x, const Tensor& router, const Tensor& bias, const MaybeTensor& in_proj,
           IntArrayRef widths, const Tensor& w13, const Tensor& w2, const MaybeTensor& norm,
           double eps, const MaybeTensor& up, const MaybeTensor& shared_down, int64_t top_k,
           int64_t groups, int64_t kept_groups, bool renormalise, double factor, bool situ,
           double beta, std::optional<double> linear_beta, const MaybeTensor& experts) {
  check_tokens(x);
  const auto [chosen, shares] =
      route(x, router, bias, top_k, groups, kept_groups, renormalise, factor, experts);
  Tensor routed = x, gate_up;
  if (in_proj) {
    const auto [latent, shared] = split<2>(linear(x, *in_proj), widths);
    if (widths[0] > 0) routed = latent;
    gate_up = shared;
  }
  Tensor y = typed(mix_experts(routed, chosen, shares, w13, w2, situ, beta, linear_beta),
                   x.scalar_type());
  if (norm) y = rms_norm(y, *norm, eps);
  if (up) y = linear(y, *up);
  if (shared_down) {
    TORCH_CHECK_VALUE(gate_up.defined(), "shared experts need an in_proj");
    y = at::add(y, linear(glu(gate_up, situ, beta, linear_beta), *shared_down));
  }
  return y;
}

}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def(
      "kda_inputs(Tensor x, Tensor in_proj, int[] widths, Tensor f_b, Tensor? g_b, int heads) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("kda_output(Tensor o, Tensor gate, Tensor norm, float eps, Tensor o_proj) -> Tensor");
  m.def(
      "mla_inputs(Tensor x, Tensor in_proj, int[] widths, Tensor? q_norm, Tensor? q_b, "
      "Tensor kv_norm, float eps, int heads) -> (Tensor, Tensor, Tensor)");
  m.def("mla_output(Tensor o, Tensor gate, Tensor o_proj) -> Tensor");
  m.def(
      "mlp(Tensor x, Tensor gate_up, Tensor down, bool situ, float beta, float? linear_beta) -> "
      "Tensor");
  m.def(
      "moe(Tensor x, Tensor router, Tensor bias, Tensor? in_proj, int[] widths, Tensor w13, "
      "Tensor w2, Tensor? norm, float eps, Tensor? up, Tensor? shared_down, int top_k, "
      "int groups, int kept_groups, bool renormalise, float factor, bool situ, float beta, "
      "float? linear_beta, Tensor? experts) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) {
  m.impl("kda_inputs", TORCH_FN(kda_inputs));
  m.impl("kda_output", TORCH_FN(kda_output));
  m.impl("mla_inputs", TORCH_FN(mla_inputs));
  m.impl("mla_output", TORCH_FN(mla_output));
  m.impl("mlp", TORCH_FN(mlp));
  m.impl("moe", TORCH_FN(moe));
}
