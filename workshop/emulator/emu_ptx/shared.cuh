#pragma once
namespace gdn::cuda::ptx {
inline uint32_t shared_address(const void* p) { long o = (const char*)p - emu::smem_of[emu::cur->rank]; if (o < 0 || (size_t)o >= emu::smem_size) { printf("not shared\n"); abort(); } return (uint32_t)o; }
inline void fence_proxy_async_shared() {}
}
