// Memory that a thread keeps from call to call: it grows to the widest layer and stays.
#pragma once

#include <cstdint>
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
};

}  // namespace kda
