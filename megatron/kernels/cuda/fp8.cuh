// Scales and conversions to fp8, for kernels that cast. Scales stay on the device: a cast reads the
// largest magnitude and derives the scale itself. fp8 value = x * (largest fp8 / amax), saturating.
// A cast that uses the amax of another tensor computes the amax of its own tensor in the same pass.
#pragma once

#include "amax.cuh"

namespace {

constexpr int kThreads = 256;        // of most blocks
constexpr float kSmallest = 1e-12f;  // amax that is used for a tensor of zeros

enum Fp8 : int64_t { kE4M3 = 0, kE5M2 = 1 };  // as in kernels/fp8.py

struct Scale {
  float forward, inverse;
};

// nan and inf are not replaced: they make the whole tensor nan.
__device__ __forceinline__ Scale scale_of(float amax, int64_t fp8) {
  const float largest = fp8 == kE4M3 ? 448.f : 57344.f;
  const float held = amax < kSmallest ? kSmallest : amax;
  return {largest / held, held / largest};
}

// Returns the nearest fp8 value, ties to even, or the largest fp8 value if x is larger.
__device__ __forceinline__ unsigned nearest_fp8(float x, int64_t fp8) {
  const int digits = fp8 == kE4M3 ? 3 : 2, bias = fp8 == kE4M3 ? 7 : 15;  // stored fraction bits
  const float least = fp8 == kE4M3 ? 0x1p-6f : 0x1p-14f;                  // smallest normal number
  const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
  const unsigned sign = __float_as_uint(x) >> 31 << 7;
  if (bits > 0x7f800000u) return 0x7f;
  const float size = fminf(__uint_as_float(bits), fp8 == kE4M3 ? 448.f : 57344.f);
  if (size < least) {  // adding 2^23 rounds to an integer
    const float steps = size * (fp8 == kE4M3 ? 0x1p9f : 0x1p16f) + 0x1p23f;
    return sign | (__float_as_uint(steps) & 0xffu);
  }
  const unsigned held = __float_as_uint(size), dropped = 23 - digits;
  const unsigned rounded = held + (1u << (dropped - 1)) - 1 + (held >> dropped & 1);
  return sign | ((rounded >> dropped) - ((127u - bias) << digits));
}

// Returns two fp8 values, the first in the low byte.
__device__ __forceinline__ unsigned short fp8_pair(float x, float y, int64_t fp8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short pair;
  if (fp8 == kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
  }
  return pair;
#else
  return nearest_fp8(y, fp8) << 8 | nearest_fp8(x, fp8);
#endif
}

template <int N>
__device__ __forceinline__ Vector<unsigned char, N> to_fp8(const float (&x)[N], int64_t fp8) {
  Vector<unsigned char, N> result;
  auto* pairs = reinterpret_cast<unsigned short*>(result.at);
#pragma unroll
  for (int j = 0; j < N / 2; ++j) pairs[j] = fp8_pair(x[2 * j], x[2 * j + 1], fp8);
  return result;
}

// Returns 8 elements times a factor, in fp8. If `measures` is set, raises `largest` to their
// magnitudes and turns values that are not finite into nan. Otherwise inf would become the largest
// fp8 value, because the factor comes from another tensor.
template <bool measures, typename T>
__device__ __forceinline__ Vector<unsigned char, 8> cast_8(const Vector<T, 8>& x, float factor,
                                                           int64_t fp8, unsigned& largest) {
  auto scaled = to_floats(x);
  unsigned mine = 0;
  if constexpr (measures) mine = magnitude_of(x);
#pragma unroll
  for (int j = 0; j < 8; ++j) scaled.at[j] *= factor;
  if (mine >= 0x7f800000u) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (magnitude(to_float(x.at[j])) >= 0x7f800000u) scaled.at[j] = __uint_as_float(0x7fffffffu);
    }
  }
  largest = max(largest, mine);
  return to_fp8(scaled.at, fp8);
}



}  // namespace
