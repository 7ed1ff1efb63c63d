// What the kernels of the backward have in common: their parameters, and how a weight is found again.
#pragma once

#include "numeric.cuh"

namespace rlbench {

// Each is 8 bytes wide, so that the host passes plain integers and floats; `Backward.numbers` has the
// same order.
//
// q, out, dout, dq  [total_q, group * kv_heads, head_dim]
// k, v, dk, dv      [total_k, kv_heads, head_dim]
// lse, delta        [total_q, group * kv_heads]; delta is scratch
// cu_seqlens_q, _k  [sequences + 1]
#define RLBENCH_BACKWARD_PARAMETERS                                                               \
  const unsigned short *__restrict__ q, const unsigned short *__restrict__ k,                     \
      const unsigned short *__restrict__ v, const unsigned short *__restrict__ out,               \
      const float *__restrict__ lse, const unsigned short *__restrict__ dout,                     \
      unsigned short *__restrict__ dq, unsigned short *__restrict__ dk,                           \
      unsigned short *__restrict__ dv, float *__restrict__ delta,                                 \
      const int *__restrict__ cu_seqlens_q, const int *__restrict__ cu_seqlens_k,                 \
      long long q_row_stride, long long q_head_stride, long long k_row_stride,                    \
      long long k_head_stride, long long v_row_stride, long long v_head_stride,                   \
      long long out_row_stride, long long out_head_stride, long long dout_row_stride,             \
      long long dout_head_stride, long long dq_row_stride, long long dq_head_stride,              \
      long long dk_row_stride, long long dk_head_stride, long long dv_row_stride,                 \
      long long dv_head_stride, long long kv_heads_arg, long long group_arg,                      \
      long long sequences_arg, long long causal_arg, double scale_arg, double scale_log2_arg

// What is subtracted from a row's scaled scores, from its log-sum-exp. A row that sees no key has no
// weight: then it is infinity.
__device__ __forceinline__ float scaled_lse(float lse) {
  return lse == -kInfinity ? kInfinity : __fmul_rn(lse, kLog2E);
}

// P, from a score and that.
__device__ __forceinline__ float weight_of(float score, float scale_log2, float scaled) {
  return exp2_approx(__fmaf_rn(score, scale_log2, -scaled));
}

// dS, up to the softmax's scale.
__device__ __forceinline__ float score_gradient(float weight, float weight_gradient, float delta) {
  return __fmul_rn(weight, __fsub_rn(weight_gradient, delta));
}

// The end of every sum. Adding +0 makes -0, which blocks without a seen key could turn into +0, +0.
__device__ __forceinline__ float finished(float sum, float scale) {
  return __fmaf_rn(sum, scale, 0.0f);
}

}  // namespace rlbench
