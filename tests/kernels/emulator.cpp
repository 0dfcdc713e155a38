// Fibers for emulator.h, and the few functions of the CUDA driver that launch kernels.
#include "emulator.h"

#include <cuda.h>

#include "../../megatron/kernels/cuda/common.cuh"

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

// Where the linker puts the kernels' static shared memory, if they have any.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulated_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_emulated_shared[];

dim3 gridDim, blockDim;
uint3 blockIdx, threadIdx;

namespace emulator {
namespace {
struct Barrier {
  int members = 0, arrived = 0, generation = 0;
  void release() {
    if (members > 0 && arrived == members) { arrived = 0; generation++; }
  }
};
// Started once: a fiber runs one thread after the other, because starting takes system calls.
struct Fiber {
  std::unique_ptr<char[]> stack;  // none before it has started
  jmp_buf resume;
  uint3 place;
  int warp;
  bool done;
  int turn;
};
constexpr size_t kStack = 128 * 1024;
std::vector<Fiber> fibers;  // of the largest block until now
std::vector<Barrier> warps, rows;
std::vector<uint64_t> slots;  // [warp][2][32]
std::unique_ptr<char[]> shared;  // exactly what was asked for, which AddressSanitizer surrounds
size_t shared_bytes;
uint64_t launches;

// What a launch chooses.
struct Choice {
  bool threads_backward, blocks_backward;
  unsigned char uninitialized;  // NaN, or else a large number
} choice;
Barrier whole;
jmp_buf scheduler;
Fiber* current;
const std::function<void()>* kernel;

void yield() {
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

void enter() {
  for (;;) {
    (*kernel)();
    current->done = true;
    whole.members--;
    whole.release();
    warps[current->warp].members--;
    warps[current->warp].release();
    yield();
  }
}

void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.place;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.stack) _longjmp(fiber.resume, 1);
  fiber.stack.reset(new char[kStack]);
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  barrier.arrived++;
  barrier.release();
  while (barrier.generation == generation) {
    yield();
  }
}

Choice choose() {
  uint64_t x = ++launches * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return {(x >> 40 & 1) != 0, (x >> 41 & 1) != 0, static_cast<unsigned char>(x >> 42 & 1 ? 0xff : 0x7f)};
}

// Overwrites shared memory, and the room that AddressSanitizer leaves between its variables.
__attribute__((no_sanitize("address", "undefined"))) void forget_shared() {
#ifdef __SANITIZE_ADDRESS__  // it would report a memset
  for (volatile char* at = __start_emulated_shared; at != __stop_emulated_shared; at++) {
    *at = choice.uninitialized;
  }
#else
  memset(__start_emulated_shared, choice.uninitialized,
         __stop_emulated_shared - __start_emulated_shared);
#endif
  memset(shared.get(), choice.uninitialized, shared_bytes);
}

void run_block() {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  forget_shared();
  if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);
  warps.assign((threads + 31) / 32, Barrier{});
  slots.assign(warps.size() * 64, 0);
  whole = Barrier{threads, 0, 0};
  rows.assign(blockDim.y, Barrier{static_cast<int>(blockDim.x), 0, 0});
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.place = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    fiber.warp = i / 32;
    fiber.turn = 0;
    fiber.done = false;
    warps[fiber.warp].members++;
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (int i = 0; i < threads; i++) {
      Fiber& fiber = fibers[choice.threads_backward ? threads - 1 - i : i];
      if (fiber.done) continue;
      alive = true;
      resume(fiber);
    }
  }
}
}  // namespace

void block_barrier() { wait(whole); threadIdx = current->place; }
void row_barrier() { wait(rows[current->place.y]); threadIdx = current->place; }
void warp_barrier() { wait(warps[current->warp]); threadIdx = current->place; }
void* shared_memory() { return shared.get(); }
uint64_t* slot(unsigned lane) { return &slots[(current->warp * 2 + current->turn) * 32 + lane]; }
void next_slots() { current->turn ^= 1; }

void run(dim3 grid, dim3 block, size_t bytes, const std::function<void()>& body) {
  gridDim = grid;
  blockDim = block;
  kernel = &body;
  shared.reset(new char[bytes]);
  shared_bytes = bytes;
  choice = choose();
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t i = 0; i < blocks; i++) {
    const uint64_t block = choice.blocks_backward ? blocks - 1 - i : i;
    blockIdx.x = block % grid.x;
    blockIdx.y = block / grid.x % grid.y;
    blockIdx.z = block / grid.x / grid.y;
    run_block();
  }
}
}  // namespace emulator

emulator::Registered* emulator::Registered::first;

float to_float(Half x) { return __half2float(__half_raw{x.bits}); }
template <>
Half from_float<Half>(float x) { return {static_cast<__half_raw>(__float2half_rn(x)).x}; }
template <>
BFloat16 from_float<BFloat16>(float x) {
  return {static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x};
}

// cuda.h declares them, and so checks their types. There is a single library of kernels.
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuLibraryLoadData(CUlibrary*, const void*, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* found, CUlibrary, const char* name) {
  for (auto* kernel = emulator::Registered::first; kernel; kernel = kernel->next) {
    if (strcmp(kernel->name, name) != 0) continue;
    *found = reinterpret_cast<CUkernel>(kernel);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}
CUresult cuKernelSetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) { return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  const auto& c = *config;
  const uint64_t threads = uint64_t{c.blockDimX} * c.blockDimY * c.blockDimZ;
  if (threads == 0 || threads > 1024 || c.blockDimZ > 64 || c.sharedMemBytes > 227 * 1024 ||
      c.gridDimX == 0 || c.gridDimX > 0x7fffffff || c.gridDimY == 0 || c.gridDimY > 65535 ||
      c.gridDimZ == 0 || c.gridDimZ > 65535) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto* kernel = reinterpret_cast<emulator::Registered*>(function);
  emulator::run(dim3(c.gridDimX, c.gridDimY, c.gridDimZ), dim3(c.blockDimX, c.blockDimY, c.blockDimZ),
                c.sharedMemBytes, kernel->bind(kernel->kernel, parameters));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "emulated error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "see emulator.cpp";
  return CUDA_SUCCESS;
}
