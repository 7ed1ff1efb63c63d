// What CUDA C++ has built in, as far as the kernels use it. Mathematical functions are built into
// the compiler: reading <cmath> would take a third of the time that a kernel takes.
#pragma once

#include <cstring>

#include "emulator.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static  // blocks that use it run one after the other
#define __launch_bounds__(...)
#define __cluster_dims__(...)

#define threadIdx (emulator::running->thread)
#define blockIdx (emulator::running->block)
#define gridDim (emulator::grid)

extern "C" float fmaxf(float, float);
extern "C" float fminf(float, float);

struct alignas(8) float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

template <class T>
T shuffle(const char* what, T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(Words));
  Words words;
  std::memcpy(words.of, &value, sizeof value);
  std::memcpy(&value, exchange(what, words)[from % 32].of, sizeof value);
  return value;
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emulator::shuffle("__shfl_sync", value, static_cast<unsigned>(from));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  const unsigned from = threadIdx.x % 32 ^ static_cast<unsigned>(distance);
  return emulator::shuffle("__shfl_xor_sync", value, from);
}

inline bool __any_sync(unsigned, bool mine) {
  const emulator::Words* words = emulator::exchange("__any_sync", {{mine}});
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any = any || words[lane].of[0] != 0;
  return any;
}

inline void __syncwarp() { emulator::exchange("__syncwarp", {}); }
inline void __syncthreads() { emulator::sync_threads(); }
[[noreturn]] inline void __trap() { emulator::fault("trap"); }

// Contraction is off (builds.py), so each of these rounds once.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }

template <class T>
T __ldcg(const T* pointer) {
  return *pointer;
}
