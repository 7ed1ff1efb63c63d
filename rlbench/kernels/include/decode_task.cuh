// What the kernels for one query a sequence have in common: a thread block's task, and what it
// leaves of a split.
#pragma once

#include "divisor.cuh"
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

  // The divisors are of head tiles, KV heads and sequences (divisors.of_task).
  __device__ __forceinline__ DecodeTask(unsigned place, unsigned sequences, unsigned kv_heads,
                                        unsigned group, Divisor by_head_tiles, Divisor by_kv_heads,
                                        Divisor by_sequences, const int* cu_seqlens_q,
                                        const int* lengths_k)
      : all_heads(static_cast<long long>(kv_heads) * group) {
    const unsigned head_tiles = (group + kHeads - 1) / kHeads;
    const unsigned of_kv_heads = by_head_tiles(place);
    const unsigned of_sequences = by_kv_heads(of_kv_heads);
    const unsigned first = (place - of_kv_heads * head_tiles) * kHeads;
    kv_head = of_kv_heads - of_sequences * kv_heads;
    split = by_sequences(of_sequences);
    sequence = of_sequences - split * sequences;
    first_head = kv_head * group + first;
    heads = static_cast<int>(group - first < kHeads ? group - first : kHeads);
    q_row = cu_seqlens_q[sequence];
    has_query = cu_seqlens_q[sequence + 1] != q_row;
    k_begin = kPaged ? 0 : lengths_k[sequence];
    k_length = kPaged ? lengths_k[sequence] : lengths_k[sequence + 1] - k_begin;
  }
};

// What a decode kernel leaves of each split of each row for attention_combine.cu, in `work`: O, and
// behind all of those what its weights are relative to and four sums of them, one for each quad lane.
constexpr int kStats = 5;
template <int kHeadDim>
struct SplitParts {
  float* work;
  long long sequences, splits, heads;

  __device__ __forceinline__ long long index(unsigned sequence, unsigned split,
                                             unsigned head) const {
    return (sequence * splits + split) * heads + head;
  }
  __device__ __forceinline__ float* columns(unsigned sequence, unsigned split,
                                            unsigned head) const {
    return work + index(sequence, split, head) * kHeadDim;
  }
  __device__ __forceinline__ float* stats(unsigned sequence, unsigned split, unsigned head) const {
    return work + sequences * splits * heads * kHeadDim + index(sequence, split, head) * kStats;
  }
};

__device__ __forceinline__ float& shared_float(unsigned char* memory, int begin, int index) {
  return reinterpret_cast<float*>(memory + begin)[index];
}

__device__ __forceinline__ float2& shared_pair(unsigned char* memory, int begin, int index) {
  return reinterpret_cast<float2*>(memory + begin)[index];
}

}  // namespace rlbench
