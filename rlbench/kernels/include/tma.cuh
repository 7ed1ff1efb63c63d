// Copies of boxes of a tensor that the tensor memory accelerator makes (sm_90 and newer).
#pragma once

namespace rlbench {

// What the driver has encoded (CUtensorMap): where a tensor lies, and how large a box of it is.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// Whether this lane is the one of its warp that asks for boxes: the compiler then knows that it is
// the only one, and that all of its registers are uniform.
__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile(
      "{.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;}"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts copying the box whose first element has these coordinates, the fastest first, to shared
// memory, zeros for what is outside of the tensor. One thread asks for it; the bytes that have
// arrived are counted towards the barrier.
//
// Some part of the box must be inside. For one that is wholly outside, in whatever dimension, an H200
// reads at the map's base address, which is an illegal access if nothing is mapped there: maps of
// tensor_map.of_ends and of_keys begin before their tensors.
__device__ __forceinline__ void copy_box(unsigned shared, const TensorMap* map, unsigned barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same for all kRanks blocks of a cluster: the box comes to where they have what this one has at
// `shared`, and is counted towards their barriers.
template <int kRanks>
__device__ __forceinline__ void copy_box(unsigned shared, const TensorMap* map, unsigned barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  if constexpr (kRanks == 1) {
    copy_box(shared, map, barrier, c0, c1, c2, c3, c4);
  } else {
    constexpr unsigned short kAll = (1 << kRanks) - 1;
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(kAll)
        : "memory");
  }
}

// Starts bringing a box into the L2.
__device__ __forceinline__ void prefetch_box(const TensorMap* map, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace rlbench
