// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX2 + FMA + F16C. Our headers come after the target pragma: a template takes
// its target where it is written. All they hold is always inlined, a template on a local type, or in the namespace.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#pragma GCC optimize("no-trapping-math")   // lets selects on floats vectorise; changes no value
#define GDN_ISA avx2
#define GDN_ISA_LEVEL 1
#include "kernels/table.h"

namespace gdn::cpu {
const Kernels kAvx2Kernels = avx2::table("avx2");
}  // namespace gdn::cpu
#endif
