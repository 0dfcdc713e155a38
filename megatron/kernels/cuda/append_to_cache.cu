// Writes new keys and values to a key-value cache.
#include "common.cuh"

constexpr int kThreads = 256;

// Each block handles one token.
__global__ void __launch_bounds__(kThreads)
    append_to_cache_kernel(const Vector<float, 4>* __restrict__ key,
                           const Vector<float, 4>* __restrict__ value,
                           Vector<float, 4>* __restrict__ keys,
                           Vector<float, 4>* __restrict__ values,
                           const int64_t* __restrict__ slots, int width) {
  const int64_t from = static_cast<int64_t>(blockIdx.x) * width, to = slots[blockIdx.x] * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    keys[to + i] = key[from + i];
    values[to + i] = value[from + i];
  }
}
