// The constants of attention's definition (attention_generic.cu): all sources must agree on them.
#pragma once

namespace rlbench {

// Keys are cut into blocks of so many, at absolute positions.
template <int kHeadDim>
constexpr int kBlockKeysOf = kHeadDim == 256 ? 80 : 128;

// And into splits of so many blocks, the nearest to 2048 keys. For one sequence of 32768 on an H200,
// 16 splits x 2 KV heads x 8 thread blocks fill its SMs just once, two each.
template <int kHeadDim>
constexpr int kSplitBlocksOf = (2048 + kBlockKeysOf<kHeadDim> / 2) / kBlockKeysOf<kHeadDim>;

}  // namespace rlbench
