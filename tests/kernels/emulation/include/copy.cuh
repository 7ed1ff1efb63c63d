// Stands in for the kernels' header of this name: copies that happen early or late.
#pragma once

#include "emulator.h"
#include "swizzle.cuh"

namespace rlbench {

inline unsigned shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  const auto offset = static_cast<unsigned>(byte - emulator::running->shared);
  return emulator::running->rank << emulator::kRankShift | (emulator::kSharedBegin + offset);
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

inline void write_zeros(unsigned shared) { emulator::write_zeros(shared); }

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
