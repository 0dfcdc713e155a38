// Runs CUDA kernels on a CPU, so that tests need no GPU: included before every .cu file, which then
// compiles as C++. Threads of a block are fibers that take turns at barriers and shuffles; blocks
// run one after another. The order of threads, the order of blocks and the bytes in uninitialized
// shared memory change from launch to launch, so that a kernel that depends on them gives other
// results when it runs again. Slow: for small sizes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <type_traits>

// A section of its own, so that every block finds shared memory uninitialized. Kernels are static,
// because AddressSanitizer leaves no room between the variables of functions that are not.
#undef __shared__
#define __shared__ static __attribute__((section("emulated_shared")))
#undef __global__
#define __global__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#define EMULATED 1

using std::max;
using std::min;

extern dim3 gridDim, blockDim;
extern uint3 blockIdx, threadIdx;

namespace emulator {
void run(dim3 grid, dim3 block, size_t shared, const std::function<void()>& body);
void* shared_memory();
void block_barrier();
void row_barrier();
void warp_barrier();
uint64_t* slot(unsigned lane);  // of this thread's warp; two sets take turns
void next_slots();

template <typename T>
T exchange(T value, unsigned from_lane) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const unsigned lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  *slot(lane) = bits;
  warp_barrier();
  T got;
  memcpy(&got, slot(from_lane % 32), sizeof(T));
  next_slots();
  return got;
}

inline unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}
}  // namespace emulator

inline void __syncthreads() { emulator::block_barrier(); }
inline void row_barrier() { emulator::row_barrier(); }
inline void __syncwarp(unsigned = ~0u) { emulator::warp_barrier(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return emulator::exchange(value, emulator::lane() ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane, int = 32) {
  return emulator::exchange(value, lane);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned by, int = 32) {
  const unsigned from = emulator::lane() + by;
  return emulator::exchange(value, from < 32 ? from : emulator::lane());
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by, int = 32) {
  const unsigned lane = emulator::lane();
  return emulator::exchange(value, lane < by ? lane : lane - by);
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (int mask = 16; mask > 0; mask >>= 1) value = max(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; lane++) same |= (__shfl_sync(~0u, value, lane) == value) << lane;
  return same;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __logf(float x) { return logf(x); }

inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
template <typename T>
T __ldg(const T* x) { return *x; }
template <typename T>
T __ldcs(const T* x) { return *x; }
template <typename T>
void __stcs(T* to, T x) { *to = x; }
template <typename T>
void __stcg(T* to, T x) { *to = x; }

namespace emulator {
// A kernel as the driver finds it: by its name.
struct Registered {
  const char* name;
  void (*kernel)();
  std::function<void()> (*bind)(void (*kernel)(), void** parameters);
  Registered* next;
  static Registered* first;
};

// A call of a kernel with parameters of which the driver gets the addresses.
template <typename... Parameters>
std::function<void()> bind(void (*kernel)(), void** parameters) {
  const auto typed = reinterpret_cast<void (*)(Parameters...)>(kernel);
  std::tuple<std::remove_cv_t<Parameters>...> values{
      *static_cast<std::remove_cv_t<Parameters>*>(*parameters++)...};
  return [=] { std::apply(typed, values); };
}

template <typename... Parameters>
Registered registered(const char* name, void (*kernel)(Parameters...)) {
  return {name, reinterpret_cast<void (*)()>(kernel), bind<Parameters...>, Registered::first};
}
}  // namespace emulator

// Lets the emulated driver find a kernel. The name is also the kernel's C++ expression.
#define REGISTER(number, ...)                                                             \
  static emulator::Registered registered_##number = emulator::registered(#__VA_ARGS__, __VA_ARGS__); \
  static const auto* linked_##number = emulator::Registered::first = &registered_##number;

template <typename T>
T* dynamic_shared() { return static_cast<T*>(emulator::shared_memory()); }

// Blocks and threads take turns: nothing else runs between the read and the write.
inline int atomicAdd(int* at, int value) {
  const int old = *at;
  *at += value;
  return old;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned old = *at;
  *at = max(old, value);
  return old;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffffu, b & 0xffffu);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const uint64_t both = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    result |= unsigned(both >> 8 * (selectors >> 4 * i & 7) & 255) << 8 * i;
  }
  return result;
}
