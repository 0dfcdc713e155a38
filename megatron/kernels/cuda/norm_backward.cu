// Gradients of add_norm. One block per multiprocessor loops over rows and processes as many rows at
// a time as its threads can share. Meanwhile, asynchronous copies load the next rows into shared
// memory. Gradients of weight and bias are summed in registers, then over the block's rows in
// shared memory, and then over blocks in a fixed order. There are no atomic operations, so results
// are bitwise reproducible.
#include "amax.cuh"
#include "column_sums.cuh"
#include "rows.cuh"

// Two sums for each warp of a block. Unused entries stay zero.
struct WarpSums {
  float at[2][32];
};

// Sums two values (without LAYER only x) over the threads of a row, with one barrier for these
// threads. The next call must use a different `scratch`.
template <bool LAYER>
__device__ __forceinline__ float2 row_sums(float2 value, WarpSums& scratch) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float mine = LAYER && lane >= 16 ? value.y : value.x;  // one value per half of the lanes
  mine += __shfl_xor_sync(0xffffffffu, LAYER && lane < 16 ? value.y : value.x, 16);
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, mask);
  if (warps == 1) {
    return make_float2(__shfl_sync(0xffffffffu, mine, 0), __shfl_sync(0xffffffffu, mine, 16));
  }
  const int first = threadIdx.y * divide_up(warps, 4) * 4;
  if (lane % 16 == 0) scratch.at[lane / 16][first + threadIdx.x / 32] = mine;
  row_barrier();
  float2 total = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int i = first; i < first + warps; i += 4) {
    const auto x = load<float, 4>(scratch.at[0] + i), y = load<float, 4>(scratch.at[1] + i);
    total.x += (x.at[0] + x.at[1]) + (x.at[2] + x.at[3]);
    if (LAYER) total.y += (y.at[0] + y.at[1]) + (y.at[2] + y.at[3]);
  }
  return total;
}

// The shared memory for the next rows of a block. A thread reads only what it has copied itself, so
// no barrier is needed. A thread's pieces of V elements, a warp's width apart, start at column
// `mine`, so the elements of a warp are contiguous in the row.
template <typename X, typename W, int E>
struct Stage {
  static constexpr int V = vector_size<W>, K = E / V, kApart = 32 * V;
  X *x, *grad_sum;
  W* grad;

  static constexpr int kBytes = E * (2 * sizeof(X) + sizeof(W));  // per thread
  __device__ explicit Stage(unsigned char* memory) {
    const int row = blockDim.x * E;
    x = reinterpret_cast<X*>(memory);
    grad_sum = x + row;
    grad = reinterpret_cast<W*>(grad_sum + row);
  }
  __device__ static int mine() { return threadIdx.x / 32 * (K * kApart) + threadIdx.x % 32 * V; }

  template <typename T>
  __device__ __forceinline__ static void fetch(T* to, const T* from, int hidden) {
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int column = mine() + k * kApart;
      if (column >= hidden) break;
#pragma unroll
      for (int i = 0; i < V; i += vector_size<T>) copy_async_16(to + column + i, from + column + i);
    }
  }
  // Columns that are never loaded are zero, so that sums need not check whether a column exists.
  template <typename T>
  __device__ static void clear(T* to, int from) {
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int column = mine() + k * kApart;
      if (column >= from) store(to + column, Vector<T, V>{});
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
  using Row = Stage<X, W, E>;
  constexpr int V = Row::V, K = Row::K;
  __shared__ WarpSums scratch[2];
  const int stage_bytes = blockDim.x * Row::kBytes;
  unsigned char* memory = dynamic_shared<unsigned char>() + threadIdx.y * stages * stage_bytes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  const int mine = Row::mine();

  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread < 32) {
    for (int i = 0; i < 4; i++) scratch[i / 2].at[i % 2][thread] = 0.f;
  }
  for (int place = 0; place < stages; place++) {
    const Row stage(memory + place * stage_bytes);
    stage.clear(stage.x, hidden);
    stage.clear(stage.grad, hidden);
    stage.clear(stage.grad_sum, grad_sum ? hidden : 0);
  }
  __syncthreads();
  const auto fetch = [&](int64_t row, int place) {
    const Row stage(memory + place * stage_bytes);
    stage.fetch(stage.x, sum + row * hidden, hidden);
    stage.fetch(stage.grad, grad_normal + row * hidden, hidden);
    if (grad_sum) stage.fetch(stage.grad_sum, grad_sum + row * hidden, hidden);
  };

  constexpr bool kKeep = E < 32 || !LAYER;  // weights in registers, not in the cache
  Vector<W, V> kept[K];
  float weight_sum[K][V], bias_sum[K][V];
  const auto weights = [&](int k) {
    return load<W, V>(weight + min(mine + k * Row::kApart, hidden - V));
  };
#pragma unroll
  for (int k = 0; k < K; k++) {
    if (kKeep) kept[k] = weights(k);
#pragma unroll
    for (int i = 0; i < V; i++) weight_sum[k][i] = bias_sum[k][i] = 0.f;
  }

  const float share = 1.f / hidden;
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
    const Row stage(memory + place * stage_bytes);

    float2 total = make_float2(0.f, 0.f);  // sums of weight * grad * distance and of weight * grad
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int column = mine + k * Row::kApart;
      const auto x = to_floats(load<X, V>(stage.x + column));
      const auto g = to_floats(load<W, V>(stage.grad + column));
      const auto w = to_floats(kKeep ? kept[k] : weights(k));
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float weighted = g.at[i] * w.at[i];
        total.x += weighted * (LAYER ? x.at[i] - centre : x.at[i]);
        if (LAYER) total.y += weighted;
      }
    }
    total = row_sums<LAYER>(total, scratch[turn]);
    const float slope = -scale * scale * scale * (total.x * share);
    const float offset = -scale * (total.y * share);
    const int64_t at = row * hidden + mine;
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int column = mine + k * Row::kApart;
      const auto x = to_floats(load<X, V>(stage.x + column));
      const auto g = to_floats(load<W, V>(stage.grad + column));
      const auto passed = to_floats(load<X, V>(stage.grad_sum + column));
      const auto w = to_floats(kKeep ? kept[k] : weights(k));
      Vector<X, V> out;
      Vector<W, V> out_delta;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float distance = LAYER ? x.at[i] - centre : x.at[i];
        const float scaled = g.at[i] * scale;
        weight_sum[k][i] += scaled * distance;
        if (LAYER) bias_sum[k][i] += g.at[i];
        float value = LAYER ? passed.at[i] + offset : passed.at[i];
        value += distance * slope;
        value += scaled * w.at[i];
        out.at[i] = from_float<X>(value);
        out_delta.at[i] = from_float<W>(value);
      }
      if (column >= hidden) break;
      store(grad + at + k * Row::kApart, out);
      if (grad_delta) store(grad_delta + at + k * Row::kApart, out_delta);
      if (amax) largest = max(largest, magnitude_of(out_delta));
    }
    if (stages == 1) {
      if (next < rows) fetch(next, 0);
      copy_async_commit();
    }
    scale = next_scale;
    centre = next_centre;
  }
  const int64_t at = static_cast<int64_t>(blockIdx.x) * hidden;
  store_block_sums(partial_weight + at, weight_sum, mine, hidden);
  if (LAYER) store_block_sums(partial_bias + at, bias_sum, mine, hidden);
  allow_next();
  if (amax) raise_by_block(amax, largest);
}
