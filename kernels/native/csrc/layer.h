// The core of a KDA layer from raw projections (architecture 3.2 to 3.5): convolution, L2 norms,
// gates and write strength, made for a block of tokens of one head just before it is scanned.
#pragma once

#include <cmath>
#include <cstdint>

#include "scan.h"
#include "short_conv.h"

namespace kda {

// Weights in the number type of the recurrence, contiguous.
template <class T>
struct LayerWeights {
  const T* conv;     // [H (2K+V), W]: q, k, v, heads inside
  int64_t width;     // W
  const T* A_log;    // [H]
  const T* dt_bias;  // [H, K]
  bool bounded;      // g = lower_bound sigmoid(e^A_log z), else -e^A_log softplus(z)
  T lower_bound;
};

// Raw projections of N tokens in the activation type: gate [N, H, K], beta [N, H]; strides of
// tokens are free. Rows come with their own inputs to the convolution.
template <class A>
struct Projections {
  const RawRow<A>* rows;
  const A* gate;
  int64_t gate_stride;
  const A* beta;
  int64_t beta_stride;
};

// x / sqrt(x . x + 1e-6) times a factor.
template <class T>
void normalise(T* to, const T* x, int64_t n, T factor) {
  const T root = std::sqrt(dot(x, x, n) + T(1e-6));
  for (int64_t i = 0; i < n; ++i) to[i] = x[i] / root * factor;
}

template <class T, class A>
class RawOperands {
 public:
  Part part;

  RawOperands(const LayerWeights<T>& weights, const Projections<A>& inputs, const Shape& shape,
              const Part& part, Scratch<T>& scratch)
      : part(part),
        weights_(weights),
        inputs_(inputs),
        shape_(shape),
        scratch_(&scratch),
        channels_(2 * shape.K + part.channels),
        taps_(scratch.next_taps(weights.width * channels_)),
        rate_(static_cast<T>(std::exp(weights.A_log[part.head]))) {
    each_segment([&](int64_t to, int64_t from, int64_t count) {
      taps_first(taps_ + to, channels_, weights.conv, weights.width, from, count);
    });
  }

  void fill(const Block<T>& block, const Row<T>& row, int64_t index, int64_t first,
            int64_t count) const {
    const int64_t K = shape_.K, W = weights_.width;
    const T scale = T(1) / std::sqrt(T(K));
    T* raw = scratch_->raw.at_least((W - 1 + kBlock) * channels_);
    T* y = scratch_->y.at_least(channels_);
    each_segment([&](int64_t to, int64_t from, int64_t channels) {
      widen_inputs(raw + to, channels_, inputs_.rows[index], first, count, from, channels);
    });
    for (int64_t t = 0; t < count; ++t) {
      convolve(y, raw + t * channels_, taps_, W, channels_);
      normalise(block.q + t * K, y, K, scale);
      normalise(block.k + t * K, y + K, K, T(1));
      std::copy_n(y + 2 * K, part.channels, block.v + t * block.v_stride);
      const int64_t token = row.first + first + t;
      decay(block.alpha + t * K, inputs_.gate + token * inputs_.gate_stride + part.head * K);
      if (first + kBlock + t < row.count) prefetch_token(index, token, first + kBlock + t);
      block.beta[t] = sigmoid(widen<T>(inputs_.beta[token * inputs_.beta_stride + part.head]));
    }
    complete(block, K, part.channels, count);
  }

 private:
  // Where this head's q, k and value channels go in the block, where they are in D, and how many.
  template <class Act>
  void each_segment(Act&& act) const {
    const int64_t H = shape_.heads, K = shape_.K, head = part.head;
    act(0, head * K, K);
    act(K, (H + head) * K, K);
    act(2 * K, 2 * H * K + head * shape_.V + part.column, part.channels);
  }

  void prefetch_token(int64_t index, int64_t token, int64_t t) const {
    each_segment([&](int64_t, int64_t from, int64_t channels) {
      prefetch(inputs_.rows[index].at(t) + from, channels);
    });
    prefetch(inputs_.gate + (token + kBlock) * inputs_.gate_stride + part.head * shape_.K,
             shape_.K);
  }

  void decay(T* alpha, const A* logits) const {
    const int64_t K = shape_.K;
    const T* bias = weights_.dt_bias + part.head * K;
    if (weights_.bounded) {
      for (int64_t d = 0; d < K; ++d) {
        const T z = rate_ * (widen<T>(logits[d]) + bias[d]);
        alpha[d] = exponential(weights_.lower_bound * sigmoid(z));
      }
    } else {
      for (int64_t d = 0; d < K; ++d) {
        alpha[d] = exponential(-rate_ * softplus(widen<T>(logits[d]) + bias[d]));
      }
    }
  }

  LayerWeights<T> weights_;
  Projections<A> inputs_;
  Shape shape_;
  Scratch<T>* scratch_;
  int64_t channels_;
  T* taps_;
  T rate_;
};

}  // namespace kda
