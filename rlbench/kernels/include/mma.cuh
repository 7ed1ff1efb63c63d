// Tensor core fragments of mma.sync.m16n8k16 and the ldmatrix loads that fill them.
//
// With g = lane / 4 and c = lane % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   A (16 x 16)  a[0]: row g,     k 2c, 2c+1      a[2]: row g,     k 2c+8, 2c+9
//                a[1]: row g + 8, k 2c, 2c+1      a[3]: row g + 8, k 2c+8, 2c+9
//   B (16 x 8)   b[0]: k 2c, 2c+1, column g       b[1]: k 2c+8, 2c+9, column g
//   C (16 x 8)   c[0], c[1]: row g, columns 2c, 2c+1      c[2], c[3]: row g + 8, the same columns
#pragma once

#include "numeric.cuh"

namespace rlbench {

// Loads four 8 x 8 matrices of 16-bit values; lane 8 i + r names the address of row r of matrix i.
// Lane (g, c) receives the elements (row g; columns 2c, 2c+1) of matrix i in out[i].
__device__ __forceinline__ void load_matrices(unsigned (&out)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared)
               : "memory");
}

// As above, each matrix transposed: lane (g, c) receives the elements (rows 2c, 2c+1; column g).
__device__ __forceinline__ void load_matrices_transposed(unsigned (&out)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared)
               : "memory");
}

// As above for two matrices; lane 8 i + r, i < 2, names the address of row r of matrix i.
__device__ __forceinline__ void load_two_transposed(unsigned (&out)[2], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(shared)
               : "memory");
}

// acc += A B with one k16 step; b0 and b1 are B's two registers.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<Bf16>(float (&acc)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<Fp16>(float (&acc)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace rlbench
