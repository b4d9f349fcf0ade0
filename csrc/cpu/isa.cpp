// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace gdn::cpu {
namespace {

const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return &kAvx512Kernels;
  }
  if (has_avx2) return &kAvx2Kernels;
#endif
  return &kBaselineKernels;
}

const Kernels* choose() {
  const Kernels* supported = best();
  const char* wanted = std::getenv("GATED_DELTANET_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, supported->isa) == 0) return supported;
  if (std::strcmp(wanted, kBaselineKernels.isa) == 0) return &kBaselineKernels;
#if defined(__x86_64__)
  // Each set contains the ones before it.
  if (supported == &kAvx512Kernels && std::strcmp(wanted, kAvx2Kernels.isa) == 0) return &kAvx2Kernels;
#endif
  std::fprintf(stderr,
               "gated-deltanet: GATED_DELTANET_CPU_ISA=%s is not one this machine has (baseline, avx2, avx512); using %s\n",
               wanted, supported->isa);
  return supported;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const chosen = choose();
  return *chosen;
}

}  // namespace gdn::cpu
