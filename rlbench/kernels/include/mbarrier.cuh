// Barriers in shared memory with phases (sm_90 and newer), and register budgets of warpgroups.
#pragma once

namespace rlbench {

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers that this thread has initialized ready for TMA and for the cluster, once these
// threads have met.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The phase is not complete before so many more bytes have arrived; before one of its arrivals.
__device__ __forceinline__ void mbarrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives; the phase is not complete before so many more bytes have arrived, too.
__device__ __forceinline__ void mbarrier_arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once all cp.asyncs that this thread has started are done.
__device__ __forceinline__ void mbarrier_arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity (0 for the first, then 1, 0, ...) is complete.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}

// The same with a hint of how long the hardware may sleep, and wakes a little later. Without one, a warp
// that waits asks every 60 cycles, at the cost of those who work.
__device__ __forceinline__ void mbarrier_sleep(unsigned barrier, unsigned parity) {
  constexpr unsigned kNanoseconds = 10'000'000;
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1, %2;\n"
      "@!done bra again;}"
      ::"r"(barrier), "r"(parity), "r"(kNanoseconds)
      : "memory");
}

// Whether that phase is complete.
__device__ __forceinline__ bool mbarrier_is_over(unsigned barrier, unsigned parity) {
  unsigned over;
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Does nothing, in code that ptxas can neither begin before it has `result`, which is not negative,
// nor move other waits across: it would wait for the phase, which has to be over already.
__device__ __forceinline__ void mbarrier_hold_until(float result, unsigned barrier,
                                                    unsigned parity) {
  asm volatile(
      "{.reg .pred done, never;\n"
      ".reg .b32 phase;\n"
      "setp.lt.f32 never, %2, 0f00000000;\n"
      "vote.sync.any.pred never, never, 0xffffffff;\n"
      "selp.b32 phase, 2, %1, never;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], phase;\n"
      "@!done bra again;}"
      ::"r"(barrier), "r"(parity), "f"(result)
      : "memory");
}

// Makes what was written to shared memory by ordinary means, and cp.async, visible to wgmma, and
// barriers that were initialized to TMA, which may also write after that where it was.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of `threads` threads that share `id`, 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this thread's warp towards it without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The registers of each thread of this warpgroup from here on.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace rlbench
