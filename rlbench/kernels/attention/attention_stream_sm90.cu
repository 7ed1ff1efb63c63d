// Attention for one query a sequence, from sm_90: a thread block streams the keys of one sequence
// and KV head, or of one split of them, with the bits of attention_generic.cu, whose head defines
// the result.
//
// Keys are the rows of the tensor core's tile and the heads of a KV group its 8 columns, which is S
// transposed: the same products in the same order. Within a block of keys the warps share what no
// sum needs whole: first the keys, 16 a warp, for the scores; then the columns of the output, 16 or
// 32 a warp, for P V. In between, the largest scores and the rounded weights go through shared
// memory.
//
// A block of keys takes the tensor cores two chains, S and P V, in which each link waits for the
// one before. So a turn first finds the weights of a block, and then its P V together with the
// scores of the next block: neither chain waits for the other, and a turn has two barriers. K of
// block n and V of block n - 1, which are needed together, are asked for kStages turns before that,
// as soon as what was in their place has been used up.
//
// Copies are TMA's where there can be maps (key_boxes.cuh), else cp.async's (key_stream.cuh); only
// the places of a tile's chunks in shared memory differ.
//
// A step of decoding meets empty caches, also those of instructions, so there is little code: the
// first copies are asked for by turns of the same loop that have no scores yet.
//
// With `work`, a thread block has one split, whose part attention_combine.cu merges with the others;
// without, it has the whole sequence and merges at the end of each split in its registers.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "key_boxes.cuh"
#include "key_stream.cuh"
#include "key_weights.cuh"
#include "mbarrier.cuh"
#include "merge.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "row_end.cuh"
#include "softmax.cuh"
#include "tma.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), TMA (0, 1),
// SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr int kSplitKeys = kSplitBlocks * kBlockKeys;
constexpr bool kPaged = PAGED != 0;
constexpr bool kTma = TMA != 0;
using Element = ELEMENT;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = kHeadDim == 256 ? 2 : 3;
constexpr int kKeyTiles = kBlockKeys / 16;
constexpr int kColumnTiles = kHeadDim / 16;
constexpr int kWarpColumnTiles = (kColumnTiles + kWarps - 1) / kWarps;
constexpr int kSummingWarp = kWarps - 1;
constexpr int kSteps = kHeadDim / 16 > kKeyTiles ? kHeadDim / 16 : kKeyTiles;

// Shared memory, in bytes: from its beginning, and the stages of K and V behind that.
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kTileBytes = kBlockKeys * kRowBytes;         // of K or V; a stage has both
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kWeights = 0;                                // [key][head]
constexpr int kPairSums = kWeights + kBlockKeys * kHeads * 2;  // [tile of keys][lane][2], float
constexpr int kTileMax = kPairSums + kBlockKeys / 2 * kHeads * 4;  // [tile of keys][head], float
constexpr int kInverse = kTileMax + kKeyTiles * kHeads * 4;      // [head], float
constexpr int kBarriers = kInverse + kHeads * 4;           // [stage], with TMA
constexpr int kAlignment = kTma ? 1024 : 128;              // of the stages
constexpr int kTiles = (kBarriers + (kTma ? kStages * 8 : 0) + 127) / 128 * 128;
constexpr int kSharedBytes = kTiles + kStages * kStageBytes + (kAlignment - 128);

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kTileBytes % kAlignment == 0, "tiles stay aligned");
static_assert(kKeyTiles <= kWarps, "a warp has at most one tile of keys");

// A tile's keys and where their 16-byte chunks are. By TMA it is one box after the other, and a box
// one panel of 128 bytes a key after the other; else it is one key after the other.
struct Tile {
  static constexpr int kBoxKeys = kTma ? (kPaged ? 16 : kBlockKeys) : 1;
  static constexpr int kRowBytes = kTma ? 128 : ::kRowBytes;  // from key to key
  static constexpr int kPanelBytes = kTma ? kBoxKeys * 128 : 128;
  static constexpr int kStepBytes = kTma && !kPaged ? 16 * 128 : 16 * ::kRowBytes;  // 16 keys

  // Of one of the first 16 keys.
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    const unsigned panel = static_cast<unsigned>(chunk) / 8;
    return panel * kPanelBytes + swizzled_offset<kRowBytes>(row, chunk & 7);
  }
};
#if TMA
using Keys = KeyBoxes<kHeadDim, kBlockKeys, Tile::kBoxKeys, kPaged>;
#else
using Keys = KeyStream<kHeadDim, kBlockKeys, kWarps, kPaged, Tile>;
#endif

// Tile::offset(row, chunk + n) from that with n = 0 or 1, for an even chunk that is known.
__device__ __forceinline__ unsigned k_offset(unsigned begin, int chunk) {
  return (begin ^ (chunk % 8 * kChunkBytes)) + chunk / 8 * Tile::kPanelBytes;
}

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

// The query's fragments of B, one for each k16 step. A head that there is not gets the last one's:
// nobody asks for its results.
__device__ __forceinline__ void load_query(unsigned (&fragments)[kHeadDim / 16][2],
                                           const DecodeTask<kPaged>& task, const unsigned short* q,
                                           long long row_stride, long long head_stride, int lane) {
  const int head = lane / 4 < task.heads ? lane / 4 : task.heads - 1;
  q += task.q_row * row_stride + (task.first_head + head) * head_stride + lane % 4 * 2;
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fragments[d][half] = *reinterpret_cast<const unsigned*>(q + 16 * d + 8 * half);
    }
  }
}

// The maps are tensor_map.of_ends; pages are so many rows apart (tensor_map.page_rows).
#if TMA
#define MAPS                                                                                  \
  , long long page_divisor_arg, long long k_page_rows_arg, long long v_page_rows_arg,         \
      const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map
#else
#define MAPS
#endif

// work: SplitParts; `out` is not written if it is there.
extern "C" __global__ void __launch_bounds__(kThreads, kHeadDim == 64 ? 2 : 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg, long long head_tiles_divisor_arg,
                long long kv_heads_divisor_arg, long long sequences_divisor_arg MAPS) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x / 32), 0);
  // And this, so that it is not found out again and again.
  const unsigned end_of_rest = shared_address(memory) + kTiles;
  const unsigned base = __shfl_sync(
      kFullWarp, kTma ? (end_of_rest + kAlignment - 1) / kAlignment * kAlignment : end_of_rest, 0);
  const int g = lane / 4;  // fragment coordinates, as in mma.cuh
  const int c = lane % 4;
#if TMA
  if (warp == 0 && is_elected()) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared_address(memory) + kBarriers + stage * 8, Keys::kBoxes);
    }
    fence_async_proxy();
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
  }
  // Else this thread alone asks for copies, and the others wait for those behind a later barrier.
  if (Keys::kBoxes > 1) __syncthreads();
#endif

  const DecodeTask<kPaged> task(blockIdx.x, static_cast<unsigned>(sequences_arg),
                                static_cast<unsigned>(kv_heads_arg),
                                static_cast<unsigned>(group_arg), Divisor(head_tiles_divisor_arg),
                                Divisor(kv_heads_divisor_arg), Divisor(sequences_divisor_arg),
                                cu_seqlens_q, lengths_k);
  const int first_block = static_cast<int>(task.split) * kSplitBlocks;
  const int all_blocks = task.k_length > 0 ? (task.k_length + kBlockKeys - 1) / kBlockKeys : 0;
  // Not one after the other: the second's loads would wait for the first's.
  if (!task.has_query | (task.split > 0 & first_block >= all_blocks)) return;
  const bool whole = work == nullptr;
  // More keys than the caller said there would be have no result, and the row says so.
  const bool impossible = whole && task.k_length > splits_arg * kSplitKeys;
  const int last = whole ? (impossible ? 0 : all_blocks) : first_block + kSplitBlocks;
  const int end_block = last < all_blocks ? last : all_blocks;

  // Through a shuffle, so that it is computed once.
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);

  // --- the state: of this split, and of those before it ------------------------------------------
  HeadPair max = {{-kInfinity, -kInfinity}}, total_max = max;
  HeadPair scaled = {{0.0f, 0.0f}};  // what is subtracted from scaled scores
  float acc[kWarpColumnTiles][4] = {};  // [columns g, g + 8][heads 2c, 2c + 1]
  float total_acc[kWarpColumnTiles][4] = {};
  float sum = 0.0f, total_sum = 0.0f;  // the summing warp's lane 4 h + q: l[q] of head h

  // --- copies ------------------------------------------------------------------------------------
  // K of block n is in stage n % kStages, V in the other half of it. With TMA, a stage's barrier is
  // for that K and the V that comes with it.
  unsigned k_tile = base, v_tile = base + (kStages - 1) * kStageBytes + kTileBytes;
  unsigned barrier = shared_address(memory) + kBarriers, parity = 1;
  const auto go_on = [&] {
    v_tile = k_tile + kTileBytes;
    k_tile += kStageBytes;
    barrier += 8;
    if (k_tile == base + kStages * kStageBytes) {
      k_tile = base;
      barrier = shared_address(memory) + kBarriers;
      parity ^= 1;
    }
  };
  const int split_end = end_block * kBlockKeys;
  const int end_key = split_end < task.k_length ? split_end : task.k_length;
  const int* pages = kPaged ? block_table + task.sequence * table_stride : nullptr;
#if TMA
  Keys keys(&k_map, &v_map, task.kv_head, task.k_begin, pages, page_size_arg,
            page_divisor_arg, k_page_rows_arg, v_page_rows_arg, first_block, end_key, warp, lane);
  // K of a block and V of the one before it.
  const auto ask = [&](int block) {
    if (warp < Keys::kBoxes && block <= end_block) {
      keys.ask(k_tile, block < end_block, v_tile, barrier);
    }
  };
#else
  Keys keys(k + task.kv_head * k_head_stride, {k_page_stride, k_row_stride, k_head_stride},
            v + task.kv_head * v_head_stride, {v_page_stride, v_row_stride, v_head_stride},
            task.k_begin, pages, page_size_arg, first_block, end_key, warp, lane);
  // K of a block and V of the one before it, a group of copies.
  const auto ask = [&](int block) {
    keys.ask(k_tile, block < end_block, v_tile, block <= end_block);
    copy_async_commit();
  };
#endif

  // --- turns -------------------------------------------------------------------------------------
  const bool has_keys = kKeyTiles == kWarps || warp < kKeyTiles;
  const bool has_columns = kColumnTiles >= kWarps || warp < kColumnTiles;
  int merge_at = first_block + kSplitBlocks < end_block ? first_block + kSplitBlocks : end_block;

  // Where this lane's rows of the matrices in a tile are, and the query.
  unsigned k_begin, v_begins[kWarpColumnTiles];
  unsigned q_fragments[kHeadDim / 16][2];
  // Of this warp's 16 keys: [keys g, g + 8][heads 2c, 2c + 1].
  float scores[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};

  // The first turns only ask for copies: they are for blocks before the first one, whose weights
  // are zeros, as is the V that is copied for the last of them. The last turn's scores are unused.
  for (int block = first_block - kStages;;) {
    HeadPair largest = {{-kInfinity, -kInfinity}};
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const float2 heads = shared_pair(memory, kTileMax, tile * (kHeads / 2) + c);
      largest.of[0] = fmaxf(largest.of[0], heads.x);
      largest.of[1] = fmaxf(largest.of[1], heads.y);
    }
#pragma unroll
    for (float& each : largest.of) each = block < first_block ? -kInfinity : each;
    ask(block + kStages);
    go_on();

    // What the block's weights are relative to; all warps find the same.
    HeadPair next;
#pragma unroll
    for (int h = 0; h < 2; ++h) next.of[h] = fmaxf(max.of[h], largest.of[h]);
    if (__any_sync(kFullWarp, next.of[0] != max.of[0] || next.of[1] != max.of[1])) {
      HeadPair rescale;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float reference = next.of[h] == -kInfinity ? 0.0f : next.of[h];
        rescale.of[h] = exp2_approx(__fmul_rn(__fsub_rn(max.of[h], reference), scale_log2));
        scaled.of[h] = __fmul_rn(reference, scale_log2);
      }
      max = next;
      sum = __fmul_rn(sum, rescale.of_own_head(lane));
#pragma unroll
      for (int i = 0; i < kWarpColumnTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][e] = __fmul_rn(acc[i][e], rescale.of[e % 2]);
      }
    }

    if (has_keys) {
      const KeyWeights<Element> weights(scores, scaled.of, scale_log2, g);
      unsigned* rows = reinterpret_cast<unsigned*>(memory + kWeights);
      rows[(warp * 16 + g) * (kHeads / 2) + c] = weights.rounded[0];
      rows[(warp * 16 + g + 8) * (kHeads / 2) + c] = weights.rounded[1];
      shared_pair(memory, kPairSums, warp * 32 + KeyWeights<Element>::kept_by(g, c)) =
          make_float2(weights.pairs[0], weights.pairs[1]);
    }

    if (++block <= first_block) {
      if (block < first_block) continue;
      unsigned thread = threadIdx.x;
      asm volatile("" : "+r"(thread));  // so that nothing of this is done before the first copies
      const int own = static_cast<int>(thread % 32);
      load_query(q_fragments, task, q, q_row_stride, q_head_stride, own);
      k_begin = warp * Tile::kStepBytes + Tile::offset(own % 16, own / 16);
#pragma unroll
      for (int i = 0; i < kWarpColumnTiles; ++i) {
        v_begins[i] = Tile::offset(own % 8 + own / 16 * 8,
                                   2 * (warp * kWarpColumnTiles + i) + own / 8 % 2);
      }
      if (!whole) let_next_grid_start();  // it waits for this one by itself
    }
    // `block` is the next one now. Its K and the last one's V have landed, the weights are there.
    if constexpr (!kTma) copy_async_wait<kStages - 1>();
    __syncthreads();
    if constexpr (kTma) mbarrier_wait(barrier, parity);

#pragma unroll
    for (float& score : scores) score = 0.0f;
    const unsigned weight_rows = shared_address(memory) + kWeights;
    unsigned weights[4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < kHeadDim / 16 && has_keys) {
        unsigned a[4];
        load_matrices(a, k_tile + k_offset(k_begin, 2 * step));
        mma_m16n8k16<Element>(scores, a, q_fragments[step][0], q_fragments[step][1]);
      }
      if (step >= kKeyTiles) continue;
      if (step % 2 == 0) {
        if (step + 1 < kKeyTiles) {
          load_matrices_transposed(weights, weight_rows + (step * 16 + lane) * (kHeads * 2));
        } else {
          unsigned last[2];
          load_two_transposed(last, weight_rows + (step * 16 + lane % 16) * (kHeads * 2));
          weights[0] = last[0];
          weights[1] = last[1];
        }
      }
#pragma unroll
      for (int i = 0; i < kWarpColumnTiles; ++i) {
        if (has_columns) {
          unsigned a[4];
          load_matrices_transposed(a, v_tile + v_begins[i] + step * Tile::kStepBytes);
          mma_m16n8k16<Element>(acc[i], a, weights[step % 2 * 2], weights[step % 2 * 2 + 1]);
        }
      }
      if (warp == kSummingWarp) {
        const float2 pairs = shared_pair(memory, kPairSums + step * 32 * 8, lane);
        sum = __fadd_rn(__fadd_rn(sum, pairs.x), pairs.y);
      }
    }
    if (has_keys) {
      const int first_key = block * kBlockKeys + warp * 16;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first_key + g + e / 2 * 8 >= task.k_length) scores[e] = -kInfinity;
      }
      const float largest = largest_of_keys(scores, g);
      if (g < 2) shared_float(memory, kTileMax, warp * kHeads + 2 * c + g) = largest;
    }

    if (whole && block == merge_at) {
      merge_at = merge_at + kSplitBlocks < end_block ? merge_at + kSplitBlocks : end_block;
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
      scaled = {{0.0f, 0.0f}};
      sum = 0.0f;
    }
    if (block == end_block) break;
    __syncthreads();  // every warp is done with K, V and weights, and has said its largest scores
  }
  if constexpr (!kTma) copy_async_wait_all();

  // --- the end -----------------------------------------------------------------------------------
  const int own_head = lane / 4;
  if (!whole) {
    const SplitParts<kHeadDim> parts = {work, sequences_arg, splits_arg, task.all_heads};
    float* columns = parts.columns(task.sequence, task.split, task.first_head);
#pragma unroll
    for (int i = 0; i < kWarpColumnTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = 2 * c + e % 2;
        const int column = (warp * kWarpColumnTiles + i) * 16 + g + e / 2 * 8;
        if (head < task.heads && column < kHeadDim) columns[head * kHeadDim + column] = acc[i][e];
      }
    }
    const float largest = max.of_own_head(lane);
    if (warp == kSummingWarp && own_head < task.heads) {
      float* stats = parts.stats(task.sequence, task.split, task.first_head + own_head);
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
