// What the programs that test the headers share: random numbers, arrays without slack, verdicts.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "elementwise.h"

inline std::mt19937_64 random_bits(7);
inline int failures = 0;

inline double normal() { return std::normal_distribution<double>()(random_bits); }

inline void check(const char* what, double error, double allowed) {
  if (error <= allowed) return;  // false for NaN
  std::printf("%s: error %g, allowed %g\n", what, error, allowed);
  ++failures;
}

// Just the numbers, on the heap, without slack.
template <class T>
struct Array {
  explicit Array(int64_t count) : size(count), numbers(new T[count]()) {}
  T* data() const { return numbers.get(); }
  T& operator[](int64_t i) const { return numbers[i]; }

  int64_t size;
  std::unique_ptr<T[]> numbers;
};

template <class T>
double relative_error(const Array<T>& got, const std::vector<double>& truth) {
  double worst = 0, largest = 1e-300;
  for (int64_t i = 0; i < got.size; ++i) {
    const double difference = std::abs(double(got[i]) - truth[i]);
    if (!(difference <= worst)) worst = difference;
    if (std::isnan(worst)) return worst;  // worse than anything
    largest = std::max(largest, std::abs(truth[i]));
  }
  return worst / largest;
}

inline double to_double(kda::BFloat16 x) { return kda::widen<float>(x); }
inline double to_double(double x) { return x; }

template <class A>
A from_double(double x) {
  if constexpr (sizeof(A) == 2) {
    return A{uint16_t(std::bit_cast<uint32_t>(float(x)) >> 16)};
  } else {
    return A(x);
  }
}
