// Largest magnitudes, computed by a kernel while it writes a tensor that will be cast to fp8.
#pragma once

#include "common.cuh"

// Magnitudes have the same order as their bits; nan is above inf.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The magnitudes of N elements, as their bits: one per word, or two of 16 bits, which are compared
// together.
template <typename T, int N>
struct Magnitudes {
  static constexpr int kWords = N * sizeof(T) / 4;
  unsigned words[kWords];

  __device__ __forceinline__ void raise(int i, unsigned word) {
    words[i] = sizeof(T) == 2 ? __vmaxu2(words[i], word & 0x7fff7fffu)
                              : max(words[i], word & 0x7fffffffu);
  }
  __device__ __forceinline__ void raise(const Vector<T, N>& by) {
    const auto* bits = reinterpret_cast<const unsigned*>(by.at);
#pragma unroll
    for (int i = 0; i < kWords; ++i) raise(i, bits[i]);
  }
  // The magnitudes of element j of each vector.
  __device__ __forceinline__ unsigned of(int j) const {
    return magnitude(to_float(reinterpret_cast<const T*>(words)[j]));
  }
};

template <typename T, int N>
__device__ __forceinline__ unsigned magnitude_of(const Vector<T, N>& vector) {
  const auto* bits = reinterpret_cast<const unsigned*>(vector.at);
  Magnitudes<T, 4 / sizeof(T)> largest{};
#pragma unroll
  for (int i = 0; i < N * static_cast<int>(sizeof(T)) / 4; ++i) largest.raise(0, bits[i]);
  return sizeof(T) == 2 ? max(largest.of(0), largest.of(1)) : largest.of(0);
}

// Raises *amax (bits, zero before the kernel runs) to the largest magnitude of a warp. The order
// does not matter.
__device__ __forceinline__ void raise_by_warp(unsigned* amax, unsigned largest) {
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) atomicMax(amax, largest);
}

namespace {

// Raises *amax to the largest magnitude of a block. All threads of the block must call this once;
// the last warp may have fewer than 32 threads.
__device__ __forceinline__ void raise_by_block(unsigned* amax, unsigned largest) {
  __shared__ unsigned of_warps[32];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y, left = threads - thread / 32 * 32;
  largest = __reduce_max_sync(left < 32 ? (1u << left) - 1 : 0xffffffffu, largest);
  if (thread % 32 == 0) of_warps[thread / 32] = largest;
  __syncthreads();
  if (thread != 0) return;
  for (unsigned warp = 1; warp * 32 < threads; ++warp) largest = max(largest, of_warps[warp]);
  // A stale value is too small, never too large. Most blocks therefore need no atomic operation.
  if (largest > *static_cast<volatile unsigned*>(amax)) atomicMax(amax, largest);
}

}  // namespace
