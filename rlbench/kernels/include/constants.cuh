// Numbers that all kernels use, without an instruction: the emulator takes this header as it is.
#pragma once

namespace rlbench {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kNan = __builtin_bit_cast(float, 0x7fffffffu);
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;

}  // namespace rlbench
