// SPDX-License-Identifier: Apache-2.0
//
// A gated delta net layer between its projections, one token, exact: convolution, gates, rule.h's step, gated norm.
//     q, k, v = silu(conv(x));   g, beta = gates(a, b);   S, o = step(S, q, k, v, g, beta);   out = norm(o) * act(z)
// Bound by the bytes of S, so everything else happens while they fly.
// Grid    x: row (slowest), key head, value head of its group, tile of V (fastest). The blocks of a key head are a cluster.
// Block   tile/share.cuh: which rows and columns of S a thread holds. S waits in shared memory, each thread reads what it
//         loaded itself: once for the sums, once more for the write. So few registers, and many blocks to a multiprocessor.
// Windows a channel of q or k is convolved by one block of the cluster, which alone reads and rewrites its window and sends
//         the result to the others; a channel of v by the block that needs it. No window has two readers.
// Norm    the tiles of a head send each other their o (or o * act(z)): every block sums all V squares, in norm.cu's order.
// Reads   x, z, a, b, weights, windows and S once.   Writes out, windows, S once.
// Order   the sums of rule.h, the roundings of the separate ops: their bits.
// Needs   K = 32 kSteps, V a multiple of kTile, 16-byte accesses to S, T = 1; sm_90 on.
#pragma once

#include "../ptx/arch.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/shared.cuh"
#include "../tile/divide.cuh"
#include "../tile/share.cuh"
#include "channel.cuh"

namespace gdn::cuda {
namespace {

// How a call is cut: blocks of a cluster, tiles of a head, channels of q | k a block (a multiple of 4). prefetches: a block
// asks for its state, windows and weights while the grid before this one still runs. opens_early: the next grid may start as
// soon as a block reads memory, else once its state is there.
struct StepCut {
  int blocks, tiles, per_block;
  Divider key_heads, tiles_of_head;
  bool prefetches, opens_early;
};

// Shared memory in floats. What the channels' copies took is the sums' later.
template <class Share>
struct StepSmem {
  static constexpr int kState = 0;                                             // [access][thread] of 16 bytes
  static constexpr int kQ = kState + Share::kLoads * Share::kThreads * 4, kK = kQ + Share::kKeyDim;
  static constexpr int kV = kK + Share::kKeyDim;                               // of the block's tile
  static constexpr int kBarriers = kV + Share::kTile;                          // of q | k, and of y; 8 bytes each
  static constexpr int kGates = kBarriers + 4;                                 // alpha, beta
  static constexpr int kY = kGates + 4;                                        // [V]
  static constexpr int kSums =                                                 // [warp][u, w][kTile]
      Share::kWarpsOfColumn > 1 ? Share::kWarpsOfColumn * 2 * Share::kTile : 0;

  GDN_INLINE static int channels(const StepCall& call) { return kY + call.V; }   // Channel's, or kSums of them
  static size_t bytes(const StepCall& call) {
    const int floats = Channel::floats(call, Share::kThreads);
    return sizeof(float) * (channels(call) + (floats > kSums ? floats : kSums));
  }
};

// q | k of the key head: sums over K by each warp for itself, lane = residue.
template <class Share>
__device__ __forceinline__ StepScalars scalars_of_token(const StepCall& call, const float* smem_q, const float* smem_k,
                                                        float alpha, float beta) {
  const int lane = threadIdx.x % 32;
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
  for (int j = 0; j < Share::kSteps; ++j) {
    const float q = smem_q[lane + 32 * j], k = smem_k[lane + 32 * j];
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {
    kk = add(kk, __shfl_xor_sync(0xffffffffu, kk, mask));
    qq = add(qq, __shfl_xor_sync(0xffffffffu, qq, mask));
    kq = add(kq, __shfl_xor_sync(0xffffffffu, kq, mask));
  }
  const float factor = l2norm_factor(lane % 2 == 0 ? kk : qq);   // even lanes take the root for k, odd ones for q
  const float sk = __shfl_sync(0xffffffffu, factor, 0), sq = __shfl_sync(0xffffffffu, factor, 1);
  return step_scalars(alpha, beta, call.scale, sk, sq, kq);
}

// Four neighbouring channels of q | k a lane, to every block of the cluster. All lanes of the warp come; `channel` of a lane
// without one is below 0, and so are those of its three neighbours.
__device__ __forceinline__ void send_keys(float value, int channel, int blocks, uint32_t smem_q, uint32_t barrier) {
  const int lane = threadIdx.x % 32, quad = lane % 8 * 4;
  uint32_t words[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) words[e] = float_bits(__shfl_sync(0xffffffffu, value, quad + e));
  const int first = __shfl_sync(0xffffffffu, channel, quad);
  if (first < 0) return;
#pragma unroll 1
  for (int rank = lane / 8; rank < blocks; rank += 4) {
    ptx::st_async_v4(ptx::map_shared(smem_q + 4 * first, rank), words, ptx::map_shared(barrier, rank));
  }
}

template <class Share>
__device__ __forceinline__ void write_share(char* gmem, int line, const float* smem_state, const float* smem_k, int group,
                                            float alpha, const float (&f)[Share::kColumns]) {
  using state_t = typename Share::state_t;
#pragma unroll
  for (int step = 0; step < Share::kSteps; ++step) {
    float k[Share::kOwned];
    load_floats<Share::kOwned>(smem_k + kResidues * step + Share::kOwned * group, k);
#pragma unroll
    for (int place = 0; place < Share::kOfStep; ++place) {
      float s[Share::kVector];
      read_vector<Share>(smem_state, step * Share::kOfStep + place, s);
#pragma unroll
      for (int e = 0; e < Share::kVector; ++e) {
        s[e] = write_state(alpha, k[Share::kVFirst ? e : place], f[Share::kVFirst ? place : e], s[e]);
      }
      ptx::st_global_v4(gmem + share_offset<Share>(step, place, line), round_to_pack<state_t, Share::kVector>(s).word);
    }
  }
}

// out of the column that the thread answers for, once y of the whole head is in shared memory.
__device__ __forceinline__ void write_normed(const StepCall& call, const float* smem_y, float y, float gate, float weight,
                                             bool answers, char* out) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = lane; i < call.V; i += 32) sum = fma(smem_y[i], smem_y[i], sum);
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
  if (!answers) return;
  const float value = normed(y, rms_factor(sum, static_cast<float>(call.V), call.eps), weight);
  store_float(out, call.out.dtype, 0, call.norm_before_gate ? mul(value, gate) : value);
}

__device__ __forceinline__ StepWork work_of_block(const StepCall& call, const StepCut& cut, int tile) {
  const int cluster = static_cast<int>(ptx::cluster_id()), rank = static_cast<int>(ptx::cluster_rank());
  const int n = static_cast<int>(cut.key_heads.quotient(cluster)), member = static_cast<int>(cut.tiles_of_head.quotient(rank));
  return {n, cluster - n * call.key_heads, member, (rank - member * cut.tiles) * tile, rank, -1};
}

// Bytes from a slot's first element to the first of the thread's share.
template <class Share>
__device__ __forceinline__ int share_in_slot(const StepCall& call, const StepWork& work, const SharePlace<Share>& place) {
  const int first = work.column + place.first, row = Share::kOwned * place.group;
  return (work.key_head * call.group + work.member) * call.state_head + (Share::kVFirst ? first : row) * call.state_line +
         (Share::kVFirst ? row : first) * Share::kBytes;
}

// Asks for the lines of a share on their way to the L2, each by the first of the lanes that lie on it side by side.
template <class Share>
__device__ __forceinline__ void prefetch_share(const char* gmem, int line) {
  constexpr int kLine = 128, kSide = Share::kVFirst ? Share::kGroupLanes : Share::kColumnLanes;
  if (threadIdx.x % kSide * 16 % kLine != 0) return;
#pragma unroll
  for (int step = 0; step < Share::kSteps; ++step) {
    if (Share::kVFirst && kResidues * Share::kBytes * step % kLine != 0) continue;   // in the line before
#pragma unroll
    for (int place = 0; place < Share::kOfStep; ++place) ptx::prefetch_l2(gmem + share_offset<Share>(step, place, line));
  }
}

// Everything after the loads are under way.
template <class Share>
__device__ __forceinline__ void compute_step(const StepCall& call, const StepCut& cut, const StepWork& work,
                                             const SharePlace<Share>& place, const Channel& channel, const Gates& gates,
                                             const NormColumn& column, float* smem) {
  using Smem = StepSmem<Share>;
  constexpr int kColumns = Share::kColumns;
  const uint32_t keys_barrier = ptx::shared_address(smem + Smem::kBarriers), y_barrier = keys_barrier + 8;
  ptx::cp_async_wait_group<1>();   // the channel's copies
  const float value =
      channel.is_any() ? channel.convolve(call, work, Channel::Smem(call, smem + Smem::channels(call), Share::kThreads)) : 0.0f;
  ptx::cluster_wait();   // all blocks have made their barriers
  if (channel.is_value) smem[Smem::kV + threadIdx.x] = value;
  if (static_cast<int>(threadIdx.x) >= Share::kTile) {   // whole warps
    send_keys(value, channel.key_channel, cut.blocks, ptx::shared_address(smem + Smem::kQ), keys_barrier);
  }
  if (threadIdx.x < 32) {
    smem[Smem::kGates] = gates.alpha(call);
    smem[Smem::kGates + 1] = gates.beta(call);
  }
  const float gate = place.answers() ? activate_gate(widen_bits(column.z, call.z.dtype), call.use_silu) : 0.0f;
  __syncthreads();       // v and the gates are there
  ptx::mbarrier_wait_parity(keys_barrier, 0);
  const StepScalars scalars =
      scalars_of_token<Share>(call, smem + Smem::kQ, smem + Smem::kK, smem[Smem::kGates], smem[Smem::kGates + 1]);

  ptx::cp_async_wait_group<0>();
  float u[kColumns], w[kColumns], f[kColumns], own_o = 0.0f;
  if (!cut.opens_early) ptx::griddepcontrol_launch_dependents();
  sum_share<Share>(smem + Smem::kState, smem + Smem::kQ, smem + Smem::kK, place.group, u, w);
  sum_over_lanes<Share>(u, w);
  if constexpr (Share::kWarpsOfColumn > 1) sum_over_warps<Share>(place, smem + Smem::channels(call), u, w);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    f[c] = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u[c],
                        smem[Smem::kV + place.first + c * Share::kColumnStep]);
    const float o = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, f[c], w[c]);
    own_o = place.group == c ? o : own_o;
  }
  const float y = call.norm_before_gate ? own_o : mul(own_o, gate);
  if (place.answers()) {
    const uint32_t to = ptx::shared_address(smem + Smem::kY) + 4 * (work.column + place.own_column());
#pragma unroll 1
    for (int tile = 0; tile < cut.tiles; ++tile) {
      const uint32_t rank = work.member * cut.tiles + tile;
      ptx::st_async(ptx::map_shared(to, rank), float_bits(y), ptx::map_shared(y_barrier, rank));
    }
  }
  // The address once more: held over the sums it would not fit the registers.
  char* const gmem_state = call.state + wide(work.slot, call.state_slot) + share_in_slot<Share>(call, work, place);
  write_share<Share>(gmem_state, call.state_line, smem + Smem::kState, smem + Smem::kK, place.group, scalars.alpha, f);
  if (place.warp_of_column * Share::kGroupLanes >= Share::kColumns) return;   // no lane of the warp answers
  ptx::mbarrier_wait_parity(y_barrier, 0);
  write_normed(call, smem + Smem::kY, y, gate, widen_bits(column.weight, call.norm_weight.dtype), place.answers(),
               element(call.out, work, work.column + place.own_column()));
}

template <class Share, int kBlocksOfSm>
__global__ void __launch_bounds__(Share::kThreads, kBlocksOfSm)
    step_kernel(const __grid_constant__ StepCall call, const __grid_constant__ StepCut cut) {
  if constexpr (ptx::kHasClusters) {
    using Smem = StepSmem<Share>;
    extern __shared__ float4 smem_words[];
    float* const smem = reinterpret_cast<float*>(smem_words);
    if (threadIdx.x == 0) {   // each barrier: this thread, and the bytes that are sent here
      const uint32_t barrier = ptx::shared_address(smem + Smem::kBarriers);
      ptx::mbarrier_init(barrier, 1);
      ptx::mbarrier_init(barrier + 8, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(barrier, 2 * Share::kKeyDim * sizeof(float));
      ptx::mbarrier_arrive_expect_tx(barrier + 8, call.V * sizeof(float));
    }
    ptx::cluster_arrive_relaxed();
    StepWork work = work_of_block(call, cut, Share::kTile);
    const SharePlace<Share> place(threadIdx.x);
    const int in_slot = share_in_slot<Share>(call, work, place);
    Channel channel;
    channel.find(call, work, Share::kKeyDim, Share::kTile, cut.per_block);
    if (cut.prefetches) {   // before the wait no memory is read but slots, and they only as a hint
      const int slot = static_cast<int>(hinted_slot_of_row(call.slots, work.n, call.pool));
      if (slot >= 0) {
        prefetch_share<Share>(call.state + wide(slot, call.state_slot) + in_slot, call.state_line);
        channel.prefetch(call, slot);
      }
    }
    ptx::griddepcontrol_wait();
    if (cut.opens_early) ptx::griddepcontrol_launch_dependents();
    work.slot = static_cast<int>(slot_of_row(call.slots, work.n, call.pool));
    if (work.slot < 0) {   // the whole cluster
      if (place.answers()) store_float(element(call.out, work, work.column + place.own_column()), call.out.dtype, 0, 0.0f);
      ptx::cluster_wait();
      return;
    }
    channel.copy(call, work, Channel::Smem(call, smem + Smem::channels(call), Share::kThreads));
    ptx::cp_async_commit_group();
    char* const gmem_state = call.state + wide(work.slot, call.state_slot) + in_slot;
    const uint32_t smem_state = ptx::shared_address(smem + Smem::kState) + 16 * threadIdx.x;
#pragma unroll
    for (int step = 0; step < Share::kSteps; ++step) {
#pragma unroll
      for (int place = 0; place < Share::kOfStep; ++place) {
        ptx::cp_async_16(smem_state + 16 * Share::kThreads * (step * Share::kOfStep + place),
                         gmem_state + share_offset<Share>(step, place, call.state_line), 16);
      }
    }
    ptx::cp_async_commit_group();
    Gates gates = {};
    NormColumn column = {};
    if (threadIdx.x < 32) gates.load(call, work);
    if (place.answers()) column.load(call, work, work.column + place.own_column());
    compute_step<Share>(call, cut, work, place, channel, gates, column, smem);
  }
}

}  // namespace
}  // namespace gdn::cuda
