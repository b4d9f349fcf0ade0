// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512: the same templates, packs of 16.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#pragma GCC optimize("no-trapping-math")   // lets selects on floats vectorise; changes no value
#define GDN_ISA avx512
#define GDN_ISA_LEVEL 2
#include "kernels/table.h"

namespace gdn::cpu {
const Kernels kAvx512Kernels = avx512::table("avx512");
}  // namespace gdn::cpu
#endif
