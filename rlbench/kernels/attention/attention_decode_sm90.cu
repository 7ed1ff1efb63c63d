// Attention for one query a sequence, on Hopper: many blocks for each sequence, the bits of
// attention_generic.cu, whose head defines the result.
//
// Splits alone do not fill the GPU without becoming so short that a prefill would have to merge all
// the time. So a split is shared by a cluster of kRanks thread blocks in a way that leaves every
// sum alone:
//
//   1. Scores. A score is a sum over the head dim and depends on no other key, so the ranks share
//      the split's keys, 16 at a time. Keys are the rows of the tensor core's tile and the heads of
//      a KV group its 8 columns, which is S transposed: the same products in the same order. Every
//      score goes to all ranks, and that is all that they tell each other.
//   2. Weights. Each rank makes those of all keys: the largest score of each block, what the block's
//      weights are relative to, the weights, and their sums by pairs.
//   3. Values. A column of the output depends on no other column, so each rank takes kColumns of
//      them and walks over all keys of the split, ascending. The first of V have been on their way
//      to shared memory since the beginning, the rest to the L2 since the last of K were asked for:
//      memory goes on working while the ranks talk to each other.
//
// The splits' parts are merged by attention_combine.cu, unless there is only one split.
//
// Schedule: kKeyWarps warps do 1, each with a ring of its own for 16 keys x up to 128 dims; one value
// warp for every 16 columns does 3, out of one ring for 32 keys that a warp of its own keeps full;
// all do 2. K and V come by TMA: what a warp does for a key is little more than its products, which
// is what a sequence waits for. Loops are rolled up: between other layers' kernels the code comes
// from memory like everything else, and nothing is as slow as instructions that are needed once.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "row_end.cuh"
#include "softmax.cuh"
#include "tma.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), RANKS (thread
// blocks of a cluster), SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr int kSplitKeys = kSplitBlocks * kBlockKeys;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

constexpr int kTileKeys = 16;                    // of a box, and of a tensor core's tile
constexpr int kTiles = kSplitKeys / kTileKeys;
constexpr int kBlockTiles = kBlockKeys / kTileKeys;

constexpr int kRanks = RANKS;
constexpr int kColumns = kHeadDim / kRanks;      // of the output, for one rank
constexpr int kValueWarps = kColumns / 16;
constexpr int kKeyWarps = 8;
constexpr int kWarps = kValueWarps + kKeyWarps + 1;
constexpr int kThreads = 32 * kWarps;
constexpr int kLoadingWarp = kWarps - 1;         // of V
constexpr int kSummingWarp = kWarps - 2;         // a key warp
constexpr int kTileStep = kRanks * kKeyWarps;    // from one of a key warp's tiles to its next
static_assert(kTiles <= 32 * kTileStep, "a lane knows the page of one of its warp's tiles");

// K comes in units of a tile's keys x kUnitDims; V in groups of two tiles x kColumns.
constexpr int kUnitDims = kHeadDim < 128 ? kHeadDim : 128;
constexpr int kUnits = kHeadDim / kUnitDims;
constexpr int kUnitBytes = kTileKeys * kUnitDims * 2;
constexpr int kKeyStages = 8192 / kUnitBytes;
constexpr int kPanelColumns = kColumns < 64 ? kColumns : 64;
constexpr int kValueRow = kPanelColumns * 2;     // bytes; also of the swizzle
constexpr int kValueBox = kTileKeys * kColumns * 2;
constexpr int kGroupTiles = 2;
constexpr int kGroupBytes = kGroupTiles * kValueBox;
constexpr int kValueStages = kGroupBytes <= 2048 ? 32 : 65536 / kGroupBytes;

// Shared memory, in bytes from its beginning.
constexpr int kAlignment = 1024;                 // of where swizzles begin
constexpr int kKeyRing = 0;
constexpr int kValueRing = kKeyRing + kKeyWarps * kKeyStages * kUnitBytes;
constexpr int kPairs = kValueRing + kValueStages * kGroupBytes;
constexpr int kPairBytes = 2 * kHeads * 4;       // of two keys: scores, then weights and their sums
constexpr int kTileMax = kPairs + kSplitKeys / 2 * kPairBytes;  // [tile][head], float
constexpr int kQuery = kTileMax + kTiles * kHeads * 4;
constexpr int kQueryRow = kHeadDim * 2 + 16;     // so that heads are in different banks
constexpr int kBlockMax = kQuery + kHeads * kQueryRow;          // [block][head], float
constexpr int kRescale = kBlockMax + kSplitBlocks * kHeads * 4;
constexpr int kScaled = kRescale + kSplitBlocks * kHeads * 4;
constexpr int kInverse = kScaled + kSplitBlocks * kHeads * 4;   // [head], float
constexpr int kFinalMax = kInverse + kHeads * 4;
constexpr int kBarriers = kFinalMax + kHeads * 4;
constexpr int kFullKeys = 0;                     // [key warp][stage]
constexpr int kFullValues = kFullKeys + kKeyWarps * kKeyStages;
constexpr int kEmptyValues = kFullValues + kValueStages;
constexpr int kSent = kEmptyValues + kValueStages;
constexpr int kBarrierCount = kSent + 1;
constexpr int kSharedBytes = kBarriers + kBarrierCount * 8 + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kColumns % 16 == 0, "ranks share columns evenly");
static_assert(kBarrierCount <= kThreads, "a thread initializes one barrier");
static_assert(kHeads * kHeadDim / 8 <= 32 * kKeyWarps, "one chunk of Q for a lane");

// Where the weights of a pair of keys are, [key][head], and their sums, [head] (float). Which of them
// comes first alternates, so that ldmatrix finds the weights of 8 keys in different banks; it is the
// same for a pair that is a multiple of four pairs on.
__device__ __forceinline__ int weights_of(int pair) {
  return kPairs + pair * kPairBytes + pair / 2 % 2 * (kPairBytes / 2);
}
__device__ __forceinline__ int sums_of(int pair) {
  return kPairs + pair * kPairBytes + (1 - pair / 2 % 2) * (kPairBytes / 2);
}

// Where a chunk of this warp's columns of V is in a box.
__device__ __forceinline__ unsigned value_offset(int warp, int row, int chunk) {
  const int panel = warp * 16 / kPanelColumns;
  const int place = warp * 16 % kPanelColumns / 8 + chunk;
  const int swizzled = place ^ row * kValueRow / 128 % (kValueRow / kChunkBytes);
  return static_cast<unsigned>((panel * kTileKeys + row) * kValueRow + swizzled * kChunkBytes);
}

// The weight of a score, relative to what has been scaled already.
__device__ __forceinline__ float weight(float score, float scale_log2, float scaled, bool present) {
  const float exponential = exp2_approx(__fmaf_rn(score, scale_log2, -scaled));
  return present ? exponential : 0.0f;
}

// The largest score of 16 keys, of which this lane has two, for one head; in all of its lanes.
__device__ __forceinline__ float largest_of_keys(float score, float eight_keys_on) {
  float largest = fmaxf(score, eight_keys_on);
#pragma unroll
  for (int other = 4; other < 32; other *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, other));
  }
  return largest;
}

// Where the tiles of a split are: what maps of tiles (tensor_map.py) call rows and pages.
struct Place {
  int row, page;

  // The same of another lane.
  __device__ __forceinline__ Place of_lane(int lane) const {
    return {__shfl_sync(kFullWarp, row, lane), __shfl_sync(kFullWarp, page, lane)};
  }
};

// work: SplitParts; `out` is not written if it is there.
extern "C" __global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg, const __grid_constant__ TensorMap k_map,
                const __grid_constant__ TensorMap v_map) {
  extern __shared__ unsigned char shared_memory[];
  const unsigned misaligned = shared_address(shared_memory) % kAlignment;
  unsigned char* memory = shared_memory + (misaligned ? kAlignment - misaligned : 0);
  const unsigned base = shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0);
  const int rank = static_cast<int>(cluster_rank());
  const int g = lane / 4;  // fragment coordinates, as in mma.cuh
  const int c = lane % 4;

  const DecodeTask<kPaged> task(blockIdx.x / kRanks, static_cast<unsigned>(sequences_arg),
                                static_cast<unsigned>(kv_heads_arg),
                                static_cast<unsigned>(group_arg), cu_seqlens_q, lengths_k);
  if (!task.has_query) return;
  const int split_begin = static_cast<int>(task.split) * kSplitKeys;
  if (task.split > 0 && split_begin >= task.k_length) return;
  const int left = task.k_length - split_begin;
  const int count = left < 0 ? 0 : left < kSplitKeys ? left : kSplitKeys;
  const int blocks = (count + kBlockKeys - 1) / kBlockKeys;
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  const int groups = (tiles + kGroupTiles - 1) / kGroupTiles;
  const int kv_head = static_cast<int>(task.kv_head);

  const auto barrier = [&](int which) { return base + kBarriers + which * 8; };
  const unsigned sent = barrier(kSent);
  if (thread < kBarrierCount) {
    const bool is_empty_values = thread >= kEmptyValues && thread < kSent;
    mbarrier_init(barrier(thread), is_empty_values ? kValueWarps : 1);
    fence_async_proxy();  // for TMA to see them
  }
  __syncthreads();
  if (thread == 0) {
    mbarrier_arrive_expecting(sent, static_cast<unsigned>(tiles * (kTileKeys + 1) * kHeads * 4));
  }
  __syncwarp();
  cluster_begin();
  let_next_grid_start();  // it waits for this one by itself
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  const auto find = [&](int tile) {
    const int key = tile * kTileKeys;
    if constexpr (kPaged) {
      const unsigned number = static_cast<unsigned>(split_begin + key);
      const unsigned index = number / static_cast<unsigned>(page_size_arg);
      const int row = static_cast<int>(number - index * static_cast<unsigned>(page_size_arg));
      const int* table = block_table + task.sequence * table_stride;
      return Place{row, key < count ? table[index] : 0};
    }
    return Place{task.k_begin + split_begin + key, 0};
  };

  // --- 3, begun: the loading warp asks for groups of V -------------------------------------------
  const bool is_value_warp = warp < kValueWarps;
  const int first_column = rank * kColumns;
  const int panel = first_column / 64;
  Place places = {0, 0};  // of 32 tiles, one a lane: in the loading warp of those around the present
  const auto load_values = [&](int group) {
    if (group % (32 / kGroupTiles) == 0) places = find(group * kGroupTiles + lane);
    const int first = group * kGroupTiles;
    const unsigned full = barrier(kFullValues + group % kValueStages);
    const unsigned stage = base + kValueRing + group % kValueStages * kGroupBytes;
    const int there = tiles - first < kGroupTiles ? tiles - first : kGroupTiles;
    if (lane == 0) mbarrier_arrive_expecting(full, static_cast<unsigned>(there * kValueBox));
#pragma unroll
    for (int t = 0; t < kGroupTiles; ++t) {
      const Place place = places.of_lane((first + t) % 32);
      if (lane == 0 && t < there) {
        copy_box(stage + t * kValueBox, &v_map, full, first_column % 64, place.row, panel, kv_head,
                 place.page);
      }
    }
    __syncwarp();
  };
  if (warp == kLoadingWarp) {
#pragma unroll 1
    for (int group = 0; group < kValueStages && group < groups; ++group) load_values(group);
  }

  if (is_value_warp || warp == kLoadingWarp) {
    cluster_wait_for_others();
  } else {
    // --- 1: scores -------------------------------------------------------------------------------
    // A warp's tiles are first_tile, first_tile + kTileStep, ...; lane i knows where the i-th is.
    const int key_warp = warp - kValueWarps;
    const int first_tile = rank + kRanks * key_warp;
    const int units =
        tiles > first_tile ? (tiles - first_tile + kTileStep - 1) / kTileStep * kUnits : 0;
    places = find(first_tile + lane * kTileStep);
    // And which tiles of V this warp brings to the L2: those beyond the ring, one in kKeyWarps.
    const int ahead_tile = kValueStages * kGroupTiles + key_warp + kKeyWarps * lane;
    const Place ahead = find(ahead_tile);
    constexpr int kChunks = kHeadDim / 8;
    const int head = (key_warp * 32 + lane) / kChunks;  // whose chunk of Q this lane copies
    if (head < kHeads) {
      const bool present = head < task.heads;
      const unsigned short* row = q + task.q_row * q_row_stride +
                                  (task.first_head + (present ? head : 0)) * q_head_stride;
      copy_async(base + kQuery + head * kQueryRow + lane % kChunks * kChunkBytes,
                 row + lane % kChunks * 8, present);
    }
    copy_async_commit();
    const unsigned ring = base + kKeyRing + key_warp * kKeyStages * kUnitBytes;
    const int full = kFullKeys + key_warp * kKeyStages;
    const auto load_keys = [&](int n) {
      if (n >= units) return;
      const Place place = places.of_lane(n / kUnits);
      if (lane == 0) {
        const unsigned there = barrier(full + n % kKeyStages);
        mbarrier_arrive_expecting(there, kUnitBytes);
        copy_box(ring + n % kKeyStages * kUnitBytes, &k_map, there, 0, place.row,
                 n % kUnits * (kUnitDims / 64), kv_head, place.page);
      }
      __syncwarp();
    };
#pragma unroll 1
    for (int n = 0; n < kKeyStages; ++n) load_keys(n);
    copy_async_wait_all();
    named_barrier(1, 32 * kKeyWarps);  // Q is there
    unsigned query[kHeadDim / 32][4];  // B of two k16 steps each
#pragma unroll
    for (int d = 0; d < kHeadDim / 32; ++d) {
      load_matrices(query[d], base + kQuery + lane % 8 * kQueryRow + d * 64 + lane / 8 * 16);
    }
    cluster_wait_for_others();

#pragma unroll 1
    for (int n = 0; n < units; n += kUnits) {
      float scores[4] = {};  // [keys g, g + 8][heads 2c, 2c + 1]
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int stage = (n + unit) % kKeyStages;
        mbarrier_wait(barrier(full + stage), static_cast<unsigned>((n + unit) / kKeyStages % 2));
#pragma unroll
        for (int d = 0; d < kUnitDims / 16; ++d) {
          unsigned a[4];
          load_matrices(a, ring + stage * kUnitBytes + d / 4 * (kTileKeys * 128) +
                               swizzled_offset<128>(lane % 16, d % 4 * 2 + lane / 16));
          const unsigned(&b)[4] = query[(unit * kUnitDims + d * 16) / 32];
          mma_m16n8k16<Element>(scores, a, b[d % 2 * 2], b[d % 2 * 2 + 1]);
        }
        __syncwarp();
        load_keys(n + unit + kKeyStages);
      }
      const int tile = first_tile + n / kUnits * kTileStep;
      float largest[2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (tile * kTileKeys + g + e / 2 * 8 >= count) scores[e] = -kInfinity;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) largest[h] = largest_of_keys(scores[h], scores[h + 2]);
      const unsigned there = base + kPairs + (tile * kTileKeys + g) * (kHeads * 4) + c * 8;
      const unsigned there_max = base + kTileMax + tile * (kHeads * 4) + c * 8;
#pragma unroll 1
      for (unsigned r = 0; r < kRanks; ++r) {
        const unsigned remote = shared_of(there, r), its = shared_of(sent, r);
        send_remote(remote, scores[0], scores[1], its);
        send_remote(remote + 8 * kHeads * 4, scores[2], scores[3], its);
        if (g == 0) send_remote(shared_of(there_max, r), largest[0], largest[1], its);
      }
      const bool all_asked = n + kUnits + kKeyStages >= units;
      if (all_asked && (n + kKeyStages < units || n == 0) && ahead_tile < tiles) {
        // All of K is on its way since just now: the rest of V to the L2.
        prefetch_box(&v_map, first_column % 64, ahead.row, panel, kv_head, ahead.page);
      }
      __syncwarp();
    }
  }
  mbarrier_wait_for_sent(sent, 0);

  // --- 2: weights --------------------------------------------------------------------------------
#pragma unroll 1
  for (int item = thread; item < blocks * kHeads; item += kThreads) {
    const int first = item / kHeads * kBlockTiles;
    float largest = -kInfinity;
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) {
      if (first + t < tiles) {
        largest = fmaxf(largest, shared_float(memory, kTileMax, (first + t) * kHeads + item % kHeads));
      }
    }
    shared_float(memory, kBlockMax, item) = largest;
  }
  if (blocks == 0 && thread < kHeads) shared_float(memory, kFinalMax, thread) = -kInfinity;
  __syncthreads();
#pragma unroll 1
  for (int item = thread; item < blocks * kHeads; item += kThreads) {
    float before = -kInfinity;
#pragma unroll 4
    for (int earlier = item % kHeads; earlier < item; earlier += kHeads) {
      before = fmaxf(before, shared_float(memory, kBlockMax, earlier));
    }
    const float next = fmaxf(before, shared_float(memory, kBlockMax, item));
    const float reference = next == -kInfinity ? 0.0f : next;
    shared_float(memory, kRescale, item) =
        exp2_approx(__fmul_rn(__fsub_rn(before, reference), scale_log2));
    shared_float(memory, kScaled, item) = __fmul_rn(reference, scale_log2);
    if (item / kHeads == blocks - 1) shared_float(memory, kFinalMax, item % kHeads) = next;
  }
  __syncthreads();
  // Two lanes replace a pair's scores, four heads each; a lane takes kAtOnce such halves at a time.
  constexpr int kAtOnce = 2;
#pragma unroll 1
  for (int begin = thread; begin - lane < blocks * kBlockKeys; begin += kAtOnce * kThreads) {
    float4 weights[kAtOnce][2];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = begin + j * kThreads;
      if (item >= blocks * kBlockKeys) continue;
      const int pair = item / 2;
      const int heads = item % 2 * 16;  // bytes
      const bool present = 2 * pair < tiles * kTileKeys;
      const float4 scaled = *reinterpret_cast<const float4*>(
          memory + kScaled + pair / (kBlockKeys / 2) * (kHeads * 4) + heads);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 scores = *reinterpret_cast<const float4*>(
            memory + kPairs + pair * kPairBytes + i * (kPairBytes / 2) + heads);
        weights[j][i] = make_float4(weight(scores.x, scale_log2, scaled.x, present),
                                    weight(scores.y, scale_log2, scaled.y, present),
                                    weight(scores.z, scale_log2, scaled.z, present),
                                    weight(scores.w, scale_log2, scaled.w, present));
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = begin + j * kThreads;
      if (item >= blocks * kBlockKeys) continue;
      const int pair = item / 2;
      const int heads = item % 2 * 16;
      const float4(&w)[2] = weights[j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint2*>(memory + weights_of(pair) + i * (kHeads * 2) + heads / 2) =
            make_uint2(Element::pack(w[i].x, w[i].y), Element::pack(w[i].z, w[i].w));
      }
      *reinterpret_cast<float4*>(memory + sums_of(pair) + heads) =
          make_float4(__fadd_rn(w[0].x, w[1].x), __fadd_rn(w[0].y, w[1].y),
                      __fadd_rn(w[0].z, w[1].z), __fadd_rn(w[0].w, w[1].w));
    }
  }
  __syncthreads();

  if (warp == kLoadingWarp) {
    // --- 3, continued: V that the ring had no room for -------------------------------------------
#pragma unroll 1
    for (int group = kValueStages; group < groups; ++group) {
      mbarrier_wait(barrier(kEmptyValues + group % kValueStages),
                    static_cast<unsigned>(group / kValueStages - 1) % 2);
      load_values(group);
    }
  }

  // --- 2, ended: one warp adds up the weights, lane 4 h + q the pairs 4 t + q of head h ------------
  const SplitParts<kHeadDim> parts = {work, sequences_arg, splits_arg, task.all_heads};
  if (warp == kSummingWarp) {
    float sum = 0.0f;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      sum = __fmul_rn(sum, shared_float(memory, kRescale, block * kHeads + g));
#pragma unroll
      for (int t = 0; t < kBlockKeys / 8; ++t) {
        const int before = block * (kBlockKeys / 2) + t * 4;
        sum = __fadd_rn(sum, shared_float(memory, sums_of(c) + before * kPairBytes, g));
      }
    }
    const float largest = shared_float(memory, kFinalMax, g);
    const bool writes = rank == 0 && g < task.heads;  // all ranks know
    if (work != nullptr) {
      float* mine = parts.stats(task.sequence, task.split, task.first_head + g);
      if (writes) {
        mine[1 + c] = sum;
        if (c == 0) mine[0] = largest;
      }
    } else {
      const float two = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));
      const float total = __fadd_rn(two, __shfl_xor_sync(kFullWarp, two, 2));
      // Without room for parts, more keys than a split have no result, and the row says so.
      const bool impossible = task.k_length > kSplitKeys;
      if (c == 0) shared_float(memory, kInverse, g) = inverse_of(total, impossible);
      if (writes && c == 0 && lse != nullptr) {
        lse[task.q_row * task.all_heads + task.first_head + g] =
            log_sum_exp(largest, total, scale_arg, impossible);
      }
    }
  }

  // --- 3: values ---------------------------------------------------------------------------------
  float acc[4] = {};  // [columns g, g + 8][heads 2c, 2c + 1]
  if (is_value_warp) {
    // A group's fragments are loaded while the products of the one before are computed.
    struct {
      unsigned v[kGroupTiles][4], weights[4];
    } now, next;
    const auto load = [&](int group) {
      const int stage = group % kValueStages;
      const unsigned at = base + kValueRing + stage * kGroupBytes;
      mbarrier_wait(barrier(kFullValues + stage),
                    static_cast<unsigned>(group / kValueStages) % 2);
      // What follows the last key may be anything, and zero times that is not always zero.
      const int absent = count - (tiles - 1) * kTileKeys;  // first such row of the last tile
      if (group == groups - 1 && absent < kTileKeys) {
        if (lane / 2 >= absent) {
          const int last = (tiles - 1) % kGroupTiles;
          *reinterpret_cast<uint4*>(memory + kValueRing + stage * kGroupBytes + last * kValueBox +
                                    value_offset(warp, lane / 2, lane % 2)) = make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
      }
      const unsigned chunk = value_offset(warp, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
      for (int t = 0; t < kGroupTiles; ++t) {
        load_matrices_transposed(next.v[t], at + t * kValueBox + chunk);
      }
      load_matrices_transposed(next.weights, base + weights_of(lane / 2) + lane % 2 * (kHeads * 2) +
                                                 group * kTileKeys * kPairBytes);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier(kEmptyValues + stage));
    };
    if (groups > 0) load(0);
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      now = next;
      if (group + 1 < groups) load(group + 1);
#pragma unroll
      for (int t = 0; t < kGroupTiles; ++t) {
        const int tile = group * kGroupTiles + t;
        if (tile >= tiles) break;
        if (tile % kBlockTiles == 0) {
          const float2 rescale = *reinterpret_cast<const float2*>(
              memory + kRescale + (tile / kBlockTiles * kHeads + 2 * c) * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            acc[e] = __fmul_rn(acc[e], e % 2 == 0 ? rescale.x : rescale.y);
          }
        }
        mma_m16n8k16<Element>(acc, now.v[t], now.weights[2 * t], now.weights[2 * t + 1]);
      }
    }
  }
  if (work == nullptr) __syncthreads();  // for the inverses
  if (!is_value_warp) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int head = 2 * c + e % 2;
    const int column = first_column + warp * 16 + g + e / 2 * 8;
    if (head < task.heads) {
      if (work != nullptr) {
        parts.columns(task.sequence, task.split, task.first_head + head)[column] = acc[e];
      } else {
        const float value = __fmaf_rn(acc[e], shared_float(memory, kInverse, head), 0.0f);
        out[task.q_row * out_row_stride + (task.first_head + head) * out_head_stride + column] =
            static_cast<unsigned short>(Element::pack(value, 0.0f));
      }
    }
  }
}
