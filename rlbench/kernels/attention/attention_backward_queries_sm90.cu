// The gradient of the queries on Hopper, and `delta`, at head dims 64 and 128: wgmma, TMA, a producer and
// two consumer warpgroups, the bits of attention_backward_queries.cu, whose head defines the result.
//
// THE SCHEDULE
//
// A tile is kTileRows rows of one KV head, 64 for each consumer, and all keys that they see, kKeys at a
// time. A consumer starts the next block's S = Q K^T and dP = dO V^T before the last block's dQ += dS K,
// which runs, beside the other consumer's products, while it makes dS of the former two. Q stays in
// registers, and so does dO at head dim 64.
//
// A thread block stays on its SM and takes tile after tile. The producer runs ahead, into the next one: its
// first warp asks for boxes of K and V, in which zeros follow the last key that the tile sees; the others
// bring Q and dO, find delta, and note what else consumers need to know of the tile's rows.

#include "backward.cuh"
#include "copy.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "places.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (64, 128), ELEMENT (Bf16, Fp16), SHARED_BYTES (what the launch reserves),
// KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
using Element = ELEMENT;

constexpr int kTileRows = 128;
constexpr int kKeys = 64;
constexpr int kStages = 3;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = 128 + kConsumerThreads;
constexpr int kRowThreads = 96;  // of the producer, for Q and dO
constexpr int kPanels = kHeadDim / 64;
constexpr int kKeyTiles = kKeys / 8;
constexpr int kDimTiles = kHeadDim / 8;

struct Stat {
  float scaled, delta;
};
using Rows = TileRows<kTileRows, false>;
struct Note {
  Rows rows;
  unsigned blocks;  // of keys
};

// Shared memory, in bytes. Matrices are panels of 64 elements (128 bytes) a row. There are two tiles of rows.
constexpr int kRowPanel = kTileRows * 128;
constexpr int kKeyPanel = kKeys * 128;
constexpr int kRowTile = kPanels * kRowPanel;
constexpr int kKeyTile = kPanels * kKeyPanel;
constexpr int kRowTiles = 0;                     // Q and dO each
constexpr int kKeyStages = 2 * 2 * kRowTile;     // K and V each
constexpr int kNotes = kKeyStages + kStages * 2 * kKeyTile;
constexpr int kStats = kNotes + 2 * static_cast<int>(sizeof(Note));
constexpr int kBarriers = kStats + 2 * kTileRows * static_cast<int>(sizeof(Stat));
constexpr int kSharedBytes = kBarriers + (2 * kStages + 4) * 8;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kHeadDim <= 128, "registers");

constexpr int kProducerRegisters = 80, kConsumerRegisters = 208;
constexpr bool kKeepsDout = kHeadDim == 64;  // in registers, as Q

struct RowTile {
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kRowPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};

// Keys that some row of the tile sees, and blocks of them.
__device__ __forceinline__ int end_of(const Rows& rows) {
  const int end = rows.limit(kTileRows - 1);
  return end > 0 ? end : 0;
}
__device__ __forceinline__ unsigned blocks_until(int end) {
  return static_cast<unsigned>((end + kKeys - 1) / kKeys);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_BACKWARD_PARAMETERS, long long tiles_arg, long long total_k_arg,
                long long section_arg,
                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  reset_flags<kThreads>(delta, flags_at_arg, units_arg, chunks_arg);
  extern __shared__ __align__(1024) unsigned char shared_memory[];  // there is no room to align it
  const unsigned base = __shfl_sync(kFullWarp, shared_address(shared_memory), 0);
  if (base % 1024 != 0) __trap();
  const auto full = [&](unsigned stage) { return base + kBarriers + stage * 8; };
  const auto empty = [&](unsigned stage) { return base + kBarriers + (kStages + stage) * 8; };
  const auto full_rows = [&](unsigned number) {
    return base + kBarriers + (2 * kStages + number % 2) * 8;
  };
  const auto free_rows = [&](unsigned number) {
    return base + kBarriers + (2 * kStages + 2 + number % 2) * 8;
  };
  const auto rows_at = [&](unsigned number) { return base + kRowTiles + number % 2 * 2 * kRowTile; };
  Note* const notes = reinterpret_cast<Note*>(shared_memory + kNotes);
  const auto stats_of = [&](unsigned number) {
    return reinterpret_cast<Stat*>(shared_memory + kStats) + number % 2 * kTileRows;
  };

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const Places<Rows, 1> places = {
      static_cast<unsigned>(tiles_arg),   kv_heads,
      kv_heads * static_cast<unsigned>(sequences_arg), static_cast<unsigned>(group_arg),
      static_cast<unsigned>(section_arg), causal_arg != 0};

  if (threadIdx.x == 0) {
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), kConsumerThreads / 32);
    }
    for (unsigned number = 0; number < 2; ++number) {
      mbarrier_init(full_rows(number), kRowThreads);
      mbarrier_init(free_rows(number), kConsumerThreads / 32);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    if (warp == 0) {
      if (!is_elected()) return;
      unsigned stage = 0, parity = 1;
      for (Deal<1> deal; deal.place < places.count(); deal.next()) {
        const Rows rows = places(deal.place, 0, cu_seqlens_q, cu_seqlens_k);
        if (rows.count == 0) continue;
        const int end = end_of(rows);
        const unsigned blocks = blocks_until(end);
        const int kv_head = static_cast<int>(rows.kv_head);
        int x = static_cast<int>(total_k_arg) - end;  // zeros from `end` on
#pragma unroll 1
        for (unsigned n = 0; n < blocks; ++n, x += kKeys) {
          const unsigned keys = base + kKeyStages + stage * 2 * kKeyTile;
          mbarrier_sleep(empty(stage), parity);
          mbarrier_arrive_expecting(full(stage), 2 * kKeyTile);
          copy_box(keys, &k_map, full(stage), 0, x, 0, kv_head, rows.k_begin + end);
          copy_box(keys + kKeyTile, &v_map, full(stage), 0, x, 0, kv_head, rows.k_begin + end);
          if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
      return;
    }
    const int thread = (warp - 1) * 32 + lane;
    unsigned number = 0;  // of the tile
    const auto await_free = [&]() { mbarrier_sleep(free_rows(number), number / 2 % 2 ^ 1); };
    for (Deal<1> deal; deal.place < places.count(); deal.next()) {
      const Rows rows = places(deal.place, 0, cu_seqlens_q, cu_seqlens_k);
      if (rows.count == 0) continue;
      await_free();
      const unsigned tile = rows_at(number);
#pragma unroll 1
      for (int row = (warp - 1) * kWarpRows; row < kTileRows; row += 3 * kWarpRows) {
        rows.copy_q<kHeadDim, RowTile>(tile, q, q_row_stride, q_head_stride, row, lane);
        rows.copy_q<kHeadDim, RowTile>(tile + kRowTile, dout, dout_row_stride, dout_head_stride, row,
                                       lane);
      }
      if (thread == 0) notes[number % 2] = {rows, blocks_until(end_of(rows))};
      Stat* const stats = stats_of(number);
#pragma unroll 1
      for (int row = (warp - 1) * 8 + lane / 4; row < kTileRows; row += 3 * 8) {
        const bool present = row < rows.count;
        const long long at = present ? rows.offset(row, rows.heads(), 1) : 0;
        const unsigned short* its_out =
            out + (present ? rows.offset(row, out_row_stride, out_head_stride) : 0);
        const unsigned short* its_dout =
            dout + (present ? rows.offset(row, dout_row_stride, dout_head_stride) : 0);
        const float its_lse = present ? lse[at] : -kInfinity;
        const float its_delta = delta_of<kHeadDim, Element>(its_out, its_dout, present, lane);
        if (lane % 4 == 0) {
          stats[row] = {scaled_lse(its_lse), its_delta};
          if (present) delta[at] = its_delta;
        }
      }
      copy_async_wait_all();
      if constexpr (!kKeepsDout) fence_async_proxy();
      mbarrier_arrive(full_rows(number));
      ++number;
    }
    await_free();
    if (thread == 0) notes[number % 2].rows.count = 0;  // there are no more
    mbarrier_arrive(full_rows(number));
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const int warp_row = (warp - 4) * kWarpRows;
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);

  const float scale = __shfl_sync(kFullWarp, static_cast<float>(scale_arg), 0);

  // Of this lane's rows, g and g + 8, of the tile.
  float scaled[2], own_delta[2];
  int limits[2];
  int whole = 0;        // blocks that all the warp's rows see
  unsigned number = 0;  // of the tile

  float scores[kKeyTiles][4], products[kKeyTiles][4];  // S and P; dP and dS
  float acc[kDimTiles][4];
  unsigned gradients[kKeys / 16][4];
  unsigned q_left[kHeadDim / 16][4], dout_left[kKeepsDout ? kHeadDim / 16 : 1][4];

  unsigned stage = 0, parity = 0;  // of the next block that there are no scores of
  const auto keys_at = [&](unsigned stage) { return base + kKeyStages + stage * 2 * kKeyTile; };
  // Also of dP.
  const auto start_scores = [&]() {
    mbarrier_sleep(full(stage), parity);
    const Matrix k_matrix(keys_at(stage), 16), v_matrix(keys_at(stage) + kKeyTile, 16);
    const Matrix dout_matrix(rows_at(number) + kRowTile + (warp / 4 - 1) * 64 * 128, 16);
    keep_order(scores);
    keep_order(products);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int offset = d / 4 * kKeyPanel + d % 4 * 32;
      Wgmma<Element, kKeyTiles>::row_scores(scores, q_left[d], k_matrix.descriptor(offset), d > 0);
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int offset = d / 4 * kKeyPanel + d % 4 * 32;
      if constexpr (kKeepsDout) {
        Wgmma<Element, kKeyTiles>::row_scores(products, dout_left[d], v_matrix.descriptor(offset),
                                              d > 0);
      } else {
        Wgmma<Element, kKeyTiles>::scores(
            products, dout_matrix.descriptor(d / 4 * kRowPanel + d % 4 * 32),
            v_matrix.descriptor(offset), d > 0);
      }
    }
    wgmma_commit();
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  const auto see_scores = [&]() {
    keep_order(scores);
    keep_order(products);
  };
  const auto release = [&](unsigned stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty(stage));
  };
  const auto turn = [&](unsigned n, bool is_last) {
    const unsigned its_stage = stage == 0 ? kStages - 1 : stage - 1;
    if (static_cast<int>(n) >= whole) {
      hide_beyond(scores, static_cast<int>(n) * kKeys, limits, lane);
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = weight_of(scores[j][e], scale_log2, scaled[e / 2]);
        products[j][e] = score_gradient(weight, products[j][e], own_delta[e / 2]);
      }
    }
    wgmma_wait<0>();
    keep_order(acc);
    keep_order(gradients);
    if (n > 0) release(its_stage == 0 ? kStages - 1 : its_stage - 1);
    round_all<Element>(gradients, products);
    if (!is_last) start_scores();
    const Matrix b(keys_at(its_stage), kKeyPanel);
    keep_order(acc);
    keep_order(gradients);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Wgmma<Element, kDimTiles>::values(acc, gradients[step], b.descriptor(step * 16 * 128),
                                        n > 0 || step > 0);
    }
    wgmma_commit();
    if (!is_last) wgmma_wait<1>();
    see_scores();
  };

  while (true) {
    mbarrier_sleep(full_rows(number), number / 2 % 2);
    const Rows& rows = notes[number % 2].rows;
    if (rows.count == 0) return;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const unsigned offset = RowTile::offset(warp_row + lane % 16, 2 * d + lane / 16);
      load_matrices(q_left[d], rows_at(number) + offset);
      if constexpr (kKeepsDout) load_matrices(dout_left[d], rows_at(number) + kRowTile + offset);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + lane / 4 + 8 * r;
      const Stat stat = stats_of(number)[row];
      scaled[r] = stat.scaled;
      own_delta[r] = stat.delta;
      limits[r] = rows.limit(row);
    }
    whole = rows.limit(warp_row) / kKeys;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[n][e] = 0.0f;
    }
    keep_order(acc);  // zeros are written before anything is started
    const unsigned blocks = notes[number % 2].blocks;
    if (blocks > 0) {
      start_scores();
      wgmma_wait<0>();
      see_scores();
      // The compiler has to know what is done unconditionally: it would have every product waited for
      // otherwise.
#pragma unroll 1
      for (unsigned n = 0; n + 1 < blocks; ++n) turn(n, false);
      turn(blocks - 1, true);
      wgmma_wait<0>();
      keep_order(acc);
      keep_order(gradients);
      release(stage == 0 ? kStages - 1 : stage - 1);
    }
    rows.write_times<Element>({scale, scale}, acc, dq, dq_row_stride, dq_head_stride, warp_row, lane);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(free_rows(number));
    ++number;
  }
}
