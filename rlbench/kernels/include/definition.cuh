// The constants of attention's definition (attention_generic.cu): all sources must agree on them.
#pragma once

namespace rlbench {

// Keys are cut into blocks of so many, at absolute positions.
template <int kHeadDim>
constexpr int kBlockKeysOf = kHeadDim == 256 ? 80 : 128;

// And into splits of so many blocks: 2240 or 2304 keys. One sequence of 32768 then has 15 splits, and
// with 2 KV heads 30 clusters of 8 thread blocks, as many as an H200 has room for at a time.
template <int kHeadDim>
constexpr int kSplitBlocksOf = kHeadDim == 256 ? 28 : 18;

}  // namespace rlbench
