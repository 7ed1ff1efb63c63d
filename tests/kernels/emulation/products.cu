// S = A B^T and O = A V, each by both instruction families, and roundings, in one warpgroup: not a
// kernel of the project, but a test of what stands in for the tensor core.

#include "copy.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "wgmma.cuh"

// The build's defines: ELEMENT (Bf16, Fp16), KERNEL_NAME.

using namespace rlbench;
using Element = ELEMENT;

constexpr int kRows = 64, kColumns = 128, kDepth = 64;  // of A: [rows, depth]; B: [columns, depth]
constexpr int kTiles = kColumns / 8;
constexpr int kPanel = kDepth * 128;  // bytes of half the columns of V: [depth, columns]

__device__ void write(float* to, const float (&acc)[kTiles][4]) {
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  for (int n = 0; n < kTiles; ++n) {
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * n + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2;
      to[(row + e / 2 * 8) * kColumns + column] = acc[n][e];
    }
  }
}

// results: [4, rows, columns]: S by wgmma and mma, O by wgmma and mma. rounded: [count], what is
// nearest to each of `wide`. values: [65536], of every element.
extern "C" __global__ void KERNEL_NAME(const unsigned short* a, const unsigned short* b,
                                       const unsigned short* v, float* results, const float* wide,
                                       unsigned short* rounded, float* values, long long count) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  const unsigned a_tile = shared_address(memory);
  const unsigned b_tile = a_tile + kRows * 128;
  const unsigned v_tile = b_tile + kColumns * 128;
  for (int i = thread; i < kRows * 8; i += 128) {
    copy_async(a_tile + swizzled_offset<128>(i / 8, i % 8), a + i * 8);
  }
  for (int i = thread; i < kColumns * 8; i += 128) {
    copy_async(b_tile + swizzled_offset<128>(i / 8, i % 8), b + i * 8);
  }
  for (int i = thread; i < kDepth * 16; i += 128) {
    const unsigned panel = static_cast<unsigned>(i % 16 / 8 * kPanel);
    copy_async(v_tile + panel + swizzled_offset<128>(i / 16, i % 8), v + i * 8);
  }
  copy_async_wait_all();
  __syncthreads();

  float acc[kTiles][4];
  const Matrix a_matrix(a_tile, 16), b_matrix(b_tile, 16), v_matrix(v_tile, kPanel);
  for (int d = 0; d < kDepth / 16; ++d) {
    Wgmma<Element, kTiles>::scores(acc, a_matrix.descriptor(d * 32), b_matrix.descriptor(d * 32),
                                   d > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  write(results, acc);

  unsigned fragments[kDepth / 16][4];
  float scores[kTiles][4] = {}, sums[kTiles][4] = {};
  for (int d = 0; d < kDepth / 16; ++d) {
    load_matrices(fragments[d],
                  a_tile + swizzled_offset<128>(warp_row + lane % 16, 2 * d + lane / 16));
    for (int n = 0; n < kTiles; n += 2) {
      const int row = 8 * n + lane % 8 + lane / 16 * 8;
      unsigned pair[4];
      load_matrices(pair, b_tile + swizzled_offset<128>(row, 2 * d + lane / 8 % 2));
      mma_m16n8k16<Element>(scores[n], fragments[d], pair[0], pair[1]);
      mma_m16n8k16<Element>(scores[n + 1], fragments[d], pair[2], pair[3]);
      const int chunk = n + lane / 16;
      const unsigned panel = static_cast<unsigned>(chunk / 8 * kPanel);
      load_matrices_transposed(
          pair, v_tile + panel + swizzled_offset<128>(16 * d + lane % 16, chunk % 8));
      mma_m16n8k16<Element>(sums[n], fragments[d], pair[0], pair[1]);
      mma_m16n8k16<Element>(sums[n + 1], fragments[d], pair[2], pair[3]);
    }
  }
  write(results + kRows * kColumns, scores);

  for (int d = 0; d < kDepth / 16; ++d) {
    Wgmma<Element, kTiles>::values(acc, fragments[d], v_matrix.descriptor(d * 16 * 128), d > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  write(results + 2 * kRows * kColumns, acc);
  write(results + 3 * kRows * kColumns, sums);

  for (long long i = thread; i < count; i += 128) {
    rounded[i] = static_cast<unsigned short>(Element::pack(wide[i], 0.0f));
  }
  for (int i = thread; i < 65536; i += 128) {
    values[i] = Element::value(static_cast<unsigned>(i));
  }
}
