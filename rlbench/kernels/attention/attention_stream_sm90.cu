// Attention for one query a sequence, from sm_90: a thread block streams the keys of one sequence
// and KV head, or of one split of them, with the bits of attention_generic.cu, whose head defines
// the result.
//
// Keys are the rows of the tensor core's tile and the heads of a KV group its 8 columns, which is S
// transposed: the same products in the same order. Within a block of keys the warps share what no
// sum needs whole: first the keys, 16 a warp, for the scores; then the columns of the output, 16 or
// 32 a warp, for P V. In between, the largest scores and the rounded weights go through shared
// memory. Copies run ahead: a tile of K or V is asked for as soon as the one kStages blocks before it
// has been used up.
//
// With `work`, a thread block has one split, whose part attention_combine.cu merges with the others;
// without, it has the whole sequence and merges at the end of each split in its registers.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "keys.cuh"
#include "merge.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "row_end.cuh"
#include "softmax.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), SHARED_BYTES
// (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr int kSplitKeys = kSplitBlocks * kBlockKeys;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = kHeadDim == 256 ? 2 : 3;
constexpr int kKeyTiles = kBlockKeys / 16;
constexpr int kColumnTiles = kHeadDim / 16;
constexpr int kWarpColumnTiles = (kColumnTiles + kWarps - 1) / kWarps;
constexpr int kSummingWarp = kWarps - 1;

// Shared memory, in bytes from its beginning.
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kTileBytes = kBlockKeys * kRowBytes;         // of K or V; a stage has both
constexpr int kWeights = kStages * 2 * kTileBytes;         // [key][head]
constexpr int kPairSums = kWeights + kBlockKeys * kHeads * 2;    // [pair of keys][head], float
constexpr int kTileMax = kPairSums + kBlockKeys / 2 * kHeads * 4;  // [tile of keys][head], float
constexpr int kInverse = kTileMax + kKeyTiles * kHeads * 4;      // [head], float
constexpr int kSharedBytes = kInverse + kHeads * 4;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kKeyTiles <= kWarps, "a warp has at most one tile of keys");

struct Tile {
  static constexpr int kRowBytes = ::kRowBytes;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return swizzled_offset<kRowBytes>(row, chunk);
  }
};
using Keys = KeyRows<kHeadDim, kBlockKeys, kWarps, kPaged, Tile>;

// One value for each head of the tile, as the lanes of a warp hold them: lane (g, c) those of the
// heads 2c and 2c + 1, whatever g.
struct HeadPair {
  float of[2];

  // The value of the head that lane 4 h + q sums up the weights of.
  __device__ __forceinline__ float of_own_head(int lane) const {
    const int source = lane / 8;  // its c is lane / 4 / 2
    const float even = __shfl_sync(kFullWarp, of[0], source);
    const float odd = __shfl_sync(kFullWarp, of[1], source);
    return lane / 4 % 2 == 0 ? even : odd;
  }
};

// work: [sequences, splits, heads, kHeadDim] and then [sequences, splits, heads, 5]; `out` is not
// written if it is there.
extern "C" __global__ void __launch_bounds__(kThreads, kHeadDim == 64 ? 2 : 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg) {
  extern __shared__ __align__(128) unsigned char memory[];
  const unsigned base = shared_address(memory);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int g = lane / 4;  // fragment coordinates, as in mma.cuh
  const int c = lane % 4;

  const DecodeTask<kPaged> task(blockIdx.x, static_cast<unsigned>(sequences_arg),
                                static_cast<unsigned>(kv_heads_arg),
                                static_cast<unsigned>(group_arg), cu_seqlens_q, lengths_k);
  if (!task.has_query) return;
  const int first_block = static_cast<int>(task.split) * kSplitBlocks;
  const int all_blocks = task.k_length > 0 ? (task.k_length + kBlockKeys - 1) / kBlockKeys : 0;
  if (task.split > 0 && first_block >= all_blocks) return;
  const bool whole = work == nullptr;
  // More keys than the caller said there would be have no result, and the row says so.
  const bool impossible = whole && task.k_length > splits_arg * kSplitKeys;
  const int last = whole ? (impossible ? 0 : all_blocks) : first_block + kSplitBlocks;
  const int end_block = last < all_blocks ? last : all_blocks;

  const float scale_log2 = static_cast<float>(scale_log2_arg);

  // --- copies ------------------------------------------------------------------------------------
  const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
  const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
  const unsigned short* k_head = k + task.kv_head * k_strides.head;
  const unsigned short* v_head = v + task.kv_head * v_strides.head;
  Keys keys;
  keys.table = kPaged ? block_table + task.sequence * table_stride : nullptr;
  keys.page_size = static_cast<unsigned>(page_size_arg);
  keys.first_row = task.k_begin;
  keys.end = task.k_length;
  const auto tile_of = [&](int block, int which) {  // 0 for K, 1 for V
    const int stage = (block - first_block) % kStages;
    return base + static_cast<unsigned>(stage * 2 + which) * kTileBytes;
  };
  // Start copying a block's K or V, a group each; the block is the one that was looked up last.
  const auto copy_k = [&](int block) {
    if (block < end_block) {
      keys.copy(tile_of(block, 0), k_head, k_strides, block * kBlockKeys, warp, lane);
    }
    copy_async_commit();
  };
  const auto copy_v = [&](int block) {
    if (block < end_block) {
      keys.copy(tile_of(block, 1), v_head, v_strides, block * kBlockKeys, warp, lane);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int ahead = 0; ahead < kStages; ++ahead) {
    keys.find((first_block + ahead) * kBlockKeys, warp, lane);
    copy_k(first_block + ahead);
    copy_v(first_block + ahead);
  }

  unsigned q_fragments[kHeadDim / 16][2];
  task.load_query<kHeadDim>(q_fragments, q, q_row_stride, q_head_stride, lane);

  if (!whole) let_next_grid_start();  // it waits for this one by itself

  // --- the state: of this split, and of those before it ------------------------------------------
  HeadPair max = {{-kInfinity, -kInfinity}}, total_max = max;
  float acc[kWarpColumnTiles][4] = {};  // [columns g, g + 8][heads 2c, 2c + 1]
  float total_acc[kWarpColumnTiles][4] = {};
  float sum = 0.0f, total_sum = 0.0f;  // the summing warp's lane 4 h + q: l[q] of head h
  const bool has_keys = warp < kKeyTiles;

  for (int block = first_block; block < end_block; ++block) {
    // K has landed (after it came V and the K and V of kStages - 1 blocks, but for the last V), and
    // every warp is done with the last block's V.
    copy_async_wait<2 * kStages - 2>();
    __syncthreads();
    if (block > first_block) copy_v(block + kStages - 1);
    keys.find((block + kStages) * kBlockKeys, warp, lane);
    const unsigned k_tile = tile_of(block, 0);
    const unsigned v_tile = tile_of(block, 1);

    // Scores of this warp's 16 keys: [keys g, g + 8][heads 2c, 2c + 1].
    float scores[4] = {};
    if (has_keys) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        unsigned a[4];
        load_matrices(a, k_tile + swizzled_offset<kRowBytes>(warp * 16 + lane % 16,
                                                             2 * d + lane / 16));
        mma_m16n8k16<Element>(scores, a, q_fragments[d][0], q_fragments[d][1]);
      }
      const int first_key = block * kBlockKeys + warp * 16;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first_key + g + e / 2 * 8 >= task.k_length) scores[e] = -kInfinity;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = largest_of_keys(scores[h], scores[h + 2]);
        if (g == 0) shared_float(memory, kTileMax, warp * kHeads + 2 * c + h) = largest;
      }
    }
    __syncthreads();  // every warp is done with K
    copy_k(block + kStages);

    // What the block's weights are relative to; all warps find the same.
    HeadPair rescale, scaled;
    bool changed = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -kInfinity;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        largest = fmaxf(largest, shared_float(memory, kTileMax, tile * kHeads + 2 * c + h));
      }
      const float next = next_reference(max.of[h], largest, scale_log2);
      const float reference = next == -kInfinity ? 0.0f : next;
      rescale.of[h] = exp2_approx(__fmul_rn(__fsub_rn(max.of[h], reference), scale_log2));
      scaled.of[h] = __fmul_rn(reference, scale_log2);
      changed = changed || next != max.of[h];
      max.of[h] = next;
    }
    changed = __any_sync(kFullWarp, changed);

    if (has_keys) {
      float pair[2][2];  // [keys g, keys g + 8][head]
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[e] = exp2_approx(__fmaf_rn(scores[e], scale_log2, -scaled.of[e % 2]));
        // Keys 2q and 2q + 1 are in lanes whose g differ in the last bit.
        pair[e / 2][e % 2] = __fadd_rn(scores[e], __shfl_xor_sync(kFullWarp, scores[e], 4));
      }
      unsigned* weights = reinterpret_cast<unsigned*>(memory + kWeights);
      weights[(warp * 16 + g) * (kHeads / 2) + c] = Element::pack(scores[0], scores[1]);
      weights[(warp * 16 + g + 8) * (kHeads / 2) + c] = Element::pack(scores[2], scores[3]);
      // Of the two lanes that have a pair, the even one writes head 2c's, the odd one the other's.
      const int index = (warp * 8 + g / 2) * kHeads + 2 * c + g % 2;
      shared_float(memory, kPairSums, index) = g % 2 == 0 ? pair[0][0] : pair[0][1];
      shared_float(memory, kPairSums, index + 4 * kHeads) = g % 2 == 0 ? pair[1][0] : pair[1][1];
    }
    copy_async_wait<2 * kStages - 1>();  // V has landed
    __syncthreads();

    if (warp == kSummingWarp) {
      if (changed) sum = __fmul_rn(sum, rescale.of_own_head(lane));
#pragma unroll
      for (int t = 0; t < kBlockKeys / 8; ++t) {
        const int pair = t * 4 + c;
        sum = __fadd_rn(sum, shared_float(memory, kPairSums, pair * kHeads + lane / 4));
      }
    }
    if (changed) {
#pragma unroll
      for (int i = 0; i < kWarpColumnTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][e] = __fmul_rn(acc[i][e], rescale.of[e % 2]);
      }
    }
#pragma unroll
    for (int step = 0; step < kKeyTiles; ++step) {
      unsigned b[2];
      load_two_transposed(b, base + kWeights + (step * 16 + lane % 16) * (kHeads * 2));
      const int row = step * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < kWarpColumnTiles; ++i) {
        const int column_tile = warp * kWarpColumnTiles + i;
        if (column_tile < kColumnTiles) {
          unsigned a[4];
          load_matrices_transposed(
              a, v_tile + swizzled_offset<kRowBytes>(row, 2 * column_tile + lane / 8 % 2));
          mma_m16n8k16<Element>(acc[i], a, b[0], b[1]);
        }
      }
    }

    if (whole && ((block + 1) % kSplitBlocks == 0 || block + 1 == end_block)) {
      const MergeScales scales[2] = {MergeScales(total_max.of[0], max.of[0], scale_log2),
                                     MergeScales(total_max.of[1], max.of[1], scale_log2)};
      const HeadPair old = {{scales[0].old, scales[1].old}};
      const HeadPair now = {{scales[0].now, scales[1].now}};
      const float own_old = old.of_own_head(lane);
      const float own_now = now.of_own_head(lane);
      total_sum = __fmaf_rn(sum, own_now, __fmul_rn(total_sum, own_old));
#pragma unroll
      for (int i = 0; i < kWarpColumnTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total_acc[i][e] = scales[e % 2](total_acc[i][e], acc[i][e]);
          acc[i][e] = 0.0f;
        }
      }
      total_max = {{scales[0].max, scales[1].max}};
      max = {{-kInfinity, -kInfinity}};
      sum = 0.0f;
    }
  }
  copy_async_wait_all();

  // --- the end -----------------------------------------------------------------------------------
  const int own_head = lane / 4;
  if (!whole) {
    const long long part = static_cast<long long>(task.sequence) * splits_arg + task.split;
    float* parts = work + (part * task.all_heads + task.first_head) * kHeadDim;
#pragma unroll
    for (int i = 0; i < kWarpColumnTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = 2 * c + e % 2;
        const int column = (warp * kWarpColumnTiles + i) * 16 + g + e / 2 * 8;
        if (head < task.heads && column < kHeadDim) parts[head * kHeadDim + column] = acc[i][e];
      }
    }
    const float largest = max.of_own_head(lane);
    if (warp == kSummingWarp && own_head < task.heads) {
      float* stats = work + sequences_arg * splits_arg * task.all_heads * kHeadDim +
                     (part * task.all_heads + task.first_head + own_head) * 5;
      stats[1 + c] = sum;
      if (c == 0) stats[0] = largest;
    }
    return;
  }
  const float largest = total_max.of_own_head(lane);
  const float two = __fadd_rn(total_sum, __shfl_xor_sync(kFullWarp, total_sum, 1));
  const float total = __fadd_rn(two, __shfl_xor_sync(kFullWarp, two, 2));
  if (warp == kSummingWarp && c == 0) {
    shared_float(memory, kInverse, own_head) = inverse_of(total, impossible);
    if (lse != nullptr && own_head < task.heads) {
      lse[task.q_row * task.all_heads + task.first_head + own_head] =
          log_sum_exp(largest, total, scale_arg, impossible);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarpColumnTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int head = 2 * c + e % 2;
      const int column = (warp * kWarpColumnTiles + i) * 16 + g + e / 2 * 8;
      if (head < task.heads && column < kHeadDim) {
        const float value =
            __fmaf_rn(total_acc[i][e], shared_float(memory, kInverse, head), 0.0f);
        out[task.q_row * out_row_stride + (task.first_head + head) * out_head_stride + column] =
            static_cast<unsigned short>(Element::pack(value, 0.0f));
      }
    }
  }
}
