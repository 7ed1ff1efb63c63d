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

// delta of a row, in each of the four lanes that have it: of the columns 8 t + 2 c and the next one for the
// lane's c. Zero where there is no row.
template <int kHeadDim, class Element>
__device__ __forceinline__ float delta_of(const unsigned short* out, const unsigned short* dout,
                                          bool present, int lane) {
  out += lane % 4 * 2;
  dout += lane % 4 * 2;
  float sum = 0.0f;
#pragma unroll 4
  for (int t = 0; t < kHeadDim / 8; ++t) {
    const unsigned o = present ? *reinterpret_cast<const unsigned*>(out + 8 * t) : 0;
    const unsigned d = present ? *reinterpret_cast<const unsigned*>(dout + 8 * t) : 0;
    sum = __fmaf_rn(Element::value(d & 0xffff), Element::value(o & 0xffff), sum);
    sum = __fmaf_rn(Element::value(d >> 16), Element::value(o >> 16), sum);
  }
  const float pair = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));
  return __fadd_rn(pair, __shfl_xor_sync(kFullWarp, pair, 2));
}

// A thread block's tile of keys: tile t of sequence b is the (cu_seqlens_k[b] / kTileKeys + b + t)-th, which
// leaves some numbers without a tile, but depends on no length that the host would have to know.
template <int kTileKeys>
struct KeyTileOf {
  unsigned sequence;
  int begin, length;  // of its keys
  int first_key;      // of the tile, in the sequence
  bool exists;

  __device__ __forceinline__ KeyTileOf(unsigned number, const int* cu_seqlens_k,
                                       unsigned sequences) {
    unsigned low = 0, high = sequences;  // low's first tile is not behind `number`, high's is
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      (first_number(middle, cu_seqlens_k) <= number ? low : high) = middle;
    }
    sequence = low;
    begin = cu_seqlens_k[low];
    length = cu_seqlens_k[low + 1] - begin;
    const unsigned first = first_number(low, cu_seqlens_k);
    first_key = static_cast<int>(number - first) * kTileKeys;
    exists = number >= first && first_key < length;  // keys may come before the first sequence
  }

 private:
  static __device__ __forceinline__ unsigned first_number(unsigned sequence,
                                                          const int* cu_seqlens_k) {
    return static_cast<unsigned>(cu_seqlens_k[sequence]) / kTileKeys + sequence;
  }
};

// The end of every sum. Adding +0 makes -0, which blocks without a seen key could turn into +0, +0.
__device__ __forceinline__ float finished(float sum, float scale) {
  return __fmaf_rn(sum, scale, 0.0f);
}

}  // namespace rlbench
