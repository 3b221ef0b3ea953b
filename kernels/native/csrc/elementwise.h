// Functions of single numbers, in forms that the compiler turns into vector code and that give one
// number the same bits wherever it lies in memory. The twins of kernels/numerics.py and gates.py.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

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

// e^x for x <= 88, error below 1 ulp; 0 where the result would be subnormal.
KDA_INLINE float exponential(float x) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float smallest = -87.3365f, bounded = x < smallest ? smallest : x;
  const float shifted = fma1(bounded, 1.44269504f, shift), n = shifted - shift;
  const float r = fma1(n, 2.12194440e-4f, fma1(n, -0.693359375f, bounded));  // x - n log 2
  float p = 1.9875691e-4f;
  p = fma1(p, r, 1.3981999e-3f);
  p = fma1(p, r, 8.3334519e-3f);
  p = fma1(p, r, 4.1665796e-2f);
  p = fma1(p, r, 1.6666666e-1f);
  p = fma1(p, r, 5.0000001e-1f);
  const float mantissa = 1.0f + fma1(r * r, p, r);
  const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(shift);
  const float scale = std::bit_cast<float>((whole + 127) << 23);
  return x < smallest ? 0.0f : mantissa * scale;
}

KDA_INLINE double exponential(double x) { return std::exp(x); }

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

}  // namespace kda
