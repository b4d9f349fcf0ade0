#pragma once
namespace gdn::cuda::ptx { template <int k> void setmaxnreg_inc() {} template <int k> void setmaxnreg_dec() {} }
