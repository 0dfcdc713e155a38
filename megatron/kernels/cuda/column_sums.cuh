// The second half of a deterministic sum over rows. The first half leaves `count` partial sums of
// every column; they are added here in a fixed order.
#pragma once

#include "common.cuh"

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
  return launch_next(column_sums_kernel<T>, grid, dim3(32, kColumnSumsLanes), stream, partial,
                     partial_2, out, out_2, count, columns);
}
