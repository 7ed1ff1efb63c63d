// Merging two parts of a row that were computed over different keys, as the definition has it.
#pragma once

#include "numeric.cuh"

namespace rlbench {

// What the sums of each part are multiplied by before they are added: earlier * old + later * now.
struct MergeScales {
  float max, old, now;

  __device__ __forceinline__ MergeScales(float earlier_max, float later_max, float scale_log2)
      : max(fmaxf(earlier_max, later_max)) {
    const float reference = max == -kInfinity ? 0.0f : max;
    old = exp2_approx(__fmul_rn(__fsub_rn(earlier_max, reference), scale_log2));
    now = exp2_approx(__fmul_rn(__fsub_rn(later_max, reference), scale_log2));
  }

  __device__ __forceinline__ float operator()(float earlier, float later) const {
    return merge(earlier, old, later, now);
  }

  static __device__ __forceinline__ float merge(float earlier, float old, float later, float now) {
    return __fmaf_rn(later, now, __fmul_rn(earlier, old));
  }
};

}  // namespace rlbench
