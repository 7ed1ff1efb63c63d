// Merges the splits of decoded rows, which attention_decode_sm90.cu left in fp32, in ascending
// order. attention_generic.cu has the definition. One thread block for each row, one thread for
// each column. It starts while the decode kernel still runs, and waits for it.

#include "cluster.cuh"
#include "definition.cuh"
#include "merge.cuh"
#include "numeric.cuh"
#include "parameters.cuh"
#include "row_end.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kSplitKeys = kSplitBlocksOf<kHeadDim> * kBlockKeysOf<kHeadDim>;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

// The parameters of attention_decode_sm90.cu. grid = sequences * heads.
extern "C" __global__ void __launch_bounds__(kHeadDim)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg) {
  const unsigned heads = static_cast<unsigned>(kv_heads_arg * group_arg);
  const unsigned sequence = blockIdx.x / heads;
  const unsigned head = blockIdx.x % heads;
  const int column = static_cast<int>(threadIdx.x);
  wait_for_previous_grid();
  const int q_row = cu_seqlens_q[sequence];
  if (cu_seqlens_q[sequence + 1] == q_row) return;
  const int k_length = kPaged ? lengths_k[sequence] : lengths_k[sequence + 1] - lengths_k[sequence];
  const int needed = k_length > 0 ? (k_length + kSplitKeys - 1) / kSplitKeys : 1;
  const bool impossible = needed > splits_arg;  // more keys than the caller said there would be
  const int splits = impossible ? static_cast<int>(splits_arg) : needed;

  const long long first = sequence * splits_arg * heads + head;
  const float* parts = work + first * kHeadDim + column;
  const float* stats = work + sequences_arg * splits_arg * heads * kHeadDim + first * 5;
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  // Past the caches for read-only data: it was written while this kernel was already there.
  float max = __ldcg(stats);
  float sum[4] = {__ldcg(stats + 1), __ldcg(stats + 2), __ldcg(stats + 3), __ldcg(stats + 4)};
  float acc = __ldcg(parts);
#pragma unroll 4
  for (int split = 1; split < splits; ++split) {
    const float* later = stats + split * heads * 5ll;
    const MergeScales merged(max, __ldcg(later), scale_log2);
    max = merged.max;
#pragma unroll
    for (int q = 0; q < 4; ++q) sum[q] = merged(sum[q], __ldcg(later + 1 + q));
    acc = merged(acc, __ldcg(parts + split * heads * static_cast<long long>(kHeadDim)));
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
