// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/launch.cuh where there is no GPU: the CUDA kernels compiled as C++ and run on the host.
//
// Every thread of a block is a fiber. Collectives (__shfl_*_sync, __syncwarp, __syncthreads) suspend a fiber until all the
// warp's, or the block's, threads that still run have come; in between warps run in a random order drawn from a seed, each
// as far as it can. So a missing barrier shows as a wrong result under some seed, a barrier that not all join as an abort,
// and shared memory that is read before it is written as NaN. What the host cannot show: timing, coalescing, the memory
// model between unsynchronised threads of one warp, and anything that needs PTX.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "../common/dims.h"
#include "../common/dtypes.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static   // one block runs at a time

namespace emulated {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 * 1024;

enum class Waits { kNothing, kForWarp, kForBlock, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  unsigned id = 0;
  Waits waits = Waits::kDone;
  uint32_t value = 0, received = 0;   // of a shuffle
  int source = 0;                     // lane that `received` comes from
};

struct Dim {
  unsigned x;
};

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<char> shared;
  ucontext_t scheduler;
  Thread* current = nullptr;
  Dim block_idx{0}, block_dim{0}, grid_dim{0};
  std::function<void()> body;
  std::mt19937 random{1};
};

inline Machine& machine() {
  static thread_local Machine instance;
  return instance;
}

inline void suspend(Waits what) {
  Machine& m = machine();
  Thread* const self = m.current;
  self->waits = what;
  swapcontext(&self->context, &m.scheduler);
}

inline void run_thread() {
  machine().body();
  suspend(Waits::kDone);
}

// Runs every thread of one warp until it waits or is done.
inline void advance(Machine& m, Thread** warp, int lanes) {
  for (int lane = 0; lane < lanes; ++lane) {
    if (warp[lane]->waits != Waits::kNothing) continue;
    m.current = warp[lane];
    swapcontext(&m.scheduler, &warp[lane]->context);
  }
}

inline bool all_wait(Thread** threads, int count, Waits what, bool done_counts) {
  bool any = false;
  for (int i = 0; i < count; ++i) {
    if (threads[i]->waits == what) any = true;
    else if (!(done_counts && threads[i]->waits == Waits::kDone)) return false;
  }
  return any;
}

// Lets a warp run until it stands at a barrier of the block or is done. True if it got anywhere.
inline bool run_warp(Machine& m, Thread** warp, int lanes) {
  bool moved = false;
  for (;;) {
    advance(m, warp, lanes);
    if (!all_wait(warp, lanes, Waits::kForWarp, false)) return moved;
    for (int lane = 0; lane < lanes; ++lane) warp[lane]->received = warp[warp[lane]->source]->value;
    for (int lane = 0; lane < lanes; ++lane) warp[lane]->waits = Waits::kNothing;
    moved = true;
  }
}

inline void run_block(Machine& m, int num_threads) {
  std::vector<Thread*> threads(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    if (i == static_cast<int>(m.threads.size())) m.threads.push_back(std::make_unique<Thread>());
    Thread& thread = *m.threads[i];
    thread.id = i;
    thread.waits = Waits::kNothing;
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.get(), 0, kStackBytes};
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
    threads[i] = &thread;
  }
  std::vector<int> warps(num_threads / kWarp);
  for (size_t w = 0; w < warps.size(); ++w) warps[w] = static_cast<int>(w);
  for (;;) {
    std::shuffle(warps.begin(), warps.end(), m.random);
    for (int w : warps) run_warp(m, threads.data() + w * kWarp, kWarp);
    const auto done = [](Thread* thread) { return thread->waits == Waits::kDone; };
    if (std::all_of(threads.begin(), threads.end(), done)) return;
    if (!all_wait(threads.data(), num_threads, Waits::kForBlock, true)) {
      std::fprintf(stderr, "emulated block %u: threads wait for one another at different places\n", m.block_idx.x);
      std::abort();
    }
    for (Thread* thread : threads) {
      if (thread->waits == Waits::kForBlock) thread->waits = Waits::kNothing;
    }
  }
}

template <class T>
T shuffle(T x, int source) {
  static_assert(sizeof(T) == 4, "shuffles move 32 bits");
  Thread& self = *machine().current;
  std::memcpy(&self.value, &x, 4);
  self.source = source;
  suspend(Waits::kForWarp);
  std::memcpy(&x, &self.received, 4);
  return x;
}

inline int lane() { return static_cast<int>(machine().current->id % kWarp); }

inline void* shared_memory() { return machine().shared.data(); }

}  // namespace emulated

#define threadIdx (emulated::Dim{emulated::machine().current->id})
#define blockIdx (emulated::machine().block_idx)
#define blockDim (emulated::machine().block_dim)
#define gridDim (emulated::machine().grid_dim)

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated::shuffle(x, emulated::lane() ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T x, int source) {
  return emulated::shuffle(x, source);
}
inline void __syncwarp() { emulated::shuffle(0, 0); }
inline void __syncthreads() { emulated::suspend(emulated::Waits::kForBlock); }

struct alignas(16) float4 {
  float x, y, z, w;
};
struct __nv_bfloat162_raw {
  unsigned short x, y;
};
struct __half2_raw {
  unsigned short x, y;
};
inline __nv_bfloat162_raw __floats2bfloat162_rn(float a, float b) {
  return {gdn::from_float<gdn::bf16_t>(a).bits, gdn::from_float<gdn::bf16_t>(b).bits};
}
inline __half2_raw __floats2half2_rn(float a, float b) {
  return {gdn::from_float<gdn::fp16_t>(a).bits, gdn::from_float<gdn::fp16_t>(b).bits};
}

namespace gdn::cuda {

constexpr int64_t kMaxBlocks = 2147483647;

// As many as an H200 has, so that the choices made by size are those of that card; EMULATED_SMS names another number.
inline int num_multiprocessors() {
  const char* wanted = std::getenv("EMULATED_SMS");
  return wanted ? std::atoi(wanted) : 132;
}

template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void*, Args&&... args) {
  emulated::Machine& m = emulated::machine();
  // Most kernels without dynamic shared memory walk on past their grid: a small one puts that to use.
  const int64_t blocks = std::max<int64_t>(0, shared_bytes > 0 ? num_blocks : std::min<int64_t>(num_blocks, 64));
  m.body = [&] { kernel(args...); };
  m.block_dim.x = static_cast<unsigned>(threads);
  m.grid_dim.x = static_cast<unsigned>(blocks);
  std::vector<int64_t> order(blocks);
  for (int64_t i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), m.random);
  for (int64_t block : order) {
    m.shared.assign(shared_bytes, '\xff');   // all ones: NaN
    m.block_idx.x = static_cast<unsigned>(block);
    emulated::run_block(m, threads);
  }
  return nullptr;
}

}  // namespace gdn::cuda
