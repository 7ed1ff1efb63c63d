// The gradients of the keys and values on Hopper at head dim 256: wgmma, TMA, a producer and two consumer
// warpgroups, the bits of attention_backward_keys.cu. attention_backward_queries.cu, which comes before it
// and leaves `delta`, defines the result.
//
// THE SCHEDULE
//
// A thread block takes kTileKeys keys of one KV head and all rows that see one of them, kRows at a time.
// Products are transposed, keys by rows. Registers hold one of the sums, so each consumer has two of the
// four products:
//
//     consumer 0:  S = K Q^T,    P = weights of S,     dV += P dO
//     consumer 1:  dP = V dO^T,  dS = P (dP - delta),  dK += dS Q
//
// P goes from the one to the other through shared memory, each thread's to the thread that needs it: their
// accumulators are in the same lanes. While a consumer makes weights, the other one's products run. There
// is room for two blocks of rows, so the next block's first product is started after this one's second:
// the block has had as long to arrive.
//
// Two thread blocks are a cluster that takes neighbouring tiles: each asks for half of the panels of Q and
// dO, which come to both. Both go through the rows that see the first one's keys.
//
// The producer's first warp asks for boxes of Q and dO; a sequence's end is theirs, and zeros follow. The
// next ones find what else is needed of each row. All of them bring K and V, once.

#include "backward.cuh"
#include "cluster.cuh"
#include "copy.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (256), ELEMENT (Bf16, Fp16), CHUNK_ROWS, SHARED_BYTES (what the launch
// reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kRanks = 2;  // thread blocks of a cluster
using Element = ELEMENT;

constexpr int kTileKeys = 64;
constexpr int kRows = 64;
constexpr int kStages = 2;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = 128 + kConsumerThreads;
constexpr int kPanels = kHeadDim / 64;
constexpr int kRowTiles = kRows / 8;
constexpr int kDimTiles = kHeadDim / 8;

// Shared memory, in bytes. Matrices are panels of 64 elements (128 bytes) a row.
constexpr int kPanelBytes = kRows * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kKeyTiles = 0;                       // K and V
constexpr int kRowStages = 2 * kTileBytes;         // Q and dO each
constexpr int kExchange = kRowStages + kStages * 2 * kTileBytes;  // P
constexpr int kStats = kExchange + 128 * kRowTiles * 16;
constexpr int kBarriers = kStats + kStages * static_cast<int>(sizeof(RowStats<kRows>));
constexpr int kTask = kBarriers + (2 * kStages + 1) * 8;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = kTask + static_cast<int>(sizeof(KeyTask)) + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kTileKeys == kRows, "tiles of both have one layout");
static_assert(kPanels % kRanks == 0, "blocks share panels");

constexpr int kAsked = kPanels / kRanks;  // panels that a block asks for
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kGiven = 1, kTaken = 2, kLeft = 3;  // named barriers: P's; and that sums are left

struct KeyTile {
  static constexpr int kRowBytes = 128;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kPanelBytes) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Keys = KeyRows<kHeadDim, kTileKeys, 4, false, KeyTile>;

extern "C" __global__ void __cluster_dims__(kRanks, 1, 1)
    __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_BACKWARD_PARAMETERS, long long total_q_arg,
                const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map) {
  extern __shared__ unsigned char shared_memory[];
  const unsigned misaligned = shared_address(shared_memory) % kAlignment;
  unsigned char* aligned = shared_memory + (misaligned ? kAlignment - misaligned : 0);
  const unsigned base = __shfl_sync(kFullWarp, shared_address(aligned), 0);
  const auto full = [&](unsigned stage) { return base + kBarriers + stage * 8; };
  const auto empty = [&](unsigned stage) { return base + kBarriers + (kStages + stage) * 8; };
  const unsigned full_keys = base + kBarriers + 2 * kStages * 8;
  const auto stats_of = [&](unsigned stage) {
    return reinterpret_cast<RowStats<kRows>*>(aligned + kStats) + stage;
  };

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const unsigned group = static_cast<unsigned>(group_arg);
  const unsigned unit = blockIdx.x % static_cast<unsigned>(units_arg);
  const unsigned chunk = blockIdx.x / static_cast<unsigned>(units_arg);
  const unsigned place = unit / kRanks;
  const unsigned rank = cluster_rank();
  const unsigned kv_head = place % kv_heads;
  const KeyTileOf<kRanks * kTileKeys> tiles(place / kv_heads, cu_seqlens_k,
                                            static_cast<unsigned>(sequences_arg));
  using Seeing = SeeingRows<kRows, CHUNK_ROWS>;
  const Seeing seeing(tiles, chunk, cu_seqlens_q, group, causal_arg != 0);
  if (!seeing.exists) return;
  const int k_begin = tiles.begin, k_length = tiles.length;
  const int first_key = tiles.first_key + static_cast<int>(rank) * kTileKeys;
  const unsigned blocks = seeing.blocks;

  KeyTask& task = *reinterpret_cast<KeyTask*>(aligned + kTask);
  if (threadIdx.x == 0) {
    task = {first_key, k_begin, k_length, kv_head, unit, chunk, seeing.is_first, seeing.is_last};
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1 + 32);
      mbarrier_init(empty(stage), kRanks * kConsumerThreads / 32);
    }
    mbarrier_init(full_keys, 128);
    fence_async_proxy();
    fence_barriers();
  }
  cluster_begin();
  cluster_wait_for_others();

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const auto ask = [&](unsigned n) {
      const unsigned stage = n % kStages;
      const unsigned rows = base + kRowStages + stage * 2 * kTileBytes + rank * kAsked * kPanelBytes;
      const int heads = static_cast<int>(kv_head * group);
      const int panel = static_cast<int>(rank) * kAsked;
      const int x = static_cast<int>(total_q_arg) - seeing.q_length +  // zeros from the end on
                    static_cast<int>((seeing.first_block + n) * (kRows / group));
      mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);
      mbarrier_arrive_expecting(full(stage), 2 * kTileBytes);
      copy_box<kRanks>(rows, &q_map, full(stage), 0, heads, x, panel, seeing.q_end);
      copy_box<kRanks>(rows + kTileBytes, &dout_map, full(stage), 0, heads, x, panel, seeing.q_end);
    };
    const unsigned at_once = blocks < kStages ? blocks : kStages;
    if (warp == 0 && is_elected()) {
#pragma unroll 1
      for (unsigned n = 0; n < at_once; ++n) ask(n);
    }
    __syncwarp();
    const Keys keys = Keys::packed(k_begin, k_length);
    keys.copy(base + kKeyTiles, k + kv_head * k_head_stride, {0, k_row_stride, k_head_stride},
              first_key, warp, lane);
    keys.copy(base + kKeyTiles + kTileBytes, v + kv_head * v_head_stride,
              {0, v_row_stride, v_head_stride}, first_key, warp, lane);
    copy_async_wait_all();
    fence_async_proxy();
    mbarrier_arrive(full_keys);
    if (warp == 0) {
      if (!is_elected()) return;
#pragma unroll 1
      for (unsigned n = at_once; n < blocks; ++n) ask(n);
    } else if (warp <= kStages) {  // each has one stage
      const unsigned stage = static_cast<unsigned>(warp) - 1;
      RowFinder<kRows, Seeing> finder(seeing, k_length, stage, kStages, kv_head, kv_heads, group,
                              causal_arg != 0, lse, delta, lane);
      finder.find();
#pragma unroll 1
      for (unsigned n = stage; n < blocks; n += kStages) {
        mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);
        stats_of(stage)->take(finder, lane);
        mbarrier_arrive(full(stage));
        finder.find();
      }
    }
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const bool has_values = warp < 8;  // dV, else dK
  const unsigned thread = threadIdx.x % 128;
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);

  float scores[kRowTiles][4];
  float acc[kDimTiles][4] = {};
  unsigned weights[kRows / 16][4];
  float4* const exchange = reinterpret_cast<float4*>(aligned + kExchange) + thread;

  const unsigned own_keys = base + kKeyTiles + (has_values ? 0 : kTileBytes);
  const auto rows_at = [&](unsigned stage, bool dout) {
    return base + kRowStages + (stage * 2 + (dout ? 1 : 0)) * kTileBytes;
  };
  const auto start_scores = [&](unsigned n) {
    const unsigned stage = n % kStages;
    mbarrier_sleep(full(stage), n / kStages % 2);
    const Matrix a(own_keys, 16), b(rows_at(stage, !has_values), 16);
    keep_order(scores);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int offset = d / 4 * kPanelBytes + d % 4 * 32;
      Wgmma<Element, kRowTiles>::scores(scores, a.descriptor(offset), b.descriptor(offset), d > 0);
    }
    wgmma_commit();
  };
  const auto release = [&](unsigned n) {
    __syncwarp();
    if (lane < kRanks) {
      mbarrier_arrive_remote(shared_of(empty(n % kStages), static_cast<unsigned>(lane)));
    }
  };

  mbarrier_sleep(full_keys, 0);
  // The compiler has to know what is done unconditionally: it would have every product waited for otherwise.
  const auto turn = [&](unsigned n, bool is_last) {
    const RowStats<kRows>& stats = *stats_of(n % kStages);
    if (has_values) {
      // Rows ascend, so the first one sees the fewest keys. Absent ones have no weights anyway.
      if (stats.limits[0] < first_key + kTileKeys) {
        stats.hide(scores, first_key + again(warp) % 4 * 16 + again(lane) / 4, lane);
      }
      stats.weigh(scores, scale_log2, lane);
      if (n > 0) named_barrier(kTaken, kConsumerThreads);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        exchange[j * 128] = make_float4(scores[j][0], scores[j][1], scores[j][2], scores[j][3]);
      }
      named_barrier_arrive(kGiven, kConsumerThreads);
    } else {
      float weights_of[kRowTiles][4];
      named_barrier(kGiven, kConsumerThreads);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        const float4 its = exchange[j * 128];
        weights_of[j][0] = its.x;
        weights_of[j][1] = its.y;
        weights_of[j][2] = its.z;
        weights_of[j][3] = its.w;
      }
      if (!is_last) named_barrier_arrive(kTaken, kConsumerThreads);
      stats.differentiate(weights_of, scores, lane);
    }
    round_all<Element>(weights, scores);
    const Matrix b(rows_at(n % kStages, has_values), kPanelBytes);
    keep_order(acc);
    keep_order(weights);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      Wgmma<Element, kDimTiles>::values(acc, weights[step], b.descriptor(step * 16 * 128),
                                        n > 0 || step > 0);
    }
    wgmma_commit();
    if (is_last) return;
    start_scores(n + 1);
    wgmma_wait<1>();
    keep_order(acc);
    keep_order(weights);
    release(n);
    wgmma_wait<0>();
    keep_order(scores);
  };
  keep_order(acc);  // zeros are written before anything is started
  if (blocks > 0) {
    start_scores(0);
    wgmma_wait<0>();
    keep_order(scores);
#pragma unroll 1
    for (unsigned n = 0; n + 1 < blocks; ++n) turn(n, false);
    turn(blocks - 1, true);
  }
  wgmma_wait<0>();
  keep_order(acc);
  keep_order(weights);

  // Not before the others have said here what they have released.
  cluster_end();
  cluster_wait_for_others();
  const int consumer = has_values ? 0 : 1, all = consumer * 128 + static_cast<int>(thread);
  const ChunkOrder order(task.unit, task.chunk, delta, flags_at_arg, waiting_at_arg,
                         kConsumerThreads * kDimTiles);
  if (!task.is_first) order.add_earlier(acc, consumer, 0, all);
  if (!task.is_last) {
    order.leave_sums(acc, 0, all);
    named_barrier(kLeft + consumer, 128);
    if (thread == 0) order.say_done(consumer);
    return;
  }
  const int own = warp % 4 * 16 + lane / 4;  // this lane's first key
  write_key_gradients<Element>(acc, has_values ? 1.0f : static_cast<float>(scale_arg),
                               has_values ? dv + task.kv_head * dv_head_stride
                                          : dk + task.kv_head * dk_head_stride,
                               has_values ? dv_row_stride : dk_row_stride,
                               static_cast<long long>(task.k_begin) + task.first_key + own,
                               task.k_length - task.first_key - own, lane);
}
