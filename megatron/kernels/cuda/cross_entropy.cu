// Cross entropy over this rank's shard of the vocabulary. The forward pass reads the logits once,
// and the backward pass reads and writes them once. A block handles a row of logits, and sums have
// a fixed order.
#include "common.cuh"

namespace {

constexpr int kThreads = 256;          // per block of the kernel that only reads
constexpr int kGradientThreads = 512;  // per block of the kernel that also writes
constexpr int kInFlight = 4;  // independent 16-byte loads per thread

__device__ __forceinline__ float exp_of_difference(float x, float shift) {
  const float power = (x - shift) * 1.4426950408889634f;  // subtract first, for accuracy
#ifndef EMULATED
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(power));
  return result;
#else
  return exp2f(power);
#endif
}

constexpr int kLine = 128;  // bytes of a cache line; a warp's accesses should not straddle lines

// Calls each(i) for the elements of a row outside its aligned middle, because rows of odd sizes can
// start at any address. Returns the start of the middle and its number of vectors. THREADS is the
// size of the block.
template <int THREADS, typename T, typename Each>
__device__ __forceinline__ int64_t aligned_middle(const T* row, int64_t size, int64_t* vectors,
                                                  Each each) {
  constexpr int N = vector_size<T>;
  constexpr int64_t kElements = kLine / sizeof(T);
  const int64_t behind = reinterpret_cast<uintptr_t>(row) % kLine / sizeof(T);
  const int64_t first = min(size, behind == 0 ? 0 : kElements - behind);
  *vectors = (size - first) / N;
  for (int64_t i = threadIdx.x; i < first; i += THREADS) each(i);
  for (int64_t i = first + *vectors * N + threadIdx.x; i < size; i += THREADS) each(i);
  return first;
}

struct Running {  // a maximum and the sum of exponentials of differences from it; nan stays nan
  float max = -INFINITY, sum = 0.f;

  __device__ __forceinline__ float shift() const { return max == -INFINITY ? 0.f : max; }
  __device__ __forceinline__ void raise(float to) {
    if (to > max) {
      sum *= exp_of_difference(max, to);
      max = to;
    }
  }
  template <typename T, int N, int K>
  __device__ __forceinline__ void add(const Vector<T, N> (&loaded)[K]) {
    float largest = -INFINITY, parts[K] = {};
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) largest = fmaxf(largest, to_float(loaded[k].at[j]));
    raise(largest);
    const float from = shift();
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) parts[k] += exp_of_difference(to_float(loaded[k].at[j]), from);
#pragma unroll
    for (int k = 0; k < K; ++k) sum += parts[k];
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const T* __restrict__ logits, const int64_t* __restrict__ labels,
                      int64_t size, float* __restrict__ maxima, float* __restrict__ sums,
                      float* __restrict__ targets) {
  constexpr int N = vector_size<T>;
  __shared__ float scratch[2][32];
  const T* row = logits + blockIdx.x * size;
  Running running;
  int64_t vectors;
  const int64_t first = aligned_middle<kThreads>(row, size, &vectors, [&](int64_t i) {
    const Vector<T, 1> one[1] = {{{row[i]}}};
    running.add(one);
  });
  const T* middle = row + first;
  int64_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * kThreads < vectors; i += kInFlight * kThreads) {
    Vector<T, N> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) loaded[k] = load<T, N>(middle + (i + k * kThreads) * N);
    running.add(loaded);
  }
  for (; i < vectors; i += kThreads) {
    const Vector<T, N> loaded[1] = {load<T, N>(middle + i * N)};
    running.add(loaded);
  }
  const float largest = row_reduce<Max>(running.max, scratch[0]);
  running.raise(largest);
  const float sum = row_reduce<Sum>(running.sum, scratch[1]);
  if (threadIdx.x == 0) {
    const int64_t label = labels[blockIdx.x];
    maxima[blockIdx.x] = largest;
    sums[blockIdx.x] = sum;
    targets[blockIdx.x] = label >= 0 && label < size ? to_float(row[label]) : 0.f;
  }
}

template <typename T>
__global__ void __launch_bounds__(kGradientThreads)
    gradient_kernel(const T* logits, T* result, const int64_t* __restrict__ labels, int64_t size,
                    const float* __restrict__ maxima, const float* __restrict__ sums,
                    const float* __restrict__ upstream) {
  constexpr int N = vector_size<T>;
  const T* row = logits + blockIdx.x * size;
  T* out = result + blockIdx.x * size;
  const float shift = maxima[blockIdx.x], grad = upstream[blockIdx.x];
  const float scale = grad / sums[blockIdx.x];
  const int64_t label = labels[blockIdx.x];
  const auto value = [&](T x, int64_t i) {
    const float softmax = exp_of_difference(to_float(x), shift) * scale;
    return from_float<T>(i == label ? softmax - grad : softmax);
  };
  int64_t vectors;
  const int64_t first = aligned_middle<kGradientThreads>(
      row, size, &vectors, [&](int64_t i) { out[i] = value(row[i], i); });
  const auto write = [&](Vector<T, N> vector, int64_t place) {
#pragma unroll
    for (int j = 0; j < N; ++j) vector.at[j] = value(vector.at[j], place + j);
    store_away(out + place, vector);
  };
  int64_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * kGradientThreads < vectors; i += kInFlight * kGradientThreads) {
    Vector<T, N> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      loaded[k] = load<T, N>(row + first + (i + k * kGradientThreads) * N);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) write(loaded[k], first + (i + k * kGradientThreads) * N);
  }
  for (; i < vectors; i += kGradientThreads) write(load<T, N>(row + first + i * N), first + i * N);
}

}  // namespace
