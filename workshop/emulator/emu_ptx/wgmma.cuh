#pragma once
namespace gdn::cuda::ptx {
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_drain(int keep) { int z; emu::warp(&z, [keep](void**) { emu::Fiber* L[32]; int w = emu::cur->id / 32; for (int l = 0; l < 32; ++l) L[l] = &emu::fibers[32 * w + l]; while ((int)L[0]->groups.size() > keep) emu::run_wgmma(L, w % 4); }, "wgmma"); }
inline void wgmma_commit_group() { emu::cur->groups.push_back(emu::cur->open); emu::cur->open.clear(); if (!emu::late) wgmma_drain(0); }
template <int k> void wgmma_wait_group() { wgmma_drain(k); }
inline void wgmma_hold(float&) {}
inline void wgmma_hold(uint32_t&) {}
inline uint64_t wgmma_descriptor_128b(uint32_t smem, uint32_t lbo, uint32_t sbo) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(lbo >> 4) << 16 | static_cast<uint64_t>(sbo >> 4) << 32 | static_cast<uint64_t>(1) << 62; }
inline void push(int kind, int n, bool acc, bool trans, float* d, const uint32_t* a, uint64_t da, uint64_t db) {
  emu::Wg w{kind, n, acc, trans, d, {}, da, db}; if (a) memcpy(w.a, a, 16);
  if (emu::late) for (int i = 0; i < n / 2 && !acc; ++i) d[i] = NAN;
  emu::cur->open.push_back(w); }
template <bool A> void wgmma_m64n64k16(float* d, const uint32_t (&a)[4], uint64_t b) { push(0, 64, A, false, d, a, 0, b); }
template <bool A> void wgmma_m64n128k16_trans(float* d, const uint32_t (&a)[4], uint64_t b) { push(0, 128, A, true, d, a, 0, b); }
template <bool A> void wgmma_m64n64k16_trans(float* d, const uint32_t (&a)[4], uint64_t b) { push(0, 64, A, true, d, a, 0, b); }
template <bool A> void wgmma_m64n64k16(float* d, uint64_t a, uint64_t b) { push(1, 64, A, false, d, nullptr, a, b); }
}
