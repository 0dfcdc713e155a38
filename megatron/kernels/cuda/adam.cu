// AdamW over many tensors in one launch. The kernel reads the gradient, fp32 weight and moments
// once, and writes the weight, moments and 16-bit copy once: 30 bytes per parameter.
#include "common.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;     // elements per access: 16 bytes of fp32
constexpr int kInFlight = 2;  // loads from each tensor before the first use

struct AdamTensor {  // packed by kernels/tensor_sums.py: only 64-bit fields
  const void* gradient;
  float* weight;
  float* first;
  float* second;
  void* copy;  // in 16 bits, or null
  int64_t size;
};

struct AdamNumbers {
  double beta1, beta2;
  float epsilon, rate, decay;
  const float *step, *gradient_scale, *found_nonfinite;
};

struct Factors {  // derived from the numbers of a step
  float inverse_scale, step_size, root_correction, keep;
  float beta1, rest1, beta2, rest2;  // rest = 1 - beta
};

__device__ Factors factors_of(const AdamNumbers& numbers) {
  // In double precision, because 1 - beta2 loses digits in fp32.
  const double step = *numbers.step;
  const double correction1 = 1. - pow(numbers.beta1, step);
  const double correction2 = 1. - pow(numbers.beta2, step);
  return {1.f / *numbers.gradient_scale,
          static_cast<float>(numbers.rate / correction1),
          static_cast<float>(sqrt(correction2)),
          1.f - numbers.rate * numbers.decay,
          static_cast<float>(numbers.beta1),
          static_cast<float>(1. - numbers.beta1),
          static_cast<float>(numbers.beta2),
          static_cast<float>(1. - numbers.beta2)};
}

__device__ __forceinline__ void update(float gradient, float& weight, float& first, float& second,
                                       float epsilon, const Factors& factors) {
  gradient *= factors.inverse_scale;
  weight *= factors.keep;
  first = factors.beta1 * first + factors.rest1 * gradient;
  second = factors.beta2 * second + factors.rest2 * gradient * gradient;
  weight -= factors.step_size * first / (sqrtf(second) / factors.root_correction + epsilon);
}

// Makes `Times` accesses of N elements per thread, beginning at `start`.
template <typename G, typename C, int N, int Times>
__device__ __forceinline__ void update_vectors(const AdamTensor& tensor, int64_t start,
                                               float epsilon, const Factors& factors) {
  Vector<G, N> gradient[Times];
  Vector<float, N> weight[Times], first[Times], second[Times];
  start += threadIdx.x * N;
#pragma unroll
  for (int k = 0; k < Times; ++k) {
    const int64_t place = start + k * kThreads * N;
    gradient[k] = load<G, N>(static_cast<const G*>(tensor.gradient) + place);
    weight[k] = load<float, N>(tensor.weight + place);
    first[k] = load<float, N>(tensor.first + place);
    second[k] = load<float, N>(tensor.second + place);
  }
#pragma unroll
  for (int k = 0; k < Times; ++k) {
    const int64_t place = start + k * kThreads * N;
    Vector<C, N> copy;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      update(to_float(gradient[k].at[j]), weight[k].at[j], first[k].at[j], second[k].at[j],
             epsilon, factors);
      copy.at[j] = from_float<C>(weight[k].at[j]);
    }
    store(tensor.weight + place, weight[k]);
    store(tensor.first + place, first[k]);
    store(tensor.second + place, second[k]);
    if (tensor.copy != nullptr) store(static_cast<C*>(tensor.copy) + place, copy);
  }
}

__device__ __forceinline__ bool allows_vectors(const AdamTensor& tensor) {
  const auto places = reinterpret_cast<uintptr_t>(tensor.gradient) |
                      reinterpret_cast<uintptr_t>(tensor.weight) |
                      reinterpret_cast<uintptr_t>(tensor.first) |
                      reinterpret_cast<uintptr_t>(tensor.second) |
                      reinterpret_cast<uintptr_t>(tensor.copy);
  return places % 16 == 0;
}

// Block b updates `chunk` elements of tensor pieces[b].x, beginning at element pieces[b].y.
template <typename G, typename C>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(const AdamTensor* __restrict__ tensors, const longlong2* __restrict__ pieces,
                const float* step, const float* gradient_scale, const float* found_nonfinite,
                int64_t chunk, double beta1, double beta2, float epsilon, float rate,
                float decay) {
  const AdamNumbers numbers{beta1, beta2, epsilon, rate,
                            decay, step,  gradient_scale, found_nonfinite};
  if (*numbers.found_nonfinite != 0.f) return;
  __shared__ Factors shared;
  if (threadIdx.x == 0) shared = factors_of(numbers);
  const longlong2 piece = pieces[blockIdx.x];
  const AdamTensor tensor = tensors[piece.x];
  __syncthreads();
  const Factors factors = shared;
  int64_t i = piece.y;
  const int64_t end = min(tensor.size, i + chunk);
  if (allows_vectors(tensor)) {
    constexpr int64_t kStride = kInFlight * kThreads * kWidth;
    for (; i + kStride <= end; i += kStride) {
      update_vectors<G, C, kWidth, kInFlight>(tensor, i, numbers.epsilon, factors);
    }
  }
  for (; i + threadIdx.x < end; i += kThreads) {  // the remaining elements, one by one
    update_vectors<G, C, 1, 1>(tensor, i, numbers.epsilon, factors);
  }
}

}  // namespace
