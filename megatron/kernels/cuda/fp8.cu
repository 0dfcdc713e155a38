// 16-bit or fp32 tensors to fp8: largest magnitudes, casts, and casts with the transposed copy that
// the other products of a linear layer need. Scales stay on the device: a cast reads the largest
// magnitude and derives the scale itself. fp8 value = x * (largest fp8 / amax), saturating. A cast
// by the largest magnitude of another tensor measures its own on the way.
#include <cuda_fp8.h>

#include "amax.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;
constexpr float kSmallest = 1e-12f;  // amax of a tensor of zeros

enum Fp8 : int64_t { kE4M3 = 0, kE5M2 = 1 };  // kernels/fp8.py has the same

struct Scale {
  float forward, inverse;
};

// nan and inf stay: they make the whole tensor nan, as they should.
__device__ __forceinline__ Scale scale_of(float amax, int64_t fp8) {
  const float largest = fp8 == kE4M3 ? 448.f : 57344.f;
  const float held = amax < kSmallest ? kSmallest : amax;
  return {largest / held, held / largest};
}

__device__ unsigned block_max(unsigned value) {
  __shared__ unsigned parts[32];
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  __syncthreads();  // an earlier call may still read parts
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) value = max(value, parts[warp]);
  return value;
}

// amax (bits, zero before) = largest magnitude.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* __restrict__ x, int64_t size, unsigned* __restrict__ amax) {
  constexpr int N = vector_size<T>;
  const int64_t vectors = size / N, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  unsigned largest = 0;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t mine = i;
  for (; i + (kInFlight - 1) * stride < vectors; i += kInFlight * stride) {
    Vector<T, N> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) loaded[k] = load<T, N>(x + (i + k * stride) * N);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) largest = max(largest, magnitude_of(loaded[k]));
  }
  for (; i < vectors; i += stride) largest = max(largest, magnitude_of(load<T, N>(x + i * N)));
  if (mine < size % N) largest = max(largest, magnitude(to_float(x[vectors * N + mine])));
  raise_by_block(amax, largest);
}

template <int N>
__device__ __forceinline__ Vector<unsigned char, N> to_fp8(const float (&x)[N], int64_t fp8) {
  Vector<unsigned char, N> result;
  auto* pairs = reinterpret_cast<unsigned short*>(result.at);
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const float2 pair = make_float2(x[2 * j], x[2 * j + 1]);
    pairs[j] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, fp8 == kE4M3 ? __NV_E4M3 : __NV_E5M2);
  }
  return result;
}

// 8 elements from memory, in fp32.
template <typename T>
__device__ __forceinline__ void load_8(const T* from, float (&x)[8]) {
  constexpr int N = vector_size<T>;
#pragma unroll
  for (int part = 0; part < 8 / N; ++part) {
    const Vector<T, N> vector = load<T, N>(from + part * N);
#pragma unroll
    for (int j = 0; j < N; ++j) x[part * N + j] = to_float(vector.at[j]);
  }
}

// x times its factor. Measuring, largest rises to its magnitude, and what is not finite becomes nan:
// the factor comes from another tensor, and would let an inf pass as the largest number.
template <bool measures>
__device__ __forceinline__ float at_scale(float x, float factor, unsigned& largest) {
  if constexpr (measures) {
    const unsigned bits = magnitude(x);
    largest = max(largest, bits);
    if (bits >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
  }
  return x * factor;
}

// One scale for all; size is a multiple of 16. A thread makes 16 bytes at a time. Measuring, *found
// (bits) rises to the largest magnitude.
template <typename T, int64_t fp8, bool measures>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const T* __restrict__ x, unsigned char* __restrict__ y, int64_t size,
                const float* __restrict__ amax, float* __restrict__ inverse,
                unsigned* __restrict__ found) {
  const Scale scale = scale_of(*amax, fp8);
  unsigned largest = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * 16;
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 16;
  if (i == 0) *inverse = scale.inverse;
  for (; i < size; i += 2 * stride) {
    const bool second = i + stride < size;
    float values[2][2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_8(x + i + half * 8, values[0][half]);
      if (second) load_8(x + i + stride + half * 8, values[1][half]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !second) break;
      float scaled[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        scaled[j] = at_scale<measures>(values[k][j / 8][j % 8], scale.forward, largest);
      }
      store(y + i + k * stride, to_fp8(scaled, fp8));
    }
  }
  if constexpr (measures) raise_by_block(found, largest);
}

// A scale for each row [columns]: the row is read twice, the second time from the cache.
template <typename T, int64_t fp8>
__global__ void __launch_bounds__(kThreads)
    cast_rows_kernel(const T* __restrict__ x, unsigned char* __restrict__ y, int64_t columns,
                     float* __restrict__ inverse) {
  constexpr int N = vector_size<T>;
  const T* row = x + blockIdx.x * columns;
  unsigned largest = 0;
  for (int64_t i = threadIdx.x * N; i < columns; i += kThreads * N) {
    largest = max(largest, magnitude_of(load<T, N>(row + i)));
  }
  const Scale scale = scale_of(__uint_as_float(block_max(largest)), fp8);
  if (threadIdx.x == 0) inverse[blockIdx.x] = scale.inverse;
  for (int64_t i = threadIdx.x * 8; i < columns; i += kThreads * 8) {
    float values[8];
    load_8(row + i, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale.forward;
    store(y + blockIdx.x * columns + i, to_fp8(values, fp8));
  }
}

constexpr int kTile = 128;  // rows and columns of a block; a thread has 8 x 8 elements
constexpr int kGroups = kTile / 8;

// largest magnitudes of all rows and of all columns (bits, zero before), in one read.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_both_kernel(const T* __restrict__ x, int64_t rows, int64_t columns,
                     unsigned* __restrict__ of_rows, unsigned* __restrict__ of_columns) {
  __shared__ unsigned across[kTile];
  const int group = threadIdx.x % kGroups, strip = threadIdx.x / kGroups;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kTile) + group * 8;
  const int64_t row = blockIdx.y * static_cast<int64_t>(kTile) + strip * 8;
  if (threadIdx.x < kTile) across[threadIdx.x] = 0;
  __syncthreads();
  unsigned down[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float values[8] = {};
    if (row + i < rows && column < columns) load_8(x + (row + i) * columns + column, values);
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned bits = magnitude(values[j]);
      largest = max(largest, bits);
      down[j] = max(down[j], bits);
    }
#pragma unroll
    for (int mask = kGroups / 2; mask > 0; mask >>= 1) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    }
    if (group == 0 && row + i < rows) atomicMax(of_rows + row + i, largest);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) atomicMax(across + group * 8 + j, down[j]);
  __syncthreads();
  const int64_t mine = blockIdx.x * static_cast<int64_t>(kTile) + threadIdx.x;
  if (threadIdx.x < kTile && mine < columns) atomicMax(of_columns + mine, across[threadIdx.x]);
}

// Byte j of each of 8 rows of 8 bytes.
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

// 8 x 8 bytes of each thread of a block, turned and stored into transposed [columns, rows]. The
// tile, [column][row group], is swizzled so that no access has a bank conflict.
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

// y [columns, rows] = x^T, bytes; rows and columns are multiples of 16.
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

struct Scales {  // what a cast with its transpose reads and writes
  const float *of_rows, *of_columns;    // largest magnitudes
  float *inverse_rows, *inverse_columns;
  bool is_single;  // one for the whole tensor: the four have one element, used by both copies
};

// y [rows, columns] and its transpose, both from one read. rows and columns are multiples of 16.
// Measuring, *found (bits) rises to the largest magnitude of x.
template <typename T, int64_t fp8, bool measures>
__global__ void __launch_bounds__(kThreads)
    cast_transpose_kernel(const T* __restrict__ x, unsigned char* __restrict__ y,
                          unsigned char* __restrict__ transposed, int64_t rows, int64_t columns,
                          Scales scales, unsigned* __restrict__ found) {
  __shared__ uint2 tile[kTile][kGroups];
  const int group = threadIdx.x % kGroups, strip = threadIdx.x / kGroups;
  const int64_t left = blockIdx.x * static_cast<int64_t>(kTile);
  const int64_t top = blockIdx.y * static_cast<int64_t>(kTile);
  const int64_t column = left + group * 8, row = top + strip * 8;
  const bool inside = row < rows && column < columns;
  float values[8][8] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < 8; ++i) load_8(x + (row + i) * columns + column, values[i]);
  }
  uint2 packed[8];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!inside) break;
    const int64_t place = scales.is_single ? 0 : row + i;
    const Scale scale = scale_of(scales.of_rows[place], fp8);
    if (column == 0 && (!scales.is_single || row + i == 0)) {
      scales.inverse_rows[place] = scale.inverse;
    }
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      scaled[j] = at_scale<measures>(values[i][j], scale.forward, largest);
    }
    const auto bytes = to_fp8(scaled, fp8);
    packed[i] = *reinterpret_cast<const uint2*>(&bytes);
    store(y + (row + i) * columns + column, bytes);
  }
  if (!scales.is_single && inside) {  // other scales: other bytes
    float by_column[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const Scale scale = scale_of(scales.of_columns[column + j], fp8);
      if (row == 0) scales.inverse_columns[column + j] = scale.inverse;
      by_column[j] = scale.forward;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float scaled[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) scaled[j] = values[i][j] * by_column[j];
      const auto bytes = to_fp8(scaled, fp8);
      packed[i] = *reinterpret_cast<const uint2*>(&bytes);
    }
  }
  store_turned(tile, packed, transposed, left, top, rows, columns);
  if constexpr (measures) raise_by_block(found, largest);
}

// Calls f(type, integral constant of the fp8 format).
template <typename F>
cudaError_t with_formats(int64_t dtype, int64_t fp8, F f) {
  return with_type(dtype, [&](auto type) {
    if (fp8 == kE4M3) return f(type, std::integral_constant<int64_t, kE4M3>());
    if (fp8 == kE5M2) return f(type, std::integral_constant<int64_t, kE5M2>());
    return cudaErrorInvalidValue;
  });
}

// The same, with whether to measure.
template <typename F>
cudaError_t with_formats(int64_t dtype, int64_t fp8, bool measures, F f) {
  return with_formats(dtype, fp8, [&](auto type, auto format) {
    return measures ? f(type, format, std::true_type()) : f(type, format, std::false_type());
  });
}

// Blocks that keep every processor busy, no more than there is work for: 8 on each of the 132
// processors of an H200.
int64_t persistent_blocks(int64_t work) {
  return min(divide_up(work, kThreads), static_cast<int64_t>(8 * 132));
}

dim3 tiles(int64_t rows, int64_t columns) {
  return dim3(divide_up(columns, kTile), divide_up(rows, kTile));
}

}  // namespace

// amax = max(amax, largest magnitude of x [size]): zero it before.
extern "C" int fp8_amax(const void* x, float* amax, int64_t size, int64_t dtype,
                        cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    return launch(amax_kernel<T>, dim3(persistent_blocks(divide_up(size, vector_size<T>))),
                  kThreads, 0, stream, static_cast<const T*>(x), size,
                  reinterpret_cast<unsigned*>(amax));
  });
}

// Largest magnitudes of x [rows, columns] by row and by column, zero before; columns a multiple
// of 8.
extern "C" int fp8_amax_both(const void* x, float* of_rows, float* of_columns, int64_t rows,
                             int64_t columns, int64_t dtype, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    return launch(amax_both_kernel<T>, tiles(rows, columns), kThreads, 0, stream,
                  static_cast<const T*>(x), rows, columns, reinterpret_cast<unsigned*>(of_rows),
                  reinterpret_cast<unsigned*>(of_columns));
  });
}

// y = x in fp8, [size], a multiple of 16; inverse: what brings y back. With found, that rises to the
// largest magnitude of x.
extern "C" int fp8_cast(const void* x, void* y, const float* amax, float* inverse, float* found,
                        int64_t size, int64_t dtype, int64_t fp8, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return with_formats(dtype, fp8, found != nullptr, [&](auto type, auto format, auto measures) {
    using T = decltype(type);
    return launch(cast_kernel<T, decltype(format)::value, decltype(measures)::value>,
                  dim3(persistent_blocks(divide_up(size, 16))), kThreads, 0, stream,
                  static_cast<const T*>(x), static_cast<unsigned char*>(y), size, amax, inverse,
                  reinterpret_cast<unsigned*>(found));
  });
}

// y = x in fp8 with a scale for each row of x [rows, columns]; columns a multiple of 16.
extern "C" int fp8_cast_rows(const void* x, void* y, float* inverse, int64_t rows,
                             int64_t columns, int64_t dtype, int64_t fp8, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return with_formats(dtype, fp8, [&](auto type, auto format) {
    using T = decltype(type);
    return launch(cast_rows_kernel<T, decltype(format)::value>, dim3(rows), kThreads, 0, stream,
                  static_cast<const T*>(x), static_cast<unsigned char*>(y), columns, inverse);
  });
}

// y [rows, columns] and transposed [columns, rows]; both sizes multiples of 16. With
// amax_columns null one scale serves both, and found may be there, which rises to the largest
// magnitude of x; else y has one a row and transposed one a column.
extern "C" int fp8_cast_transpose(const void* x, void* y, void* transposed, const float* amax,
                                  const float* amax_columns, float* inverse,
                                  float* inverse_columns, float* found, int64_t rows,
                                  int64_t columns, int64_t dtype, int64_t fp8,
                                  cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const Scales scales{amax, amax_columns, inverse, inverse_columns, amax_columns == nullptr};
  return with_formats(dtype, fp8, found != nullptr, [&](auto type, auto format, auto measures) {
    using T = decltype(type);
    return launch(cast_transpose_kernel<T, decltype(format)::value, decltype(measures)::value>,
                  tiles(rows, columns), kThreads, 0, stream, static_cast<const T*>(x),
                  static_cast<unsigned char*>(y), static_cast<unsigned char*>(transposed), rows,
                  columns, scales, reinterpret_cast<unsigned*>(found));
  });
}

// y [columns, rows] = x^T, bytes; both sizes multiples of 16.
extern "C" int fp8_transpose(const void* x, void* y, int64_t rows, int64_t columns,
                             cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  return launch(transpose_kernel, tiles(rows, columns), kThreads, 0, stream,
                static_cast<const unsigned char*>(x), static_cast<unsigned char*>(y), rows,
                columns);
}
