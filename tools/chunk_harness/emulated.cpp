// SPDX-License-Identifier: Apache-2.0
// The harness's cases on the emulated machine. See emulate.sh.
#include "cuda/launch.cuh"
#if defined(PRECISION)   // of the mma.sync kernel: 0 normal, 1 high
#include "cuda/chunk_mma/launch.cu"
#else
#include "cuda/chunk_sm90/launch.cu"
#endif

#include <string>

#if defined(PRECISION)
#include "cases.h"

using namespace gdn;
using namespace gdn::cuda;
using cases::Case;
using cases::Problem;
constexpr bool kIsHigh = PRECISION == 1;
#else
#include "steps.h"
#include "watch.h"

constexpr bool kIsHigh = false;
#endif

namespace {

struct Buffers {
  explicit Buffers(const Problem& p, int out_bytes)
      : out(static_cast<size_t>(p.B) * p.T * p.c.Hv * Problem::V * out_bytes, 0x7f), state(p.state_in.size(), 0x55) {}

  cases::Pointers pointers(Problem& p) {
    return {p.qkv.data(),       p.g.data(),           p.beta.data(),     p.cu.data(),  p.slots.data(),
            p.out_slots.data(), p.has_initial.data(), p.state_in.data(), state.data(), out.data()};
  }

  std::vector<char> out, state;
};

void run(RuleParams params) {
  params.is_high_precision = kIsHigh;
#if defined(PRECISION)
  const auto bytes_of = chunk_mma_workspace_bytes;
  const auto compute = chunk_mma_gated_delta_rule;
#else
  const auto bytes_of = chunk_sm90_workspace_bytes;
  const auto compute = chunk_sm90_gated_delta_rule;
#endif
  std::vector<char> bytes(bytes_of(params) + 1024, '\xff');
  if (!params.workspace) params.workspace = bytes.data() + (1024 - reinterpret_cast<uintptr_t>(bytes.data()) % 1024);
  if (const char* error = compute(params, nullptr)) {
    printf("refused: %s\n", error);
    exit(2);
  }
}

#if !defined(PRECISION)
template <class io_t>
int debug(DType io, int chunk) {
  Case c;
  c.io = io;
  c.T = 150;
  c.name = "debug chunk " + std::to_string(chunk);
  Problem p = cases::make(c);
  Buffers buffers(p, 2);
  std::vector<std::vector<float>> got;
  for (size_t size : {64 * 128, 64 * 128, 64 * 64, 64 * 64, 64, 64 * 64, 64 * 64, 64 * 64}) got.emplace_back(size, NAN);
  const Watch watch = {chunk,         got[0].data(), got[1].data(), got[2].data(), got[3].data(),
                       got[4].data(), got[5].data(), got[6].data(), got[7].data()};
  RuleParams params = cases::params(p, buffers.pointers(p));
  std::vector<char> bytes(chunk_sm90_workspace_bytes(params) + 1024);
  params.workspace = bytes.data() + (1024 - reinterpret_cast<uintptr_t>(bytes.data()) % 1024);
  run(params);
  launch(chunk_sm90::chunk_kernel<io_t, io_t, 128, Watch>, 2 * c.N * c.Hv, chunk_sm90::kThreads,
         sizeof(chunk_sm90::SharedMemory<128>), nullptr, params, chunk_sm90::Tasks{}, watch);
  return compare_watch(p, io, chunk, got);
}
#endif

// Whole against split at 64 and at 128.
int bits() {
  int bad = 0;
  for (int gates : {0, 5}) {
    Case c;
    c.T = 200;
    c.N = 1;
    c.Hv = 1;
    c.gates = gates;
    Problem p = cases::make(c);
    Buffers whole(p, 2), split(p, 2);
    run(cases::params(p, whole.pointers(p)));
    for (int cut : {64, 128}) {
      RuleParams first = cases::params(p, split.pointers(p)), second = first;
      first.dims.T = cut;
      second.dims.T = c.T - cut;
      for (View* v : {&second.q, &second.k, &second.v, &second.g, &second.beta, &second.out}) {
        v->data = static_cast<char*>(v->data) + cut * v->stride[1] * dtype_size(v->dtype);
      }
      second.initial_state = second.state;
      run(first);
      run(second);
      const bool same = whole.out == split.out && whole.state == split.state;
      bad += !same;
      printf("split at %d, gates %d: %s\n", cut, gates, same ? "equal" : "DIFFER");
    }
  }
  return bad;
}

// The call with rows cut every `segment_tokens` tokens, whatever that costs; 0: whole rows; -1: beside their preparation.
void run_cut(RuleParams params, int segment_tokens) {
#if defined(PRECISION)
  run(params);   // nothing is cut there
#else
  params.segment_tokens = std::max(segment_tokens, 0);
  if (segment_tokens < 0) {
    params.items_ahead = (num_items(params) + 2) / 3;
    params.released_multiprocessors = 2;
    params.staying_blocks = 1;
  }
  std::vector<char> bytes(workspace_bytes<128>(params) + 1024, '\xff');
  params.workspace = bytes.data() + (1024 - reinterpret_cast<uintptr_t>(bytes.data()) % 1024);
  const char* const error =
      params.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(params, nullptr) : launch_dtype<fp16_t>(params, nullptr);
  if (error) exit((printf("refused: %s\n", error), 2));
#endif
}

#if !defined(PRECISION)
template <class io_t>
const char* carry_pairs(const RuleParams& params, int64_t pairs) {
  if (has_queue(params)) queue_of<128>(params)->taken = 0;   // as the preparation leaves it
  if (params.out.dtype == DType::kFloat32) return launch_carry<io_t, float, 128>(params, {pairs, INT32_MAX}, nullptr);
  return launch_carry<io_t, io_t, 128>(params, {pairs, INT32_MAX}, nullptr);
}

// Blocks of one tile, blocks of two and one, blocks of two: whether all have the same bits, checkpoints of dense rows too.
int pairs(const std::string& wanted, int longest) {
  int bad = 0;
  for (const Case& c : cases::all()) {
    if (c.name.find(wanted) == std::string::npos || c.T > longest) continue;
    Problem p = cases::make(c);
    Buffers one(p, c.out_fp32 ? 4 : 2);
    RuleParams params = cases::params(p, one.pointers(p));
    std::vector<char> bytes(workspace_bytes<128>(params) + 1024, '\xff');
    params.workspace = bytes.data() + (1024 - reinterpret_cast<uintptr_t>(bytes.data()) % 1024);
    const int kept = c.ragged || c.slots ? 0 : c.T / 64;
    const size_t checkpoint_bytes = p.state_in.size() / c.N * kept * c.N;
    const auto keep = [&](RuleParams& r, std::vector<char>& checkpoints) {
      checkpoints.assign(checkpoint_bytes, 0x33);
      if (kept == 0) return;
      r.checkpoints = r.state;
      r.checkpoints.data = checkpoints.data();
      r.total_checkpoints = c.N * kept;
      r.checkpoint_every = 64;
    };
    std::vector<char> checkpoints_of_one, checkpoints_of_two;
    keep(params, checkpoints_of_one);
    run(params);
    const int64_t most = num_tiles(params) / 2;
    for (const int64_t count : {int64_t{1}, most}) {
      Buffers two(p, c.out_fp32 ? 4 : 2);
      RuleParams mine = cases::params(p, two.pointers(p));
      mine.workspace = params.workspace;
      keep(mine, checkpoints_of_two);
      if (const char* error = c.io == DType::kBFloat16 ? carry_pairs<bf16_t>(mine, count) : carry_pairs<fp16_t>(mine, count)) {
        exit((printf("refused: %s\n", error), 2));
      }
      const bool same = one.out == two.out && one.state == two.state && checkpoints_of_one == checkpoints_of_two;
      bad += !same;
      printf("%-46s %lld of %lld blocks of two: %s\n", c.name.c_str(), static_cast<long long>(count),
             static_cast<long long>(most), same ? "equal" : "DIFFER");
    }
  }
  printf("%d bad\n", bad);
  return bad;
}
#endif

#if !defined(PRECISION)
std::vector<char> state_of(Problem p, int segment_tokens) {
  Buffers buffers(p, 2);
  run_cut(cases::params(p, buffers.pointers(p)), segment_tokens);
  return buffers.state;
}
#endif

int check(const std::string& wanted, int longest, int segment_tokens) {
  int bad = 0;
  for (const Case& c : cases::all()) {
    if (c.name.find(wanted) == std::string::npos || c.T > longest) continue;
    Problem p = cases::make(c);
    Buffers buffers(p, c.out_fp32 ? 4 : 2);
    const std::vector<char> before = buffers.state;
    run_cut(cases::params(p, buffers.pointers(p)), segment_tokens);
    const cases::Errors e = cases::compare(p, cases::reference(p), buffers.out, buffers.state, before);
    double out_limit, state_limit;
    const bool ok = cases::judge(c, kIsHigh, e, &out_limit, &state_limit);
    bad += !ok;
    printf("%-46s out %.2e (%.1e)  state %.2e (%.1e)  %s%s%s\n", c.name.c_str(), e.out, out_limit, e.state, state_limit,
           ok ? "ok" : "FAIL", e.nan ? " nan" : "", e.untouched_ok ? "" : " unnamed slot touched");
  }
  printf("%d bad\n", bad);
  return bad;
}

}  // namespace

int main(int argc, char** argv) {
  setbuf(stdout, nullptr);
  const std::string what = argc > 1 ? argv[1] : "";
#if !defined(PRECISION)
  if (what == "debug") {
    return debug<bf16_t>(DType::kBFloat16, 0) + debug<fp16_t>(DType::kFloat16, 1) + debug<bf16_t>(DType::kBFloat16, 2);
  }
#endif
#if !defined(PRECISION)
  if (what == "steps") return cases::check_steps(state_of) != 0;
  if (what == "pairs") return pairs(argc > 2 ? argv[2] : "", argc > 3 ? atoi(argv[3]) : 260) != 0;
#endif
  return (what == "bits" ? bits() : check(what, argc > 2 ? atoi(argv[2]) : 260, argc > 3 ? atoi(argv[3]) : 0)) != 0;
}
