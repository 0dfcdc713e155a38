// Deterministic sums over rows. The first half, in a kernel of its own, leaves `count` partial sums of
// every column; the second adds them here in a fixed order.
#pragma once

#include "common.cuh"

// Writes a thread's V sums to its place in a row of partial sums.
template <int V>
__device__ __forceinline__ void store_sums(float* to, const float (&sums)[V]) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    store(to + i, Vector<float, 4>{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
  }
}

// Adds what the rows of a block (y) have summed, in their order, and writes it to the first `columns`
// of a row of partial sums. A thread's K pieces of V sums, 32 * V apart, start at `mine`. Takes
// 4 bytes a sum of dynamic shared memory, which nobody may need any more.
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

constexpr int kColumnSumsLanes = 32;

// blockDim (32, kColumnSumsLanes); a block takes 32 columns, blockIdx.y one of two outputs.
template <typename T>
__global__ void __launch_bounds__(32 * kColumnSumsLanes)
    column_sums_kernel(const float* __restrict__ partial, const float* __restrict__ partial_2,
                       T* __restrict__ out, T* __restrict__ out_2, int count, int columns) {
  __shared__ float lanes[kColumnSumsLanes][33];
  const float* from = blockIdx.y == 0 ? partial : partial_2;
  T* to = blockIdx.y == 0 ? out : out_2;
  const int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0.f;
  wait_for_previous();
  if (column < columns) {
#pragma unroll 4
    for (int i = threadIdx.y; i < count; i += kColumnSumsLanes) {
      sum += from[static_cast<int64_t>(i) * columns + column];
    }
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Transposed, so that a warp adds the lanes of one column.
  sum = warp_reduce<Sum>(lanes[threadIdx.x][threadIdx.y]);
  const int mine = blockIdx.x * 32 + threadIdx.y;
  if (threadIdx.x == 0 && mine < columns) to[mine] = from_float<T>(sum);
}

// partial fp32 [count, columns] -> out [columns]; the second pair may be null. The kernel before
// wrote the partial sums, and may allow this one to start.
template <typename T>
cudaError_t column_sums(const float* partial, const float* partial_2, T* out, T* out_2,
                        int64_t count, int64_t columns, cudaStream_t stream) {
  const dim3 grid(divide_up(columns, 32), out_2 ? 2 : 1);
  return launch_next(column_sums_kernel<T>, grid, dim3(32, kColumnSumsLanes), 0, stream, partial,
                     partial_2, out, out_2, count, columns);
}
