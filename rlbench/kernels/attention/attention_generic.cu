// Attention forward for every GPU from sm_80: mma.sync, ldmatrix, cp.async.
//
// THE RESULT, BY DEFINITION
//
// A row is one query position i of one sequence under one query head. With Lq queries and Lk keys
// it sees the keys 0 <= j < limit, where limit = i + Lk - Lq + 1 under the causal mask (aligned at
// the bottom right; never below 0) and limit = Lk without it. c = fl32(softmax_scale * log2(e)),
// rounded once. Keys are cut into blocks of kBlockKeys at the absolute positions 0, kBlockKeys, ...
// The block width follows from the head dim alone:
//
//     head dim    64   128   256
//     kBlockKeys 128   128    80
//
// A split is 18 blocks, 2304 keys; at head dim 256 it is 28 blocks, 2240 keys.
// Within a split, blocks are taken in ascending order. From m = -inf, l[0..3] = 0, O = 0, each does
//
//   1. S[j] = sum over d of Q[d] K[j][d] in fp32, as a chain of k16 tensor core steps, d ascending,
//      starting from +0. Keys at or past limit get S[j] = -inf.
//   2. b = max over j of S[j];   m' = b if fl(fl(b - m) c) > 8, else m
//      m* = m' if m' > -inf, else 0
//   3. a = ex2(fl((fl(m - m*)) c));   P[j] = ex2(fma(S[j], c, -fl(m* c))), with ex2.approx.ftz
//   4. For each quad lane q in 0..3, which owns the keys 8 t + 2 q and 8 t + 2 q + 1 of the block:
//      l[q] = fl(l[q] a), then for t ascending
//      l[q] = fl(l[q] + fl(P[8 t + 2 q] + P[8 t + 2 q + 1]))
//   5. O[d] = fl(O[d] a), then a chain of k16 tensor core steps over the block's keys, j ascending,
//      adding round16(P[j]) V[j][d], where round16 rounds to nearest even in the tensors' dtype.
//   6. m = m'
//
// The first split's m, l, O are the row's. Those of every further split that has a key the row sees
// are merged into them, in ascending order. With m, l, O of the row and n, k, P of the split
//
//   m' = max(m, n);   m* = m' if m' > -inf else 0
//   a = ex2(fl((fl(m - m*)) c));   b = ex2(fl((fl(n - m*)) c))
//   l[q] = fma(k[q], b, fl(l[q] a));   O[d] = fma(P[d], b, fl(O[d] a));   m = m'
//
// and at the end L = fl(fl(l[0] + l[1]) + fl(l[2] + l[3])),
//   out[d] = round16(fma(O[d], r, +0)) with r = 1 / L correctly rounded, or r = 0 if L = 0,
//   lse    = fma(m, softmax_scale, fl(lg2.approx(L) ln 2)), or -inf if L = 0.
//
// Nothing else enters: not the batch, the grid, the lengths of other sequences, the number of SMs,
// the tile a row was put in, or where its keys lie in memory. What one k16 step does inside is the
// tensor core's: it is the same for every row, column and tile, but sm_80 and sm_90 differ in it,
// so the bits are equal on equal architectures and not across them.
//
// A KEY THAT IS NOT SEEN CONTRIBUTES AN EXACT NOTHING
//
// It has S = -inf whatever K held, hence P = ex2(-inf) = +0 and cannot raise m. +0 is added to l,
// which is never -0. In step 5 it is a product of zero, and a zero product leaves a nonzero
// accumulator alone (the tensor core aligns all terms to the largest one, and zero is never that;
// the GPU tests check it with V up to the largest finite number). An accumulator of -0, which only
// the scaling by a can make, may become +0. That is why the end computes fma(O, r, +0): it gives +0
// for both, and a zero's sign has no way to reach a nonzero number before that. Products of zero
// need V to be finite. So:
//   - K and V past the last key that the tile sees are filled with zeros in shared memory and never
//     read from global memory: stale NaNs in unused page slots, and table entries beyond the end,
//     do not exist for this kernel.
//   - V must be finite wherever a key belongs to the sequence and some row of the tile sees it. A
//     NaN or infinity there reaches the rows that see it, as it should, and may reach earlier rows.
// Hence a block that a row does not see at all is a no-op for it: m' = m, a = ex2(0 c) = 1 (or,
// while m is still -inf, a = 0 on sums that are +0), all P = +0. So blocks past a tile's or a
// warp's last seen key are skipped, and a row's bits do not depend on the rows beside it. The same
// holds for a split: merging n = -inf, k = +0, P = +0 multiplies by a = 1 and adds +0.
//
// THE SCHEDULE, WHICH IS FREE
//
// The rows of one sequence and one KV head are packed as (position, head in group) pairs, positions
// outermost; a thread block takes kTileRows of them, a warp 16. Decode is the same code with one
// position: the heads of a group share the loads of K and V. There is one buffer for K and one for
// V: V is loaded under Q K^T, and the next K under P V. Between splits the merged part of a row
// waits in global memory: registers hold one O.

#include "copy.cuh"
#include "definition.cuh"
#include "keys.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "softmax.cuh"
#include "tile_rows.cuh"
#include "waiting.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), TILE_ROWS (a
// multiple of 16), SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr int kTileRows = TILE_ROWS;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

constexpr int kWarps = kTileRows / kWarpRows;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kDimTiles = kHeadDim / 8;

static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "HEAD_DIM");
static_assert(SHARED_BYTES == (kTileRows + 2 * kBlockKeys) * kRowBytes, "SHARED_BYTES");
static_assert(kTileRows % kWarpRows == 0 && kBlockKeys % 16 == 0, "fragments are 16 rows");

struct Tile {
  static constexpr int kRowBytes = kHeadDim * 2;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return swizzled_offset<kRowBytes>(row, chunk);
  }
};
using Keys = KeyRows<kHeadDim, kBlockKeys, kWarps, kPaged, Tile>;

// work: [grid, kThreads, kDimTiles + 1, 4], see waiting.cuh.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long /* sequences */, long long tiles_arg,
                long long causal_arg, double scale_arg, double scale_log2_arg) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const unsigned q_tile = shared_address(shared_memory);
  const unsigned k_tile = q_tile + kTileRows * kRowBytes;
  const unsigned v_tile = k_tile + kBlockKeys * kRowBytes;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);

  // Which tile. Late tiles see the most keys under the causal mask, so they start first.
  const unsigned tiles = static_cast<unsigned>(tiles_arg);
  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const unsigned tile = tiles - 1 - blockIdx.x % tiles;
  const TileRows<kTileRows, kPaged> rows(tile, blockIdx.x / tiles % kv_heads,
                                         blockIdx.x / tiles / kv_heads, kv_heads,
                                         static_cast<unsigned>(group_arg), cu_seqlens_q, lengths_k,
                                         causal_arg != 0);
  if (rows.count == 0) return;
  const int warp_row = warp * kWarpRows;
  const bool warp_has_rows = warp_row < rows.count;
  const int tile_limit = rows.limit(kTileRows - 1);
  const int warp_limit_min = rows.limit(warp_row);
  const int warp_limit_max = rows.limit(warp_row + kWarpRows - 1);
  const int blocks = tile_limit > 0 ? (tile_limit + kBlockKeys - 1) / kBlockKeys : 0;

  const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
  const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
  const unsigned short* k_head = k + rows.kv_head * k_strides.head;
  const unsigned short* v_head = v + rows.kv_head * v_strides.head;
  Keys keys;
  keys.table = kPaged ? block_table + rows.sequence * table_stride : nullptr;
  keys.page_size = static_cast<unsigned>(page_size_arg);
  keys.first_row = rows.k_begin;
  keys.end = tile_limit;

  if (blocks > 0) {
    rows.copy_q<kHeadDim, Tile>(q_tile, q, q_row_stride, q_head_stride, warp_row, lane);
    keys.find(0, warp, lane);
    keys.copy(k_tile, k_head, k_strides, 0, warp, lane);
  }

  const float scale_log2 = static_cast<float>(scale_log2_arg);
  SoftmaxRows softmax;
  float acc[kDimTiles][4] = {};

  // ldmatrix rows. Q (A) and V (transposed B): matrices 0, 1 are rows 0-7, 8-15 of the first chunk,
  // matrices 2, 3 the same of the next. K (B): matrices 0, 1 are the two chunks of keys 0-7.
  const int a_row = lane % 16;
  const int a_chunk = lane / 16;
  const int b_row = lane % 8 + lane / 16 * 8;
  const int b_chunk = lane / 8 % 2;

  for (int block = 0; block < blocks; ++block) {
    const int first_key = block * kBlockKeys;
    const bool warp_sees = warp_has_rows && first_key < warp_limit_max;

    // This block's K (and Q) have landed, and every warp is done with the last block's V. Keys are
    // looked up twice, so that no register has to remember them.
    keys.find(first_key, warp, lane);
    copy_async_wait_all();
    __syncthreads();
    keys.copy(v_tile, v_head, v_strides, first_key, warp, lane);

    float scores[kKeyTiles][4] = {};
    if (warp_sees) {
#pragma unroll 4  // the swizzle's period; more of it spills at head dim 256
      for (int d = 0; d < kHeadDim / 16; ++d) {
        unsigned a[4];
        load_matrices(a, q_tile + swizzled_offset<kRowBytes>(warp_row + a_row, 2 * d + a_chunk));
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
          unsigned b[4];
          load_matrices(b, k_tile + swizzled_offset<kRowBytes>(8 * j + b_row, 2 * d + b_chunk));
          mma_m16n8k16<Element>(scores[j], a, b[0], b[1]);
          mma_m16n8k16<Element>(scores[j + 1], a, b[2], b[3]);
        }
      }
    }

    // V has landed, and every warp is done with K.
    if (block + 1 < blocks) keys.find(first_key + kBlockKeys, warp, lane);
    copy_async_wait_all();
    __syncthreads();
    if (block + 1 < blocks) {
      keys.copy(k_tile, k_head, k_strides, first_key + kBlockKeys, warp, lane);
    }

    if (warp_sees) {
      if (first_key + kBlockKeys > warp_limit_min) {
        // The limits are computed here and not once above: two registers that the other blocks do
        // without.
        rows.hide(scores, first_key, warp_row, lane);
      }
      float rescale[2];
      if (softmax.block(scores, scale_log2, rescale)) rescale_all(acc, rescale);
#pragma unroll
      for (int j = 0; j < kKeyTiles; j += 2) {
        // The accumulator layout of two score tiles is the A layout of one k16 step.
        const unsigned a[4] = {Element::pack(scores[j][0], scores[j][1]),
                               Element::pack(scores[j][2], scores[j][3]),
                               Element::pack(scores[j + 1][0], scores[j + 1][1]),
                               Element::pack(scores[j + 1][2], scores[j + 1][3])};
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
          unsigned b[4];
          load_matrices_transposed(
              b, v_tile + swizzled_offset<kRowBytes>(8 * j + a_row, n + a_chunk));
          mma_m16n8k16<Element>(acc[n], a, b[0], b[1]);
          mma_m16n8k16<Element>(acc[n + 1], a, b[2], b[3]);
        }
      }
    }

    const bool split_ends = (block + 1) % kSplitBlocks == 0;
    if ((split_ends && block + 1 < blocks) || (block + 1 == blocks && block >= kSplitBlocks)) {
      if (work == nullptr) break;
      merge_split<kThreads>(work, threadIdx.x, softmax, acc, scale_log2, block < kSplitBlocks,
                            block + 1 == blocks);
    }
  }

  copy_async_wait_all();  // a row that has no result leaves the loop with copies on their way
  if (!warp_has_rows) return;
  // Without room to wait in, a row with more keys than a split has no result, and says so.
  const bool impossible = work == nullptr && blocks > kSplitBlocks;

  rows.write<Element>(softmax, acc, out, out_row_stride, out_head_stride, lse, scale_arg,
                      impossible, warp_row, lane);
}
