// Stands in for the kernels' header of this name. Grids run one after the other.
#pragma once

#include "emulator.h"

namespace rlbench {

using emulator::kAddress, emulator::kRankShift;

inline unsigned cluster_rank() { return emulator::running->rank; }

inline unsigned shared_of(unsigned shared, unsigned rank) {
  return rank << kRankShift | (shared & kAddress);
}

inline void send_remote(unsigned remote, float first, float second, unsigned barrier) {
  emulator::send(remote >> kRankShift, remote & kAddress, first, second, barrier & kAddress);
}

inline void send_remote(unsigned remote, unsigned first, unsigned second, unsigned barrier) {
  send_remote(remote, __builtin_bit_cast(float, first), __builtin_bit_cast(float, second), barrier);
}

inline void mbarrier_arrive_remote(unsigned remote) {
  emulator::barrier_arrive(remote >> kRankShift, remote & kAddress);
}

inline void cluster_begin() { emulator::cluster_arrive(); }
inline void cluster_end() { emulator::cluster_arrive(); }
inline void cluster_wait_for_others() { emulator::cluster_wait(); }

inline void let_next_grid_start() {}
inline void wait_for_previous_grid() {}

}  // namespace rlbench
