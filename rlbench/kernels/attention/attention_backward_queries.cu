// The gradient of the queries, for every GPU from sm_80, and what the keys' needs of each row.
//
// THE RESULT, BY DEFINITION, of this kernel and of attention_backward_keys.cu
//
// Rows, keys, limits and c are attention_generic.cu's; lse is what it returns. Rows of a sequence under
// one KV head are numbered r = position * group + head in the group. With round16 to nearest even in the
// tensors' dtype:
//
//   S[r][j]  = sum over d of Q[r][d] K[j][d], as a chain of k16 tensor core steps, d ascending, from +0
//   P[r][j]  = ex2(fma(S, c, -fl(lse[r] log2(e)))), with ex2.approx.ftz; 0 where j is not below r's
//              limit, and in rows that see no key
//   dP[r][j] = sum over d of dO[r][d] V[j][d], in the same way
//   delta[r] = (e0 + e1) + (e2 + e3); e_q = the sum over t of dO[d] O[d] with d = 8 t + 2 q, and then
//              8 t + 2 q + 1, as a chain of fma, t ascending, from +0
//   dS[r][j] = fl(P fl(dP - delta[r]))
//
//   dQ[r][d] = round16(fma(sum over j of round16(dS[r][j]) K[j][d], softmax_scale, +0))
//   dK[j][d] = round16(fma(sum over r of round16(dS[r][j]) Q[r][d], softmax_scale, +0))
//   dV[j][d] = round16(fma(sum over r of round16(P[r][j]) dO[r][d], 1, +0))
//
// where the sums over j are chains of k16 steps over the keys 16 n to 16 n + 15, n ascending, and the
// sums over r over the rows 16 n to 16 n + 15, n ascending, so that the query heads of a group are added
// position by position, in their order. The latter are broken into chunks of 16384 rows, 16384 m to
// 16384 m + 16383: each has a chain of its own from +0, and the chains' results are added up, m ascending.
//
// Nothing else enters. What a row does not see contributes an exact nothing, as attention_generic.cu
// says, if dO, Q, K and V are finite wherever they belong to the sequence: so tiles may begin and end
// where somebody sees something.
//
// THE SCHEDULE, WHICH IS FREE
//
// A thread block takes kTileRows rows, a warp 16, and all keys that they see, some at a time: one buffer
// each for Q, dO, K and V.

#include "backward.cuh"
#include "copy.cuh"
#include "keys.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "tile_rows.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), TILE_ROWS (a multiple of 16),
// SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kTileRows = TILE_ROWS;
using Element = ELEMENT;

constexpr int kKeys = kHeadDim == 256 ? 32 : 64;  // at a time: registers
constexpr int kWarps = kTileRows / kWarpRows;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kKeyTiles = kKeys / 8;
constexpr int kDimTiles = kHeadDim / 8;

static_assert(SHARED_BYTES == 2 * (kTileRows + kKeys) * kRowBytes, "SHARED_BYTES");

struct Tile {
  static constexpr int kRowBytes = kHeadDim * 2;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return swizzled_offset<kRowBytes>(row, chunk);
  }
};
using Keys = KeyRows<kHeadDim, kKeys, kWarps, false, Tile>;
using Rows = TileRows<kTileRows, false>;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_BACKWARD_PARAMETERS, long long tiles_arg) {
  reset_flags<kThreads>(delta, flags_at_arg, units_arg, chunks_arg);
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const unsigned q_tile = shared_address(shared_memory);
  const unsigned dout_tile = q_tile + kTileRows * kRowBytes;
  const unsigned k_tile = dout_tile + kTileRows * kRowBytes;
  const unsigned v_tile = k_tile + kKeys * kRowBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int warp_row = warp * kWarpRows;

  // Late tiles see the most keys under the causal mask, so they start first.
  const unsigned tiles = static_cast<unsigned>(tiles_arg);
  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const Rows rows(tiles - 1 - blockIdx.x % tiles, blockIdx.x / tiles % kv_heads,
                  blockIdx.x / tiles / kv_heads, kv_heads, static_cast<unsigned>(group_arg),
                  cu_seqlens_q, cu_seqlens_k, causal_arg != 0);
  if (rows.count == 0) return;
  const int tile_limit = rows.limit(kTileRows - 1);
  const int warp_limit = warp_row < rows.count ? rows.limit(warp_row + kWarpRows - 1) : 0;
  const int blocks = tile_limit > 0 ? (tile_limit + kKeys - 1) / kKeys : 0;

  rows.copy_q<kHeadDim, Tile>(q_tile, q, q_row_stride, q_head_stride, warp_row, lane);
  rows.copy_q<kHeadDim, Tile>(dout_tile, dout, dout_row_stride, dout_head_stride, warp_row, lane);

  // This lane's rows, g and g + 8, and columns.
  float scaled[2], own_delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + lane / 4 + 8 * r;
    const bool present = row < rows.count;
    const long long stat = present ? rows.offset(row, rows.heads(), 1) : 0;
    const unsigned short* its_out =
        out + (present ? rows.offset(row, out_row_stride, out_head_stride) : 0);
    const unsigned short* its_dout =
        dout + (present ? rows.offset(row, dout_row_stride, dout_head_stride) : 0);
    own_delta[r] = delta_of<kHeadDim, Element>(its_out, its_dout, present, lane);
    scaled[r] = present ? scaled_lse(lse[stat]) : kInfinity;
    if (present && lane % 4 == 0) delta[stat] = own_delta[r];
  }

  const Strides k_strides = {0, k_row_stride, k_head_stride};
  const Strides v_strides = {0, v_row_stride, v_head_stride};
  const Keys keys = Keys::packed(rows.k_begin, tile_limit);
  const unsigned short* k_head = k + rows.kv_head * k_head_stride;
  const unsigned short* v_head = v + rows.kv_head * v_head_stride;

  const float scale_log2 = static_cast<float>(scale_log2_arg);
  float acc[kDimTiles][4] = {};
  for (int block = 0; block < blocks; ++block) {
    const int first_key = block * kKeys;
    if (block > 0) __syncthreads();  // everybody is done with the last one
    keys.copy(k_tile, k_head, k_strides, first_key, warp, lane);
    keys.copy(v_tile, v_head, v_strides, first_key, warp, lane);
    copy_async_wait_all();
    __syncthreads();
    if (first_key >= warp_limit) continue;

    float scores[kKeyTiles][4] = {}, gradients[kKeyTiles][4] = {};
    multiply_rows<kHeadDim, Element, Tile>(scores, q_tile, k_tile, warp_row, lane);
    multiply_rows<kHeadDim, Element, Tile>(gradients, dout_tile, v_tile, warp_row, lane);
    rows.hide(scores, first_key, warp_row, lane);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = weight_of(scores[j][e], scale_log2, scaled[e / 2]);
        scores[j][e] = score_gradient(weight, gradients[j][e], own_delta[e / 2]);
      }
    }
    unsigned rounded[kKeyTiles / 2][4];
    round_all<Element>(rounded, scores);
    add_products<kHeadDim, Element, Tile>(acc, rounded, k_tile, lane);
  }

  copy_async_wait_all();  // Q's, where there are no keys
  const float scale = static_cast<float>(scale_arg);
  rows.write_times<Element>({scale, scale}, acc, dq, dq_row_stride, dq_head_stride, warp_row,
                            lane);
}
