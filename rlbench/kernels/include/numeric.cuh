// Scalar arithmetic whose bits are part of a kernel's definition.
//
// Everything that rounds is spelled out (__fmaf_rn, __fmul_rn, __fadd_rn, the .approx
// instructions), so that no compiler flag and no surrounding code decides between a*b+c and fma(a,
// b, c).
#pragma once

#include "constants.cuh"

namespace rlbench {

// The two storage types. A value lives in memory as 16 raw bits; pack() rounds two floats to
// nearest even and puts the first into the lower half, which is the lower address and the lower k
// index. value() takes a half in the lower bits, and zeros above.
struct Bf16 {
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }

  static __device__ __forceinline__ float value(unsigned half) {
    return __uint_as_float(half << 16);
  }
};

struct Fp16 {
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }

  static __device__ __forceinline__ float value(unsigned half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<unsigned short>(half)));
    return wide;
  }
};

// 2^x. Exactly 1 for +-0 and exactly +0 for -inf (measured on an H200; the tests check it).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x). Exactly +0 for 1.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace rlbench
