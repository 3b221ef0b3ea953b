// The router and the routed experts as torch sees them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <tuple>

#include "checks.hpp"
#include "experts.h"
#include "functions.hpp"
#include "routing.h"
#include "scratch.h"

namespace kda::ops {
namespace {

using namespace kda::checks;

constexpr int64_t kWorthAThread = 1 << 16;  // products

// Choices of experts [N, k], contiguous, if each is in 0 .. count - 1.
Tensor check_choices(const Tensor& experts, int64_t N, int64_t k, int64_t count) {
  check_dtype("experts", experts, at::kLong);
  check_shape("experts", experts, {N, k});
  const Tensor choices = experts.contiguous();
  const int64_t* chosen = data<int64_t>(choices);
  for (int64_t i = 0; i < N * k; ++i) {
    TORCH_CHECK_VALUE(chosen[i] >= 0 && chosen[i] < count, "experts names expert ", chosen[i],
                      " of 0..", count - 1);
  }
  return choices;
}

}  // namespace

std::tuple<Tensor, Tensor> route(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                 int64_t top_k, int64_t groups, int64_t kept_groups,
                                 bool renormalise, double factor,
                                 const std::optional<Tensor>& experts) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2, "x and weight must have two axes, got ",
                    x.sizes(), " and ", weight.sizes());
  const int64_t N = x.size(0), hidden = x.size(1), E = weight.size(0);
  const auto element = weight.scalar_type(), type = wide(element);
  check_shape("weight", weight, {E, hidden});
  check_shape("bias", bias, {E});
  check_dtype("x", x, x.scalar_type());
  check_dtype("weight", weight, element);
  check_dtype("bias", bias, bias.scalar_type());
  TORCH_CHECK_VALUE(wide(x.scalar_type()) == type, "x and weight must both be Double or neither, ",
                    "got ", x.scalar_type(), " and ", element);
  TORCH_CHECK_VALUE(groups > 0 && E % groups == 0 && kept_groups > 0 && kept_groups <= groups,
                    "groups must divide ", E, " experts, and kept_groups be 1..groups; got ",
                    groups, " and ", kept_groups);
  TORCH_CHECK_VALUE(top_k > 0 && top_k <= E, "top_k must be 1..", E, ", got ", top_k);
  const Tensor tokens = typed(x, type).contiguous(), matrix = weight.contiguous();
  const Tensor offsets = typed(bias, type).contiguous();
  const Tensor chosen = experts ? check_choices(*experts, N, top_k, E).clone()
                                : empty({N, top_k}, at::kLong);
  const Tensor weights = empty({N, top_k}, type);
  const kda::RouterRule rule{top_k, groups, kept_groups, renormalise, factor};
  std::atomic<bool> enough = true;
  with_types("weight", element, [&](auto number, auto memory) {
    using T = decltype(number);
    using A = decltype(memory);
    const int64_t pieces = (N + kda::kFewRows - 1) / kda::kFewRows;
    const int64_t grain = kWorthAThread / (kda::kFewRows * hidden * E + 1) + 1;
    at::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
      thread_local kda::Buffer<T> numbers;
      thread_local kda::Buffer<int64_t> places;
      T* scores = numbers.at_least((kda::kFewRows + 1) * E + groups);
      const kda::RouterRoom<T> room{scores + kda::kFewRows * E,
                                    scores + (kda::kFewRows + 1) * E, places.at_least(groups)};
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece * kda::kFewRows, count = std::min(kda::kFewRows, N - first);
        kda::few_rows(kda::FewRows<T, A, T>{data<T>(tokens) + first * hidden, hidden, count,
                                            data<A>(matrix), hidden, hidden, scores, E},
                      0, E);
        for (int64_t i = 0; i < count * E; ++i) scores[i] = kda::sigmoid(scores[i]);
        for (int64_t i = 0; i < count; ++i) {
          int64_t* mine = mutable_data<int64_t>(chosen) + (first + i) * top_k;
          const T* own = scores + i * E;
          if (!experts && !kda::choose(mine, own, data<T>(offsets), E, rule, room)) enough = false;
          kda::weigh(mutable_data<T>(weights) + (first + i) * top_k, own, mine, rule);
        }
      }
    });
  });
  TORCH_CHECK_VALUE(enough, "fewer than ", top_k,
                    " experts have a score above -inf for some token");
  return {chosen, weights};
}

Tensor mix_experts(const Tensor& x, const Tensor& experts, const Tensor& weights,
                   const Tensor& w13, const Tensor& w2, bool situ, double beta,
                   std::optional<double> linear_beta) {
  TORCH_CHECK_VALUE(x.dim() == 2 && w2.dim() == 3 && experts.dim() == 2,
                    "x, w2 and experts must have two, three and two axes, got ", x.sizes(), ", ",
                    w2.sizes(), " and ", experts.sizes());
  const int64_t N = x.size(0), L = x.size(1), k = experts.size(1), E = w2.size(0), I = w2.size(2);
  check_shape("w13", w13, {E, 2 * I, L});
  check_shape("w2", w2, {E, L, I});
  check_shape("weights", weights, {N, k});
  const auto element = x.scalar_type(), type = wide(element);
  check_dtype("x", x, element);
  check_dtype("w13", w13, element);
  check_dtype("w2", w2, element);
  check_dtype("weights", weights, type);
  TORCH_CHECK_VALUE(w13.is_contiguous() && w2.is_contiguous(), "w13 and w2 must be contiguous, ",
                    "got strides ", w13.strides(), " and ", w2.strides());
  const Tensor choices = check_choices(experts, N, k, E);
  const Tensor tokens = L < 2 || x.stride(1) == 1 ? x : x.contiguous();
  const Tensor shares = weights.contiguous();
  const Tensor y = empty({N, L}, type);
  const Tensor out = empty({N * k, L}, type);
  const auto plan = kda::plan_experts(data<int64_t>(choices), N * k, E);
  with_types("x", element, [&](auto number, auto memory) {
    using T = decltype(number);
    using A = decltype(memory);
    const kda::Experts<A> matrices{data<A>(w13), data<A>(w2), L, I, {situ, beta, linear_beta}};
    const kda::Chosen<A> chosen{data<A>(tokens), tokens.stride(0), k};
    const int64_t grain = kWorthAThread / (3 * I * L + 1) + 1;
    at::parallel_for(0, count(plan.pieces), grain, [&](int64_t begin, int64_t end) {
      thread_local kda::ExpertRoom<T> room;
      for (int64_t p = begin; p < end; ++p) {
        kda::run_piece(plan, plan.pieces[p], matrices, chosen, mutable_data<T>(out), room);
      }
    });
    at::parallel_for(0, N, kWorthAThread / (k * L + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        kda::add_up(mutable_data<T>(y) + t * L, data<T>(out) + t * k * L,
                    data<T>(shares) + t * k, k, L);
      }
    });
  });
  return y;
}

}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def(
      "route(Tensor x, Tensor weight, Tensor bias, int top_k, int groups, int kept_groups, "
      "bool renormalise, float factor, Tensor? experts) -> (Tensor, Tensor)");
  m.def(
      "mix_experts(Tensor x, Tensor experts, Tensor weights, Tensor w13, Tensor w2, bool situ, "
      "float beta, float? linear_beta) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) {
  m.impl("route", TORCH_FN(route));
  m.impl("mix_experts", TORCH_FN(mix_experts));
}
