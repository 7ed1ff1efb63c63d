// Attention for prefills and chunks on Hopper: wgmma, one producer and two or three consumer
// warpgroups, the bits of attention_generic.cu, whose head defines the result.
//
// What is the same, and why the bits are: a warp has 16 rows and the accumulators are in the same
// lanes, so masks, softmax, weights and merging are the generic kernel's own code; a wgmma k16 step
// adds its 16 products as mma.sync's does, and the steps ascend in the same order.
//
// THE SCHEDULE
//
// A thread block takes tiles of rows, (position, head in group) pairs, 64 for each consumer
// warpgroup: one of each gridDim.x, the longest first. The producer runs ahead, into the
// next tile, too. It copies Q, and K and V into two stages each, zeros for absent ones. A consumer
// starts the next block's scores, then the last block's P V, and does its softmax while the latter
// runs:
//
//     S(0); softmax(0);  for j = 1 ..: { start S(j); start O += P(j-1) V(j-1); wait S(j);
//     softmax(j); wait O; rescale O; P(j) }  O += P(last) V(last)
//
// Where j begins a split, O is merged with what waits instead of rescaled, and waits itself: in
// shared memory, or at head dim 256, which leaves no room there, in global memory.
//
// Shared memory holds matrices as panels of 64 elements (128 bytes) a row, which wgmma reads through
// descriptors: Q and K along the sum's dimension, V across it.
//
// Packed keys can come by TMA: a block of K or V is one box of a tensor map, which one thread asks
// for. Everything else comes by cp.async, a chunk at a time. Both write the same bytes.

#include "copy.cuh"
#include "definition.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "softmax.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "waiting.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), TMA (0, 1),
// CONSUMERS (2, 3), SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr bool kPaged = PAGED != 0;
constexpr bool kTma = TMA != 0;
using Element = ELEMENT;

constexpr int kConsumers = CONSUMERS;                // warpgroups
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
// Between splits O waits in shared memory where there is room for it, which costs far less than a way
// to the L2 and back.
constexpr bool kWaitsHere = kHeadDim <= 128;
constexpr int kWaitingTile = kVTiles + kStages * kStageBytes;
// A thread's float4s of O, and of its rows' maxima and sums, for which registers have to do else.
constexpr int kWaiting = kDimTiles + (kHeadDim == 128 ? 0 : 1);
constexpr int kBarriers = kWaitingTile + (kWaitsHere ? kConsumerThreads * kWaiting * 16 : 0);
constexpr int kAlignment = 1024;                     // of what descriptors name
constexpr int kSharedBytes = kBarriers + (4 * kStages + 2) * 8 + kAlignment;

static_assert(!(kPaged && kTma), "pages are looked up, and a box has but one address");
static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kKeyPanel % kAlignment == 0 && kQPanel % kAlignment == 0, "panels stay aligned");

// Registers of a thread. Together they are what the block was launched with, or a warpgroup waits for
// registers that nobody gives.
static_assert(kConsumers == 2 || (kConsumers == 3 && kTma), "registers for consumers");
constexpr bool kWide = kHeadDim == 256;  // consumers need more, and the producer less
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kTma ? 24 : kWide ? 40 : 56;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kTma ? 240 : kWide ? 232 : 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * (65536 / kThreads / 8 * 8),
              "the launch's registers");

// The producer's warps that copy Q, and arrivals at a barrier when a block of K or V is there.
constexpr int kQWarps = kTma ? 3 : 4;
constexpr int kKeyArrivals = kTma ? 1 : 128;

// Whether the consumers start their products in turns, so that one's softmax runs under another's
// products instead of all waiting for a tensor core that they share.
constexpr bool kTurns = kHeadDim <= 128;
constexpr int kTurnThreads = 256;  // one that gives way, and the next one

struct KeyTile {
  static constexpr int kRowBytes = 128;
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
  const Matrix q(q_rows, 16), k(k_tile, 16);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    Wgmma<Element, kKeyTiles>::scores(scores, q.descriptor(d / 4 * kQPanel + d % 4 * 32),
                                      k.descriptor(d / 4 * kKeyPanel + d % 4 * 32), d > 0);
  }
}

// Starts O += P V, or O = P V.
__device__ __forceinline__ void start_values(float (&acc)[kDimTiles][4],
                                             const unsigned (&weights)[kKeySteps][4],
                                             unsigned v_tile, bool accumulate) {
  const Matrix v(v_tile, kKeyPanel);
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    Wgmma<Element, kDimTiles>::values(acc, weights[step], v.descriptor(step * 16 * 128),
                                      accumulate || step > 0);
  }
}

// Which tile a thread block's n-th place stands for. Late tiles see the most keys under the causal
// mask, so they come first.
struct Places {
  unsigned tiles, kv_heads, others, group;  // others: (sequence, KV head) pairs
  bool causal;

  __device__ __forceinline__ unsigned count() const { return tiles * others; }

  __device__ __forceinline__ TileRows<kTileRows, kPaged> operator()(unsigned place,
                                                                   const int* cu_seqlens_q,
                                                                   const int* lengths_k) const {
    return {tiles - 1 - place / others, place % others % kv_heads, place % others / kv_heads,
            kv_heads, group, cu_seqlens_q, lengths_k, causal};
  }
};

// The places of a thread block, one a round: who comes first in one round comes last in the next, so
// that all have about as much to do.
struct Deal {
  unsigned place = blockIdx.x;
  unsigned step = 2 * (gridDim.x - blockIdx.x) - 1;

  __device__ __forceinline__ void next() {
    place += step;
    step = 2 * gridDim.x - step;
  }
};

// Key blocks that some row of the tile sees.
__device__ __forceinline__ int blocks_of(const TileRows<kTileRows, kPaged>& rows) {
  const int limit = rows.limit(kTileRows - 1);
  return limit > 0 ? (limit + kBlockKeys - 1) / kBlockKeys : 0;
}

// Those that are loaded: none where a row's result would have to wait and there is no room.
__device__ __forceinline__ int blocks_loaded(const TileRows<kTileRows, kPaged>& rows,
                                             bool can_wait) {
  const int blocks = rows.count > 0 ? blocks_of(rows) : 0;
  return can_wait || blocks <= kSplitBlocks ? blocks : 0;
}

// Before wgmma reads what a barrier has announced. With TMA the producer has seen to it.
__device__ __forceinline__ void see_copies() {
  if constexpr (!kTma) fence_async_proxy();
}

// Of K and V (tensor_map.py): the dimensions are the elements of a panel, keys, the last of which is
// the tile's, panels, KV heads, and where in the tensor the tile's keys end.
#if TMA
#define MAPS , const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map
#else
#define MAPS
#endif

// work: [grid, kConsumerThreads, kDimTiles + 1, 4], see waiting.cuh. Where O waits in shared memory,
// it only says that rows may have to wait.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long tiles_arg,
                long long causal_arg, double scale_arg, double scale_log2_arg MAPS) {
  extern __shared__ unsigned char shared_memory[];
  const unsigned misaligned = shared_address(shared_memory) % kAlignment;
  unsigned char* aligned = shared_memory + (misaligned ? kAlignment - misaligned : 0);
  const unsigned base = shared_address(aligned);
  const auto barrier = [&](int which, unsigned stage) {
    return base + kBarriers + (which * kStages + static_cast<int>(stage)) * 8;
  };
  constexpr int kFullK = 0, kFullV = 1, kEmptyK = 2, kEmptyV = 3;
  const unsigned full_q = base + kBarriers + 4 * kStages * 8;
  const unsigned empty_q = full_q + 8;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const Places places = {static_cast<unsigned>(tiles_arg), kv_heads,
                         kv_heads * static_cast<unsigned>(sequences_arg),
                         static_cast<unsigned>(group_arg), causal_arg != 0};

  if (threadIdx.x == 0) {
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier(kFullK, stage), kKeyArrivals);
      mbarrier_init(barrier(kFullV, stage), kKeyArrivals);
      mbarrier_init(barrier(kEmptyK, stage), kConsumerThreads / 32);
      mbarrier_init(barrier(kEmptyV, stage), kConsumerThreads / 32);
    }
    mbarrier_init(full_q, 32 * kQWarps);
    mbarrier_init(empty_q, kConsumerThreads / 32);
    if constexpr (kTma) fence_async_proxy();
  }
  __syncthreads();

  // Blocks of keys, and tiles with any, that this thread block has had before the present tile.
  int earlier_blocks = 0;
  unsigned earlier_tiles = 0;

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const auto copy_q = [&](const TileRows<kTileRows, kPaged>& rows) {
      mbarrier_wait(empty_q, earlier_tiles % 2 ^ 1);  // at first there is no wait
#pragma unroll 1
      for (int part = warp - (4 - kQWarps); part < kTileRows / kWarpRows; part += kQWarps) {
        rows.copy_q<kHeadDim, QTile>(base + kQTile, q, q_row_stride, q_head_stride,
                                     part * kWarpRows, lane);
      }
    };
#if TMA
    if (warp == 0) {
      if (lane != 0) return;
      prefetch_tensor_map(&k_map);
      prefetch_tensor_map(&v_map);
      for (Deal deal; deal.place < places.count(); deal.next()) {
        const TileRows<kTileRows, kPaged> rows = places(deal.place, cu_seqlens_q, lengths_k);
        const int blocks = blocks_loaded(rows, work != nullptr);
        if (blocks == 0) continue;
        const int end = rows.limit(kTileRows - 1);
        const int first_row = static_cast<int>(page_size_arg) - end;  // zeros from `end` on
        const auto load = [&](const TensorMap* map, int tiles, int full, int empty, int block) {
          const Turn turn(earlier_blocks + block);
          mbarrier_wait(barrier(empty, turn.stage), turn.parity ^ 1);
          mbarrier_arrive_expecting(barrier(full, turn.stage), kStageBytes);
          copy_box(base + tiles + turn.stage * kStageBytes, map, barrier(full, turn.stage), 0,
                   first_row + block * kBlockKeys, 0, static_cast<int>(rows.kv_head),
                   rows.k_begin + end);
        };
        // In the order in which stages become free.
        load(&k_map, kKTiles, kFullK, kEmptyK, 0);
#pragma unroll 1
        for (int block = 1; block < blocks; ++block) {
          load(&k_map, kKTiles, kFullK, kEmptyK, block);
          load(&v_map, kVTiles, kFullV, kEmptyV, block - 1);
        }
        load(&v_map, kVTiles, kFullV, kEmptyV, blocks - 1);
        earlier_blocks += blocks;
      }
      return;
    }
    // Other warps copy Q, so that neither waits for the other's stages.
    for (Deal deal; deal.place < places.count(); deal.next()) {
      const TileRows<kTileRows, kPaged> rows = places(deal.place, cu_seqlens_q, lengths_k);
      if (blocks_loaded(rows, work != nullptr) == 0) continue;
      copy_q(rows);
      copy_async_wait_all();
      fence_async_proxy();
      mbarrier_arrive(full_q);
      ++earlier_tiles;
    }
#else
    const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
    const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
    for (Deal deal; deal.place < places.count(); deal.next()) {
      const TileRows<kTileRows, kPaged> rows = places(deal.place, cu_seqlens_q, lengths_k);
      const int blocks = blocks_loaded(rows, work != nullptr);
      if (blocks == 0) continue;
      const unsigned short* k_head = k + rows.kv_head * k_strides.head;
      const unsigned short* v_head = v + rows.kv_head * v_strides.head;
      Keys keys;
      keys.table = kPaged ? block_table + rows.sequence * table_stride : nullptr;
      keys.page_size = static_cast<unsigned>(page_size_arg);
      keys.first_row = rows.k_begin;
      keys.end = rows.limit(kTileRows - 1);
      copy_q(rows);
      mbarrier_arrive_after_copies(full_q);
      for (int block = 0; block < blocks; ++block) {
        const Turn turn(earlier_blocks + block);
        const unsigned offset = turn.stage * kStageBytes;
        const int first_key = block * kBlockKeys;
        keys.find(first_key, warp, lane);
        mbarrier_wait(barrier(kEmptyK, turn.stage), turn.parity ^ 1);
        keys.copy(base + kKTiles + offset, k_head, k_strides, first_key, warp, lane);
        mbarrier_arrive_after_copies(barrier(kFullK, turn.stage));
        mbarrier_wait(barrier(kEmptyV, turn.stage), turn.parity ^ 1);
        keys.copy(base + kVTiles + offset, v_head, v_strides, first_key, warp, lane);
        mbarrier_arrive_after_copies(barrier(kFullV, turn.stage));
      }
      earlier_blocks += blocks;
      ++earlier_tiles;
    }
    copy_async_wait_all();  // before the block's shared memory can go to another
#endif
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const int consumer = warp / 4 - 1;
  const int warp_row = (warp - 4) * kWarpRows;
  const unsigned thread = threadIdx.x - 128;
  // Through a shuffle, so that it is not converted again for every block.
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);
  const unsigned q_rows = base + kQTile + consumer * 64 * 128;
  const int next_consumer = consumer + 1 < kConsumers ? consumer + 1 : 0;

  if (kTurns && next_consumer == 0) named_barrier_arrive(1, kTurnThreads);  // the first one begins

  const auto release = [&](unsigned empty) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty);
  };

  for (Deal deal; deal.place < places.count(); deal.next()) {
    // Computed again where it is needed, from a place that the compiler does not recognize: the
    // registers are worth more than the time.
    const auto tile_rows = [&]() {
      unsigned same = deal.place;
      asm volatile("" : "+r"(same));
      return places(same, cu_seqlens_q, lengths_k);
    };
    int seen, whole;  // blocks; those that every row of the warp sees in full
    {
      const TileRows<kTileRows, kPaged> rows = tile_rows();
      if (rows.count == 0) continue;
      seen = blocks_of(rows);
      whole = rows.limit(warp_row) / kBlockKeys;
    }
    // Without room to wait in, a row with more keys than a split has no result, and says so.
    const int blocks = work == nullptr && seen > kSplitBlocks ? 0 : seen;

    SoftmaxRows softmax;
    float scores[kKeyTiles][4];
    float acc[kDimTiles][4] = {};
    float rescale[2];
    unsigned weights[kKeySteps][4];

    // Raw scores to weights; `rescale` is what O has to be multiplied by, if so.
    const auto weigh = [&](int block) {
      if (block >= whole) tile_rows().hide(scores, block * kBlockKeys, warp_row, lane);
      return softmax.block_if_changed(scores, scale_log2, rescale);
    };
    float4 waiting_rows;  // maxima and sums, where they wait in registers
    const auto end_split = [&](SoftmaxRows& ended, bool first, bool last) {
      float4* waiting = kWaitsHere ? reinterpret_cast<float4*>(aligned + kWaitingTile)
                                   : reinterpret_cast<float4*>(work) +
                                         static_cast<long long>(blockIdx.x) * kConsumerThreads *
                                             kWaiting;
      waiting += thread / 32 * 32 * kWaiting + lane;
      float4& rows = kWaiting > kDimTiles ? waiting[kDimTiles * 32] : waiting_rows;
      if (!first) meet(waiting, rows, ended, acc, scale_log2);
      if (!last) {
        rows = both_of(ended);
        leave(waiting, acc);
      }
    };
    // Between the softmax and the wait for the products that it runs under, since ptxas would put
    // that wait first; but it moves nothing past a loop, and this one takes the sums.
    const auto await_v = [&](const Turn& turn) {
      const float sums = __fadd_rn(softmax.sum[0], softmax.sum[1]);
      mbarrier_wait_after(sums, barrier(kFullV, turn.stage), turn.parity);
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

    if (blocks > 0) {
      const Turn turn(earlier_blocks);
      mbarrier_wait(full_q, earlier_tiles % 2);
      mbarrier_wait(barrier(kFullK, turn.stage), turn.parity);
      see_copies();
      wgmma_fence();
      start_scores(scores, q_rows, base + kKTiles + turn.stage * kStageBytes);
      wgmma_commit();
      wgmma_wait<0>();
      keep_order(scores);
      release(barrier(kEmptyK, turn.stage));
      if (blocks == 1) release(empty_q);
      weigh(0);
      round_weights();
      await_v(turn);
    }
    int place = 0;  // in its split, of the block whose weights there are
    for (int block = 1; block < blocks; ++block) {
      const Turn turn(earlier_blocks + block);
      const Turn before(earlier_blocks + block - 1);
      mbarrier_wait(barrier(kFullK, turn.stage), turn.parity);
      see_copies();
      if (kTurns) named_barrier(1 + consumer, kTurnThreads);
      keep_order(scores);
      keep_order(acc);
      keep_order(weights);
      wgmma_fence();
      start_scores(scores, q_rows, base + kKTiles + turn.stage * kStageBytes);
      wgmma_commit();
      start_values(acc, weights, base + kVTiles + before.stage * kStageBytes, place > 0);
      wgmma_commit();
      if (kTurns) named_barrier_arrive(1 + next_consumer, kTurnThreads);
      wgmma_wait<1>();
      keep_order(scores);
      release(barrier(kEmptyK, turn.stage));
      if (block == blocks - 1) release(empty_q);
      // With a new split, what was before waits, and weights are relative to nothing.
      const bool splits = place == kSplitBlocks - 1;
      place = splits ? 0 : place + 1;
      SoftmaxRows ended = softmax;
      if (splits) softmax = SoftmaxRows();
      const bool changed = weigh(block);
      await_v(turn);
      wgmma_wait<0>();
      keep_order(acc);
      keep_order(weights);
      release(barrier(kEmptyV, before.stage));
      round_weights();
      if (splits) {
        end_split(ended, block == kSplitBlocks, false);  // O starts afresh with place 0
      } else if (changed) {
        rescale_all(acc, rescale);
      }
    }
    if (blocks > 0) {
      const Turn turn(earlier_blocks + blocks - 1);
      see_copies();
      keep_order(acc);
      keep_order(weights);
      wgmma_fence();
      start_values(acc, weights, base + kVTiles + turn.stage * kStageBytes, place > 0);
      wgmma_commit();
      wgmma_wait<0>();
      keep_order(acc);
      keep_order(weights);
      release(barrier(kEmptyV, turn.stage));
      if (blocks > kSplitBlocks) end_split(softmax, false, true);
      earlier_blocks += blocks;
      ++earlier_tiles;
    }
    tile_rows().write<Element>(softmax, acc, out, out_row_stride, out_head_stride, lse, scale_arg,
                               blocks != seen, warp_row, lane);
  }
  // The last giving way is met, so that none is left over.
  if (kTurns && consumer == 0) named_barrier(1, kTurnThreads);
}
