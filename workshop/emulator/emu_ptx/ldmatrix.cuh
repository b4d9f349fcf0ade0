#pragma once
namespace gdn::cuda::ptx {
struct LdA { uint32_t addr; uint32_t* x; };
inline void ld_any(uint32_t s, uint32_t* x, bool trans, bool store) {
  if (s % 16) { printf("ldmatrix alignment\n"); abort(); }
  LdA a{s, x};
  emu::warp(&a, [trans, store](void** v) {
    for (int m = 0; m < 4; ++m) for (int l = 0; l < 32; ++l) for (int h = 0; h < 2; ++h) {
      int r = l / 4, c = 2 * (l % 4) + h; if (trans) std::swap(r, c);
      char* p = emu::at(((LdA*)v[8 * m + r])->addr) + 2 * c; uint32_t& reg = ((LdA*)v[l])->x[m]; uint16_t b;
      if (store) { b = reg >> (16 * h); memcpy(p, &b, 2); } else { memcpy(&b, p, 2); reg = (reg & ~(0xffffu << (16 * h))) | (uint32_t)b << (16 * h); }
    } }, "ldmatrix");
}
inline void ldmatrix_x4(uint32_t s, uint32_t (&x)[4]) { ld_any(s, x, false, false); }
inline void ldmatrix_x4_trans(uint32_t s, uint32_t (&x)[4]) { ld_any(s, x, true, false); }
inline void stmatrix_x4(uint32_t s, const uint32_t (&x)[4]) { ld_any(s, const_cast<uint32_t*>(x), false, true); }
inline void stmatrix_x4_trans(uint32_t s, const uint32_t (&x)[4]) { ld_any(s, const_cast<uint32_t*>(x), true, true); }
inline uint32_t movmatrix_trans(uint32_t x) {
  struct A { uint32_t x, y; } a{x, 0};
  emu::warp(&a, [](void** v) { for (int l = 0; l < 32; ++l) for (int h = 0; h < 2; ++h) { int r = l / 4, c = 2 * (l % 4) + h;
    uint32_t src = ((A*)v[4 * c + r / 2])->x; ((A*)v[l])->y |= ((src >> (16 * (r % 2))) & 0xffffu) << (16 * h); } }, "movmatrix");
  return a.y;
}
}
