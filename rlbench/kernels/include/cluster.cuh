// Thread block clusters (sm_90 and newer): each other's shared memory, and a barrier over all. And
// grids that start before the one that they depend on has ended.
#pragma once

namespace rlbench {

// This block's place in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where the block `rank` of the cluster has what this one has at `shared`.
__device__ __forceinline__ unsigned shared_of(unsigned shared, unsigned rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

__device__ __forceinline__ void store_remote(unsigned remote, unsigned value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}

__device__ __forceinline__ void store_remote(unsigned remote, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

// A barrier of all threads of all blocks, in two halves: what was stored before the first, anywhere
// in the cluster, is seen after the second.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Lets the next grid of the stream start, once all blocks of this one have got here.
__device__ __forceinline__ void let_next_grid_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the grids before this one have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace rlbench
