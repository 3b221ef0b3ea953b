// The KDA headers by themselves, against plain double loops written from architecture 3.2 to 3.6.
// Every array has exactly the size that the headers may touch, so that a sanitiser sees a step
// beyond it. Exit code 0 if all is near; else a line for each check that failed.
#include <cmath>
#include <cstdint>
#include <vector>

#include "checking.h"
#include "layer.h"

namespace {

// A layer's inputs and weights, and its recurrence in double over one row of one head.
template <class A, class T>
struct Layer {
  kda::Shape shape;
  int64_t W, D, N;
  bool bounded;
  Array<A> x, gate, beta, window;
  Array<T> conv, A_log, bias, S0;

  Layer(kda::Shape s, int64_t width, int64_t tokens, bool is_bounded)
      : shape(s), W(width), D(s.heads * (2 * s.K + s.V)), N(tokens), bounded(is_bounded),
        x(N * D), gate(N * s.heads * s.K), beta(N * s.heads), window((W - 1) * D), conv(D * W),
        A_log(s.heads), bias(s.heads * s.K), S0(s.heads * s.V * s.K) {
    for (auto* raw : {&x, &gate, &beta, &window}) {
      for (int64_t i = 0; i < raw->size; ++i) (*raw)[i] = from_double<A>(normal());
    }
    for (auto* weight : {&conv, &A_log, &S0}) {
      for (int64_t i = 0; i < weight->size; ++i) (*weight)[i] = T(0.5 * normal());
    }
    for (int64_t i = 0; i < bias.size; ++i) bias[i] = T(normal() - 3);
  }

  double input(int64_t t, int64_t c) const {
    return t >= 0 ? to_double(x[t * D + c]) : to_double(window[(W - 1 + t) * D + c]);
  }

  double convolved(int64_t t, int64_t c) const {
    double sum = 0;
    for (int64_t j = 0; j < W; ++j) sum += double(conv[c * W + j]) * input(t - W + 1 + j, c);
    return sum / (1 + std::exp(-sum));
  }

  std::vector<double> normalised(int64_t t, int64_t first) const {
    std::vector<double> u(shape.K);
    double squares = 1e-6;
    for (int64_t d = 0; d < shape.K; ++d) {
      u[d] = convolved(t, first + d);
      squares += u[d] * u[d];
    }
    for (double& value : u) value /= std::sqrt(squares);
    return u;
  }

  double log_decay(int64_t t, int64_t h, int64_t d) const {
    const int64_t K = shape.K;
    const double rate = std::exp(double(A_log[h]));
    const double z = to_double(gate[(t * shape.heads + h) * K + d]) + double(bias[h * K + d]);
    return bounded ? -5 / (1 + std::exp(-rate * z)) : -rate * std::log1p(std::exp(z));
  }

  // o [N, H, V] and the state after `after` tokens
  void truth(std::vector<double>& o, std::vector<double>& S, int64_t after) const {
    const auto [H, K, V] = shape;
    S.assign(S0.data(), S0.data() + S0.size);
    o.assign(N * H * V, 0);
    for (int64_t t = 0; t < after; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        const auto q = normalised(t, h * K), k = normalised(t, (H + h) * K);
        const double write = 1 / (1 + std::exp(-to_double(beta[t * H + h])));
        for (int64_t v = 0; v < V; ++v) {
          double* row = &S[(h * V + v) * K];
          double read = 0, out = 0;
          for (int64_t d = 0; d < K; ++d) {
            row[d] *= std::exp(log_decay(t, h, d));
            read += row[d] * k[d];
          }
          const double u = write * (convolved(t, 2 * H * K + h * V + v) - read);
          for (int64_t d = 0; d < K; ++d) {
            row[d] += u * k[d];
            out += row[d] * q[d];
          }
          o[(t * H + h) * V + v] = out / std::sqrt(double(K));
        }
      }
    }
  }
};

template <class T, class A>
void check_layer(kda::Shape shape, int64_t W, int64_t N, bool bounded, int64_t threads) {
  const Layer<A, T> layer(shape, W, N, bounded);
  const int64_t D = layer.D, after = (N + 1) / 2;
  Array<T> o(N * shape.heads * shape.V), S(layer.S0.size), kept(layer.S0.size);
  const kda::RawRow<A> raw{layer.x.data(), D, layer.window.data(), D, W};
  const kda::Row<T> row{0, N, layer.S0.data(), S.data()};
  const kda::Export<T> wanted{0, after, kept.data()};
  const kda::LayerWeights<T> weights{layer.conv.data(), W,       layer.A_log.data(),
                                     layer.bias.data(), bounded, T(-5)};
  const kda::Projections<A> inputs{&raw, layer.gate.data(), shape.heads * shape.K,
                                   layer.beta.data(), shape.heads};
  kda::Scan<T> scan{shape, &row, 1, &wanted, 1, o.data(), 0};
  scan.parts = kda::parts_for<T>(shape, 1, threads);
  kda::Scratch<T> scratch;
  const auto source = [&](const kda::Part& part) {
    return kda::RawOperands<T, A>(weights, inputs, shape, part, scratch);
  };
  for (int64_t task = 0; task < scan.tasks(); ++task) {
    kda::run_tasks(scan, source, task, task + 1, scratch);
  }

  std::vector<double> o_true, S_true, unused;
  // one channel has one number for a result, and nothing larger beside it to measure it by
  const double allowed = (sizeof(T) == 4 ? 2e-6 : 1e-13) * (shape.K == 1 ? 10 : 1);
  layer.truth(unused, S_true, after);
  check("an exported state", relative_error(kept, S_true), allowed);
  layer.truth(o_true, S_true, N);
  check("outputs", relative_error(o, o_true), allowed);
  check("the final state", relative_error(S, S_true), allowed);

  for (const int64_t count : {int64_t(0), after, N}) {
    Array<A> moved((W - 1) * D);
    std::copy_n(layer.window.data(), moved.size, moved.data());
    const kda::RawRow<A> behind{layer.x.data(), D, moved.data(), D, W};
    kda::write_window(moved.data(), D, behind, count, D);  // onto itself
    for (int64_t i = 0; i < moved.size; ++i) {
      const double expected = layer.input(count - (W - 1) + i / D, i % D);
      check("a window", std::abs(to_double(moved[i]) - expected), 0);
    }
  }
}

void check_elementwise() {
  double exponential = 0, plus_one = 0;
  for (int i = 0; i <= 400000; ++i) {
    const float x = -87.0f + 175.0f * float(i) / 400000;
    const double truth = std::exp(double(x));
    exponential = std::max(exponential, std::abs(double(kda::exponential(x)) / truth - 1));
    const float y = float(i) / 400000;
    const double shown = kda::log_one_plus(y) - std::log1p(double(y));
    plus_one = std::max(plus_one, std::abs(shown) / (std::log1p(double(y)) + 1e-30));
  }
  check("exponential", exponential, 1.2e-7);
  check("log_one_plus", plus_one, 2.4e-7);
  check("exponential far below", std::abs(kda::exponential(-1e30f)), 0);
  check("sigmoid far below", std::abs(kda::sigmoid(-1e30f)), 1e-37);
  check("sigmoid far above", std::abs(kda::sigmoid(1e30f) - 1), 0);
  check("softplus far below", std::abs(kda::softplus(-200.0f)), 0);
  check("softplus far above", std::abs(kda::softplus(200.0f) - 200), 0);
  const float nan = std::nanf("");
  for (float x : {kda::exponential(nan), kda::sigmoid(nan), kda::silu(nan), kda::softplus(nan)}) {
    check("NaN must stay NaN", std::isnan(x) ? 0 : 1, 0);
  }
}

template <class T>
void check_transpose() {
  constexpr int L = kda::kLanes<T>;
  kda::Vec<T> tile[L];
  for (int i = 0; i < L * L; ++i) tile[i / L][i % L] = T(i);
  kda::transpose<T>(tile);
  for (int i = 0; i < L * L; ++i) check("transpose", std::abs(tile[i % L][i / L] - T(i)), 0);
}

}  // namespace

int main() {
  check_elementwise();
  check_transpose<float>();
  check_transpose<double>();
  const kda::Shape shapes[] = {{1, 1, 1}, {2, 5, 7}, {2, 16, 24}, {1, 24, 80}, {1, 128, 70}};
  for (const kda::Shape& shape : shapes) {
    for (const int64_t N : {1, 2, 33, 70}) {
      for (const bool bounded : {true, false}) {
        for (const int64_t W : {1, 4}) {
          check_layer<float, float>(shape, W, N, bounded, 1);
          check_layer<float, kda::BFloat16>(shape, W, N, bounded, 3);
          check_layer<double, double>(shape, W, N, bounded, 4);
        }
      }
    }
  }
  return failures == 0 ? 0 : 1;
}
