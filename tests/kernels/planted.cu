// Faults that the sanitizers or the emulator must find: see test_sanitize.py.
#include "../../megatron/kernels/cuda/common.cuh"

// ---- faults that a sanitizer reports ------------------------------------------------------------

__global__ void write(float* out, int index) { out[index] = 1; }

__global__ void read(float* out, int index) { out[0] = out[index]; }

__global__ void shift(int* out, int by) { out[0] = 1 << by; }

__global__ void multiply(float* out, int rows) {
  const int places = rows * 65536;
  out[0] = places;
}

__global__ void convert(float* out, int exponent) { out[0] = static_cast<int>(exp2f(exponent)); }

__global__ void load_vector(float* out, int index) { store(out, load<float, 4>(out + index)); }

__global__ void copy_vector(float* out, int index) { copy_async_16(out, out + index); }

// By a pointer, so that only the memory around the array can tell.
__device__ __attribute__((noinline)) void put(float* to, int index) { to[index] = 1; }

template <typename T>
__global__ void write_static(T* out, int index) {
  __shared__ T first[33];
  __shared__ T second[33];
  put(first, index);
  second[threadIdx.x] = first[0];
  out[0] = second[threadIdx.x];
}

__global__ void write_dynamic(float* out, int index) {
  put(dynamic_shared<float>(), index);
  out[0] = 1;
}

__global__ void write_registers(float* out, int index) {
  float sums[4] = {};
  put(sums, index);
  out[0] = sums[0];
}

// ---- faults that change the result from launch to launch ----------------------------------------

__global__ void sum_static(float* out, int count) {
  __shared__ int bins[32];
  if (threadIdx.x < count) bins[threadIdx.x] = 1;
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += bins[i] & 0xffff;
  out[0] = sum;
}

__global__ void largest_dynamic(float* out, int count) {
  float* values = dynamic_shared<float>();
  if (threadIdx.x < count) values[threadIdx.x] = 1;
  __syncthreads();
  float largest = 0.f;
  for (int i = 0; i < 32; i++) largest = fmaxf(largest, values[i]);  // ignores NaN
  out[0] = largest;
}

__global__ void read_neighbor(float* out, int waits) {
  __shared__ int values[32];
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = 1 + threadIdx.x;
  if (waits) __syncthreads();
  const int sum = values[threadIdx.x] + values[31 - threadIdx.x];
  if (threadIdx.x == 0) out[0] = sum;
}

__global__ void write_from_blocks(float* out, int blocks) {
  if (blockIdx.x < blocks) out[0] = blockIdx.x;
}
