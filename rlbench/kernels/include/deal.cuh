// Which places of a line a thread block takes, where there are fewer blocks than places.
#pragma once

namespace rlbench {

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
