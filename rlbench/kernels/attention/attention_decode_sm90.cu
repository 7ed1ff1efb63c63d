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
//      them and walks over all blocks of the split, ascending. The first of V have been on their way
//      to shared memory since the beginning, the rest to the L2 since the last of K were asked for:
//      memory goes on working while the ranks talk to each other.
//
// The splits' parts are merged by attention_combine.cu, unless there is only one split.
//
// Schedule: kKeyWarps warps do 1, each with a ring of its own for 16 keys x 64 dims; one value warp
// for every 16 columns does 3, with a ring of its own for 32 keys; all do 2. Loops are rolled up:
// between other layers' kernels the code comes from memory like everything else, and nothing is as
// slow as instructions that are needed once.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "row_end.cuh"
#include "softmax.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), RANKS (thread
// blocks of a cluster), SHARED_BYTES (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr int kSplitKeys = kSplitBlocks * kBlockKeys;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

constexpr int kRanks = RANKS;
constexpr int kColumns = kHeadDim / kRanks;      // of the output, for one rank
constexpr int kValueWarps = kColumns / 16;
constexpr int kKeyWarps = 8;
constexpr int kWarps = kValueWarps + kKeyWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kSummingWarp = kWarps - 1;         // a key warp
constexpr int kSteps = kBlockKeys / 16;          // k16 steps of a block
constexpr int kTileStep = kRanks * kKeyWarps;    // from one of a warp's tiles of 16 keys to its next
constexpr int kChunks = kHeadDim / 8;            // of a row
constexpr int kUnits = kHeadDim / 64;            // of 64 dims, in which a tile is copied
constexpr int kUnitBytes = 16 * 128;
constexpr int kTileBytes = 16 * kHeads * 4;      // of its scores
constexpr int kKeyStages = 4;                    // units
constexpr int kGroupKeys = 32;                   // in which V is copied
constexpr int kGroupBytes = kGroupKeys * 32;     // 16 columns
constexpr int kValueStages = kValueWarps <= 2 ? 32 : 64 / kValueWarps;  // groups

// Shared memory, in bytes from its beginning.
constexpr int kKeyRing = 0;
constexpr int kValueRing = kKeyRing + kKeyWarps * kKeyStages * kUnitBytes;
constexpr int kPairs = kValueRing + kValueWarps * kValueStages * kGroupBytes;
constexpr int kPairBytes = 2 * kHeads * 4;       // of two keys: scores, then weights and their sums
constexpr int kQuery = kPairs + kSplitKeys / 2 * kPairBytes;
constexpr int kQueryRow = kHeadDim * 2 + 16;     // so that heads are in different banks
constexpr int kBlockMax = kQuery + kHeads * kQueryRow;          // [block][head], float
constexpr int kRescale = kBlockMax + kSplitBlocks * kHeads * 4;
constexpr int kScaled = kRescale + kSplitBlocks * kHeads * 4;
constexpr int kInverse = kScaled + kSplitBlocks * kHeads * 4;   // [head], float
constexpr int kFinalMax = kInverse + kHeads * 4;
constexpr int kSent = kFinalMax + kHeads * 4;    // the barrier
constexpr int kSharedBytes = kSent + 8;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kColumns % 16 == 0, "ranks share columns evenly");
static_assert(kSplitKeys % kGroupKeys == 0, "groups come out even");
static_assert(kHeads * kChunks <= 32 * kKeyWarps, "one chunk of Q for a lane");

// Where the weights of a pair of keys are, [key][head], and their sums, [head] (float). Which of them
// comes first alternates, so that ldmatrix finds the weights of 8 keys in different banks; it is the
// same for a pair that is a multiple of four pairs on.
__device__ __forceinline__ int weights_of(int pair) {
  return kPairs + pair * kPairBytes + pair / 2 % 2 * (kPairBytes / 2);
}
__device__ __forceinline__ int sums_of(int pair) {
  return kPairs + pair * kPairBytes + (1 - pair / 2 % 2) * (kPairBytes / 2);
}

// The weight of a score, relative to what has been scaled already.
__device__ __forceinline__ float weight(float score, float scale_log2, float scaled, bool present) {
  const float exponential = exp2_approx(__fmaf_rn(score, scale_log2, -scaled));
  return present ? exponential : 0.0f;
}

// Where the keys of a split lie that one lane looks up, each so many after the one before.
struct Keys {
  const int* table;       // the sequence's row of the block table (paged)
  unsigned page_size, page_step, row_step;  // (paged) the last two: from one key to the next
  unsigned index, row;    // (paged) the next key's place in the table and in its page
  int page;               // (paged) of the next key
  long long packed_row;   // of the next key (packed)
  int key, step, count;   // the next key; keys from one to the next; of all that there are

  __device__ __forceinline__ Keys(int first, int step, int count, int split_begin,
                                  long long split_row, const int* table, unsigned page_size)
      : table(table), page_size(page_size), packed_row(split_row + first), key(first), step(step),
        count(count) {
    if constexpr (kPaged) {
      page_step = static_cast<unsigned>(step) / page_size;
      row_step = static_cast<unsigned>(step) - page_step * page_size;
      const unsigned number = static_cast<unsigned>(split_begin + first);
      index = number / page_size;
      row = number - index * page_size;
      page = key < count ? table[index] : 0;
    }
  }

  // The next key's offset from its head's first element; then looks up the one after it, so that
  // its page is there when it is needed. 0 for a key that is absent.
  __device__ __forceinline__ long long next(const Strides& strides) {
    const bool present = key < count;
    key += step;
    if constexpr (kPaged) {
      const long long offset = page * strides.page + row * strides.row;
      index += page_step;
      row += row_step;
      if (row >= page_size) {
        row -= page_size;
        ++index;
      }
      page = key < count ? table[index] : 0;
      return present ? offset : 0;
    }
    const long long offset = packed_row * strides.row;
    packed_row += step;
    return present ? offset : 0;
  }
};

// work: [sequences, splits, heads, kHeadDim] and then [sequences, splits, heads, 5]; `out` is not
// written if it is there.
extern "C" __global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 1)
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
  const int count = left < 0 ? 0 : left < kSplitKeys ? left : kSplitKeys;
  const int blocks = (count + kBlockKeys - 1) / kBlockKeys;

  const unsigned sent = base + kSent;
  if (thread == 0) {
    mbarrier_init(sent, 1);
    mbarrier_arrive_expecting(sent, static_cast<unsigned>((count + 15) / 16) * kTileBytes);
  }
  __syncwarp();
  cluster_begin();
  let_next_grid_start();  // it waits for this one by itself
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  const int* table = kPaged ? block_table + task.sequence * table_stride : nullptr;
  const auto keys_of = [&](int first, int step) {
    return Keys(first, step, count, split_begin, task.k_begin + static_cast<long long>(split_begin),
                table, static_cast<unsigned>(page_size_arg));
  };
  const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
  const unsigned short* v_head = v + task.kv_head * v_strides.head;

  // --- 3, begun: a value warp's first groups of V ----------------------------------------------
  const bool is_value_warp = warp < kValueWarps;
  const int first_column = rank * kColumns + warp * 16;
  const int groups = (blocks * kBlockKeys + kGroupKeys - 1) / kGroupKeys;
  const unsigned v_ring = base + kValueRing + warp * kValueStages * kGroupBytes;
  // Lane t looks up key t of each group; or, in a key warp, key t % 16 of each of its tiles.
  const int key_warp = warp - kValueWarps;
  const int first_tile = rank + kRanks * key_warp;
  Keys keys = keys_of(is_value_warp ? lane : first_tile * 16 + lane % 16,
                      is_value_warp ? kGroupKeys : kTileStep * 16);
  // Starts copying a group, zeros for absent keys.
  const auto copy_values = [&](int group) {
    if (group < groups) {
      const long long own = keys.next(v_strides);
      const unsigned short* columns = v_head + first_column + lane % 2 * 8;
      const unsigned slot = v_ring + group % kValueStages * kGroupBytes + lane / 2 * 32 +
                            (lane % 2 ^ lane / 8 % 2) * kChunkBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 16 + lane / 2;
        const long long offset = __shfl_sync(kFullWarp, own, row);
        copy_async(slot + half * 512, columns + offset, group * kGroupKeys + row < count);
      }
    }
    copy_async_commit();
  };
  if (is_value_warp) {
#pragma unroll 1
    for (int group = 0; group < kValueStages; ++group) copy_values(group);
    cluster_wait_for_others();
  } else {
    // --- 1: scores -------------------------------------------------------------------------------
    // A warp's tiles are first_tile, first_tile + kTileStep, ...
    const int behind = (count + 15) / 16 - first_tile;
    const int units = behind > 0 ? (behind + kTileStep - 1) / kTileStep * kUnits : 0;
    const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
    const unsigned short* k_head = k + task.kv_head * k_strides.head;
    const unsigned k_ring = base + kKeyRing + key_warp * kKeyStages * kUnitBytes;
    const int head = (key_warp * 32 + lane) / kChunks;  // whose chunk of Q this lane copies
    const int chunk = lane % kChunks;
    if (head < kHeads) {
      const bool present = head < task.heads;
      const unsigned short* row = q + task.q_row * q_row_stride +
                                  (task.first_head + (present ? head : 0)) * q_head_stride;
      copy_async(base + kQuery + head * kQueryRow + chunk * kChunkBytes, row + chunk * 8, present);
    }
    copy_async_commit();
    const unsigned short* rows[4];  // that this lane copies of a tile, 4 j + lane / 8
    float scores[4];                // [keys g, g + 8][heads 2c, 2c + 1]
    // Units are asked for kKeyStages ahead of where they are needed, so the first of them before 0.
#pragma unroll 1
    for (int n = -kKeyStages; n < units || n == 0; ++n) {
      const int unit = n % kUnits;
      if (n == 0) {
        copy_async_wait<kKeyStages>();
        named_barrier(1, 32 * kKeyWarps);  // Q is there
        cluster_wait_for_others();
        if (units == 0) break;
      }
      if (n >= 0) {
        copy_async_wait<kKeyStages - 1>();
        __syncwarp();
        if (unit == 0) {
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[e] = 0.0f;
        }
        const unsigned slot = k_ring + n % kKeyStages * kUnitBytes;
        const unsigned query = base + kQuery + lane % 8 * kQueryRow + unit * 128 + lane / 8 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned b[4];
          load_matrices(b, query + half * 64);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            unsigned a[4];
            load_matrices(a, slot + swizzled_offset<128>(lane % 16, 4 * half + 2 * j + lane / 16));
            mma_m16n8k16<Element>(scores, a, b[2 * j], b[2 * j + 1]);
          }
        }
        __syncwarp();
      }
      const int next = n + kKeyStages;
      if (next < units) {
        const int tile = first_tile + next / kUnits * kTileStep;
        if (next % kUnits == 0) {
          const long long own = keys.next(k_strides);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            rows[j] = k_head + lane % 8 * 8 + __shfl_sync(kFullWarp, own, j * 4 + lane / 8);
          }
        }
        const unsigned slot = k_ring + next % kKeyStages * kUnitBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = j * 4 + lane / 8;
          copy_async(slot + swizzled_offset<128>(row, lane % 8), rows[j], tile * 16 + row < count);
          rows[j] += 64;
        }
      }
      copy_async_commit();
      if (n >= 0 && unit == kUnits - 1) {
        const int tile = first_tile + n / kUnits * kTileStep;
        const unsigned there = base + kPairs + (tile * 16 + g) * (kHeads * 4) + c * 8;
#pragma unroll 1
        for (unsigned r = 0; r < kRanks; ++r) {
          const unsigned remote = shared_of(there, r), barrier = shared_of(sent, r);
          send_remote(remote, scores[0], scores[1], barrier);
          send_remote(remote + 8 * kHeads * 4, scores[2], scores[3], barrier);
        }
      }
      if (next == units - 1) {
        // All of K is on its way, and V as far as the rings reach: the rest to the L2.
        Keys ahead = keys_of(kValueStages * kGroupKeys + first_tile * 32 + lane, kTileStep * 32);
#pragma unroll 1
        while (ahead.key < count) {
          prefetch_to_l2<kHeadDim * 2>(v_head + ahead.next(v_strides));
        }
        __syncwarp();
      }
    }
  }
  mbarrier_wait_for_sent(sent, 0);

  // --- 2: weights --------------------------------------------------------------------------------
#pragma unroll 1
  for (int block = warp; block < blocks; block += kWarps) {
    float2 largest = make_float2(-kInfinity, -kInfinity);
#pragma unroll
    for (int key = 0; key < kBlockKeys; key += 8) {
      const int mine = block * kBlockKeys + key + g;
      if (mine < count) {
        const float2 scores =
            *reinterpret_cast<const float2*>(memory + kPairs + mine * (kHeads * 4) + c * 8);
        largest = make_float2(fmaxf(largest.x, scores.x), fmaxf(largest.y, scores.y));
      }
    }
    largest = make_float2(largest_of_keys(largest.x, -kInfinity),
                          largest_of_keys(largest.y, -kInfinity));
    if (g == 0) {
      *reinterpret_cast<float2*>(memory + kBlockMax + (block * kHeads + 2 * c) * 4) = largest;
    }
  }
  if (blocks == 0 && thread < kHeads) shared_float(memory, kFinalMax, thread) = -kInfinity;
  __syncthreads();
#pragma unroll 1
  for (int item = thread; item < blocks * kHeads; item += kThreads) {
    float before = -kInfinity;
#pragma unroll 4
    for (int earlier = item % kHeads; earlier < item; earlier += kHeads) {
      before = next_reference(before, shared_float(memory, kBlockMax, earlier), scale_log2);
    }
    const float next = next_reference(before, shared_float(memory, kBlockMax, item), scale_log2);
    const float reference = next == -kInfinity ? 0.0f : next;
    shared_float(memory, kRescale, item) =
        exp2_approx(__fmul_rn(__fsub_rn(before, reference), scale_log2));
    shared_float(memory, kScaled, item) = __fmul_rn(reference, scale_log2);
    if (item / kHeads == blocks - 1) shared_float(memory, kFinalMax, item % kHeads) = next;
  }
  __syncthreads();
  // Two lanes replace a pair's scores, four heads each.
#pragma unroll 1
  for (int item = thread; item - lane < blocks * kBlockKeys; item += kThreads) {
    const int pair = item / 2;
    const int heads = item % 2 * 16;  // bytes
    const float4 scaled = *reinterpret_cast<const float4*>(
        memory + kScaled + pair / (kBlockKeys / 2) * (kHeads * 4) + heads);
    float4 weights[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 scores = *reinterpret_cast<const float4*>(
          memory + kPairs + pair * kPairBytes + i * (kPairBytes / 2) + heads);
      const bool present = 2 * pair + i < count;
      weights[i] = make_float4(weight(scores.x, scale_log2, scaled.x, present),
                               weight(scores.y, scale_log2, scaled.y, present),
                               weight(scores.z, scale_log2, scaled.z, present),
                               weight(scores.w, scale_log2, scaled.w, present));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint2*>(memory + weights_of(pair) + i * (kHeads * 2) + heads / 2) =
          make_uint2(Element::pack(weights[i].x, weights[i].y),
                     Element::pack(weights[i].z, weights[i].w));
    }
    *reinterpret_cast<float4*>(memory + sums_of(pair) + heads) = make_float4(
        __fadd_rn(weights[0].x, weights[1].x), __fadd_rn(weights[0].y, weights[1].y),
        __fadd_rn(weights[0].z, weights[1].z), __fadd_rn(weights[0].w, weights[1].w));
  }
  __syncthreads();

  // --- 2, ended: one warp adds up the weights, lane 4 h + q the pairs 4 t + q of head h ------------
  const long long part = static_cast<long long>(task.sequence) * splits_arg + task.split;
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
      const long long parts = sequences_arg * splits_arg * task.all_heads;
      float* mine = work + parts * kHeadDim + (part * task.all_heads + task.first_head + g) * 5;
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
      unsigned v[2][4], weights[4];
    } now, next;
    const auto load = [&](int group) {
      const unsigned slot = v_ring + group % kValueStages * kGroupBytes;
      const int row = lane % 8 + lane / 16 * 8;
      const unsigned chunk = row * 32 + (lane / 8 % 2 ^ row / 4 % 2) * kChunkBytes;
      load_matrices_transposed(next.v[0], slot + chunk);
      load_matrices_transposed(next.v[1], slot + 512 + chunk);
      load_matrices_transposed(next.weights, base + weights_of(lane / 2) + lane % 2 * (kHeads * 2) +
                                                 group * (kGroupKeys / 2) * kPairBytes);
    };
    copy_async_wait<kValueStages - 1>();
    __syncwarp();
    load(0);
#pragma unroll 2
    for (int group = 0; group < groups; ++group) {
      now = next;
      copy_async_wait<kValueStages - 2>();
      __syncwarp();
      if (group + 1 < groups) load(group + 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * group + half;
        if (step >= blocks * kSteps) break;
        if (step % kSteps == 0) {
          const float2 rescale = *reinterpret_cast<const float2*>(
              memory + kRescale + (step / kSteps * kHeads + 2 * c) * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            acc[e] = __fmul_rn(acc[e], e % 2 == 0 ? rescale.x : rescale.y);
          }
        }
        mma_m16n8k16<Element>(acc, now.v[half], now.weights[2 * half], now.weights[2 * half + 1]);
      }
      copy_values(group + kValueStages);
    }
  }
  if (work == nullptr) __syncthreads();  // for the inverses
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
