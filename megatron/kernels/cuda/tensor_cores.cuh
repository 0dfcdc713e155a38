// Products of small matrices by a warp (mma, movmatrix: compute capability 8.0). The layout of the
// matrices in lanes, with r = lane / 4, q = lane % 4 and two 16-bit elements per register, low half
// first, is:
//
//   a 16 x 16: a[0] row r, columns 2q, 2q + 1; a[1] row r + 8; a[2], a[3] the same, columns + 8
//   b 16 x 8:  b[0] rows 2q, 2q + 1 of column r; b[1] rows + 8
//   c 16 x 8:  c[0], c[1] row r, columns 2q, 2q + 1; c[2], c[3] row r + 8; fp32
#pragma once

#include "common.cuh"

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const Vector<T, 2> both{{from_float<T>(low), from_float<T>(high)}};
  return reinterpret_cast<const uint32_t&>(both);
}

// Returns the low halves of two registers, and their high halves.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

#ifndef EMULATED
// c += a b
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Transposes an 8 x 8 matrix of 16-bit elements. A lane holds row r, columns 2q and 2q + 1.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#else  // in the tests' emulator, the same with shuffles
template <typename T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T) {
  const int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int from = 0; from < 4; from++) {
    for (int half = 0; half < 2; half++) {
      Vector<T, 2> rows[2], columns[2];
      for (int i = 0; i < 2; i++) {
        reinterpret_cast<uint32_t&>(rows[i]) = __shfl_sync(~0u, a[i + 2 * half], 4 * r + from);
        reinterpret_cast<uint32_t&>(columns[i]) = __shfl_sync(~0u, b[half], 4 * (2 * q + i) + from);
      }
      for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 2; k++) {
          c[i] += to_float(rows[i / 2].at[k]) * to_float(columns[i % 2].at[k]);
        }
      }
    }
  }
}

inline uint32_t transposed(uint32_t x) {
  const int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const uint32_t above = __shfl_sync(~0u, x, 8 * q + r / 2);
  const uint32_t below = __shfl_sync(~0u, x, 8 * q + 4 + r / 2);
  return r % 2 ? high_halves(above, below) : low_halves(above, below);
}
#endif
