// Code shared by all kernel files: types, 16-byte vectors, sums over warps and blocks.
// The files contain only device code and include no CUDA headers, so NVRTC can compile them
// wherever PyTorch is installed. Python launches the kernels (plans.py). The parameters of a kernel
// are pointers, int64_t, int, unsigned, float or double. sources.py reads their types from these
// files.
#pragma once

#ifndef EMULATED  // the tests' emulator is C++ and has these types
using int64_t = long long;
using uint64_t = unsigned long long;
using uint32_t = unsigned;
using uintptr_t = unsigned long long;
using size_t = decltype(sizeof(0));
#define INFINITY __int_as_float(0x7f800000)
#endif

// ---- element types ------------------------------------------------------------------------------

struct Half {  // IEEE binary16
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }

#ifndef EMULATED
__device__ __forceinline__ float to_float(Half x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}
#else
float to_float(Half x);
template <>
Half from_float<Half>(float x);
template <>
BFloat16 from_float<BFloat16>(float x);
#endif

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

// ---- vectors ------------------------------------------------------------------------------------

// N elements that are moved by 16-byte accesses, or by a single access if they have fewer bytes.
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

// Returns a vector in fp32. bf16 is converted in words of two elements, with one instruction per
// element. Converting single elements would take three instructions for two.
template <typename T, int N>
__device__ __forceinline__ Vector<float, N> to_floats(const Vector<T, N>& vector) {
  Vector<float, N> result;
  if constexpr (is_same<T, BFloat16> && N % 2 == 0) {
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

// Stores data with an evict-first hint for the L2 cache, so that it is written to memory early and
// in longer runs. This makes kernels 5 to 15% faster. Hints for loads had no effect.
template <typename T, int N>
__device__ __forceinline__ void store_away(T* to, const Vector<T, N>& value) {
  static_assert(sizeof(T) * N % 16 == 0, "of 16 bytes");
#pragma unroll
  for (int i = 0; i < N * static_cast<int>(sizeof(T)) / 16; i++) {
    __stcs(reinterpret_cast<float4*>(to) + i, reinterpret_cast<const float4*>(value.at)[i]);
  }
}

// The number of elements of T in 16 bytes.
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

// Reduces over the threads of one row of the block (threadIdx.x; blockDim.x is a multiple of 32),
// always in the same order, and returns the result in every thread. `scratch` has 32 floats per
// row. The next call must use a different `scratch`, so that one barrier per call is enough.
template <typename Op>
__device__ __forceinline__ float row_reduce(float value, float* scratch) {
  value = warp_reduce<Op>(value);
  const int warps = blockDim.x >> 5;
  if (warps == 1) return value;  // all threads of the block take the same branch
  scratch += threadIdx.y * 32;
  const int lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  return warp_reduce<Op>(lane < warps ? scratch[lane] : Op::none());
}

#ifndef EMULATED
// Waits for the threads of one row of the block. Rows may have several warps only if there are
// fewer than 16 rows.
__device__ __forceinline__ void row_barrier() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}
#endif

// ---- asynchronous copies into shared memory -----------------------------------------------------

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#ifndef EMULATED
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *static_cast<Vector<float, 4>*>(shared) = *static_cast<const Vector<float, 4>*>(global);
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#ifndef EMULATED
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's groups are incomplete.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
#ifndef EMULATED
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- launching ----------------------------------------------------------------------------------

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifndef EMULATED
// Returns this block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}
#endif

// A kernel that is launched early (KernelLaunch.early in plans.py) starts once all blocks of the
// previous kernel in the stream have called allow_next() or ended. It calls wait_for_previous()
// before it accesses memory. This is called programmatic dependent launch and needs Hopper or
// later.
__device__ __forceinline__ void allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
