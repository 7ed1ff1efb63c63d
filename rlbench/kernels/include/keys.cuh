// Where keys and values lie in memory, packed or paged, and copying them to shared memory.
#pragma once

#include "copy.cuh"
#include "numeric.cuh"

namespace rlbench {

// Where a key lies: its page and the row inside it.
struct KeySlot {
  int page;
  int row;
};

struct Strides {  // in elements
  long long page, row, head;
};

// The rows of K or V that one of kWarps warps copies, block by block. Tile::offset(row, chunk) is
// where a 16-byte chunk goes in the block's shared memory.
template <int kHeadDim, int kBlockKeys, int kWarps, bool kPaged, class Tile>
struct KeyRows {
  static constexpr int kRowChunks = kHeadDim * 2 / kChunkBytes;
  static constexpr int kRowsAtOnce = 32 / kRowChunks;      // rows that the warp copies in one go
  static constexpr int kWarpKeys = kBlockKeys / kWarps;    // rows that it copies in all
  static constexpr int kKeySlots = (kWarpKeys + 31) / 32;  // of these, what one lane looks up
  static_assert(kKeySlots <= 2, "copy() chooses between two");
  static_assert(kBlockKeys % kWarps == 0 && kWarpKeys % kRowsAtOnce == 0, "copies come out even");

  const int* table;      // this sequence's row of the block table (paged)
  unsigned page_size;    // (paged)
  long long first_row;   // of the sequence in the packed tensor (contiguous)
  int end;               // keys at or past it are absent
  KeySlot slots[kKeySlots];

  // Looks up the block that starts at `first_key`: lane t keeps the warp's rows t, t + 32, ...
  __device__ __forceinline__ void find(int first_key, int warp, int lane) {
    if constexpr (kPaged) {
#pragma unroll
      for (int s = 0; s < kKeySlots; ++s) {
        const int row = s * 32 + lane;
        const int key = first_key + warp * kWarpKeys + row;
        slots[s] = {0, 0};
        if (row < kWarpKeys && key < end) {
          const unsigned page = static_cast<unsigned>(key) / page_size;
          slots[s].page = table[page];
          slots[s].row = static_cast<int>(static_cast<unsigned>(key) - page * page_size);
        }
      }
    }
  }

  // Starts copying the block's rows of one tensor, zeros for absent keys. All lanes take part.
  __device__ __forceinline__ void copy(unsigned shared, const unsigned short* head,
                                       const Strides& strides, int first_key, int warp,
                                       int lane) const {
    const int chunk = lane % kRowChunks;
#pragma unroll 4  // all the way would keep every address in a register, and spill
    for (int i = 0; i < kWarpKeys; i += kRowsAtOnce) {
      const int row = i + lane / kRowChunks;  // of this warp's rows
      const int tile_row = warp * kWarpKeys + row;
      const bool present = first_key + tile_row < end;
      long long offset;
      if constexpr (kPaged) {
        const bool early = kKeySlots == 1 || i < 32;  // by value: an index would go to local memory
        const int own_page = early ? slots[0].page : slots[kKeySlots - 1].page;
        const int own_row = early ? slots[0].row : slots[kKeySlots - 1].row;
        const int page = __shfl_sync(kFullWarp, own_page, row % 32);
        const int page_row = __shfl_sync(kFullWarp, own_row, row % 32);
        offset = page * strides.page + page_row * strides.row;
      } else {
        offset = (first_row + first_key + tile_row) * strides.row;
      }
      const unsigned short* source = present ? head + offset + chunk * 8 : head;
      copy_async(shared + Tile::offset(tile_row, chunk), source, present);
    }
  }
};

}  // namespace rlbench
