// softmax of factor * scores, masked or causal, each row read once and kept in registers.
#include "rows.cuh"

constexpr float kMasked = -10000.f;  // score of a pair that may not attend, as in Megatron

// What of a row of scores counts.
struct Row {
  int visible;          // columns before this one may attend (causal), or all
  const uint8_t* mask;  // 1 where a column may attend, or null
};

__device__ __forceinline__ Row row_of(int64_t row, const uint8_t* mask, int64_t rows_a_mask,
                                      int64_t masks, int queries, int keys, bool causal) {
  const int query = static_cast<int>(row % queries);
  const int visible = causal ? query + 1 + keys - queries : keys;
  if (mask) mask += ((row / rows_a_mask) % masks * queries + query) * keys;
  return {visible, mask};
}

template <typename X, typename W, int E>
__global__ void __launch_bounds__(row_threads<E, W>)
    masked_softmax_forward_kernel(const X* __restrict__ scores, const uint8_t* __restrict__ mask,
                                  W* __restrict__ weights, int64_t rows, int64_t rows_a_mask,
                                  int64_t masks, int queries, int keys, bool causal, float factor) {
  constexpr int V = vector_size<W>, K = E / V;
  __shared__ float scratch[2][32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // whole warps, and only where blocks have no barrier
  const Row r = row_of(row, mask, rows_a_mask, masks, queries, keys, causal);
  scores += row * keys;
  weights += row * keys;
  Vector<X, V> x[K];
  Vector<uint8_t, V> allowed[K];
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= keys || column >= r.visible) continue;
    x[k] = load<X, V>(scores + column);
    if (mask) allowed[k] = load<uint8_t, V>(r.mask + column);
  }
  float value[K][V];
  float largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    const bool any = column < keys && column < r.visible;
#pragma unroll
    for (int i = 0; i < V; i++) {
      value[k][i] = -INFINITY;
      if (any && column + i < r.visible) {
        value[k][i] = mask && !allowed[k].at[i] ? kMasked : to_float(x[k].at[i]) * factor;
      }
      largest = fmaxf(largest, value[k][i]);
    }
  }
  largest = row_reduce<Max>(largest, scratch[0]);
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < K; k++) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      value[k][i] = sizeof(W) == 4 ? expf(value[k][i] - largest) : __expf(value[k][i] - largest);
      total += value[k][i];
    }
  }
  const float scale = 1.f / row_reduce<Sum>(total, scratch[1]);
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= keys) continue;
    Vector<W, V> out;
#pragma unroll
    for (int i = 0; i < V; i++) out.at[i] = from_float<W>(value[k][i] * scale);
    store(weights + column, out);
  }
}

template <typename X, typename W, int E>
__global__ void __launch_bounds__(row_threads<E, W>)
    masked_softmax_backward_kernel(const W* __restrict__ weights, const W* __restrict__ grad,
                                   const uint8_t* __restrict__ mask, X* __restrict__ grad_scores,
                                   int64_t rows, int64_t rows_a_mask, int64_t masks, int queries,
                                   int keys, bool causal, float factor) {
  constexpr int V = vector_size<W>, K = E / V;
  __shared__ float scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const Row r = row_of(row, mask, rows_a_mask, masks, queries, keys, causal);
  weights += row * keys;
  grad += row * keys;
  grad_scores += row * keys;
  Vector<W, V> y[K], g[K];
  Vector<uint8_t, V> allowed[K];
  float along = 0.f;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= keys || column >= r.visible) continue;
    y[k] = load<W, V>(weights + column);
    g[k] = load<W, V>(grad + column);
    if (mask) allowed[k] = load<uint8_t, V>(r.mask + column);
  }
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= keys || column >= r.visible) continue;
#pragma unroll
    for (int i = 0; i < V; i++) {
      // Weights after the last visible column are zeros, their gradients may be anything.
      if (column + i < r.visible) along += to_float(y[k].at[i]) * to_float(g[k].at[i]);
    }
  }
  along = row_reduce<Sum>(along, scratch);
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= keys) continue;
    Vector<X, V> out;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const bool counts = column + i < r.visible && !(mask && !allowed[k].at[i]);
      out.at[i] = from_float<X>(
          counts ? factor * to_float(y[k].at[i]) * (to_float(g[k].at[i]) - along) : 0.f);
    }
    store(grad_scores + column, out);
  }
}

// scores [rows = b n queries, keys] of x_dtype, mask bool [masks = b or 1, queries, keys] or null ->
// weights of w_dtype. A mask serves rows_a_mask = n queries rows. causal: query i sees keys up to
// i + keys - queries.
extern "C" int masked_softmax_forward(const void* scores, const void* mask, void* weights,
                                      int64_t rows, int64_t rows_a_mask, int64_t masks,
                                      int64_t queries, int64_t keys, int64_t causal,
                                      int64_t x_dtype, int64_t w_dtype, double factor,
                                      cudaStream_t stream) {
  const RowShape shape = row_shape(keys);
  return with_residual_type(x_dtype, w_dtype, [&](auto x, auto w) {
    using X = decltype(x);
    using W = decltype(w);
    return with_elements<W>(shape, [&](auto elements) {
      return launch(masked_softmax_forward_kernel<X, W, decltype(elements)::value>,
                    dim3(divide_up(rows, shape.rows)), shape.block(), 0, stream,
                    static_cast<const X*>(scores), static_cast<const uint8_t*>(mask),
                    static_cast<W*>(weights), rows, rows_a_mask, masks, queries, keys, causal != 0,
                    factor);
    });
  });
}

// weights and their gradient, of w_dtype -> grad_scores of x_dtype.
extern "C" int masked_softmax_backward(const void* weights, const void* grad, const void* mask,
                                       void* grad_scores, int64_t rows, int64_t rows_a_mask,
                                       int64_t masks, int64_t queries, int64_t keys,
                                       int64_t causal, int64_t x_dtype, int64_t w_dtype,
                                       double factor, cudaStream_t stream) {
  const RowShape shape = row_shape(keys);
  return with_residual_type(x_dtype, w_dtype, [&](auto x, auto w) {
    using X = decltype(x);
    using W = decltype(w);
    return with_elements<W>(shape, [&](auto elements) {
      return launch(masked_softmax_backward_kernel<X, W, decltype(elements)::value>,
                    dim3(divide_up(rows, shape.rows)), shape.block(), 0, stream,
                    static_cast<const W*>(weights), static_cast<const W*>(grad),
                    static_cast<const uint8_t*>(mask), static_cast<X*>(grad_scores), rows,
                    rows_a_mask, masks, queries, keys, causal != 0, factor);
    });
  });
}
