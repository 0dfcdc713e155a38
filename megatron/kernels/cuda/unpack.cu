// Dequantizes weights in 8 or 4 bits: a value is the level of its code times the scale of its
// block. Both factors and the result are rounded as in PyTorch's operations.
#include "common.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;       // times 8 elements per thread
constexpr int kScaleBlock = 64;  // elements that share a scale, as in config/adapters.py

// Dequantizes the 8 values from `first` on, which belong to one block of weights.
template <typename T, typename Level>
__device__ __forceinline__ void put(T* __restrict__ out, const T* __restrict__ scales, int64_t first,
                                    const Level& level) {
  const float scale = to_float(scales[first / kScaleBlock]);
  Vector<T, 8> values;
#pragma unroll
  for (int j = 0; j < 8; ++j) values.at[j] = from_float<T>(level(j) * scale);
  store(out + first, values);
}

// There are two codes per byte, the first in the lower half; levels is [16].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_nf4_kernel(const unsigned char* __restrict__ codes, const T* __restrict__ scales,
                      const T* __restrict__ levels, T* __restrict__ out, int64_t size) {
  __shared__ float table[16];  // in 16 banks, so that reads of different levels do not conflict
  if (threadIdx.x < 16) table[threadIdx.x] = to_float(levels[threadIdx.x]);
  __syncthreads();
  const int64_t first = (blockIdx.x * static_cast<int64_t>(kAtOnce * kThreads) + threadIdx.x) * 8;
  Vector<unsigned char, 4> held[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = first + k * kThreads * 8;
    if (i < size) held[k] = load<unsigned char, 4>(codes + i / 2);
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = first + k * kThreads * 8;
    const auto level = [&](int j) { return table[held[k].at[j / 2] >> j % 2 * 4 & 15]; };
    if (i < size) put(out, scales, i, level);
  }
}

// Returns the value of an e4m3 code divided by the largest value, 448, rounded to T. The bits of
// the code are shifted to form an fp32 number that is 2^120 times too small. nan becomes a number
// above the largest, which does not matter because its scale is also nan.
template <typename T>
__device__ __forceinline__ float share_of_448(unsigned code) {
  const float size = __uint_as_float((code & 0x7fu) << 20) * 0x1p120f / 448.f;
  return to_float(from_float<T>(code & 0x80u ? -size : size));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_fp8_kernel(const unsigned char* __restrict__ codes, const T* __restrict__ scales,
                      T* __restrict__ out, int64_t size) {
  const int64_t first = (blockIdx.x * static_cast<int64_t>(kAtOnce * kThreads) + threadIdx.x) * 8;
  Vector<unsigned char, 8> held[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = first + k * kThreads * 8;
    if (i < size) held[k] = load<unsigned char, 8>(codes + i);
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = first + k * kThreads * 8;
    const auto level = [&](int j) { return share_of_448<T>(held[k].at[j]); };
    if (i < size) put(out, scales, i, level);
  }
}

}  // namespace
