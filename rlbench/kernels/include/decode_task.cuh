// What the kernels for one query a sequence have in common: a thread block's task, and its query.
#pragma once

#include "numeric.cuh"

namespace rlbench {

constexpr int kHeads = 8;  // query heads that are taken together: the n of m16n8k16

// Which split of which sequence for which heads. Later splits are absent more often, so they come
// last.
template <bool kPaged>
struct DecodeTask {
  unsigned kv_head, sequence, split;
  unsigned first_head;
  int heads;            // that there are, of kHeads
  long long all_heads;  // of the sequence
  int q_row, k_begin, k_length;
  bool has_query;

  __device__ __forceinline__ DecodeTask(unsigned place, unsigned sequences, unsigned kv_heads,
                                        unsigned group, const int* cu_seqlens_q,
                                        const int* lengths_k)
      : all_heads(static_cast<long long>(kv_heads) * group) {
    const unsigned head_tiles = (group + kHeads - 1) / kHeads;
    const unsigned first = place % head_tiles * kHeads;
    place /= head_tiles;
    kv_head = place % kv_heads;
    place /= kv_heads;
    sequence = place % sequences;
    split = place / sequences;
    first_head = kv_head * group + first;
    heads = static_cast<int>(group - first < kHeads ? group - first : kHeads);
    q_row = cu_seqlens_q[sequence];
    has_query = cu_seqlens_q[sequence + 1] != q_row;
    k_begin = kPaged ? 0 : lengths_k[sequence];
    k_length = kPaged ? lengths_k[sequence] : lengths_k[sequence + 1] - k_begin;
  }

  // The query's fragments of B, one for each k16 step. A head that there is not gets the last one's:
  // nobody asks for its results.
  template <int kHeadDim>
  __device__ __forceinline__ void load_query(unsigned (&fragments)[kHeadDim / 16][2],
                                             const unsigned short* q, long long row_stride,
                                             long long head_stride, int lane) const {
    const int head = lane / 4 < heads ? lane / 4 : heads - 1;
    q += q_row * row_stride + (first_head + head) * head_stride + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        fragments[d][half] = *reinterpret_cast<const unsigned*>(q + 16 * d + 8 * half);
      }
    }
  }
};

// The largest score of 16 keys, of which this lane has two, for one head; in all of its lanes.
__device__ __forceinline__ float largest_of_keys(float score, float eight_keys_on) {
  float largest = fmaxf(score, eight_keys_on);
#pragma unroll
  for (int other = 4; other < 32; other *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, other));
  }
  return largest;
}

__device__ __forceinline__ float& shared_float(unsigned char* memory, int begin, int index) {
  return reinterpret_cast<float*>(memory + begin)[index];
}

}  // namespace rlbench
