// Divisions by what the host knows (divisors.py), of numbers below 2^31.
#pragma once

namespace rlbench {

struct Divisor {
  unsigned factor, shift;

  __device__ __forceinline__ explicit Divisor(long long encoded)
      : factor(static_cast<unsigned>(encoded)), shift(static_cast<unsigned>(encoded >> 32)) {}

  __device__ __forceinline__ unsigned operator()(unsigned number) const {
    const unsigned long long product = static_cast<unsigned long long>(number) * factor;
    return factor == 0 ? number : static_cast<unsigned>(product >> 32) >> shift;
  }
};

}  // namespace rlbench
