// What the stand-ins for CUDA's built-ins and for the kernels' headers ask of the emulator
// (emulator.cpp): a thread block or a cluster of them as fibers of one thread of the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

// A thread of the kernel.
struct Thread {
  Index thread, block;
  unsigned rank;          // of its block in the cluster
  unsigned char* shared;  // its block's dynamic shared memory
  size_t shared_size;     // in bytes
};
extern Thread* running;
extern Index grid;

// Shared memory has addresses from here on: 0 is not one of them, as on a GPU.
constexpr unsigned kSharedBegin = 1024;
// In a cluster, the rank of its block is above them, as on a GPU.
constexpr unsigned kRankShift = 24;
constexpr unsigned kAddress = (1u << kRankShift) - 1;

// Ends the process and says why. What a kernel must not do is found here.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Where so many bytes of shared memory are, of this thread's block or of one of its cluster.
inline unsigned char* shared_bytes(unsigned address, size_t bytes) {
  const unsigned rank = address >> kRankShift;
  if (rank != 0 && rank != running->rank) fault("%u is another block's", address);
  const unsigned offset = (address & kAddress) - kSharedBegin;  // a very large one if before that
  if (offset + bytes > running->shared_size) {
    fault("shared memory has no %zu bytes at %u", bytes, address);
  }
  return running->shared + offset;
}
unsigned char* shared_bytes_of(unsigned rank, unsigned address, size_t bytes);

// Of global memory: all of them must be in one tensor.
void check_global(const void* pointer, size_t bytes);

// Lets the other threads run.
void yield();

// What each lane of the warp gives, seen by all 32: valid until the warp's next exchange but one.
struct Words {
  unsigned of[6];
};
const Words* exchange(const char* what, const Words& mine);

void sync_threads();
void cluster_arrive();
void cluster_wait();
void named_arrive(int id, unsigned threads);
void named_sync(int id, unsigned threads);

void barrier_init(unsigned barrier, unsigned arrivals);
void barrier_arrive(unsigned barrier);
void barrier_arrive(unsigned rank, unsigned barrier);
// Eight bytes to a block of the cluster, counted towards a barrier that it has.
void send(unsigned rank, unsigned address, float first, float second, unsigned barrier);
void barrier_wait(unsigned barrier, unsigned parity);
bool barrier_is_over(unsigned barrier, unsigned parity);
void barrier_must_be_over(unsigned barrier, unsigned parity);
// The phase is not complete before so many more bytes of boxes have arrived, too.
void barrier_expect(unsigned barrier, unsigned bytes);

// 16 bytes of zeros. A box must not be copied over them before this thread has fenced its writes.
void write_zeros(unsigned shared);
void fence_writes();

// Asynchronous copies of 16 bytes, zeros if absent. Lazy ones happen no sooner than somebody has
// waited for them.
void start_copy(unsigned shared, const void* global, bool present);
void commit_copies();
void wait_copies(size_t pending_groups);
void arrive_after_copies(unsigned barrier);

// A tensor of 16-bit elements and a box of it, up to five dimensions, the fastest first. It comes to
// shared memory with the swizzle of its rows' bytes.
struct TensorMap {
  uint64_t address;
  uint64_t shape[5];
  uint64_t strides[4];  // in bytes, of all dimensions but the first
  uint64_t box[5];
};

struct Coordinates {
  int of[5];
};

// Of a box that a kernel may ask for, some part is inside of the tensor.
void check_box(const TensorMap& map, const Coordinates& first);

// Asynchronous copies of boxes, zeros outside of the tensor; lazy in the same way.
// With several ranks, to as many blocks of the cluster.
void start_box(unsigned shared, const TensorMap& map, unsigned barrier, const Coordinates& first,
               unsigned ranks = 0);

// Asynchronous products, lazy in the same way: run(product) does the lane's part.
struct Product {
  void (*run)(const Product&);
  float* acc;
  uint64_t a, b;  // descriptors
  float rows[2][16];  // of A, instead of its descriptor
  bool accumulate;
};
void start_product(const Product& product);
void commit_products();
void wait_products(size_t pending_groups);

// Every 64-bit word is an argument of the kernel that the program was built for (call.h).
void call_kernel(const uint64_t* words, size_t count);

struct Launch {
  unsigned blocks, threads, ranks;  // ranks: blocks of a cluster
  size_t shared;                    // bytes
  bool lazy;
  unsigned seed;  // of the order in which threads run; 0: ascending
};

// Memory that ends, but for its alignment to 16 bytes, where nothing may be touched.
unsigned char* guarded(size_t bytes);

// Runs all blocks, one cluster at a time.
void launch(const Launch& launch, const uint64_t* words, size_t count);

// Names memory that check_global() accepts.
void allow(const void* begin, size_t bytes);

}  // namespace emulator
