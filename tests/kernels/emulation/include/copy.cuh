// Stands in for the kernels' header of this name: copies that happen early or late.
#pragma once

#include "emulator.h"

namespace rlbench {

constexpr int kChunkBytes = 16;

inline unsigned shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  return emulator::kSharedBegin + static_cast<unsigned>(byte - emulator::running->shared);
}

template <int kRowBytes>
unsigned swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes % 128 == 0, "the swizzle permutes the eight chunks of 128 bytes");
  return static_cast<unsigned>(row * kRowBytes + ((chunk ^ (row & 7)) * kChunkBytes));
}

inline void copy_async(unsigned shared, const void* global, bool present) {
  emulator::start_copy(shared, global, present);
}
inline void copy_async(unsigned shared, const void* global) {
  emulator::start_copy(shared, global, true);
}

inline void copy_async_if(bool wanted, unsigned shared, const void* global, bool present) {
  if (wanted) emulator::start_copy(shared, global, present);
}

template <int kBytes>
void prefetch_to_l2(const void* global) {
  emulator::check_global(global, kBytes);
}

inline void copy_async_commit() { emulator::commit_copies(); }

template <int kPending>
void copy_async_wait() {
  emulator::wait_copies(kPending);
}

inline void copy_async_wait_all() {
  emulator::commit_copies();
  emulator::wait_copies(0);
}

}  // namespace rlbench
