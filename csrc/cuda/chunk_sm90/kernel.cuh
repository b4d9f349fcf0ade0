// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, chunk by chunk on the tensor cores of Hopper. Per (sequence, value head) and chunk of 64 tokens, with
// sum_t the running sum of the log decay in the chunk and k, q divided by their length where asked:
//     A_ij = beta_i e^(sum_i - sum_j) (k_i . k_j), j < i;   T = (I + A)^-1;   P_ij = e^(sum_i - sum_j) (q_i . k_j), j <= i
//     X = V - diag(e^sum) K S;   U = T diag(beta) X;   O = scale (diag(e^sum) Q S + P U)
//     S <- e^(sum_64) S + K^T diag(e^(sum_64 - sum)) U
// T, P, normalised k and q and the decays come from the workspace, where prepare (prepare.cuh) left them.
// Grid    x: sequence (slowest), value head, tile of 64 columns of V (fastest); ragged input adds a sequence that writes
//         zeros outside all others.
// Block   two warpgroups. Group 0 (state.cuh) keeps S^T [64 v, K] in fp32 accumulators from the first to the last chunk and
//         runs the chain S -> X -> U -> S. Group 1 (output.cuh) brings chunks and V in and makes o.
// Reads   Keys, Solved, v [T, 64]; S [K, 64] once.   Writes   o [T, 64], S once.
// Numbers Operands are fp16 (keys and queries after normalisation, rows of S, X, U scaled by powers of two), sums fp32, the
//         inverse of the 16 x 16 diagonal blocks fp32. What a chunk computes depends on its tokens and on S at its start
//         only: any batch, and any split at a multiple of 64, gives the same bits.
// Needs   sm_90a; T < 2^31 - 64; q, k, v bf16 or fp16, unit stride in the head dim, rows at multiples of 16 bytes; K 64 or
//         128, V a multiple of 64. Source: the chunked WY form of Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024).
#pragma once

#include "../ptx/arch.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "output.cuh"
#include "rows.cuh"
#include "state.cuh"

namespace gdn::cuda::chunk_sm90 {

struct NoObserver {
  template <class... Args>
  __device__ __forceinline__ void prediction(const Args&...) const {}
  template <class... Args>
  __device__ __forceinline__ void difference(const Args&...) const {}
  template <class... Args>
  __device__ __forceinline__ void write(const Args&...) const {}
  template <class... Args>
  __device__ __forceinline__ void operands(const Args&...) const {}
  __device__ __forceinline__ void start(int, int) const {}
  __device__ __forceinline__ void phase(Phase) const {}
};

// Group 0: S in, all chunks, S out.
template <class io_t, int kKeyDim, class Observer>
__device__ __forceinline__ void carry_state(const RuleParams& p, const Work& work, const Span& span, int64_t slot,
                                            SharedMemory<kKeyDim>& smem, const Observer& observer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const int64_t row = work.column + 16 * warp + lane / 4;
  State<kKeyDim> state = {};
  if (p.initial_state.given() && p.has_initial_state.at(work.n)) {
    move_state<true>(p.initial_state, p.initial_state.offset(slot, work.head), row, lane, state);
  }
  const int num_chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  if (num_chunks > 0) run_state<io_t>(work, num_chunks, p.scale, smem, state, observer);
  const int64_t out_slot =
      p.out_slots.given() ? slot_of_row(p.out_slots, work.n, p.pool_out) : slot_of_row(p.slots, work.n, p.pool_out);
  if (p.state.given() && out_slot >= 0) {
    move_state<false>(p.state, p.state.offset(out_slot, work.head), row, lane, state);
  }
}

// Group 1: V in, o out.
template <class out_t, int kKeyDim, class Observer>
__device__ __forceinline__ void carry_output(const RuleParams& p, const Work& work, const Span& span,
                                             SharedMemory<kKeyDim>& smem, const Observer& observer) {
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32)), warp = threadIdx.x % kGroupThreads / 32;
  const int64_t column = work.column + 16 * warp;
  out_t* const gmem = static_cast<out_t*>(p.out.data) + p.out.offset(span.batch, span.first, work.head, column);
  const uint16_t* const gmem_v =
      static_cast<const uint16_t*>(p.v.data) + p.v.offset(span.batch, span.first, work.head, column + 8 * (lane % 2));
  Values values = {gmem_v, p.v.stride[1], lane, {}};
  const int64_t chunk_row = first_chunk_row(p, work.n, span.first);
  Copier<kKeyDim> copier = {keys_of<kKeyDim>(p, chunk_row, work.key_head),
                            solved_of<kKeyDim>(p, chunk_row, work.head), p.dims.Hk, p.dims.Hv};
  ptx::griddepcontrol_wait();   // for the preparation
  if (span.length > 0) {
    run_output<out_t>(static_cast<int>(span.length), Writer<out_t>{gmem, p.out.stride[1], lane}, values, copier, smem,
                      observer);
  }
}

template <int kKeyDim>
__device__ __forceinline__ void init_barriers(SharedMemory<kKeyDim>& smem) {
#pragma unroll
  for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(ptx::shared_address(&smem.full[i]), 1);
  for (uint64_t* barrier : {&smem.s_ready, &smem.s_free, &smem.u_ready, &smem.u_free, &smem.v_ready[0], &smem.v_ready[1],
                            &smem.v_free[0], &smem.v_free[1]}) {
    ptx::mbarrier_init(ptx::shared_address(barrier), 4);
  }
  ptx::fence_mbarrier_init();
}

template <class io_t, class out_t, int kKeyDim, class Observer>
__global__ void __launch_bounds__(kBoundThreads, 1)
    chunk_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Observer observer) {
  if constexpr (!ptx::kHasWgmma) {
    ptx::trap();   // the launcher does not choose this kernel for other targets
  } else {
    extern __shared__ __align__(1024) char smem_bytes[];
    SharedMemory<kKeyDim>& smem = *reinterpret_cast<SharedMemory<kKeyDim>*>(smem_bytes);
    const Work work = work_of_block(p);
    if (work.n > p.dims.N || !takes_row(p, work.n) || write_padding(p, work)) return;
    const Span span = sequence_span(p.cu_seqlens, work.n, p.dims.T);
    const int64_t slot = slot_of_row(p.slots, work.n, p.initial_state.given() ? p.pool_in : p.pool_out);
    if (threadIdx.x == 0) init_barriers(smem);
    __syncthreads();
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
    if (group == 0) {
      ptx::setmaxnreg_inc<kStateRegisters>();
      carry_state<io_t>(p, work, span, slot, smem, observer);
    } else {
      ptx::setmaxnreg_dec<kOutputRegisters>();
      carry_output<out_t>(p, work, span, smem, observer);
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
