// SPDX-License-Identifier: Apache-2.0
// The machine that runs CUDA kernels compiled as C++: every thread of a cluster is a fiber.
//
// Warp collectives and __syncthreads suspend a fiber until all the warp's, or the block's, threads that still run have come;
// mbarriers, named barriers and clusters let it ask again later. In between warps run in a random order drawn from a seed,
// each as far as it can, and some sit out a turn. So a missing barrier shows as a wrong result under some seed, a barrier
// that not all join as an abort, and shared memory that is read before it is written as NaN. Asynchronous work (cp.async,
// bulk copies, wgmma) is done at once in one half of the clusters and as late as its wait allows in the other. What the host
// cannot show: timing, coalescing, proxies and fences, the memory model between threads of one warp.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace emulated {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kSharedAlignment = 1024;
constexpr uint32_t kBlockShift = 24;   // of a shared address: the block's rank plus one above, the offset below

enum class Waits { kNothing, kForWarp, kForBlock, kPolls, kDone };

// d[16, n] = or += a[16, 16] b[16, n], a warp's part of a wgmma.
struct Product {
  float* d;
  int n;
  bool accumulates, a_in_registers, b_is_n_major;
  uint32_t a[4];
  uint64_t a_descriptor, b_descriptor;
};

// A bulk copy to global memory that is under way; `read` holds what it has read.
struct CopyOut {
  void* gmem;
  const char* source;
  uint32_t bytes;
  std::vector<char> read;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  unsigned id = 0, block = 0;   // in its block; the block in its cluster
  Waits waits = Waits::kDone;
  void* argument = nullptr;     // of the warp's collective, and what it does with those of all lanes
  void (*collective)(void**) = nullptr;
  uint64_t cluster_over = 0;    // meetings of the cluster when this thread arrived at one
  std::vector<Product> open_products;
  std::vector<std::vector<Product>> products;              // committed groups, oldest first
  std::vector<std::function<void()>> open_copies;
  std::vector<std::vector<std::function<void()>>> copies;
  std::vector<CopyOut> copies_out;
};

struct Dim {
  unsigned x;
};

// An mbarrier.
struct Barrier {
  int expected = 0, missing = 0;   // arrivals
  int64_t bytes = 0;               // still to come
  uint32_t phase = 0;
};

// A named barrier, or that of the cluster.
struct Meeting {
  int arrived = 0;
  uint64_t over = 0;   // how often all have come
};

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::vector<char>> shared;   // of each block of the cluster
  size_t shared_bytes = 0;
  ucontext_t scheduler;
  Thread* current = nullptr;
  int64_t first_block = 0;   // of the cluster
  int cluster_blocks = 1;
  Dim block_dim{0}, grid_dim{0};
  std::function<void()> body;
  std::mt19937 random{1};
  uint64_t progress = 0;   // grows whenever anything happens
  bool is_late = false;    // asynchronous work waits for its wait
  std::map<uint32_t, Barrier> barriers;
  std::map<uint32_t, Meeting> meetings;   // by block rank and barrier
  std::vector<std::function<void()>> bulk_copies;
};

inline Machine& machine() {
  static thread_local Machine instance;
  return instance;
}

[[noreturn]] inline void fail(const char* what) {
  Machine& m = machine();
  const Thread* const thread = m.current;
  std::fprintf(stderr, "emulated block %lld, thread %u: %s\n",
               static_cast<long long>(m.first_block + (thread ? thread->block : 0)), thread ? thread->id : 0, what);
  std::abort();
}

inline void suspend(Waits what) {
  Machine& m = machine();
  Thread* const self = m.current;
  if (what != Waits::kPolls) ++m.progress;
  self->waits = what;
  swapcontext(&self->context, &m.scheduler);
}

template <class Ready>
void wait_until(Ready ready) {
  while (!ready()) suspend(Waits::kPolls);
  ++machine().progress;
}

// All lanes of a warp come with an argument; `work` then sees those of all of them.
inline void with_warp(void* argument, void (*work)(void**)) {
  Thread& self = *machine().current;
  self.argument = argument;
  self.collective = work;
  suspend(Waits::kForWarp);
}

inline int lane() { return static_cast<int>(machine().current->id % kWarp); }

// `count` threads come to barrier `id` of this block, or of the cluster (id < 0).
inline Meeting& meeting_of(int id) {
  Machine& m = machine();
  return m.meetings[id < 0 ? ~0u : m.current->block * 16 + static_cast<unsigned>(id)];
}

inline void arrive(int id, int count) {
  Meeting& meeting = meeting_of(id);
  ++machine().progress;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.over;
  }
}

inline void meet(int id, int count) {
  Meeting& meeting = meeting_of(id);
  const uint64_t over = meeting.over;
  arrive(id, count);
  wait_until([&] { return meeting.over != over; });
}

// The cluster's barrier in two halves.
inline void arrive_at_cluster() {
  Machine& m = machine();
  Meeting& meeting = m.meetings[~0u];
  m.current->cluster_over = meeting.over;
  ++m.progress;
  if (++meeting.arrived == m.cluster_blocks * static_cast<int>(m.block_dim.x)) {
    meeting.arrived = 0;
    ++meeting.over;
  }
}
inline void wait_for_cluster() {
  const Meeting& meeting = machine().meetings[~0u];
  const uint64_t over = machine().current->cluster_over;
  wait_until([&] { return meeting.over != over; });
}

// Shared memory of block `rank`, aligned as the hardware's.
inline char* shared_of(unsigned rank) {
  char* const data = machine().shared[rank].data();
  return data + (kSharedAlignment - reinterpret_cast<uintptr_t>(data) % kSharedAlignment) % kSharedAlignment;
}

inline void* shared_memory() { return shared_of(machine().current->block); }

// A shared address with the block in it: as it is, or of this block.
inline uint32_t cluster_address(uint32_t address) {
  return address >> kBlockShift ? address : address | (machine().current->block + 1) << kBlockShift;
}

// What lies at a shared address of any block of the cluster.
inline char* shared_at(uint32_t address, size_t bytes) {
  const Machine& m = machine();
  const uint32_t global = cluster_address(address), offset = global & ((1u << kBlockShift) - 1);
  const unsigned rank = (global >> kBlockShift) - 1;
  if (rank >= static_cast<unsigned>(m.cluster_blocks) || offset + bytes > m.shared_bytes) fail("outside shared memory");
  return shared_of(rank) + offset;
}

inline Barrier& barrier_at(uint32_t address) {
  const auto found = machine().barriers.find(cluster_address(address));
  if (found == machine().barriers.end()) fail("an mbarrier that was not initialised");
  return found->second;
}

inline void end_phase_if_complete(Barrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.expected;
  ++barrier.phase;
}

inline void arrive(Barrier& barrier, int64_t bytes) {
  ++machine().progress;
  barrier.bytes += bytes;
  if (--barrier.missing < 0) fail("more arrivals at an mbarrier than it expects");
  end_phase_if_complete(barrier);
}

inline void run_thread() {
  machine().body();
  suspend(Waits::kDone);
}

inline bool all_wait(Thread** threads, int count, Waits what, bool done_counts) {
  bool any = false;
  for (int i = 0; i < count; ++i) {
    if (threads[i]->waits == what) any = true;
    else if (!(done_counts && threads[i]->waits == Waits::kDone)) return false;
  }
  return any;
}

// Lets a warp run until it stands at a barrier, asks for something that is not there yet, or is done.
inline void run_warp(Machine& m, Thread** warp) {
  for (;;) {
    for (int lane = 0; lane < kWarp; ++lane) {
      if (warp[lane]->waits != Waits::kNothing && warp[lane]->waits != Waits::kPolls) continue;
      m.current = warp[lane];
      swapcontext(&m.scheduler, &warp[lane]->context);
    }
    if (!all_wait(warp, kWarp, Waits::kForWarp, false)) return;
    void* arguments[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) arguments[lane] = warp[lane]->argument;
    m.current = warp[0];
    warp[0]->collective(arguments);
    for (int lane = 0; lane < kWarp; ++lane) warp[lane]->waits = Waits::kNothing;
  }
}

inline void start_threads(Machine& m, int num_threads, std::vector<Thread*>& threads) {
  for (int i = 0; i < num_threads * m.cluster_blocks; ++i) {
    if (i == static_cast<int>(m.threads.size())) m.threads.push_back(std::make_unique<Thread>());
    Thread& thread = *m.threads[i];
    thread.id = static_cast<unsigned>(i % num_threads);
    thread.block = static_cast<unsigned>(i / num_threads);
    thread.waits = Waits::kNothing;
    thread.products.clear();
    thread.copies.clear();
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.get(), 0, kStackBytes};
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
    threads.push_back(&thread);
  }
}

// What threads that are done still have to write; it has been read, for their shared memory is gone.
inline void finish_copies_out(const std::vector<Thread*>& threads) {
  for (Thread* thread : threads) {
    for (const CopyOut& copy : thread->copies_out) {
      if (copy.read.empty()) fail("a bulk copy that nobody waited for");
      std::memcpy(copy.gmem, copy.read.data(), copy.bytes);
    }
    thread->copies_out.clear();
  }
}

// The blocks of one cluster, side by side, from their start to their end.
inline void run_cluster(Machine& m, int num_threads) {
  m.shared.resize(m.cluster_blocks);
  for (auto& shared : m.shared) shared.assign(m.shared_bytes + kSharedAlignment, '\xff');   // all ones: NaN
  m.barriers.clear();
  m.meetings.clear();
  m.bulk_copies.clear();
  m.is_late = m.random() % 2 == 0;
  std::vector<Thread*> threads;
  start_threads(m, num_threads, threads);
  std::vector<int> warps(threads.size() / kWarp);
  for (size_t w = 0; w < warps.size(); ++w) warps[w] = static_cast<int>(w);
  bool is_idle = false;
  for (;;) {
    const uint64_t before = m.progress;
    std::shuffle(warps.begin(), warps.end(), m.random);
    for (int w : warps) {
      if (is_idle || m.random() % 4 != 0) run_warp(m, threads.data() + w * kWarp);
    }
    m.current = nullptr;
    while (!m.bulk_copies.empty() && (is_idle || m.random() % 3 == 0)) {
      const size_t which = m.random() % m.bulk_copies.size();
      m.bulk_copies[which]();
      m.bulk_copies.erase(m.bulk_copies.begin() + which);
      ++m.progress;
    }
    const auto done = [](Thread* thread) { return thread->waits == Waits::kDone; };
    if (std::all_of(threads.begin(), threads.end(), done)) return finish_copies_out(threads);
    for (int block = 0; block < m.cluster_blocks; ++block) {
      Thread** const first = threads.data() + block * num_threads;
      if (!all_wait(first, num_threads, Waits::kForBlock, true)) continue;
      ++m.progress;
      for (int i = 0; i < num_threads; ++i) {
        if (first[i]->waits == Waits::kForBlock) first[i]->waits = Waits::kNothing;
      }
    }
    if (is_idle && m.progress == before) fail("threads wait for one another at different places");
    is_idle = m.progress == before;
  }
}

}  // namespace emulated
