// The second half of deterministic sums over rows (column_sums.cuh).
#include "common.cuh"

constexpr int kLanes = 32;

// blockDim is (32, kLanes). A block handles 32 columns of the output that blockIdx.y selects.
template <typename T>
__global__ void __launch_bounds__(32 * kLanes)
    column_sums_kernel(const float* __restrict__ partial, const float* __restrict__ partial_2,
                       T* __restrict__ out, T* __restrict__ out_2, int count, int columns) {
  __shared__ float lanes[kLanes][33];
  const float* from = blockIdx.y == 0 ? partial : partial_2;
  T* to = blockIdx.y == 0 ? out : out_2;
  const int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0.f;
  wait_for_previous();
  if (column < columns) {
#pragma unroll 4
    for (int i = threadIdx.y; i < count; i += kLanes) {
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
