// The gradient of the queries on Hopper, and `delta`, at head dim 256: wgmma, TMA, a producer and two
// consumer warpgroups, the bits of attention_backward_queries.cu, whose head defines the result.
//
// THE SCHEDULE
//
// A thread block takes kRows rows of one KV head and all keys that they see, kKeys at a time. Consumers
// share the products, with their left sides in registers:
//
//     consumer 0:  S = Q K^T,    P = weights of S,     dQ += dS K  for half of the columns
//     consumer 1:  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K  for the others
//
// P goes from the one to the other through shared memory, and dS, rounded, comes back: each thread's to the
// thread that has the same elements. Each starts the next block's first product before the last block's
// second one, which runs while the former's results are made into weights.
//
// Two thread blocks are a cluster that takes neighbouring tiles: each asks for half of the panels of K and
// V, which come to both. Both go through the keys that one of them sees.
//
// The producer's warps bring Q and dO, once; its first one asks for boxes of K and V, in which zeros
// follow the last key that the tile sees. Consumers keep Q and dO in registers, so the last of the stages
// is where they were.

#include "backward.cuh"
#include "cluster.cuh"
#include "copy.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "places.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (256), ELEMENT (Bf16, Fp16), SHARED_BYTES (what the launch reserves),
// KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kRanks = 2;  // thread blocks of a cluster
using Element = ELEMENT;

constexpr int kRows = 64;
constexpr int kKeys = 64;
constexpr int kStages = 3;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = 128 + kConsumerThreads;
constexpr int kPanels = kHeadDim / 64;
constexpr int kKeyTiles = kKeys / 8;
constexpr int kOwnPanels = kPanels / 2;  // of dQ
constexpr int kDimTiles = kOwnPanels * 8;

// Shared memory, in bytes. Matrices are panels of 64 elements (128 bytes) a row.
constexpr int kPanelBytes = kKeys * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kKeyStages = 0;  // K and V each
constexpr int kRowTiles = kKeyStages + (kStages - 1) * 2 * kTileBytes;  // Q and dO, at first
constexpr int kWeights = kKeyStages + kStages * 2 * kTileBytes;  // P
constexpr int kGradients = kWeights + 128 * kKeyTiles * 16;      // dS
constexpr int kBarriers = kGradients + 128 * kKeys / 16 * 16;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = kBarriers + (2 * kStages + 1) * 8 + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kRows == kKeys, "tiles of both have one layout");
static_assert(kPanels % kRanks == 0, "blocks share panels");

constexpr int kAsked = kPanels / kRanks;  // panels that a block asks for
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
// Named barriers: P is given, and dS comes back. Whoever writes has met the other one at the other barrier
// since that read what was there.
constexpr int kGiven = 1, kBack = 2;

struct RowTile {
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kPanelBytes) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Rows = TileRows<kRows, false>;

extern "C" __global__ void __cluster_dims__(kRanks, 1, 1)
    __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_BACKWARD_PARAMETERS, long long tiles_arg, long long total_k_arg,
                long long section_arg,
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

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const Places<Rows, kRanks> places = {
      static_cast<unsigned>(tiles_arg),   kv_heads,
      kv_heads * static_cast<unsigned>(sequences_arg), static_cast<unsigned>(group_arg),
      static_cast<unsigned>(section_arg), causal_arg != 0};
  const unsigned place = blockIdx.x / kRanks;
  const unsigned rank = cluster_rank();
  const auto end_of = [&](const Rows& rows) { return rows.count > 0 ? rows.limit(kRows - 1) : 0; };
  const Rows rows = places(place, rank, cu_seqlens_q, cu_seqlens_k);
  int end = end_of(rows);  // of the keys that some row of the cluster sees
  const int its_end = end_of(places(place, rank ^ 1, cu_seqlens_q, cu_seqlens_k));
  end = its_end > end ? its_end : end;
  const unsigned blocks = end > 0 ? static_cast<unsigned>((end + kKeys - 1) / kKeys) : 0;

  if (threadIdx.x == 0) {
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), kRanks * kConsumerThreads / 32);
    }
    mbarrier_init(full_rows, 128);
    fence_async_proxy();
    fence_barriers();
  }
  cluster_begin();
  cluster_wait_for_others();

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const auto ask = [&](unsigned n) {
      const unsigned stage = n % kStages, round = n / kStages;
      const unsigned keys =
          base + kKeyStages + stage * 2 * kTileBytes + rank * kAsked * kPanelBytes;
      const int panel = static_cast<int>(rank) * kAsked, kv_head = static_cast<int>(rows.kv_head);
      const int x = static_cast<int>(total_k_arg) - end +  // zeros from `end` on
                    static_cast<int>(n) * kKeys;
      // The last stage has been released once more.
      mbarrier_sleep(empty(stage), (round ^ (stage < kStages - 1 ? 1 : 0)) & 1);
      mbarrier_arrive_expecting(full(stage), 2 * kTileBytes);
      copy_box<kRanks>(keys, &k_map, full(stage), 0, x, panel, kv_head, rows.k_begin + end);
      copy_box<kRanks>(keys + kTileBytes, &v_map, full(stage), 0, x, panel, kv_head,
                       rows.k_begin + end);
    };
    const unsigned at_once = blocks < kStages - 1 ? blocks : kStages - 1;
    if (warp == 0 && is_elected()) {
#pragma unroll 1
      for (unsigned n = 0; n < at_once; ++n) ask(n);
    }
    __syncwarp();
    rows.copy_q<kHeadDim, RowTile>(base + kRowTiles, q, q_row_stride, q_head_stride,
                                   warp * kWarpRows, lane);
    rows.copy_q<kHeadDim, RowTile>(base + kRowTiles + kTileBytes, dout, dout_row_stride,
                                   dout_head_stride, warp * kWarpRows, lane);
    copy_async_wait_all();
    fence_async_proxy();  // boxes will follow there
    mbarrier_arrive(full_rows);
    if (warp > 0 || !is_elected()) return;
#pragma unroll 1
    for (unsigned n = at_once; n < blocks; ++n) ask(n);
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const bool has_weights = warp < 8;  // P, else dS
  const unsigned thread = threadIdx.x % 128;
  const int warp_row = warp % 4 * kWarpRows;
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);

  // Of this lane's rows, g and g + 8: what scores are weighed by, or delta.
  float stat[2];
  int limits[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + lane / 4 + 8 * r;
    const bool present = row < rows.count;
    const long long at = present ? rows.offset(row, rows.heads(), 1) : 0;
    limits[r] = rows.limit(row);
    if (has_weights) {
      stat[r] = present ? scaled_lse(lse[at]) : kInfinity;
      continue;
    }
    const unsigned short* its_out =
        out + (present ? rows.offset(row, out_row_stride, out_head_stride) : 0);
    const unsigned short* its_dout =
        dout + (present ? rows.offset(row, dout_row_stride, dout_head_stride) : 0);
    stat[r] = delta_of<kHeadDim, Element>(its_out, its_dout, present, lane);
    if (present && lane % 4 == 0) delta[at] = stat[r];
  }
  const int whole = rows.limit(warp_row) / kKeys;  // blocks that all the warp's rows see

  float scores[kKeyTiles][4];
  float acc[kDimTiles][4] = {};
  unsigned gradients[kKeys / 16][4];
  unsigned left[kHeadDim / 16][4];  // Q or dO
  float4* const given = reinterpret_cast<float4*>(aligned + kWeights) + thread;
  uint4* const back = reinterpret_cast<uint4*>(aligned + kGradients) + thread;

  unsigned stage = 0, parity = 0;  // of the next block that there are no scores of
  // The stage so many blocks before that.
  const auto stage_before = [&](unsigned blocks) {
    return stage >= blocks ? stage - blocks : stage + kStages - blocks;
  };
  const auto keys_at = [&](unsigned stage, bool values) {
    return base + kKeyStages + (stage * 2 + (values ? 1 : 0)) * kTileBytes;
  };
  const auto start_scores = [&]() {
    mbarrier_sleep(full(stage), parity);
    const Matrix b(keys_at(stage, !has_weights), 16);
    keep_order(scores);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      Wgmma<Element, kKeyTiles>::row_scores(
          scores, left[d], b.descriptor(d / 4 * kPanelBytes + d % 4 * 32), d > 0);
    }
    wgmma_commit();
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  const auto start_columns = [&](unsigned stage, bool accumulate) {
    const unsigned first = has_weights ? 0 : kOwnPanels * kPanelBytes;
    const Matrix b(keys_at(stage, false) + first, kPanelBytes);
    keep_order(acc);
    keep_order(gradients);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Wgmma<Element, kDimTiles>::values(acc, gradients[step], b.descriptor(step * 16 * 128),
                                        accumulate || step > 0);
    }
    wgmma_commit();
  };
  const auto release = [&](unsigned stage) {
    __syncwarp();
    if (lane < kRanks) {
      mbarrier_arrive_remote(shared_of(empty(stage), static_cast<unsigned>(lane)));
    }
  };
  // When the columns of all blocks before this one are done: the last one's stage is free.
  const auto end_columns = [&](unsigned n, unsigned stage) {
    keep_order(acc);
    keep_order(gradients);
    if (n > 0) release(stage);
  };

  mbarrier_sleep(full_rows, 0);
  const unsigned own_rows = base + kRowTiles + (has_weights ? 0 : kTileBytes);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    load_matrices(left[d], own_rows + RowTile::offset(warp_row + lane % 16, 2 * d + lane / 16));
  }
  release(kStages - 1);
  // The compiler has to know what is done unconditionally: it would have every product waited for otherwise.
  const auto give_weights = [&](unsigned n, bool is_last) {
    const unsigned its_stage = stage_before(1), before = stage_before(2);
    if (static_cast<int>(n) >= whole) {
      hide_beyond(scores, static_cast<int>(n) * kKeys, limits, lane);
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[j][e] = weight_of(scores[j][e], scale_log2, stat[e / 2]);
      }
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      given[j * 128] = make_float4(scores[j][0], scores[j][1], scores[j][2], scores[j][3]);
    }
    named_barrier_arrive(kGiven, kConsumerThreads);
    wgmma_wait<0>();
    end_columns(n, before);
    if (!is_last) start_scores();
    named_barrier(kBack, kConsumerThreads);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint4 its = back[step * 128];
      gradients[step][0] = its.x;
      gradients[step][1] = its.y;
      gradients[step][2] = its.z;
      gradients[step][3] = its.w;
    }
    start_columns(its_stage, n > 0);
    if (!is_last) wgmma_wait<1>();
    keep_order(scores);
  };
  const auto give_gradients = [&](unsigned n, bool is_last) {
    const unsigned its_stage = stage_before(1), before = stage_before(2);
    named_barrier(kGiven, kConsumerThreads);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      const float4 weight = given[j * 128];
      scores[j][0] = score_gradient(weight.x, scores[j][0], stat[0]);
      scores[j][1] = score_gradient(weight.y, scores[j][1], stat[0]);
      scores[j][2] = score_gradient(weight.z, scores[j][2], stat[1]);
      scores[j][3] = score_gradient(weight.w, scores[j][3], stat[1]);
    }
    wgmma_wait<0>();
    end_columns(n, before);
    round_all<Element>(gradients, scores);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      back[step * 128] = make_uint4(gradients[step][0], gradients[step][1], gradients[step][2],
                                    gradients[step][3]);
    }
    named_barrier_arrive(kBack, kConsumerThreads);
    if (!is_last) start_scores();
    start_columns(its_stage, n > 0);
    if (!is_last) wgmma_wait<1>();
    keep_order(scores);
  };
  keep_order(acc);  // zeros are written before anything is started
  if (blocks > 0) {
    start_scores();
    wgmma_wait<0>();
    keep_order(scores);
    if (has_weights) {
#pragma unroll 1
      for (unsigned n = 0; n + 1 < blocks; ++n) give_weights(n, false);
      give_weights(blocks - 1, true);
    } else {
#pragma unroll 1
      for (unsigned n = 0; n + 1 < blocks; ++n) give_gradients(n, false);
      give_gradients(blocks - 1, true);
    }
  }
  wgmma_wait<0>();
  keep_order(acc);
  keep_order(gradients);
  // Not before the others have said here what they have released.
  cluster_end();
  cluster_wait_for_others();

  const float scale = static_cast<float>(scale_arg);
  const int first_column = has_weights ? 0 : kOwnPanels * 64;
  rows.write_times<Element>({scale, scale}, acc, dq + first_column, dq_row_stride, dq_head_stride, warp_row,
                            lane);
}
