// Gradients of add_norm. Blocks stay, and take every so many-th row; the next row comes into shared
// memory by asynchronous copies while this one is worked on. Gradients of weight and bias are summed
// in registers over a block's rows, then over blocks in a fixed order: no atomics, the same bits
// every time.
#include "amax.cuh"
#include "column_sums.cuh"
#include "rows.cuh"

constexpr int kSharedLimit = 200 * 1024;    // bytes a block may take
constexpr int kBytesInFlight = 64 * 1024;  // a multiprocessor wants on their way

// Sums two values over the threads of a row with one barrier; see row_reduce.
__device__ __forceinline__ float2 row_sum_2(float2 value, float2* scratch) {
  value.x = warp_reduce<Sum>(value.x);
  value.y = warp_reduce<Sum>(value.y);
  const int warps = blockDim.x >> 5;
  if (warps == 1) return value;
  const int lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  value = lane < warps ? scratch[lane] : make_float2(0.f, 0.f);
  return make_float2(warp_reduce<Sum>(value.x), warp_reduce<Sum>(value.y));
}

// Where one thread's pieces of a row wait in shared memory. A thread reads only what it copied
// itself, so that no barrier is needed.
template <typename X, typename W, int E>
struct Stage {
  X* x;
  X* grad_sum;
  W* grad;

  __device__ static int bytes(int threads) {
    return threads * E * static_cast<int>(2 * sizeof(X) + sizeof(W));
  }
  __device__ explicit Stage(unsigned char* memory) {
    const int row = blockDim.x * E;
    x = reinterpret_cast<X*>(memory);
    grad_sum = x + row;
    grad = reinterpret_cast<W*>(grad_sum + row);
  }
  template <typename T>
  __device__ static void fetch(T* to, const T* from, int hidden) {
    constexpr int V = vector_size<W>;
    constexpr int kAtOnce = vector_size<T>;
#pragma unroll
    for (int k = 0; k < E / V; k++) {
      const int column = (k * blockDim.x + threadIdx.x) * V;
      if (column >= hidden) continue;
#pragma unroll
      for (int i = 0; i < V; i += kAtOnce) copy_async_16(to + column + i, from + column + i);
    }
  }
};

template <typename X, typename W, int E, bool LAYER>
__global__ void __launch_bounds__(row_threads<E>)
    add_norm_backward_kernel(const X* __restrict__ sum, const W* __restrict__ grad_normal,
                             const X* __restrict__ grad_sum, const W* __restrict__ weight,
                             const float* __restrict__ mean, const float* __restrict__ rstd,
                             X* __restrict__ grad, W* __restrict__ grad_delta,
                             float* __restrict__ partial_weight, float* __restrict__ partial_bias,
                             unsigned* __restrict__ amax, int64_t rows, int hidden, int stages) {
  constexpr int V = vector_size<W>;
  constexpr int K = E / V;
  __shared__ float2 scratch[2][32];
  const int stage_bytes = Stage<X, W, E>::bytes(blockDim.x);
  unsigned char* memory = dynamic_shared<unsigned char>() + threadIdx.y * stages * stage_bytes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;

  const auto fetch = [&](int64_t row, int place) {
    const Stage<X, W, E> stage(memory + place * stage_bytes);
    stage.fetch(stage.x, sum + row * hidden, hidden);
    stage.fetch(stage.grad, grad_normal + row * hidden, hidden);
    if (grad_sum) stage.fetch(stage.grad_sum, grad_sum + row * hidden, hidden);
  };

  constexpr bool kKeep = E < 32;  // the weights in registers; else they come from the cache
  Vector<W, V> w[K];
  float weight_sum[K][V], bias_sum[K][V];
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (kKeep && column < hidden) w[k] = load<W, V>(weight + column);
#pragma unroll
    for (int i = 0; i < V; i++) weight_sum[k][i] = bias_sum[k][i] = 0.f;
  }

  float scale = 0.f, centre = 0.f;
  if (first < rows) {
    fetch(first, 0);
    scale = rstd[first];
    if (LAYER) centre = mean[first];
  }
  copy_async_commit();
  int turn = 0;
  unsigned largest = 0;
  for (int64_t row = first; row < rows; row += step, turn ^= 1) {
    const int place = stages == 2 ? turn : 0;
    const int64_t next = row + step;
    float next_scale = 0.f, next_centre = 0.f;
    if (next < rows) {
      next_scale = rstd[next];
      if (LAYER) next_centre = mean[next];
    }
    if (stages == 2) {
      if (next < rows) fetch(next, place ^ 1);
      copy_async_commit();
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    const Stage<X, W, E> stage(memory + place * stage_bytes);

    float2 total = make_float2(0.f, 0.f);  // of weight * grad * normal, and of weight * grad
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int column = (k * blockDim.x + threadIdx.x) * V;
      if (column >= hidden) continue;
      const auto x = load<X, V>(stage.x + column);
      const auto g = load<W, V>(stage.grad + column);
      if (!kKeep) w[k] = load<W, V>(weight + column);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float normal = (to_float(x.at[i]) - centre) * scale;
        const float weighted = to_float(g.at[i]) * to_float(w[k].at[i]);
        total.x += weighted * normal;
        if (LAYER) total.y += weighted;
      }
    }
    if (LAYER) {
      total = row_sum_2(total, scratch[turn]);
    } else {
      total.x = row_reduce<Sum>(total.x, reinterpret_cast<float*>(scratch[turn]));
    }
    const float along = total.x / hidden, common = total.y / hidden;
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int column = (k * blockDim.x + threadIdx.x) * V;
      if (column >= hidden) continue;
      const auto x = load<X, V>(stage.x + column);
      const auto g = load<W, V>(stage.grad + column);
      if (!kKeep) w[k] = load<W, V>(weight + column);
      Vector<X, V> out;
      if (grad_sum) out = load<X, V>(stage.grad_sum + column);
      Vector<W, V> out_delta;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float normal = (to_float(x.at[i]) - centre) * scale;
        const float incoming = to_float(g.at[i]);
        weight_sum[k][i] += incoming * normal;
        if (LAYER) bias_sum[k][i] += incoming;
        float value = (incoming * to_float(w[k].at[i]) - common - normal * along) * scale;
        if (grad_sum) value += to_float(out.at[i]);
        out.at[i] = from_float<X>(value);
        out_delta.at[i] = from_float<W>(value);
      }
      store(grad + row * hidden + column, out);
      if (grad_delta) store(grad_delta + row * hidden + column, out_delta);
      if (amax) largest = max(largest, magnitude_of(out_delta));
    }
    if (stages == 1) {
      if (next < rows) fetch(next, 0);
      copy_async_commit();
    }
    scale = next_scale;
    centre = next_centre;
  }
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= hidden) continue;
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const int64_t at = first * hidden + column + i;
      store(partial_weight + at, *reinterpret_cast<Vector<float, 4>*>(&weight_sum[k][i]));
      if (LAYER) store(partial_bias + at, *reinterpret_cast<Vector<float, 4>*>(&bias_sum[k][i]));
    }
  }
  allow_next();
  if (amax) raise_by_block(amax, largest);
}

// Inputs as add_norm_forward's; gradients grad_normal of w_dtype, grad_sum of x_dtype or null ->
// grad [rows, hidden] of x_dtype, the same in grad_delta of w_dtype (or null), grad_weight and
// grad_bias [hidden] of w_dtype. partial: fp32 [2, capacity, hidden] to work in (LayerNorm; [1, ...]
// otherwise); the largest magnitude of grad in w_dtype in amax (zero before) unless null;
// `multiprocessors` of this GPU.
extern "C" int add_norm_backward(const void* sum, const void* grad_normal, const void* grad_sum,
                                 const void* weight, const float* mean, const float* rstd,
                                 void* grad, void* grad_delta, void* grad_weight, void* grad_bias,
                                 float* partial, unsigned* amax, int64_t capacity,
                                 int64_t multiprocessors, int64_t rows, int64_t hidden,
                                 int64_t x_dtype, int64_t w_dtype, cudaStream_t stream) {
  return with_residual_type(x_dtype, w_dtype, [&](auto x, auto w) {
    using X = decltype(x);
    using W = decltype(w);
    return with_row_shape<W, 16>(hidden, [&](const RowShape& shape, auto elements) {
      constexpr int E = decltype(elements)::value;
      const int64_t bytes = shape.rows * shape.threads * E * (2 * sizeof(X) + sizeof(W));
      const int stages = 2 * bytes <= kSharedLimit ? 2 : 1;
      const int64_t resident = row_threads<E> / (shape.threads * shape.rows);
      const int64_t wanted = max(int64_t{1}, min(resident, kBytesInFlight / bytes));
      const int64_t blocks = min(min(capacity / shape.rows, multiprocessors * wanted),
                                 divide_up(rows, shape.rows));
      if (blocks < 1) return cudaErrorInvalidValue;
      const int64_t partials = blocks * shape.rows;
      float* partial_bias = grad_bias ? partial + partials * hidden : nullptr;
      const auto kernel = grad_bias ? add_norm_backward_kernel<X, W, E, true>
                                    : add_norm_backward_kernel<X, W, E, false>;
      const cudaError_t error = launch(
          kernel, dim3(blocks), shape.block(), stages * bytes, stream, static_cast<const X*>(sum),
          static_cast<const W*>(grad_normal), static_cast<const X*>(grad_sum),
          static_cast<const W*>(weight), mean, rstd, static_cast<X*>(grad),
          static_cast<W*>(grad_delta), partial, partial_bias, amax, rows, hidden, stages);
      if (error != cudaSuccess) return error;
      return column_sums(partial, partial_bias, static_cast<W*>(grad_weight),
                         static_cast<W*>(grad_bias), partials, hidden, stream);
    });
  });
}
