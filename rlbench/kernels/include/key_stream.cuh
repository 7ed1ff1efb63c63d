// Copying the keys and values of one sequence and KV head to shared memory, block after block: what
// keys.cuh does, for a kernel whose only business this is.
#pragma once

#include "copy.cuh"
#include "keys.cuh"
#include "numeric.cuh"

namespace rlbench {

// What one of kWarps warps copies. Step n of the stream is K of block n and V of block n - 1, which
// are needed together. Tile::offset(row, chunk) is where a 16-byte chunk goes in a tile: it repeats
// every eight rows, kRowBytes apart.
//
// The code is straight and there is little of it: addresses move on by additions, and absent keys
// and unwanted tiles are predicates. (An absent chunk's address may be outside of all tensors:
// nothing is read there.)
template <int kHeadDim, int kBlockKeys, int kWarps, bool kPaged, class Tile>
class KeyStream {
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kRowChunks = kRowBytes / kChunkBytes;
  static constexpr int kRowsAtOnce = 32 / kRowChunks;  // rows that the warp copies in one go
  static constexpr int kStep = kWarps * kRowsAtOnce;   // rows from one go to the next
  static constexpr int kGoes = kBlockKeys / kStep;
  static constexpr int kWarpRows = kGoes * kRowsAtOnce;
  static_assert(kBlockKeys % kStep == 0 && kStep % 8 == 0, "goes come out even");
  static_assert(kWarpRows <= 32, "a lane looks up one row");

  // Of this lane, in one tensor.
  struct Rows {
    const unsigned char* source;      // of its next row (packed), of its chunk of the head (paged)
    long long step;                   // bytes from one go to the next (packed)
    unsigned page_stride, row_stride;  // in chunks (paged)
    unsigned offset;                  // in chunks, of the row that it has looked up (paged)
    int left;                         // keys that there are from its first row on
  };

  const int* table;
  unsigned page_size, key;  // `key`: the one that this lane looks up next (paged)
  unsigned page, row;       // of the one that it has looked up last
  int limit;
  unsigned place;  // in a tile
  unsigned lane, source_lane;
  Rows k, v;

 public:
  // Keys at or past `limit` are absent, V before `first_block` as well. Of the tensors, `k` and `v`
  // are what belongs to the head; of the sequence, `begin` is its first row in packed tensors, and
  // `table` its row of the block table. Tensors with pages must be shorter than 2^32 chunks.
  __device__ __forceinline__ KeyStream(const unsigned short* k_head, const Strides& k_strides,
                                       const unsigned short* v_head, const Strides& v_strides,
                                       int begin, const int* pages, long long keys_of_a_page,
                                       int first_block, int end, int warp, int own_lane)
      : table(pages), page_size(static_cast<unsigned>(keys_of_a_page)), limit(end),
        lane(static_cast<unsigned>(own_lane)), source_lane(lane / kRowChunks) {
    const int chunk = own_lane % kRowChunks;
    const int first = warp * kRowsAtOnce + own_lane / kRowChunks;
    const int first_key = first_block * kBlockKeys;
    place = Tile::offset(first, chunk);
    const long long packed_row = kPaged ? 0 : static_cast<long long>(begin) + first_key + first;
    k = rows_of(k_head + chunk * 8, packed_row, k_strides, own_lane);
    v = rows_of(v_head + chunk * 8, kPaged ? 0 : packed_row - kBlockKeys, v_strides, own_lane);
    k.left = limit - first_key - first;
    v.left = 0;
    key = static_cast<unsigned>(first_key + own_lane / kRowsAtOnce * kStep + warp * kRowsAtOnce +
                                own_lane % kRowsAtOnce);
    look_up();
  }

  // Starts copying the next step's K and V, each if it is wanted. All lanes take part.
  __device__ __forceinline__ void ask(unsigned k_tile, bool k_wanted, unsigned v_tile,
                                      bool v_wanted) {
    if constexpr (kPaged) {
      k.offset = page * k.page_stride + row * k.row_stride;
      const unsigned of_next_v = page * v.page_stride + row * v.row_stride;
      look_up();
      copy(k, k_tile, k_wanted);
      copy(v, v_tile, v_wanted);
      v.offset = of_next_v;
    } else {
      copy(k, k_tile, k_wanted);
      copy(v, v_tile, v_wanted);
    }
    v.left = k.left;
    k.left -= kBlockKeys;
  }

 private:
  static __device__ __forceinline__ Rows rows_of(const unsigned short* head, long long packed_row,
                                                 const Strides& strides, int own_lane) {
    Rows rows;
    auto source = reinterpret_cast<unsigned long long>(head + packed_row * strides.row);
    // Through a shuffle, so that an address is that plus a product and not a sum of their parts.
    if constexpr (kPaged) source = __shfl_sync(kFullWarp, source, own_lane);
    rows.source = reinterpret_cast<const unsigned char*>(source);
    rows.step = kStep * strides.row * 2;
    rows.page_stride = static_cast<unsigned>(strides.page / 8);
    rows.row_stride = static_cast<unsigned>(strides.row / 8);
    rows.offset = 0;
    rows.left = 0;
    return rows;
  }

  // The pages of the next block: lane t finds the warp's row t.
  __device__ __forceinline__ void look_up() {
    if constexpr (kPaged) {
      const bool present = lane < kWarpRows && static_cast<int>(key) < limit;
      const unsigned index = key / page_size;
      page = present ? static_cast<unsigned>(table[index]) : 0;
      row = key - index * page_size;
      key += kBlockKeys;
    }
  }

  __device__ __forceinline__ void copy(Rows& rows, unsigned tile, bool wanted) const {
#pragma unroll
    for (int i = 0; i < kGoes; ++i) {
      const unsigned char* from = rows.source;
      if constexpr (kPaged) {
        const int source = i * kRowsAtOnce + static_cast<int>(source_lane);
        from += static_cast<unsigned long long>(__shfl_sync(kFullWarp, rows.offset, source)) *
                kChunkBytes;
      } else {
        rows.source += rows.step;
      }
      copy_async_if(wanted, tile + place + i * (kStep * kRowBytes), from, rows.left > i * kStep);
    }
  }
};

}  // namespace rlbench
