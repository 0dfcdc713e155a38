// Deterministic sums over rows. A first kernel writes `count` partial sums of every column, and a
// second kernel (column_sums.cu) adds them in a fixed order.
#pragma once

#include "common.cuh"

// Writes a thread's V sums to their position in a row of partial sums.
template <int V>
__device__ __forceinline__ void store_sums(float* to, const float (&sums)[V]) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    store(to + i, Vector<float, 4>{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
  }
}

// Adds the sums of a block's rows (y) in order, and writes the results to the first `columns`
// entries of a row of partial sums. A thread's K pieces of V sums, 32 * V apart, start at `mine`.
// Overwrites dynamic shared memory, 4 bytes per sum.
template <int V, int K>
__device__ __forceinline__ void store_block_sums(float* to, const float (&sums)[K][V], int mine,
                                                 int columns) {
  float* rows = dynamic_shared<float>();
  const int width = blockDim.x * K * V;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; k++) {
    store_sums(rows + threadIdx.y * width + mine + k * 32 * V, sums[k]);
  }
  __syncthreads();
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.y * blockDim.x;
  for (int i = thread * 4; i < min(columns, width); i += threads * 4) {
    auto total = load<float, 4>(rows + i);
    for (int row = 1; row < blockDim.y; row++) {
      const auto more = load<float, 4>(rows + row * width + i);
#pragma unroll
      for (int j = 0; j < 4; j++) total.at[j] += more.at[j];
    }
    store(to + i, total);
  }
}
