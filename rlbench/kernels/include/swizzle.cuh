// Where 16-byte chunks are in shared memory. The emulator takes this header as it is.
#pragma once

namespace rlbench {

constexpr int kChunkBytes = 16;

// Byte offset of a 16-byte chunk in a tile whose rows are kRowBytes long, a multiple of 128. The
// XOR spreads one chunk column of eight consecutive rows over all 32 banks, which is what ldmatrix
// reads.
template <int kRowBytes>
__device__ __forceinline__ unsigned swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes % 128 == 0, "the swizzle permutes the eight chunks of 128 bytes");
  return static_cast<unsigned>(row * kRowBytes + ((chunk ^ (row & 7)) * kChunkBytes));
}

}  // namespace rlbench
