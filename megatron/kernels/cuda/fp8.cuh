// Scales and conversions to fp8, for the kernels that cast. Scales stay on the device: a cast reads
// the largest magnitude and derives the scale itself. fp8 value = x * (largest fp8 / amax),
// saturating. A cast by the largest magnitude of another tensor measures its own on the way.
#pragma once

#include <cuda_fp8.h>

#include "amax.cuh"

namespace {

constexpr int kThreads = 256;        // of most blocks
constexpr float kSmallest = 1e-12f;  // amax of a tensor of zeros

enum Fp8 : int64_t { kE4M3 = 0, kE5M2 = 1 };  // kernels/fp8.py has the same

struct Scale {
  float forward, inverse;
};

// nan and inf stay: they make the whole tensor nan, as they should.
__device__ __forceinline__ Scale scale_of(float amax, int64_t fp8) {
  const float largest = fp8 == kE4M3 ? 448.f : 57344.f;
  const float held = amax < kSmallest ? kSmallest : amax;
  return {largest / held, held / largest};
}

template <int N>
__device__ __forceinline__ Vector<unsigned char, N> to_fp8(const float (&x)[N], int64_t fp8) {
  Vector<unsigned char, N> result;
  auto* pairs = reinterpret_cast<unsigned short*>(result.at);
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const float2 pair = make_float2(x[2 * j], x[2 * j + 1]);
    pairs[j] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, fp8 == kE4M3 ? __NV_E4M3 : __NV_E5M2);
  }
  return result;
}

// 8 elements times their factor. Measuring, largest rises to their magnitudes, and what is not finite
// becomes nan: the factor comes from another tensor, and would let an inf pass as the largest number.
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

// Calls f(type, integral constant of the fp8 format).
template <typename F>
cudaError_t with_formats(int64_t dtype, int64_t fp8, F f) {
  return with_type(dtype, [&](auto type) {
    if (fp8 == kE4M3) return f(type, std::integral_constant<int64_t, kE4M3>());
    if (fp8 == kE5M2) return f(type, std::integral_constant<int64_t, kE5M2>());
    return cudaErrorInvalidValue;
  });
}

// The same, with whether to measure.
template <typename F>
cudaError_t with_formats(int64_t dtype, int64_t fp8, bool measures, F f) {
  return with_formats(dtype, fp8, [&](auto type, auto format) {
    return measures ? f(type, format, std::true_type()) : f(type, format, std::false_type());
  });
}

}  // namespace
