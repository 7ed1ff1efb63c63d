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
//      rank learns the largest score of each 16 keys.
//   2. Weights. From those it finds what each block's weights are relative to, makes the weights of
//      its own keys, and sends them to all ranks, and their sums by pairs to who adds them up.
//   3. Values. A column of the output depends on no other column, so each rank takes kColumns of
//      them and walks over all keys of the split, ascending, as their weights come in.
//
// The splits' parts are merged by attention_combine.cu, unless there is only one split.
//
// Schedule: kKeyWarps warps do 1 and 2, each with a ring of its own for 16 keys x up to 128 dims; one
// value warp for every 16 columns does 3, out of one ring for blocks of keys that key warps keep full
// when they are done; one warp adds up the weights. K and V come by TMA. The first of V are asked for at the
// beginning, by the warps that have nothing else to do, and the rest is brought to the L2 as those
// arrive, so that memory goes on working while the ranks talk to each other.
//
// A sequence waits for single warps: what counts is how many instructions depend on one another.
// Walking over V, a block of keys is the step: its fragments are loaded while the products of the
// one before are computed. Outer loops are rolled up: between other layers' kernels the code comes
// from memory like everything else, and nothing is as slow as instructions that are needed once.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "key_weights.cuh"
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
constexpr int kWarps = kValueWarps + kKeyWarps + 3;
constexpr int kThreads = 32 * kWarps;
constexpr int kPrefetchingWarps = 2;             // of V, to the L2
constexpr int kWorkers = kWarps - kPrefetchingWarps;
constexpr int kSummingWarp = kWorkers - 1;
constexpr int kIssuers = kValueWarps + kPrefetchingWarps;  // warps that fill the ring of V
constexpr int kTileStep = kRanks * kKeyWarps;    // from one of a key warp's tiles to its next
constexpr int kWarpTiles = (kTiles + kTileStep - 1) / kTileStep;
static_assert(kWarpTiles <= 32, "a lane knows the page of one of its warp's tiles");
static_assert(kBlockTiles <= 8, "eight lanes know the pages of a block's tiles");
static_assert(kSplitBlocks < 32, "a lane knows about one of the split's blocks");
static_assert(kKeyWarps == kHeads, "a key warp finds one head's references");

// K comes in units of a tile's keys x kUnitDims; V in blocks of keys x kColumns.
constexpr int kUnitDims = kHeadDim < 128 ? kHeadDim : 128;
constexpr int kUnits = kHeadDim / kUnitDims;
constexpr int kUnitBytes = kTileKeys * kUnitDims * 2;
constexpr int kKeyStages = 8192 / kUnitBytes;
constexpr int kPanelColumns = kColumns < 64 ? kColumns : 64;
constexpr int kValueRow = kPanelColumns * 2;     // bytes; also of the swizzle
constexpr int kValueBox = kTileKeys * kColumns * 2;
constexpr int kValueStage = kBlockTiles * kValueBox;
constexpr int kMostStages = (kRanks == 2 ? 65536 : 81920) / kValueStage;
constexpr int kValueStages = kMostStages < kSplitBlocks ? kMostStages : kSplitBlocks;

// Shared memory, in bytes from its beginning.
constexpr int kAlignment = 1024;                 // of where swizzles begin
constexpr int kTileSums = kTileKeys / 2 * kHeads * 4;
constexpr int kKeyRing = 0;
constexpr int kKeyRingBytes = kKeyWarps * kKeyStages * kUnitBytes;
constexpr int kSums = kKeyRing;                  // [tile][lane][2], float: in the place of K
constexpr int kValueRing = kKeyRing + kKeyRingBytes;
constexpr int kWeights = kValueRing + kValueStages * kValueStage;     // [key][head]
constexpr int kScores = kWeights + kSplitKeys * kHeads * 2;           // [warp][tile][2][lane][2]
constexpr int kTileScores = kTileKeys * kHeads * 4;
constexpr int kTileMax = kScores + kKeyWarps * kWarpTiles * kTileScores;
constexpr int kMaxPitch = 10;                    // [tile][kMaxPitch], float: lanes in many banks
constexpr int kQuery = kTileMax + kTiles * kMaxPitch * 4;
constexpr int kQueryRow = kHeadDim * 2 + 16;     // so that heads are in different banks
constexpr int kRescale = kQuery + kHeads * kQueryRow;           // [block][head], float
constexpr int kScaled = kRescale + kSplitBlocks * kHeads * 4;
constexpr int kInverse = kScaled + kSplitBlocks * kHeads * 4;   // [head], float
constexpr int kFinalMax = kInverse + kHeads * 4;
constexpr int kBarriers = kFinalMax + kHeads * 4;
constexpr int kFullKeys = 0;                     // [key warp][stage]
constexpr int kEmptyValues = kFullKeys + kKeyWarps * kKeyStages;  // [stage]
constexpr int kSaid = kEmptyValues + kValueStages;              // all largest scores are there
constexpr int kThere = kSaid + 1;                               // [block]: V and weights are
constexpr int kBarrierCount = kThere + kSplitBlocks;
constexpr int kSharedBytes = kBarriers + kBarrierCount * 8 + kAlignment;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kColumns % 16 == 0, "ranks share columns evenly");
// Key warps that fill the ring again: a stage is always the same one's, which sees all its phases.
constexpr int kReloaders = kValueStages < kKeyWarps ? kValueStages : kKeyWarps;
static_assert(kSplitBlocks <= 2 * kValueStages || kValueStages % kReloaders == 0, "kReloaders");
static_assert(kTiles * kTileSums <= kKeyRingBytes, "sums have room in the place of K");
static_assert(kHeads * kHeadDim / 8 <= 32 * kKeyWarps, "one chunk of Q for a lane");

// Where a chunk of this warp's columns of V is in a box.
__device__ __forceinline__ unsigned value_offset(int warp, int row, int chunk) {
  const int panel = warp * 16 / kPanelColumns;
  const int place = warp * 16 % kPanelColumns / 8 + chunk;
  const int swizzled = place ^ row * kValueRow / 128 % (kValueRow / kChunkBytes);
  return static_cast<unsigned>((panel * kTileKeys + row) * kValueRow + swizzled * kChunkBytes);
}

// Where the tiles of a split are: what maps of tiles (tensor_map.py) call rows and pages.
struct Place {
  int row, page;

  // The same of another lane.
  __device__ __forceinline__ Place of_lane(int lane) const {
    return {__shfl_sync(kFullWarp, row, lane), __shfl_sync(kFullWarp, page, lane)};
  }
};

// What a value warp's products of a block take.
struct Fragments {
  unsigned v[kBlockTiles][4];
  unsigned weights[(kBlockTiles + 1) / 2][4];  // of two tiles each
  float2 rescale;
};

// work: SplitParts; `out` is not written if it is there.
extern "C" __global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg, long long head_tiles_divisor_arg,
                long long kv_heads_divisor_arg, long long sequences_divisor_arg,
                long long page_divisor_arg, const __grid_constant__ TensorMap k_map,
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

  const auto barrier = [&](int which) { return base + kBarriers + which * 8; };
#pragma unroll 1
  for (int which = warp; which < kBarrierCount; which += kWarps) {
    const int arrivals = which < kEmptyValues ? 1 : which < kSaid ? kValueWarps : which < kThere ? 1 : 2;
    if (is_elected()) mbarrier_init(barrier(which), arrivals);
  }
  if (warp == kSummingWarp && is_elected()) {
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
  }
  fence_barriers();
  const DecodeTask<kPaged> task(blockIdx.x / kRanks, static_cast<unsigned>(sequences_arg),
                                static_cast<unsigned>(kv_heads_arg),
                                static_cast<unsigned>(group_arg), Divisor(head_tiles_divisor_arg),
                                Divisor(kv_heads_divisor_arg), Divisor(sequences_divisor_arg),
                                cu_seqlens_q, lengths_k);
  __syncthreads();
  cluster_begin();

  const int split_begin = static_cast<int>(task.split) * kSplitKeys;
  // Not one after the other: the second's loads would wait for the first's.
  if (!task.has_query | (task.split > 0 & split_begin >= task.k_length)) return;
  let_next_grid_start();  // it waits for this one by itself
  const int left = task.k_length - split_begin;
  const int count = left < 0 ? 0 : left < kSplitKeys ? left : kSplitKeys;
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  const int blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  const int kv_head = static_cast<int>(task.kv_head);
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  // Who adds up the weights: with only one split every rank needs their sum.
  const int sums = work == nullptr ? kRanks : 1;
  const Divisor page_of(page_divisor_arg);
  const auto find = [&](int tile) {
    const int key = tile * kTileKeys;
    if constexpr (kPaged) {
      const unsigned number = static_cast<unsigned>(split_begin + key);
      const unsigned index = page_of(number);
      const int row = static_cast<int>(number - index * static_cast<unsigned>(page_size_arg));
      const int* table = block_table + task.sequence * table_stride;
      return Place{row, key < count ? table[index] : 0};
    }
    return Place{task.k_begin + split_begin + key, 0};
  };

  // Of four blocks of V, so many apart: eight lanes know the places of one's tiles.
  const auto find_values = [&](int block, int step) {
    return find((block + lane / 8 * step) * kBlockTiles + lane % 8);
  };
  const int first_column = rank * kColumns;
  const int panel = first_column / 64;
  const auto load_values = [&](int block, int stage, const Place& places, int first_lane) {
    const unsigned full = barrier(kThere + block);
    const unsigned to = base + kValueRing + stage * kValueStage;
    const int there = tiles - block * kBlockTiles;
    Place place[kBlockTiles];
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) place[t] = places.of_lane(first_lane + t);
    if (is_elected()) {
      mbarrier_arrive_expecting(
          full, static_cast<unsigned>((there < kBlockTiles ? there : kBlockTiles) * kValueBox));
#pragma unroll
      for (int t = 0; t < kBlockTiles; ++t) {
        if (t < there) {
          copy_box(to + t * kValueBox, &v_map, full, first_column % 64, place[t].row, panel,
                   kv_head, place[t].page);
        }
      }
    }
    __syncwarp();
  };
  const bool is_value_warp = warp < kValueWarps;
  const int key_warp = warp - kValueWarps;
  const bool is_key_warp = !is_value_warp && key_warp < kKeyWarps;
  const int first_tile = rank + kRanks * key_warp;  // a key warp's; then every kTileStep-th
  const int own_tiles = tiles > first_tile ? (tiles - first_tile + kTileStep - 1) / kTileStep : 0;
  const int own_scores = kScores + key_warp * kWarpTiles * kTileScores;
  Place later = {0, 0};  // of the blocks of V that a key warp asks for in the end
  constexpr int kAsked = 1, kQueryThere = 2, kReferences = 3;  // named barriers
  if (warp == kSummingWarp) {
    // What the barriers that other ranks write to wait for.
    const int there = tiles - lane * kBlockTiles;
    const int bytes = kTileKeys * kHeads * 2 + (rank < sums ? kTileSums : 0);
    if (there > 0) {
      mbarrier_arrive_expecting(
          barrier(kThere + lane),
          static_cast<unsigned>((there < kBlockTiles ? there : kBlockTiles) * bytes));
    }
    if (lane == 0) mbarrier_arrive_expecting(barrier(kSaid), tiles * kHeads * 4);
    cluster_wait_for_others();
  } else if (!is_key_warp) {
    // --- the beginning of 3: V -------------------------------------------------------------------
    const int issuer = is_value_warp ? warp : warp - kKeyWarps - 1;
    Place places = find_values(issuer, kIssuers);
    named_barrier(kAsked, 32 * (kKeyWarps + kIssuers));  // K is needed first
#pragma unroll 1
    for (int n = 0; issuer + n * kIssuers < kValueStages; ++n) {
      const int block = issuer + n * kIssuers;
      if (block >= blocks) break;
      if (n % 4 == 0 && n > 0) places = find_values(block, kIssuers);
      load_values(block, block, places, n % 4 * 8);
    }
    cluster_wait_for_others();
  } else {
    // --- 1: scores -------------------------------------------------------------------------------
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
    const Place places = find(first_tile + lane * kTileStep);  // lane i: of the i-th tile
    const unsigned ring = base + kKeyRing + key_warp * kKeyStages * kUnitBytes;
    const int full = kFullKeys + key_warp * kKeyStages;
    const auto load_keys = [&](int n) {
      if (n >= own_tiles * kUnits) return;
      const Place place = places.of_lane(n / kUnits);
      if (is_elected()) {
        const unsigned there = barrier(full + n % kKeyStages);
        mbarrier_arrive_expecting(there, kUnitBytes);
        copy_box(ring + n % kKeyStages * kUnitBytes, &k_map, there, 0, place.row,
                 n % kUnits * (kUnitDims / 64), kv_head, place.page);
      }
      __syncwarp();
    };
#pragma unroll 1
    for (int n = 0; n < kKeyStages; ++n) load_keys(n);
    // What the ring has no room for, to the L2.
#pragma unroll 1
    for (int n = kKeyStages; n < own_tiles * kUnits; ++n) {
      const Place place = places.of_lane(n / kUnits);
      if (is_elected()) {
        prefetch_box(&k_map, 0, place.row, n % kUnits * (kUnitDims / 64), kv_head, place.page);
      }
      __syncwarp();
    }
    named_barrier_arrive(kAsked, 32 * (kKeyWarps + kIssuers));
    later = find_values(kValueStages + key_warp, kReloaders);
    copy_async_wait_all();
    named_barrier(kQueryThere, 32 * kKeyWarps);
    unsigned query[kHeadDim / 32][4];  // B of two k16 steps each
#pragma unroll
    for (int d = 0; d < kHeadDim / 32; ++d) {
      load_matrices(query[d], base + kQuery + lane % 8 * kQueryRow + d * 64 + lane / 8 * 16);
    }
    cluster_wait_for_others();

#pragma unroll 1
    for (int n = 0; n < own_tiles; ++n) {
      float scores[4] = {};  // [keys g, g + 8][heads 2c, 2c + 1]
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int number = n * kUnits + unit;
        const int stage = number % kKeyStages;
        mbarrier_wait(barrier(full + stage), static_cast<unsigned>(number / kKeyStages % 2));
        unsigned a[kUnitDims / 16][4];
#pragma unroll
        for (int d = 0; d < kUnitDims / 16; ++d) {
          load_matrices(a[d], ring + stage * kUnitBytes + d / 4 * (kTileKeys * 128) +
                                  swizzled_offset<128>(lane % 16, d % 4 * 2 + lane / 16));
        }
        __syncwarp();
        load_keys(number + kKeyStages);
#pragma unroll
        for (int d = 0; d < kUnitDims / 16; ++d) {
          const unsigned(&b)[4] = query[(unit * kUnitDims + d * 16) / 32];
          mma_m16n8k16<Element>(scores, a[d], b[d % 2 * 2], b[d % 2 * 2 + 1]);
        }
      }
      const int tile = first_tile + n * kTileStep;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (tile * kTileKeys + g + e / 2 * 8 >= count) scores[e] = -kInfinity;
      }
      // For the same lane.
      shared_pair(memory, own_scores, n * 64 + lane) = make_float2(scores[0], scores[1]);
      shared_pair(memory, own_scores, n * 64 + 32 + lane) = make_float2(scores[2], scores[3]);
      const float one = largest_of_keys(scores, g);
      const float other = __shfl_xor_sync(kFullWarp, one, 4);
      const float2 largest = g % 2 == 0 ? make_float2(one, other) : make_float2(other, one);
      if (g < kRanks) {  // each lane to one rank
        const unsigned to = base + kTileMax + (tile * kMaxPitch + 2 * c) * 4;
        const unsigned its = static_cast<unsigned>(g);
        send_remote(shared_of(to, its), largest.x, largest.y, shared_of(barrier(kSaid), its));
      }
    }

    // --- 2: references, of one head by each warp and of one block by each lane ---------------------
    mbarrier_wait(barrier(kSaid), 0);
    float next = -kInfinity;  // the largest score up to this block
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) {
      const int tile = lane * kBlockTiles + t;
      if (tile < tiles) {
        next = fmaxf(next, shared_float(memory, kTileMax, tile * kMaxPitch + key_warp));
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float earlier = __shfl_sync(kFullWarp, next, lane - step);
      if (lane >= step) next = fmaxf(next, earlier);
    }
    const float earlier = __shfl_sync(kFullWarp, next, lane - 1);
    const float before = lane > 0 ? earlier : -kInfinity;
    const float reference = next == -kInfinity ? 0.0f : next;
    if (lane < blocks) {
      shared_float(memory, kRescale, lane * kHeads + key_warp) =
          exp2_approx(__fmul_rn(__fsub_rn(before, reference), scale_log2));
      shared_float(memory, kScaled, lane * kHeads + key_warp) = __fmul_rn(reference, scale_log2);
    }
    // Absent blocks change nothing, so the last lane knows it of all.
    if (lane == 31) shared_float(memory, kFinalMax, key_warp) = next;
  }
  if (warp < kWorkers) named_barrier(kReferences, 32 * kWorkers);

  const SplitParts<kHeadDim> parts = {work, sequences_arg, splits_arg, task.all_heads};
  float acc[4] = {};  // [columns g, g + 8][heads 2c, 2c + 1]
  if (is_key_warp) {
    // --- 2: weights ------------------------------------------------------------------------------
#pragma unroll 1
    for (int n = 0; n < own_tiles; ++n) {
      const int tile = first_tile + n * kTileStep;
      const int block = tile / kBlockTiles;
      const float2 of_heads = shared_pair(memory, kScaled, block * (kHeads / 2) + c);
      const float scaled[2] = {of_heads.x, of_heads.y};
      const float2 low = shared_pair(memory, own_scores, n * 64 + lane);
      const float2 high = shared_pair(memory, own_scores, n * 64 + 32 + lane);
      const float scores[4] = {low.x, low.y, high.x, high.y};
      const KeyWeights<Element> weights(scores, scaled, scale_log2, g);
      // Eight bytes a lane: four heads of key g from an even c, of key g + 8 from an odd one.
      const bool is_odd = c % 2 != 0;
      const unsigned got =
          __shfl_xor_sync(kFullWarp, is_odd ? weights.rounded[0] : weights.rounded[1], 1);
      const unsigned first = is_odd ? got : weights.rounded[0];
      const unsigned second = is_odd ? weights.rounded[1] : got;
      const int key = tile * kTileKeys + g + (is_odd ? 8 : 0);
      const unsigned to = base + kWeights + key * (kHeads * 2) + c / 2 * 8;
      const unsigned its = barrier(kThere + block);
#pragma unroll
      for (unsigned r = 0; r < kRanks; ++r) {
        send_remote(shared_of(to, r), first, second, shared_of(its, r));
      }
      const unsigned to_sums =
          base + kSums + tile * kTileSums + KeyWeights<Element>::kept_by(g, c) * 8;
#pragma unroll 1
      for (unsigned r = 0; r < static_cast<unsigned>(sums); ++r) {
        send_remote(shared_of(to_sums, r), weights.pairs[0], weights.pairs[1], shared_of(its, r));
      }
    }
    // --- 3: V that the ring had no room for --------------------------------------------------------
#pragma unroll 1
    for (int n = 0; key_warp < kReloaders; ++n) {
      const int block = kValueStages + key_warp + n * kReloaders;
      if (block >= blocks) break;
      if (n % 4 == 0 && n > 0) later = find_values(block, kReloaders);
      const int stage = block % kValueStages;
      mbarrier_wait(barrier(kEmptyValues + stage), (block / kValueStages - 1) % 2);
      load_values(block, stage, later, n % 4 * 8);
    }
  } else if (is_value_warp) {
    // --- 3: values -------------------------------------------------------------------------------
    const unsigned rows = value_offset(warp, lane % 8 + lane / 16 * 8, lane / 8 % 2);
    int stage = 0;
    const auto load = [&](Fragments& fragments, int block) {
      mbarrier_wait(barrier(kThere + block), 0);
      const unsigned at = base + kValueRing + stage * kValueStage;
      // What follows the last key may be anything, and zero times that is not always zero.
      const int absent = count - (tiles - 1) * kTileKeys;  // first such row of the last tile
      if (block == blocks - 1 && absent < kTileKeys) {
        if (lane / 2 >= absent) {
          const int last = stage * kValueStage + (tiles - 1) % kBlockTiles * kValueBox;
          *reinterpret_cast<uint4*>(memory + kValueRing + last +
                                    value_offset(warp, lane / 2, lane % 2)) = make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
      }
      const unsigned weights = base + kWeights + block * kBlockKeys * (kHeads * 2);
#pragma unroll
      for (int t = 0; t < kBlockTiles; ++t) {
        load_matrices_transposed(fragments.v[t], at + t * kValueBox + rows);
        if (t % 2 == 0 && t + 1 < kBlockTiles) {
          load_matrices_transposed(fragments.weights[t / 2],
                                   weights + (t * kTileKeys + lane) * (kHeads * 2));
        } else if (t % 2 == 0) {
          unsigned last[2];
          load_two_transposed(last, weights + (t * kTileKeys + lane % 16) * (kHeads * 2));
          fragments.weights[t / 2][0] = last[0];
          fragments.weights[t / 2][1] = last[1];
        }
      }
      fragments.rescale = shared_pair(memory, kRescale, block * (kHeads / 2) + c);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier(kEmptyValues + stage));
      if (++stage == kValueStages) stage = 0;
    };
    // The products of a block, and then the fragments of the block after next in their place.
    const auto multiply = [&](Fragments& fragments, int block) {
      const int present = tiles - block * kBlockTiles;
      const float2 rescale = fragments.rescale;
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = __fmul_rn(acc[e], e % 2 == 0 ? rescale.x : rescale.y);
#pragma unroll
      for (int t = 0; t < kBlockTiles; ++t) {
        if (t < present) {
          const unsigned(&weights)[4] = fragments.weights[t / 2];
          mma_m16n8k16<Element>(acc, fragments.v[t], weights[t % 2 * 2], weights[t % 2 * 2 + 1]);
        }
      }
      if (block + 2 < blocks) load(fragments, block + 2);
    };
    Fragments even, odd;
    if (blocks > 0) load(even, 0);
    if (blocks > 1) load(odd, 1);
#pragma unroll 1
    for (int block = 0; block < blocks; block += 2) {
      multiply(even, block);
      if (block + 1 < blocks) multiply(odd, block + 1);
    }
  } else if (warp != kSummingWarp) {
    // --- 3: that, to the L2 ----------------------------------------------------------------------
    Place places = {0, 0};
#pragma unroll 1
    for (int n = 0; kValueStages + warp - kWorkers + n * kPrefetchingWarps < blocks; ++n) {
      const int block = kValueStages + warp - kWorkers + n * kPrefetchingWarps;
      if (n % 4 == 0) places = find_values(block, kPrefetchingWarps);
      if (n == 0) mbarrier_wait(barrier(kSaid), 0);  // no rank needs more of K
#pragma unroll 1
      for (int t = 0; t < kBlockTiles && block * kBlockTiles + t < tiles; ++t) {
        const Place place = places.of_lane(n % 4 * 8 + t);
        if (is_elected()) {
          prefetch_box(&v_map, first_column % 64, place.row, panel, kv_head, place.page);
        }
      }
      __syncwarp();
    }
  } else if (rank < sums) {
    // --- 2, ended: one warp adds up the weights, lane 4 h + q the pairs 4 t + q of head h ------------
    float sum = 0.0f;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      mbarrier_wait(barrier(kThere + block), 0);
      sum = __fmul_rn(sum, shared_float(memory, kRescale, block * kHeads + g));
#pragma unroll
      for (int t = 0; t < kBlockTiles; ++t) {
        const int tile = block * kBlockTiles + t;
        if (tile < tiles) {
          const float2 pairs = shared_pair(memory, kSums, tile * 32 + lane);
          sum = __fadd_rn(__fadd_rn(sum, pairs.x), pairs.y);
        }
      }
    }
    const float largest = shared_float(memory, kFinalMax, g);
    const bool writes = rank == 0 && g < task.heads;  // all ranks that add them up know
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
