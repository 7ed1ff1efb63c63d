// Attention for one query a sequence, on Hopper: many blocks for each sequence, the bits of
// attention_generic.cu, whose head defines the result.
//
// Splits alone do not fill the GPU without becoming so short that a prefill would have to merge all
// the time. So a split is shared by a cluster of kRanks thread blocks in a way that leaves every
// sum alone:
//
//   1. Scores. A score is a sum over the head dim and depends on no other key, so the ranks take
//      the split's key blocks in turn. Keys are the rows of the tensor core's tile and the heads of
//      a KV group its 8 columns, which is S transposed: the same products in the same order.
//   2. Maxima. The largest score of each block goes to all ranks. Each of them then knows the
//      running maximum at every block, and so what every weight is relative to.
//   3. Weights. Each rank makes those of its own keys and sends them to all ranks, and their sums
//      by pairs to the rank that adds them up, in the definition's order.
//   4. Values. A column of the output depends on no other column, so each rank takes kColumns of
//      them and walks over all blocks of the split, ascending. The first of them have been on their
//      way to shared memory since the beginning, the rest to the L2 since the last of K were asked
//      for: memory goes on working while the ranks talk to each other.
//
// The splits' parts are merged by attention_combine.cu, unless there is only one split.
//
// Schedule: kKeyWarps warps do 1 to 3, each with a ring of its own for 16 keys x 64 dims; one value
// warp for every 16 columns does 4, with a ring of its own for whole key blocks.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "keys.cuh"
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

constexpr int kRanks = kHeadDim == 64 ? 4 : 8;   // thread blocks of a cluster
constexpr int kColumns = kHeadDim / kRanks;      // of the output, for one rank
constexpr int kValueWarps = kColumns / 16;
constexpr int kKeyWarps = 8;
constexpr int kWarps = kValueWarps + kKeyWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kSteps = kBlockKeys / 16;          // k16 steps, or 16-key tiles, of a block
constexpr int kRankBlocks = (kSplitBlocks + kRanks - 1) / kRanks;
constexpr int kRankTiles = kRankBlocks * kSteps;
constexpr int kWarpTiles = (kRankTiles + kKeyWarps - 1) / kKeyWarps;
constexpr int kUnits = kHeadDim / 64;            // of 64 dims, in which a tile is copied
constexpr int kUnitBytes = 16 * 128;
constexpr int kKeyStages = kHeadDim == 64 ? 2 : 3;
constexpr int kValueBlocks = kHeadDim == 256 ? 4 : 5;  // of a value warp's ring
constexpr int kValueBytes = kBlockKeys * 32;           // 16 columns of a block
constexpr int kKeySlots = (kBlockKeys + 31) / 32;      // keys of a block for each lane
constexpr int kOwnHeads = kHeads / kRanks;             // whose weights one rank adds up
constexpr int kPairs = kSplitKeys / 2;

// Shared memory, in bytes from its beginning.
constexpr int kKeyRing = 0;
constexpr int kValueRing = kKeyRing + kKeyWarps * kKeyStages * kUnitBytes;
constexpr int kWeights = kValueRing + kValueWarps * kValueBlocks * kValueBytes;  // [key][head]
constexpr int kPairSums = kWeights + kSplitKeys * kHeads * 2;   // [own head][pair], float
constexpr int kTileMax = kPairSums + kOwnHeads * kPairs * 4;    // [own tile][head], float
constexpr int kBlockMax = kTileMax + kRankTiles * kHeads * 4;   // [block][head], float
constexpr int kRescale = kBlockMax + kSplitBlocks * kHeads * 4;
constexpr int kScaled = kRescale + kSplitBlocks * kHeads * 4;
constexpr int kInverse = kScaled + kSplitBlocks * kHeads * 4;   // [head], float
constexpr int kFinalMax = kInverse + kHeads * 4;
constexpr int kSharedBytes = kFinalMax + kHeads * 4;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kColumns % 16 == 0 && kHeads % kRanks == 0, "ranks share columns and heads evenly");

// Where a sequence's keys lie.
struct Keys {
  const int* table;     // this sequence's row of the block table (paged)
  unsigned page_size;   // (paged)
  long long first_row;  // of the sequence in the packed tensor (contiguous)

  // The page of a key, to be asked for ahead of time; 0 where there is nothing to ask.
  __device__ __forceinline__ int page(int key, bool present) const {
    if constexpr (kPaged) {
      return present ? table[static_cast<unsigned>(key) / page_size] : 0;
    }
    return 0;
  }

  // A key's offset from its head's first element, its page being known.
  __device__ __forceinline__ long long offset(int key, int page, const Strides& strides) const {
    if constexpr (kPaged) {
      return page * strides.page + static_cast<unsigned>(key) % page_size * strides.row;
    }
    return (first_row + key) * strides.row;
  }
};

// work: [sequences, splits, heads, kHeadDim] and then [sequences, splits, heads, 5]; `out` is not
// written if it is there.
extern "C" __global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 2)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg) {
  extern __shared__ __align__(128) unsigned char memory[];
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
  const int count = left < kSplitKeys ? left : kSplitKeys;
  const int blocks = (count + kBlockKeys - 1) / kBlockKeys;

  cluster_arrive();
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  Keys keys;
  keys.table = kPaged ? block_table + task.sequence * table_stride : nullptr;
  keys.page_size = static_cast<unsigned>(page_size_arg);
  keys.first_row = task.k_begin;

  // --- 4, begun: a value warp's first blocks of V ----------------------------------------------
  const bool is_value_warp = warp < kValueWarps;
  const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
  const int first_column = rank * kColumns + warp * 16;
  const unsigned short* v_columns =
      v + task.kv_head * v_strides.head + first_column + lane % 2 * 8;
  const unsigned v_ring = base + kValueRing + warp * kValueBlocks * kValueBytes;
  int pages[kKeySlots];  // of the next block to be copied; lane t has the keys t, t + 32, ...
  const auto find_values = [&](int block) {
#pragma unroll
    for (int s = 0; s < kKeySlots; ++s) {
      const int key = block * kBlockKeys + s * 32 + lane;
      pages[s] = keys.page(split_begin + key, s * 32 + lane < kBlockKeys && key < count);
    }
  };
  // Starts copying a block, zeros for absent keys, and looks up the next one.
  const auto copy_values = [&](int block) {
    if (block < blocks) {
      const unsigned slot = v_ring + block % kValueBlocks * kValueBytes;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int row = step * 16 + lane / 2;
        const int key = block * kBlockKeys + row;
        const int page = __shfl_sync(kFullWarp, pages[step / 2], row % 32);
        const bool present = key < count;
        const unsigned short* source =
            present ? v_columns + keys.offset(split_begin + key, page, v_strides) : v_columns;
        copy_async(slot + row * 32 + (lane % 2 ^ row / 4 % 2) * 16, source, present);
      }
      find_values(block + 1);
    }
    copy_async_commit();
  };
  if (is_value_warp) {
    find_values(0);
    for (int block = 0; block < kValueBlocks; ++block) copy_values(block);
  }

  // --- 1: scores ---------------------------------------------------------------------------------
  // Key warp w has the rank's tiles w, w + kKeyWarps, ...; tile t is step t % kSteps of the rank's
  // block t / kSteps, which is the split's block rank + kRanks * (t / kSteps).
  const int key_warp = warp - kValueWarps;
  const auto tile_of = [&](int i) { return key_warp + kKeyWarps * i; };
  const auto block_of = [&](int i) { return rank + kRanks * (tile_of(i) / kSteps); };
  const auto first_key_of = [&](int i) {
    return block_of(i) * kBlockKeys + tile_of(i) % kSteps * 16;
  };
  float scores[kWarpTiles][4] = {};
  if (!is_value_warp) {
    unsigned q_fragments[kHeadDim / 16][2];
    task.load_query<kHeadDim>(q_fragments, q, q_row_stride, q_head_stride, lane);

    const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
    const unsigned short* k_chunks = k + task.kv_head * k_strides.head + lane % 8 * 8;
    const unsigned k_ring = base + kKeyRing + key_warp * kKeyStages * kUnitBytes;
    long long tile_offset = 0;  // of the tile that is being copied; lane r has its key r
    const auto copy_keys = [&](int n) {
      const int i = n / kUnits;
      const int unit = n % kUnits;
      if (i < kWarpTiles && first_key_of(i) < count) {
        if (unit == 0) {
          const int key = first_key_of(i) + lane % 16;
          const bool present = key < count;
          const int page = keys.page(split_begin + key, present);
          tile_offset = present ? keys.offset(split_begin + key, page, k_strides) : 0;
        }
        const unsigned slot = k_ring + n % kKeyStages * kUnitBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = j * 4 + lane / 8;
          const long long offset = __shfl_sync(kFullWarp, tile_offset, row);
          const bool present = first_key_of(i) + row < count;
          const unsigned short* source = present ? k_chunks + offset + unit * 64 : k_chunks;
          copy_async(slot + swizzled_offset<128>(row, lane % 8), source, present);
        }
      }
      copy_async_commit();
    };
    const unsigned short* v_head = v + task.kv_head * v_strides.head;
    const auto prefetch_values = [&]() {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const int key = first_key_of(i) + lane;
        if (lane < 16 && key < count) {
          const int page = keys.page(split_begin + key, true);
          prefetch_to_l2<kHeadDim * 2>(v_head + keys.offset(split_begin + key, page, v_strides));
        }
      }
    };
#pragma unroll
    for (int n = 0; n < kKeyStages; ++n) copy_keys(n);
#pragma unroll
    for (int n = 0; n < kWarpTiles * kUnits; ++n) {
      if (n == kWarpTiles * kUnits - kKeyStages) prefetch_values();  // all of K is on its way
      const int i = n / kUnits;
      copy_async_wait<kKeyStages - 1>();
      __syncwarp();
      if (first_key_of(i) < count) {
        const unsigned slot = k_ring + n % kKeyStages * kUnitBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          unsigned a[4];
          load_matrices(a, slot + swizzled_offset<128>(lane % 16, 2 * j + lane / 16));
          const unsigned(&b)[2] = q_fragments[n % kUnits * 4 + j];
          mma_m16n8k16<Element>(scores[i], a, b[0], b[1]);
        }
      }
      __syncwarp();
      copy_keys(n + kKeyStages);
    }

#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first_key_of(i) + g + e / 2 * 8 >= count) scores[i][e] = -kInfinity;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = largest_of_keys(scores[i][h], scores[i][h + 2]);
        if (g == 0 && tile_of(i) < kRankTiles) {
          shared_float(memory, kTileMax, tile_of(i) * kHeads + 2 * c + h) = largest;
        }
      }
    }
  }
  __syncthreads();

  // --- 2: maxima ---------------------------------------------------------------------------------
  cluster_wait();  // for the others to have begun: before that they have no shared memory
  for (int item = thread; item < kRanks * kRankBlocks * kHeads; item += kThreads) {
    const int head = item % kHeads;
    const int own = item / kHeads % kRankBlocks;
    const int block = rank + kRanks * own;
    if (block < blocks) {
      float largest = -kInfinity;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        largest = fmaxf(largest,
                        shared_float(memory, kTileMax, (own * kSteps + step) * kHeads + head));
      }
      const unsigned there = shared_of(base + kBlockMax + (block * kHeads + head) * 4,
                                       static_cast<unsigned>(item / kHeads / kRankBlocks));
      store_remote(there, largest);
    }
  }
  cluster_sync();
  for (int item = thread; item < blocks * kHeads; item += kThreads) {
    const int head = item % kHeads;
    const int block = item / kHeads;
    float before = -kInfinity;
    for (int b = 0; b < block; ++b) {
      before = next_reference(before, shared_float(memory, kBlockMax, b * kHeads + head),
                              scale_log2);
    }
    const float next = next_reference(before, shared_float(memory, kBlockMax, item), scale_log2);
    const float reference = next == -kInfinity ? 0.0f : next;
    shared_float(memory, kRescale, item) =
        exp2_approx(__fmul_rn(__fsub_rn(before, reference), scale_log2));
    shared_float(memory, kScaled, item) = __fmul_rn(reference, scale_log2);
    if (block == blocks - 1) shared_float(memory, kFinalMax, head) = next;
  }
  if (blocks == 0 && thread < kHeads) shared_float(memory, kFinalMax, thread) = -kInfinity;
  __syncthreads();

  // --- 3: weights --------------------------------------------------------------------------------
  if (!is_value_warp) {
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const int block = block_of(i);
      if (tile_of(i) < kRankTiles && block < blocks) {
        const float scaled[2] = {shared_float(memory, kScaled, block * kHeads + 2 * c),
                                 shared_float(memory, kScaled, block * kHeads + 2 * c + 1)};
        float pair[2][2];  // [keys g, keys g + 8][head]
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[i][e] = exp2_approx(__fmaf_rn(scores[i][e], scale_log2, -scaled[e % 2]));
          // Keys 2q and 2q + 1 are in lanes whose g differ in the last bit.
          const float other = __shfl_xor_sync(kFullWarp, scores[i][e], 4);
          pair[e / 2][e % 2] = __fadd_rn(scores[i][e], other);
        }
        const unsigned there = base + kWeights + (first_key_of(i) + g) * (kHeads * 2) + c * 4;
        const unsigned packed[2] = {Element::pack(scores[i][0], scores[i][1]),
                                    Element::pack(scores[i][2], scores[i][3])};
        for (unsigned r = 0; r < kRanks; ++r) {
          const unsigned remote = shared_of(there, r);
          store_remote(remote, packed[0]);
          store_remote(remote + 8 * kHeads * 2, packed[1]);
        }
        // Of the two lanes that have a pair, the even one sends head 2c's, the odd one the other's.
        const int head = 2 * c + g % 2;
        const int first_pair = (first_key_of(i) / 8) * 4 + g / 2;
        const unsigned sums = shared_of(
            base + kPairSums + (head / kRanks * kPairs + first_pair) * 4,
            static_cast<unsigned>(head % kRanks));
        store_remote(sums, g % 2 == 0 ? pair[0][0] : pair[0][1]);
        store_remote(sums + 16, g % 2 == 0 ? pair[1][0] : pair[1][1]);
      }
    }
  }
  cluster_sync();

  let_next_grid_start();

  // --- 3, ended: the last key warp adds up the weights of this rank's heads ----------------------
  const long long part = static_cast<long long>(task.sequence) * splits_arg + task.split;
  if (warp == kWarps - 1) {
    const int own = lane / 4 % kOwnHeads;
    const int head = own * kRanks + rank;
    float sum = 0.0f;
    for (int block = 0; block < blocks; ++block) {
      sum = __fmul_rn(sum, shared_float(memory, kRescale, block * kHeads + head));
#pragma unroll
      for (int t = 0; t < kBlockKeys / 8; ++t) {
        const int pair = (block * (kBlockKeys / 8) + t) * 4 + c;
        sum = __fadd_rn(sum, shared_float(memory, kPairSums, own * kPairs + pair));
      }
    }
    const float largest = shared_float(memory, kFinalMax, head);
    const bool present = lane < 4 * kOwnHeads && head < task.heads;
    if (work != nullptr) {
      const long long parts = sequences_arg * splits_arg * task.all_heads;
      float* mine = work + parts * kHeadDim + (part * task.all_heads + task.first_head + head) * 5;
      if (present) {
        mine[1 + c] = sum;
        if (c == 0) mine[0] = largest;
      }
    } else {
      const float two = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));
      const float total = __fadd_rn(two, __shfl_xor_sync(kFullWarp, two, 2));
      // Without room for parts, more keys than a split have no result, and the row says so.
      const bool impossible = task.k_length > kSplitKeys;
      const float inverse = inverse_of(total, impossible);
      // The four lanes of a head send it to all ranks.
      if (lane < 4 * kOwnHeads) {
        for (unsigned r = static_cast<unsigned>(c); r < kRanks; r += 4) {
          store_remote(shared_of(base + kInverse + head * 4, r), inverse);
        }
      }
      if (present && c == 0 && lse != nullptr) {
        lse[task.q_row * task.all_heads + task.first_head + head] =
            log_sum_exp(largest, total, scale_arg, impossible);
      }
    }
  }

  // --- 4: values ---------------------------------------------------------------------------------
  float acc[4] = {};  // [columns g, g + 8][heads 2c, 2c + 1]
  if (is_value_warp) {
    for (int block = 0; block < blocks; ++block) {
      copy_async_wait<kValueBlocks - 1>();
      __syncwarp();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc[e] = __fmul_rn(acc[e],
                           shared_float(memory, kRescale, block * kHeads + 2 * c + e % 2));
      }
      const unsigned slot = v_ring + block % kValueBlocks * kValueBytes;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned a[4], b[2];
        const int row = step * 16 + lane % 8 + lane / 16 * 8;
        load_matrices_transposed(a, slot + row * 32 + (lane / 8 % 2 ^ row / 4 % 2) * 16);
        const int key = block * kBlockKeys + step * 16 + lane % 16;
        load_two_transposed(b, base + kWeights + key * (kHeads * 2));
        mma_m16n8k16<Element>(acc, a, b[0], b[1]);
      }
      __syncwarp();
      copy_values(block + kValueBlocks);
    }
  }
  if (work == nullptr) cluster_sync();  // for the inverses
  if (!is_value_warp) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int head = 2 * c + e % 2;
    const int column = first_column + g + e / 2 * 8;
    if (head < task.heads) {
      if (work != nullptr) {
        work[(part * task.all_heads + task.first_head + head) * kHeadDim + column] = acc[e];
      } else {
        const float value = __fmaf_rn(acc[e], shared_float(memory, kInverse, head), 0.0f);
        out[task.q_row * out_row_stride + (task.first_head + head) * out_head_stride + column] =
            static_cast<unsigned short>(Element::pack(value, 0.0f));
      }
    }
  }
}
