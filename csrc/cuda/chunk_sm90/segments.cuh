// SPDX-License-Identifier: Apache-2.0
//
// The exact two-level scan, where sequences are few and long. First pass (segment_kernel): the first segment of a row starts
// from the row's own state and is carried as kernel.cuh does, o and all; of each segment between first and last, side by side
// with it, what it does to the state. It is linear in the state that it starts from,
//     S_end = A S_start + B
// B is the end of the chain of state.cuh from zero, A that of the same chain without V from the identity: its columns take the
// place of V's. Nobody asks what the last segment does. Second pass (later_kernel): all segments but the first, each tile from
// its start, to which it comes by what the first pass says of those between (steps.cuh).
// Of segment_kernel; later_kernel is as kernel.cuh says, with blocks of one tile:
// Grid    x: segment (slowest), value head, one of as many blocks as a head has pairs of chains or tiles of V.
// Block   of a first segment: as in kernel.cuh. Of another, three warpgroups: 0 and 1 carry a chain each, 64 columns of B or of
//         A, through the same chunks; one works while the other waits. Group 2 brings chunks and V in.
// Reads   Keys, T'' and gates of Solved, v; what kernel.cuh reads for first segments.
// Writes  B^T to starts[segment row + 1] in the order of accumulators, A^T as two fp16 to transitions[segment row]; of first
//         segments o, checkpoints and the state, of an uncut row to where it belongs, else to starts[segment row + 1].
// Needs   as kernel.cuh.
#pragma once

#include "../ptx/bar.cuh"
#include "kernel.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kChains = 2;          // of a block
constexpr int kChainStages = 4;
constexpr int kChainsBarrier = 1;   // of groups 0 and 1: the zeros are there
static_assert(kThreads == (kChains + 1) * kGroupThreads, "a block carries chains, or a first segment");
constexpr int kChainRegisters = 224, kFeedRegisters = 56;
static_assert(kChains * kChainRegisters + kFeedRegisters <= 3 * 168, "registers of the block");

// Of a chunk what the chains need.
template <int kKeyDim>
struct alignas(1024) ChainStage {
  uint16_t v[kChains][kChunk * kValueTile];   // of each chain that has values, as in SharedMemory
  fp16_t k[kChunk * kKeyDim];
  SpreadSolved solved;   // M's places stay empty
};

template <int kKeyDim>
struct alignas(1024) SegmentMemory {
  ChainStage<kKeyDim> stage[kChainStages];   // 4 x 46 KB; chunk c in stage c % 4
  uint64_t full[kChainStages];    // all of it is there: an arrival and its bytes, one from each thread that copies V
  uint64_t empty[kChainStages];   // read; an arrival from each thread of the chains that run
};

static_assert(sizeof(SegmentMemory<128>) <= 227 * 1024, "shared memory of a block");

// 64 columns of B or of A.
struct Chain {
  bool is_there, has_values;   // has_values: of B
  int64_t column;
};

// Blocks of a segment and head: of its pairs of chains; of its tiles where it is a first one.
GDN_INLINE int64_t chain_blocks(const Dims& dims) { return ceil_div(dims.V / kValueTile + dims.K / kValueTile, kChains); }
GDN_INLINE int64_t segment_blocks(const Dims& dims) {
  const int64_t tiles = dims.V / kValueTile, pairs = chain_blocks(dims);
  return tiles > pairs ? tiles : pairs;
}

// The chain of a group: block i of a head takes chains i and i + chain_blocks, those of B first.
__device__ __forceinline__ Chain chain_of(const Dims& dims, int64_t block, int group) {
  const int64_t pairs = chain_blocks(dims), idx = block + group * pairs, of_b = dims.V / kValueTile;
  if (idx < of_b) return {block < pairs, true, idx * kValueTile};
  return {block < pairs && idx < of_b + dims.K / kValueTile, false, (idx - of_b) * kValueTile};
}

using ChainTurn = TurnOf<kChainStages>;

// A chain through all chunks of a segment, at least one: the equations and the order of run_tile (state.cuh), without o.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void run_chain(bool has_values, int num_chunks, int group, SegmentMemory<kKeyDim>& smem,
                                          State<kKeyDim>& state) {
  constexpr int kPanels = State<kKeyDim>::kPanels;
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32));
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const bool always = ptx::opaque(num_chunks) > 0;   // as in run_tile: what it guards does not move behind the next wait
  ChainTurn turn;
  uint32_t stored_v[4][4] = {}, largest[2];   // without values V stays zero
  int of_v[2] = {-127, -127};
  const auto take_values = [&](const ChainStage<kKeyDim>& stage) {
    if (has_values) read_values<io_t>(stage.v[group], warp, lane, stored_v, of_v);
  };
  wait_phase(smem.full[0], 0);
  take_values(smem.stage[0]);
  start_operand(of_v, state);
  float chunk_decay = smem.stage[0].solved.first.gates.read[kChunk - 1];
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const ChainStage<kKeyDim>& stage = smem.stage[turn.slot];
    float sums[32];   // S^T k^T, then U^T
    uint32_t x[4][4], u[4][4];
    ptx::wgmma_fence();
    issue_read(state, stage.k, sums);
    {
      float2 read[8];   // e^sum k_scale
      float v[32];
      if (always) read_factors(stage.solved.first.gates.read, lane, read);
      scale_values<io_t>(stored_v, state, v);
      ptx::wgmma_wait_group<0>();   // S^T k^T
      hold(sums);
      hold(state.operand);
      subtract_prediction(read, v, sums, x);
    }
    ptx::wgmma_fence();
    issue_tokens<false, PlacesOfT>(x, stage.solved, sums);
    if (always) decay_state(chunk_decay, state);
    ptx::wgmma_wait_group<0>();   // U^T
    hold(sums);
    hold(x);
    round_tokens(sums, u);
    ptx::wgmma_fence();
    issue_write(u, stage.k, state);
    const int slot = turn.slot;
    turn = turn.next();
    if (chunk + 1 < num_chunks) {
      wait_phase(smem.full[turn.slot], turn.parity);
      take_values(smem.stage[turn.slot]);
      chunk_decay = smem.stage[turn.slot].solved.first.gates.read[kChunk - 1];
    }
    largest[0] = largest[1] = 0;
    if constexpr (kPanels == 2) {   // the first panel is rounded while the second is under way
      ptx::wgmma_wait_group<1>();
      hold(state.s[0]);
      round_panel(0, state, largest);   // of the last chunk too, for the exponents at which the end of a chain of A is stored
    }
    ptx::wgmma_wait_group<0>();   // S
    hold(state.s[kPanels - 1]);
    hold(u);
    arrive(smem.empty[slot]);
    finish_operand(of_v, state, largest);
  }
}

template <class io_t, int kKeyDim>
__device__ __forceinline__ void carry_chain(const RuleParams& p, const Segment& segment, int64_t head, const Chain& chain,
                                            int group, int num_chunks, SegmentMemory<kKeyDim>& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const int row = static_cast<int>(chain.column) + 16 * warp + lane / 4;
  State<kKeyDim> state = {};
  if (!chain.has_values) {
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i) {   // the identity
      state.s[i / 32][i % 32] = 64 * (i / 32) + sum_column(lane, i % 32) == row + 8 * (i / 2 % 2) ? 1.0f : 0.0f;
    }
  }
  run_chain<io_t>(chain.has_values, num_chunks, group, smem, state);
  if (chain.has_values) {
    store_sums(state, start_of<kKeyDim>(p, segment.row + 1, head) + chain.column * kKeyDim);
  } else {   // by way of V's places in the stages, one for each warp, which a chain of A does not use
    static_assert(kChainStages == kGroupThreads / 32 && 16 * kKeyDim * sizeof(float) <= sizeof(smem.stage[0].v[0]), "rows");
    float* const rows = reinterpret_cast<float*>(smem.stage[warp].v[group]);
    const int first = static_cast<int>(chain.column) + 16 * warp;
    store_transition(first, lane, state, rows, *transition_of<kKeyDim>(p, segment.row, head));
  }
}

// k, T'' and decays of a chunk to its stage, which nobody reads any more. By one thread.
template <int kKeyDim>
__device__ __forceinline__ void bring_for_chains(const Keys<kKeyDim>& keys, const Solved& solved, int slot,
                                                 SegmentMemory<kKeyDim>& smem) {
  ChainStage<kKeyDim>& stage = smem.stage[slot];
  const uint32_t full = ptx::shared_address(&smem.full[slot]);
  SpreadSolved& to = stage.solved;
  constexpr int kFirstBytes = sizeof(Solved::First) - offsetof(Solved::First, gates);   // gates, and T'' behind them
  ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.k) + kFirstBytes + sizeof(to.second.t) + sizeof(to.third.t));
  ptx::bulk_copy_to_shared<true>(ptx::shared_address(&stage.k), keys.k, sizeof(stage.k), full);
  ptx::bulk_copy_to_shared<true>(ptx::shared_address(&to.first.gates), &solved.first.gates, kFirstBytes, full);
  ptx::bulk_copy_to_shared<true>(ptx::shared_address(&to.second.t), solved.second.t, sizeof(to.second.t), full);
  ptx::bulk_copy_to_shared<true>(ptx::shared_address(&to.third.t), solved.third.t, sizeof(to.third.t), full);
}

// Group 2: k, T'', decays and V of all chunks. V is the caller's, the preparation need not be done for it.
template <int kKeyDim>
__device__ __forceinline__ void feed_chains(const RuleParams& p, const Segment& segment, const Span& span, int64_t head,
                                            int64_t block, SegmentMemory<kKeyDim>& smem) {
  const int thread = threadIdx.x % kGroupThreads;
  const int64_t chunk_row = first_chunk_row(p, segment.n, span.first);
  const int length = static_cast<int>(span.length), num_chunks = length / kChunk;
  const Keys<kKeyDim>* keys = keys_of<kKeyDim>(p, chunk_row, key_head(head, p.dims.Hk, p.dims.Hv));
  const Solved* solved = solved_of<kKeyDim>(p, chunk_row, head);
  using ValueTokens = Tokens<kGroupThreads>;
  const Chain chains[kChains] = {chain_of(p.dims, block, 0), chain_of(p.dims, block, 1)};
  auto values_of = [&](const Chain& chain) {
    const int64_t column = chain.has_values ? chain.column + 8 * (thread % kLanesOfToken) : 0;
    uint16_t* const gmem = static_cast<uint16_t*>(p.v.data) + p.v.offset(span.batch, span.first, head, column);
    return ValueTokens{gmem, p.v.stride[1], thread};
  };
  const ValueTokens values[kChains] = {values_of(chains[0]), values_of(chains[1])};
  auto bring_values = [&](int chunk, int slot) {
#pragma unroll
    for (int group = 0; group < kChains; ++group) {
      if (chains[group].has_values) values[group].copy_in(chunk * kChunk, length, smem.stage[slot].v[group]);
    }
    ptx::cp_async_mbarrier_arrive(ptx::shared_address(&smem.full[slot]));
  };
#pragma unroll 1
  for (int chunk = 0; chunk < min(num_chunks, kChainStages); ++chunk) bring_values(chunk, chunk);
  ptx::griddepcontrol_wait();   // for the preparation; the chains wait for what comes now
  ChainTurn turn;
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    if (chunk >= kChainStages) wait_phase(smem.empty[turn.slot], turn.parity ^ 1);
    if (thread == 0) bring_for_chains(*keys, *solved, turn.slot, smem);
    __syncwarp();
    if (chunk >= kChainStages) bring_values(chunk, turn.slot);
    keys += p.dims.Hk;
    solved += p.dims.Hv;
    turn = turn.next();
  }
}

template <int kKeyDim>
__device__ __forceinline__ void init_chain_barriers(int num_chains, SegmentMemory<kKeyDim>& smem) {
  for (int i = 0; i < kChainStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&smem.full[i]), 1 + kGroupThreads);
    ptx::mbarrier_init(ptx::shared_address(&smem.empty[i]), kGroupThreads * num_chains);
  }
  ptx::fence_mbarrier_init();
}

// Whether anybody asks what a segment behind the first does to the state.
__device__ __forceinline__ bool is_asked_for(const RuleParams& p, const Segment& segment) {
  return segment.n < p.dims.N && takes_row(p, segment.n) && (!p.slots.given() || slot_to_read(p, segment.n) >= 0);
}

// What the block of a segment behind the first does.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void carry_chains(const RuleParams& p, const Segment& segment, int64_t head, int64_t block,
                                             SegmentMemory<kKeyDim>& smem) {
  const int num_chains = chain_of(p.dims, block, 0).is_there + chain_of(p.dims, block, 1).is_there;
  if (num_chains == 0 || !is_asked_for(p, segment)) {
    if (is_last_block()) ptx::griddepcontrol_wait();
    return;
  }
  if (threadIdx.x == kChains * kGroupThreads) init_chain_barriers(num_chains, smem);
  __syncthreads();
  const Span span = segment_span(p, segment);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  if (group < kChains) {
    ptx::setmaxnreg_inc<kChainRegisters>();
    write_zeros(smem.stage);   // while the first chunks are under way
    ptx::bar_sync(kChainsBarrier, kChains * kGroupThreads);
    const Chain chain = chain_of(p.dims, block, group);
    if (chain.is_there) carry_chain<io_t>(p, segment, head, chain, group, static_cast<int>(span.length / kChunk), smem);
  } else {
    ptx::setmaxnreg_dec<kFeedRegisters>();
    feed_chains<kKeyDim>(p, segment, span, head, block, smem);
  }
}

template <class io_t, class out_t, int kKeyDim>
__global__ void __launch_bounds__(kThreads, 1) segment_kernel(const __grid_constant__ RuleParams p) {
  if constexpr (!ptx::kHasWgmma) {
    ptx::trap();   // the launcher does not choose this kernel for other targets
  } else {
    extern __shared__ __align__(1024) char smem_bytes[];
    ptx::griddepcontrol_launch_dependents();
    const uint32_t blocks = static_cast<uint32_t>(segment_blocks(p.dims)), rest = blockIdx.x / blocks;
    const uint32_t block = blockIdx.x - rest * blocks, heads = static_cast<uint32_t>(p.dims.Hv), idx = rest / heads;
    const int64_t head = rest - idx * heads;
    Segment segment = find_earlier_segment(p, idx);
    if (segment.idx == 0) {
      if (block * kValueTile >= p.dims.V) segment.n = p.dims.N + 1;   // a tile that is not there
      const Work work = {segment, key_head(head, p.dims.Hk, p.dims.Hv), head, block * int64_t{kValueTile}};
      carry<io_t, out_t, false, false>(p, Tasks{}, [&](uint32_t) { return work; },
                                       *reinterpret_cast<SharedMemory<kKeyDim>*>(smem_bytes), NoObserver{});
    } else {
      carry_chains<io_t>(p, segment, head, block, *reinterpret_cast<SegmentMemory<kKeyDim>*>(smem_bytes));
    }
  }
}

// Second pass: all segments behind the first of their row, each from its start, a block for each tile.
template <class io_t, class out_t, int kKeyDim>
__global__ void __launch_bounds__(kThreads, 1) later_kernel(const __grid_constant__ RuleParams p) {
  if constexpr (!ptx::kHasWgmma) {
    ptx::trap();
  } else {
    extern __shared__ __align__(1024) char smem_bytes[];
    carry<io_t, out_t, true, false>(p, Tasks{}, [&](uint32_t tile) { return work_of_tile<kKeyDim, true>(p, tile); },
                                    *reinterpret_cast<SharedMemory<kKeyDim>*>(smem_bytes), NoObserver{});
  }
}

template <int kKeyDim>
constexpr size_t segment_bytes() {
  return sizeof(SharedMemory<kKeyDim>) > sizeof(SegmentMemory<kKeyDim>) ? sizeof(SharedMemory<kKeyDim>)
                                                                         : sizeof(SegmentMemory<kKeyDim>);
}

}  // namespace gdn::cuda::chunk_sm90
