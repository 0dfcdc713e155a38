// Computes residual + delta and its LayerNorm or RMSNorm in one pass.
#include "amax.cuh"
#include "rows.cuh"

// Statistics of the elements of a warp, or of a row.
struct Moments {
  float sum, squares, count;  // squares: sum of squared distances from the mean
};

// Returns a row's mean and mean squared distance from it in every thread, with one barrier. Each
// warp uses distances from its own mean, and the warps' results are then merged (Chan et al.,
// 1979).
template <typename X, int V, int K>
__device__ __forceinline__ float2 row_moments(const Vector<X, V> (&x)[K], float sum, int hidden,
                                              Moments* scratch) {
  Moments mine{warp_reduce<Sum>(sum), 0.f, 0.f};
  const int warp_first = (threadIdx.x & ~31u) * V;
#pragma unroll
  for (int k = 0; k < K; k++) {
    mine.count += max(0, min(32 * V, hidden - static_cast<int>(k * blockDim.x * V) - warp_first));
  }
  float centre = mine.sum / fmaxf(mine.count, 1.f);
#pragma unroll
  for (int k = 0; k < K; k++) {
    if ((k * blockDim.x + threadIdx.x) * V >= hidden) continue;
    const auto values = to_floats(x[k]);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float distance = values.at[i] - centre;
      mine.squares += distance * distance;
    }
  }
  mine.squares = warp_reduce<Sum>(mine.squares);
  const int warps = blockDim.x >> 5;
  if (warps == 1) return {centre, mine.squares / hidden};
  const int lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = mine;
  __syncthreads();
  mine = lane < warps ? scratch[lane] : Moments{0.f, 0.f, 0.f};
  centre = warp_reduce<Sum>(mine.sum) / hidden;
  const float away = mine.sum / fmaxf(mine.count, 1.f) - centre;
  return {centre, warp_reduce<Sum>(mine.squares + mine.count * away * away) / hidden};
}

// The number of blocks of row_threads<E> for which a multiprocessor should have registers, so that
// enough loads are in flight. Without this bound, the compiler keeps more values unpacked.
template <typename X, int E>
constexpr int residency = E == 8 ? 1 : (E == 16 ? 3 : 2) - (sizeof(X) == 4);

// A row stays in registers, so each input is read once. `mean` is null for RMSNorm.
template <typename X, typename W, int E, bool LAYER>
__global__ void __launch_bounds__(row_threads<E>, residency<X, E>)
    add_norm_forward_kernel(const X* __restrict__ residual, const W* __restrict__ delta,
                            const W* __restrict__ weight, const W* __restrict__ bias,
                            X* __restrict__ sum, W* __restrict__ normal, float* __restrict__ mean,
                            float* __restrict__ rstd, unsigned* __restrict__ amax, int64_t rows,
                            int hidden, float epsilon) {
  constexpr int V = vector_size<W>;
  constexpr int K = E / V;
  __shared__ float scratch[32];
  __shared__ Moments moments[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // whole warps, and only in blocks without barriers
  const int64_t start = row * hidden;

  Vector<X, V> x[K];
  Vector<W, V> d[K];
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column < hidden) {
      x[k] = load<X, V>(residual + start + column);
      if (delta) d[k] = load<W, V>(delta + start + column);
    }
  }
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= hidden) continue;
    if (delta) {
      const auto left = to_floats(x[k]), right = to_floats(d[k]);
#pragma unroll
      for (int i = 0; i < V; i++) x[k].at[i] = from_float<X>(left.at[i] + right.at[i]);
      store(sum + start + column, x[k]);
    }
    const auto values = to_floats(x[k]);
#pragma unroll
    for (int i = 0; i < V; i++) total += LAYER ? values.at[i] : values.at[i] * values.at[i];
  }
  float centre = 0.f, square;
  if (LAYER) {
    const float2 both = row_moments(x, total, hidden, moments);
    centre = both.x, square = both.y;
  } else {
    square = row_reduce<Sum>(total, scratch) / hidden;
  }
  const float scale = rsqrtf(square + epsilon);
  if (threadIdx.x == 0) {
    if (LAYER) mean[row] = centre;
    rstd[row] = scale;
  }
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int column = (k * blockDim.x + threadIdx.x) * V;
    if (column >= hidden) continue;
    const auto values = to_floats(x[k]), w = to_floats(load<W, V>(weight + column));
    const auto b = to_floats(LAYER ? load<W, V>(bias + column) : Vector<W, V>{});
    Vector<W, V> out;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float value = (values.at[i] - centre) * scale * w.at[i];
      out.at[i] = from_float<W>(LAYER ? value + b.at[i] : value);
    }
    store(normal + start + column, out);
    if (amax) largest = max(largest, magnitude_of(out));
  }
  if (!amax) return;
  if (blockDim.y > 1) {  // rows of one warp each, some of which may have returned
    raise_by_warp(amax, largest);
  } else {
    raise_by_block(amax, largest);
  }
}
