// Copying the keys and values of one sequence and KV head to shared memory, block after block, by
// TMA: what key_stream.cuh does without.
#pragma once

#include "copy.cuh"
#include "divisor.cuh"
#include "mbarrier.cuh"
#include "numeric.cuh"
#include "tma.cuh"

namespace rlbench {

// A block is kBoxes boxes of kBoxKeys keys x kHeadDim, each of one page, and a warp copies one of
// them. Step n of the stream is K of block n and V of block n - 1, which are needed together.
//
// Of the maps (tensor_map.of_ends) the dimensions are the elements of a panel, x < kBoxKeys,
// panels, KV heads, and y: a box at x = kBoxKeys - n, y = row + n has n keys from `row` on, then
// zeros, for which nothing is read. A box without any key must not be asked for (tma.cuh): the warp
// writes the zeros itself if it is V, also V before the first block. Absent scores are replaced,
// whatever K they are from.
template <int kHeadDim, int kBlockKeys, int kBoxKeys, bool kPaged>
class KeyBoxes {
 public:
  static constexpr int kBoxes = kBlockKeys / kBoxKeys;
  static constexpr int kBoxBytes = kBoxKeys * kHeadDim * 2;
  static_assert(kBlockKeys % kBoxKeys == 0 && (kPaged || kBoxes == 1), "one box of packed keys");

 private:
  const TensorMap *k_map, *v_map;
  int kv_head, warp, lane;
  int end;           // keys from here on are absent
  int key;           // the first one of this warp's box in the next block of K
  int row;           // where that is (packed)
  int v_x, v_y;      // of the box before it
  // Of pages: a lane finds the one of every 32nd block, long before it is needed.
  const int* table;
  Divisor page_of;
  unsigned page_size, k_page_rows, v_page_rows;
  unsigned step, next_key;
  unsigned own_page, own_row;

 public:
  // Keys at or past `limit` are absent. Of the sequence, `begin` is its first row in packed
  // tensors, and `pages` its row of the block table; pages are so many rows apart in K and V.
  __device__ __forceinline__ KeyBoxes(const TensorMap* map_of_k, const TensorMap* map_of_v,
                                      unsigned head, int begin, const int* pages,
                                      long long keys_of_a_page, long long page_divisor,
                                      long long rows_of_a_k_page, long long rows_of_a_v_page,
                                      int first_block, int limit, int own_warp, int own_lane)
      : k_map(map_of_k), v_map(map_of_v), kv_head(static_cast<int>(head)), warp(own_warp),
        lane(own_lane), end(limit > 0 ? limit : 0),
        key(first_block * kBlockKeys + own_warp * kBoxKeys), row(begin + key), v_x(kBoxKeys),
        v_y(0), table(pages), page_of(page_divisor),
        page_size(static_cast<unsigned>(keys_of_a_page)),
        k_page_rows(static_cast<unsigned>(rows_of_a_k_page)),
        v_page_rows(static_cast<unsigned>(rows_of_a_v_page)), step(0),
        next_key(static_cast<unsigned>(key + own_lane * kBlockKeys)), own_page(0), own_row(0) {}

  // Starts copying the next step's V, and K if it is wanted, counted towards the barrier, which has
  // kBoxes arrivals. All lanes of the warps below kBoxes take part.
  __device__ __forceinline__ void ask(unsigned k_tile, bool k_wanted, unsigned v_tile,
                                      unsigned barrier) {
    const int past = key + kBoxKeys - end;
    const int x = past > 0 ? past : 0;
    int k_y = kBoxKeys - x, next_v_y = k_y;
    if constexpr (kPaged) {
      if (step % 16 == 0) look_up();
      const unsigned page = __shfl_sync(kFullWarp, own_page, static_cast<int>(step % 32));
      const unsigned in_page = __shfl_sync(kFullWarp, own_row, static_cast<int>(step % 32));
      ++step;
      k_y += static_cast<int>(page * k_page_rows + in_page);
      next_v_y += static_cast<int>(page * v_page_rows + in_page);
    } else {
      k_y += row;
      next_v_y += row;
      row += kBlockKeys;
    }
    const bool k_asked = k_wanted && x < kBoxKeys, v_asked = v_x < kBoxKeys;
    const bool elected = is_elected();
    const unsigned offset = warp * kBoxBytes;
    if (elected) {
      if (k_asked) copy_box(k_tile + offset, k_map, barrier, 0, x, 0, kv_head, k_y);
      if (v_asked) copy_box(v_tile + offset, v_map, barrier, 0, v_x, 0, kv_head, v_y);
    }
    if (!v_asked) clear(v_tile + offset);
    // Arrives last, so that the zeros are there, too. Boxes may land before they are expected.
    if (elected) mbarrier_arrive_expecting(barrier, (k_asked + v_asked) * kBoxBytes);
    v_x = x;
    v_y = next_v_y;
    key += kBlockKeys;
  }

 private:
  // Zeros in the place of this warp's box, where a later one may come by TMA.
  __device__ __forceinline__ void clear(unsigned box) const {
#pragma unroll 4
    for (int i = 0; i < kBoxBytes; i += 32 * kChunkBytes) write_zeros(box + i + lane * kChunkBytes);
    fence_async_proxy();
    __syncwarp();
  }

  // The pages of 32 blocks at first, and then of 16, in the place of those that have been used.
  __device__ __forceinline__ void look_up() {
    if (step == 0 || static_cast<unsigned>(lane) / 16 != step / 16 % 2) {
      const unsigned index = page_of(next_key);
      const bool present = next_key < static_cast<unsigned>(end);
      own_page = present ? static_cast<unsigned>(table[index]) : 0;
      own_row = next_key - index * page_size;
      next_key += 32 * kBlockKeys;
    }
  }
};

}  // namespace rlbench
