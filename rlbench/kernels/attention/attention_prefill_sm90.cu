// Attention for prefills and chunks on Hopper: wgmma, one producer and two consumer warpgroups, the
// bits of attention_generic.cu, whose head defines the result.
//
// What is the same, and why the bits are: a warp has 16 rows and the accumulators are in the same
// lanes, so masks, softmax, weights and merging are the generic kernel's own code; a wgmma k16 step
// adds its 16 products as mma.sync's does, and the steps ascend in the same order.
//
// THE SCHEDULE
//
// A thread block takes 128 rows, (position, head in group) pairs, 64 for each consumer warpgroup.
// The producer copies K and V with cp.async, which serves packed and paged keys alike and writes
// zeros for absent ones, into two stages each. A consumer starts the next block's scores, then the
// last block's P V, and does its softmax while the latter runs:
//
//     S(0); softmax(0);  for j = 1 ..: { start S(j); start O += P(j-1) V(j-1); wait S(j);
//     softmax(j); wait O; rescale O; P(j) }  O += P(last) V(last)
//
// Shared memory holds matrices as panels of 64 elements (128 bytes) a row, which wgmma reads through
// descriptors: Q and K along the sum's dimension, V across it.

#include "copy.cuh"
#include "definition.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "softmax.cuh"
#include "tile_rows.cuh"
#include "waiting.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), SHARED_BYTES
// (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

constexpr int kConsumers = 2;                        // warpgroups
constexpr int kTileRows = 64 * kConsumers;
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kThreads = 128 + kConsumerThreads;     // the producer comes first
constexpr int kStages = 2;
constexpr int kPanels = kHeadDim / 64;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kKeySteps = kBlockKeys / 16;
constexpr int kDimTiles = kHeadDim / 8;

constexpr int kQPanel = kTileRows * 128;             // bytes
constexpr int kKeyPanel = kBlockKeys * 128;
constexpr int kStageBytes = kPanels * kKeyPanel;
constexpr int kQTile = 0;
constexpr int kKTiles = kQTile + kPanels * kQPanel;
constexpr int kVTiles = kKTiles + kStages * kStageBytes;
constexpr int kBarriers = kVTiles + kStages * kStageBytes;  // full K, full V, empty K, empty V
constexpr int kAlignment = 1024;                     // of what descriptors name
constexpr int kSharedBytes = kBarriers + 4 * kStages * 8 + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kKeyPanel % kAlignment == 0 && kQPanel % kAlignment == 0, "panels stay aligned");

// Registers of a thread: 65,536 for all three warpgroups.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

struct KeyTile {
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kKeyPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Keys = KeyRows<kHeadDim, kBlockKeys, 4, kPaged, KeyTile>;

struct QTile {
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kQPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};

// Which of the stages a block of keys is in, and the parity of its turn there.
struct Turn {
  unsigned stage, parity;
  __device__ __forceinline__ explicit Turn(int block)
      : stage(static_cast<unsigned>(block) % kStages),
        parity(static_cast<unsigned>(block) / kStages % 2) {}
};

// Starts S = Q K^T for one warpgroup's 64 rows.
__device__ __forceinline__ void start_scores(float (&scores)[kKeyTiles][4], unsigned q_rows,
                                             unsigned k_tile) {
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    const unsigned long long a =
        matrix_descriptor(q_rows + d / 4 * kQPanel + d % 4 * 32, 1024, 16);
    const unsigned long long b =
        matrix_descriptor(k_tile + d / 4 * kKeyPanel + d % 4 * 32, 1024, 16);
    Wgmma<Element, kKeyTiles>::scores(scores, a, b, d > 0);
  }
}

// Starts O += P V, or O = P V.
__device__ __forceinline__ void start_values(float (&acc)[kDimTiles][4],
                                             const unsigned (&weights)[kKeySteps][4],
                                             unsigned v_tile, bool accumulate) {
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    const unsigned long long b = matrix_descriptor(v_tile + step * 16 * 128, 1024, kKeyPanel);
    Wgmma<Element, kDimTiles>::values(acc, weights[step], b, accumulate || step > 0);
  }
}

// work: [grid, kConsumerThreads, kDimTiles + 1, 4], see waiting.cuh.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long tiles_arg, long long causal_arg,
                double scale_arg, double scale_log2_arg) {
  extern __shared__ unsigned char shared_memory[];
  const unsigned misaligned = shared_address(shared_memory) % kAlignment;
  unsigned char* memory = shared_memory + (misaligned ? kAlignment - misaligned : 0);
  const unsigned base = shared_address(memory);
  const auto barrier = [&](int which, unsigned stage) {
    return base + kBarriers + (which * kStages + static_cast<int>(stage)) * 8;
  };
  constexpr int kFullK = 0, kFullV = 1, kEmptyK = 2, kEmptyV = 3;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  // Which tile. Late tiles see the most keys under the causal mask, so they start first.
  const unsigned tiles = static_cast<unsigned>(tiles_arg);
  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const unsigned others = gridDim.x / tiles;  // (sequence, KV head) pairs
  const TileRows<kTileRows, kPaged> rows(tiles - 1 - blockIdx.x / others,
                                         blockIdx.x % others % kv_heads,
                                         blockIdx.x % others / kv_heads, kv_heads,
                                         static_cast<unsigned>(group_arg), cu_seqlens_q, lengths_k,
                                         causal_arg != 0);
  if (rows.count == 0) return;
  const int tile_limit = rows.limit(kTileRows - 1);
  const int seen = tile_limit > 0 ? (tile_limit + kBlockKeys - 1) / kBlockKeys : 0;
  // Without room to wait in, a row with more keys than a split has no result, and says so.
  const bool impossible = work == nullptr && seen > kSplitBlocks;
  const int blocks = impossible ? 0 : seen;

  if (threadIdx.x == 0) {
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier(kFullK, stage), 128);
      mbarrier_init(barrier(kFullV, stage), 128);
      mbarrier_init(barrier(kEmptyK, stage), kConsumerThreads / 32);
      mbarrier_init(barrier(kEmptyV, stage), kConsumerThreads / 32);
    }
  }
  __syncthreads();

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
    const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
    const unsigned short* k_head = k + rows.kv_head * k_strides.head;
    const unsigned short* v_head = v + rows.kv_head * v_strides.head;
    Keys keys;
    keys.table = kPaged ? block_table + rows.sequence * table_stride : nullptr;
    keys.page_size = static_cast<unsigned>(page_size_arg);
    keys.first_row = rows.k_begin;
    keys.end = tile_limit;
    for (int block = 0; block < blocks; ++block) {
      const Turn turn(block);
      const unsigned offset = turn.stage * kStageBytes;
      const int first_key = block * kBlockKeys;
      keys.find(first_key, warp, lane);
      mbarrier_wait(barrier(kEmptyK, turn.stage), turn.parity ^ 1);  // at first there is no wait
      keys.copy(base + kKTiles + offset, k_head, k_strides, first_key, warp, lane);
      mbarrier_arrive_after_copies(barrier(kFullK, turn.stage));
      mbarrier_wait(barrier(kEmptyV, turn.stage), turn.parity ^ 1);
      keys.copy(base + kVTiles + offset, v_head, v_strides, first_key, warp, lane);
      mbarrier_arrive_after_copies(barrier(kFullV, turn.stage));
    }
    copy_async_wait_all();  // before the block's shared memory can go to another
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const int consumer = warp / 4 - 1;
  const int warp_row = (warp - 4) * kWarpRows;
  const unsigned thread = threadIdx.x - 128;
  const int warp_limit_min = rows.limit(warp_row);

  rows.copy_q<kHeadDim, QTile>(base + kQTile, q, q_row_stride, q_head_stride, warp_row, lane);
  copy_async_wait_all();
  fence_for_wgmma();
  named_barrier(1 + consumer, 128);  // a wgmma reads the rows of all four warps

  const float scale_log2 = static_cast<float>(scale_log2_arg);
  const unsigned q_rows = base + kQTile + consumer * 64 * 128;
  SoftmaxRows softmax;
  float scores[kKeyTiles][4];
  float acc[kDimTiles][4] = {};
  float rescale[2];
  unsigned weights[kKeySteps][4];

  // Raw scores to weights; `rescale` is what O has to be multiplied by.
  const auto weigh = [&](int first_key) {
    if (first_key + kBlockKeys > warp_limit_min) rows.hide(scores, first_key, warp_row, lane);
    softmax.block(scores, scale_log2, rescale);
  };
  const auto round_weights = [&]() {
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&from)[4] = scores[2 * step + half];
        weights[step][2 * half] = Element::pack(from[0], from[1]);
        weights[step][2 * half + 1] = Element::pack(from[2], from[3]);
      }
    }
  };
  const auto release = [&](int which, unsigned stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier(which, stage));
  };

  if (blocks > 0) {
    const Turn turn(0);
    mbarrier_wait(barrier(kFullK, turn.stage), turn.parity);
    fence_for_wgmma();
    wgmma_fence();
    start_scores(scores, q_rows, base + kKTiles + turn.stage * kStageBytes);
    wgmma_commit();
    wgmma_wait<0>();
    keep_order(scores);
    release(kEmptyK, turn.stage);
    weigh(0);
    round_weights();
  }
  bool fresh = true;  // O has nothing of this split yet
  for (int block = 1; block < blocks; ++block) {
    const Turn turn(block);
    const Turn before(block - 1);
    mbarrier_wait(barrier(kFullK, turn.stage), turn.parity);
    mbarrier_wait(barrier(kFullV, before.stage), before.parity);
    fence_for_wgmma();
    keep_order(scores);
    keep_order(acc);
    keep_order(weights);
    wgmma_fence();
    start_scores(scores, q_rows, base + kKTiles + turn.stage * kStageBytes);
    wgmma_commit();
    start_values(acc, weights, base + kVTiles + before.stage * kStageBytes, !fresh);
    wgmma_commit();
    fresh = false;
    wgmma_wait<1>();
    keep_order(scores);
    release(kEmptyK, turn.stage);
    if (block % kSplitBlocks == 0) {
      // What was before belongs to the last split; this block's weights are relative to nothing.
      wgmma_wait<0>();
      keep_order(acc);
      keep_order(weights);
      release(kEmptyV, before.stage);
      merge_split<kConsumerThreads>(work, thread, softmax, acc, scale_log2, block == kSplitBlocks,
                                    false);
      fresh = true;
      weigh(block * kBlockKeys);
    } else {
      weigh(block * kBlockKeys);
      wgmma_wait<0>();
      keep_order(acc);
      keep_order(weights);
      release(kEmptyV, before.stage);
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = __fmul_rn(acc[n][e], rescale[e / 2]);
      }
    }
    round_weights();
  }
  if (blocks > 0) {
    const Turn turn(blocks - 1);
    mbarrier_wait(barrier(kFullV, turn.stage), turn.parity);
    fence_for_wgmma();
    keep_order(acc);
    keep_order(weights);
    wgmma_fence();
    start_values(acc, weights, base + kVTiles + turn.stage * kStageBytes, !fresh);
    wgmma_commit();
    wgmma_wait<0>();
    keep_order(acc);
    keep_order(weights);
    if (blocks > kSplitBlocks) {
      merge_split<kConsumerThreads>(work, thread, softmax, acc, scale_log2, false, true);
    }
  }

  // The other warps' products have read this warp's rows of Q: they are done with theirs, too.
  named_barrier(1 + consumer, 128);
  rows.write<Element, QTile>(softmax, acc, memory + kQTile, out, out_row_stride, out_head_stride,
                             lse, scale_arg, impossible, warp_row, lane);
}
