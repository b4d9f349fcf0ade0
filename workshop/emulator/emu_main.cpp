#include "emu_tree/csrc/cuda/chunk_sm90/kernel.cuh"
#include "cases.h"
#include "watch.h"
alignas(1024) static char memory[2][227 * 1024];
using namespace gdn; using namespace gdn::cuda::chunk_sm90;
template <class io_t, class out_t> void launch(const RuleParams& p) {
  const int64_t rows = p.dims.N + (p.cu_seqlens.given() ? 1 : 0), blocks = rows * p.dims.Hv * (p.dims.V / 64);
  for (int64_t b = 0; b < blocks; b += 2) { emu::block_idx[0].x = b; emu::block_idx[1].x = b + 1; emu::run_block([&] { chunk_kernel<io_t, out_t, 128>(p, NoObserver{}); }); }
}
template <class io_t> int debug(DType io, int chunk) {
  Case c; c.io = io; c.T = 150; c.name = "debug chunk " + std::to_string(chunk); cases::Problem p = cases::make(c);
  std::vector<char> out((size_t)p.B * p.T * c.Hv * 128 * 2), state(p.state_in.size());
  cases::Pointers x = {p.qkv.data(), p.g.data(), p.beta.data(), 0, 0, 0, 0, p.state_in.data(), state.data(), out.data()};
  RuleParams r = cases::params(p, x);
  std::vector<std::vector<float>> got; for (size_t s : {64 * 128, 64 * 128, 64 * 64, 64 * 64, 256, 64 * 64, 64 * 64, 64 * 64}) got.emplace_back(s, NAN);
  Watch w = {chunk, got[0].data(), got[1].data(), got[2].data(), got[3].data(), got[4].data(), got[5].data(), got[6].data(), got[7].data()};
  emu::block_idx[0].x = 0; emu::block_idx[1].x = 1; emu::run_block([&] { chunk_kernel<io_t, io_t, 128>(r, w); });
  return compare_watch(p, io, chunk, got);
}
int bits() {   // whole against split at 64 and 128, one block
  int bad = 0;
  for (int variant = 0; variant < 2; ++variant) {
    Case c; c.T = 200; c.N = 1; c.Hv = 1; c.gates = variant ? 5 : 0; cases::Problem p = cases::make(c);
    std::vector<char> out((size_t)p.T * 128 * 2), state(p.state_in.size()), out2 = out, state2 = state;
    cases::Pointers x = {p.qkv.data(), p.g.data(), p.beta.data(), 0, 0, 0, 0, p.state_in.data(), state.data(), out.data()};
    RuleParams r = cases::params(p, x); launch<bf16_t, bf16_t>(r);
    for (int cut : {64, 128}) {
      x.out = out2.data(); x.state_out = state2.data(); RuleParams a = cases::params(p, x), b = a; a.dims.T = cut; b.dims.T = c.T - cut;
      for (View* v : {&b.q, &b.k, &b.v, &b.g, &b.beta, &b.out}) v->data = (char*)v->data + cut * v->stride[1] * dtype_size(v->dtype);
      b.initial_state = b.state; launch<bf16_t, bf16_t>(a); launch<bf16_t, bf16_t>(b);
      bool same = out == out2 && state == state2; bad += !same; printf("split %d variant %d %s\n", cut, variant, same ? "equal" : "DIFFER");
    }
  }
  return bad;
}
int main(int argc, char** argv) {
  emu::smem_of[0] = memory[0]; emu::smem_of[1] = memory[1]; setbuf(stdout, nullptr);
  if (argc > 1 && !strcmp(argv[1], "debug")) return debug<bf16_t>(DType::kBFloat16, 0) + debug<fp16_t>(DType::kFloat16, 1) + debug<bf16_t>(DType::kBFloat16, 2);
  if (argc > 1 && !strcmp(argv[1], "bits")) return bits();
  const char* want = argc > 1 ? argv[1] : ""; int max_t = argc > 2 ? atoi(argv[2]) : 200; int bad = 0;
  for (auto& c : cases::all()) {
    if (c.name.find(want) == std::string::npos || c.T > max_t) continue;
    cases::Problem p = cases::make(c); cases::Reference ref = cases::reference(p);
    for (int late = 0; late < 2; ++late) {
      emu::late = late;
      std::vector<char> out(ref.out.size() * (c.out_fp32 ? 4 : 2), 0x7f), state(p.state_in.size(), 0x55), before = state;
      cases::Pointers x = {p.qkv.data(), p.g.data(), p.beta.data(), p.cu.data(), p.slots.data(), p.out_slots.data(), p.has_initial.data(), p.state_in.data(), state.data(), out.data()};
      RuleParams r = cases::params(p, x);
      if (c.io == DType::kBFloat16) { if (c.out_fp32) launch<bf16_t, float>(r); else launch<bf16_t, bf16_t>(r); }
      else { if (c.out_fp32) launch<fp16_t, float>(r); else launch<fp16_t, fp16_t>(r); }
      auto e = cases::compare(p, ref, out, state, before); double ol, sl; bool ok = cases::judge(c, e, &ol, &sl); bad += !ok;
      printf("%-44s late=%d out %.2e (%.1e) state %.2e (%.1e) %s%s%s\n", c.name.c_str(), late, e.out, ol, e.state, sl, ok ? "ok" : "FAIL", e.nan ? " nan" : "", e.untouched_ok ? "" : " touched");
    }
  }
  printf("%d bad\n", bad); return bad != 0;
}
