// What layers compute token by token, as torch sees it: norms, gates, activations, mixtures.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <vector>

#include "attn_res.h"
#include "checks.hpp"
#include "functions.hpp"
#include "glu.h"
#include "norms.h"
#include "scratch.h"

namespace kda::ops {
namespace {

using namespace kda::checks;

constexpr int64_t kWorthAThread = 1 << 14;  // numbers that a token's loop goes through

// act(token) for every token, on torch's threads.
template <class Act>
void each_token(int64_t tokens, int64_t numbers, Act&& act) {
  at::parallel_for(0, tokens, kWorthAThread / (numbers + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) act(t);
  });
}

// [..., width] as tokens [N, width] whose numbers lie side by side, any distance apart.
Tensor tokens_of(const Tensor& x) {
  const Tensor flat = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return flat.size(1) < 2 || flat.stride(1) == 1 ? flat : flat.contiguous();
}

void check_vector(const char* name, const Tensor& weight, int64_t width) {
  check_shape(name, weight, {width});
  check_dtype(name, weight, weight.scalar_type());
}

// A weight vector in the type of arithmetic: where it lies, or widened into room.
template <class T>
const T* wide_vector(const char* name, const Tensor& weight, T* room) {
  const int64_t width = weight.size(0), stride = weight.stride(0);
  if (weight.scalar_type() == c10::CppTypeToScalarType<T>::value && (width < 2 || stride == 1)) {
    return data<T>(weight);
  }
  with_types(name, weight.scalar_type(), [&](auto, auto memory) {
    using A = decltype(memory);
    const A* from = data<A>(weight);
    for (int64_t i = 0; i < width; ++i) {
      if constexpr (std::is_same_v<A, BFloat16>) {
        room[i] = widen<float>(from[i * stride]);
      } else {
        room[i] = static_cast<T>(from[i * stride]);
      }
    }
  });
  return room;
}

// The type of arithmetic on tensors of these types: wide(a) unless one is Double and one is not.
at::ScalarType shared_type(const char* names, at::ScalarType a, at::ScalarType b) {
  TORCH_CHECK_VALUE(wide(a) == wide(b), names, " must both be Double or neither, got ", a, " and ",
                    b);
  return wide(a);
}

template <class T>
T* room(int64_t count) {
  thread_local kda::Buffer<T> mine;
  return mine.at_least(count);
}

// Room for weight vectors of the call at hand.
template <class T>
T* vectors(int64_t count) {
  thread_local kda::Buffer<T> mine;
  return mine.at_least(count);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(x.dim() > 0, "x must have an axis");
  const int64_t width = x.size(-1);
  shared_type("x and weight", x.scalar_type(), weight.scalar_type());
  check_dtype("x", x, x.scalar_type());
  check_vector("weight", weight, width);
  const Tensor rows = tokens_of(x);
  Tensor y = empty(x.sizes(), weight.scalar_type());
  with_types("x", x.scalar_type(), [&](auto number, auto in) {
    with_types("weight", weight.scalar_type(), [&](auto, auto out) {
      using T = decltype(number);
      using X = decltype(in);
      using Y = decltype(out);
      if constexpr (std::is_same_v<T, double> == std::is_same_v<Y, double>) {
        const T* w = wide_vector("weight", weight, vectors<T>(width));
        each_token(rows.size(0), width, [&](int64_t t) {
          kda::rms_norm(mutable_data<Y>(y) + t * width, data<X>(rows) + t * rows.stride(0),
                        w, width, static_cast<T>(eps), room<T>(width));
        });
      }
    });
  });
  return y;
}

Tensor gated_norm(const Tensor& o, const Tensor& gate, const Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(o.dim() == 3, "o must have three axes, got ", o.sizes());
  const int64_t N = o.size(0), H = o.size(1), V = o.size(2);
  check_shape("gate", gate, {N, H * V});
  const auto type = wide(gate.scalar_type());
  check_dtype("o", o, type);
  check_vector("weight", weight, V);
  const Tensor heads = o.contiguous(), logits = tokens_of(gate);
  Tensor y = empty({N, H * V}, gate.scalar_type());
  with_types("gate", gate.scalar_type(), [&](auto number, auto element) {
    using T = decltype(number);
    using G = decltype(element);
    const T* w = wide_vector("weight", weight, vectors<T>(V));
    each_token(N, H * V, [&](int64_t t) {
      kda::gated_norm(mutable_data<G>(y) + t * H * V, data<T>(heads) + t * H * V, V,
                      data<G>(logits) + t * logits.stride(0), w, H, V,
                      static_cast<T>(eps));
    });
  });
  return y;
}

Tensor gated(const Tensor& o, const Tensor& gate) {
  check_shape("gate", gate, o.sizes());
  TORCH_CHECK_VALUE(o.dim() > 0, "o must have an axis");
  check_dtype("o", o, wide(gate.scalar_type()));
  const Tensor values = tokens_of(o), logits = tokens_of(gate);
  const int64_t width = values.size(1);
  Tensor y = empty(gate.sizes(), gate.scalar_type());
  with_types("gate", gate.scalar_type(), [&](auto number, auto element) {
    using T = decltype(number);
    using G = decltype(element);
    each_token(values.size(0), width, [&](int64_t t) {
      kda::gated<T>(mutable_data<G>(y) + t * width, data<T>(values) + t * values.stride(0),
                    data<G>(logits) + t * logits.stride(0), width);
    });
  });
  return y;
}

Tensor glu(const Tensor& gate_up, bool situ, double beta, std::optional<double> linear_beta) {
  TORCH_CHECK_VALUE(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0,
                    "gate_up must have an even last axis, got ", gate_up.sizes());
  check_dtype("gate_up", gate_up, gate_up.scalar_type());
  const Tensor rows = tokens_of(gate_up);
  const int64_t width = rows.size(1) / 2;
  auto shape = gate_up.sizes().vec();
  shape.back() = width;
  Tensor y = empty(shape, gate_up.scalar_type());
  const kda::GLUForm form{situ, beta, linear_beta};
  with_types("gate_up", gate_up.scalar_type(), [&](auto number, auto element) {
    using A = decltype(element);
    each_token(rows.size(0), 4 * width, [&](int64_t t) {
      const A* gate = data<A>(rows) + t * rows.stride(0);
      kda::glu<decltype(number)>(mutable_data<A>(y) + t * width, gate, gate + width, width, form);
    });
  });
  return y;
}

Tensor mix_norm(const Tensor& prefix, const Tensor& bank, const Tensor& bank_rms,
                const Tensor& norm, const Tensor& proj, const Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(prefix.dim() == 2 && bank.dim() == 3, "prefix and bank must have two and ",
                    "three axes, got ", prefix.sizes(), " and ", bank.sizes());
  const int64_t N = prefix.size(0), width = prefix.size(1), m = bank.size(1);
  check_shape("bank", bank, {N, m, width});
  check_shape("bank_rms", bank_rms, {N, m});
  const auto type = prefix.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble,
                    "prefix must be Float or Double, got ", type);
  check_dtype("prefix", prefix, type);
  check_dtype("bank", bank, type);
  check_dtype("bank_rms", bank_rms, type);
  shared_type("prefix and weight", type, weight.scalar_type());
  TORCH_CHECK_VALUE(width < 2 || bank.stride(2) == 1, "bank must have sources that are ",
                    "contiguous, got strides ", bank.strides());
  check_vector("norm", norm, width);
  check_vector("proj", proj, width);
  check_vector("weight", weight, width);
  const Tensor own = tokens_of(prefix);
  const Tensor rms = tokens_of(bank_rms);
  Tensor y = empty({N, width}, weight.scalar_type());
  with_types("weight", weight.scalar_type(), [&](auto number, auto out) {
    using T = decltype(number);
    using Y = decltype(out);
    T* query = vectors<T>(4 * width);  // c = norm * proj
    const T* scale = wide_vector("norm", norm, query + width);
    const T* direction = wide_vector("proj", proj, query + 2 * width);
    const T* w = wide_vector("weight", weight, query + 3 * width);
    for (int64_t i = 0; i < width; ++i) query[i] = scale[i] * direction[i];
    each_token(N, 2 * (m + 1) * width, [&](int64_t t) {
      const kda::Sources<T> sources{data<T>(bank) + t * bank.stride(0), bank.stride(1),
                                    data<T>(rms) + t * rms.stride(0), m,
                                    data<T>(own) + t * own.stride(0)};
      T* mixture = room<T>(width + m + 1);
      kda::mix(mixture, sources, query, width, static_cast<T>(eps), mixture + width);
      kda::rms_norm<T>(mutable_data<Y>(y) + t * width, mixture, w, width,
                       static_cast<T>(eps), static_cast<T*>(nullptr));
    });
  });
  return y;
}

}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_norm(Tensor o, Tensor gate, Tensor weight, float eps) -> Tensor");
  m.def("gated(Tensor o, Tensor gate) -> Tensor");
  m.def("glu(Tensor gate_up, bool situ, float beta, float? linear_beta) -> Tensor");
  m.def(
      "mix_norm(Tensor prefix, Tensor bank, Tensor bank_rms, Tensor norm, Tensor proj, "
      "Tensor weight, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) {
  m.impl("rms_norm", TORCH_FN(rms_norm));
  m.impl("gated_norm", TORCH_FN(gated_norm));
  m.impl("gated", TORCH_FN(gated));
  m.impl("glu", TORCH_FN(glu));
  m.impl("mix_norm", TORCH_FN(mix_norm));
}
