// SPDX-License-Identifier: Apache-2.0
// The portable kernels: any x86-64 (fma through the C library where the machine has none), aarch64 (fma in hardware).
#include <cstdint>
#include <cstring>

#pragma GCC optimize("no-trapping-math")   // lets selects on floats vectorise; changes no value
#define GDN_ISA baseline
#define GDN_ISA_LEVEL 0
#include "kernels/table.h"

namespace gdn::cpu {
const Kernels kBaselineKernels = baseline::table("baseline");
}  // namespace gdn::cpu
