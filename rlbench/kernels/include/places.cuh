// The order in which tiles of rows are worked on, and which of them a thread block takes.
#pragma once

namespace rlbench {

// Which tile of rows the n-th place in the order stands for. Late tiles see the most keys under the causal
// mask, so they come first; but only those of so many KV heads of sequences as have their keys in
// the L2, one section of them after the other. Every other section is gone through backwards, so that
// places which follow each other have about as much to do.
template <class Rows, int kRanks>
struct Places {
  // Of a cluster each, which is a block if there are none.
  unsigned tiles, kv_heads, others, group;  // others: (sequence, KV head) pairs
  unsigned section;                         // pairs that are worked on at a time
  bool causal;

  __device__ __forceinline__ unsigned count() const { return tiles * others; }

  // The tile of one rank of the cluster.
  __device__ __forceinline__ Rows operator()(unsigned place, unsigned rank, const int* cu_seqlens_q,
                                             const int* lengths_k) const {
    const unsigned before = place / (tiles * section) * section;  // pairs
    place -= before * tiles;
    const unsigned left = others - before;
    const unsigned pairs = left < section ? left : section;
    const unsigned round = place / pairs;
    const unsigned pair = before + place - round * pairs;
    const unsigned sequence = pair / kv_heads;
    const bool is_descending = (left + section - 1) / section % 2 == 1;
    const unsigned tile = is_descending ? tiles - 1 - round : round;
    return {tile * kRanks + rank, pair - sequence * kv_heads, sequence, kv_heads,
            group, cu_seqlens_q, lengths_k, causal};
  }
};

// The places of a cluster of kRanks thread blocks, one a round: who comes first in one round comes last in
// the next, so that all have about as much to do where work falls along the line.
template <int kRanks>
struct Deal {
  unsigned place = blockIdx.x / kRanks;
  unsigned step = 2 * (gridDim.x / kRanks - blockIdx.x / kRanks) - 1;

  __device__ __forceinline__ void next() {
    place += step;
    step = 2 * (gridDim.x / kRanks) - step;
  }
};

}  // namespace rlbench
