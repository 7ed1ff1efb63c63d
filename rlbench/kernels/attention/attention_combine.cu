// Merges the splits of decoded rows, which a decode kernel left in fp32, in ascending order.
// attention_generic.cu has the definition. One thread block for each row, one thread for each
// column. It starts while the decode kernel still runs, and waits for it.

#include "cluster.cuh"
#include "copy.cuh"
#include "decode_task.cuh"
#include "definition.cuh"
#include "merge.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "row_end.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), SHARED_BYTES
// (what the launch reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kSplitKeys = kSplitBlocksOf<kHeadDim> * kBlockKeysOf<kHeadDim>;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;
constexpr int kAtOnce = 16;  // splits
constexpr int kChunks = kHeadDim * 4 / kChunkBytes;  // of a part's O
constexpr int kStatsAt = kAtOnce * kHeadDim * 4;
constexpr int kSharedBytes = kStatsAt + kAtOnce * kStats * 4;

static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");

// The parameters of the decode kernels. grid = sequences * heads.
extern "C" __global__ void __launch_bounds__(kHeadDim)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg) {
  extern __shared__ __align__(128) unsigned char memory[];
  float* parts = reinterpret_cast<float*>(memory);             // [split][column]
  float* stats = reinterpret_cast<float*>(memory + kStatsAt);  // [split][kStats]
  const unsigned heads = static_cast<unsigned>(kv_heads_arg * group_arg);
  const unsigned sequence = blockIdx.x / heads;
  const unsigned head = blockIdx.x % heads;
  const int column = static_cast<int>(threadIdx.x);
  const int q_row = cu_seqlens_q[sequence];
  if (cu_seqlens_q[sequence + 1] == q_row) return;
  const int k_length = kPaged ? lengths_k[sequence] : lengths_k[sequence + 1] - lengths_k[sequence];
  const int needed = k_length > 0 ? (k_length + kSplitKeys - 1) / kSplitKeys : 1;
  const bool impossible = needed > splits_arg;  // more keys than the caller said there would be
  const int splits = impossible ? static_cast<int>(splits_arg) : needed;

  const SplitParts<kHeadDim> left = {work, sequences_arg, splits_arg, heads};
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  float max = -kInfinity, sum[4] = {}, acc = 0.0f;  // what no key leaves: merging changes no bit
  // The first time round merges nothing with nothing: it brings the loop's code here while the
  // decode kernel is still at work.
#pragma unroll 1
  for (int begin = -kAtOnce; begin < splits; begin += kAtOnce) {
    if (begin == 0) wait_for_previous_grid();
    const int there = begin < 0 ? 0 : splits - begin < kAtOnce ? splits - begin : kAtOnce;
    __syncthreads();  // what was here before has been read
    // Past the caches for read-only data: it was written while this kernel was already there.
#pragma unroll 1
    for (int i = column; i < kAtOnce * kChunks; i += kHeadDim) {
      const int split = i / kChunks;
      const float* part = left.columns(sequence, begin + split, head);
      copy_async(shared_address(memory) + i * kChunkBytes, part + i % kChunks * 4, split < there);
    }
    copy_async_commit();
#pragma unroll 1
    for (int i = column; i < kAtOnce * kStats; i += kHeadDim) {
      const int split = i / kStats;
      stats[i] = split < there
                     ? __ldcg(left.stats(sequence, begin + split, head) + i % kStats)
                     : i % kStats == 0 ? -kInfinity : 0.0f;
    }
    copy_async_wait_all();
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < kAtOnce; ++i) {  // an absent part is of no key
      const float* its = stats + i * kStats;
      const MergeScales merged(max, its[0], scale_log2);
      max = merged.max;
#pragma unroll
      for (int q = 0; q < 4; ++q) sum[q] = merged(sum[q], its[1 + q]);
      acc = merged(acc, parts[i * kHeadDim + column]);
    }
  }

  const float total = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  const float inverse = inverse_of(total, impossible);
  out[q_row * out_row_stride + head * out_head_stride + column] =
      static_cast<unsigned short>(Element::pack(__fmaf_rn(acc, inverse, 0.0f), 0.0f));
  if (lse != nullptr && column == 0) {
    lse[static_cast<long long>(q_row) * heads + head] =
        log_sum_exp(max, total, scale_arg, impossible);
  }
}
