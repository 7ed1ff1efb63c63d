// Merges the splits of decoded rows, which attention_decode_sm90.cu left in fp32, in ascending
// order. attention_generic.cu has the definition. One thread block for each row, one thread for
// each column. It starts while the decode kernel still runs, and waits for it.

#include "cluster.cuh"
#include "definition.cuh"
#include "merge.cuh"
#include "numeric.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kSplitKeys = kSplitBlocksOf<kHeadDim> * kBlockKeysOf<kHeadDim>;
constexpr bool kPaged = PAGED != 0;
using Element = ELEMENT;

// The parameters of attention_decode_sm90.cu. grid = sequences * heads.
extern "C" __global__ void __launch_bounds__(kHeadDim)
    KERNEL_NAME(const unsigned short* __restrict__, const unsigned short* __restrict__,
                const unsigned short* __restrict__, unsigned short* __restrict__ out,
                float* __restrict__ lse, const float* __restrict__ work,
                const int* __restrict__ cu_seqlens_q, const int* __restrict__ lengths_k,
                const int* __restrict__, long long, long long, long long, long long, long long,
                long long, long long, long long, long long out_row_stride,
                long long out_head_stride, long long, long long, long long kv_heads_arg,
                long long group_arg, long long sequences_arg, long long splits_arg,
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
  float max = stats[0];
  float sum[4] = {stats[1], stats[2], stats[3], stats[4]};
  float acc = parts[0];
#pragma unroll 4
  for (int split = 1; split < splits; ++split) {
    const float* later = stats + split * heads * 5ll;
    const MergeScales merged(max, later[0], scale_log2);
    max = merged.max;
#pragma unroll
    for (int q = 0; q < 4; ++q) sum[q] = merged(sum[q], later[1 + q]);
    acc = merged(acc, parts[split * heads * static_cast<long long>(kHeadDim)]);
  }

  const float total = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  const float inverse = impossible ? kNan : total == 0.0f ? 0.0f : __frcp_rn(total);
  out[q_row * out_row_stride + head * out_head_stride + column] =
      static_cast<unsigned short>(Element::pack(__fmaf_rn(acc, inverse, 0.0f), 0.0f));
  if (lse != nullptr && column == 0) {
    lse[static_cast<long long>(q_row) * heads + head] =
        impossible      ? kNan
        : total == 0.0f ? -kInfinity
                        : __fmaf_rn(max, static_cast<float>(scale_arg),
                                    __fmul_rn(log2_approx(total), kLn2));
  }
}
