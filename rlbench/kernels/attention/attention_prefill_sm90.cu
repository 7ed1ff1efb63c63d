// Attention for prefills and chunks on Hopper: wgmma, one producer and two or three consumer
// warpgroups, the bits of attention_generic.cu, whose head defines the result.
//
// What is the same, and why the bits are: a warp has 16 rows and the accumulators are in the same
// lanes, so masks, softmax, weights and merging are the generic kernel's own code; a wgmma k16 step
// adds its 16 products as mma.sync's does, and the steps ascend in the same order.
//
// THE SCHEDULE
//
// A thread block takes tiles of rows, (position, head in group) pairs, 64 for each consumer
// warpgroup, dealt out as `Places` and `Deal` say. The producer runs ahead, into the
// next tile, too. It copies Q, and K and V into two stages each, zeros for absent ones, and with Q a
// note of what the tile is: the divisions that tell positions from heads are made once, while there
// is time. Tiles without keys it writes itself. A consumer starts the next block's scores, then the
// last block's P V, and begins its softmax while the latter runs. The rest of the softmax hides what
// is done to O and the rounding of weights. It writes a tile while the next one's first scores are
// computed:
//
//     softmax(0);  for j = 1 ..: { start S(j); start O += P(j-1) V(j-1); wait S(j); begin softmax(j);
//     wait O; end softmax(j), meanwhile rescale O; P(j) }  start O += P(last) V(last); start the next
//     S(0); wait O; write O; wait S(0)
//
// Where j begins a split, O is merged with what waits instead of rescaled, and waits itself: in
// shared memory, or at head dim 256, which leaves no room there, in global memory.
//
// Shared memory holds matrices as panels of 64 elements (128 bytes) a row, which wgmma reads through
// descriptors: Q and K along the sum's dimension, V across it.
//
// Packed keys can come by TMA: a block of K or V is one box of a tensor map, which one thread asks
// for. So can Q where a tile is whole positions. What a box has beyond the end of a sequence is
// another one's rows, or zeros: nobody writes what becomes of them. Everything else comes by
// cp.async, a chunk at a time. Both write the same bytes.
//
// Where K and V come by TMA, two thread blocks can be a cluster that takes neighbouring tiles: each asks
// for half of a block of K or V, which comes to both. Both go through the keys that one of them sees: to
// the other, the last ones are masked.

#include "cluster.cuh"
#include "copy.cuh"
#include "definition.cuh"
#include "keys.cuh"
#include "mbarrier.cuh"
#include "numeric.cuh"
#include "places.cuh"
#include "parameters.cuh"
#include "softmax.cuh"
#include "tile_rows.cuh"
#include "tma.cuh"
#include "waiting.cuh"
#include "wgmma.cuh"

// The build's defines: HEAD_DIM (64, 128, 256), ELEMENT (Bf16, Fp16), PAGED (0, 1), TMA (0, 1),
// TMA_Q (0, 1), CONSUMERS (2, 3), RANKS (1, 2: blocks of a cluster), SHARED_BYTES (what the launch
// reserves), KERNEL_NAME.

using namespace rlbench;

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockKeys = kBlockKeysOf<kHeadDim>;
constexpr int kSplitBlocks = kSplitBlocksOf<kHeadDim>;
constexpr bool kPaged = PAGED != 0;
constexpr bool kTma = TMA != 0;      // for K and V
constexpr bool kTmaQ = TMA_Q != 0;
constexpr int kRanks = RANKS;
using Element = ELEMENT;

constexpr int kConsumers = CONSUMERS;                // warpgroups
constexpr int kTileRows = 64 * kConsumers;
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kThreads = 128 + kConsumerThreads;     // the producer comes first
constexpr int kStages = 2;
constexpr int kPanels = kHeadDim / 64;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kKeySteps = kBlockKeys / 16;
constexpr int kDimTiles = kHeadDim / 8;

constexpr int kQPanel = kTileRows * 128;             // bytes
constexpr int kKeyPanel = kBlockKeys * 128;
constexpr int kStageBytes = kPanels * kKeyPanel;
constexpr int kQTile = 0;
constexpr int kKTiles = kQTile + kPanels * kQPanel;
constexpr int kVTiles = kKTiles + kStages * kStageBytes;
// Between splits O waits in shared memory where there is room for it, which costs far less than a way
// to the L2 and back.
constexpr bool kWaitsHere = kHeadDim <= 128;
constexpr int kWaitingTile = kVTiles + kStages * kStageBytes;
// A thread's float4s of O, and of its rows' maxima and sums, for which registers have to do else.
constexpr int kWaiting = kDimTiles + (kHeadDim == 128 ? 0 : 1);
constexpr int kFirstTiles = kKeyTiles / 4;  // of weights, made before products are waited for
// What pays depends on what there are registers for: O leaves, after a split, while the next scores are
// computed, and K is known to be there before that matters; multiplications by 1 are left out.
constexpr bool kLeavesLate = kHeadDim == 128;
constexpr bool kPeeks = kHeadDim <= 128;
constexpr bool kBranches = kHeadDim == 256;
using Note = TileNote<kTileRows>;
constexpr int kNotes = kWaitingTile + (kWaitsHere ? kConsumerThreads * kWaiting * 16 : 0);
constexpr int kBarriers = kNotes + 2 * static_cast<int>(sizeof(Note));
constexpr int kAlignment = 1024;                     // of what descriptors name
constexpr int kSharedBytes = kBarriers + (4 * kStages + 1) * 8 + kAlignment;

static_assert(!(kPaged && kTma), "pages are looked up, and a box has but one address");
static_assert(kRanks == 1 || (kTma && kPanels % kRanks == 0), "blocks share panels that come by TMA");
static_assert(SHARED_BYTES == kSharedBytes, "SHARED_BYTES");
static_assert(kKeyPanel % kAlignment == 0 && kQPanel % kAlignment == 0, "panels stay aligned");

// Registers of a thread. Together they are what the block was launched with, or a warpgroup waits for
// registers that nobody gives.
static_assert(kConsumers == 2 || (kConsumers == 3 && kTma), "registers for consumers");
constexpr bool kWide = kHeadDim == 256;  // consumers need more, and the producer less
constexpr int kProducerRegisters = kConsumers == 3    ? 32
                                   : !kTma            ? (kWide ? 40 : 56)
                                   : kTmaQ || kWide   ? 24
                                                      : 40;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : (504 - kProducerRegisters) / 2;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * (65536 / kThreads / 8 * 8),
              "the launch's registers");

// The producer's warps that prepare tiles, and arrivals at barriers when Q, or a block of K or V, is
// there: each thread arrives for what it has written, and where the barrier waits for copies, once more.
constexpr int kTileWarps = kTma ? 3 : 4;
constexpr int kTileThreads = 32 * kTileWarps;
constexpr int kTileArrivals = kTileThreads * (kTmaQ || kTma ? 1 : 2);
constexpr int kKeyArrivals = kTma ? 1 : 128;

// The consumers start their products in turns, so that one's softmax runs under another's products
// instead of all waiting for a tensor core that they share.
constexpr int kTurnThreads = 256;  // one that gives way, and the next one
// Named barriers: a turn of each consumer's, and for Q, which is read for long. An mbarrier that is waited
// for is asked again and again, at the cost of those who work.
constexpr int kFirstTurn = 1, kFreeQ = kFirstTurn + kConsumers;

struct KeyTile {
  static constexpr int kRowBytes = 128;
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kKeyPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};
using Keys = KeyRows<kHeadDim, kBlockKeys, 4, kPaged, KeyTile>;

struct QTile {
  static __device__ __forceinline__ unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * kQPanel) + swizzled_offset<128>(row, chunk % 8);
  }
};

// Which of the stages a block of keys is in, and the parity of its turn there.
struct Turn {
  unsigned stage, parity;
  __device__ __forceinline__ explicit Turn(int block)
      : stage(static_cast<unsigned>(block) % kStages),
        parity(static_cast<unsigned>(block) / kStages % 2) {}
};

// What is the same in all lanes, in a register from here on, instead of being computed again
// wherever it is used.
__device__ __forceinline__ unsigned kept(unsigned value) {
  return __shfl_sync(kFullWarp, value, 0);
}

// A matrix, or several that lie behind one another. Its descriptor is kept if there are registers.
class KeptMatrix {
  unsigned shared, panel_stride, low;

 public:
  __device__ __forceinline__ KeptMatrix(unsigned shared, unsigned panel_stride)
      : shared(shared), panel_stride(panel_stride) {
    if constexpr (!kWide) low = kept(Matrix(shared, panel_stride).low);
  }

  // What begins so many bytes on.
  __device__ __forceinline__ Matrix operator()(unsigned bytes) const {
    Matrix matrix(shared + bytes, panel_stride);
    if constexpr (!kWide) matrix.low = low + (bytes >> 4);
    return matrix;
  }
};

// Starts S = Q K^T for one warpgroup's 64 rows.
__device__ __forceinline__ void start_scores(float (&scores)[kKeyTiles][4], const Matrix& q,
                                             const Matrix& k) {
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    Wgmma<Element, kKeyTiles>::scores(scores, q.descriptor(d / 4 * kQPanel + d % 4 * 32),
                                      k.descriptor(d / 4 * kKeyPanel + d % 4 * 32), d > 0);
  }
}

// Starts O += P V, or O = P V.
__device__ __forceinline__ void start_values(float (&acc)[kDimTiles][4],
                                             const unsigned (&weights)[kKeySteps][4],
                                             const Matrix& v, bool accumulate) {
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    Wgmma<Element, kDimTiles>::values(acc, weights[step], v.descriptor(step * 16 * 128),
                                      accumulate || step > 0);
  }
}

using Rows = TileRows<kTileRows, kPaged>;

// Some row of the tile sees keys up to there.
__device__ __forceinline__ int end_of(const Rows& rows) {
  return rows.count > 0 ? rows.limit(kTileRows - 1) : 0;
}

__device__ __forceinline__ int blocks_until(int end) {
  return end > 0 ? (end + kBlockKeys - 1) / kBlockKeys : 0;
}

// Blocks that are loaded: none where a row's result would have to wait and there is no room.
__device__ __forceinline__ int blocks_loaded(int end, bool can_wait) {
  const int blocks = blocks_until(end);
  return can_wait || blocks <= kSplitBlocks ? blocks : 0;
}

// What comes of a tile without blocks: nothing, or NaN where there should have been some.
__device__ __forceinline__ void write_nothing(const Rows& rows, unsigned short* out,
                                              long long row_stride, long long head_stride,
                                              float* lse, int thread) {
  const bool impossible = blocks_until(end_of(rows)) > 0;
  const float value = impossible ? kNan : 0.0f;
  const unsigned pair = Element::pack(value, value);
#pragma unroll 1
  for (int row = thread; row < rows.count; row += kTileThreads) {
    uint4* target = reinterpret_cast<uint4*>(out + rows.offset(row, row_stride, head_stride));
#pragma unroll 1
    for (int chunk = 0; chunk < kHeadDim / 8; ++chunk) {
      target[chunk] = make_uint4(pair, pair, pair, pair);
    }
    if (lse != nullptr) lse[rows.offset(row, rows.heads(), 1)] = impossible ? kNan : -kInfinity;
  }
}

// Before wgmma reads what a barrier has announced. With TMA there is nothing to do, or the producer
// has done it.
__device__ __forceinline__ void see_copies() {
  if constexpr (!kTma) fence_async_proxy();
}

// The producer's waits for stages.
__device__ __forceinline__ void await_free(unsigned empty, unsigned parity) {
  if constexpr (kTma) {
    mbarrier_sleep(empty, parity);
  } else {
    mbarrier_wait(empty, parity);  // all its warps copy, and have no registers for the other
  }
}

// Of Q (tensor_map.py): the dimensions are the elements of a panel, heads, rows, and panels.
#if TMA_Q
#define Q_MAP , const __grid_constant__ TensorMap q_map
#else
#define Q_MAP
#endif

// Of K and V: the elements of a panel, keys, the last of which is the tile's, panels, KV heads, and
// where in the tensor the tile's keys end.
#if TMA
#define KEY_MAPS , const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map
#else
#define KEY_MAPS
#endif

#if RANKS > 1
#define CLUSTER __cluster_dims__(RANKS, 1, 1)
#else
#define CLUSTER
#endif

// work: [grid, kConsumerThreads, kDimTiles + 1, 4], see waiting.cuh. Where O waits in shared memory,
// it only says that rows may have to wait.
extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, 1)
    KERNEL_NAME(RLBENCH_ATTENTION_PARAMETERS, long long sequences_arg, long long tiles_arg,
                long long causal_arg, double scale_arg, double scale_log2_arg, long long section_arg
                    Q_MAP KEY_MAPS) {
  extern __shared__ unsigned char shared_memory[];
  const unsigned misaligned = shared_address(shared_memory) % kAlignment;
  unsigned char* aligned = shared_memory + (misaligned ? kAlignment - misaligned : 0);
  const unsigned base = kept(shared_address(aligned));
  const auto barrier = [&](int which, unsigned stage) {
    return base + kBarriers + (which * kStages + static_cast<int>(stage)) * 8;
  };
  constexpr int kFullK = 0, kFullV = 1, kEmptyK = 2, kEmptyV = 3;
  const unsigned full_q = base + kBarriers + 4 * kStages * 8;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const unsigned rank = kRanks > 1 ? cluster_rank() : 0;

  const unsigned kv_heads = static_cast<unsigned>(kv_heads_arg);
  const Places<Rows, kRanks> places = {static_cast<unsigned>(tiles_arg), kv_heads,
                         kv_heads * static_cast<unsigned>(sequences_arg),
                         static_cast<unsigned>(group_arg), static_cast<unsigned>(section_arg),
                         causal_arg != 0};

  if (threadIdx.x == 0) {
    for (unsigned stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier(kFullK, stage), kKeyArrivals);
      mbarrier_init(barrier(kFullV, stage), kKeyArrivals);
      mbarrier_init(barrier(kEmptyK, stage), kRanks * kConsumerThreads / 32);
      mbarrier_init(barrier(kEmptyV, stage), kRanks * kConsumerThreads / 32);
    }
    mbarrier_init(full_q, kTileArrivals);
    if constexpr (kTma || kTmaQ) fence_async_proxy();
    if constexpr (kRanks > 1) fence_barriers();
  }
  if constexpr (kRanks > 1) {
    cluster_begin();
    cluster_wait_for_others();
  } else {
    __syncthreads();
  }
  // The tile of a place, and the keys that the cluster goes through.
  const auto rows_at = [&](unsigned place) {
    return places(place, rank, cu_seqlens_q, lengths_k);
  };
  const auto end_at = [&](unsigned place, const Rows& rows) {
    const int end = end_of(rows);
    if constexpr (kRanks == 1) return end;
    const int other = end_of(places(place, rank ^ 1, cu_seqlens_q, lengths_k));
    return end > other ? end : other;
  };

  Note* const notes = reinterpret_cast<Note*>(aligned + kNotes);  // of a tile and the next one

  // Blocks of keys, and tiles with any, that this thread block has had before the present tile.
  int earlier_blocks = 0;
  unsigned earlier_tiles = 0;

  if (warp < 4) {
    // --- the producer ----------------------------------------------------------------------------
    give_registers<kProducerRegisters>();
    const int tile_warp = warp - (4 - kTileWarps);
    const int tile_thread = tile_warp * 32 + lane;
    // Waits until nobody reads the last Q: then nobody reads the note of the tile before it either.
    const auto await_free_q = [&]() {
      if (earlier_tiles > 0) named_barrier(kFreeQ, kConsumerThreads + kTileThreads);
    };
#if TMA_Q
    if (tile_warp == 0 && is_elected()) prefetch_tensor_map(&q_map);
    // Of a warp, once it has noted its rows.
    const auto bring_q = [&](const Rows& rows, int first_place) {
      // A tile without rows is there for the sake of another one's keys.
      if (tile_warp == 0 && (kRanks == 1 || rows.count > 0) && is_elected()) {
        mbarrier_expect(full_q, kPanels * kQPanel);
        copy_box(base + kQTile, &q_map, full_q, 0, static_cast<int>(rows.kv_head * rows.group),
                 first_place, 0, 0);
      }
      mbarrier_arrive(full_q);
    };
#else
    const auto bring_q = [&](const Rows& rows, int) {
#pragma unroll 1
      for (int part = tile_warp; part < kTileRows / kWarpRows; part += kTileWarps) {
        rows.copy_q<kHeadDim, QTile>(base + kQTile, q, q_row_stride, q_head_stride,
                                     part * kWarpRows, lane);
      }
      if constexpr (kTma) {
        copy_async_wait_all();
        fence_async_proxy();
      } else {
        mbarrier_arrive_after_copies(full_q);
      }
      mbarrier_arrive(full_q);
    };
#endif
    // A note, and Q, for the consumers.
    const auto announce = [&](const Rows& rows, int blocks) {
      constexpr int kOwn = (kTileRows + kTileThreads - 1) / kTileThreads;
      int own[kOwn];  // made while there is time
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i] = rows.place(tile_thread + i * kTileThreads);
      const int first_place = rows.place(0);
      await_free_q();
      Note& note = notes[earlier_tiles % 2];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int row = tile_thread + i * kTileThreads;
        if (row < kTileRows) note.places[row] = own[i];
      }
      if (tile_thread == 0) rows.note(note, blocks);
      bring_q(rows, first_place);
      ++earlier_tiles;
    };
    // A note that there are no more tiles.
    const auto announce_end = [&]() {
      await_free_q();
      if (tile_thread == 0) notes[earlier_tiles % 2].blocks = 0;
      if constexpr (!kTma && !kTmaQ) mbarrier_arrive(full_q);  // where copies do
      mbarrier_arrive(full_q);
    };
#if TMA
    if (warp == 0) {
      if (!is_elected()) return;
      prefetch_tensor_map(&k_map);
      prefetch_tensor_map(&v_map);
      for (Deal<kRanks> deal; deal.place < places.count(); deal.next()) {
        const Rows rows = rows_at(deal.place);
        const int end = end_at(deal.place, rows);
        const int blocks = blocks_loaded(end, work != nullptr);
        if (blocks == 0) continue;
        const int first_row = static_cast<int>(page_size_arg) - end;  // zeros from `end` on
        const auto load = [&](const TensorMap* map, int tiles, int full, int empty, int block) {
          const Turn turn(earlier_blocks + block);
          await_free(barrier(empty, turn.stage), turn.parity ^ 1);
          mbarrier_arrive_expecting(barrier(full, turn.stage), kStageBytes);
          constexpr int kOwnPanels = kPanels / kRanks;
          copy_box<kRanks>(base + tiles + turn.stage * kStageBytes + rank * kOwnPanels * kKeyPanel,
                           map, barrier(full, turn.stage), 0, first_row + block * kBlockKeys,
                           static_cast<int>(rank) * kOwnPanels, static_cast<int>(rows.kv_head),
                           rows.k_begin + end);
        };
        // In the order in which stages become free.
        load(&k_map, kKTiles, kFullK, kEmptyK, 0);
#pragma unroll 1
        for (int block = 1; block < blocks; ++block) {
          load(&k_map, kKTiles, kFullK, kEmptyK, block);
          load(&v_map, kVTiles, kFullV, kEmptyV, block - 1);
        }
        load(&v_map, kVTiles, kFullV, kEmptyV, blocks - 1);
        earlier_blocks += blocks;
      }
      return;
    }
    // Other warps prepare tiles, so that neither waits for the other's stages.
    for (Deal<kRanks> deal; deal.place < places.count(); deal.next()) {
      const Rows rows = rows_at(deal.place);
      const int blocks = blocks_loaded(end_at(deal.place, rows), work != nullptr);
      if (blocks == 0) {
        write_nothing(rows, out, out_row_stride, out_head_stride, lse, tile_thread);
      } else {
        announce(rows, blocks);
      }
    }
    announce_end();
#else
    const Strides k_strides = {k_page_stride, k_row_stride, k_head_stride};
    const Strides v_strides = {v_page_stride, v_row_stride, v_head_stride};
    for (Deal<kRanks> deal; deal.place < places.count(); deal.next()) {
      const Rows rows = rows_at(deal.place);
      const int blocks = blocks_loaded(end_at(deal.place, rows), work != nullptr);
      if (blocks == 0) {
        write_nothing(rows, out, out_row_stride, out_head_stride, lse, tile_thread);
        continue;
      }
      const unsigned short* k_head = k + rows.kv_head * k_strides.head;
      const unsigned short* v_head = v + rows.kv_head * v_strides.head;
      Keys keys;
      keys.table = kPaged ? block_table + rows.sequence * table_stride : nullptr;
      keys.page_size = static_cast<unsigned>(page_size_arg);
      keys.first_row = rows.k_begin;
      keys.end = rows.limit(kTileRows - 1);
      announce(rows, blocks);
      for (int block = 0; block < blocks; ++block) {
        const Turn turn(earlier_blocks + block);
        const unsigned offset = turn.stage * kStageBytes;
        const int first_key = block * kBlockKeys;
        keys.find(first_key, warp, lane);
        await_free(barrier(kEmptyK, turn.stage), turn.parity ^ 1);
        keys.copy(base + kKTiles + offset, k_head, k_strides, first_key, warp, lane);
        mbarrier_arrive_after_copies(barrier(kFullK, turn.stage));
        await_free(barrier(kEmptyV, turn.stage), turn.parity ^ 1);
        keys.copy(base + kVTiles + offset, v_head, v_strides, first_key, warp, lane);
        mbarrier_arrive_after_copies(barrier(kFullV, turn.stage));
      }
      earlier_blocks += blocks;
    }
    announce_end();
    copy_async_wait_all();  // before the block's shared memory can go to another
#endif
    return;
  }

  // --- a consumer --------------------------------------------------------------------------------
  take_registers<kConsumerRegisters>();
  const int consumer = warp / 4 - 1;
  const int warp_row = (warp - 4) * kWarpRows;
  const unsigned thread = threadIdx.x - 128;
  // Through a shuffle, so that it is not converted again for every block.
  const float scale_log2 = __shfl_sync(kFullWarp, static_cast<float>(scale_log2_arg), 0);
  const float lowest = __shfl_sync(kFullWarp, -kInfinity, 0);  // nor known
  const long long all_heads = static_cast<long long>(kv_heads) * places.group;
  const KeptMatrix q_matrix(base + kQTile + consumer * 64 * 128, 16);
  const KeptMatrix k_matrix(base + kKTiles, 16), v_matrix(base + kVTiles, kKeyPanel);
  const int next_consumer = consumer + 1 < kConsumers ? consumer + 1 : 0;

  if (next_consumer == 0) named_barrier_arrive(kFirstTurn, kTurnThreads);  // the first one begins

  const auto release = [&](unsigned empty) {
    __syncwarp();
    if constexpr (kRanks == 1) {
      if (lane == 0) mbarrier_arrive(empty);
    } else if (lane < kRanks) {
      mbarrier_arrive_remote(shared_of(empty, static_cast<unsigned>(lane)));
    }
  };

  float scores[kKeyTiles][4];
  // Waits for a tile: the number of its blocks, or 0 if there is none.
  const auto await_tile = [&](unsigned tile) {
    mbarrier_sleep(full_q, tile % 2);
    return notes[tile % 2].blocks;
  };
  const auto start_first_scores = [&]() {
    const Turn turn(earlier_blocks);
    mbarrier_sleep(barrier(kFullK, turn.stage), turn.parity);
    see_copies();
    keep_order(scores);
    wgmma_fence();
    start_scores(scores, q_matrix(0), k_matrix(turn.stage * kStageBytes));
    wgmma_commit();
  };
  const auto end_scores = [&](int blocks, int block) {
    keep_order(scores);
    release(barrier(kEmptyK, Turn(earlier_blocks + block).stage));
    if (block == blocks - 1) named_barrier_arrive(kFreeQ, kConsumerThreads + kTileThreads);
  };

  int blocks = await_tile(0);
  if (blocks > 0) {
    start_first_scores();
    wgmma_wait<0>();
    end_scores(blocks, 0);
  }
  while (blocks > 0) {
    const NotedRows<kTileRows> rows(notes[earlier_tiles % 2], places.group, all_heads,
                                    places.causal);
    // What follows from the lane is computed again where it is needed: the registers are worth more
    // than the time.
    const auto same_lane = [&]() {
      int same = lane;
      asm volatile("" : "+r"(same));
      return same;
    };
    const int whole = rows.limit(warp_row) / kBlockKeys;  // blocks that all the warp's rows see
    SoftmaxRows softmax;
    float acc[kDimTiles][4] = {};
    float rescale[2];
    unsigned weights[kKeySteps][4];

    float4 waiting_rows;  // maxima and sums, where they wait in registers
    const auto waiting = [&]() {
      float4* all = kWaitsHere ? reinterpret_cast<float4*>(aligned + kWaitingTile)
                               : reinterpret_cast<float4*>(work) +
                                     static_cast<long long>(blockIdx.x) * kConsumerThreads * kWaiting;
      return all + (thread / 32 * 32 * kWaiting + lane);
    };
    const auto rows_of = [&](float4* there) -> float4& {
      return kWaiting > kDimTiles ? there[kDimTiles * 32] : waiting_rows;
    };
    // What came of a split waits, merged with what came of those before it.
    const auto end_split = [&](SoftmaxRows& ended, bool first) {
      float4* const there = waiting();
      float4& rows = rows_of(there);
      if (kLeavesLate && !first) {
        join(there, rows, ended, acc, scale_log2);
      } else {
        if (!first) meet(there, rows, ended, acc, scale_log2);
        rows = both_of(ended);
        leave(there, acc);
      }
    };
    const auto hide_scores = [&](int block) {
      if (block >= whole) rows.hide(scores, block * kBlockKeys, warp_row, same_lane());
    };
    const auto round_weights = [&]() {
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float(&from)[4] = scores[2 * step + half];
          weights[step][2 * half] = Element::pack(from[0], from[1]);
          weights[step][2 * half + 1] = Element::pack(from[2], from[3]);
        }
      }
    };

    hide_scores(0);
    const float second = softmax.begin_block<kFirstTiles>(scores, scale_log2, rescale, lowest);
    softmax.end_block<kFirstTiles>(scores, second, scale_log2, rescale);
    round_weights();
    SoftmaxRows ended;
    int place = 0;  // in its split, of the block whose weights there are
    bool is_k_there = false;
    for (int block = 1; block < blocks; ++block) {
      const Turn turn(earlier_blocks + block);
      const Turn before(earlier_blocks + block - 1);
      if (!is_k_there) mbarrier_sleep(barrier(kFullK, turn.stage), turn.parity);
      see_copies();
      named_barrier(kFirstTurn + consumer, kTurnThreads);
      keep_order(scores);
      keep_order(acc);
      keep_order(weights);
      wgmma_fence();
      start_scores(scores, q_matrix(0), k_matrix(turn.stage * kStageBytes));
      wgmma_commit();
      const bool leaves = kLeavesLate && place == 0 && block > 1;
      if (leaves) {
        named_barrier_arrive(kFirstTurn + next_consumer, kTurnThreads);
        end_split(ended, block - 1 == kSplitBlocks);
      }
      mbarrier_sleep(barrier(kFullV, before.stage), before.parity);
      see_copies();
      start_values(acc, weights, v_matrix(before.stage * kStageBytes), place > 0);
      wgmma_commit();
      if (!leaves) named_barrier_arrive(kFirstTurn + next_consumer, kTurnThreads);
      wgmma_wait<1>();
      end_scores(blocks, block);
      // With a new split, weights are relative to nothing.
      const bool splits = place == kSplitBlocks - 1;
      place = splits ? 0 : place + 1;
      if (splits || !kLeavesLate) ended = softmax;  // where it is not needed for long, a copy costs less
      if (splits) softmax = SoftmaxRows();
      hide_scores(block);
      float second = softmax.begin_block<kFirstTiles>(scores, scale_log2, rescale, lowest);
      // ptxas would wait for the products at once; but it moves no wait past a loop, and this one takes
      // the rescaling. It never turns: the barrier's phase is over, and stays so until V is released.
      keep_order(scores);
      keep_order(second);
      mbarrier_hold_until(rescale[0], barrier(kFullV, before.stage), before.parity);
      wgmma_wait<0>();
      keep_order(acc);
      keep_order(weights);
      keep_order(second);
      release(barrier(kEmptyV, before.stage));
      if (kPeeks) {
        const Turn next(earlier_blocks + block + 1);
        is_k_there = mbarrier_is_over(barrier(kFullK, next.stage), next.parity);
      }
      softmax.end_block<kFirstTiles>(scores, second, scale_log2, rescale);
      round_weights();
      if constexpr (kBranches) {
        const bool changed = __any_sync(kFullWarp, rescale[0] != 1.0f || rescale[1] != 1.0f);
        if (splits) {
          end_split(ended, block == kSplitBlocks);
          forget(scores);  // more of O can be on its way at a time
        } else if (changed) {
          rescale_all(acc, rescale);
        }
      } else {
        if (splits) rescale[0] = rescale[1] = 1.0f;  // what ended is not to be rescaled
        rescale_all(acc, rescale);
        if (splits && !kLeavesLate) end_split(ended, block == kSplitBlocks);
      }
    }
    if (kLeavesLate && place == 0 && blocks > 1) end_split(ended, blocks - 1 == kSplitBlocks);
    const Turn turn(earlier_blocks + blocks - 1);
    mbarrier_sleep(barrier(kFullV, turn.stage), turn.parity);
    see_copies();
    keep_order(acc);
    keep_order(weights);
    wgmma_fence();
    start_values(acc, weights, v_matrix(turn.stage * kStageBytes), place > 0);
    wgmma_commit();
    earlier_blocks += blocks;
    const auto end_values = [&]() {
      keep_order(acc);
      keep_order(weights);
      release(barrier(kEmptyV, turn.stage));
      if (blocks > kSplitBlocks) {
        float4* const there = waiting();
        meet(there, rows_of(there), softmax, acc, scale_log2);
      }
      rows.write<Element>(softmax, acc, out, out_row_stride, out_head_stride, lse, scale_arg, false,
                          warp_row, same_lane());
    };
    // The next tile's S(0) runs while O is written.
    const int next_blocks = await_tile(earlier_tiles + 1);
    if (next_blocks > 0) {
      start_first_scores();
      wgmma_wait<1>();
      end_values();
      wgmma_wait<0>();
      end_scores(next_blocks, 0);
    } else {
      wgmma_wait<0>();
      end_values();
    }
    blocks = next_blocks;
    ++earlier_tiles;
  }
  // The last giving way is met, so that none is left over.
  if (consumer == 0) named_barrier(kFirstTurn, kTurnThreads);
  if constexpr (kRanks > 1) {
    // Not before the others have said here what they have released.
    cluster_end();
    cluster_wait_for_others();
  }
}
