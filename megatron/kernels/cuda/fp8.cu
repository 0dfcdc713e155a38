// Largest magnitudes of 16-bit or fp32 tensors, and casts to fp8.
#include "fp8.cuh"

namespace {

constexpr int kInFlight = 4;     // 16-byte loads per thread
constexpr int kCastInFlight = 2;  // loads per thread, 8 elements each

// Sets amax (bits, initially zero) to the largest magnitude.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* __restrict__ x, int64_t size, unsigned* __restrict__ amax) {
  constexpr int N = vector_size<T>;
  const int64_t vectors = size / N;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kInFlight * kThreads) + threadIdx.x;
  Vector<T, N> loaded[kInFlight] = {};
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t i = first + k * kThreads;
    if (i < vectors) loaded[k] = load<T, N>(x + i * N);
  }
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) largest = max(largest, magnitude_of(loaded[k]));
  if (first < size % N) largest = max(largest, magnitude(to_float(x[vectors * N + first])));
  allow_next();
  raise_by_block(amax, largest);
}

// A cast with one scale; size is a multiple of 8. Blocks go from the end of x to its beginning,
// because the end was written or read last and is still in the cache. If `measures` is set, *found
// (bits) is raised to the largest magnitude.
template <typename T, int64_t fp8, bool measures>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const T* __restrict__ x, unsigned char* __restrict__ y, int64_t size,
                const float* __restrict__ amax, float* __restrict__ inverse,
                unsigned* __restrict__ found) {
  wait_for_previous();
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  const int64_t first = (block * kCastInFlight * kThreads + threadIdx.x) * 8;
  Vector<T, 8> held[kCastInFlight];
#pragma unroll
  for (int k = 0; k < kCastInFlight; ++k) {
    const int64_t i = first + k * kThreads * 8;
    if (i < size) held[k] = load<T, 8>(x + i);
  }
  const Scale scale = scale_of(*amax, fp8);
  if (first == 0) *inverse = scale.inverse;
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < kCastInFlight; ++k) {
    const int64_t i = first + k * kThreads * 8;
    if (i < size) store(y + i, cast_8<measures>(held[k], scale.forward, fp8, largest));
  }
  if constexpr (measures) raise_by_block(found, largest);
}

template <typename T>
constexpr int kRowVectors = sizeof(T) == 2 ? 8 : 3;  // vectors of 8 elements per thread
constexpr int kMostRowThreads = 1024;

// A cast with a scale for each row. A row is divided among the threads along x. Blocks have several
// rows if a single warp handles a row. If a row is very long, the elements that do not fit into
// registers are read again from the cache.
template <typename T, int64_t fp8>
__global__ void __launch_bounds__(kMostRowThreads)
    cast_rows_kernel(const T* __restrict__ x, unsigned char* __restrict__ y, int64_t rows,
                     int64_t columns, float* __restrict__ inverse) {
  constexpr int K = kRowVectors<T>;
  __shared__ unsigned of_warps[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // whole warps, and only in blocks without barriers
  const int64_t step = blockDim.x * 8, start = row * columns;
  int64_t column = threadIdx.x * 8;
  Vector<T, 8> held[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (column + k * step < columns) held[k] = load<T, 8>(x + start + column + k * step);
  }
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (column + k * step < columns) largest = max(largest, magnitude_of(held[k]));
  }
  for (int64_t i = column + K * step; i < columns; i += step) {
    largest = max(largest, magnitude_of(load<T, 8>(x + start + i)));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps > 1) {
    if (lane == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = __reduce_max_sync(0xffffffffu, lane < warps ? of_warps[lane] : 0);
  }
  const Scale scale = scale_of(__uint_as_float(largest), fp8);
  if (threadIdx.x == 0) inverse[row] = scale.inverse;
  const auto put = [&](int64_t at, const Vector<T, 8>& values) {
    store(y + start + at, cast_8<false>(values, scale.forward, fp8, largest));
  };
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (column + k * step < columns) put(column + k * step, held[k]);
  }
  for (int64_t i = column + K * step; i < columns; i += step) put(i, load<T, 8>(x + start + i));
}

}  // namespace
