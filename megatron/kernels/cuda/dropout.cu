// residual + dropout(x + bias). The mask is a function of (seed, element), so it is not stored.
#include "column_sums.cuh"

constexpr int kGroup = 8;        // elements per block of random words, 16 bits each
constexpr int kRowsAtOnce = 2;
constexpr int kRowsAtOnceBackward = 4;
constexpr int kResidency = 4;  // groups of 256 threads that fit on a multiprocessor in backward

// Philox4x32-10 (Salmon et al., 2011).
__device__ __forceinline__ uint4 philox(uint64_t counter, uint64_t key) {
  uint4 x = make_uint4(static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32), 0, 0);
  unsigned k0 = static_cast<unsigned>(key), k1 = static_cast<unsigned>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const unsigned high0 = __umulhi(0xD2511F53u, x.x), low0 = 0xD2511F53u * x.x;
    const unsigned high1 = __umulhi(0xCD9E8D57u, x.z), low1 = 0xCD9E8D57u * x.z;
    x = make_uint4(high1 ^ x.y ^ k0, low1, high0 ^ x.w ^ k1, low0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return x;
}

// The elements of a group that are kept. An element is dropped for `drop` of 65536 random values.
struct Kept {
  unsigned words[4], high;

  __device__ __forceinline__ Kept(uint64_t group, uint64_t seed, unsigned drop) : high(drop << 16) {
    const uint4 all = philox(group, seed);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  }
  __device__ __forceinline__ bool operator[](int i) const {
    return (i % 2 ? words[i / 2] : words[i / 2] << 16) >= high;
  }
};

template <typename X, typename W>
__global__ void __launch_bounds__(256)
    bias_dropout_add_forward_kernel(const W* __restrict__ x, const W* __restrict__ bias,
                                    const X* __restrict__ residual,
                                    const uint64_t* __restrict__ seed, X* __restrict__ out,
                                    int64_t rows, int columns, unsigned drop, float scale) {
  constexpr int V = kGroup, R = kRowsAtOnce;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (column >= columns) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * R;
  Vector<W, V> in[R], b{};
  Vector<X, V> base[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (first + r >= rows) break;
    in[r] = load<W, V>(x + (first + r) * columns + column);
    base[r] = load<X, V>(residual + (first + r) * columns + column);
  }
  if (bias) b = load<W, V>(bias + column);
  const uint64_t key = *seed;
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (first + r >= rows) break;
    const int64_t at = (first + r) * columns + column;
    const Kept kept(at / V, key, drop);
    const auto values = to_floats(in[r]), shifts = to_floats(b), onto = to_floats(base[r]);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float value = bias ? values.at[i] + shifts.at[i] : values.at[i];
      base[r].at[i] = from_float<X>(onto.at[i] + (kept[i] ? value * scale : 0.f));
    }
    store(out + at, base[r]);
  }
}

// With SUM, all threads of a multiprocessor form a block, which adds up the sums of its rows (y).
template <typename X, typename W, bool SUM>
__global__ void __launch_bounds__(SUM ? 256 * kResidency : 256, SUM ? 1 : kResidency)
    bias_dropout_add_backward_kernel(const X* __restrict__ grad, const uint64_t* __restrict__ seed,
                                     W* __restrict__ grad_x, float* __restrict__ partial,
                                     int64_t rows, int columns, unsigned drop, float scale) {
  constexpr int V = kGroup, R = kRowsAtOnceBackward * 2 / sizeof(X);  // limited by registers
  const int mine = threadIdx.x * V, left = blockIdx.y * blockDim.x * V, column = left + mine;
  const uint64_t key = *seed;
  float sums[1][V] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y * R;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * R;
  if (column >= columns) first = rows;
  for (; first < rows; first += step) {
    Vector<X, V> incoming[R] = {};  // rows after the last one add nothing
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (first + r < rows) incoming[r] = load<X, V>(grad + (first + r) * columns + column);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int64_t at = (first + r) * columns + column;
      const Kept kept(at / V, key, drop);
      const auto values = to_floats(incoming[r]);
      Vector<W, V> out;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float value = kept[i] ? values.at[i] * scale : 0.f;
        if (SUM) sums[0][i] += value;
        out.at[i] = from_float<W>(value);
      }
      if (first + r < rows) store(grad_x + at, out);
    }
  }
  if (SUM) {
    float* to = partial + static_cast<int64_t>(blockIdx.x) * columns + left;
    store_block_sums(to, sums, mine, columns - left);
  }
  allow_next();
}
