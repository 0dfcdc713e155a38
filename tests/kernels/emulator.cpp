// Fibers for emulator.h, and the few calls of the CUDA runtime that kernels' hosts make.
#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <vector>

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
struct Fiber {
  ucontext_t context;  // to start it
  jmp_buf resume;      // to go on, without system calls
  uint3 place;
  int warp;
  bool started, done;
  int turn;
};
constexpr size_t kStack = 128 * 1024;
std::vector<char> stacks;
std::vector<Fiber> fibers;
std::vector<Barrier> warps, rows;
std::vector<uint64_t> slots;  // [warp][2][32]
std::vector<char> shared;
Barrier whole;
jmp_buf scheduler;
Fiber* current;
const std::function<void()>* kernel;

void yield() {
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.place;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

void enter() {
  (*kernel)();
  current->done = true;
  whole.members--;
  whole.release();
  warps[current->warp].members--;
  warps[current->warp].release();
  yield();
}

void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  barrier.arrived++;
  barrier.release();
  while (barrier.generation == generation) {
    yield();
  }
}

void run_block() {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  stacks.resize(threads * kStack);
  fibers.assign(threads, Fiber{});
  warps.assign((threads + 31) / 32, Barrier{});
  slots.assign(warps.size() * 64, 0);
  whole = Barrier{threads, 0, 0};
  rows.assign(blockDim.y, Barrier{static_cast<int>(blockDim.x), 0, 0});
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.place = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    fiber.warp = i / 32;
    warps[fiber.warp].members++;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = &stacks[i * kStack];
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (Fiber& fiber : fibers) {
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
void* shared_memory() { return shared.data(); }
uint64_t* slot(unsigned lane) { return &slots[(current->warp * 2 + current->turn) * 32 + lane]; }
void next_slots() { current->turn ^= 1; }

void run(dim3 grid, dim3 block, size_t bytes, const std::function<void()>& body) {
  gridDim = grid;
  blockDim = block;
  kernel = &body;
  shared.assign(bytes, char(0xff));  // NaN
  for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block();
    }
  }
}
}  // namespace emulator

extern "C" cudaError_t cudaSetDevice(int) { return cudaSuccess; }
extern "C" const char* cudaGetErrorName(cudaError_t) { return "emulated error"; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "see emulator.h"; }
