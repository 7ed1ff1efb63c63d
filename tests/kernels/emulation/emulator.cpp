// Thread blocks and clusters as fibers: who runs when, what waits for what, and what is a deadlock.

#include "emulator.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

namespace emulator {

// Saves the callee's registers on this stack and goes on with those of another one.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.global emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStack = 24 * kPage;
constexpr int kSavedRegisters = 6;

// Threads that meet. Waiting is for `generation` to change, here and in all that follows.
struct Meeting {
  unsigned arrived = 0, generation = 0;

  void arrive(unsigned expected) {
    if (++arrived == expected) {
      arrived = 0;
      ++generation;
    }
  }

  // Somebody who has not arrived will not.
  void leave(unsigned expected) {
    if (arrived != expected) return;
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  Meeting meeting;
  const char* what = nullptr;
  Words words[2][32];
};

// Eight bytes on their way to another block's shared memory.
struct Sent {
  unsigned char* to;
  float values[2];
};

// Its phase ends when all have arrived and all expected bytes are there.
struct Barrier {
  unsigned arrived = 0, generation = 0, expected = 0;
  std::vector<Sent> sent;  // lands at the end of the phase
  long long bytes = 0;  // that are still to come; or have come before somebody expected them

  void arrive() {
    ++arrived;
    end_phase();
  }

  void receive(long long count) {
    bytes -= count;
    end_phase();
  }

  void end_phase() {
    if (arrived < expected || bytes != 0) return;
    if (arrived > expected) fault("an mbarrier of %u has %u arrivals", expected, arrived);
    land();
    arrived = 0;
    ++generation;
  }

  void land() {
    for (const Sent& it : sent) std::memcpy(it.to, it.values, sizeof it.values);
    sent.clear();
  }
};

struct Box {
  unsigned char* shared;  // memory, and its address
  unsigned address;
  TensorMap map;
  Coordinates first;
  Barrier* barrier;
};

struct Block {
  unsigned char* shared;
  unsigned threads, live;
  std::vector<Warp> warps;
  Meeting all;
  Meeting named[16];
  unsigned named_threads[16] = {};
  std::map<unsigned, Barrier> barriers;
  std::deque<Box> boxes;  // that have not arrived
  std::map<unsigned, const Thread*> unfenced;  // writes, and whose they are
};

struct Cluster {
  std::vector<Block> blocks;
  unsigned live;  // threads
  Meeting meeting;
};

struct Copy {
  unsigned shared;
  const void* global;
  bool present;
};

// Copies that are waited for together, and what arrives after them, if anything.
struct CopyGroup {
  std::vector<Copy> copies;
  Barrier* barrier = nullptr;
};

struct Fiber : Thread {
  void* stack_pointer;
  Block* mine;
  bool done = false;
  const unsigned* watched = nullptr;  // it cannot run while this is `seen`
  unsigned seen = 0;
  const char* waits_for = "";
  unsigned which = 0;
  unsigned cluster_generation = 0;
  std::vector<Copy> open_copies;
  std::deque<CopyGroup> copy_groups;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> product_groups;
};

struct Range {
  const unsigned char* begin;
  size_t bytes;
};

Cluster* cluster;
void* scheduler;
Launch launched;
const uint64_t* arguments;
size_t argument_count;
std::vector<Range> tensors;

Fiber& fiber() { return *static_cast<Fiber*>(running); }
Block& block() { return *fiber().mine; }
unsigned lane() { return running->thread.x % 32; }

// what, which: for report_deadlock().
void wait_for_change(const unsigned& counter, unsigned seen, const char* what,
                     unsigned which = 0) {
  while (counter == seen) {
    Fiber& self = fiber();
    self.watched = &counter;
    self.seen = seen;
    self.waits_for = what;
    self.which = which;
    emulator_switch(&self.stack_pointer, scheduler);
    self.watched = nullptr;
  }
}

void meet(Meeting& meeting, unsigned expected, const char* what, unsigned which = 0) {
  const unsigned generation = meeting.generation;
  meeting.arrive(expected);
  wait_for_change(meeting.generation, generation, what, which);
}

Barrier& barrier_at(unsigned address, Block& owner = block()) {
  const auto found = owner.barriers.find(address & kAddress);
  if (found == owner.barriers.end()) fault("there is no mbarrier at %u", address);
  return found->second;
}

void perform(const Fiber& owner, const CopyGroup& group) {
  for (const Copy& copy : group.copies) {
    unsigned char* to = owner.shared + (copy.shared - kSharedBegin);
    if (copy.present) {
      std::memcpy(to, copy.global, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
  if (group.barrier) group.barrier->arrive();
}

// By 16 bytes of a row.
void perform(const Box& box) {
  const uint64_t* size = box.map.box;
  unsigned offset = 0;
  uint64_t at[5];
  for (at[4] = 0; at[4] < size[4]; ++at[4]) {
    for (at[3] = 0; at[3] < size[3]; ++at[3]) {
      for (at[2] = 0; at[2] < size[2]; ++at[2]) {
        for (at[1] = 0; at[1] < size[1]; ++at[1]) {
          for (at[0] = 0; at[0] < size[0]; at[0] += 8, offset += 16) {
            uint64_t from = box.map.address;
            bool inside = true;
            for (int d = 0; d < 5; ++d) {
              // A negative coordinate becomes one that is very large.
              const uint64_t place = static_cast<uint64_t>(box.first.of[d]) + at[d];
              inside = inside && place < box.map.shape[d];
              from += place * (d == 0 ? 2 : box.map.strides[d - 1]);
            }
            // The swizzle is a function of the address.
            const unsigned address = box.address + offset;
            const unsigned last_chunk = static_cast<unsigned>(size[0] / 8 - 1);
            const unsigned swizzled = address ^ (address >> 7 & last_chunk) << 4;
            unsigned char* to = box.shared + (swizzled - box.address);
            if (inside) {
              check_global(reinterpret_cast<void*>(from), 16);
              std::memcpy(to, reinterpret_cast<void*>(from), 16);
            } else {
              std::memset(to, 0, 16);
            }
          }
        }
      }
    }
  }
  box.barrier->receive(offset);
}

void run_thread() {
  call_kernel(arguments, argument_count);
  Fiber& self = fiber();
  if (!self.product_groups.empty()) fault("a thread ended before its products");
  for (const CopyGroup& group : self.copy_groups) {
    if (!group.copies.empty()) fault("a thread ended before its copies");
  }
  if (!self.open_copies.empty()) fault("a thread ended before its copies");
  self.done = true;
  self.waits_for = "";
  self.which = 0;
  if (--cluster->live > 0) cluster->meeting.leave(cluster->live);
  if (--self.mine->live == 0 && !self.mine->boxes.empty()) fault("a block ended before its boxes");
  emulator_switch(&self.stack_pointer, scheduler);
}

// Each thread's first lazy copies that a barrier is to hear of, and a box of each block, any of them,
// once nobody can go on without some.
bool perform_awaited(std::vector<Fiber>& fibers) {
  bool any = false;
  for (Block& each : cluster->blocks) {
    if (each.boxes.empty()) continue;
    const auto one = each.boxes.begin() + launched.seed % each.boxes.size();
    perform(*one);
    each.boxes.erase(one);
    any = true;
  }
  for (Fiber& each : fibers) {
    std::deque<CopyGroup>& groups = each.copy_groups;
    size_t count = 0;
    while (count < groups.size() && groups[count].barrier == nullptr) ++count;
    if (count == groups.size()) continue;
    for (any = true; groups.size() > 0; --count) {
      perform(each, groups.front());
      groups.pop_front();
      if (count == 0) break;
    }
  }
  return any;
}

[[noreturn]] void report_deadlock(const std::vector<Fiber>& fibers) {
  std::fprintf(stderr, "deadlock:");
  for (size_t first = 0, last; first < fibers.size(); first = last) {
    const Fiber& one = fibers[first];
    for (last = first + 1; last < fibers.size(); ++last) {
      const Fiber& other = fibers[last];
      if (other.block.x != one.block.x || other.done != one.done) break;
      if (std::strcmp(other.waits_for, one.waits_for) != 0 || other.which != one.which) break;
    }
    std::fprintf(stderr, "\n  block %u, threads %u to %u: ", one.block.x, one.thread.x,
                 fibers[last - 1].thread.x);
    if (one.done) {
      std::fprintf(stderr, "ended");
    } else {
      std::fprintf(stderr, "wait at %s %u", one.waits_for, one.which);
    }
  }
  std::fprintf(stderr, "\n");
  _exit(1);
}

// Everybody's turn again and again until all have ended. With a seed, a round begins anywhere, goes
// either way, and leaves some warps out.
void schedule(std::vector<Fiber>& fibers) {
  const size_t count = fibers.size();
  unsigned random = launched.seed;
  const auto next_random = [&] { return (random = random * 1664525u + 1013904223u) >> 8; };
  for (size_t left = count; left > 0;) {
    size_t first = 0, step = 1;
    unsigned left_out = 0;  // a bit for each of 32 warps
    if (launched.seed) {
      first = next_random() % count;
      step = next_random() & 64 ? 1 : count - 1;
      left_out = next_random() & next_random();
    }
    bool can_run = false;
    for (size_t i = 0; i < count; ++i) {
      Fiber& each = fibers[(first + i * step) % count];
      if (each.done || (each.watched && *each.watched == each.seen)) continue;
      can_run = true;
      if (left_out >> (each.thread.x / 32 + each.rank * 5) % 24 & 1) continue;
      running = &each;
      emulator_switch(&scheduler, each.stack_pointer);
      if (each.done) --left;
    }
    if (left > 0 && !can_run && !perform_awaited(fibers)) report_deadlock(fibers);
  }
}

void on_bad_access(int, siginfo_t* info, void*) {
  fault("an access outside of all tensors at %p", info->si_addr);
}

}  // namespace

Thread* running;
Index grid;

void fault(const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  std::fprintf(stderr, "fault: ");
  std::vfprintf(stderr, format, values);
  va_end(values);
  if (running) std::fprintf(stderr, " (block %u, thread %u)", running->block.x, running->thread.x);
  std::fprintf(stderr, "\n");
  _exit(1);
}

unsigned char* shared_bytes_of(unsigned rank, unsigned address, size_t bytes) {
  if (rank >= cluster->blocks.size()) fault("the cluster has no rank %u", rank);
  const Block& other = cluster->blocks[rank];
  if (other.live == 0) fault("rank %u has ended", rank);
  return other.shared + (shared_bytes(address, bytes) - running->shared);
}

void allow(const void* begin, size_t bytes) {
  tensors.push_back({static_cast<const unsigned char*>(begin), bytes});
}

void check_global(const void* pointer, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(pointer);
  for (const Range& range : tensors) {
    if (begin >= range.begin && begin + bytes <= range.begin + range.bytes) return;
  }
  fault("a copy from outside of all tensors at %p", pointer);
}

void yield() { emulator_switch(&fiber().stack_pointer, scheduler); }

const Words* exchange(const char* what, const Words& mine) {
  Warp& warp = block().warps[running->thread.x / 32];
  if (warp.meeting.arrived == 0) {
    warp.what = what;
  } else if (std::strcmp(warp.what, what) != 0) {
    fault("lanes of a warp meet at %s and at %s", warp.what, what);
  }
  const Words* words = warp.words[warp.meeting.generation % 2];
  warp.words[warp.meeting.generation % 2][lane()] = mine;
  meet(warp.meeting, 32, what);
  return words;
}

// All threads, also those that have ended: a kernel in which they miss is to be noticed.
void sync_threads() { meet(block().all, block().threads, "__syncthreads"); }

// Of all threads that have not ended.
void cluster_arrive() {
  fiber().cluster_generation = cluster->meeting.generation;
  cluster->meeting.arrive(cluster->live);
}

void cluster_wait() {
  wait_for_change(cluster->meeting.generation, fiber().cluster_generation, "cluster_wait");
}

static Meeting& named(int id, unsigned threads) {
  if (id < 1 || id > 15) fault("there is no named barrier %d", id);
  unsigned& expected = block().named_threads[id];
  if (expected != 0 && expected != threads) {
    fault("named barrier %d is of %u threads and of %u", id, expected, threads);
  }
  expected = threads;
  return block().named[id];
}

void named_arrive(int id, unsigned threads) { named(id, threads).arrive(threads); }

void named_sync(int id, unsigned threads) {
  meet(named(id, threads), threads, "named_barrier", static_cast<unsigned>(id));
}

void barrier_init(unsigned barrier, unsigned arrivals) {
  shared_bytes(barrier, 8);
  block().barriers[barrier & kAddress].expected = arrivals;
}

void barrier_arrive(unsigned barrier) {
  barrier_at(barrier).arrive();
}

void barrier_arrive(unsigned rank, unsigned barrier) {
  shared_bytes_of(rank, barrier, 8);
  barrier_at(barrier, cluster->blocks[rank]).arrive();
}

void send(unsigned rank, unsigned address, float first, float second, unsigned barrier) {
  const Sent sent = {shared_bytes_of(rank, address, 8), {first, second}};
  Barrier& it = barrier_at(barrier, cluster->blocks[rank]);
  it.sent.push_back(sent);
  if (!launched.lazy) it.land();
  it.receive(8);
}

void barrier_expect(unsigned barrier, unsigned bytes) { barrier_at(barrier).bytes += bytes; }

void barrier_wait(unsigned barrier, unsigned parity) {
  const unsigned& phase = barrier_at(barrier).generation;
  while (phase % 2 == parity) wait_for_change(phase, phase, "mbarrier_wait", barrier);
}

void write_zeros(unsigned shared) {
  if (shared % 16 != 0) fault("a write to %u, which is not aligned", shared);
  std::memset(shared_bytes(shared, 16), 0, 16);
  block().unfenced[shared & kAddress] = running;
}

void fence_writes() {
  std::erase_if(block().unfenced, [](const auto& write) { return write.second == running; });
}

bool barrier_is_over(unsigned barrier, unsigned parity) {
  return barrier_at(barrier).generation % 2 != parity;
}

void barrier_must_be_over(unsigned barrier, unsigned parity) {
  if (!barrier_is_over(barrier, parity)) fault("an mbarrier has not got so far");
}

void start_copy(unsigned shared, const void* global, bool present) {
  if (shared % 16 != 0) fault("a copy to %u, which is not aligned", shared);
  shared_bytes(shared, 16);
  if (present) check_global(global, 16);
  const Copy copy = {shared & kAddress, global, present};
  if (launched.lazy) {
    fiber().open_copies.push_back(copy);
  } else {
    perform(fiber(), {{copy}});
  }
}

void commit_copies() {
  Fiber& self = fiber();
  self.copy_groups.push_back({std::move(self.open_copies)});
  self.open_copies.clear();
}

void wait_copies(size_t pending_groups) {
  std::deque<CopyGroup>& groups = fiber().copy_groups;
  for (; groups.size() > pending_groups; groups.pop_front()) perform(fiber(), groups.front());
}

void arrive_after_copies(unsigned barrier) {
  Barrier& it = barrier_at(barrier);
  commit_copies();
  fiber().copy_groups.back().barrier = &it;
  if (!launched.lazy) wait_copies(0);
}

void check_box(const TensorMap& map, const Coordinates& first) {
  for (int d = 0; d < 5; ++d) {
    const int64_t begin = first.of[d], end = begin + static_cast<int64_t>(map.box[d]);
    if (end <= 0 || begin >= static_cast<int64_t>(map.shape[d])) {
      fault("a box wholly outside of its tensor: %ld in dimension %d", begin, d);
    }
  }
}

static void start_box_to(Block& to, unsigned char* memory, unsigned shared, size_t bytes,
                         const TensorMap& map, unsigned barrier, const Coordinates& first) {
  const unsigned begin = shared & kAddress;
  const auto write = to.unfenced.lower_bound(begin);
  if (write != to.unfenced.end() && write->first < begin + bytes) {
    fault("a box to %u, where a write to %u has not been fenced", begin, write->first);
  }
  const Box box = {memory, begin, map, first, &barrier_at(barrier, to)};
  if (launched.lazy) {
    to.boxes.push_back(box);
  } else {
    perform(box);
  }
}

void start_box(unsigned shared, const TensorMap& map, unsigned barrier, const Coordinates& first,
               unsigned ranks) {
  check_box(map, first);
  size_t bytes = 2;
  for (const uint64_t size : map.box) bytes *= size;
  const uint64_t row = map.box[0] * 2;
  if (row != 32 && row != 64 && row != 128) fault("a box of %zu bytes a row", row);
  if (shared % (row * 8) != 0) fault("a box to %u, where the swizzle does not begin", shared);
  if (map.address % 16 != 0) fault("a tensor map that is not aligned");
  if (map.shape[0] != 64 || first.of[0] % map.box[0] != 0) fault("a box across panels");
  for (const uint64_t stride : map.strides) {
    if (stride % 16 != 0 || stride == 0 || stride >> 40) fault("a tensor map with such strides");
  }
  if (ranks == 0) start_box_to(block(), shared_bytes(shared, bytes), shared, bytes, map, barrier, first);
  for (unsigned rank = 0; rank < ranks; ++rank) {
    unsigned char* memory = shared_bytes_of(rank, shared, bytes);
    start_box_to(cluster->blocks[rank], memory, shared, bytes, map, barrier, first);
  }
}

void start_product(const Product& product) {
  if (launched.lazy) {
    fiber().open_products.push_back(product);
  } else {
    product.run(product);
    yield();
  }
}

void commit_products() {
  Fiber& self = fiber();
  self.product_groups.push_back(std::move(self.open_products));
  self.open_products.clear();
}

void wait_products(size_t pending_groups) {
  std::deque<std::vector<Product>>& groups = fiber().product_groups;
  while (groups.size() > pending_groups) {
    for (const Product& product : groups.front()) product.run(product);
    groups.pop_front();
  }
  yield();
}

unsigned char* guarded(size_t bytes) {
  const size_t room = (bytes + kPage - 1) / kPage * kPage;
  void* all = mmap(nullptr, room + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) fault("no room for %zu bytes", bytes);
  unsigned char* begin = static_cast<unsigned char*>(all) + kPage;
  if (room > 0) mprotect(begin, room, PROT_READ | PROT_WRITE);
  return begin + (room - (bytes + 15) / 16 * 16);
}

void launch(const Launch& launch, const uint64_t* words, size_t count) {
  struct sigaction action = {};
  action.sa_sigaction = on_bad_access;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);

  launched = launch;
  arguments = words;
  argument_count = count;
  grid = {launch.blocks, 1, 1};
  if (launch.threads % 32 != 0 || launch.blocks % launch.ranks != 0) fault("a part of a warp");
  const unsigned threads = launch.threads * launch.ranks;
  std::vector<unsigned char*> stacks(threads), shared(launch.ranks);
  for (auto& each : stacks) each = guarded(kStack);
  for (auto& each : shared) each = guarded(launch.shared);

  for (unsigned first = 0; first < launch.blocks; first += launch.ranks) {
    Cluster present{std::vector<Block>(launch.ranks), threads, {}};
    cluster = &present;
    std::vector<Fiber> fibers(threads);
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned rank = i / launch.threads;
      Block& mine = present.blocks[rank];
      if (i % launch.threads == 0) {
        std::memset(shared[rank], 0xff, launch.shared);  // NaNs
        mine.shared = shared[rank];
        mine.threads = mine.live = launch.threads;
        mine.warps.resize(launch.threads / 32);
      }
      Fiber& each = fibers[i];
      each.thread = {i % launch.threads, 0, 0};
      each.block = {first + rank, 0, 0};
      each.rank = rank;
      each.shared = mine.shared;
      each.shared_size = launch.shared;
      each.mine = &mine;
      // As if run_thread() had been called from there, with no way back.
      void** top = reinterpret_cast<void**>(stacks[i] + kStack) - 2;
      top[0] = reinterpret_cast<void*>(&run_thread);
      each.stack_pointer = top - kSavedRegisters;
    }
    schedule(fibers);
    running = nullptr;
  }
}

}  // namespace emulator
