// residual + delta, and its LayerNorm or RMSNorm, in one pass.
#include "amax.cuh"
#include "rows.cuh"

// A row stays in registers, so each input is read once. `mean` is null for RMSNorm.
template <typename X, typename W, int E, bool LAYER>
__global__ void __launch_bounds__(row_threads<E, W>)
    add_norm_forward_kernel(const X* __restrict__ residual, const W* __restrict__ delta,
                            const W* __restrict__ weight, const W* __restrict__ bias,
                            X* __restrict__ sum, W* __restrict__ normal, float* __restrict__ mean,
                            float* __restrict__ rstd, unsigned* __restrict__ amax, int64_t rows,
                            int hidden, float epsilon) {
  constexpr int V = vector_size<W>;
  constexpr int K = E / V;
  __shared__ float scratch[2][32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // whole warps, and only where blocks have no barrier
  const int64_t start = row * hidden;

  // Weights are asked for before the sums, as far as registers allow.
  constexpr bool kEarly = E < 32 && !(LAYER && sizeof(W) == 4);
  Vector<X, V> x[K];
  Vector<W, V> d[K], w[K], b[K];
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column < hidden) {
      x[k] = load<X, V>(residual + start + column);
      if (delta) d[k] = load<W, V>(delta + start + column);
    }
  }
#pragma unroll
  for (int k = 0; kEarly && k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column < hidden) {
      w[k] = load<W, V>(weight + column);
      if (LAYER) b[k] = load<W, V>(bias + column);
    }
  }
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= hidden) continue;
    if (delta) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        x[k].at[i] = from_float<X>(to_float(x[k].at[i]) + to_float(d[k].at[i]));
      }
      store(sum + start + column, x[k]);
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float value = to_float(x[k].at[i]);
      total += LAYER ? value : value * value;
    }
  }
  float centre = 0.f;
  total = row_reduce<Sum>(total, scratch[0]);
  if (LAYER) {
    centre = total / hidden;
    total = 0.f;
#pragma unroll
    for (int k = 0; k < K; k++) {
      if ((k * blockDim.x + threadIdx.x) * V >= hidden) continue;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float distance = to_float(x[k].at[i]) - centre;
        total += distance * distance;
      }
    }
    total = row_reduce<Sum>(total, scratch[1]);
  }
  const float scale = rsqrtf(total / hidden + epsilon);
  if (threadIdx.x == 0) {
    if (LAYER) mean[row] = centre;
    rstd[row] = scale;
  }
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= hidden) continue;
    if (!kEarly) {
      w[k] = load<W, V>(weight + column);
      if (LAYER) b[k] = load<W, V>(bias + column);
    }
    Vector<W, V> out;
#pragma unroll
    for (int i = 0; i < V; i++) {
      float value = (to_float(x[k].at[i]) - centre) * scale * to_float(w[k].at[i]);
      if (LAYER) value += to_float(b[k].at[i]);
      out.at[i] = from_float<W>(value);
    }
    store(normal + start + column, out);
    if (amax) largest = max(largest, magnitude_of(out));
  }
  if (!amax) return;
  if (blockDim.y > 1) {  // rows of one warp, some of which may have left
    raise_by_warp(amax, largest);
  } else {
    raise_by_block(amax, largest);
  }
}

// residual [rows, hidden] of x_dtype, delta [rows, hidden] of w_dtype or null, weight and bias
// [hidden] (bias null: RMSNorm) -> sum like residual (unused without delta), normal [rows, hidden]
// of w_dtype, mean (LayerNorm only) and rstd fp32 [rows]; the largest magnitude of normal in amax
// (zero before) unless null.
extern "C" int add_norm_forward(const void* residual, const void* delta, const void* weight,
                                const void* bias, void* sum, void* normal, float* mean,
                                float* rstd, unsigned* amax, int64_t rows, int64_t hidden,
                                int64_t x_dtype, int64_t w_dtype, double epsilon,
                                cudaStream_t stream) {
  const RowShape shape = row_shape(hidden);
  return with_residual_type(x_dtype, w_dtype, [&](auto x, auto w) {
    using X = decltype(x);
    using W = decltype(w);
    return with_elements<W>(shape, [&](auto elements) {
      constexpr int E = decltype(elements)::value;
      const auto kernel = bias ? add_norm_forward_kernel<X, W, E, true>
                               : add_norm_forward_kernel<X, W, E, false>;
      return launch(kernel, dim3(divide_up(rows, shape.rows)), shape.block(), 0, stream,
                    static_cast<const X*>(residual), static_cast<const W*>(delta),
                    static_cast<const W*>(weight), static_cast<const W*>(bias),
                    static_cast<X*>(sum), static_cast<W*>(normal), mean, rstd, amax, rows,
                    hidden, epsilon);
    });
  });
}
