// The headers of the other layers by themselves, against plain double loops written from
// architecture 2, 6 and 7. Every array has exactly the size that the headers may touch, so that a
// sanitiser sees a step beyond it. Exit code 0 if all is near; else a line for each that is not.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attn_res.h"
#include "checking.h"
#include "experts.h"
#include "glu.h"
#include "latent_attention.h"
#include "norms.h"
#include "routing.h"

namespace {

using Doubles = std::vector<double>;

template <class A>
Array<A> drawn(int64_t count, double scale = 1) {
  Array<A> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = from_double<A>(scale * normal());
  return x;
}

template <class T>
double near() {
  return sizeof(T) == 4 ? 2e-6 : 1e-13;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double situ_glu(double a, double b) {
  return 4 * std::tanh(a / 4) * sigmoid(a) * 25 * std::tanh(b / 25);
}

void check_elementwise() {
  double worst = 0;
  for (int i = -40000; i <= 40000; ++i) {
    const float x = float(i) / 2000;
    const double truth = std::tanh(double(x));
    if (i != 0) worst = std::max(worst, std::abs(double(kda::tanh(x)) / truth - 1));
  }
  check("tanh", worst, 3e-7);
  check("tanh near 0", std::abs(double(kda::tanh(1e-30f)) / 1e-30 - 1), 1e-6);
  check("tanh of NaN", std::isnan(kda::tanh(std::nanf(""))) ? 0 : 1, 0);
  for (const float x : {1.0f, -3.1415926f, 1.00390625f, 1.01171875f, 3.4e38f, 1e-40f}) {
    const float back = kda::widen<float>(kda::narrow<kda::BFloat16>(x));
    check("narrow", std::isinf(back) ? 0 : std::abs(back - x), std::abs(x) / 256 + 1e-40);
  }
  // ties to even: 1 + 1/256 lies between 1 and 1 + 1/128
  check("a tie", kda::narrow<kda::BFloat16>(1.00390625f).bits - 0x3f80, 0);
  check("another tie", kda::narrow<kda::BFloat16>(1.01171875f).bits - 0x3f82, 0);
  const float nan = std::bit_cast<float>(0x7fffffffu);
  check("NaN narrowed", std::isnan(kda::widen<float>(kda::narrow<kda::BFloat16>(nan))) ? 0 : 1, 0);
}

template <class T, int count>
void check_sums() {
  constexpr int L = kda::kLanes<T>;
  kda::Vec<T> x[count];
  T sums[count];
  for (int i = 0; i < count; ++i) {
    for (int lane = 0; lane < L; ++lane) x[i][lane] = T(normal());
  }
  kda::sums_of_lanes<T, count>(sums, x);
  for (int i = 0; i < count; ++i) {
    T lanes[L];
    kda::store(lanes, x[i]);
    for (int half = L / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    check("a sum of lanes", std::abs(double(sums[i] - lanes[0])), 0);
  }
}

template <class T, class A>
void check_few_rows(int64_t M, int64_t N, int64_t K) {
  const auto x = drawn<T>(M * K);
  const auto w = drawn<A>(N * K);
  Array<T> out(M * N);
  kda::few_rows(kda::FewRows<T, A, T>{x.data(), K, M, w.data(), K, K, out.data(), N}, 0, N);
  Doubles truth(M * N, 0);
  for (int64_t i = 0; i < M * N; ++i) {
    const T* row = x.data() + i / N * K;
    const A* column = w.data() + i % N * K;
    for (int64_t k = 0; k < K; ++k) truth[i] += double(row[k]) * to_double(column[k]);
  }
  // the largest of few sums may itself be the difference of large ones
  check("a product of few rows", relative_error(out, truth), 10 * near<T>());
}

template <class T, class A>
void check_tokens(int64_t width) {
  const T eps = T(1e-5);
  const auto x = drawn<A>(width), gate = drawn<A>(width);
  const auto weight = drawn<T>(width), o = drawn<T>(width);
  Array<T> room(width), out(width);
  double squares = 0, wide_squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    squares += to_double(x[i]) * to_double(x[i]) / double(width);
    wide_squares += double(o[i]) * double(o[i]) / double(width);
  }
  Doubles truth(width);
  kda::rms_norm<T>(out.data(), x.data(), weight.data(), width, eps, room.data());
  for (int64_t i = 0; i < width; ++i) {
    truth[i] = to_double(x[i]) / std::sqrt(squares + 1e-5) * double(weight[i]);
  }
  check("rms_norm", relative_error(out, truth), near<T>());

  Array<A> narrow(width);
  const double rounding = sizeof(A) == 2 ? 1.0 / 256 : near<T>();
  kda::gated_norm(narrow.data(), o.data(), width, gate.data(), weight.data(), 1, width, eps);
  for (int64_t i = 0; i < width; ++i) {
    truth[i] = double(o[i]) / std::sqrt(wide_squares + 1e-5) * double(weight[i]) *
               sigmoid(to_double(gate[i]));
    check("gated_norm", std::abs(to_double(narrow[i]) - truth[i]), rounding * std::abs(truth[i]));
  }
  kda::gated<T>(narrow.data(), o.data(), gate.data(), width);
  for (int64_t i = 0; i < width; ++i) {
    truth[i] = double(o[i]) * sigmoid(to_double(gate[i]));
    check("gated", std::abs(to_double(narrow[i]) - truth[i]), rounding * std::abs(truth[i]));
  }
  kda::glu<T>(narrow.data(), x.data(), gate.data(), width, {true, 4, 25});
  for (int64_t i = 0; i < width; ++i) {
    truth[i] = situ_glu(to_double(x[i]), to_double(gate[i]));
    check("SiTU-GLU", std::abs(to_double(narrow[i]) - truth[i]), rounding * std::abs(truth[i]));
  }
}

template <class T>
void check_mixture(int64_t m, int64_t width) {
  const auto bank = drawn<T>(m * width), prefix = drawn<T>(width), c = drawn<T>(width, 0.1);
  Array<T> rms(m), mixture(width), scores(m + 1);
  Doubles weights(m + 1), truth(width, 0);
  double sum = 0;
  for (int64_t j = 0; j <= m; ++j) {
    const T* x = j < m ? bank.data() + j * width : prefix.data();
    double squares = 0, along = 0;
    for (int64_t i = 0; i < width; ++i) {
      squares += double(x[i]) * double(x[i]) / double(width);
      along += double(c[i]) * double(x[i]);
    }
    if (j < m) rms[j] = T(1 / std::sqrt(squares + 1e-5));
    sum += weights[j] = std::exp(along / std::sqrt(squares + 1e-5));
  }
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t j = 0; j <= m; ++j) {
      truth[i] += weights[j] / sum * double(j < m ? bank[j * width + i] : prefix[i]);
    }
  }
  const kda::Sources<T> sources{bank.data(), width, rms.data(), m, prefix.data()};
  kda::mix(mixture.data(), sources, c.data(), width, T(1e-5), scores.data());
  check("a mixture", relative_error(mixture, truth), 2 * near<T>());
}

template <class T, class A>
void check_experts(int64_t N, int64_t E, int64_t k, int64_t L, int64_t I) {
  const auto x = drawn<A>(N * L);
  const auto w13 = drawn<A>(E * 2 * I * L, 0.3), w2 = drawn<A>(E * L * I, 0.3);
  Array<int64_t> chosen(N * k);
  Array<T> shares = drawn<T>(N * k), out(N * k * L), y(N * L);
  std::vector<int64_t> all(E);
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < N; ++t) {
    std::shuffle(all.begin(), all.end(), random_bits);
    std::copy_n(all.data(), k, chosen.data() + t * k);
  }
  const kda::ExpertPlan plan = kda::plan_experts(chosen.data(), N * k, E);
  const kda::Experts<A> experts{w13.data(), w2.data(), L, I, {true, 4, 25}};
  kda::ExpertRoom<T> room;
  for (const auto& piece : plan.pieces) {
    kda::run_piece(plan, piece, experts, kda::Chosen<A>{x.data(), L, k}, out.data(), room);
  }
  Doubles truth(N * L, 0);
  for (int64_t c = 0; c < N * k; ++c) {
    const A* token = x.data() + c / k * L;
    Doubles hidden(I);
    for (int64_t i = 0; i < I; ++i) {
      double a = 0, b = 0;
      for (int64_t d = 0; d < L; ++d) {
        a += to_double(token[d]) * to_double(w13[(chosen[c] * 2 * I + i) * L + d]);
        b += to_double(token[d]) * to_double(w13[(chosen[c] * 2 * I + I + i) * L + d]);
      }
      hidden[i] = situ_glu(a, b);
    }
    for (int64_t d = 0; d < L; ++d) {
      for (int64_t i = 0; i < I; ++i) {
        truth[c / k * L + d] += shares[c] * hidden[i] * to_double(w2[(chosen[c] * L + d) * I + i]);
      }
    }
  }
  for (int64_t t = 0; t < N; ++t) {
    kda::add_up(y.data() + t * L, out.data() + t * k * L, shares.data() + t * k, k, L);
  }
  check("experts", relative_error(y, truth), 2 * near<T>());
}

void check_routing() {
  const float inf = std::numeric_limits<float>::infinity();
  const int64_t E = 6;
  Array<float> scores(E), bias(E), biased(E), sums(E);
  Array<int64_t> kept(E), chosen(2);
  for (int64_t e = 0; e < E; ++e) scores[e] = 0.5f;
  const float offsets[] = {0.2f, 0.0f, 0.1f, 0.4f, 0.4f, -0.3f};
  std::copy_n(offsets, E, bias.data());
  const kda::RouterRoom<float> room{biased.data(), sums.data(), kept.data()};
  const auto picks = [&](int64_t groups, int64_t kept_groups, int64_t first, int64_t second) {
    const kda::RouterRule rule{2, groups, kept_groups, true, 1};
    const bool enough = kda::choose(chosen.data(), scores.data(), bias.data(), E, rule, room);
    check("enough experts", enough ? 0 : 1, 0);
    check("the best expert", double(chosen[0] - first), 0);
    check("the second best", double(chosen[1] - second), 0);
  };
  picks(1, 1, 3, 4);
  picks(3, 1, 3, 2);  // 0.5 of group 1 against 0.2 and 0.1
  picks(6, 2, 3, 4);
  for (int64_t e = 1; e < E; ++e) bias[e] = -inf;
  const kda::RouterRule rule{2, 1, 1, true, 1};
  const bool enough = kda::choose(chosen.data(), scores.data(), bias.data(), E, rule, room);
  check("too few experts", enough ? 1 : 0, 0);
}

// `queries` of a row of `total` latent rows in scattered pages, in both forms.
template <class T, class A>
void check_attention(kda::LatentShape shape, int64_t queries, int64_t total, int64_t page) {
  const auto [H, nope, R, V, L] = shape;
  const int64_t width = shape.query(), row_width = shape.row(), pages = (total + page - 1) / page;
  const auto q = drawn<A>(queries * H * width);
  const auto rows = drawn<A>(total * row_width), kv_b = drawn<A>(H * (nope + V) * L, 0.3);
  Array<A> pool(pages * page * row_width);
  Array<int64_t> named(pages);
  for (int64_t i = 0; i < pages; ++i) named[i] = (i + 1) % pages;
  for (int64_t i = 0; i < total; ++i) {
    A* to = pool.data() + (named[i / page] * page + i % page) * row_width;
    std::copy_n(rows.data() + i * row_width, row_width, to);
  }
  Doubles truth(queries * H * V, 0);
  for (int64_t t = 0; t < queries; ++t) {
    for (int64_t h = 0; h < H; ++h) {
      const A *query = q.data() + (t * H + h) * width, *W = kv_b.data() + h * (nope + V) * L;
      const auto project = [&](int64_t out, int64_t s) {
        const A* row = rows.data() + s * row_width;
        double sum = 0;
        for (int64_t l = 0; l < L; ++l) sum += to_double(W[out * L + l]) * to_double(row[l]);
        return sum;
      };
      double sum = 0;
      Doubles weighted(V, 0);
      for (int64_t s = 0; s <= total - queries + t; ++s) {
        double score = 0;
        for (int64_t d = 0; d < nope; ++d) score += to_double(query[d]) * project(d, s);
        for (int64_t d = 0; d < R; ++d) {
          score += to_double(query[nope + d]) * to_double(rows[s * row_width + L + d]);
        }
        const double p = std::exp(score / std::sqrt(double(width)));
        sum += p;
        for (int64_t v = 0; v < V; ++v) weighted[v] += p * project(nope + v, s);
      }
      for (int64_t v = 0; v < V; ++v) truth[(t * H + h) * V + v] = weighted[v] / sum;
    }
  }
  Array<T> o(queries * H * V);
  const kda::LatentAttention<T, A> call{shape, q.data(), H * width, pool.data(), page * row_width,
                                        page, kv_b.data(), o.data()};
  const kda::AttentionRow row{0, queries, total, named.data()};
  kda::AttentionRoom<T> room;
  for (int64_t h = 0; h < H; ++h) kda::attend_materialised(call, row, h, room);
  check("materialised", relative_error(o, truth), 4 * near<T>());

  Array<T> absorbed_q(queries * H * row_width), latent(queries * H * L);
  std::vector<int64_t> tokens(queries);
  std::iota(tokens.begin(), tokens.end(), 0);
  const kda::Absorbed<T> absorbed{tokens.data(), queries, absorbed_q.data(), latent.data()};
  std::fill_n(o.data(), o.size, T(0));
  for (int64_t h = 0; h < H; ++h) kda::absorb(call, absorbed, h, room);
  for (int64_t first = 0; first < queries * H; first += 5) {
    const int64_t count = std::min<int64_t>(5, queries * H - first);
    kda::attend_absorbed(call, absorbed, row, 0, first, count, room);
  }
  for (int64_t h = 0; h < H; ++h) kda::expand(call, absorbed, h, room);
  check("absorbed", relative_error(o, truth), 4 * near<T>());
}

template <class T, class A>
void check_all() {
  for (const int64_t K : {0, 1, 7, 32, 67, 128}) {
    for (const int64_t M : {1, 3, 8, 9, 23, 24}) {
      for (const int64_t N : {1, 4, 5}) check_few_rows<T, A>(M, N, K);
    }
  }
  for (const int64_t width : {1, 7, 33, 96}) check_tokens<T, A>(width);
  check_experts<T, A>(1, 3, 2, 8, 5);
  check_experts<T, A>(40, 4, 3, 33, 17);
  for (const int64_t page : {1, 3, 16}) {
    check_attention<T, A>({2, 5, 3, 7, 9}, 1, 1, page);
    check_attention<T, A>({2, 5, 3, 7, 9}, 30, 100, page);
    check_attention<T, A>({1, 16, 16, 70, 33}, 3, 131, page);
  }
}

}  // namespace

int main() {
  check_elementwise();
  check_sums<float, 1>();
  check_sums<float, 2>();
  check_sums<float, 12>();
  check_sums<float, 16>();
  check_sums<double, 1>();
  check_sums<double, 7>();
  check_sums<double, 16>();
  for (const int64_t m : {0, 1, 5}) {
    check_mixture<float>(m, 40);
    check_mixture<double>(m, 7);
  }
  check_routing();
  check_all<float, float>();
  check_all<float, kda::BFloat16>();
  check_all<double, double>();
  return failures == 0 ? 0 : 1;
}
