// For kernels that keep a row in the registers of the threads that share it.
#pragma once

#include "common.cuh"

// How a row is shared: `elements` a thread, `threads` a row (x), `rows` a block (y, more than one
// only where a single warp has the row).
struct RowShape {
  int elements, threads, rows;
  dim3 block() const { return dim3(threads, rows); }
};

inline RowShape row_shape(int64_t columns) {
  int elements = 8;
  while (elements < 32 && divide_up(columns, elements) > 256) elements *= 2;
  const int threads = static_cast<int>(divide_up(divide_up(columns, elements), 32) * 32);
  return {elements, threads, threads == 32 ? 4 : 1};
}

// The most threads of a block: the longest row has 16384 elements of 16 bits, 8192 of 32.
template <int E, typename W>
constexpr int row_threads = E == 32 && sizeof(W) == 2 ? 512 : 256;

// Calls f(integral_constant<int, E>) for the number of elements a thread.
template <typename W, typename F>
cudaError_t with_elements(const RowShape& shape, F f) {
  if (shape.threads < 32 || shape.threads > row_threads<32, W>) return cudaErrorInvalidValue;
  switch (shape.elements) {
    case 8: return f(std::integral_constant<int, 8>{});
    case 16: return f(std::integral_constant<int, 16>{});
    default: return f(std::integral_constant<int, 32>{});
  }
}

// Calls f(X{}, W{}): a residual stream X of the weights' type W, or of fp32.
template <typename F>
cudaError_t with_residual_type(int64_t x_dtype, int64_t w_dtype, F f) {
  return with_type(w_dtype, [&](auto w) {
    if (x_dtype == w_dtype) return f(w, w);
    if (x_dtype == kFloat32) return f(float{}, w);
    return cudaErrorInvalidValue;
  });
}
