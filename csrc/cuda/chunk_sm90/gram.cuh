// SPDX-License-Identifier: Apache-2.0
// An auxiliary warpgroup: everything of its chunks that does not depend on the state, a few chunks ahead of it, for both
// blocks of the cluster.
//     A_ij = beta_i d_ij (k_i . k_j) for j < i;   T = (I + A)^-1;   P_ij = d_ij (q_i . k_j) for j <= i
//     d_ij = 2^(sum_i - sum_j), the decay between two tokens: never the exponential of a positive number for decays <= 1
// Warp w owns rows 16 w .. 16 w + 15 of A, T and P; blocks right of the diagonal are zeros from the start.
#pragma once

#include "../ptx/arch.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/pipeline.cuh"
#include "load.cuh"

namespace gdn::cuda::chunk_sm90 {

// Step s of a K-major tile of 64 rows: 16 columns, 32 bytes on; the next panel after four. In units of 16 bytes.
__device__ __forceinline__ constexpr uint64_t k_major_step(int s) {
  return static_cast<uint64_t>((s / 4) * (kChunk * kPanelRowBytes) + (s % 4) * 32) >> 4;
}

__device__ __forceinline__ uint64_t k_major_descriptor(const fp16_t* tile) {
  return ptx::wgmma_descriptor_128b(ptx::shared_address(tile), 16, 8 * kPanelRowBytes);
}

// Issues sums = a b^T over kKeyDim columns, one group.
template <int kKeyDim>
__device__ __forceinline__ void issue_gram(const fp16_t* smem_a, const fp16_t* smem_b, float (&sums)[32]) {
  const uint64_t a = k_major_descriptor(smem_a), b = k_major_descriptor(smem_b);
  ptx::wgmma_m64n64k16<false>(sums, a, b);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) {
    ptx::wgmma_m64n64k16<true>(sums, a + k_major_step(s), b + k_major_step(s));
  }
  ptx::wgmma_commit_group();
}

// sums = K K^T -> the diagonal block of A into scratch, those left of it as operands. Leaves d_ij in sums.
__device__ __forceinline__ void split_a(const Gates& gates, int warp, int lane, float (&sums)[32], SolveScratch& scratch,
                                        uint32_t (&off_diagonal)[3][4]) {
  float sum_i[2], beta_i[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum_i[r] = gates.sum[16 * warp + lane / 4 + 8 * r];
    beta_i[r] = gates.beta[16 * warp + lane / 4 + 8 * r];
  }
#pragma unroll
  for (int block = 0; block < 8; ++block) {   // 8 columns each
    if (block > 2 * warp + 1) continue;
    const float2 sum_j = *reinterpret_cast<const float2*>(gates.sum + sum_column(lane, 4 * block));
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // right of the diagonal this may be anything, inf too: never used
      const float decay = ptx::ex2_approx_ftz(sum_i[i / 2] - (i % 2 == 0 ? sum_j.x : sum_j.y));
      a[i] = beta_i[i / 2] * decay * sums[4 * block + i];
      sums[4 * block + i] = decay;
    }
    if (block < 2 * warp) {
      if (block < 6) {
        off_diagonal[block / 2][2 * (block % 2)] = round_pair_fp16(a[0], a[1]);
        off_diagonal[block / 2][2 * (block % 2) + 1] = round_pair_fp16(a[2], a[3]);
      }
    } else {
      const int column = sum_column(lane, 4 * (block % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = column + i % 2 < sum_row(lane, i) ? a[i] : 0.0f;
      if (block % 2 == 0) {
        *reinterpret_cast<float2*>(scratch.a + scratch_row(lane / 4) + column) = make_float2(a[0], a[1]);
      }
      *reinterpret_cast<float2*>(scratch.a + scratch_row(lane / 4 + 8) + column) = make_float2(a[2], a[3]);
    }
  }
}

// sums = Q K^T, decays as split_a left them -> P.
__device__ __forceinline__ void write_p(const float (&sums)[32], const float (&decays)[32], uint32_t smem_p, int warp,
                                        int lane) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {   // 16 columns each
    if (block > warp) continue;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = sums[8 * block + i] * decays[8 * block + i];
    if (block == warp) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = sum_column(lane, i) <= sum_row(lane, i) ? x[i] : 0.0f;
    }
    uint32_t p[4];
    round_to_operand(x, p);
    ptx::stmatrix_x4(block_address(smem_p, warp, block, lane), p);
  }
}

// Zeros for the blocks right of the diagonal, which wgmma reads and nobody writes later.
__device__ __forceinline__ void clear_tile(fp16_t* tile, int thread) {
  float4* const words = reinterpret_cast<float4*>(tile);
#pragma unroll
  for (int i = 0; i < kChunk * kChunk / 8 / kGroupThreads; ++i) {
    words[thread + i * kGroupThreads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// Copies `bytes` from `from` to the same place in the other block of the cluster, whose full[slot] hears of it. By one thread.
template <int kKeyDim>
__device__ __forceinline__ void push(SharedMemory<kKeyDim>& smem, const void* from, uint32_t bytes, int slot, uint32_t peer) {
  const uint32_t address = ptx::shared_address(from);
  ptx::bulk_copy_to_cluster(ptx::map_shared(address, peer), address, bytes,
                            ptx::map_shared(ptx::shared_address(&smem.full[slot]), peer));
}

// k, q and gates of a chunk -> T and P of it. The gates are written by warp 0 while the products run.
template <int kKeyDim, class Observer>
__device__ __forceinline__ void solve_chunk(const RuleParams& p, const GateBits& bits, int count, int barrier, int warp,
                                            int lane, Stage<kKeyDim>& stage, SolveScratch& scratch,
                                            const Observer& observer) {
  const uint32_t smem_t = ptx::shared_address(stage.t), smem_p = ptx::shared_address(stage.p);
  float kk[32], qk[32];
  ptx::wgmma_fence();
  issue_gram<kKeyDim>(stage.k, stage.k, kk);
  ptx::wgmma_fence();
  issue_gram<kKeyDim>(stage.q, stage.k, qk);
  if (warp == 0) write_gates(p, bits, count, lane, stage.gates);
  ptx::bar_sync(barrier, kGroupThreads);   // the gates are written
  observer.phase(Phase::kGram);

  uint32_t off_diagonal[3][4] = {}, inverse[4];
  ptx::wgmma_wait_group<1>();
#pragma unroll
  for (int i = 0; i < 32; ++i) ptx::wgmma_hold(kk[i]);
  observer.phase(Phase::kDecays);
  split_a(stage.gates, warp, lane, kk, scratch, off_diagonal);
  observer.phase(Phase::kSplit);
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < 32; ++i) ptx::wgmma_hold(qk[i]);
  write_p(qk, kk, smem_p, warp, lane);
  observer.phase(Phase::kP);
  solve_diagonal(scratch, stage.gates.beta, reinterpret_cast<char*>(stage.t), warp, lane, inverse);
  observer.phase(Phase::kDiagonal);
  solve_off_diagonal(off_diagonal, inverse, smem_t, barrier, warp, lane);
  ptx::fence_proxy_async_shared();
  ptx::bar_sync(barrier, kGroupThreads);   // T and P are written
}

// The whole life of auxiliary warpgroup `solver` of block `rank`.
template <class io_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_solver(const RuleParams& p, const Work& work, const Span& span, int solver, int rank,
                                           SharedMemory<kKeyDim>& smem, const Observer& observer) {
  const int group_thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, group_thread / 32, 0);
  const int length = static_cast<int>(span.length), barrier = kSolverBarrier + solver;
  const int slot = rank + kCluster * solver;   // chunks slot, slot + kStages, ..
  const uint32_t peer = static_cast<uint32_t>(1 - rank);
  const Source source(p, work, span, group_thread);
  Stage<kKeyDim>& stage = smem.stage[slot];
  clear_tile(stage.t, group_thread);   // two barriers below come before the first writes to the same tiles
  clear_tile(stage.p, group_thread);
  GateBits bits = {};
  int parity = 1;   // of the phase of done[slot] that says the chunk before is read: at the start it counts as over
#pragma unroll 1
  for (int first = slot * kChunk; first < length; first += kStages * kChunk) {
    const int thread = ptx::opaque(group_thread) & (kGroupThreads - 1);   // no addresses kept from chunk to chunk
    const int lane = thread % 32, count = min(length - first, kChunk), next = first + kStages * kChunk;
    observer.start(first / kChunk, 1 + solver);
    observer.phase(Phase::kStart);
    wait_phase(smem.done[slot], parity);
    parity ^= 1;
    observer.phase(Phase::kFree);
    load_keys(p, source, first, count, thread, stage);
    if (warp == 0) load_gates(p, source, first, count, lane, bits);
    prefetch_keys<kKeyDim>(p, source, next, length - next, thread);
    ptx::cp_async_wait_group<0>();
    observer.phase(Phase::kLoaded);
    normalise<io_t>(stage, p.use_qk_l2norm, thread);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(barrier, kGroupThreads);   // k and q are written
    observer.phase(Phase::kNormalised);
    if (thread == 0) push(smem, stage.k, kOperandBytes<kKeyDim>, slot, peer);
    solve_chunk(p, bits, count, barrier, warp, lane, stage, smem.scratch[solver][warp], observer);
    if (thread == 0) {
      push(smem, stage.t, kSolvedBytes, slot, peer);
      ptx::mbarrier_arrive(ptx::shared_address(&smem.full[slot]));
    }
    observer.phase(Phase::kSolved);
  }
}

}  // namespace gdn::cuda::chunk_sm90
