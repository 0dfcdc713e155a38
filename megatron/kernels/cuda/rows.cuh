// For kernels that keep a row in the registers of the threads that share it.
#pragma once

#include "common.cuh"

// How a row is shared: `elements` a thread, `threads` a row (x), `rows` a block (y, more than one
// only where a single warp has the row).
struct RowShape {
  int elements, threads, rows;
  dim3 block() const { return dim3(threads, rows); }
};

// The most threads of a block that share a row. Rows have at most 16384 elements where weights have 16
// bits, or 8192 of 32.
template <int E>
constexpr int row_threads = E == 8 ? 256 : 512;

// FEWEST: elements a thread, 8 or 16, while the threads suffice.
template <int FEWEST>
RowShape row_shape(int64_t columns) {
  int elements = FEWEST;
  if (elements == 8 && divide_up(columns, 8) > row_threads<8>) elements = 16;
  if (elements == 16 && divide_up(columns, 16) > row_threads<16>) elements = 32;
  const int threads = static_cast<int>(divide_up(divide_up(columns, elements), 32) * 32);
  return {elements, threads, threads == 32 ? 4 : 1};
}

// Calls f(shape, integral_constant<int, E>) for the number of elements a thread; W is the weights'
// type.
template <typename W, int FEWEST, typename F>
cudaError_t with_row_shape(int64_t columns, F f) {
  const RowShape shape = row_shape<FEWEST>(columns);
  if (shape.threads < 32 || shape.threads > row_threads<32>) return cudaErrorInvalidValue;
  if constexpr (FEWEST == 8) {
    if (shape.elements == 8) return f(shape, std::integral_constant<int, 8>{});
  }
  if (shape.elements == 16) return f(shape, std::integral_constant<int, 16>{});
  if constexpr (sizeof(W) == 2) return f(shape, std::integral_constant<int, 32>{});
  return cudaErrorInvalidValue;
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
