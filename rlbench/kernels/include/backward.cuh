// What the kernels of the backward have in common: their parameters, and how a weight is found again.
#pragma once

#include "flags.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "tile_rows.cuh"
#include "waiting.cuh"

namespace rlbench {

// Each is 8 bytes wide, so that the host passes plain integers and floats; `Backward.numbers` has the
// same order.
//
// q, out, dout, dq  [total_q, group * kv_heads, head_dim]
// k, v, dk, dv      [total_k, kv_heads, head_dim]
// lse               [total_q, group * kv_heads]
// delta             the same, and scratch memory behind it: see ChunkOrder
// cu_seqlens_q, _k  [sequences + 1]
#define RLBENCH_BACKWARD_PARAMETERS                                                               \
  const unsigned short *__restrict__ q, const unsigned short *__restrict__ k,                     \
      const unsigned short *__restrict__ v, const unsigned short *__restrict__ out,               \
      const float *__restrict__ lse, const unsigned short *__restrict__ dout,                     \
      unsigned short *__restrict__ dq, unsigned short *__restrict__ dk,                           \
      unsigned short *__restrict__ dv, float *__restrict__ delta,                                 \
      const int *__restrict__ cu_seqlens_q, const int *__restrict__ cu_seqlens_k,                 \
      long long q_row_stride, long long q_head_stride, long long k_row_stride,                    \
      long long k_head_stride, long long v_row_stride, long long v_head_stride,                   \
      long long out_row_stride, long long out_head_stride, long long dout_row_stride,             \
      long long dout_head_stride, long long dq_row_stride, long long dq_head_stride,              \
      long long dk_row_stride, long long dk_head_stride, long long dv_row_stride,                 \
      long long dv_head_stride, long long kv_heads_arg, long long group_arg,                      \
      long long sequences_arg, long long causal_arg, double scale_arg, double scale_log2_arg,     \
      long long units_arg, long long chunks_arg, long long flags_at_arg, long long waiting_at_arg

// The same value, of which the compiler does not know: what follows from it is computed again, and takes no
// register until then.
template <class T>
__device__ __forceinline__ T again(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What is subtracted from a row's scaled scores, from its log-sum-exp. A row that sees no key has no
// weight: then it is infinity.
__device__ __forceinline__ float scaled_lse(float lse) {
  return lse == -kInfinity ? kInfinity : __fmul_rn(lse, kLog2E);
}

// P, from a score and that.
__device__ __forceinline__ float weight_of(float score, float scale_log2, float scaled) {
  return exp2_approx(__fmaf_rn(score, scale_log2, -scaled));
}

// dS, up to the softmax's scale.
__device__ __forceinline__ float score_gradient(float weight, float weight_gradient, float delta) {
  return __fmul_rn(weight, __fsub_rn(weight_gradient, delta));
}

// delta of a row, in each of the four lanes that have it: of the columns 8 t + 2 c and the next one for the
// lane's c. Zero where there is no row.
template <int kHeadDim, class Element>
__device__ __forceinline__ float delta_of(const unsigned short* out, const unsigned short* dout,
                                          bool present, int lane) {
  out += lane % 4 * 2;
  dout += lane % 4 * 2;
  float sum = 0.0f;
#pragma unroll 16
  for (int t = 0; t < kHeadDim / 8; ++t) {  // so many loads at a time
    const unsigned o = present ? *reinterpret_cast<const unsigned*>(out + 8 * t) : 0;
    const unsigned d = present ? *reinterpret_cast<const unsigned*>(dout + 8 * t) : 0;
    sum = __fmaf_rn(Element::value(d & 0xffff), Element::value(o & 0xffff), sum);
    sum = __fmaf_rn(Element::value(d >> 16), Element::value(o >> 16), sum);
  }
  const float pair = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));
  return __fadd_rn(pair, __shfl_xor_sync(kFullWarp, pair, 2));
}

// A thread block's tile of keys: tile t of sequence b is the (cu_seqlens_k[b] / kTileKeys + b + t)-th, which
// leaves some numbers without a tile, but depends on no length that the host would have to know.
template <int kTileKeys>
struct KeyTileOf {
  unsigned sequence;
  int begin, length;  // of its keys
  int first_key;      // of the tile, in the sequence
  bool exists;

  __device__ __forceinline__ KeyTileOf(unsigned number, const int* cu_seqlens_k,
                                       unsigned sequences) {
    unsigned low = 0, high = sequences;  // low's first tile is not behind `number`, high's is
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      (first_number(middle, cu_seqlens_k) <= number ? low : high) = middle;
    }
    sequence = low;
    begin = cu_seqlens_k[low];
    length = cu_seqlens_k[low + 1] - begin;
    const unsigned first = first_number(low, cu_seqlens_k);
    first_key = static_cast<int>(number - first) * kTileKeys;
    exists = number >= first && first_key < length;  // keys may come before the first sequence
  }

 private:
  static __device__ __forceinline__ unsigned first_number(unsigned sequence,
                                                          const int* cu_seqlens_k) {
    return static_cast<unsigned>(cu_seqlens_k[sequence]) / kTileKeys + sequence;
  }
};

// The rows of a chunk that see some key of a tile, in blocks. Rows see one from the first position on that
// sees the tile's first key.
template <int kRows, int kChunkRows>
struct SeeingRows {
  static_assert(kChunkRows % kRows == 0, "a block is in one chunk");
  int q_end, q_length;
  unsigned first_block, blocks;
  bool is_first, is_last;  // of the chunks in which there are such rows; or there are none at all
  bool exists;             // so there is something to do

  template <class Tile>
  __device__ __forceinline__ SeeingRows(const Tile& tile, unsigned chunk, const int* cu_seqlens_q,
                                        unsigned group, bool causal)
      : q_end(cu_seqlens_q[tile.sequence + 1]), q_length(q_end - cu_seqlens_q[tile.sequence]) {
    constexpr unsigned kChunk = kChunkRows / kRows;
    const int before = tile.first_key - (tile.length - q_length);
    const long long first_position = causal && before > 0 ? before : 0;
    const long long rows = static_cast<long long>(q_length) * group;
    const unsigned first = static_cast<unsigned>(first_position * group / kRows);
    const unsigned end = static_cast<unsigned>((rows + kRows - 1) / kRows);
    first_block = first > chunk * kChunk ? first : chunk * kChunk;
    const unsigned chunk_end = end < (chunk + 1) * kChunk ? end : (chunk + 1) * kChunk;
    blocks = chunk_end > first_block ? chunk_end - first_block : 0;
    is_first = first >= end || chunk == first / kChunk;
    is_last = first >= end || chunk_end == end;
    exists = tile.exists && (blocks > 0 || (first >= end && chunk == 0));
  }
};

// The sums of a unit, a tile of keys under one KV head, over chunk after chunk. Each chunk is a thread block
// of its own, whose threads add theirs to what the one before has left in memory. Chunks of a unit are
// started in their order.
struct ChunkOrder {
  unsigned unit, chunk;
  unsigned* flags;  // two for each unit: chunks that are done
  float4* waiting;

  // sums: float4s of the unit.
  __device__ __forceinline__ ChunkOrder(unsigned unit, unsigned chunk, float* scratch,
                                        long long flags_at, long long waiting_at, int sums)
      : unit(unit),
        chunk(chunk),
        flags(reinterpret_cast<unsigned*>(scratch + flags_at) + 2 * unit),
        waiting(reinterpret_cast<float4*>(scratch + waiting_at) +
                static_cast<long long>(unit) * sums) {}

  // Of threads that share a flag. `thread`: of the block's.
  template <int kTiles>
  __device__ __forceinline__ void add_earlier(float (&sums)[kTiles][4], int flag, int first,
                                              int thread) const {
    if (thread % 32 == 0) await_flag(flags + flag, chunk);
    __syncwarp();
    const float4* const there = place(first, kTiles, thread);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 earlier = read_current(there + n * 32);
      sums[n][0] = __fadd_rn(earlier.x, sums[n][0]);
      sums[n][1] = __fadd_rn(earlier.y, sums[n][1]);
      sums[n][2] = __fadd_rn(earlier.z, sums[n][2]);
      sums[n][3] = __fadd_rn(earlier.w, sums[n][3]);
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void leave_sums(const float (&sums)[kTiles][4], int first,
                                             int thread) const {
    leave(place(first, kTiles, thread), sums);
  }

  // After all threads that share the flag have left theirs.
  __device__ __forceinline__ void say_done(int flag) const { set_flag(flags + flag, chunk + 1); }

 private:
  // first: where the sums of the unit's first thread are.
  __device__ __forceinline__ float4* place(int first, int tiles, int thread) const {
    return waiting + first + thread / 32 * 32 * tiles + thread % 32;
  }
};

// What a thread block has to know once its sums are there, in shared memory: registers are scarce till then.
struct KeyTask {
  int first_key, k_begin, k_length;  // of the tile, and its sequence
  unsigned kv_head, unit, chunk;
  int is_first, is_last;  // chunk
};

// Nothing is done yet; by the grid before the one that waits.
template <int kThreads>
__device__ __forceinline__ void reset_flags(float* scratch, long long flags_at, long long units,
                                            long long chunks) {
  if (chunks == 1) return;
  unsigned* const flags = reinterpret_cast<unsigned*>(scratch + flags_at);
  for (long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; i < 2 * units;
       i += static_cast<long long>(gridDim.x) * kThreads) {
    flags[i] = 0;
  }
}

// What finds the statistics of blocks of rows, one block after the other, by the lanes of a warp. Blocks are
// whole positions, so a lane's rows are the same heads in all of them.
template <int kRows, class Seeing>
class RowFinder {
  static constexpr int kOwn = kRows / 32;
  const float *lse, *delta;
  long long step;  // from a block to the next one
  int position[kOwn];
  int positions, q_length, more_keys;
  long long at[kOwn];
  bool causal;

 public:
  float scaled[kOwn], deltas[kOwn];
  int limits[kOwn];

  // Every `stride`-th block from `first` on.
  __device__ __forceinline__ RowFinder(const Seeing& seeing, int k_length,
                                       unsigned first, unsigned stride, unsigned kv_head,
                                       unsigned kv_heads, unsigned group, bool causal,
                                       const float* lse, const float* delta, int lane)
      : lse(lse), delta(delta), positions(static_cast<int>(kRows / group * stride)),
        q_length(seeing.q_length), more_keys(k_length - seeing.q_length), causal(causal) {
    const long long heads = static_cast<long long>(kv_heads) * group;
    step = positions * heads;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const unsigned row = static_cast<unsigned>(lane + 32 * i);
      position[i] = static_cast<int>((seeing.first_block + first) * (kRows / group) + row / group);
      at[i] = (static_cast<long long>(seeing.q_end - q_length) + position[i]) * heads +
              kv_head * group + row % group;
    }
  }

  // Starts reading what there is of a block, and goes on to the next one.
  __device__ __forceinline__ void find() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool present = position[i] < q_length;
      scaled[i] = present ? lse[at[i]] : -kInfinity;
      deltas[i] = present ? delta[at[i]] : 0.0f;
      limits[i] = present ? more_keys + (causal ? position[i] + 1 : q_length) : 0;
      position[i] += positions;
      at[i] += step;
    }
  }
};

// What is needed of a block's rows, in shared memory. Where products are keys by rows, a lane has the
// rows 8 j + 2 c and the next one, and the keys g and g + 8.
template <int kRows>
struct alignas(16) RowStats {
  float scaled[kRows], delta[kRows];
  int limits[kRows];  // keys that they see

  // By kThreads threads; zeros, and no weights, where there is no row.
  template <int kThreads, class Rows>
  __device__ __forceinline__ void find(const Rows& rows, const float* lse, const float* all_deltas,
                                       int thread) {
#pragma unroll
    for (int row = thread; row < kRows; row += kThreads) {
      const bool present = row < rows.count;
      const long long at = present ? rows.offset(row, rows.heads(), 1) : 0;
      scaled[row] = present ? scaled_lse(lse[at]) : kInfinity;
      delta[row] = present ? all_deltas[at] : 0.0f;
      limits[row] = present ? rows.limit(row) : 0;
    }
  }

  // What a warp has found.
  template <class Finder>
  __device__ __forceinline__ void take(const Finder& found, int lane) {
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
      const int row = lane + 32 * i;
      scaled[row] = scaled_lse(found.scaled[i]);
      delta[row] = found.deltas[i];
      limits[row] = found.limits[i];
    }
  }

  // The weights of what a lane has. The scores that rows do not see are -inf.
  __device__ __forceinline__ void weigh(float (&scores)[kRows / 8][4], float scale_log2,
                                        int lane) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 its = pair(scaled, j, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[j][e] = weight_of(scores[j][e], scale_log2, e % 2 == 0 ? its.x : its.y);
      }
    }
  }

  // Sets those to -inf; `key` is the lane's first one.
  __device__ __forceinline__ void hide(float (&scores)[kRows / 8][4], int key, int lane) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (key + e / 2 * 8 >= limits[8 * j + lane % 4 * 2 + e % 2]) scores[j][e] = -kInfinity;
      }
    }
  }

  // dS, up to the softmax's scale, from the weights and their gradients.
  __device__ __forceinline__ void differentiate(const float (&weights)[kRows / 8][4],
                                                float (&gradients)[kRows / 8][4], int lane) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 its = pair(delta, j, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        gradients[j][e] = score_gradient(weights[j][e], gradients[j][e], e % 2 == 0 ? its.x : its.y);
      }
    }
  }

  static __device__ __forceinline__ float2 pair(const float (&of)[kRows], int j, int lane) {
    return reinterpret_cast<const float2*>(of)[4 * j + lane % 4];
  }
};

// The accumulator layout of two tiles is the A layout of one k16 step.
template <class Element, int kTiles>
__device__ __forceinline__ void round_all(unsigned (&rounded)[kTiles / 2][4],
                                          const float (&values)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    rounded[j / 2][j % 2 * 2] = Element::pack(values[j][0], values[j][1]);
    rounded[j / 2][j % 2 * 2 + 1] = Element::pack(values[j][2], values[j][3]);
  }
}

// 16 rows of one matrix, from `first` on, times all rows of the other, as a chain over d: by one warp, of
// tiles in shared memory, Tile::offset(row, chunk).
template <int kHeadDim, class Element, class Tile, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&product)[kTiles][4], unsigned left,
                                              unsigned right, int first, int lane) {
  const int a_row = lane % 16, a_chunk = lane / 16;
  const int b_row = lane % 8 + lane / 16 * 8, b_chunk = lane / 8 % 2;
#pragma unroll 4
  for (int d = 0; d < kHeadDim / 16; ++d) {
    unsigned a[4];
    load_matrices(a, left + Tile::offset(first + a_row, 2 * d + a_chunk));
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      unsigned b[4];
      load_matrices(b, right + Tile::offset(8 * j + b_row, 2 * d + b_chunk));
      mma_m16n8k16<Element>(product[j], a, b[0], b[1]);
      mma_m16n8k16<Element>(product[j + 1], a, b[2], b[3]);
    }
  }
}

// sum += weights times the other matrix, as a chain over its rows.
template <int kHeadDim, class Element, class Tile, int kSteps>
__device__ __forceinline__ void add_products(float (&sum)[kHeadDim / 8][4],
                                             const unsigned (&weights)[kSteps][4], unsigned right,
                                             int lane) {
  const int row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      unsigned b[4];
      load_matrices_transposed(b, right + Tile::offset(16 * step + row, n + chunk));
      mma_m16n8k16<Element>(sum[n], weights[step], b[0], b[1]);
      mma_m16n8k16<Element>(sum[n + 1], weights[step], b[2], b[3]);
    }
  }
}

// Writes a lane's sums of two keys, the first of which is in that row of the gradient. There are `left`
// keys from it on. Adding +0 makes -0, which blocks without a seen key could turn into +0, +0.
template <class Element, int kDimTiles>
__device__ __forceinline__ void write_key_gradients(const float (&sums)[kDimTiles][4], float scale,
                                                    unsigned short* gradient, long long row_stride,
                                                    long long row, int left, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    write_row<Element>(sums, r, scale, gradient + (row + 8 * r) * row_stride, 8 * r < left, lane);
  }
}

}  // namespace rlbench
