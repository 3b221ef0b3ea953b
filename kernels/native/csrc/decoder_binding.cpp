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
#include <cstring>

#include "checks.hpp"
#include "functions.hpp"

namespace kda::ops {
namespace {

using namespace kda::checks;

// Weights in the order in which layers take them.
class Weights {
 public:
  explicit Weights(const c10::List<MaybeTensor>& all) : all_(all) {}

  MaybeTensor maybe() {
    TORCH_CHECK_VALUE(next_ < all_.size(), "weights has ", all_.size(), " entries; layers need ",
                      "more");
    return all_.get(next_++);
  }

  Tensor given() {
    MaybeTensor weight = maybe();
    TORCH_CHECK_VALUE(weight.has_value(), "entry ", next_ - 1, " of weights must be there");
    return *std::move(weight);
  }

  bool used_up() const { return next_ == all_.size(); }

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

// New latent rows [N, L+R] to their places in pages; row numbers count through all pages, -1 is
// nowhere.
void write_rows(const Tensor& pool, const Tensor& rows, const Tensor& out_rows) {
  const int64_t N = rows.size(0), page = pool.size(1), width = pool.size(2);
  check_shape("latent rows", rows, {N, width});
  check_dtype("latent", pool, rows.scalar_type());
  TORCH_CHECK_VALUE((width < 2 || pool.stride(2) == 1) && rows.is_contiguous(),
                    "latent must have rows that are contiguous, got strides ", pool.strides());
  const std::vector<int64_t> places = integers("out_rows", out_rows, N);
  const size_t bytes = width * rows.element_size();
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(pool.mutable_data_ptr());
  for (int64_t t = 0; t < N; ++t) {
    TORCH_CHECK_VALUE(places[t] >= -1 && places[t] < pool.size(0) * page, "out_rows names row ",
                      places[t], " of ", pool.size(0) * page);
    if (places[t] < 0) continue;
    const int64_t at = places[t] / page * pool.stride(0) + places[t] % page * pool.stride(1);
    std::memcpy(to + at * rows.element_size(), from + t * bytes, bytes);
  }
}

Tensor decoder(const Tensor& ids, const MaybeTensor& wanted, const c10::List<MaybeTensor>& weights,
               IntArrayRef opens_block, IntArrayRef is_kda,
               IntArrayRef is_moe, double eps, int64_t kda_heads, IntArrayRef kda_widths,
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
  int64_t recurrent_layer = 0, latent_layer = 0;
  for (int64_t kda : is_kda) ++(kda ? recurrent_layer : latent_layer);
  TORCH_CHECK_VALUE(recurrent.dim() == 5 && recurrent.size(0) == recurrent_layer &&
                        conv.dim() == 4 && conv.size(0) == recurrent_layer,
                    "recurrent and conv must be of ", recurrent_layer, " layers, got ",
                    recurrent.sizes(), " and ", conv.sizes());
  TORCH_CHECK_VALUE(latent.dim() == 4 && latent.size(0) == latent_layer, "latent must be of ",
                    latent_layer, " layers, got ", latent.sizes());
  recurrent_layer = latent_layer = 0;

  const at::AutoDispatchBelowADInplaceOrView no_gradients;
  Weights w(weights);
  Stream stream(at::index_select(w.given(), 0, ids), std::count(opens_block.begin(), opens_block.end(), 1), eps);
  const auto kda_attention = [&](const Tensor& x) {
    const Tensor in_proj = w.given(), f_b = w.given();
    const MaybeTensor g_b = w.maybe();
    const Tensor conv_weight = w.given(), A_log = w.given(), dt_bias = w.given();
    const Tensor norm = w.given(), o_proj = w.given();
    const auto [qkv, decay, strength, gate] =
        kda_inputs(x, in_proj, kda_widths, f_b, g_b, kda_heads);
    Tensor states = entry(recurrent, recurrent_layer);
    Tensor windows = entry(conv, recurrent_layer++);
    const Tensor o =
        kda_rows_(qkv, decay, strength, conv_weight, A_log, dt_bias, lower_bound, states, windows,
                  query_start, slots, resumed, export_rows, export_after, export_slots);
    return kda_output(o, gate, norm, eps, o_proj);
  };
  const auto latent_layer_attention = [&](const Tensor& x) {
    const Tensor in_proj = w.given();
    const MaybeTensor q_norm = w.maybe(), q_b = w.maybe();
    const Tensor kv_norm = w.given(), kv_b = w.given(), o_proj = w.given();
    const auto [q, rows, gate] =
        mla_inputs(x, in_proj, mla_widths, q_norm, q_b, kv_norm, mla_eps, mla_heads);
    const Tensor pool = entry(latent, latent_layer++);
    write_rows(pool, rows, out_rows);
    TORCH_CHECK_VALUE(kv_b.dim() == 2 && mla_heads > 0 && kv_b.size(0) % mla_heads == 0,
                      "kv_b must have rows for ", mla_heads, " heads, got ", kv_b.sizes());
    const int64_t each = kv_b.size(0) / mla_heads;
    const Tensor by_heads = view_of(kv_b, {mla_heads, each, kv_b.size(1)},
                                    {each * kv_b.stride(0), kv_b.stride(0), kv_b.stride(1)}, 0);
    return mla_output(latent_attention(q, pool, by_heads, spans, pages), gate, o_proj);
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
  const Tensor logits = linear(hidden, w.given());
  TORCH_CHECK_VALUE(w.used_up(), "weights has ", weights.size(), " entries; layers need fewer");
  return logits;
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
