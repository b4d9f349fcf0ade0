#include "emu.h"
#undef threadIdx
#undef blockIdx
namespace emu {
Fiber fibers[kAll]; Fiber* cur; ucontext_t sched; uint64_t progress; Meet warp_meet[12 * kBlocks], bar_meet[kBlocks][16], cluster_meet; std::vector<Bulk> bulk;
std::map<uint32_t, Bar> bars; bool late = true; char* smem_of[kBlocks]; Idx block_idx[kBlocks];
static void run_bulk(const Bulk& b) { auto p = [](uint32_t g) { return smem_of[(g >> 24) - 1] + (g & 0xffffff); }; memcpy(p(b.to), p(b.from), b.bytes); Bar& x = bars.at(b.bar); x.tx -= b.bytes; x.check(); ++progress; } size_t smem_size = 227 * 1024;
static const std::function<void()>* body_;
void yield(const char* where) { Fiber* f = cur; f->where = where; swapcontext(&f->ctx, &sched); }
void meet(Meet& m, int slot, int count, void* arg, const std::function<void(void**)>& f, const char* where) {
  m.args[slot] = arg; ++progress; uint64_t gen = m.gen;
  if (++m.arrived == count) { f(m.args); m.arrived = 0; ++m.gen; } else { while (m.gen == gen) yield(where); }
}
static void entry() { (*body_)(); cur->done = true; ++progress; while (true) swapcontext(&cur->ctx, &sched); }
void run_block(const std::function<void()>& body) {
  body_ = &body; bars.clear();
  for (auto& m : warp_meet) m.arrived = 0;
  for (auto& b : bar_meet) for (auto& m : b) m.arrived = 0;
  cluster_meet.arrived = 0; bulk.clear();
  for (char* smem : smem_of) memset(smem, 0x7f, smem_size);   // NaN in fp16 and bf16... 0x7f7f is NaN in fp16, large in bf16
  for (int i = 0; i < kAll; ++i) {
    Fiber& f = fibers[i]; f.tid.x = i % kThreads; f.id = i; f.rank = i / kThreads; f.done = false; f.open.clear(); f.groups.clear(); f.cp_open.clear(); f.cp_groups.clear();
    if (f.stack.empty()) f.stack.resize(256 * 1024);
    getcontext(&f.ctx); f.ctx.uc_stack.ss_sp = f.stack.data(); f.ctx.uc_stack.ss_size = f.stack.size(); f.ctx.uc_link = &sched;
    makecontext(&f.ctx, entry, 0);
  }
  static std::mt19937 rng(7);
  std::vector<int> order(12 * kBlocks); for (int i = 0; i < 12 * kBlocks; ++i) order[i] = i;
  int idle = 0;
  while (true) {
    uint64_t before = progress; bool all = true;
    std::shuffle(order.begin(), order.end(), rng);
    for (int w : order) {
      if (rng() % 3 == 0 && idle == 0) { all = false; continue; }   // some warps run ahead of others
      for (int l = 0; l < 32; ++l) {
        Fiber& f = fibers[32 * w + l]; if (f.done) continue; all = false; cur = &f; swapcontext(&sched, &f.ctx);
      }
    }
    while (!bulk.empty() && (rng() % 3 == 0 || idle > 0)) { size_t i = rng() % bulk.size(); Bulk b = bulk[i]; bulk.erase(bulk.begin() + i); run_bulk(b); }
    if (all) { bool fin = true; for (auto& f : fibers) fin &= f.done; if (fin) return; }
    if (progress == before) { if (++idle > 50) { printf("DEADLOCK:"); for (int w = 0; w < 12 * kBlocks; ++w) printf(" w%d:%s", w, fibers[32 * w].done ? "done" : fibers[32 * w].where); printf("\n"); abort(); } } else idle = 0;
  }
}
static uint32_t swz(uint32_t a) { return a ^ (((a >> 7) & 7) << 4); }
static float operand(uint64_t d, bool mn_major, int mn, int k) {
  uint32_t start = (d & 0x3fff) << 4, lbo = ((d >> 16) & 0x3fff) << 4, sbo = ((d >> 32) & 0x3fff) << 4;
  if ((d >> 62) != 1 || ((d >> 49) & 7)) { printf("descriptor\n"); abort(); }
  uint32_t off = mn_major ? (mn / 64) * lbo + (k / 8) * sbo + (k % 8) * 128 + (mn % 64) * 2 : (mn / 8) * sbo + (mn % 8) * 128 + k * 2;
  uint16_t b; memcpy(&b, at(swz(start + off)), 2); return half(b);
}
void run_wgmma(Fiber** L, int w) {   // oldest group of a warp
  size_t count = L[0]->groups[0].size();
  for (size_t g = 0; g < count; ++g) {
    Wg& o = L[0]->groups[0][g]; int n = o.n;
    std::vector<float> A(16 * 16), B(16 * n);
    for (int k = 0; k < 16; ++k) for (int j = 0; j < n; ++j) B[k * n + j] = operand(o.db, o.trans, j, k);
    if (o.kind == 0) {
      for (int l = 0; l < 32; ++l) for (int i = 0; i < 4; ++i) for (int h = 0; h < 2; ++h)
        A[(l / 4 + 8 * (i & 1)) * 16 + 2 * (l % 4) + 8 * (i >> 1) + h] = half(L[l]->groups[0][g].a[i] >> (16 * h));
    } else for (int r = 0; r < 16; ++r) for (int k = 0; k < 16; ++k) A[r * 16 + k] = operand(o.da, false, 16 * w + r, k);
    for (int l = 0; l < 32; ++l) { float* d = L[l]->groups[0][g].d;
      for (int i = 0; i < n / 2; ++i) {
        int r = l / 4 + 8 * ((i / 2) % 2), c = 8 * (i / 4) + 2 * (l % 4) + i % 2; double s = o.acc ? d[i] : 0.0;
        for (int k = 0; k < 16; ++k) s += (double)A[r * 16 + k] * B[k * n + c];
        d[i] = (float)s;
      } }
  }
  for (int l = 0; l < 32; ++l) L[l]->groups.erase(L[l]->groups.begin());
}
}
