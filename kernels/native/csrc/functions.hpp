// The operators as C++ functions of tensors, for operators that are made of others: a call from one
// to the next goes past torch's dispatcher. What each computes stands where it is defined.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "tensors.hpp"

namespace kda::ops {

using MaybeTensor = std::optional<Tensor>;

// x W^T: for few rows one pass over the matrix, for many torch's product.
Tensor linear(const Tensor& x, const Tensor& weight);

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor gated_norm(const Tensor& o, const Tensor& gate, const Tensor& weight, double eps);
Tensor gated(const Tensor& o, const Tensor& gate);
Tensor glu(const Tensor& gate_up, bool situ, double beta, std::optional<double> linear_beta);
Tensor mix_norm(const Tensor& prefix, const Tensor& bank, const Tensor& bank_rms,
                const Tensor& norm, const Tensor& proj, const Tensor& weight, double eps);

std::tuple<Tensor, Tensor> route(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                 int64_t top_k, int64_t groups, int64_t kept_groups,
                                 bool renormalise, double factor, const MaybeTensor& experts);
Tensor mix_experts(const Tensor& x, const Tensor& experts, const Tensor& weights,
                   const Tensor& w13, const Tensor& w2, bool situ, double beta,
                   std::optional<double> linear_beta);

Tensor kda_rows_(const Tensor& qkv, const Tensor& gate, const Tensor& beta,
                 const Tensor& conv_weight, const Tensor& A_log, const Tensor& dt_bias,
                 std::optional<double> lower_bound, Tensor& recurrent, Tensor& conv,
                 IntArrayRef query_start, const Tensor& slots, IntArrayRef resumed,
                 IntArrayRef export_rows, IntArrayRef export_after, const Tensor& export_slots);
// ValueError for rows, slots or exports that do not fit N tokens and a pool of so many slots.
void check_slot_rows(int64_t tokens, int64_t slot_count, IntArrayRef query_start,
                     const Tensor& slots, IntArrayRef resumed, IntArrayRef export_rows,
                     IntArrayRef export_after, const Tensor& export_slots);
// ValueError for spans and pages that do not fit N tokens and a pool of so many pages.
void check_paged_rows(const Tensor& spans, const Tensor& pages, int64_t tokens,
                      int64_t pool_pages, int64_t page);
Tensor latent_attention(const Tensor& q, const Tensor& pool, const Tensor& kv_b,
                        const Tensor& spans, const Tensor& pages);

// The projections of x side by side, and what is made of two of them: the decay's logits, and the
// output gate's if it has a g_b (else no numbers).
std::tuple<Tensor, Tensor, Tensor> kda_inputs(const Tensor& x, const Tensor& in_proj,
                                              IntArrayRef widths, const Tensor& f_b,
                                              const MaybeTensor& g_b, int64_t heads);
Tensor kda_output(const Tensor& o, const Tensor& gate, const Tensor& norm, double eps,
                  const Tensor& o_proj);
// The same: queries if they have a q_b (else no numbers), and latent rows.
std::tuple<Tensor, Tensor, Tensor> mla_inputs(const Tensor& x, const Tensor& in_proj,
                                              IntArrayRef widths, const MaybeTensor& q_norm,
                                              const MaybeTensor& q_b, const Tensor& kv_norm,
                                              double eps, int64_t heads);
Tensor mla_output(const Tensor& o, const Tensor& gate, const Tensor& o_proj);
Tensor mlp(const Tensor& x, const Tensor& gate_up, const Tensor& down, bool situ, double beta,
           std::optional<double> linear_beta);
Tensor moe(const Tensor& x, const Tensor& router, const Tensor& bias, const MaybeTensor& in_proj,
           IntArrayRef widths, const Tensor& w13, const Tensor& w2, const MaybeTensor& norm,
           double eps, const MaybeTensor& up, const MaybeTensor& shared_down, int64_t top_k,
           int64_t groups, int64_t kept_groups, bool renormalise, double factor, bool situ,
           double beta, std::optional<double> linear_beta, const MaybeTensor& experts);

}  // namespace kda::ops
