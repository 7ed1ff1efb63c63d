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
constexpr int kAtOnce = 16;  // splits

// The parameters of attention_decode_sm90.cu. grid = sequences * heads.
extern "C" __global__ void __launch_bounds__(kHeadDim)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long splits_arg,
                double scale_arg, double scale_log2_arg) {
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

  const long long first = sequence * splits_arg * heads + head;
  const float* parts = work + first * kHeadDim + column;
  const float* stats = work + sequences_arg * splits_arg * heads * kHeadDim + first * 5;
  const float scale_log2 = static_cast<float>(scale_log2_arg);
  float max = -kInfinity, sum[4] = {}, acc = 0.0f;  // what no key leaves: merging changes no bit
  __shared__ float all_stats[kAtOnce * 5];
  wait_for_previous_grid();
  for (int begin = 0; begin < splits; begin += kAtOnce) {
    // Everything is asked for before anything is waited for. Past the caches for read-only data: it
    // was written while this kernel was already there.
    float later[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool present = begin + i < splits;
      later[i] = present ? __ldcg(parts + (begin + i) * heads * static_cast<long long>(kHeadDim))
                         : 0.0f;
    }
    if (begin > 0) __syncthreads();
    for (int i = column; i < kAtOnce * 5; i += kHeadDim) {
      if (begin + i / 5 < splits) {
        all_stats[i] = __ldcg(stats + (begin + i / 5) * heads * 5ll + i % 5);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i < splits) {
        const float* its = all_stats + i * 5;
        const MergeScales merged(max, its[0], scale_log2);
        max = merged.max;
#pragma unroll
        for (int q = 0; q < 4; ++q) sum[q] = merged(sum[q], its[1 + q]);
        acc = merged(acc, later[i]);
      }
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
