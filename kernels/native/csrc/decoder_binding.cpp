// A decoder over slots and pages, from token ids to logits: what the modules of kimi_mini/model.py
// do, with the same operators, and no call from Python between them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/square.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "checks.hpp"
#include "functions.hpp"

namespace kda::ops {
namespace {

using namespace kda::checks;

// Which weights each part of a model has: those that must be there, and (false) those that may.
constexpr std::array<bool, 1> kEmbedding{true};
constexpr std::array<bool, 3> kReading{false, false, true};
constexpr std::array<bool, 8> kKDA{true, true, false, true, true, true, true, true};
constexpr std::array<bool, 6> kMLA{true, false, false, true, true, true};
constexpr std::array<bool, 8> kMoE{true, true, false, true, true, false, false, false};
constexpr std::array<bool, 2> kMLP{true, true};
constexpr std::array<bool, 1> kHead{true};

int64_t count_true(IntArrayRef flags) {
  return std::count_if(flags.begin(), flags.end(), [](int64_t flag) { return flag != 0; });
}

// The weights of a model, in the order in which its parts take them.
class Weights {
 public:
  // ValueError unless they are those of layers of these kinds, as numbers that go together.
  Weights(const c10::List<MaybeTensor>& all, IntArrayRef is_kda, IntArrayRef is_moe) : all_(all) {
    std::vector<bool> must;
    const auto add = [&](const auto& part) { must.insert(must.end(), part.begin(), part.end()); };
    add(kEmbedding);
    for (size_t i = 0; i < is_kda.size(); ++i) {
      add(kReading);
      is_kda[i] ? add(kKDA) : add(kMLA);
      add(kReading);
      is_moe[i] ? add(kMoE) : add(kMLP);
    }
    add(kReading);
    add(kHead);
    TORCH_CHECK_VALUE(all.size() == must.size(), "weights must have ", must.size(),
                      " entries for layers of these kinds, got ", all.size());
    for (size_t i = 0; i < must.size(); ++i) {
      const MaybeTensor weight = all.get(i);
      TORCH_CHECK_VALUE(weight || !must[i], "entry ", i, " of weights must be there");
      if (!weight) continue;
      const auto dtype = weight->scalar_type(), first = all.get(0)->scalar_type();
      TORCH_CHECK_VALUE((dtype == first || dtype == wide(first)) && weight->device().is_cpu(),
                        "entry ", i, " of weights must be ", first, " or ", wide(first),
                        " on the CPU, got ", dtype, " on ", weight->device());
    }
  }

  MaybeTensor maybe() { return all_.get(next_++); }
  Tensor given() { return *maybe(); }

 private:
  const c10::List<MaybeTensor>& all_;
  size_t next_ = 0;
};

// The residual stream of N tokens: m blocks that are finished, in a bank with room for all, and the
// prefix, the sum of what the sublayers of the current block have put out.
class Stream {
 public:
  Stream(const Tensor& embedding, int64_t blocks, double eps)
      : prefix_(typed(embedding, wide(embedding.scalar_type()))),
        bank_(empty({embedding.size(0), blocks, embedding.size(1)}, prefix_.scalar_type())),
        rms_(empty({embedding.size(0), blocks}, prefix_.scalar_type())),
        eps_(eps) {
    finish(0);
  }

  // The mixture of all, normed, as the next sublayer sees it.
  Tensor read(Weights& weights) const {
    const MaybeTensor norm = weights.maybe(), proj = weights.maybe();
    const Tensor weight = weights.given();
    if (m_ == 0) return rms_norm(prefix_, weight, eps_);
    TORCH_CHECK_VALUE(norm && proj, "a mixture needs its norm and proj");
    return mix_norm(prefix_, finished_, finished_rms_, *norm, *proj, weight, eps_);
  }

  void open_block() {
    bank_.select(1, m_).copy_(prefix_);
    rms_.select(1, m_).copy_(at::rsqrt(at::add(at::mean(at::square(prefix_), -1), eps_)));
    finish(m_ + 1);
    opened_ = true;
  }

  void add(const Tensor& output) {
    prefix_ = opened_ ? typed(output, prefix_.scalar_type()) : at::add(prefix_, output);
    opened_ = false;
  }

  // The stream of some of the tokens, to be read only.
  Stream at(const Tensor& tokens) const {
    Stream some = *this;
    some.prefix_ = at::index_select(prefix_, 0, tokens);
    some.finished_ = at::index_select(finished_, 0, tokens);
    some.finished_rms_ = at::index_select(finished_rms_, 0, tokens);
    return some;
  }

 private:
  void finish(int64_t blocks) {
    m_ = blocks;
    finished_ = view_of(bank_, {bank_.size(0), m_, bank_.size(2)}, bank_.strides(), 0);
    finished_rms_ = columns(rms_, 0, m_);
  }

  Tensor prefix_, bank_, rms_, finished_, finished_rms_;
  double eps_;
  int64_t m_ = 0;
  bool opened_ = false;
};

void check_pools(const Tensor& recurrent, const Tensor& conv, const Tensor& latent,
                 at::ScalarType activation, IntArrayRef is_kda, int64_t kda_heads,
                 IntArrayRef kda_widths, IntArrayRef mla_widths) {
  const int64_t recurrent_layers = count_true(is_kda);
  const int64_t latent_layers = count(is_kda) - recurrent_layers;
  TORCH_CHECK_VALUE(recurrent.dim() == 5 && recurrent.size(0) == recurrent_layers &&
                        conv.dim() == 4 && conv.size(0) == recurrent_layers,
                    "recurrent and conv must be of ", recurrent_layers, " layers, got ",
                    recurrent.sizes(), " and ", conv.sizes());
  TORCH_CHECK_VALUE(latent.dim() == 4 && latent.size(0) == latent_layers && latent.size(2) > 0,
                    "latent must be of ", latent_layers, " layers, with rows in a page, got ",
                    latent.sizes());
  check_dtype("conv", conv, activation);
  check_dtype("latent", latent, activation);
  check_dtype("recurrent", recurrent, wide(activation));
  if (recurrent_layers > 0) {
    const int64_t V = recurrent.size(3), K = recurrent.size(4);
    TORCH_CHECK_VALUE(count(kda_widths) == 4 && recurrent.size(2) == kda_heads &&
                          kda_heads * (2 * K + V) == kda_widths[0] &&
                          conv.size(3) == kda_widths[0],
                      "recurrent must be of ", kda_heads, " heads with ", kda_widths, " channels, ",
                      "and conv of as many, got ", recurrent.sizes(), " and ", conv.sizes());
    check_pool("recurrent", entry(recurrent, 0), recurrent.sizes().slice(2));
    check_pool("conv", entry(conv, 0), conv.sizes().slice(2));
  }
  if (latent_layers > 0) {
    TORCH_CHECK_VALUE(count(mla_widths) == 4 && latent.size(3) == mla_widths[1] + mla_widths[2],
                      "latent must have rows of the parts of ", mla_widths, ", got ",
                      latent.sizes());
    check_pool("latent", entry(latent, 0), latent.sizes().slice(2));
  }
}

// `amount` integers, each in low .. high - 1.
void check_numbers(const char* name, const Tensor& x, int64_t amount, int64_t low, int64_t high) {
  for (int64_t number : integers(name, x, amount)) {
    TORCH_CHECK_VALUE(number >= low && number < high, name, " must lie in ", low, "..", high - 1,
                      ", got ", number);
  }
}

// New latent rows [N, L+R] to their places in pages; row numbers count through all pages, -1 is
// nowhere. Places are checked already.
void write_rows(const Tensor& pool, const Tensor& rows, const Tensor& out_rows) {
  const int64_t N = rows.size(0), page = pool.size(1), width = pool.size(2);
  check_shape("latent rows", rows, {N, width});
  check_dtype("latent rows", rows, pool.scalar_type());
  const Tensor numbers = out_rows.contiguous(), whole = rows.contiguous();
  const int64_t* places = data<int64_t>(numbers);
  const size_t one = rows.element_size(), bytes = width * one;
  const char* from = static_cast<const char*>(whole.const_data_ptr());
  char* to = static_cast<char*>(pool.mutable_data_ptr());
  for (int64_t t = 0; t < N; ++t) {
    if (places[t] < 0) continue;
    const int64_t at = places[t] / page * pool.stride(0) + places[t] % page * width;
    std::memcpy(to + at * one, from + t * bytes, bytes);
  }
}

Tensor decoder(const Tensor& ids, const MaybeTensor& wanted, const c10::List<MaybeTensor>& weights,
               IntArrayRef opens_block, IntArrayRef is_kda, IntArrayRef is_moe, double eps,
               int64_t kda_heads, IntArrayRef kda_widths,
               std::optional<double> lower_bound, int64_t mla_heads, IntArrayRef mla_widths,
               double mla_eps, IntArrayRef moe_widths, int64_t top_k, int64_t groups,
               int64_t kept_groups, bool renormalise, double factor, bool situ, double beta,
               std::optional<double> linear_beta, Tensor& recurrent, Tensor& conv, Tensor& latent,
               IntArrayRef query_start, const Tensor& slots, IntArrayRef resumed,
               IntArrayRef export_rows, IntArrayRef export_after, const Tensor& export_slots,
               const Tensor& spans, const Tensor& pages, const Tensor& out_rows) {
  const size_t layers = opens_block.size();
  TORCH_CHECK_VALUE(layers > 0, "a decoder has at least one layer");
  TORCH_CHECK_VALUE(is_kda.size() == layers && is_moe.size() == layers,
                    "opens_block, is_kda and is_moe must tell of equally many layers");
  const int64_t N = ids.numel();
  Weights w(weights, is_kda, is_moe);
  check_pools(recurrent, conv, latent, weights.get(0)->scalar_type(), is_kda, kda_heads, kda_widths,
              mla_widths);
  check_slot_rows(N, recurrent.size(1), query_start, slots, resumed, export_rows, export_after,
                  export_slots);
  check_paged_rows(spans, pages, N, latent.size(1), latent.size(2));
  check_numbers("out_rows", out_rows, N, -1, latent.size(1) * latent.size(2));
  if (wanted) check_numbers("wanted", *wanted, wanted->numel(), 0, N);

  const at::AutoDispatchBelowADInplaceOrView no_gradients;
  int64_t recurrent_layer = 0, latent_layer = 0;
  Stream stream(at::index_select(w.given(), 0, ids), count_true(opens_block), eps);
  const auto kda_attention = [&](const Tensor& x) {
    const Tensor in_proj = w.given(), f_b = w.given();
    const MaybeTensor g_b = w.maybe();
    const Tensor conv_weight = w.given(), A_log = w.given(), dt_bias = w.given();
    const Tensor norm = w.given(), o_proj = w.given();
    const auto [fused, decay, low_rank] =
        kda_inputs(x, in_proj, kda_widths, f_b, g_b, kda_heads);
    const auto [qkv, f_a, strength, g] = split<4>(fused, kda_widths);
    Tensor states = entry(recurrent, recurrent_layer);
    Tensor windows = entry(conv, recurrent_layer++);
    const Tensor o =
        kda_rows_(qkv, decay, strength, conv_weight, A_log, dt_bias, lower_bound, states, windows,
                  query_start, slots, resumed, export_rows, export_after, export_slots);
    return kda_output(o, g_b ? low_rank : g, norm, eps, o_proj);
  };
  const auto latent_layer_attention = [&](const Tensor& x) {
    const Tensor in_proj = w.given();
    const MaybeTensor q_norm = w.maybe(), q_b = w.maybe();
    const Tensor kv_norm = w.given(), kv_b = w.given(), o_proj = w.given();
    const auto [fused, queries, rows] =
        mla_inputs(x, in_proj, mla_widths, q_norm, q_b, kv_norm, mla_eps, mla_heads);
    const auto [own, c, r, gate] = split<4>(fused, mla_widths);
    const Tensor q = q_b ? queries : by_heads(own, mla_heads);
    const Tensor pool = entry(latent, latent_layer++);
    write_rows(pool, rows, out_rows);
    TORCH_CHECK_VALUE(kv_b.dim() == 2 && mla_heads > 0 && kv_b.size(0) % mla_heads == 0,
                      "kv_b must have rows for ", mla_heads, " heads, got ", kv_b.sizes());
    const int64_t each = kv_b.size(0) / mla_heads;
    const Tensor expand = view_of(kv_b, {mla_heads, each, kv_b.size(1)},
                                    {each * kv_b.stride(0), kv_b.stride(0), kv_b.stride(1)}, 0);
    return mla_output(latent_attention(q, pool, expand, spans, pages), gate, o_proj);
  };
  const auto mixture = [&](const Tensor& x) {
    const Tensor router = w.given(), bias = w.given();
    const MaybeTensor in_proj = w.maybe();
    const Tensor w13 = w.given(), w2 = w.given();
    const MaybeTensor norm = w.maybe(), up = w.maybe(), shared_down = w.maybe();
    return moe(x, router, bias, in_proj, moe_widths, w13, w2, norm, eps, up, shared_down, top_k,
               groups, kept_groups, renormalise, factor, situ, beta, linear_beta, std::nullopt);
  };
  const auto dense = [&](const Tensor& x) {
    const Tensor gate_up = w.given(), down = w.given();
    return mlp(x, gate_up, down, situ, beta, linear_beta);
  };
  for (size_t i = 0; i < layers; ++i) {
    Tensor x = stream.read(w);
    if (opens_block[i]) stream.open_block();
    stream.add(is_kda[i] ? kda_attention(x) : latent_layer_attention(x));
    x = stream.read(w);
    stream.add(is_moe[i] ? mixture(x) : dense(x));
  }
  const Tensor hidden = (wanted ? stream.at(*wanted) : stream).read(w);
  return linear(hidden, w.given());
}

}  // namespace
}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def(
      "decoder(Tensor ids, Tensor? wanted, Tensor?[] weights, "
      "int[] opens_block, int[] is_kda, int[] is_moe, float eps, int kda_heads, int[] kda_widths, "
      "float? lower_bound, int mla_heads, int[] mla_widths, float mla_eps, int[] moe_widths, "
      "int top_k, int groups, int kept_groups, bool renormalise, float factor, bool situ, "
      "float beta, float? linear_beta, Tensor(a!) recurrent, Tensor(b!) conv, Tensor(c!) latent, "
      "int[] query_start, Tensor slots, int[] resumed, int[] export_rows, int[] export_after, "
      "Tensor export_slots, Tensor spans, Tensor pages, Tensor out_rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) { m.impl("decoder", TORCH_FN(decoder)); }
