// A tile of packed rows, (position, head in group) pairs of one sequence under one KV head.
#pragma once

#include "copy.cuh"
#include "row_end.cuh"
#include "softmax.cuh"

namespace rlbench {

constexpr int kWarpRows = 16;  // that one warp has of a tile

// The upper lane's first for the lower lane's second.
__device__ __forceinline__ void exchange(unsigned& first, unsigned& second, bool upper,
                                         int distance) {
  const unsigned sent = upper ? first : second;
  const unsigned got = __shfl_xor_sync(kFullWarp, sent, distance);
  if (upper) {
    first = got;
  } else {
    second = got;
  }
}

// Multiplies a lane's part of a row (half: of the row g or g + 8) of accumulator tiles, rounds it, and
// writes it if the row is present, each lane of a quad a whole chunk of 16 bytes.
template <class Element, int kTiles>
__device__ __forceinline__ void write_row(const float (&tiles)[kTiles][4], int half, float factor,
                                          unsigned short* row, bool present, int lane) {
  static_assert(kTiles % 4 == 0, "a quad writes four chunks");
  const bool odd = lane % 2 != 0;
  const bool high = lane % 4 >= 2;
#pragma unroll
  for (int n = 0; n < kTiles; n += 4) {
    unsigned words[4];  // of four tiles, this lane's columns
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = Element::pack(__fmaf_rn(tiles[n + j][2 * half], factor, 0.0f),
                               __fmaf_rn(tiles[n + j][2 * half + 1], factor, 0.0f));
    }
    // Transposed among the quad: then a lane has all columns of one tile.
    exchange(words[0], words[1], odd, 1);
    exchange(words[2], words[3], odd, 1);
    exchange(words[0], words[2], high, 2);
    exchange(words[1], words[3], high, 2);
    if (present) {
      *reinterpret_cast<uint4*>(row + lane % 4 * 8 + 8 * n) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Sets the scores of keys that a lane's rows do not see to -inf. `first_key` is the block's.
template <int kKeyTiles>
__device__ __forceinline__ void hide_beyond(float (&scores)[kKeyTiles][4], int first_key,
                                            const int (&limits)[2], int lane) {
  const int column = first_key + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + 8 * j + e % 2 >= limits[e / 2]) scores[j][e] = -kInfinity;
    }
  }
}

// What is done to a tile's rows. Rows knows their `count`, limit(row), offset(row, ...) and heads().
template <class Rows>
struct RowAccess {
  __device__ __forceinline__ const Rows& self() const { return static_cast<const Rows&>(*this); }

  // Sets the scores of keys that a row does not see to -inf. `first_key` is the block's.
  template <int kKeyTiles>
  __device__ __forceinline__ void hide(float (&scores)[kKeyTiles][4], int first_key, int warp_row,
                                       int lane) const {
    const int limits[2] = {self().limit(warp_row + lane / 4),
                           self().limit(warp_row + lane / 4 + 8)};
    hide_beyond(scores, first_key, limits, lane);
  }

  // What a lane's two rows are divided by. Writes their lse, if it is asked for.
  __device__ __forceinline__ void end(const SoftmaxRows& softmax, float (&inverse)[2], float* lse,
                                      double scale, bool impossible, int warp_row,
                                      int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = softmax.total(r);
      inverse[r] = inverse_of(total, impossible);
      const int row = warp_row + lane / 4 + 8 * r;
      if (lse != nullptr && lane % 4 == 0 && row < self().count) {
        lse[self().offset(row, self().heads(), 1)] =
            log_sum_exp(softmax.max[r], total, scale, impossible);
      }
    }
  }

  // Divides a warp's rows by their sums and writes them, each lane of a quad a whole chunk.
  template <class Element, int kDimTiles>
  __device__ __forceinline__ void write(const SoftmaxRows& softmax,
                                        const float (&acc)[kDimTiles][4], unsigned short* out,
                                        long long row_stride, long long head_stride, float* lse,
                                        double scale, bool impossible, int warp_row,
                                        int lane) const {
    float inverse[2];
    end(softmax, inverse, lse, scale, impossible, warp_row, lane);
    write_times<Element>(inverse, acc, out, row_stride, head_stride, warp_row, lane);
  }

  // Multiplies a lane's two rows by that and writes them.
  template <class Element, int kDimTiles>
  __device__ __forceinline__ void write_times(const float (&factors)[2],
                                              const float (&acc)[kDimTiles][4], unsigned short* out,
                                              long long row_stride, long long head_stride,
                                              int warp_row, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + lane / 4 + 8 * r;
      const bool present = row < self().count;
      write_row<Element>(acc, r, factors[r],
                         out + (present ? self().offset(row, row_stride, head_stride) : 0), present,
                         lane);
    }
  }
};

// What others need to know of a tile once its rows have been divided into positions and heads. In
// shared memory: see NotedRows.
template <int kTileRows>
struct alignas(16) TileNote {
  int blocks;             // of keys
  int count;              // of the tile's rows that there are
  int limit;              // keys that a row sees, beyond the number of its place under a mask
  unsigned head;          // what turns a row's number, less its place's rows, into its head
  int places[kTileRows];  // rows of q; past the end, that of the last one
};

template <int kTileRows, bool kPaged>
struct TileRows : RowAccess<TileRows<kTileRows, kPaged>> {
  unsigned sequence, kv_head, kv_heads, group;
  int q_begin, q_length, k_begin, k_length;
  unsigned first;  // packed row
  int count;       // of the tile's rows that there are; none: the block has nothing to do
  bool causal;

  __device__ __forceinline__ TileRows(unsigned tile, unsigned kv_head, unsigned sequence,
                                      unsigned kv_heads, unsigned group, const int* cu_seqlens_q,
                                      const int* lengths_k, bool causal)
      : sequence(sequence), kv_head(kv_head), kv_heads(kv_heads), group(group), causal(causal) {
    q_begin = cu_seqlens_q[sequence];
    q_length = cu_seqlens_q[sequence + 1] - q_begin;
    k_begin = kPaged ? 0 : lengths_k[sequence];
    k_length = kPaged ? lengths_k[sequence] : lengths_k[sequence + 1] - k_begin;
    const long long packed_rows = static_cast<long long>(q_length) * group;
    const long long begin = static_cast<long long>(tile) * kTileRows;
    first = static_cast<unsigned>(begin);
    count = packed_rows - begin < kTileRows ? static_cast<int>(packed_rows - begin) : kTileRows;
    if (begin >= packed_rows) count = 0;
  }

  // The number of keys that a row of this tile sees; rows past the end count as the last one.
  __device__ __forceinline__ int limit(int row) const {
    const int last = count - 1;
    const unsigned packed = first + static_cast<unsigned>(row < last ? row : last);
    return causal ? static_cast<int>(packed / group) + 1 + k_length - q_length : k_length;
  }

  __device__ __forceinline__ long long heads() const {
    return static_cast<long long>(kv_heads) * group;
  }

  // The row of q that a row is in, or the last one if it is past the end.
  __device__ __forceinline__ int place(int row) const {
    const int last = count - 1;
    const unsigned packed = first + static_cast<unsigned>(row < last ? row : last);
    return q_begin + static_cast<int>(packed / group);
  }

  // Everything but the places.
  __device__ __forceinline__ void note(TileNote<kTileRows>& it, int blocks) const {
    it.blocks = blocks;
    it.count = count;
    it.limit = causal ? 1 + k_length - q_length - q_begin : k_length;
    // Wraps around, and back where it is used.
    it.head = kv_head * group + first + static_cast<unsigned>(q_begin) * group;
  }

  // Where a row of q, out or lse begins, in elements.
  __device__ __forceinline__ long long offset(int row, long long row_stride,
                                              long long head_stride) const {
    const unsigned packed = first + static_cast<unsigned>(row);
    const unsigned position = packed / group;
    const unsigned head = kv_head * group + (packed - position * group);
    return (q_begin + static_cast<long long>(position)) * row_stride + head * head_stride;
  }

  // Starts copying a warp's rows of q to where Tile::offset(row, chunk) says, zeros for absent ones.
  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void copy_q(unsigned shared, const unsigned short* q,
                                         long long row_stride, long long head_stride, int warp_row,
                                         int lane) const {
    constexpr int kRowChunks = kHeadDim * 2 / kChunkBytes;
    const int chunk = lane % kRowChunks;
#pragma unroll 4
    for (int i = 0; i < kWarpRows; i += 32 / kRowChunks) {
      const int row = warp_row + i + lane / kRowChunks;
      const bool present = row < count;
      const unsigned short* source =
          present ? q + offset(row, row_stride, head_stride) + chunk * 8 : q;
      copy_async(shared + Tile::offset(row, chunk), source, present);
    }
  }
};

// The same rows as they have been noted, without a division.
template <int kTileRows>
struct NotedRows : RowAccess<NotedRows<kTileRows>> {
  const TileNote<kTileRows>& note;
  unsigned group;
  long long all_heads;
  bool causal;
  const int& count;  // read where it is needed

  __device__ __forceinline__ NotedRows(const TileNote<kTileRows>& note, unsigned group,
                                       long long heads, bool causal)
      : note(note), group(group), all_heads(heads), causal(causal), count(note.count) {}

  __device__ __forceinline__ long long heads() const { return all_heads; }

  __device__ __forceinline__ int limit(int row) const {
    return note.limit + (causal ? note.places[row] : 0);
  }

  __device__ __forceinline__ long long offset(int row, long long row_stride,
                                              long long head_stride) const {
    const unsigned place = static_cast<unsigned>(note.places[row]);
    const unsigned head = note.head + static_cast<unsigned>(row) - place * group;
    return place * row_stride + head * head_stride;
  }
};

}  // namespace rlbench
