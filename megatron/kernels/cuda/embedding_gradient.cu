// Gradient of an embedding table, added into its fp32 gradient: rows of one entry lie together
// after a stable sort, and are added up in that order, whoever runs first.
#include "common.cuh"

namespace {

constexpr int kThreads = 128;

// Sorted place blockIdx.x: if a run of equal entries begins there, this block adds it up, for the
// columns of blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const int64_t* __restrict__ entries, const int64_t* __restrict__ order,
                const T* __restrict__ gradient, float* __restrict__ into, int64_t count,
                int64_t hidden, int64_t table_rows) {
  constexpr int N = vector_size<T>, kInFlight = 4;
  const int64_t entry = entries[blockIdx.x];
  if (entry < 0 || entry >= table_rows) return;
  if (blockIdx.x > 0 && entries[blockIdx.x - 1] == entry) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (column >= hidden) return;
  int64_t end = blockIdx.x + 1;
  while (end < count && entries[end] == entry) ++end;
  float sums[N] = {};
  for (int64_t i = blockIdx.x; i < end; i += kInFlight) {
    Vector<T, N> rows[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k < end) rows[k] = load<T, N>(gradient + order[i + k] * hidden + column);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) sums[j] += to_float(rows[k].at[j]);
  }
  float* target = into + entry * hidden + column;
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    Vector<float, 4> old = load<float, 4>(target + j);
#pragma unroll
    for (int k = 0; k < 4; ++k) old.at[k] += sums[j + k];
    store(target + j, old);
  }
}

}  // namespace

// into [table_rows, hidden] += the rows of gradient [count, hidden] by entry. entries: sorted;
// those outside of the table are left out. order: which row of the gradient each of them is.
// hidden is a multiple of 8.
extern "C" int embedding_gradient(const int64_t* entries, const int64_t* order,
                                  const void* gradient, float* into, int64_t count, int64_t hidden,
                                  int64_t table_rows, int64_t dtype, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const dim3 grid(count, divide_up(hidden, kThreads * vector_size<T>));
    return launch(rows_kernel<T>, grid, kThreads, 0, stream, entries, order,
                  static_cast<const T*>(gradient), into, count, hidden, table_rows);
  });
}
