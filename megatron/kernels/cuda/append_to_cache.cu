// Writing to a key-value cache.
#include "common.cuh"

constexpr int kThreads = 256;

// A block handles one token.
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

// Copies key, value [tokens, width] to rows slots[token] of keys and values; width in 16 bytes.
extern "C" int append_to_cache(const void* key, const void* value, void* keys, void* values,
                               const int64_t* slots, int64_t tokens, int64_t width,
                               cudaStream_t stream) {
  using Four = Vector<float, 4>;
  const int64_t threads = width < kThreads ? divide_up(width, 32) * 32 : kThreads;
  return launch(append_to_cache_kernel, dim3(tokens), dim3(threads), 0, stream,
                static_cast<const Four*>(key), static_cast<const Four*>(value),
                static_cast<Four*>(keys), static_cast<Four*>(values), slots, width);
}
