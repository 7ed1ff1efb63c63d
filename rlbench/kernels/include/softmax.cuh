// The online softmax over one block of keys, on accumulators in the layout of mma.cuh.
#pragma once

#include "numeric.cuh"

namespace rlbench {

// Two rows of a warp's 16 (index 0: row g, index 1: row g + 8), as one lane holds them.
struct SoftmaxRows {
  float max[2];  // what weights are relative to, the same in a row's four lanes; -inf at first
  float sum[2];  // of the weights in this lane's own columns; the four lanes are added at the end

  __device__ __forceinline__ SoftmaxRows() : max{-kInfinity, -kInfinity}, sum{0.0f, 0.0f} {}

  // Replaces raw scores by weights exp2(scale * (score - max)) and returns in `rescale` what the
  // sums of the earlier blocks were multiplied by: the caller does the same to its accumulators.
  // False if that changes nothing in any of the warp's rows.
  template <int kTiles>
  __device__ __forceinline__ bool block(float (&scores)[kTiles][4], float scale,
                                        float (&rescale)[2]) {
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = next_max(scores, r);
      changed = changed || next != max[r];
      rescale[r] = move(r, next, scale);
      weigh<0, kTiles>(scores, r, scale);
    }
    return __any_sync(kFullWarp, changed);
  }

  // The same in two halves, for a caller that waits for something between them: the first row's
  // exponentials, which take longest, do not wait for the second row's maximum. This one begins the
  // first row, up to the weights of kFirst tiles, and returns the largest of this lane's scores of the
  // second row. ptxas would find both maxima first; so the second one is made to depend on the first.
  // `lowest` is -inf, without the compiler knowing.
  template <int kFirst, int kTiles>
  __device__ __forceinline__ float begin_block(float (&scores)[kTiles][4], float scale,
                                               float (&rescale)[2], float lowest) {
    const float first = own_max(scores, 0, scores[0][0]);
    const float second = own_max(scores, 1, fminf(first, lowest));
    rescale[0] = move(0, row_max(0, first), scale);
    weigh<0, kFirst>(scores, 0, scale);
    return second;
  }

  // And this one does the rest.
  template <int kFirst, int kTiles>
  __device__ __forceinline__ void end_block(float (&scores)[kTiles][4], float second, float scale,
                                            float (&rescale)[2]) {
    rescale[1] = move(1, row_max(1, second), scale);
    weigh<kFirst, kTiles>(scores, 0, scale);
    weigh<0, kTiles>(scores, 1, scale);
  }

  // The whole row's sum, (lane 0 + lane 1) + (lane 2 + lane 3) of its four lanes, in each of them.
  __device__ __forceinline__ float total(int r) const {
    const float pair = __fadd_rn(sum[r], __shfl_xor_sync(kFullWarp, sum[r], 1));
    return __fadd_rn(pair, __shfl_xor_sync(kFullWarp, pair, 2));
  }

 private:
  // What weights are relative to with this block. The weight that counts most is then exactly 1,
  // which rounding leaves alone: a maximum that lags behind, so as to rescale rarely, costs a tenth
  // of the accuracy.
  template <int kTiles>
  __device__ __forceinline__ float next_max(const float (&scores)[kTiles][4], int r) const {
    return row_max(r, own_max(scores, r, scores[0][2 * r]));
  }

  // The largest of this lane's scores and of `largest`.
  template <int kTiles>
  static __device__ __forceinline__ float own_max(const float (&scores)[kTiles][4], int r,
                                                  float largest) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      largest = fmaxf(largest, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
    }
    return largest;
  }

  __device__ __forceinline__ float row_max(int r, float largest) const {
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    return fmaxf(max[r], largest);
  }

  // A row that has seen no key yet: -inf - -inf would be NaN. Zero is as good as any other reference,
  // since every weight and every sum of that row is zero.
  static __device__ __forceinline__ float reference_of(float max) {
    return max == -kInfinity ? 0.0f : max;
  }

  // Makes the sum relative to `next`, and returns what it was multiplied by.
  __device__ __forceinline__ float move(int r, float next, float scale) {
    // The difference, not fma(max, scale, -scaled): an unchanged reference must give exp2(0) = 1.
    const float rescale = exp2_approx(__fmul_rn(__fsub_rn(max[r], reference_of(next)), scale));
    max[r] = next;
    sum[r] = __fmul_rn(sum[r], rescale);
    return rescale;
  }

  // Weights of a row's tiles from kFrom to kTo.
  template <int kFrom, int kTo, int kTiles>
  __device__ __forceinline__ void weigh(float (&scores)[kTiles][4], int r, float scale) {
    const float scaled = __fmul_rn(reference_of(max[r]), scale);
#pragma unroll
    for (int j = kFrom; j < kTo; ++j) {
      const float even = exp2_approx(__fmaf_rn(scores[j][2 * r], scale, -scaled));
      const float odd = exp2_approx(__fmaf_rn(scores[j][2 * r + 1], scale, -scaled));
      scores[j][2 * r] = even;
      scores[j][2 * r + 1] = odd;
      sum[r] = __fadd_rn(sum[r], __fadd_rn(even, odd));
    }
  }
};

// What is done to accumulators when their rows' references change.
template <int kTiles>
__device__ __forceinline__ void rescale_all(float (&acc)[kTiles][4], const float (&rescale)[2]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] = __fmul_rn(acc[n][e], rescale[e / 2]);
  }
}

}  // namespace rlbench
