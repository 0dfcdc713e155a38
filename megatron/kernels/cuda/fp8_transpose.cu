// Casts of 16-bit or fp32 tensors to fp8, with the transposed copies that the backward pass of a
// linear layer needs.
#include "fp8.cuh"

namespace {

constexpr int kTile = 128;  // rows and columns per block; a thread has 8 x 8 elements
constexpr int kGroups = kTile / 8;

constexpr int kStripWarps = 2;  // warps side by side; the block's other warps are below them
constexpr int kStripColumns = kStripWarps * 32 * 8;
constexpr int kStripRows = 32;  // rows per warp
constexpr int kStripTiers = kThreads / 32 / kStripWarps;

// Computes the largest magnitudes (bits, initially zero) of all rows and columns of each matrix in
// a stack, reading x once. A thread keeps 8 columns and loops over rows, loading several rows
// before it uses the first.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    amax_both_kernel(const T* __restrict__ x, int64_t rows, int64_t columns,
                     unsigned* __restrict__ of_rows, unsigned* __restrict__ of_columns) {
  constexpr int N = vector_size<T>, R = 16 / sizeof(T);
  __shared__ unsigned down_of[kStripTiers][kStripColumns];
  __shared__ unsigned across_of[kStripWarps][kStripTiers * kStripRows];
  wait_for_previous();
  const int64_t matrix = blockIdx.z;
  x += matrix * rows * columns;
  of_rows += matrix * rows;
  of_columns += matrix * columns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int side = warp % kStripWarps, tier = warp / kStripWarps;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kStripColumns) + side * 256 + lane * 8;
  const int64_t top = (blockIdx.y * static_cast<int64_t>(kStripTiers) + tier) * kStripRows;
  const bool inside = column < columns;
  Magnitudes<T, N> down[8 / N] = {};
  for (int first = 0; first < kStripRows; first += R) {
    Vector<T, N> held[R][8 / N] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!inside || top + first + r >= rows) continue;
#pragma unroll
      for (int part = 0; part < 8 / N; ++part) {
        held[r][part] = load<T, N>(x + (top + first + r) * columns + column + part * N);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      unsigned largest = 0;
#pragma unroll
      for (int part = 0; part < 8 / N; ++part) {
        largest = max(largest, magnitude_of(held[r][part]));
        down[part].raise(held[r][part]);
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (lane == 0) across_of[side][tier * kStripRows + first + r] = largest;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) down_of[tier][side * 256 + lane * 8 + j] = down[j / N].of(j % N);
  __syncthreads();
  allow_next();
  for (int i = threadIdx.x; i < kStripTiers * kStripRows; i += kThreads) {
    const int64_t row = blockIdx.y * static_cast<int64_t>(kStripTiers * kStripRows) + i;
    unsigned largest = across_of[0][i];
#pragma unroll
    for (int k = 1; k < kStripWarps; ++k) largest = max(largest, across_of[k][i]);
    if (row < rows) atomicMax(of_rows + row, largest);
  }
  for (int i = threadIdx.x; i < kStripColumns; i += kThreads) {
    const int64_t mine = blockIdx.x * static_cast<int64_t>(kStripColumns) + i;
    unsigned largest = down_of[0][i];
#pragma unroll
    for (int k = 1; k < kStripTiers; ++k) largest = max(largest, down_of[k][i]);
    if (mine < columns) atomicMax(of_columns + mine, largest);
  }
}

// Returns byte j of each of 8 rows of 8 bytes.
__device__ __forceinline__ uint2 column_of(const uint2 (&rows)[8], int j) {
  unsigned bytes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned half = j < 4 ? rows[i].x : rows[i].y;
    bytes[i] = half >> (8 * (j % 4));
  }
  const auto join = [&](int i) {
    const unsigned low = __byte_perm(bytes[i], bytes[i + 1], 0x0040);
    const unsigned high = __byte_perm(bytes[i + 2], bytes[i + 3], 0x0040);
    return __byte_perm(low, high, 0x5410);
  };
  return make_uint2(join(0), join(4));
}

// Transposes 8 x 8 bytes of each thread of a block and stores them into transposed [columns, rows].
// The tile, [column][row group], is swizzled so that no access has a bank conflict.
__device__ __forceinline__ void store_turned(uint2 (&tile)[kTile][kGroups],
                                             const uint2 (&packed)[8],
                                             unsigned char* __restrict__ transposed, int64_t left,
                                             int64_t top, int64_t rows, int64_t columns) {
  const int group = threadIdx.x % kGroups, strip = threadIdx.x / kGroups;
#pragma unroll
  for (int j = 0; j < 8; ++j) tile[group * 8 + j][strip ^ group] = column_of(packed, j);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTile * kTile / 16 / kThreads; ++k) {
    const int place = k * kThreads + threadIdx.x;
    const int line = place / (kGroups / 2), pair = place % (kGroups / 2);
    if (left + line >= columns || top + pair * 16 >= rows) continue;
    const int turn = line / 8;
    const uint2 first = tile[line][(2 * pair) ^ turn], second = tile[line][(2 * pair + 1) ^ turn];
    *reinterpret_cast<uint4*>(transposed + (left + line) * rows + top + pair * 16) =
        make_uint4(first.x, first.y, second.x, second.y);
  }
}

// y [columns, rows] = x^T for bytes; rows and columns are multiples of 16.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const unsigned char* __restrict__ x, unsigned char* __restrict__ y,
                     int64_t rows, int64_t columns) {
  __shared__ uint2 tile[kTile][kGroups];
  const int64_t left = blockIdx.x * static_cast<int64_t>(kTile);
  const int64_t top = blockIdx.y * static_cast<int64_t>(kTile);
  const int64_t column = left + threadIdx.x % kGroups * 8;
  const int64_t row = top + threadIdx.x / kGroups * 8;
  uint2 packed[8] = {};
  if (row < rows && column < columns) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      packed[i] = *reinterpret_cast<const uint2*>(x + (row + i) * columns + column);
    }
  }
  store_turned(tile, packed, y, left, top, rows, columns);
}

struct Scales {  // read and written by a cast with its transpose
  const float *of_rows, *of_columns;    // largest magnitudes
  float *inverse_rows, *inverse_columns;
  bool is_single;  // one scale for the whole tensor, in all four pointers
};

// Computes y [rows, columns] and its transpose for each matrix in a stack, reading x once. rows and
// columns are multiples of 16. A stack of several matrices has a scale for every row and column. If
// `measures` is set, *found (bits) is raised to the largest magnitude of x. The loads of a thread
// go to shared memory, because with loads into registers too few threads would run to keep memory
// busy. Blocks go from the end of x to its beginning, because the end was written or read last and
// is still in the cache.
template <typename T, int64_t fp8, bool measures>
__global__ void __launch_bounds__(kThreads, 4)
    cast_transpose_kernel(const T* __restrict__ x, unsigned char* __restrict__ y,
                          unsigned char* __restrict__ transposed, int64_t rows, int64_t columns,
                          const float* of_rows, const float* of_columns, float* inverse_rows,
                          float* inverse_columns, unsigned* __restrict__ found) {
  const Scales scales{of_rows, of_columns, inverse_rows, inverse_columns, of_columns == nullptr};
  using Eight = Vector<T, 8>;
  __shared__ float factors[2][kTile];  // of rows, of columns
  auto* memory = dynamic_shared<unsigned char>();
  auto& waiting = *reinterpret_cast<Eight(*)[8][kThreads]>(memory);
  auto& tile = *reinterpret_cast<uint2(*)[kTile][kGroups]>(memory);  // once all loads are used
  const int group = threadIdx.x % kGroups, strip = threadIdx.x / kGroups;
  const int64_t left = (gridDim.x - 1 - blockIdx.x) * static_cast<int64_t>(kTile);
  const int64_t top = (gridDim.y - 1 - blockIdx.y) * static_cast<int64_t>(kTile);
  const int64_t column = left + group * 8, row = top + strip * 8;
  const int64_t before = blockIdx.z * rows * columns;
  x += before;
  y += before;
  transposed += before;
  wait_for_previous();
  const bool inside = row < rows && column < columns;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!inside) break;
    const T* from = x + (row + i) * columns + column;
#pragma unroll
    for (int j = 0; j < 8; j += vector_size<T>) {
      copy_async_16(&waiting[i][threadIdx.x].at[j], from + j);
    }
  }
  copy_async_commit();
  float factor = 0.f;
  if (scales.is_single) {
    const Scale scale = scale_of(*scales.of_rows, fp8);
    if (threadIdx.x == 0 && left == 0 && top == 0) *scales.inverse_rows = scale.inverse;
    factor = scale.forward;
  } else {  // one thread per row and per column of the tile
    const bool of_column = threadIdx.x >= kTile;
    const int64_t place = (of_column ? left : top) + threadIdx.x % kTile;
    if (place < (of_column ? columns : rows)) {
      const int64_t of_all = blockIdx.z * (of_column ? columns : rows) + place;
      const Scale scale = scale_of((of_column ? scales.of_columns : scales.of_rows)[of_all], fp8);
      factors[of_column][threadIdx.x % kTile] = scale.forward;
      if (!of_column && left == 0) scales.inverse_rows[of_all] = scale.inverse;
      if (of_column && top == 0) scales.inverse_columns[of_all] = scale.inverse;
    }
    __syncthreads();
  }
  float by_column[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) by_column[j] = scales.is_single ? 0.f : factors[1][group * 8 + j];
  copy_async_wait<0>();
  uint2 packed[8];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!inside) break;
    const Eight& values = waiting[i][threadIdx.x];
    if (!scales.is_single) factor = factors[0][strip * 8 + i];
    auto bytes = cast_8<measures>(values, factor, fp8, largest);
    store(y + (row + i) * columns + column, bytes);
    if (!scales.is_single) {  // with other scales, the bytes differ
      auto scaled = to_floats(values);
#pragma unroll
      for (int j = 0; j < 8; ++j) scaled.at[j] *= by_column[j];
      bytes = to_fp8(scaled.at, fp8);
    }
    packed[i] = *reinterpret_cast<const uint2*>(&bytes);
  }
  __syncthreads();
  store_turned(tile, packed, transposed, left, top, rows, columns);
  if constexpr (measures) raise_by_block(found, largest);
}


}  // namespace
