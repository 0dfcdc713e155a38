// What every kernel file shares: types, 16-byte vectors, sums over warps and blocks, launching.
//
// Functions that Python calls are `extern "C" int name(...)`: pointers, then int64_t, then double
// arguments in any number, the stream last; the result is a cudaError_t. No torch headers, so a
// file compiles in seconds and one library serves every torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

// ---- element types ------------------------------------------------------------------------------

enum DType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };  // library.py has the same

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls f(T{}) for the type of a code. f is a generic lambda that returns a cudaError_t.
template <typename F>
cudaError_t with_type(int64_t dtype, F f) {
  switch (dtype) {
    case kFloat32: return f(float{});
    case kFloat16: return f(__half{});
    case kBFloat16: return f(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

// ---- vectors ------------------------------------------------------------------------------------

// N elements moved by 16-byte accesses (or by one smaller access where they are fewer bytes).
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T at[N];
};

template <typename T, int N>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Vector<T, N>& value) {
  *reinterpret_cast<Vector<T, N>*>(to) = value;
}

// Returns a vector in fp32. bf16 is converted in words of two elements: one instruction per element,
// while single elements take three for two.
template <typename T, int N>
__device__ __forceinline__ Vector<float, N> to_floats(const Vector<T, N>& vector) {
  Vector<float, N> result;
  if constexpr (std::is_same<T, __nv_bfloat16>::value && N % 2 == 0) {
    const auto* words = reinterpret_cast<const unsigned*>(vector.at);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      result.at[2 * i] = __uint_as_float(words[i] << 16);
      result.at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) result.at[i] = to_float(vector.at[i]);
  }
  return result;
}

// Marks what it stores as the first to leave the L2 cache, so that memory is written early and in
// longer runs. Kernels that use it are 5 to 15% faster; the same for loads gained nothing.
template <typename T, int N>
__device__ __forceinline__ void store_away(T* to, const Vector<T, N>& value) {
  static_assert(sizeof(T) * N % 16 == 0, "of 16 bytes");
#pragma unroll
  for (int i = 0; i < N * static_cast<int>(sizeof(T)) / 16; i++) {
    __stcs(reinterpret_cast<float4*>(to) + i, reinterpret_cast<const float4*>(value.at)[i]);
  }
}

// Elements of T in 16 bytes.
template <typename T>
constexpr int vector_size = 16 / sizeof(T);

// ---- sums and maxima ----------------------------------------------------------------------------

struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
  static __device__ __forceinline__ float none() { return 0.f; }
};

struct Max {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float none() { return -INFINITY; }
};

template <typename Op>
__device__ __forceinline__ float warp_reduce(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

// Reduces over the threads of one row of the block (threadIdx.x; blockDim.x a multiple of 32), and
// gives every thread the result, always in the same order. `scratch` holds 32 floats a row, and
// must be another one in the next call: one barrier a call is then enough.
template <typename Op>
__device__ __forceinline__ float row_reduce(float value, float* scratch) {
  value = warp_reduce<Op>(value);
  const int warps = blockDim.x >> 5;
  if (warps == 1) return value;  // the same branch in the whole block
  scratch += threadIdx.y * 32;
  const int lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  return warp_reduce<Op>(lane < warps ? scratch[lane] : Op::none());
}

#ifdef __CUDACC__
// Waits for the threads of one row of the block. Fewer than 16 rows may have several warps.
__device__ __forceinline__ void row_barrier() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}
#endif

// ---- asynchronous copies into shared memory -----------------------------------------------------

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#ifdef __CUDACC__
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *static_cast<Vector<float, 4>*>(shared) = *static_cast<const Vector<float, 4>*>(global);
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's groups are not complete.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- launching ----------------------------------------------------------------------------------

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef __CUDACC__
// Bytes of shared memory that a block may have on the current GPU.
inline int64_t shared_limit() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

// Whether a kernel may start while the one before it ends, which Hopper brought (programmatic
// dependent launch). A library is compiled for one architecture.
#if defined(__CUDA_ARCH_LIST__) && __CUDA_ARCH_LIST__ >= 900
#define OVERLAPPED_LAUNCHES 1
#else
#define OVERLAPPED_LAUNCHES 0
#endif

// Asks for a block's dynamic shared memory. Without asking it gets 48 KiB, including its static part (at
// most 16 KiB here).
template <typename Kernel>
cudaError_t ask_for_shared(Kernel kernel, size_t shared) {
  if (shared <= 32 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared));
}

// Runs a kernel and reports what the launch says.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                   cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error = ask_for_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  kernel<<<grid, block, shared, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

// The same for a kernel that calls wait_for_previous() before it touches memory: it is brought to the
// GPU once all blocks of the kernel before it in the stream have called allow_next() or ended.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_next(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                        cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error = ask_for_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = OVERLAPPED_LAUNCHES;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// This block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}
#endif

__device__ __forceinline__ void allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
