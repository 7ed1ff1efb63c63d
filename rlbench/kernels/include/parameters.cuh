// The parameters that all attention kernels begin with. Each is 8 bytes wide, so that the host
// passes plain integers and floats; `Request.first_numbers` has the same order.
#pragma once

// q            [total_q, group * kv_heads, head_dim]
// k, v         [total_k, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim]
// out          like q
// lse          [total_q, group * kv_heads], or null
// work         scratch, null if nobody has more keys than a split; each kernel says what it holds
// cu_seqlens_q [sequences + 1]
// lengths_k    cu_seqlens_k [sequences + 1], or seqused_k [sequences] with pages
// block_table  [sequences, table_stride], or null
// page_size    packed keys are one page: total_k
#define RLBENCH_ATTENTION_PARAMETERS                                                              \
  const unsigned short *__restrict__ q, const unsigned short *__restrict__ k,                     \
      const unsigned short *__restrict__ v, unsigned short *__restrict__ out,                     \
      float *__restrict__ lse, float *__restrict__ work, const int *__restrict__ cu_seqlens_q,    \
      const int *__restrict__ lengths_k, const int *__restrict__ block_table,                     \
      long long q_row_stride, long long q_head_stride, long long k_page_stride,                   \
      long long k_row_stride, long long k_head_stride, long long v_page_stride,                   \
      long long v_row_stride, long long v_head_stride, long long out_row_stride,                  \
      long long out_head_stride, long long table_stride, long long page_size_arg,                 \
      long long kv_heads_arg, long long group_arg
