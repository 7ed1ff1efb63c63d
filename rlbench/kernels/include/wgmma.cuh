// Warpgroup matrix products (sm_90a): wgmma, its shared memory descriptors and its fences.
//
// Accumulators are in the layout of mma.cuh's C, warp w of the warpgroup having the rows 16 w ..
// 16 w + 15, and A in registers in the layout of its A; so the two instruction families can stand
// in for one another. What a wgmma reads and writes must not be touched until it was waited for.
#pragma once

#include "numeric.cuh"

namespace rlbench {

// A matrix in shared memory whose rows are 128 bytes (64 elements), swizzled by swizzled_offset<128>
// and aligned to 1024 bytes: K-major if a row runs along the sum's dimension, else MN-major.
// panel_stride: bytes between panels of 64 elements along M or N, for MN-major matrices that are
// wider (PTX ISA, "Matrix Descriptor Format").
struct Matrix {
  unsigned low;  // half of a descriptor; the other one is a constant

  // In a cluster, an address has its block's rank above these bits.
  __device__ __forceinline__ Matrix(unsigned shared, unsigned panel_stride)
      : low(panel_stride >> 4 << 16 | (shared & 0x3ffff) >> 4) {}

  // The descriptor of what begins so many bytes on; one addition, since shared memory ends long
  // before the address's 14 bits overflow.
  __device__ __forceinline__ unsigned long long descriptor(unsigned bytes) const {
    constexpr unsigned long long kSwizzle128 = 1ull << 62;
    constexpr unsigned long long kGroupStride = 1024 >> 4;  // between groups of 8 rows
    return kSwizzle128 | kGroupStride << 32 | (low + (bytes >> 4));
  }
};

// Before the first of a series of wgmmas whose registers other code has written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the last kPending groups are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of these registers across this point, and from giving
// them to something else before it.
template <int kTiles>
__device__ __forceinline__ void keep_order(float (&tiles)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(tiles[n][e])::"memory");
  }
}

__device__ __forceinline__ void keep_order(float& value) {
  asm volatile("" : "+f"(value)::"memory");
}

// Says that nobody needs these registers' values, so that ptxas may use them for something else before
// here: what wgmma overwrites counts as read.
template <int kTiles>
__device__ __forceinline__ void forget(float (&tiles)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(tiles[n][e]));
  }
}

template <int kTiles>
__device__ __forceinline__ void keep_order(unsigned (&tiles)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(tiles[n][e])::"memory");
  }
}

// Operand lists of the instructions: accumulator registers by number, and n8 tiles of `acc`.
#define RLBENCH_REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RLBENCH_REGISTERS_40 \
  RLBENCH_REGISTERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RLBENCH_REGISTERS_64 \
  RLBENCH_REGISTERS_40 \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define RLBENCH_REGISTERS_128 \
  RLBENCH_REGISTERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RLBENCH_TILE(n) "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
#define RLBENCH_TILES_2(n) RLBENCH_TILE(n), RLBENCH_TILE(n + 1)
#define RLBENCH_TILES_4(n) RLBENCH_TILES_2(n), RLBENCH_TILES_2(n + 2)
#define RLBENCH_TILES_8(n) RLBENCH_TILES_4(n), RLBENCH_TILES_4(n + 4)
#define RLBENCH_TILES_10(n) RLBENCH_TILES_8(n), RLBENCH_TILES_2(n + 8)
#define RLBENCH_TILES_16(n) RLBENCH_TILES_8(n), RLBENCH_TILES_8(n + 8)
#define RLBENCH_TILES_32(n) RLBENCH_TILES_16(n), RLBENCH_TILES_16(n + 16)

// One k16 step. `accumulate` 0: acc = A B, else acc += A B. A and B K-major in shared memory; the
// operands after the accumulators have the numbers A, B and P.
#define RLBENCH_SCORES(TYPE, TILES, COLUMNS, REGISTERS, A, B, P)                                  \
  static __device__ __forceinline__ void scores(float (&acc)[TILES][4], unsigned long long a,     \
                                                unsigned long long b, int accumulate) {           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P                                               \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE        \
                 " {" RLBENCH_REGISTERS_##REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0;}"            \
                 : RLBENCH_TILES_##TILES(0)                                                       \
                 : "l"(a), "l"(b), "r"(accumulate));                                              \
  }

// The same with A in registers, which have the numbers A.
#define RLBENCH_ROW_SCORES(TYPE, TILES, COLUMNS, REGISTERS, A, B, P)                              \
  static __device__ __forceinline__ void row_scores(float (&acc)[TILES][4],                       \
                                                    const unsigned (&a)[4], unsigned long long b, \
                                                    int accumulate) {                             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P                                               \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE        \
                 " {" RLBENCH_REGISTERS_##REGISTERS "}, {" A "}, " B ", p, 1, 1, 0;}"             \
                 : RLBENCH_TILES_##TILES(0)                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));          \
  }

// The same with B MN-major.
#define RLBENCH_VALUES(TYPE, TILES, COLUMNS, REGISTERS, A, B, P)                                  \
  static __device__ __forceinline__ void values(float (&acc)[TILES][4], const unsigned (&a)[4],   \
                                                unsigned long long b, int accumulate) {           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P                                               \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE        \
                 " {" RLBENCH_REGISTERS_##REGISTERS "}, {" A "}, " B ", p, 1, 1, 1;}"             \
                 : RLBENCH_TILES_##TILES(0)                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));          \
  }

// The widths that attention needs, by n8 tiles: 8, 10 and 16 for keys or rows, 8, 16 and 32 for head dims.
template <class Element, int kTiles>
struct Wgmma;

#define RLBENCH_WGMMA(ELEMENT, TYPE)                                                              \
  template <>                                                                                     \
  struct Wgmma<ELEMENT, 8> {                                                                      \
    RLBENCH_SCORES(TYPE, 8, "64", 32, "%32", "%33", "%34")                                        \
    RLBENCH_ROW_SCORES(TYPE, 8, "64", 32, "%32, %33, %34, %35", "%36", "%37")                     \
    RLBENCH_VALUES(TYPE, 8, "64", 32, "%32, %33, %34, %35", "%36", "%37")                         \
  };                                                                                              \
  template <>                                                                                     \
  struct Wgmma<ELEMENT, 10> {                                                                     \
    RLBENCH_SCORES(TYPE, 10, "80", 40, "%40", "%41", "%42")                                       \
  };                                                                                              \
  template <>                                                                                     \
  struct Wgmma<ELEMENT, 16> {                                                                     \
    RLBENCH_SCORES(TYPE, 16, "128", 64, "%64", "%65", "%66")                                      \
    RLBENCH_VALUES(TYPE, 16, "128", 64, "%64, %65, %66, %67", "%68", "%69")                       \
  };                                                                                              \
  template <>                                                                                     \
  struct Wgmma<ELEMENT, 32> {                                                                     \
    RLBENCH_VALUES(TYPE, 32, "256", 128, "%128, %129, %130, %131", "%132", "%133")                \
  };

RLBENCH_WGMMA(Bf16, "bf16")
RLBENCH_WGMMA(Fp16, "f16")

#undef RLBENCH_WGMMA
#undef RLBENCH_VALUES
#undef RLBENCH_ROW_SCORES
#undef RLBENCH_SCORES
#undef RLBENCH_TILES_32
#undef RLBENCH_TILES_16
#undef RLBENCH_TILES_10
#undef RLBENCH_TILES_8
#undef RLBENCH_TILES_4
#undef RLBENCH_TILES_2
#undef RLBENCH_TILE
#undef RLBENCH_REGISTERS_128
#undef RLBENCH_REGISTERS_64
#undef RLBENCH_REGISTERS_40
#undef RLBENCH_REGISTERS_32

}  // namespace rlbench
