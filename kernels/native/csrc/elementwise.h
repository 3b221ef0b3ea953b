// Functions of single numbers, in forms that the compiler turns into vector code and that give one
// number the same bits wherever it lies in memory. The twins of kernels/numerics.py and gates.py.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace kda {

// a * b + c for single numbers, rounded as the vectors of this build round it.
template <class T>
KDA_INLINE T fma1(T a, T b, T c) {
#if defined(__FMA__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x = scale (1 + rest) with scale a power of two and |rest| < 0.42, for -87.3 <= x <= 88.
struct PowerOfTwo {
  float scale, rest;
};

KDA_INLINE PowerOfTwo split_exponential(float x) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = fma1(x, 1.44269504f, shift), n = shifted - shift;
  const float r = fma1(n, 2.12194440e-4f, fma1(n, -0.693359375f, x));  // x - n log 2
  float p = 1.9875691e-4f;
  p = fma1(p, r, 1.3981999e-3f);
  p = fma1(p, r, 8.3334519e-3f);
  p = fma1(p, r, 4.1665796e-2f);
  p = fma1(p, r, 1.6666666e-1f);
  p = fma1(p, r, 5.0000001e-1f);
  const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(shift);
  return {std::bit_cast<float>((whole + 127) << 23), fma1(r * r, p, r)};
}

// e^x for x <= 88, error below 1 ulp; 0 where the result would be subnormal.
KDA_INLINE float exponential(float x) {
  const float smallest = -87.3365f;
  const PowerOfTwo power = split_exponential(x < smallest ? smallest : x);
  return x < smallest ? 0.0f : (1.0f + power.rest) * power.scale;
}

KDA_INLINE double exponential(double x) { return std::exp(x); }

// tanh x = -m / (2 + m) with m = e^(-2|x|) - 1 and the sign of x, error below 3 ulp.
KDA_INLINE float tanh(float x) {
  const float y = -2.0f * std::fabs(x);
  const PowerOfTwo power = split_exponential(y < -60.0f ? -60.0f : y);
  const float m = fma1(power.scale, power.rest, power.scale - 1.0f);
  return std::copysign(-m / (2.0f + m), x);
}

KDA_INLINE double tanh(double x) { return std::tanh(x); }

// log(1 + x) for 0 <= x <= 1: 2 artanh(x / (2 + x)) as a series, error below 2 ulp.
KDA_INLINE float log_one_plus(float x) {
  const float s = x / (2.0f + x), s2 = s * s;
  float p = 1.0f / 15;
  p = fma1(p, s2, 1.0f / 13);
  p = fma1(p, s2, 1.0f / 11);
  p = fma1(p, s2, 1.0f / 9);
  p = fma1(p, s2, 1.0f / 7);
  p = fma1(p, s2, 1.0f / 5);
  p = fma1(p, s2, 1.0f / 3);
  return 2.0f * fma1(p * s2, s, s);
}

KDA_INLINE double log_one_plus(double x) { return std::log1p(x); }

// e^-x, finite: logits below -87 (-700) count as that bound.
template <class T>
KDA_INLINE T exponential_of_negative(T x) {
  const T smallest = sizeof(T) == 4 ? T(-87) : T(-700);
  return exponential(x < smallest ? -smallest : -x);
}

template <class T>
KDA_INLINE T sigmoid(T x) {
  return T(1) / (T(1) + exponential_of_negative(x));
}

template <class T>
KDA_INLINE T silu(T x) {
  return x / (T(1) + exponential_of_negative(x));
}

template <class T>
KDA_INLINE T softplus(T x) {
  return (x < T(0) ? T(0) : x) + log_one_plus(exponential(x > T(0) ? -x : x));
}

// sum of a[i] b[i]: one partial sum a lane, then halves upon halves.
template <class T>
KDA_INLINE T dot(const T* a, const T* b, int64_t n) {
  constexpr int L = kLanes<T>;
  Vec<T> sums{};
  int64_t i = 0;
  for (; i + L <= n; i += L) sums = fma<T>(load(a + i), load(b + i), sums);
  T parts[L];
  store(parts, sums);
  for (; i < n; ++i) parts[i % L] = fma1(a[i], b[i], parts[i % L]);
  for (int half = L / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) parts[j] += parts[j + half];
  }
  return parts[0];
}

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

template <class T>
KDA_INLINE T widen(T x) {
  return x;
}

template <class T>
KDA_INLINE T widen(BFloat16 x) {
  return std::bit_cast<float>(uint32_t(x.bits) << 16);
}

// A vector of wide numbers.
template <class T, class A>
KDA_INLINE Vec<T> load_wide(const A* from) {
  if constexpr (std::is_same_v<T, A>) {
    return load(from);
  } else {
    typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
    typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return std::bit_cast<Vec<T>>(__builtin_convertvector(halves, Words) << 16);
  }
}

template <class A, class T>
KDA_INLINE A narrow(T x) {
  return x;
}

// To the nearest, ties to even; NaN stays NaN.
template <>
KDA_INLINE BFloat16 narrow<BFloat16, float>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0)};
}

// `count` numbers in the wide type: where they are, or copied to `room`.
template <class T, class A>
KDA_INLINE const T* widened(const A* x, int64_t count, T* room) {
  if constexpr (std::is_same_v<T, A>) {
    return x;
  } else {
    for (int64_t i = 0; i < count; ++i) room[i] = widen<T>(x[i]);
    return room;
  }
}

}  // namespace kda
