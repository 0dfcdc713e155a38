// The gradient of an embedding table, added to an fp32 gradient buffer. A stable sort groups the
// rows of each entry, which are then added in this order regardless of the order of blocks. It is a
// radix sort, with a kernel for each digit of an entry. A frequent entry has thousands of rows, so
// chunks of the sorted rows are added in parallel, and then the sums that belong to the same entry.
#include "common.cuh"

namespace {

constexpr int kBits = 10;  // bits per digit
constexpr int kSorters = 1 << kBits;
constexpr int kThreads = 128;
constexpr int kChunk = 32;  // sorted rows, as in weight_gradient.py
constexpr int kRowsInFlight = 2, kPartsInFlight = 8;

struct alignas(8) Pair {
  int entry, row;  // the row of the gradient
};

// Returns the sum of `count` over the threads before this one.
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

// One pass of a stable sort, by the digit that begins at bit `shift`. It sorts `entries` if they
// are given (the row of an entry is its index), otherwise `from`. Every block counts all digits
// itself, so that no block waits for another, and moves one pair per thread. Entries outside the
// table come last, as entry table_rows.
__global__ void __launch_bounds__(kSorters)
    sort_kernel(const int64_t* __restrict__ entries, const Pair* __restrict__ from,
                Pair* __restrict__ to, int count, int table_rows, int shift) {
  constexpr int kBins = kSorters;
  __shared__ int earlier[kBins], others[kBins];  // counts of digits before this block, and others
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
  for (int warp = 0; warp < kSorters / 32; warp++) {  // in order
    __syncthreads();
    if (thread / 32 != warp) continue;
    if (moves) to[earlier[digit] + rank] = mine;
    __syncwarp();
    if (moves && rank == 0) earlier[digit] += __popc(same);
  }
}

// Adds N columns of M rows in order. row(k) points to the columns in row k, or is null.
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

template <int N>
__device__ __forceinline__ void add_to(float* target, Vector<float, N> total,
                                       const float (&sums)[N]) {
#pragma unroll
  for (int j = 0; j < N; j++) total.at[j] += sums[j];
  store(target, total);
}

// If the rows of an entry or a chunk begin at index blockIdx.x of `sorted`, this block adds the
// entry's rows in the chunk, for the columns of blockIdx.y. The sum goes to the table or, if the
// entry also has rows in other chunks, to parts [chunk][whether its rows begin in the chunk].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const Pair* __restrict__ sorted, const T* __restrict__ gradient,
                float* __restrict__ parts, float* __restrict__ into, int count, int64_t hidden,
                int table_rows) {
  constexpr int N = vector_size<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  const int begin = blockIdx.x, chunk = begin / kChunk;
  const int end = min((chunk + 1) * kChunk, count);
  allow_next();
  wait_for_previous();
  Pair pairs[kRowsInFlight];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int k = 0; k < kRowsInFlight; k++) pairs[k] = sorted[min(first + k, end - 1)];
  };
  fetch(begin);
  const int entry = pairs[0].entry;
  const bool begins = begin == 0 || sorted[begin - 1].entry != entry;
  if (entry == table_rows || column >= hidden || (!begins && begin % kChunk != 0)) return;
  float* target = into + entry * hidden + column;
  const auto old = load<float, N>(target);
  float sums[N] = {};
  bool goes_on = true;
  for (int first = begin; goes_on && first < end; first += kRowsInFlight) {
    if (first > begin) fetch(first);
    add_rows<T, kRowsInFlight>(sums, [&](int k) {
      const bool inside = first + k < end;
      goes_on = goes_on && (!inside || pairs[k].entry == entry);
      return inside && goes_on ? gradient + pairs[k].row * hidden + column : nullptr;
    });
  }
  goes_on = goes_on && end < count && sorted[end].entry == entry;
  if (begins && !goes_on) {
    add_to<N>(target, old, sums);
  } else {
    add_to<N>(parts + (2 * int64_t{chunk} + begins) * hidden + column, Vector<float, N>{}, sums);
  }
}

// If the last entry of chunk blockIdx.x begins in this chunk and continues in the next one, this
// block adds the entry's parts to the table, for the columns of blockIdx.y.
__global__ void __launch_bounds__(kThreads)
    parts_kernel(const Pair* __restrict__ sorted, const float* __restrict__ parts,
                 float* __restrict__ into, int count, int64_t hidden, int table_rows) {
  constexpr int N = 4;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  const int begin = blockIdx.x * kChunk, end = begin + kChunk;
  wait_for_previous();
  const int entry = sorted[end - 1].entry;
  if (entry == table_rows || sorted[end].entry != entry || column >= hidden) return;
  if (begin > 0 && sorted[begin - 1].entry == entry) return;
  float* target = into + entry * hidden + column;
  const auto old = load<float, N>(target);
  const float* from = parts + 2 * int64_t{blockIdx.x} * hidden + column;
  const auto first = load<float, N>(from + hidden);
  float sums[N] = {first.at[0], first.at[1], first.at[2], first.at[3]};
  bool goes_on = true;
  for (int chunk = 1; goes_on; chunk += kPartsInFlight) {
    int entries[kPartsInFlight];
#pragma unroll
    for (int k = 0; k < kPartsInFlight; k++) {
      const int place = begin + (chunk + k) * kChunk;
      entries[k] = place < count ? sorted[place].entry : table_rows;
    }
    add_rows<float, kPartsInFlight>(sums, [&](int k) {
      goes_on = goes_on && entries[k] == entry;
      return goes_on ? from + 2 * (chunk + k) * hidden : nullptr;
    });
  }
  add_to<N>(target, old, sums);
}

}  // namespace
