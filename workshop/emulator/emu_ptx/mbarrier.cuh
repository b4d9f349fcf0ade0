#pragma once
namespace gdn::cuda::ptx {
inline void mbarrier_init(uint32_t b, uint32_t n) { auto& x = emu::bars[emu::global(b)]; x = {}; x.expect = x.pending = n; }
inline void mbarrier_arrive(uint32_t b) { auto& x = emu::bars.at(emu::global(b)); ++emu::progress; if (--x.pending < 0) { printf("too many arrivals\n"); abort(); } x.check(); }
inline void mbarrier_wait_parity(uint32_t b, uint32_t parity) { auto& x = emu::bars.at(emu::global(b)); while ((uint32_t)(x.phase & 1) == parity) emu::yield("mbarrier"); ++emu::progress; }
}
