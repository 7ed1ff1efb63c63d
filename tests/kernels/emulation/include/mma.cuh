// Stands in for the kernels' header of this name, whose head has the layout of fragments.
//
// A k16 step adds its 16 products in fp64, k ascending, and then rounds to fp32: a result that
// depends on nothing else, as a tensor core's does.
#pragma once

#include <cstring>

#include "cuda.h"
#include "numeric.cuh"

namespace rlbench {

inline unsigned half_at(unsigned shared) {
  unsigned short half;
  std::memcpy(&half, emulator::shared_bytes(shared, 2), 2);
  return half;
}

// Lane 8 i + r names the address of row r of matrix i.
template <int kMatrices>
void load_some_matrices(unsigned (&out)[kMatrices], unsigned shared, bool transposed) {
  const emulator::Words* words = emulator::exchange("load_matrices", {{shared}});
  const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  for (int i = 0; i < kMatrices; ++i) {
    const auto element = [&](unsigned row, unsigned column) {
      return half_at(words[8 * i + row].of[0] + 2 * column);
    };
    out[i] = transposed ? element(2 * c, g) | element(2 * c + 1, g) << 16
                        : element(g, 2 * c) | element(g, 2 * c + 1) << 16;
  }
}

inline void load_matrices(unsigned (&out)[4], unsigned shared) {
  load_some_matrices(out, shared, false);
}
inline void load_matrices_transposed(unsigned (&out)[4], unsigned shared) {
  load_some_matrices(out, shared, true);
}
inline void load_two_transposed(unsigned (&out)[2], unsigned shared) {
  load_some_matrices(out, shared, true);
}

// Element k of a fragment's row g + 8 * lower, or column g, that four lanes hold: the register is
// 2 (k / 8) + lower of A, and k / 8 of B.
template <class Element>
float fragment_value(const emulator::Words* words, unsigned g, int k, int register_index) {
  const unsigned pair = words[4 * g + static_cast<unsigned>(k % 8 / 2)].of[register_index];
  return Element::value(k % 2 ? pair >> 16 : pair & 0xffff);
}

template <class Element>
void mma_m16n8k16(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const emulator::Words* words =
      emulator::exchange("mma_m16n8k16", {{a[0], a[1], a[2], a[3], b0, b1}});
  const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  double sums[4] = {};
  for (int k = 0; k < 16; ++k) {
    const double left[2] = {fragment_value<Element>(words, g, k, k / 8 * 2),
                            fragment_value<Element>(words, g, k, k / 8 * 2 + 1)};
    const double right[2] = {fragment_value<Element>(words, 2 * c, k, 4 + k / 8),
                             fragment_value<Element>(words, 2 * c + 1, k, 4 + k / 8)};
    for (int e = 0; e < 4; ++e) sums[e] += left[e / 2] * right[e % 2];
  }
  for (int e = 0; e < 4; ++e) acc[e] = static_cast<float>(acc[e] + sums[e]);
}

}  // namespace rlbench
