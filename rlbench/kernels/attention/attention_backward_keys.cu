// The gradients of the keys and values, for every GPU from sm_80. attention_backward_queries.cu, which
// comes before it and leaves `delta`, defines the result.
//
// THE SCHEDULE
//
// A thread block takes kTileKeys keys of one KV head and all rows that see one of them, some at a time:
// one buffer each for Q, dO, K and V. Products are transposed, keys by rows, which is the same chains.
// 16 keys are two warps': one has dV, the other dK, because registers hold one of them. Both find the
// weights.

#include "backward.cuh"
#include "copy.cuh"
#include "keys.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "tile_rows.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), TILE_KEYS (a multiple of 16),
// CHUNK_ROWS, SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kTileKeys = TILE_KEYS;
using Element = ELEMENT;

constexpr int kRows = kHeadDim == 256 ? 32 : 64;  // at a time: registers
constexpr int kParts = kTileKeys / 16;
constexpr int kWarps = 2 * kParts;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kRowTiles = kRows / 8;
constexpr int kDimTiles = kHeadDim / 8;
constexpr int kStats = 2 * (kTileKeys + kRows) * kRowBytes;  // where they are in shared memory

static_assert(SHARED_BYTES == kStats + static_cast<int>(sizeof(RowStats<kRows>)), "SHARED_BYTES");

struct Tile {
  static constexpr int kRowBytes = kHeadDim * 2;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return swizzled_offset<kRowBytes>(row, chunk);
  }
};
using Keys = KeyRows<kHeadDim, kTileKeys, kWarps, false, Tile>;
using Rows = TileRows<kRows, false>;

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL_NAME(RLBENCH_BACKWARD_PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const unsigned q_tile = shared_address(shared_memory);
  const unsigned dout_tile = q_tile + kRows * kRowBytes;
  const unsigned k_tile = dout_tile + kRows * kRowBytes;
  const unsigned v_tile = k_tile + kTileKeys * kRowBytes;
  RowStats<kRows>& stats = *reinterpret_cast<RowStats<kRows>*>(shared_memory + kStats);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const unsigned group = static_cast<unsigned>(group_arg);
  const unsigned units = static_cast<unsigned>(units_arg);
  const unsigned unit = blockIdx.x % units;
  const unsigned kv_head = unit % kv_heads;
  const KeyTileOf<kTileKeys> tile(unit / kv_heads, cu_seqlens_k,
                                  static_cast<unsigned>(sequences_arg));
  const SeeingRows<kRows, CHUNK_ROWS> seeing(tile, blockIdx.x / units, cu_seqlens_q, group,
                                             causal_arg != 0);
  if (!seeing.exists) return;
  const int k_begin = tile.begin, k_length = tile.length, first_key = tile.first_key;

  const Strides k_strides = {0, k_row_stride, k_head_stride};
  const Strides v_strides = {0, v_row_stride, v_head_stride};
  const Keys keys = Keys::packed(k_begin, k_length);
  keys.copy(k_tile, k + kv_head * k_head_stride, k_strides, first_key, warp, lane);
  keys.copy(v_tile, v + kv_head * v_head_stride, v_strides, first_key, warp, lane);

  const int part = warp % kParts * 16;  // this warp's first key in the tile
  const bool has_values = again(warp) < kParts;  // again: registers
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  float acc[kDimTiles][4] = {};

  for (unsigned n = 0; n < seeing.blocks; ++n) {
    const Rows rows(seeing.first_block + n, kv_head, tile.sequence, kv_heads, group, cu_seqlens_q,
                    cu_seqlens_k, causal_arg != 0);
    __syncthreads();  // everybody is done with the last ones
    for (int row = warp * kWarpRows; row < kRows; row += kWarps * kWarpRows) {
      rows.copy_q<kHeadDim, Tile>(q_tile, q, q_row_stride, q_head_stride, row, lane);
      rows.copy_q<kHeadDim, Tile>(dout_tile, dout, dout_row_stride, dout_head_stride, row, lane);
    }
    stats.find<kThreads>(rows, lse, delta, static_cast<int>(threadIdx.x));
    copy_async_wait_all();
    __syncthreads();

    // [keys g, g + 8][rows 2c, 2c + 1] of each tile of rows.
    float weights[kRowTiles][4] = {};
    multiply_rows<kHeadDim, Element, Tile>(weights, k_tile, q_tile, part, lane);
    stats.hide(weights, first_key + part + again(lane) / 4, lane);
    stats.weigh(weights, scale_log2, lane);
    if (!has_values) {
      float gradients[kRowTiles][4] = {};
      multiply_rows<kHeadDim, Element, Tile>(gradients, v_tile, dout_tile, part, lane);
      stats.differentiate(weights, gradients, lane);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[j][e] = gradients[j][e];
      }
    }
    unsigned rounded[kRowTiles / 2][4];
    round_all<Element>(rounded, weights);
    const unsigned other = has_values ? dout_tile : q_tile;
    add_products<kHeadDim, Element, Tile>(acc, rounded, other, lane);
  }

  copy_async_wait_all();  // of keys that nobody sees
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned block = again(blockIdx.x);
  const ChunkOrder order(block % units, block / units, delta, flags_at_arg, waiting_at_arg,
                         kThreads * kDimTiles);
  if (!seeing.is_first) order.add_earlier(acc, 0, 0, thread);
  if (!seeing.is_last) {
    order.leave_sums(acc, 0, thread);
    __syncthreads();
    if (thread == 0) order.say_done(0);
    return;
  }
  const int own = first_key + part + lane / 4;  // this lane's first key
  write_key_gradients<Element>(acc, has_values ? 1.0f : static_cast<float>(scale_arg),
                               has_values ? dv + order.unit % kv_heads * dv_head_stride
                                          : dk + order.unit % kv_heads * dk_head_stride,
                               has_values ? dv_row_stride : dk_row_stride,
                               static_cast<long long>(k_begin) + own, k_length - own, lane);
}
