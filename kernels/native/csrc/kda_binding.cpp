// The KDA operators as torch sees them: checks first, then pointers, then torch's own threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "checks.hpp"
#include "functions.hpp"
#include "layer.h"
#include "scan.h"

namespace kda::ops {
namespace {

using namespace kda::checks;

template <class T>
kda::Scratch<T>& scratch() {
  thread_local kda::Scratch<T> mine;
  return mine;
}

// Tasks on torch's threads, at least about 64k state updates on each.
template <class T, class MakeSource>
void run_parallel(kda::Scan<T>& scan, int64_t tokens, MakeSource&& make_source) {
  scan.parts = kda::parts_for<T>(scan.shape, scan.row_count, at::get_num_threads());
  const int64_t tasks = scan.tasks();
  if (tasks == 0) return;
  const int64_t each = tokens * scan.shape.heads * scan.shape.K * scan.shape.V / tasks;
  at::parallel_for(0, tasks, (1 << 16) / (each + 1) + 1, [&](int64_t begin, int64_t end) {
    kda::Scratch<T>& mine = scratch<T>();
    kda::run_tasks(
        scan, [&](const kda::Part& part) { return make_source(part, mine); }, begin, end, mine);
  });
}

template <class T>
void sort_exports(std::vector<kda::Export<T>>& exports) {
  std::stable_sort(exports.begin(), exports.end(), [](const auto& a, const auto& b) {
    return std::tie(a.row, a.after) < std::tie(b.row, b.after);
  });
}

template <class T>
void scan_given(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const Tensor& beta, const Tensor& S0, IntArrayRef query_start,
                IntArrayRef export_rows, IntArrayRef export_after, double scale, Tensor& o,
                Tensor& S, Tensor& exported) {
  const int64_t B = S0.size(0), one = S0.numel() / std::max<int64_t>(B, 1);
  std::vector<kda::Row<T>> rows;
  for (int64_t r = 0; r < B; ++r) {
    rows.push_back({query_start[r], query_start[r + 1] - query_start[r],
                    S0.const_data_ptr<T>() + r * one, S.mutable_data_ptr<T>() + r * one});
  }
  std::vector<kda::Export<T>> exports;
  for (size_t e = 0; e < export_rows.size(); ++e) {
    exports.push_back({export_rows[e], export_after[e], exported.mutable_data_ptr<T>() + e * one});
  }
  sort_exports(exports);
  const kda::Shape shape{q.size(1), q.size(2), v.size(2)};
  kda::Scan<T> scan{shape, rows.data(), B, exports.data(), count(exports),
                    o.mutable_data_ptr<T>(), 1};
  run_parallel(scan, q.size(0), [&](const kda::Part& part, kda::Scratch<T>&) {
    return kda::GivenOperands<T>{q.const_data_ptr<T>(),
                                 k.const_data_ptr<T>(),
                                 g.const_data_ptr<T>(),
                                 v.const_data_ptr<T>(),
                                 beta.const_data_ptr<T>(),
                                 static_cast<T>(scale),
                                 shape,
                                 part};
  });
}

std::tuple<Tensor, Tensor, Tensor> kda_scan(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& g, const Tensor& beta, const Tensor& S0,
                                            IntArrayRef query_start, IntArrayRef export_rows,
                                            IntArrayRef export_after, double scale) {
  TORCH_CHECK_VALUE(q.dim() == 3 && v.dim() == 3, "q and v must have three axes, got ", q.sizes(),
                    " and ", v.sizes());
  const int64_t N = q.size(0), H = q.size(1), K = q.size(2), V = v.size(2);
  check_starts(query_start, N);
  check_exports(export_rows, export_after, query_start);
  check_shape("k", k, {N, H, K});
  check_shape("v", v, {N, H, V});
  check_shape("g", g, {N, H, K});
  check_shape("beta", beta, {N, H});
  check_shape("S0", S0, {count(query_start) - 1, H, V, K});
  const auto dtype = S0.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble,
                    "S0 must be Float or Double, got ", dtype);
  const std::pair<const char*, const Tensor*> operands[] = {
      {"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}, {"beta", &beta}, {"S0", &S0}};
  for (const auto& [name, x] : operands) check_dtype(name, *x, dtype);
  Tensor o = empty_for_long({N, H, V}, dtype), S = empty(S0.sizes(), dtype);
  Tensor exported = empty({count(export_rows), H, V, K}, dtype);
  const auto run = [&](auto number) {
    scan_given<decltype(number)>(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(),
                                 beta.contiguous(), S0.contiguous(), query_start, export_rows,
                                 export_after, scale, o, S, exported);
  };
  dtype == at::kFloat ? run(float{}) : run(double{});
  return {o, S, exported};
}

// A slot's memory in a pool.
template <class T>
T* slot_of(const Tensor& pool, int64_t slot) {
  return static_cast<T*>(pool.mutable_data_ptr()) + slot * pool.stride(0);
}

struct Slots {
  std::vector<int64_t> rows, exports;
};

// Slots of rows and exports, in range and no real one twice; 0 takes a row that is kept nowhere.
void check_slots(const Slots& slots, int64_t count) {
  std::vector<int64_t> real;
  for (int64_t slot : slots.rows) {
    TORCH_CHECK_VALUE(slot >= 0 && slot < count, "a row names slot ", slot, " of 0..", count - 1);
    if (slot > 0) real.push_back(slot);
  }
  for (int64_t slot : slots.exports) {
    TORCH_CHECK_VALUE(slot > 0 && slot < count, "an export names slot ", slot, " of 1..",
                      count - 1);
    real.push_back(slot);
  }
  std::sort(real.begin(), real.end());
  const auto twice = std::adjacent_find(real.begin(), real.end());
  TORCH_CHECK_VALUE(twice == real.end(), "slot ", *twice, " is named twice");
}

Slots checked_slots(int64_t tokens, int64_t slot_count, IntArrayRef query_start,
                    const Tensor& slots, IntArrayRef resumed, IntArrayRef export_rows,
                    IntArrayRef export_after, const Tensor& export_slots) {
  check_starts(query_start, tokens);
  check_exports(export_rows, export_after, query_start);
  const int64_t B = count(query_start) - 1;
  TORCH_CHECK_VALUE(count(resumed) == B, "resumed must name ", B, " rows");
  Slots named{integers("slots", slots, B),
              integers("export_slots", export_slots, count(export_rows))};
  check_slots(named, slot_count);
  return named;
}

// [N, ...] with everything behind the first axis side by side.
Tensor token_major(const Tensor& x) {
  const Tensor flat = x.dim() == 2 ? x : x.flatten(1);
  return flat.size(1) < 2 || flat.stride(1) == 1 ? flat : flat.contiguous();
}

template <class T, class A>
void run_layer(const Tensor& qkv, const Tensor& gate, const Tensor& beta,
               const kda::LayerWeights<T>& weights, const kda::Shape& shape,
               const Tensor& recurrent, const Tensor& conv, IntArrayRef query_start,
               const Slots& slots, IntArrayRef resumed, IntArrayRef export_rows,
               IntArrayRef export_after, Tensor& o) {
  const int64_t B = count(slots.rows), D = qkv.size(1), W = weights.width;
  std::vector<kda::Row<T>> rows;
  std::vector<kda::RawRow<A>> raw;
  const A* x = static_cast<const A*>(qkv.const_data_ptr());
  for (int64_t r = 0; r < B; ++r) {
    T* state = slot_of<T>(recurrent, slots.rows[r]);
    const A* window = slot_of<A>(conv, slots.rows[r]);
    rows.push_back({query_start[r], query_start[r + 1] - query_start[r],
                    resumed[r] ? state : nullptr, slots.rows[r] > 0 ? state : nullptr});
    raw.push_back({x + query_start[r] * qkv.stride(0), qkv.stride(0), resumed[r] ? window : nullptr,
                   D, W});
  }
  std::vector<kda::Export<T>> exports;
  for (size_t e = 0; e < export_rows.size(); ++e) {
    exports.push_back(
        {export_rows[e], export_after[e], slot_of<T>(recurrent, slots.exports[e])});
  }
  sort_exports(exports);
  const kda::Projections<A> inputs{raw.data(), static_cast<const A*>(gate.const_data_ptr()),
                                   gate.stride(0), static_cast<const A*>(beta.const_data_ptr()),
                                   beta.stride(0)};
  kda::Scan<T> scan{shape, rows.data(), B, exports.data(), count(exports),
                    o.mutable_data_ptr<T>(), 1};
  run_parallel(scan, qkv.size(0), [&](const kda::Part& part, kda::Scratch<T>& mine) {
    return kda::RawOperands<T, A>(weights, inputs, shape, part, mine);
  });
  // every head reads the windows, so they move only now
  for (size_t e = 0; e < export_rows.size(); ++e) {
    kda::write_window(slot_of<A>(conv, slots.exports[e]), D, raw[export_rows[e]], export_after[e],
                      D);
  }
  at::parallel_for(0, B, (1 << 16) / (W * D) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (slots.rows[r] == 0) continue;
      kda::write_window(slot_of<A>(conv, slots.rows[r]), D, raw[r], rows[r].count, D);
    }
  });
}

}  // namespace

void check_slot_rows(int64_t tokens, int64_t slot_count, IntArrayRef query_start,
                     const Tensor& slots, IntArrayRef resumed, IntArrayRef export_rows,
                     IntArrayRef export_after, const Tensor& export_slots) {
  checked_slots(tokens, slot_count, query_start, slots, resumed, export_rows, export_after,
                export_slots);
}

Tensor kda_rows_(const Tensor& qkv, const Tensor& gate, const Tensor& beta,
                 const Tensor& conv_weight, const Tensor& A_log, const Tensor& dt_bias,
                 std::optional<double> lower_bound, Tensor& recurrent, Tensor& conv,
                 IntArrayRef query_start, const Tensor& slots, IntArrayRef resumed,
                 IntArrayRef export_rows, IntArrayRef export_after, const Tensor& export_slots) {
  TORCH_CHECK_VALUE(qkv.dim() == 2 && conv_weight.dim() == 2 && dt_bias.dim() == 2,
                    "qkv, conv_weight and dt_bias must have two axes, got ", qkv.sizes(), ", ",
                    conv_weight.sizes(), " and ", dt_bias.sizes());
  const int64_t N = qkv.size(0), D = qkv.size(1), W = conv_weight.size(1);
  const int64_t H = dt_bias.size(0), K = dt_bias.size(1);
  const int64_t V = H > 0 ? D / H - 2 * K : 0;
  TORCH_CHECK_VALUE(V > 0 && D == H * (2 * K + V), "qkv must have H (2K+V) channels with H = ", H,
                    " and K = ", K, ", got ", D);
  check_shape("gate", gate, {N, H, K});
  check_shape("beta", beta, {N, H});
  check_shape("conv_weight", conv_weight, {D, W});
  TORCH_CHECK_VALUE(W > 0, "conv_weight must have a tap, got ", conv_weight.sizes());
  check_shape("A_log", A_log, {H});
  check_pool("recurrent", recurrent, {H, V, K});
  check_pool("conv", conv, {W - 1, D});
  TORCH_CHECK_VALUE(recurrent.size(0) == conv.size(0), "recurrent has ", recurrent.size(0),
                    " slots, conv has ", conv.size(0));
  const auto activation = qkv.scalar_type();
  TORCH_CHECK_VALUE(
      activation == at::kFloat || activation == at::kDouble || activation == at::kBFloat16,
      "qkv must be Float, Double or BFloat16, got ", activation);
  const auto wide = activation == at::kDouble ? at::kDouble : at::kFloat;
  check_dtype("qkv", qkv, activation);
  check_dtype("gate", gate, activation);
  check_dtype("beta", beta, activation);
  check_dtype("conv", conv, activation);
  check_dtype("recurrent", recurrent, wide);
  const Slots named = checked_slots(N, recurrent.size(0), query_start, slots, resumed, export_rows,
                                    export_after, export_slots);

  const Tensor x = token_major(qkv), r = token_major(gate), b = token_major(beta);
  const Tensor taps = typed(conv_weight, wide).contiguous(), rates = typed(A_log, wide).contiguous();
  const Tensor bias = typed(dt_bias, wide).contiguous();
  Tensor o = empty_for_long({N, H, V}, wide);
  const auto run = [&](auto number, auto element) {
    using T = decltype(number);
    const kda::LayerWeights<T> weights{taps.const_data_ptr<T>(),
                                       W,
                                       rates.const_data_ptr<T>(),
                                       bias.const_data_ptr<T>(),
                                       lower_bound.has_value(),
                                       static_cast<T>(lower_bound.value_or(0))};
    run_layer<T, decltype(element)>(x, r, b, weights, {H, K, V}, recurrent, conv, query_start,
                                    named, resumed, export_rows, export_after, o);
  };
  switch (activation) {
    case at::kDouble: run(double{}, double{}); break;
    case at::kBFloat16: run(float{}, kda::BFloat16{}); break;
    default: run(float{}, float{});
  }
  return o;
}

}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY(kda_native, m) {
  m.def(
      "kda_scan(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor S0, int[] query_start, "
      "int[] export_rows, int[] export_after, float scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "kda_rows_(Tensor qkv, Tensor gate, Tensor beta, Tensor conv_weight, Tensor A_log, "
      "Tensor dt_bias, float? lower_bound, Tensor(a!) recurrent, Tensor(b!) conv, "
      "int[] query_start, Tensor slots, int[] resumed, int[] export_rows, int[] export_after, "
      "Tensor export_slots) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) {
  m.impl("kda_scan", TORCH_FN(kda_scan));
  m.impl("kda_rows_", TORCH_FN(kda_rows_));
}
