// Memory that a thread keeps from call to call: it grows to the widest layer and stays.
#pragma once

#include <cstdint>
#include <deque>
#include <new>

namespace kda {

// Numbers aligned for vectors; what they hold before they are written means nothing.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { ::operator delete[](numbers_, kAlignment); }

  T* at_least(int64_t count) {
    if (count > capacity_) {
      ::operator delete[](numbers_, kAlignment);
      numbers_ = nullptr;
      capacity_ = 0;
      numbers_ = static_cast<T*>(::operator new[](sizeof(T) * count, kAlignment));
      capacity_ = count;
    }
    return numbers_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  T* numbers_ = nullptr;
  int64_t capacity_ = 0;
};

// States in slices, one block of tokens of one head, and what its operands are made from.
template <class T>
struct Scratch {
  Buffer<T> state;
  Buffer<T> alpha, k, q, v, o, beta, kq;
  Buffer<T> raw, y;
  std::deque<Buffer<T>> taps;  // of the sources that are in use together
  size_t sources = 0;

  // The taps of one more source.
  T* next_taps(int64_t count) {
    if (sources == taps.size()) taps.emplace_back();
    return taps[sources++].at_least(count);
  }
};

}  // namespace kda
