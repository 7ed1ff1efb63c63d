// Merges the splits of decoded rows, which a decode kernel left in fp32, in ascending order.
// attention_generic.cu has the definition. One thread block for each row, one thread for each
// column. It starts while the decode kernel still runs, and waits for it.

#include "cluster.cuh"
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

static_assert(SHARED_BYTES == 0, "SHARED_BYTES");

// The parameters of the decode kernels. grid = sequences * heads.
extern "C" __global__ void __launch_bounds__(kHeadDim)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg) {
  const unsigned heads = static_cast<unsigned>(kv_heads_arg * group_arg);
  const unsigned sequence = blockIdx.x / heads;
  const unsigned head = blockIdx.x % heads;
  const int column = static_cast<int>(threadIdx.x);
  const int lane = column % 32;
  const int q_row = cu_seqlens_q[sequence];
  if (cu_seqlens_q[sequence + 1] == q_row) return;
  const int k_length = kPaged ? lengths_k[sequence] : lengths_k[sequence + 1] - lengths_k[sequence];
  const int needed = k_length > 0 ? (k_length + kSplitKeys - 1) / kSplitKeys : 1;
  const bool impossible = needed > splits_arg;  // more keys than the caller said there would be
  const int splits = impossible ? static_cast<int>(splits_arg) : needed;

  const SplitParts<kHeadDim> left = {work, sequences_arg, splits_arg, heads};
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  // From one split to the next.
  const int columns_step = static_cast<int>(heads) * kHeadDim;
  const int stats_step = static_cast<int>(heads) * kStats;
  // What no key leaves: merging changes no bit. `sum` is the lane % 4-th of four.
  float max = -kInfinity, sum = 0.0f, acc = 0.0f;
  // The first time round merges nothing with nothing: it brings the loop's code here while the
  // decode kernel is still at work.
#pragma unroll 1
  for (int begin = -kAtOnce; begin < splits; begin += kAtOnce) {
    if (begin == 0) wait_for_previous_grid();
    const int there = begin < 0 ? 0 : splits - begin;
    // Past the caches for read-only data: it was written while this kernel was already there. An
    // absent part is of no key.
    float columns[kAtOnce], sums[kAtOnce];
    const int mine = lane % kAtOnce;  // the split whose scales this lane finds
    const float* column_of = left.columns(sequence, begin, head) + column;
    const float* stats_of = left.stats(sequence, begin, head);
    const float its = mine < there ? __ldcg(stats_of + mine * stats_step) : -kInfinity;
    stats_of += 1 + lane % 4;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      columns[i] = i < there ? __ldcg(column_of) : 0.0f;
      sums[i] = i < there ? __ldcg(stats_of) : 0.0f;
      column_of += columns_step;
      stats_of += stats_step;
      asm volatile("" : "+l"(column_of), "+l"(stats_of));  // else each is computed anew
    }
    __syncwarp();  // nothing below is waited for before everything is asked for
    // All scales at once: they follow from the largest score up to each split.
    float up_to = its;
#pragma unroll
    for (int step = 1; step < kAtOnce; step *= 2) {
      const float earlier = __shfl_sync(kFullWarp, up_to, lane - step);
      if (mine >= step) up_to = fmaxf(up_to, earlier);
    }
    const float earlier = __shfl_sync(kFullWarp, up_to, lane - 1);
    const MergeScales scales(mine > 0 ? fmaxf(max, earlier) : max, its, scale_log2);
    max = __shfl_sync(kFullWarp, scales.max, kAtOnce - 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float old = __shfl_sync(kFullWarp, scales.old, i);
      const float now = __shfl_sync(kFullWarp, scales.now, i);
      sum = MergeScales::merge(sum, old, sums[i], now);
      acc = MergeScales::merge(acc, old, columns[i], now);
    }
  }

  const float two = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));
  const float total = __fadd_rn(two, __shfl_xor_sync(kFullWarp, two, 2));
  const float inverse = inverse_of(total, impossible);
  out[q_row * out_row_stride + head * out_head_stride + column] =
      static_cast<unsigned short>(Element::pack(__fmaf_rn(acc, inverse, 0.0f), 0.0f));
  if (lse != nullptr && column == 0) {
    lse[static_cast<long long>(q_row) * heads + head] =
        log_sum_exp(max, total, scale_arg, impossible);
  }
}
