// Sums and gradients of the rows to which tokens are copied for experts (grouped.py). A token has
// `chosen` rows. `place` contains the indices of these rows, or -1 for no row.
#include "common.cuh"

namespace {

constexpr int kMostThreads = 256;
constexpr int kRowsInFlight = 4;

// out[t] = sum over j of weights[t, j] (or 1) x rows[place[t, j]], added in order of j in fp32.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    combine_rows_kernel(const T* __restrict__ rows, const int64_t* __restrict__ place,
                        const float* __restrict__ weights, T* __restrict__ out, int chosen,
                        int64_t columns) {
  constexpr int V = vector_size<T>;
  const int64_t token = blockIdx.x;
  const int64_t* places = place + token * chosen;
  const float* factors = weights ? weights + token * chosen : nullptr;
  for (int64_t column = threadIdx.x * V; column < columns;
       column += static_cast<int64_t>(blockDim.x) * V) {
    float sums[V] = {};
    for (int first = 0; first < chosen; first += kRowsInFlight) {
      Vector<T, V> read[kRowsInFlight] = {};
      float factor[kRowsInFlight] = {};
#pragma unroll
      for (int j = 0; j < kRowsInFlight; j++) {
        if (first + j >= chosen || places[first + j] < 0) continue;
        read[j] = load<T, V>(rows + places[first + j] * columns + column);
        factor[j] = factors ? factors[first + j] : 1.f;
      }
#pragma unroll
      for (int j = 0; j < kRowsInFlight; j++) {
        const auto values = to_floats(read[j]);
#pragma unroll
        for (int i = 0; i < V; i++) sums[i] += factor[j] * values.at[i];
      }
    }
    Vector<T, V> result;
#pragma unroll
    for (int i = 0; i < V; i++) result.at[i] = from_float<T>(sums[i]);
    store(out + token * columns + column, result);
  }
}

// The gradients of combine_rows: for the row of choice c, rows_grad = weights[c] x grad[c / chosen]
// and weights_grad[c] = the inner product of the row and grad[c / chosen].
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    combine_rows_backward_kernel(const T* __restrict__ grad, const T* __restrict__ rows,
                                 const int64_t* __restrict__ order,
                                 const int64_t* __restrict__ place,
                                 const float* __restrict__ weights, T* __restrict__ rows_grad,
                                 float* __restrict__ weights_grad, int chosen, int64_t columns) {
  constexpr int V = vector_size<T>;
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x, choice = order[row];
  const bool exists = place[choice] == row;  // otherwise the row has no expert
  const float weight = exists ? weights[choice] : 0.f;
  const T* from = grad + choice / chosen * columns;
  float product = 0.f;
  for (int64_t column = threadIdx.x * V; column < columns;
       column += static_cast<int64_t>(blockDim.x) * V) {
    const auto incoming = to_floats(load<T, V>(from + column));
    const auto values = to_floats(load<T, V>(rows + row * columns + column));
    Vector<T, V> result;
#pragma unroll
    for (int i = 0; i < V; i++) {
      product += incoming.at[i] * values.at[i];
      result.at[i] = from_float<T>(weight * incoming.at[i]);
    }
    store(rows_grad + row * columns + column, result);
  }
  product = row_reduce<Sum>(product, scratch);
  if (exists && threadIdx.x == 0) weights_grad[choice] = product;
}

// into = value, or with ADD into += value.
template <typename T, bool ADD>
__global__ void __launch_bounds__(kMostThreads)
    take_gradient_kernel(const T* __restrict__ value, float* __restrict__ into, int64_t count) {
  constexpr int V = vector_size<T>;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
  if (at >= count) return;
  auto sum = to_floats(load<T, V>(value + at));
  if (ADD) {
    const auto before = load<float, V>(into + at);
#pragma unroll
    for (int i = 0; i < V; i++) sum.at[i] += before.at[i];
  }
  store(into + at, sum);
}


}  // namespace
