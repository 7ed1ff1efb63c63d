// The gradients of the keys and values on Hopper, at head dims 64 and 128: wgmma, TMA, a producer and two
// consumer warpgroups, the bits of attention_backward_keys.cu. attention_backward_queries.cu, which comes
// before it and leaves `delta`, defines the result.
//
// THE SCHEDULE
//
// A thread block takes kTileKeys keys of one KV head, 64 for each consumer, and all rows that see one of
// them, kRows at a time. Products are transposed, keys by rows, so that P and dS are in registers where
// dV += P dO and dK += dS Q need them. One consumer makes P and dS while the other's products run. At head dim
// 128, its own dV runs while it makes dS; at head dim 64, where K and V stay in registers, the last block's
// dV and dK run all the while.
//
// The producer's first warp asks for boxes of Q and dO; a sequence's end is theirs, and zeros follow. The
// others find what else is needed of each row. All of them bring K and V, once.

#include "backward.cuh"
#include "copy.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (64, 128), ELEMENT (Bf16, Fp16), CHUNK_ROWS, SHARED_BYTES (what the launch
// reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
using Element = ELEMENT;

constexpr int kTileKeys = 128;
constexpr int kRows = 64;
constexpr int kStages = kHeadDim == 64 ? 6 : 3;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = 128 + kConsumerThreads;
constexpr int kPanels = kHeadDim / 64;
constexpr int kRowTiles = kRows / 8;
constexpr int kDimTiles = kHeadDim / 8;

// Shared memory, in bytes. Matrices are panels of 64 elements (128 bytes) a row.
constexpr int kKeyPanel = kTileKeys * 128;
constexpr int kRowPanel = kRows * 128;
constexpr int kKeyTile = kPanels * kKeyPanel;
constexpr int kRowTile = kPanels * kRowPanel;
constexpr int kKeyTiles = 0;                // K and V
constexpr int kRowStages = 2 * kKeyTile;    // Q and dO each
constexpr int kStats = kRowStages + kStages * 2 * kRowTile;
constexpr int kBarriers = kStats + kStages * static_cast<int>(sizeof(RowStats<kRows>));
constexpr int kTask = kBarriers + (2 * kStages + 1) * 8;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = kTask + static_cast<int>(sizeof(KeyTask)) + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kHeadDim <= 128, "registers");
static_assert(kStages % 3 == 0, "three warps share the stages");

constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr bool kKeeps = kHeadDim == 64;  // K and V, in registers

struct KeyTile {
  static constexpr int kRowBytes = 128;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kKeyPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Keys = KeyRows<kHeadDim, kTileKeys, 4, false, KeyTile>;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
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
  const unsigned kv_head = unit % kv_heads;
  const KeyTileOf<kTileKeys> tile(unit / kv_heads, cu_seqlens_k,
                                  static_cast<unsigned>(sequences_arg));
  using Seeing = SeeingRows<kRows, CHUNK_ROWS>;
  const Seeing seeing(tile, chunk, cu_seqlens_q, group, causal_arg != 0);
  if (!seeing.exists) return;
  const int k_begin = tile.begin, k_length = tile.length, first_key = tile.first_key;
  const unsigned blocks = seeing.blocks;

  KeyTask& task = *reinterpret_cast<KeyTask*>(aligned + kTask);
  if (threadIdx.x == 0) {
    task = {first_key, k_begin, k_length, kv_head, unit, chunk, seeing.is_first, seeing.is_last};
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1 + 32);
      mbarrier_init(empty(stage), kConsumerThreads / 32);
    }
    mbarrier_init(full_keys, 128);
    fence_async_proxy();
  }
  __syncthreads();

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const auto ask = [&](unsigned n) {
      const unsigned stage = n % kStages;
      const unsigned rows = base + kRowStages + stage * 2 * kRowTile;
      const int heads = static_cast<int>(kv_head * group);
      const int x = static_cast<int>(total_q_arg) - seeing.q_length +  // zeros from the end on
                    static_cast<int>((seeing.first_block + n) * (kRows / group));
      mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);
      mbarrier_arrive_expecting(full(stage), 2 * kRowTile);
      copy_box(rows, &q_map, full(stage), 0, heads, x, 0, seeing.q_end);
      copy_box(rows + kRowTile, &dout_map, full(stage), 0, heads, x, 0, seeing.q_end);
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
    keys.copy(base + kKeyTiles + kKeyTile, v + kv_head * v_head_stride,
              {0, v_row_stride, v_head_stride}, first_key, warp, lane);
    copy_async_wait_all();
    fence_async_proxy();
    mbarrier_arrive(full_keys);
    if (warp == 0) {
      if (!is_elected()) return;
#pragma unroll 1
      for (unsigned n = at_once; n < blocks; ++n) ask(n);
    } else {
      // Each has stages of its own: it has to see all of their phases.
      const unsigned first = static_cast<unsigned>(warp) - 1;
      RowFinder<kRows, Seeing> finder(seeing, k_length, first, 3, kv_head, kv_heads, group, causal_arg != 0,
                              lse, delta, lane);
      finder.find();
#pragma unroll 1
      for (unsigned n = first; n < blocks; n += 3) {
        const unsigned stage = n % kStages;
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
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);
  // Of this lane's two keys, the first one; the other is eight on.
  const auto key_of = [&]() { return first_key + (again(warp) - 4) * 16 + again(lane) / 4; };

  float scores[kRowTiles][4], products[kRowTiles][4];  // S and P; dP and dS
  float sum_v[kDimTiles][4] = {}, sum_k[kDimTiles][4] = {};
  unsigned weights[kRows / 16][4], gradients[kRows / 16][4];
  unsigned k_left[kKeeps ? kHeadDim / 16 : 1][4], v_left[kKeeps ? kHeadDim / 16 : 1][4];

  unsigned stage = 0, parity = 0;  // of the block whose products are next
  const auto rows_at = [&](unsigned stage) {
    return again(base) + kRowStages + stage * 2 * kRowTile;
  };
  const auto keys_at = [&](int tile) {
    return again(base) + tile + static_cast<unsigned>(again(warp) / 4 - 1) * 64 * 128;
  };
  const auto next_stage = [&]() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  const auto start_scores = [&]() {
    mbarrier_sleep(full(stage), parity);
    const Matrix k_matrix(keys_at(kKeyTiles), 16), q_matrix(rows_at(stage), 16);
    keep_order(scores);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int a = d / 4 * kKeyPanel + d % 4 * 32, b = d / 4 * kRowPanel + d % 4 * 32;
      if constexpr (kKeeps) {
        Wgmma<Element, kRowTiles>::row_scores(scores, k_left[d], q_matrix.descriptor(b), d > 0);
      } else {
        Wgmma<Element, kRowTiles>::scores(scores, k_matrix.descriptor(a), q_matrix.descriptor(b),
                                          d > 0);
      }
    }
    wgmma_commit();
  };
  const auto start_products = [&]() {
    const Matrix v_matrix(keys_at(kKeyTiles + kKeyTile), 16);
    const Matrix dout_matrix(rows_at(stage) + kRowTile, 16);
    keep_order(products);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int a = d / 4 * kKeyPanel + d % 4 * 32, b = d / 4 * kRowPanel + d % 4 * 32;
      if constexpr (kKeeps) {
        Wgmma<Element, kRowTiles>::row_scores(products, v_left[d], dout_matrix.descriptor(b), d > 0);
      } else {
        Wgmma<Element, kRowTiles>::scores(products, v_matrix.descriptor(a),
                                          dout_matrix.descriptor(b), d > 0);
      }
    }
    wgmma_commit();
  };
  // sum += its weights times Q or dO.
  const auto start_sum = [&](float(&sum)[kDimTiles][4], const unsigned(&its)[kRows / 16][4],
                             unsigned matrix, bool accumulate) {
    const Matrix b(matrix, kRowPanel);
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      Wgmma<Element, kDimTiles>::values(sum, its[step], b.descriptor(step * 16 * 128),
                                        accumulate || step > 0);
    }
    wgmma_commit();
  };
  const auto weigh = [&](unsigned its_stage) {
    const RowStats<kRows>& stats = *stats_of(its_stage);
    // Rows ascend, so the first one sees the fewest keys. Absent ones have no weights anyway.
    if (stats.limits[0] < first_key + again(warp) / 4 * 64) stats.hide(scores, key_of(), again(lane));
    stats.weigh(scores, scale_log2, again(lane));
  };
  const auto differentiate = [&](unsigned its_stage) {
    stats_of(its_stage)->differentiate(scores, products, again(lane));
  };
  const auto release = [&](unsigned its_stage) {
    __syncwarp();
    if (again(lane) == 0) mbarrier_arrive(empty(its_stage));
  };
  const auto end_sums = [&]() {
    wgmma_wait<0>();
    keep_order(sum_v);
    keep_order(sum_k);
    keep_order(weights);
    keep_order(gradients);
  };
  // Of a block whose S and dP are there; leaves the next block so. The compiler has to know what is done
  // unconditionally: it would have every product waited for otherwise.
  const auto turn = [&](unsigned n, bool is_last) {
    const unsigned its_stage = stage;
    weigh(its_stage);
    round_all<Element>(weights, scores);
    keep_order(sum_v);
    keep_order(weights);
    wgmma_fence();
    start_sum(sum_v, weights, rows_at(its_stage) + kRowTile, n > 0);
    differentiate(its_stage);
    wgmma_wait<0>();  // registers: gradients take the place of weights
    keep_order(sum_v);
    keep_order(weights);
    round_all<Element>(gradients, products);
    next_stage();
    if (!is_last) start_scores();
    keep_order(sum_k);
    keep_order(gradients);
    wgmma_fence();
    start_sum(sum_k, gradients, rows_at(its_stage), n > 0);
    if (is_last) return;
    start_products();
    end_sums();
    keep_order(scores);
    keep_order(products);
    release(its_stage);
  };
  // The same where registers have room for the last block's weights beside this one's: its sums run meanwhile.
  const auto turn_beside_sums = [&](unsigned n, bool is_last) {
    const unsigned its_stage = stage;
    const unsigned before = its_stage == 0 ? kStages - 1 : its_stage - 1;
    weigh(its_stage);
    differentiate(its_stage);
    end_sums();
    if (n > 0) release(before);
    round_all<Element>(weights, scores);
    round_all<Element>(gradients, products);
    next_stage();
    if (!is_last) {
      start_scores();
      start_products();
    }
    keep_order(sum_v);
    keep_order(sum_k);
    keep_order(weights);
    keep_order(gradients);
    wgmma_fence();
    start_sum(sum_v, weights, rows_at(its_stage) + kRowTile, n > 0);
    start_sum(sum_k, gradients, rows_at(its_stage), n > 0);
    if (!is_last) wgmma_wait<2>();
    keep_order(scores);
    keep_order(products);
  };
  const auto take = [&](unsigned n, bool is_last) {
    if constexpr (kKeeps) {
      turn_beside_sums(n, is_last);
    } else {
      turn(n, is_last);
    }
  };

  mbarrier_sleep(full_keys, 0);
  if constexpr (kKeeps) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const unsigned offset = KeyTile::offset((warp - 4) * 16 + lane % 16, 2 * d + lane / 16);
      load_matrices(k_left[d], base + kKeyTiles + offset);
      load_matrices(v_left[d], base + kKeyTiles + kKeyTile + offset);
    }
  }
  keep_order(sum_v);  // zeros are written before anything is started
  keep_order(sum_k);
  if (blocks > 0) {
    start_scores();
    start_products();
    wgmma_wait<0>();
    keep_order(scores);
    keep_order(products);
#pragma unroll 1
    for (unsigned n = 0; n + 1 < blocks; ++n) take(n, false);
    take(blocks - 1, true);
  }
  end_sums();

  const int consumer = warp / 4 - 1, thread = (warp - 4) * 32 + lane;
  constexpr int kSecond = kConsumerThreads * kDimTiles;
  const ChunkOrder order(task.unit, task.chunk, delta, flags_at_arg, waiting_at_arg, 2 * kSecond);
  if (!task.is_first) {
    order.add_earlier(sum_v, consumer, 0, thread);
    order.add_earlier(sum_k, consumer, kSecond, thread);
  }
  if (!task.is_last) {
    order.leave_sums(sum_v, 0, thread);
    order.leave_sums(sum_k, kSecond, thread);
    named_barrier(1 + consumer, 128);
    if (thread % 128 == 0) order.say_done(consumer);
    return;
  }
  const int own = (warp - 4) * 16 + lane / 4;  // this lane's first key
  const int left = task.k_length - task.first_key - own;
  const long long first_row = static_cast<long long>(task.k_begin) + task.first_key + own;
  write_key_gradients<Element>(sum_v, 1.0f, dv + task.kv_head * dv_head_stride, dv_row_stride,
                               first_row, left, lane);
  write_key_gradients<Element>(sum_k, static_cast<float>(scale_arg),
                               dk + task.kv_head * dk_head_stride, dk_row_stride, first_row, left,
                               lane);
}
