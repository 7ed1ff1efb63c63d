// The gradients of the keys and values on Hopper: wgmma, TMA, a producer and two consumer warpgroups, the
// bits of attention_backward_keys.cu. attention_backward_queries.cu, which comes before it and leaves
// `delta`, defines the result.
//
// THE SCHEDULE
//
// A thread block takes kTileKeys keys of one KV head and all rows that see one of them, kRows at a time.
// Products are transposed, keys by rows. Each consumer has two of the four, and one sum in registers:
//
//     consumer 0:  S = K Q^T,    P = weights of S,    dV += P dO
//     consumer 1:  dP = V dO^T,  dS = P (dP - delta), dK += dS Q
//
// P goes from the one to the other through shared memory, each thread's to the thread that needs it: their
// accumulators are in the same lanes. Each starts the next block's first product before the last
// block's second one, which runs while the former's results are made into weights.
//
// The producer's first warp asks for boxes of Q and dO; a sequence's end is theirs, and zeros follow. Its
// second warp finds what else is needed of each row. All of them bring K and V, once.

#include "backward.cuh"
#include "copy.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), SHARED_BYTES (what the launch
// reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
using Element = ELEMENT;

constexpr int kTileKeys = 64;
constexpr int kRows = 64;
constexpr int kStages = 2;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = 128 + kConsumerThreads;
constexpr int kPanels = kHeadDim / 64;
constexpr int kRowTiles = kRows / 8;
constexpr int kDimTiles = kHeadDim / 8;

struct RowStat {
  float scaled, delta;
  int limit;
  int unused;
};

// Shared memory, in bytes. Matrices are panels of 64 elements (128 bytes) a row.
constexpr int kPanelBytes = kRows * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kKeyTiles = 0;                       // K and V
constexpr int kRowStages = 2 * kTileBytes;         // Q and dO each
constexpr int kExchange = kRowStages + kStages * 2 * kTileBytes;  // P
constexpr int kStats = kExchange + 128 * kRowTiles * 16;
constexpr int kBarriers = kStats + kStages * kRows * static_cast<int>(sizeof(RowStat));
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = kBarriers + (2 * kStages + 1) * 8 + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kTileKeys == kRows, "tiles of both have one layout");

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kGiven = 1, kTaken = 2;  // named barriers, of P
// K or V is kept in registers where there is room: products then read half as much of shared memory.
constexpr bool kKeeps = kHeadDim <= 128;

struct KeyTile {
  static constexpr int kRowBytes = 128;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kPanelBytes) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Keys = KeyRows<kHeadDim, kTileKeys, 4, false, KeyTile>;
using Rows = TileRows<kRows, false>;

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
    return reinterpret_cast<RowStat*>(aligned + kStats) + stage * kRows;
  };

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const unsigned group = static_cast<unsigned>(group_arg);
  const unsigned kv_head = blockIdx.x % kv_heads;
  const KeyTileOf<kTileKeys> tile(blockIdx.x / kv_heads, cu_seqlens_k,
                                  static_cast<unsigned>(sequences_arg));
  if (!tile.exists) return;
  const unsigned sequence = tile.sequence;
  const int k_begin = tile.begin, k_length = tile.length, first_key = tile.first_key;
  const int q_begin = cu_seqlens_q[sequence];
  const int q_length = cu_seqlens_q[sequence + 1] - q_begin;

  // The first position that sees the tile's first key, and the blocks of rows from there on.
  const int before = first_key - (k_length - q_length);
  const int first_position = causal_arg != 0 && before > 0 ? before : 0;
  const long long all_rows = static_cast<long long>(q_length) * group;
  const unsigned first_block =
      static_cast<unsigned>(static_cast<long long>(first_position) * group / kRows);
  const unsigned all_blocks = static_cast<unsigned>((all_rows + kRows - 1) / kRows);
  const unsigned blocks = all_blocks > first_block ? all_blocks - first_block : 0;

  if (threadIdx.x == 0) {
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
    const Strides k_strides = {0, k_row_stride, k_head_stride};
    const Strides v_strides = {0, v_row_stride, v_head_stride};
    Keys keys;
    keys.table = nullptr;
    keys.page_size = 0;
    keys.first_row = k_begin;
    keys.end = k_length;
    keys.copy(base + kKeyTiles, k + kv_head * k_head_stride, k_strides, first_key, warp, lane);
    keys.copy(base + kKeyTiles + kTileBytes, v + kv_head * v_head_stride, v_strides, first_key, warp,
              lane);
    copy_async_wait_all();
    fence_async_proxy();
    mbarrier_arrive(full_keys);
    if (warp == 0) {
      if (!is_elected()) return;
      prefetch_tensor_map(&q_map);
      prefetch_tensor_map(&dout_map);
      const int positions = kRows / static_cast<int>(group);
      const int first_x = static_cast<int>(total_q_arg) - q_length;  // zeros from the end on
#pragma unroll 1
      for (unsigned n = 0; n < blocks; ++n) {
        const unsigned stage = n % kStages;
        const unsigned rows = base + kRowStages + stage * 2 * kTileBytes;
        const int x = first_x + static_cast<int>(first_block + n) * positions;
        const int heads = static_cast<int>(kv_head * group);
        mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);
        mbarrier_arrive_expecting(full(stage), 2 * kTileBytes);
        copy_box(rows, &q_map, full(stage), 0, heads, x, 0, q_begin + q_length);
        copy_box(rows + kTileBytes, &dout_map, full(stage), 0, heads, x, 0, q_begin + q_length);
      }
    } else if (warp == 1) {
#pragma unroll 1
      for (unsigned n = 0; n < blocks; ++n) {
        const unsigned stage = n % kStages;
        const Rows rows(first_block + n, kv_head, sequence, kv_heads, group, cu_seqlens_q,
                        cu_seqlens_k, causal_arg != 0);
        mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);
#pragma unroll
        for (int row = lane; row < kRows; row += 32) {
          const bool present = row < rows.count;
          const long long stat = present ? rows.offset(row, rows.heads(), 1) : 0;
          stats_of(stage)[row] = {present ? scaled_lse(lse[stat]) : kInfinity,
                                  present ? delta[stat] : 0.0f, present ? rows.limit(row) : 0, 0};
        }
        mbarrier_arrive(full(stage));
      }
    }
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const bool has_values = warp < 8;  // dV, else dK
  const unsigned thread = threadIdx.x % 128;
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);
  const int key = first_key + warp % 4 * 16 + lane / 4;  // this lane's, and eight on

  float scores[kRowTiles][4];
  float acc[kDimTiles][4] = {};
  unsigned weights[kRows / 16][4];
  float4* const exchange = reinterpret_cast<float4*>(aligned + kExchange) + thread;

  const unsigned own_keys = base + kKeyTiles + (has_values ? 0 : kTileBytes);
  unsigned left[kKeeps ? kHeadDim / 16 : 1][4];
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
      if constexpr (kKeeps) {
        Wgmma<Element, kRowTiles>::row_scores(scores, left[d], b.descriptor(offset), d > 0);
      } else {
        Wgmma<Element, kRowTiles>::scores(scores, a.descriptor(offset), b.descriptor(offset), d > 0);
      }
    }
    wgmma_commit();
  };
  const auto release = [&](unsigned n) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty(n % kStages));
  };

  mbarrier_sleep(full_keys, 0);
  if constexpr (kKeeps) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int row = warp % 4 * 16 + lane % 16;
      load_matrices(left[d], own_keys + KeyTile::offset(row, 2 * d + lane / 16));
    }
  }
  // The compiler has to know what is done unconditionally: it would have every product waited for otherwise.
  const auto turn = [&](unsigned n, bool is_last) {
    const RowStat* const stats = stats_of(n % kStages) + lane % 4 * 2;
    if (has_values) {
      // Rows ascend, so the first one sees the fewest keys. Absent ones have no weights anyway.
      if (stats_of(n % kStages)[0].limit < first_key + kTileKeys) {
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (key + e / 2 * 8 >= stats[8 * j + e % 2].limit) scores[j][e] = -kInfinity;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[j][e] = weight_of(scores[j][e], scale_log2, stats[8 * j + e % 2].scaled);
        }
      }
      // The last one has been taken: later ones before a stage could be free for these scores.
      if (n > 0 && n < kStages) named_barrier(kTaken, kConsumerThreads);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        exchange[j * 128] = make_float4(scores[j][0], scores[j][1], scores[j][2], scores[j][3]);
      }
      named_barrier_arrive(kGiven, kConsumerThreads);
    } else {
      named_barrier(kGiven, kConsumerThreads);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        const float4 its = exchange[j * 128];
        const float4 weight = its;
        scores[j][0] = score_gradient(weight.x, scores[j][0], stats[8 * j].delta);
        scores[j][1] = score_gradient(weight.y, scores[j][1], stats[8 * j + 1].delta);
        scores[j][2] = score_gradient(weight.z, scores[j][2], stats[8 * j].delta);
        scores[j][3] = score_gradient(weight.w, scores[j][3], stats[8 * j + 1].delta);
      }
      if (n + 1 < kStages && n + 1 < blocks) named_barrier_arrive(kTaken, kConsumerThreads);
    }
    wgmma_wait<0>();
    keep_order(acc);
    keep_order(weights);
    if (n > 0) release(n - 1);
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&from)[4] = scores[2 * step + half];
        weights[step][2 * half] = Element::pack(from[0], from[1]);
        weights[step][2 * half + 1] = Element::pack(from[2], from[3]);
      }
    }
    if (!is_last) start_scores(n + 1);
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
    if (!is_last) {
      wgmma_wait<1>();
      keep_order(scores);
    }
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

  const float scale = has_values ? 1.0f : static_cast<float>(scale_arg);
  unsigned short* const gradient =
      has_values ? dv + kv_head * dv_head_stride : dk + kv_head * dk_head_stride;
  const long long row_stride = has_values ? dv_row_stride : dk_row_stride;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (key + 8 * r >= k_length) continue;
    unsigned* target = reinterpret_cast<unsigned*>(
        gradient + (static_cast<long long>(k_begin) + key + 8 * r) * row_stride + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      target[4 * n] = Element::pack(finished(acc[n][2 * r], scale),
                                    finished(acc[n][2 * r + 1], scale));
    }
  }
}
