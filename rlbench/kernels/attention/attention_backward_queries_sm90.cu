// The gradient of the queries on Hopper, and `delta`, at head dims 64 and 128: wgmma, TMA, a producer and
// two consumer warpgroups, the bits of attention_backward_queries.cu, whose head defines the result.
//
// THE SCHEDULE
//
// A thread block takes kTileRows rows of one KV head, 64 for each consumer, and all keys that they see,
// kKeys at a time. A consumer starts the next block's S = Q K^T and dP = dO V^T before the last block's
// dQ += dS K, which runs, beside the other consumer's products, while it makes dS of the former two. Q stays
// in registers, and so does dO at head dim 64.
//
// The producer's warps bring Q and dO, once; its first one asks for boxes of K and V, in which zeros
// follow the last key that the tile sees.

#include "backward.cuh"
#include "copy.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
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
constexpr int kPanels = kHeadDim / 64;
constexpr int kKeyTiles = kKeys / 8;
constexpr int kDimTiles = kHeadDim / 8;

// Shared memory, in bytes. Matrices are panels of 64 elements (128 bytes) a row.
constexpr int kRowPanel = kTileRows * 128;
constexpr int kKeyPanel = kKeys * 128;
constexpr int kRowTile = kPanels * kRowPanel;
constexpr int kKeyTile = kPanels * kKeyPanel;
constexpr int kRowTiles = 0;                 // Q and dO
constexpr int kKeyStages = 2 * kRowTile;     // K and V each
constexpr int kBarriers = kKeyStages + kStages * 2 * kKeyTile;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = kBarriers + (2 * kStages + 1) * 8 + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kHeadDim <= 128, "registers");

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr bool kKeepsDout = kHeadDim == 64;  // in registers, as Q

struct RowTile {
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kRowPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Rows = TileRows<kTileRows, false>;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_BACKWARD_PARAMETERS, long long tiles_arg, long long total_k_arg,
                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  reset_flags<kThreads>(delta, flags_at_arg, units_arg, chunks_arg);
  extern __shared__ unsigned char shared_memory[];
  const unsigned misaligned = shared_address(shared_memory) % kAlignment;
  unsigned char* aligned = shared_memory + (misaligned ? kAlignment - misaligned : 0);
  const unsigned base = __shfl_sync(kFullWarp, shared_address(aligned), 0);
  const auto full = [&](unsigned stage) { return base + kBarriers + stage * 8; };
  const auto empty = [&](unsigned stage) { return base + kBarriers + (kStages + stage) * 8; };
  const unsigned full_rows = base + kBarriers + 2 * kStages * 8;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  // Late tiles see the most keys under the causal mask, so they start first.
  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const unsigned others = kv_heads * static_cast<unsigned>(sequences_arg);
  const unsigned tile = static_cast<unsigned>(tiles_arg) - 1 - blockIdx.x / others;
  const unsigned other = blockIdx.x % others;
  const Rows rows(tile, other % kv_heads, other / kv_heads, kv_heads,
                  static_cast<unsigned>(group_arg), cu_seqlens_q, cu_seqlens_k, causal_arg != 0);
  if (rows.count == 0) return;
  const int end = rows.limit(kTileRows - 1);
  const unsigned blocks = end > 0 ? static_cast<unsigned>((end + kKeys - 1) / kKeys) : 0;

  if (threadIdx.x == 0) {
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), kConsumerThreads / 32);
    }
    mbarrier_init(full_rows, 128);
    fence_async_proxy();
  }
  __syncthreads();

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const auto ask = [&](unsigned n) {
      const unsigned stage = n % kStages;
      const unsigned keys = base + kKeyStages + stage * 2 * kKeyTile;
      const int kv_head = static_cast<int>(rows.kv_head);
      const int x = static_cast<int>(total_k_arg) - end +  // zeros from `end` on
                    static_cast<int>(n) * kKeys;
      mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);
      mbarrier_arrive_expecting(full(stage), 2 * kKeyTile);
      copy_box(keys, &k_map, full(stage), 0, x, 0, kv_head, rows.k_begin + end);
      copy_box(keys + kKeyTile, &v_map, full(stage), 0, x, 0, kv_head, rows.k_begin + end);
    };
    const unsigned at_once = blocks < kStages ? blocks : kStages;
    if (warp == 0 && is_elected()) {
#pragma unroll 1
      for (unsigned n = 0; n < at_once; ++n) ask(n);
    }
    __syncwarp();
    for (int row = warp * kWarpRows; row < kTileRows; row += 4 * kWarpRows) {
      rows.copy_q<kHeadDim, RowTile>(base + kRowTiles, q, q_row_stride, q_head_stride, row, lane);
      rows.copy_q<kHeadDim, RowTile>(base + kRowTiles + kRowTile, dout, dout_row_stride,
                                     dout_head_stride, row, lane);
    }
    copy_async_wait_all();
    if constexpr (!kKeepsDout) fence_async_proxy();
    mbarrier_arrive(full_rows);
    if (warp > 0 || !is_elected()) return;
#pragma unroll 1
    for (unsigned n = at_once; n < blocks; ++n) ask(n);
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const int warp_row = (warp - 4) * kWarpRows;
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);

  // Of this lane's rows, g and g + 8.
  float scaled[2], own_delta[2];
  int limits[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + lane / 4 + 8 * r;
    const bool present = row < rows.count;
    const long long at = present ? rows.offset(row, rows.heads(), 1) : 0;
    limits[r] = rows.limit(row);
    scaled[r] = present ? scaled_lse(lse[at]) : kInfinity;
    const unsigned short* its_out =
        out + (present ? rows.offset(row, out_row_stride, out_head_stride) : 0);
    const unsigned short* its_dout =
        dout + (present ? rows.offset(row, dout_row_stride, dout_head_stride) : 0);
    own_delta[r] = delta_of<kHeadDim, Element>(its_out, its_dout, present, lane);
    if (present && lane % 4 == 0) delta[at] = own_delta[r];
  }
  const int whole = rows.limit(warp_row) / kKeys;  // blocks that all the warp's rows see

  float scores[kKeyTiles][4], products[kKeyTiles][4];  // S and P; dP and dS
  float acc[kDimTiles][4] = {};
  unsigned gradients[kKeys / 16][4];
  unsigned q_left[kHeadDim / 16][4], dout_left[kKeepsDout ? kHeadDim / 16 : 1][4];

  unsigned stage = 0, parity = 0;  // of the next block that there are no scores of
  const auto keys_at = [&](unsigned stage) { return base + kKeyStages + stage * 2 * kKeyTile; };
  // Also of dP.
  const auto start_scores = [&]() {
    mbarrier_sleep(full(stage), parity);
    const Matrix k_matrix(keys_at(stage), 16), v_matrix(keys_at(stage) + kKeyTile, 16);
    const Matrix dout_matrix(base + kRowTiles + kRowTile + (warp / 4 - 1) * 64 * 128, 16);
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
  const auto turn = [&](unsigned n, bool is_last) {
    const unsigned its_stage = stage == 0 ? kStages - 1 : stage - 1;
    if (static_cast<int>(n) >= whole) {
      const int column = static_cast<int>(n) * kKeys + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + 8 * j + e % 2 >= limits[e / 2]) scores[j][e] = -kInfinity;
        }
      }
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
    if (n > 0) {
      const unsigned before = its_stage == 0 ? kStages - 1 : its_stage - 1;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty(before));
    }
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

  mbarrier_sleep(full_rows, 0);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    const unsigned offset = RowTile::offset(warp_row + lane % 16, 2 * d + lane / 16);
    load_matrices(q_left[d], base + kRowTiles + offset);
    if constexpr (kKeepsDout) load_matrices(dout_left[d], base + kRowTiles + kRowTile + offset);
  }
  keep_order(acc);  // zeros are written before anything is started
  if (blocks > 0) {
    start_scores();
    wgmma_wait<0>();
    see_scores();
    // The compiler has to know what is done unconditionally: it would have every product waited for otherwise.
#pragma unroll 1
    for (unsigned n = 0; n + 1 < blocks; ++n) turn(n, false);
    turn(blocks - 1, true);
  }
  wgmma_wait<0>();
  keep_order(acc);
  keep_order(gradients);

  const float scale = static_cast<float>(scale_arg);
  rows.write_times<Element>({scale, scale}, acc, dq, dq_row_stride, dq_head_stride, warp_row,
                            lane);
}
