// The product of a few rows with a matrix: as fast as the matrix can be read.
#include "common.cuh"

constexpr int kWarps = 8;
constexpr int kOutputs = 2;  // of a warp
constexpr int kUnroll = 4;   // vectors of each of its matrix rows that are under way

// A warp has kOutputs rows of the matrix; its lanes go through them by vectors. Sums are fp32, in an
// order that depends on `in` alone: a row of x gives the same bits whatever rows come with it.
template <typename T, int M>
__global__ void __launch_bounds__(32 * kWarps)
    few_rows_kernel(const T* __restrict__ x, const T* __restrict__ weight,
                    const T* __restrict__ bias, T* __restrict__ out, int outputs, int in) {
  constexpr int V = vector_size<T>, R = kOutputs, U = kUnroll;
  const int lane = threadIdx.x % 32;
  const int first = (blockIdx.x * kWarps + threadIdx.x / 32) * R;
  if (first >= outputs) return;  // whole warps
  float sum[R][M];
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int m = 0; m < M; m++) sum[r][m] = 0.f;
  }
  for (int begin = lane * V; begin < in; begin += 32 * V * U) {
    Vector<T, V> w[R][U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int at = begin + u * 32 * V;
#pragma unroll
      for (int r = 0; r < R; r++) {
        if (at < in && first + r < outputs) {
          w[r][u] = load<T, V>(weight + static_cast<int64_t>(first + r) * in + at);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int at = begin + u * 32 * V;
      if (at >= in) break;
#pragma unroll
      for (int m = 0; m < M; m++) {
        const auto mine = load<T, V>(x + static_cast<int64_t>(m) * in + at);
#pragma unroll
        for (int i = 0; i < V; i++) {
          const float value = to_float(mine.at[i]);
#pragma unroll
          for (int r = 0; r < R; r++) {
            if (first + r < outputs) sum[r][m] += value * to_float(w[r][u].at[i]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (first + r >= outputs) break;
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float total = warp_reduce<Sum>(sum[r][m]);
      if (lane == 0) {
        const float shift = bias ? to_float(bias[first + r]) : 0.f;
        out[static_cast<int64_t>(m) * outputs + first + r] = from_float<T>(total + shift);
      }
    }
  }
}

// x [rows, in], weight [outputs, in], bias [outputs] or null -> out [rows, outputs], for 1 to 4 rows;
// `in` is a multiple of 16 bytes.
extern "C" int few_rows(const void* x, const void* weight, const void* bias, void* out, int64_t rows,
                        int64_t outputs, int64_t in, int64_t dtype, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) {
    using T = decltype(t);
    if (in % vector_size<T>) return cudaErrorInvalidValue;
    const auto run = [&](auto kernel) {
      const dim3 grid(divide_up(outputs, kWarps * kOutputs));
      return launch(kernel, grid, dim3(32 * kWarps), 0, stream, static_cast<const T*>(x),
                    static_cast<const T*>(weight), static_cast<const T*>(bias),
                    static_cast<T*>(out), outputs, in);
    };
    switch (rows) {
      case 1: return run(few_rows_kernel<T, 1>);
      case 2: return run(few_rows_kernel<T, 2>);
      case 3: return run(few_rows_kernel<T, 3>);
      case 4: return run(few_rows_kernel<T, 4>);
    }
    return cudaErrorInvalidValue;
  });
}
