// What the kernels for one query a sequence make of a warp's scores of 16 keys. Lane (g, c) of the
// tensor core's accumulator has the keys g and g + 8, for the heads 2c and 2c + 1.
#pragma once

#include "numeric.cuh"

namespace rlbench {

// The largest score of all 16 keys: of head 2c in lanes whose g is even, else of head 2c + 1.
__device__ __forceinline__ float largest_of_keys(const float (&scores)[4], int g) {
  const bool is_even = g % 2 == 0;
  const float even = fmaxf(scores[0], scores[2]), odd = fmaxf(scores[1], scores[3]);
  float largest =
      fmaxf(is_even ? even : odd, __shfl_xor_sync(kFullWarp, is_even ? odd : even, 4));
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 8));
  return fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 16));
}

// Their weights, relative to `scaled` (of both heads): rounded, both heads' in a word, for keys g and
// g + 8; and the sums of pairs of keys, for the head and the pairs that kept_by() says.
template <class Element>
struct KeyWeights {
  unsigned rounded[2];
  float pairs[2];

  __device__ __forceinline__ KeyWeights(const float (&scores)[4], const float (&scaled)[2],
                                        float scale_log2, int g) {
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[e] = exp2_approx(__fmaf_rn(scores[e], scale_log2, -scaled[e % 2]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Keys 2q and 2q + 1 are in lanes whose g differ in the last bit.
      const float even = p[2 * half], odd = p[2 * half + 1];
      rounded[half] = Element::pack(even, odd);
      pairs[half] = __fadd_rn(g % 2 == 0 ? even : odd,
                              __shfl_xor_sync(kFullWarp, g % 2 == 0 ? odd : even, 4));
    }
  }

  // The lane 4 h + q of the summing warp that adds up this lane's pairs: q and q + 4 of head h.
  static __device__ __forceinline__ int kept_by(int g, int c) {
    return (2 * c + g % 2) * 4 + g / 2;
  }
};

}  // namespace rlbench
