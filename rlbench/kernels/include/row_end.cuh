// The end of a row: what its sums are divided by, and its log-sum-exp.
#pragma once

#include "numeric.cuh"

namespace rlbench {

// A row without keys is 0 with an lse of -inf; one that is impossible (more keys than there was
// room for) is NaN, so that nobody takes it for a result.
__device__ __forceinline__ float inverse_of(float total, bool impossible) {
  return impossible ? kNan : total == 0.0f ? 0.0f : __frcp_rn(total);
}

__device__ __forceinline__ float log_sum_exp(float max, float total, double scale,
                                             bool impossible) {
  const float log_sum = __fmul_rn(log2_approx(total), kLn2);
  return impossible      ? kNan
         : total == 0.0f ? -kInfinity
                         : __fmaf_rn(max, static_cast<float>(scale), log_sum);
}

}  // namespace rlbench
