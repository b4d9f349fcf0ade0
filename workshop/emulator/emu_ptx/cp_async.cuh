#pragma once
namespace gdn::cuda::ptx {
inline void cp_do(const emu::Cp& c) { char b[16] = {}; if (c.bytes) memcpy(b, c.src, c.bytes); memcpy(emu::at(c.dst), b, 16); }
inline void cp_async_16(uint32_t s, const void* g, int bytes) {
  if (s % 16 || (uintptr_t)g % 16) { printf("cp.async alignment\n"); abort(); }
  if (emu::late) { memset(emu::at(s), 0x7f, 16); emu::cur->cp_open.push_back({s, g, bytes}); } else cp_do({s, g, bytes}); }
inline void cp_async_commit_group() { emu::cur->cp_groups.push_back(emu::cur->cp_open); emu::cur->cp_open.clear(); }
template <int k> void cp_async_wait_group() { auto& g = emu::cur->cp_groups; while ((int)g.size() > k) { for (auto& c : g[0]) cp_do(c); g.erase(g.begin()); } }
inline void prefetch_l2(const void* p) { volatile char c = *(const char*)p; (void)c; }
}
