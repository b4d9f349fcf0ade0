#pragma once
namespace gdn::cuda::ptx {
inline uint32_t cluster_rank() { return emu::cur->rank; }
inline uint32_t map_shared(uint32_t a, uint32_t rank) { return (a & 0xffffff) | (rank + 1) << 24; }
inline void cluster_sync() { int z; emu::meet(emu::cluster_meet, emu::cur->id, emu::kAll, &z, [](void**) {}, "cluster"); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_cluster(uint32_t b) { auto& x = emu::bars.at(b); ++emu::progress; if (--x.pending < 0) { printf("too many arrivals\n"); abort(); } x.check(); }
inline void mbarrier_arrive_expect_tx(uint32_t b, uint32_t bytes) { auto& x = emu::bars.at(emu::global(b)); ++emu::progress; x.tx += bytes; if (--x.pending < 0) { printf("too many arrivals\n"); abort(); } x.check(); }
inline void bulk_copy_to_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) { if ((to | from | bytes) % 16) { printf("bulk alignment\n"); abort(); } emu::bulk.push_back({to, emu::global(from), bytes, bar}); ++emu::progress; }
}
