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

// Sends eight bytes there, counted towards a barrier of that block (shared_of its address), whose
// phase then says that they have arrived.
__device__ __forceinline__ void send_remote(unsigned remote, float first, float second,
                                            unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          remote),
      "f"(first), "f"(second), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void send_remote(unsigned remote, unsigned first, unsigned second,
                                            unsigned barrier) {
  send_remote(remote, __uint_as_float(first), __uint_as_float(second), barrier);
}

// Says that this block is there, and its barriers (fence_barriers).
__device__ __forceinline__ void cluster_begin() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Says that this block is done with the others' shared memory.
__device__ __forceinline__ void cluster_end() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Arrives at a barrier of another block (shared_of its address).
__device__ __forceinline__ void mbarrier_arrive_remote(unsigned remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

// Waits until all threads of the cluster that have not ended have begun, or are done: before the former,
// and after the latter, the others have no shared memory.
__device__ __forceinline__ void cluster_wait_for_others() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
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
