// Stands in for the kernels' header of this name: conversions in integers, and the approximate
// instructions by the C library. The kernels' bits are compared with one another, not with a GPU's.
#pragma once

#include "constants.cuh"

namespace rlbench {

struct Bf16 {
  static float value(unsigned half) { return __builtin_bit_cast(float, half << 16); }

  // To nearest even; a carry goes into the exponent, as it should.
  static unsigned round(float wide) {
    const unsigned bits = __builtin_bit_cast(unsigned, wide);
    if (wide != wide) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }

  static unsigned pack(float low, float high) { return round(low) | round(high) << 16; }
};

struct Fp16 {
  static float value(unsigned half) {
    const bool is_finite = (half & 0x7c00) != 0x7c00;
    // The exponents' biases differ by 112. A product is right for subnormals, too.
    const float size = is_finite ? __builtin_bit_cast(float, (half & 0x7fff) << 13) * 0x1p112f
                                 : __builtin_bit_cast(float, 0x7f800000u | (half & 0x3ff) << 13);
    return half & 0x8000 ? -size : size;
  }

  static unsigned round(float wide) {
    const unsigned bits = __builtin_bit_cast(unsigned, wide);
    const unsigned sign = bits >> 16 & 0x8000;
    const float size = __builtin_fabsf(wide);
    if (wide != wide) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | static_cast<unsigned>(__builtin_rintf(size * 0x1p24f));
    const unsigned rebiased = (bits & 0x7fffffff) - (112u << 23);
    return sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13;
  }

  static unsigned pack(float low, float high) { return round(low) | round(high) << 16; }
};

inline float exp2_approx(float x) {
  const float y = __builtin_exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // no subnormals
}

inline float log2_approx(float x) { return __builtin_log2f(x); }

}  // namespace rlbench
