// Where keys and values lie in memory, packed or paged, and copying them to shared memory.
#pragma once

#include "copy.cuh"
#include "numeric.cuh"

namespace rlbench {

struct Strides {  // in elements
  long long page, row, head;
};

// The rows of K and V that one of kWarps warps copies, block by block; K and V share the block
// table, but not their strides. Tile::offset(row, chunk) is where a 16-byte chunk goes in a block's
// shared memory: it repeats every eight rows, Tile::kRowBytes apart.
//
// The warps take turns, so that the rows of a lane are a constant step apart and their places in
// shared memory constants from at most four: what is left to compute for a chunk is its address.
template <int kHeadDim, int kBlockKeys, int kWarps, bool kPaged, class Tile>
struct KeyRows {
  static constexpr int kRowChunks = kHeadDim * 2 / kChunkBytes;
  static constexpr int kRowsAtOnce = 32 / kRowChunks;    // rows that the warp copies in one go
  static constexpr int kStep = kWarps * kRowsAtOnce;     // rows from one go to the next
  static constexpr int kGoes = kBlockKeys / kStep;
  static constexpr int kPlaces = kStep < 8 ? 8 / kStep : 1;  // goes after which places repeat
  static constexpr int kSlots = (kGoes * kRowsAtOnce + 31) / 32;  // rows that one lane looks up
  static_assert(kBlockKeys % kStep == 0 && (kStep % 8 == 0 || 8 % kStep == 0), "goes come out even");
  static_assert(kSlots <= 2, "offset_of() chooses between two");

  const int* table;     // this sequence's row of the block table (paged)
  unsigned page_size;   // (paged)
  long long first_row;  // of the sequence in the packed tensor (contiguous)
  int end;              // keys at or past it are absent
  int pages[kSlots];    // of the keys that this lane has looked up (paged)

  // Packed keys of a sequence that begins at that row, up to `end`.
  static __device__ __forceinline__ KeyRows packed(long long first_row, int end) {
    static_assert(!kPaged, "pages need a table");
    KeyRows keys;
    keys.table = nullptr;
    keys.page_size = 0;
    keys.first_row = first_row;
    keys.end = end;
    return keys;
  }

  // Looks up the block that starts at `first_key`: lane t has the warp's rows t, t + 32, ...
  __device__ __forceinline__ void find(int first_key, int warp, int lane) {
    if constexpr (kPaged) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const unsigned key = key_of(first_key, s, warp, lane);
        const bool present = s * 32 + lane < kGoes * kRowsAtOnce && static_cast<int>(key) < end;
        pages[s] = present ? table[key / page_size] : 0;
      }
    }
  }

  // Starts copying the block's rows of one tensor, zeros for absent keys. All lanes take part.
  __device__ __forceinline__ void copy(unsigned shared, const unsigned short* head,
                                       const Strides& strides, int first_key, int warp,
                                       int lane) const {
    // Nothing that follows from it is kept from block to block: one build has no register left.
    if constexpr (kPaged && kSlots > 1) asm volatile("" : "+r"(lane));
    const int chunk = lane % kRowChunks;
    const int first = warp * kRowsAtOnce + lane / kRowChunks;  // this lane's first row
    unsigned places[kPlaces];
#pragma unroll
    for (int p = 0; p < kPlaces; ++p) places[p] = shared + Tile::offset(first + p * kStep, chunk);
    long long offsets[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      offsets[s] = 0;
      if constexpr (kPaged) {
        // The row in the page once more, because registers are scarcer than instructions.
        const unsigned row = key_of(first_key, s, warp, lane) % page_size;
        offsets[s] = pages[s] * strides.page + row * strides.row;
      }
    }
    const unsigned short* source = head + chunk * 8;
    if constexpr (!kPaged) source += (first_row + first_key + first) * strides.row;
    const long long step = kStep * strides.row;
    // All the way for whole blocks only, and few rows: it would spill where registers are scarce.
    constexpr int kUnroll = kPaged && kSlots > 1 ? kPlaces : kGoes;
    if (first_key + kBlockKeys <= end) {
#pragma unroll kUnroll
      for (int i = 0; i < kGoes; ++i) {
        copy_async(place_of(places, i), source + offset_of(offsets, i, lane));
        if constexpr (!kPaged) source += step;
      }
    } else {
#pragma unroll kPlaces
      for (int i = 0; i < kGoes; ++i) {
        const unsigned short* from = source + offset_of(offsets, i, lane);
        const bool present = first_key + first + i * kStep < end;
        copy_async(place_of(places, i), present ? from : head, present);
        if constexpr (!kPaged) source += step;
      }
    }
  }

 private:
  // The key that a lane looks up for a slot.
  static __device__ __forceinline__ unsigned key_of(int first_key, int slot, int warp, int lane) {
    const int own = slot * 32 + lane;  // of the warp's rows
    return static_cast<unsigned>(first_key + own / kRowsAtOnce * kStep + warp * kRowsAtOnce +
                                 own % kRowsAtOnce);
  }

  static __device__ __forceinline__ unsigned place_of(const unsigned (&places)[kPlaces], int i) {
    return places[i % kPlaces] + i / kPlaces * (kPlaces * kStep * Tile::kRowBytes);
  }

  // Of the lane's row in go i, which another lane has looked up.
  static __device__ __forceinline__ long long offset_of(const long long (&offsets)[kSlots], int i,
                                                        int lane) {
    if constexpr (!kPaged) return 0;
    const int own = i * kRowsAtOnce;  // chosen by value: an index would go to local memory
    const long long mine = kSlots == 1 || own < 32 ? offsets[0] : offsets[kSlots - 1];
    return __shfl_sync(kFullWarp, mine, own % 32 + lane / kRowChunks);
  }
};

}  // namespace rlbench
