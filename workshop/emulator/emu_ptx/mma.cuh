#pragma once
namespace gdn::cuda::ptx {
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct A { float* d; const uint32_t* a; uint32_t b[2]; } arg{d, a, {b0, b1}};
  emu::warp(&arg, [](void** v) { float M[16][16], B[16][8];
    for (int l = 0; l < 32; ++l) { A* p = (A*)v[l]; for (int i = 0; i < 4; ++i) for (int h = 0; h < 2; ++h) M[l / 4 + 8 * (i & 1)][2 * (l % 4) + 8 * (i >> 1) + h] = emu::half(p->a[i] >> (16 * h));
      for (int i = 0; i < 2; ++i) for (int h = 0; h < 2; ++h) B[2 * (l % 4) + 8 * i + h][l / 4] = emu::half(p->b[i] >> (16 * h)); }
    for (int l = 0; l < 32; ++l) { A* p = (A*)v[l]; for (int i = 0; i < 4; ++i) { int r = l / 4 + 8 * (i / 2), c = 2 * (l % 4) + i % 2; double s = p->d[i]; for (int k = 0; k < 16; ++k) s += (double)M[r][k] * B[k][c]; p->d[i] = s; } } }, "mma");
}
}
