// Calls the kernel that was compiled before this, KERNEL_NAME, all of whose parameters are 8 bytes,
// or tensor maps.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "emulator.h"

namespace emulator {

template <class Parameter>
Parameter argument(uint64_t word) {
  if constexpr (std::is_same_v<Parameter, const TensorMap> || std::is_same_v<Parameter, TensorMap>) {
    return *reinterpret_cast<const TensorMap*>(word);
  } else {
    static_assert(sizeof(Parameter) == sizeof word);
    Parameter value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
}

template <class... Parameters, size_t... kPlaces>
void call(void (*kernel)(Parameters...), const uint64_t* words, size_t count,
          std::index_sequence<kPlaces...>) {
  if (count != sizeof...(Parameters)) fault("%zu arguments", count);
  kernel(argument<Parameters>(words[kPlaces])...);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), const uint64_t* words, size_t count) {
  call(kernel, words, count, std::index_sequence_for<Parameters...>());
}

void call_kernel(const uint64_t* words, size_t count) { call(KERNEL_NAME, words, count); }

}  // namespace emulator
