// The constants of attention's definition (attention_generic.cu): all sources must agree on them.
#pragma once

namespace rlbench {

// Keys are cut into blocks of so many, at absolute positions.
template <int kHeadDim>
constexpr int kBlockKeysOf = kHeadDim == 256 ? 80 : 128;

// And into splits of so many blocks, about 2048 keys.
template <int kHeadDim>
constexpr int kSplitBlocksOf = 2048 / kBlockKeysOf<kHeadDim>;

}  // namespace rlbench
