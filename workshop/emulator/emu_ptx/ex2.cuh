#pragma once
namespace gdn::cuda::ptx { inline float ex2_approx_ftz(float x) { float y = std::exp2(x); return std::fabs(y) < 1.17549435e-38f ? 0.0f : y; } }
