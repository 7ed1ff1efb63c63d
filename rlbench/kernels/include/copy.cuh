// Moving bytes between global and shared memory in 16-byte chunks.
#pragma once

#include "swizzle.cuh"

namespace rlbench {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Starts copying one chunk to shared memory. An absent chunk is written as zeros and its source is
// not read at all.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, bool present) {
  const int source_bytes = present ? kChunkBytes : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// Starts copying one chunk that is there.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Starts copying one chunk if it is wanted: zeros if it is absent.
__device__ __forceinline__ void copy_async_if(bool wanted, unsigned shared, const void* global,
                                              bool present) {
  const int source_bytes = present ? kChunkBytes : 0;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(source_bytes), "r"(static_cast<int>(wanted))
      : "memory");
}

// Writes one chunk of zeros to shared memory, by ordinary means.
__device__ __forceinline__ void write_zeros(unsigned shared) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

// Closes a group of copies: those that this thread started since the last group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until every copy that this thread started has landed. Other threads see it after a barrier.
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rlbench
