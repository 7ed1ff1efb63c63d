// Stands in for the kernels' header of this name.
#pragma once

#include "emulator.h"

namespace rlbench {

inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  emulator::barrier_init(barrier, arrivals);
}
inline void mbarrier_arrive(unsigned barrier) { emulator::barrier_arrive(barrier); }
inline void mbarrier_expect(unsigned barrier, unsigned bytes) {
  emulator::barrier_expect(barrier, bytes);
}
inline void mbarrier_arrive_expecting(unsigned barrier, unsigned bytes) {
  mbarrier_expect(barrier, bytes);
  emulator::barrier_arrive(barrier);
}
inline void mbarrier_arrive_after_copies(unsigned barrier) {
  emulator::arrive_after_copies(barrier);
}
inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  emulator::barrier_wait(barrier, parity);
}
inline void mbarrier_sleep(unsigned barrier, unsigned parity) {
  emulator::barrier_wait(barrier, parity);
}
inline bool mbarrier_is_over(unsigned barrier, unsigned parity) {
  return emulator::barrier_is_over(barrier, parity);
}
inline void mbarrier_hold_until(float, unsigned barrier, unsigned parity) {
  emulator::barrier_must_be_over(barrier, parity);
}

inline void named_barrier(int id, int threads) {
  emulator::named_sync(id, static_cast<unsigned>(threads));
}
inline void named_barrier_arrive(int id, int threads) {
  emulator::named_arrive(id, static_cast<unsigned>(threads));
}

inline void fence_async_proxy() { emulator::fence_writes(); }
inline void fence_barriers() {}

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

}  // namespace rlbench
