// Largest magnitudes. A kernel that writes what is to be cast to fp8 finds it on the way.
#pragma once

#include "common.cuh"

// Magnitudes order as their bits do; nan is above inf.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <typename T, int N>
__device__ __forceinline__ unsigned magnitude_of(const Vector<T, N>& vector) {
  unsigned result = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) result = max(result, magnitude(to_float(vector.at[j])));
  return result;
}

// *amax (bits, zero before the kernel) rises to the largest of a warp. The maximum is the same in
// any order.
__device__ __forceinline__ void raise_by_warp(unsigned* amax, unsigned largest) {
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) atomicMax(amax, largest);
}

// The same of a block, whose threads all come here, once; the last warp may have fewer than 32.
__device__ __forceinline__ void raise_by_block(unsigned* amax, unsigned largest) {
  __shared__ unsigned of_warps[32];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y, left = threads - thread / 32 * 32;
  largest = __reduce_max_sync(left < 32 ? (1u << left) - 1 : 0xffffffffu, largest);
  if (thread % 32 == 0) of_warps[thread / 32] = largest;
  __syncthreads();
  if (thread != 0) return;
  for (unsigned warp = 1; warp * 32 < threads; ++warp) largest = max(largest, of_warps[warp]);
  atomicMax(amax, largest);
}
