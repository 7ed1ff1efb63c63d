// Words in global memory by which thread blocks of one grid wait for each other. A block may wait only for
// one of a smaller number: the GPU starts them in that order.
#pragma once

namespace rlbench {

// Waits until the flag says so; then what was written before that can be read with read_current().
__device__ __forceinline__ void await_flag(const unsigned* flag, unsigned value) {
  unsigned seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen != value);
}

// After all who have written have met.
__device__ __forceinline__ void set_flag(unsigned* flag, unsigned value) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// From the L2: an SM's own cache may have what was there before.
__device__ __forceinline__ float4 read_current(const float4* pointer) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(pointer)
               : "memory");
  return value;
}

}  // namespace rlbench
