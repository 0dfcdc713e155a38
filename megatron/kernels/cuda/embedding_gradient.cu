// Gradient of an embedding table, added into its fp32 gradient: rows of one entry are brought together
// by a stable sort, and added up in that order, whoever runs first. The sort is by digits of an entry,
// a kernel for each. A frequent entry has thousands of rows, so whole chunks of them are added up
// beforehand, side by side.
#include "common.cuh"

namespace {

constexpr int kBits = 10;  // of a digit
constexpr int kSorters = 1 << kBits;
constexpr int kThreads = 128;
constexpr int kChunk = 32;  // rows of one entry; embedding_gradient.py has the same
constexpr int kRowsInFlight = 4, kChunksInFlight = 4;

struct alignas(8) Pair {
  int entry, row;  // of the gradient
};

// The sum of `count` over the threads before this one.
__device__ __forceinline__ int sum_before(int count) {
  __shared__ int of_warps[kSorters / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = count;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, by);
    if (lane >= by) sum += before;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; i++) sum += of_warps[i];
  return sum - count;
}

// One digit of a stable sort, from bit `shift` on: of `entries` where they are given, whose rows are
// their places, else of `from`. Every block counts all digits by itself, so that none waits for
// another, and moves one pair a thread. Entries outside of the table come last, as entry table_rows.
__global__ void __launch_bounds__(kSorters)
    sort_kernel(const int64_t* __restrict__ entries, const Pair* __restrict__ from,
                Pair* __restrict__ to, int count, int table_rows, int shift) {
  constexpr int kBins = kSorters;
  __shared__ int earlier[kBins], others[kBins];  // how often a digit is before this block's, and not
  const int thread = threadIdx.x, lane = thread % 32, first = blockIdx.x * kSorters;
  const auto pair_at = [&](int i) {
    if (!entries) return from[i];
    const int64_t entry = entries[i];
    return Pair{entry < 0 || entry >= table_rows ? table_rows : static_cast<int>(entry), i};
  };
  const auto digit_of = [&](const Pair& pair) { return pair.entry >> shift & (kBins - 1); };
  allow_next();
  earlier[thread] = others[thread] = 0;
  wait_for_previous();
  __syncthreads();
#pragma unroll 8
  for (int i = thread; i < count; i += kSorters) {
    atomicAdd((i < first ? earlier : others) + digit_of(pair_at(i)), 1);
  }
  const bool moves = first + thread < count;
  const Pair mine = moves ? pair_at(first + thread) : Pair{};
  const int digit = moves ? digit_of(mine) : kBins;
  const unsigned same = __match_any_sync(0xffffffffu, digit);
  const int rank = __popc(same & ((1u << lane) - 1));
  __syncthreads();
  const int total = earlier[thread] + others[thread];
  earlier[thread] += sum_before(total);
  for (int warp = 0; warp < kSorters / 32; warp++) {  // in their order
    __syncthreads();
    if (thread / 32 != warp) continue;
    if (moves) to[earlier[digit] + rank] = mine;
    __syncwarp();
    if (moves && rank == 0) earlier[digit] += __popc(same);
  }
}

// Adds N columns of M rows, in their order. row(k): where such a row has them, or null.
template <typename T, int M, int N, typename F>
__device__ __forceinline__ void add_rows(float (&sums)[N], F row) {
  Vector<T, N> rows[M] = {};
#pragma unroll
  for (int k = 0; k < M; k++) {
    if (const T* from = row(k)) rows[k] = load<T, N>(from);
  }
#pragma unroll
  for (int k = 0; k < M; k++) {
    const auto values = to_floats(rows[k]);
#pragma unroll
    for (int j = 0; j < N; j++) sums[j] += values.at[j];
  }
}

// Sums of those chunks of `sorted` that are of one entry, for the columns of blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    chunks_kernel(const Pair* __restrict__ sorted, const T* __restrict__ gradient,
                  float* __restrict__ partial, int64_t hidden, int table_rows) {
  constexpr int N = vector_size<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  allow_next();
  wait_for_previous();
  const Pair* chunk = sorted + blockIdx.x * kChunk;
  const int entry = chunk[0].entry;
  if (entry == table_rows || chunk[kChunk - 1].entry != entry || column >= hidden) return;
  float sums[N] = {};
  for (int i = 0; i < kChunk; i += 8) {
    add_rows<T, 8>(sums, [&](int k) { return gradient + chunk[i + k].row * hidden + column; });
  }
  for (int j = 0; j < N; j += 4) {
    store(partial + blockIdx.x * hidden + column + j,
          Vector<float, 4>{sums[j], sums[j + 1], sums[j + 2], sums[j + 3]});
  }
}

// Place blockIdx.x of `sorted`: if the rows of an entry begin there, this block adds them to the
// table, for the columns of blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const Pair* __restrict__ sorted, const T* __restrict__ gradient,
                const float* __restrict__ partial, float* __restrict__ into, int count,
                int64_t hidden, int table_rows) {
  constexpr int N = vector_size<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  const int begin = blockIdx.x;
  wait_for_previous();
  const int entry = sorted[begin].entry;
  if (entry == table_rows || column >= hidden) return;
  if (begin > 0 && sorted[begin - 1].entry == entry) return;
  float* target = into + entry * hidden + column;
  Vector<float, N> total = load<float, N>(target);
  float sums[N] = {};
  const auto is_mine = [&](int place) { return place < count && sorted[place].entry == entry; };
  const auto is_whole = [&](int chunk) { return is_mine(chunk * kChunk + kChunk - 1); };
  const auto add_one_by_one = [&](int place, int end) {
    for (; place < end && is_mine(place); place += kRowsInFlight) {
      add_rows<T, kRowsInFlight>(sums, [&](int k) {
        const bool adds = place + k < end && is_mine(place + k);
        return adds ? gradient + sorted[place + k].row * hidden + column : nullptr;
      });
    }
  };
  const int first = divide_up(begin, kChunk);
  int chunk = first;
  add_one_by_one(begin, first * kChunk);
  for (; is_whole(chunk); chunk += kChunksInFlight) {
    add_rows<float, kChunksInFlight>(sums, [&](int k) {
      return is_whole(chunk + k) ? partial + (chunk + k) * hidden + column : nullptr;
    });
  }
  while (chunk > first && !is_whole(chunk - 1)) chunk--;
  add_one_by_one(chunk * kChunk, count);
#pragma unroll
  for (int j = 0; j < N; j++) total.at[j] += sums[j];
  store(target, total);
}

}  // namespace

// into [table_rows, hidden] += the rows of gradient [count, hidden] by entry; entries [count] outside
// of the table are left out. pairs [2, count] and partial fp32 [count / kChunk, hidden] to work in.
// hidden is a multiple of 8; count and table_rows are below 2^30.
extern "C" int embedding_gradient(const int64_t* entries, const void* gradient, float* into,
                                  void* pairs, float* partial, int64_t count, int64_t hidden,
                                  int64_t table_rows, int64_t dtype, cudaStream_t stream) {
  if (count == 0 || table_rows == 0) return cudaSuccess;
  if ((count | table_rows) >> 30) return cudaErrorInvalidValue;
  Pair *sorted = nullptr, *next = static_cast<Pair*>(pairs), *other = next + count;
  for (int shift = 0; table_rows >> shift; shift += kBits) {
    const cudaError_t error =
        launch_next(sort_kernel, dim3(divide_up(count, kSorters)), dim3(kSorters), 0, stream,
                    sorted ? nullptr : entries, sorted, next, count, table_rows, shift);
    if (error != cudaSuccess) return error;
    sorted = next;
    std::swap(next, other);
  }
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto* from = static_cast<const T*>(gradient);
    const int64_t across = divide_up(hidden, kThreads * vector_size<T>);
    if (count >= kChunk) {
      const cudaError_t error =
          launch_next(chunks_kernel<T>, dim3(count / kChunk, across), dim3(kThreads), 0, stream,
                      sorted, from, partial, hidden, table_rows);
      if (error != cudaSuccess) return error;
    }
    return launch_next(rows_kernel<T>, dim3(count, across), dim3(kThreads), 0, stream, sorted, from,
                       partial, into, count, hidden, table_rows);
  });
}
