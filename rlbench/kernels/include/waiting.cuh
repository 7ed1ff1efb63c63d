// What a row has so far waits in memory between splits, because registers hold one O.
#pragma once

#include "merge.cuh"
#include "softmax.cuh"

namespace rlbench {

// A thread's part of O, 32 lanes side by side, in memory for kDimTiles * 32 float4s a warp.
template <int kDimTiles>
__device__ __forceinline__ void leave(float4* waiting, const float (&acc)[kDimTiles][4]) {
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) {
    waiting[n * 32] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
  }
}

// How what waits, whose maxima and sums are `earlier`, is merged with what came after it.
struct Merging {
  MergeScales upper, lower;  // of a thread's rows
  float sums[2];

  __device__ __forceinline__ Merging(float4 earlier, const SoftmaxRows& later, float scale_log2)
      : upper(earlier.x, later.max[0], scale_log2),
        lower(earlier.y, later.max[1], scale_log2),
        sums{upper(earlier.z, later.sum[0]), lower(earlier.w, later.sum[1])} {}

  __device__ __forceinline__ float4 operator()(float4 old, const float (&acc)[4]) const {
    return make_float4(upper(old.x, acc[0]), upper(old.y, acc[1]), lower(old.z, acc[2]),
                       lower(old.w, acc[3]));
  }
};

// Merges what waits, whose maxima and sums are `rows`, into what came after it.
template <int kDimTiles>
__device__ __forceinline__ void meet(const float4* waiting, float4 rows, SoftmaxRows& softmax,
                                     float (&acc)[kDimTiles][4], float scale_log2) {
  const Merging merging(rows, softmax, scale_log2);
  softmax.max[0] = merging.upper.max;
  softmax.max[1] = merging.lower.max;
  softmax.sum[0] = merging.sums[0];
  softmax.sum[1] = merging.sums[1];
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) {
    const float4 merged = merging(waiting[n * 32], acc[n]);
    acc[n][0] = merged.x;
    acc[n][1] = merged.y;
    acc[n][2] = merged.z;
    acc[n][3] = merged.w;
  }
}

// Merges a split's end into what waits, and leaves registers alone, so that products may run meanwhile.
template <int kDimTiles>
__device__ __forceinline__ void join(float4* waiting, float4& rows, const SoftmaxRows& ended,
                                     const float (&acc)[kDimTiles][4], float scale_log2) {
  const Merging merging(rows, ended, scale_log2);
  rows = make_float4(merging.upper.max, merging.lower.max, merging.sums[0], merging.sums[1]);
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) waiting[n * 32] = merging(waiting[n * 32], acc[n]);
}

// The maxima and sums of both of a thread's rows.
__device__ __forceinline__ float4 both_of(const SoftmaxRows& softmax) {
  return make_float4(softmax.max[0], softmax.max[1], softmax.sum[0], softmax.sum[1]);
}

// At the end of a split: merges what waits into the row's part, or starts with it (first); then the
// result waits, and the next split starts afresh, unless this was the last one.
// work: kThreads * (kDimTiles + 1) float4s for each thread block; `thread` counts those with rows.
template <int kThreads, int kDimTiles>
__device__ __forceinline__ void merge_split(float* work, unsigned thread, SoftmaxRows& softmax,
                                            float (&acc)[kDimTiles][4], float scale_log2,
                                            bool first, bool last) {
  constexpr int kWaiting = kDimTiles + 1;
  // A thread's own, 32 lanes side by side.
  float4* waiting = reinterpret_cast<float4*>(work) +
                    (static_cast<long long>(blockIdx.x) * kThreads + thread / 32 * 32) * kWaiting +
                    thread % 32;
  if (!first) meet(waiting, waiting[kDimTiles * 32], softmax, acc, scale_log2);
  if (!last) {
    waiting[kDimTiles * 32] = both_of(softmax);
    leave(waiting, acc);
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[n][e] = 0.0f;
    }
    softmax = SoftmaxRows();
  }
}

}  // namespace rlbench
