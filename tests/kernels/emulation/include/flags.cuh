// Stands in for the kernels' header of this name: blocks run one after the other, in order.
#pragma once

#include "emulator.h"

namespace rlbench {

inline void await_flag(const unsigned* flag, unsigned value) {
  if (*flag != value) emulator::fault("a flag is %u, not %u", *flag, value);
}

inline void set_flag(unsigned* flag, unsigned value) { *flag = value; }

inline float4 read_current(const float4* pointer) { return *pointer; }

}  // namespace rlbench
