// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/wgmma.cuh: each warp its 16 rows, summed in float64.
#pragma once

#include <cmath>

#include "mma.cuh"

namespace gdn::cuda::ptx {

// Element k of row (K-major) or column `mn` of a tile of rows of 128 bytes with the 128-byte swizzle (layout type 1): bits 4..6
// of an address are xored with bits 7..9; or, K-major, of rows of 32 bytes with the 32-byte swizzle (3): bit 4 with bit 7.
inline float tile_element(uint64_t descriptor, bool is_mn_major, int mn, int k) {
  const bool is_narrow = descriptor >> 62 == 3;
  if (descriptor >> 62 != (is_narrow ? 3 : 1) || (descriptor >> 49 & 7) != 0) {
    emulated::fail("a wgmma descriptor of another layout");
  }
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t start = field(0), lbo = field(16), sbo = field(32);
  if (is_narrow && (is_mn_major || k >= 16 || start % 256 != 0)) emulated::fail("a tile of rows of 32 bytes that is none");
  const uint32_t row_bytes = is_narrow ? 32 : 128, xored = is_narrow ? 1 : 7;
  const uint32_t at = is_mn_major ? start + mn / 64 * lbo + k / 8 * sbo + k % 8 * 128 + mn % 64 * 2
                                  : start + mn / 8 * sbo + mn % 8 * row_bytes + k * 2;
  uint16_t bits;
  std::memcpy(&bits, emulated::shared_at(at ^ (at >> 7 & xored) << 4, 2), 2);
  return to_float(fp16_t{bits});
}

// The oldest group of the warp whose lanes these are.
inline void run_oldest_group(emulated::Thread** lanes) {
  const int first_row = static_cast<int>(lanes[0]->id / emulated::kWarp % 4) * 16;
  for (size_t which = 0; which < lanes[0]->products.front().size(); ++which) {
    const emulated::Product& common = lanes[0]->products.front()[which];
    std::vector<float> a(16 * 16), b(16 * common.n);
    for (int i = 0; i < 16 * common.n; ++i) {
      b[i] = tile_element(common.b_descriptor, common.b_is_n_major, i % common.n, i / common.n);
    }
    for (int i = 0; i < 16 * 16; ++i) {
      const int row = i / 16, k = i % 16;
      const auto& own = lanes[4 * (row % 8) + k % 8 / 2]->products.front()[which];
      a[i] = common.a_in_registers ? half_of(own.a[row / 8 + 2 * (k / 8)], k % 2)
                                   : tile_element(common.a_descriptor, false, first_row + row, k);
    }
    for (int lane = 0; lane < emulated::kWarp; ++lane) {
      float* const d = lanes[lane]->products.front()[which].d;
      for (int i = 0; i < common.n / 2; ++i) {
        const int row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        double sum = common.accumulates ? d[i] : 0.0;
        for (int k = 0; k < 16; ++k) sum += double(a[row * 16 + k]) * b[k * common.n + column];
        d[i] = static_cast<float>(sum);
      }
    }
  }
  for (int lane = 0; lane < emulated::kWarp; ++lane) lanes[lane]->products.erase(lanes[lane]->products.begin());
}

template <int kPending>
void wgmma_wait_group() {
  emulated::with_warp(emulated::machine().current, [](void** lanes) {
    auto** const threads = reinterpret_cast<emulated::Thread**>(lanes);
    while (static_cast<int>(threads[0]->products.size()) > kPending) run_oldest_group(threads);
  });
}

inline void wgmma_fence() {
  emulated::with_warp(nullptr, [](void**) {});
}

inline void wgmma_commit_group() {
  emulated::Thread& self = *emulated::machine().current;
  self.products.push_back(std::move(self.open_products));
  self.open_products.clear();
  if (!emulated::machine().is_late) wgmma_wait_group<0>();
}

inline void wgmma_hold(float&) {}
inline void wgmma_hold(uint32_t&) {}

inline uint64_t wgmma_descriptor_128b(uint32_t smem, uint32_t lbo, uint32_t sbo) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(lbo >> 4) << 16 |
         static_cast<uint64_t>(sbo >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

inline uint64_t wgmma_descriptor_32b(uint32_t smem, uint32_t sbo) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(1) << 16 |
         static_cast<uint64_t>(sbo >> 4) << 32 | static_cast<uint64_t>(3) << 62;
}
inline void fence_proxy_async() {}

// Until a late product is waited for, its sums are NaN.
inline void issue(emulated::Product product) {
  for (int i = 0; emulated::machine().is_late && !product.accumulates && i < product.n / 2; ++i) product.d[i] = NAN;
  emulated::machine().current->open_products.push_back(product);
}

template <bool kAccumulate>
void wgmma_m64n64k16(float* d, const uint32_t (&a)[4], uint64_t b) {
  issue({d, 64, kAccumulate, true, false, {a[0], a[1], a[2], a[3]}, 0, b});
}
template <bool kAccumulate>
void wgmma_m64n64k16_trans(float* d, const uint32_t (&a)[4], uint64_t b) {
  issue({d, 64, kAccumulate, true, true, {a[0], a[1], a[2], a[3]}, 0, b});
}
template <bool kAccumulate>
void wgmma_m64n64k16(float* d, uint64_t a, uint64_t b) {
  issue({d, 64, kAccumulate, false, false, {}, a, b});
}

}  // namespace gdn::cuda::ptx
