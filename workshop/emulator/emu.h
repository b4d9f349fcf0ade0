// Host emulation of the device vocabulary: fibers, warp and warpgroup collectives.
#pragma once
#include <ucontext.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <map>
#include <functional>
#include <algorithm>
#include <random>
#define __device__
#define __host__
#define __global__ inline
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(x)
struct alignas(8) uint2 { uint32_t x, y; }; struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) { uint64_t v = (uint64_t)b << 32 | a; uint32_t r = 0; for (int i = 0; i < 4; ++i) r |= (uint32_t)((v >> (8 * ((s >> (4 * i)) & 7))) & 0xff) << (8 * i); return r; }
using std::min; using std::max;
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}
struct Idx { unsigned x; };
namespace emu {
constexpr int kThreads = 384, kBlocks = 2, kAll = kThreads * kBlocks;
struct Wg { int kind, n; bool acc, trans; float* d; uint32_t a[4]; uint64_t da, db; };
struct Cp { uint32_t dst; const void* src; int bytes; };
struct Fiber {
  ucontext_t ctx; Idx tid; int id, rank; bool done = false; std::vector<char> stack; const char* where = "";
  std::vector<Wg> open; std::vector<std::vector<Wg>> groups;
  std::vector<Cp> cp_open; std::vector<std::vector<Cp>> cp_groups;
};
struct Meet { int arrived = 0; uint64_t gen = 0; void* args[kAll]; };
struct Bar { int expect = 0, pending = 0, phase = 0; long tx = 0; void check() { if (pending == 0 && tx == 0) { pending = expect; phase++; } } };
struct Bulk { uint32_t to, from, bytes, bar; };
extern Fiber fibers[kAll]; extern std::vector<Bulk> bulk; extern Fiber* cur; extern ucontext_t sched; extern uint64_t progress;
extern Meet warp_meet[12 * kBlocks], bar_meet[kBlocks][16], cluster_meet; extern std::map<uint32_t, Bar> bars;
extern bool late; extern char* smem_of[kBlocks]; extern Idx block_idx[kBlocks]; extern size_t smem_size;
void yield(const char* where);
void meet(Meet& m, int slot, int count, void* arg, const std::function<void(void**)>& f, const char* where);
inline void warp(void* arg, const std::function<void(void**)>& f, const char* w) {
  meet(warp_meet[cur->id / 32], cur->tid.x % 32, 32, arg, f, w);
}
// Addresses: below 1 << 24 in the own block, else block (a >> 24) - 1.
inline uint32_t global(uint32_t a) { return a >> 24 ? a : a | (uint32_t)(cur->rank + 1) << 24; }
inline char* at(uint32_t g) { g = global(g); uint32_t a = g & 0xffffff; char* smem = smem_of[(g >> 24) - 1]; if (a >= smem_size) { printf("smem address %u out of range\n", a); abort(); } return smem + a; }
inline float half(uint16_t b) {
  int s = b >> 15, e = (b >> 10) & 31, m = b & 1023; float r;
  if (e == 31) r = m ? NAN : INFINITY; else if (e == 0) r = std::ldexp((float)m, -24); else r = std::ldexp(1.0f + m / 1024.0f, e - 15);
  return s ? -r : r;
}
void run_wgmma(Fiber** lanes, int warp_in_group);
void run_block(const std::function<void()>& body);
}  // namespace emu
#define threadIdx (emu::cur->tid)
#define blockIdx (emu::block_idx[emu::cur->rank])
template <class T> T shfl_any(T x, int src_lane, const char* w) {
  struct A { T x; int src; T out; } a{x, src_lane, x};
  emu::warp(&a, [](void** v) { for (int l = 0; l < 32; ++l) { A* p = (A*)v[l]; p->out = ((A*)v[p->src & 31])->x; } }, w);
  return a.out;
}
template <class T> T __shfl_xor_sync(unsigned, T x, int m) { return shfl_any(x, (emu::cur->tid.x % 32) ^ m, "shfl_xor"); }
template <class T> T __shfl_sync(unsigned, T x, int l) { return shfl_any(x, l, "shfl"); }
template <class T> T __shfl_up_sync(unsigned, T x, int d) { int l = emu::cur->tid.x % 32; return shfl_any(x, l >= d ? l - d : l, "shfl_up"); }
inline void __syncwarp() { int z; emu::warp(&z, [](void**) {}, "syncwarp"); }
inline void __syncthreads() { int z; emu::meet(emu::bar_meet[emu::cur->rank][0], emu::cur->tid.x, emu::kThreads, &z, [](void**) {}, "syncthreads"); }
#include "emu_tree/csrc/common/dtypes.h"
struct __nv_bfloat162_raw { unsigned short x, y; };
struct __half2_raw { unsigned short x, y; };
inline __nv_bfloat162_raw __floats2bfloat162_rn(float a, float b) { return {gdn::from_float<gdn::bf16_t>(a).bits, gdn::from_float<gdn::bf16_t>(b).bits}; }
inline __half2_raw __floats2half2_rn(float a, float b) { return {gdn::from_float<gdn::fp16_t>(a).bits, gdn::from_float<gdn::fp16_t>(b).bits}; }
