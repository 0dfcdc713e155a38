// The sum of squares and the number of nonzero elements of many tensors. Every block sums over a
// piece, and a second kernel adds the results of the blocks, both in a fixed order and in fp64.
#include "common.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // independent 16-byte loads per thread

struct ReadTensor {  // packed by kernels/tensor_sums.py
  const void* data;
  int64_t size;
};

struct Totals {
  double squares, nonzeros;
};

struct Running {  // sums of one thread
  double squares = 0.;
  int nonzeros = 0;

  template <typename T, int N>
  __device__ __forceinline__ void take(const Vector<T, N>& values) {
    float sum = 0.f;  // of one access, for which fp32 is precise enough
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float x = to_float(values.at[j]);
      sum += x * x;
      nonzeros += x != 0.f;
    }
    squares += sum;
  }
};

// Returns a block's sum of a double in thread 0.
__device__ double block_sum(double value, double* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value += __shfl_xor_sync(0xffffffffu, value, mask);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += scratch[warp];
  }
  return sum;
}

__device__ void write_sums(double squares, double nonzeros, Totals* result) {
  __shared__ double scratch[2][kThreads / 32];
  const Totals sum = {block_sum(squares, scratch[0]), block_sum(nonzeros, scratch[1])};
  if (threadIdx.x == 0) *result = sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    pieces_kernel(const ReadTensor* __restrict__ tensors, const longlong2* __restrict__ pieces,
                  int64_t chunk, Totals* __restrict__ results) {
  constexpr int N = vector_size<T>;
  const longlong2 piece = pieces[blockIdx.x];
  const ReadTensor tensor = tensors[piece.x];
  const T* data = static_cast<const T*>(tensor.data) + piece.y;
  const int64_t size = min(static_cast<int64_t>(tensor.size - piece.y), chunk);
  const int64_t vectors = reinterpret_cast<uintptr_t>(data) % 16 == 0 ? size / N : 0;
  Running running;
  int64_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * kThreads < vectors; i += kInFlight * kThreads) {
    Vector<T, N> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) loaded[k] = load<T, N>(data + (i + k * kThreads) * N);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) running.take(loaded[k]);
  }
  for (; i < vectors; i += kThreads) running.take(load<T, N>(data + i * N));
  for (i = vectors * N + threadIdx.x; i < size; i += kThreads) running.take(load<T, 1>(data + i));
  write_sums(running.squares, running.nonzeros, results + blockIdx.x);
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const Totals* __restrict__ results, int64_t count, Totals* __restrict__ total) {
  double squares = 0., nonzeros = 0.;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    squares += results[i].squares;
    nonzeros += results[i].nonzeros;
  }
  write_sums(squares, nonzeros, total);
}

}  // namespace
