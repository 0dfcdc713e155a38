// Activation functions of the MLP, which also add the bias of the preceding projection.
#include "amax.cuh"
#include "column_sums.cuh"

enum Activation : int64_t { kGeluTanh = 0, kGelu = 1, kSquaredRelu = 2, kSwiGLU = 3 };

// A power of two and a reciprocal, each computed by one hardware instruction whose error is far
// below 16-bit rounding. Subnormal numbers count as zero.
__device__ __forceinline__ float fast_power_of_two(float x) {
#ifndef EMULATED
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
#else
  return exp2f(x);
#endif
}

__device__ __forceinline__ float fast_reciprocal(float x) {
#ifndef EMULATED
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
#else
  return 1.f / x;
#endif
}

constexpr float kLog2E = 1.44269504f;

// With EXACT, which is used for fp32, library functions compute the result.
template <bool EXACT>
__device__ __forceinline__ float sigmoid(float x) {
  return EXACT ? 1.f / (1.f + expf(-x)) : fast_reciprocal(1.f + fast_power_of_two(-kLog2E * x));
}

struct Normal {
  float below, density;  // the CDF, and the density times sqrt(2 pi)
};

// The fast version is Abramowitz and Stegun 7.1.26 (error 7.5e-8), which contains the density.
template <bool EXACT>
__device__ __forceinline__ Normal normal(float x) {
  if (EXACT) return {0.5f * erfcf(-x * 0.70710678f), expf(-0.5f * x * x)};
  const float density = fast_power_of_two(-0.5f * kLog2E * x * x);
  const float t = fast_reciprocal(1.f + 0.23164189f * fabsf(x));
  const float series =
      t * (0.127414796f +
           t * (-0.142248368f + t * (0.710706871f + t * (-0.726576014f + t * 0.530702715f))));
  const float tail = series * density;
  return {x < 0.f ? tail : 1.f - tail, density};
}

struct ValueAndSlope {
  float value, slope;
};

template <int KIND, bool EXACT>
__device__ __forceinline__ ValueAndSlope activation(float x) {
  if (KIND == kGeluTanh) {  // x / 2 (1 + tanh u) = x sigmoid(2 u)
    const float two_u = 1.5957691216f * x * (1.f + 0.044715f * x * x);
    const float s = sigmoid<EXACT>(two_u);
    return {x * s, s + x * s * (1.f - s) * 1.5957691216f * (1.f + 0.134145f * x * x)};
  }
  if (KIND == kGelu) {
    const Normal at = normal<EXACT>(x);
    return {x * at.below, at.below + x * 0.3989422804f * at.density};
  }
  const float positive = fmaxf(x, 0.f);
  return {positive * positive, 2.f * positive};
}

// The number of rows that a thread loads before it computes.
template <int KIND>
constexpr int rows_at_once = KIND == kSwiGLU ? 2 : 4;

// x [rows, columns (or 2 columns for SwiGLU: gate, then up)], bias like a row of x or null.
template <typename T, int KIND>
__global__ void __launch_bounds__(256)
    activation_forward_kernel(const T* __restrict__ x, const T* __restrict__ bias,
                              T* __restrict__ out, unsigned* __restrict__ amax, int64_t rows,
                              int columns) {
  constexpr int V = vector_size<T>, R = rows_at_once<KIND>;
  constexpr int P = KIND == kSwiGLU ? 2 : 1;
  constexpr bool kExact = sizeof(T) == 4;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  const bool inside = column < columns;
  if (!inside) rows = 0;  // has no work, but must reach the barriers
  const int64_t width = static_cast<int64_t>(columns) * P;
  Vector<T, V> b[P];
#pragma unroll
  for (int p = 0; p < P; p++) {
    if (bias && inside) b[p] = load<T, V>(bias + p * columns + column);
  }
  unsigned largest = 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * R;
  Vector<T, V> in[R][P];
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int p = 0; p < P; p++) {
      if (first + r < rows) in[r][p] = load<T, V>(x + (first + r) * width + p * columns + column);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (first + r >= rows) break;
    Vector<T, V> result;
#pragma unroll
    for (int i = 0; i < V; i++) {
      float value = to_float(in[r][0].at[i]);
      if (bias) value += to_float(b[0].at[i]);
      if (KIND == kSwiGLU) {
        float up = to_float(in[r][P - 1].at[i]);
        if (bias) up += to_float(b[P - 1].at[i]);
        result.at[i] = from_float<T>(value * sigmoid<kExact>(value) * up);
      } else {
        result.at[i] = from_float<T>(activation<KIND, kExact>(value).value);
      }
    }
    store(out + (first + r) * columns + column, result);
    if (amax) largest = max(largest, magnitude_of(result));
  }
  if (amax) raise_by_block(amax, largest);
}

// The number of blocks for which a multiprocessor has registers in the backward pass.
template <int KIND, bool SUM>
constexpr int residency = KIND == kSwiGLU && SUM ? 2 : 3;
constexpr int kRowsAtOnceBackward = 2;

// Computes the gradient of x and, into `partial` fp32 [gridDim.x, width] if given, its sums over
// this block's rows.
template <typename T, int KIND, bool SUM>
__global__ void __launch_bounds__(256, residency<KIND, SUM>)
    activation_backward_kernel(const T* __restrict__ x, const T* __restrict__ bias,
                               const T* __restrict__ grad, T* __restrict__ grad_x,
                               float* __restrict__ partial, unsigned* __restrict__ amax,
                               int64_t rows, int columns) {
  constexpr int V = vector_size<T>, R = kRowsAtOnceBackward;
  constexpr int P = KIND == kSwiGLU ? 2 : 1;
  constexpr bool kExact = sizeof(T) == 4;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  const bool inside = column < columns;
  if (!inside) rows = 0;  // has no work, but must reach the barriers
  const int64_t width = static_cast<int64_t>(columns) * P;
  Vector<T, V> b[P];
  float sums[P][V];
#pragma unroll
  for (int p = 0; p < P; p++) {
    if (bias && inside) b[p] = load<T, V>(bias + p * columns + column);
#pragma unroll
    for (int i = 0; i < V; i++) sums[p][i] = 0.f;
  }
  unsigned largest = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * R;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * R; first < rows; first += step) {
    Vector<T, V> in[R][P], incoming[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (first + r >= rows) break;
#pragma unroll
      for (int p = 0; p < P; p++) {
        in[r][p] = load<T, V>(x + (first + r) * width + p * columns + column);
      }
      incoming[r] = load<T, V>(grad + (first + r) * columns + column);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (first + r >= rows) break;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float g = to_float(incoming[r].at[i]);
        float value = to_float(in[r][0].at[i]);
        if (bias) value += to_float(b[0].at[i]);
        float down;
        if (KIND == kSwiGLU) {
          float up = to_float(in[r][P - 1].at[i]);
          if (bias) up += to_float(b[P - 1].at[i]);
          const float s = sigmoid<kExact>(value);
          down = g * up * s * (1.f + value * (1.f - s));
          const float down_up = g * value * s;
          if (SUM) sums[P - 1][i] += down_up;
          in[r][P - 1].at[i] = from_float<T>(down_up);
        } else {
          down = g * activation<KIND, kExact>(value).slope;
        }
        if (SUM) sums[0][i] += down;
        in[r][0].at[i] = from_float<T>(down);
      }
#pragma unroll
      for (int p = 0; p < P; p++) {
        store(grad_x + (first + r) * width + p * columns + column, in[r][p]);
        if (amax) largest = max(largest, magnitude_of(in[r][p]));
      }
    }
  }
  allow_next();
  if (SUM && inside) {
#pragma unroll
    for (int p = 0; p < P; p++) {
      store_sums(partial + blockIdx.x * width + p * columns + column, sums[p]);
    }
  }
  if (amax) raise_by_block(amax, largest);
}

