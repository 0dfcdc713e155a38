// Attention of one new token per sequence over cached latent vectors, which all heads share, in 16
// bits on tensor cores. A vector is the key, and its first channels are the value.
//
// As in paged_attention.cu, keys or channels are the rows of a product and heads are its columns,
// and a lane reads 16 bytes at a time. A vector serves many heads, so a block first computes all
// weights of its part, one warp per 32 keys, and stores them in shared memory. Then each warp
// computes its own channels of the result, over all keys of the part. The second read of the
// vectors hits the L2 cache.
#include "paged_attention.cuh"
#include "tensor_cores.cuh"

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kColumns = 8;      // heads of a product
constexpr int kMostHeads = 64;   // of a block
constexpr int kMostRank = 512;   // kWarps * 64
constexpr int kPadding = 32;     // elements between two heads' queries, to avoid bank conflicts
static_assert(kWarps * 32 == kPart, "each lane of a block has a key");

using Registers = Vector<uint32_t, 4>;  // 8 elements

template <typename T>
__device__ __forceinline__ Registers load_or_zero(const T* vectors, int64_t slot, int width,
                                                  int channel) {
  if (slot < 0 || channel >= width) return Registers{};
  return *reinterpret_cast<const Registers*>(vectors + slot * width + channel);
}

template <typename Op>  // over the lanes with the same q
__device__ __forceinline__ float reduce_rows(float value) {
#pragma unroll
  for (int mask = 4; mask < 32; mask <<= 1) {
    value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

// Copies queries [heads, width] to shared memory, each padded with zeros to `padded` channels.
// Missing heads of the last product are zeros.
template <typename T>
__device__ __forceinline__ void copy_queries(T* to, const T* query, int heads, int columns,
                                             int width, int padded) {
  const int vectors = padded / 8;
  for (int i = threadIdx.x; i < columns * vectors; i += kThreads) {
    const int head = i / vectors, channel = (i - head * vectors) * 8;
    *reinterpret_cast<Registers*>(to + head * (padded + kPadding) + channel) =
        load_or_zero(query, head < heads ? head : -1, width, channel);
  }
}

// A block handles one row, one part of its keys, and up to C * kColumns heads. Shared memory holds
// the queries and then the weights, [kPart / 16, C, 32 lanes, 2 registers].
template <typename T, int C>
__global__ void __launch_bounds__(kThreads, 1)
    latent_attention_kernel(const T* __restrict__ query, const T* __restrict__ vectors,
                            const int* tables, const int* __restrict__ lengths,
                            float* __restrict__ partial, T* __restrict__ out,
                            const float* __restrict__ sinks, int all_heads, int width, int rank,
                            int table_width, int block_size, int window, float scale,
                            float softcap) {
  const Cache<T> cache{vectors, vectors, tables, table_width, block_size};
  scale *= kLog2E;
  softcap *= kLog2E;
  __shared__ float warp_largest[kWarps][kMostHeads], warp_total[kWarps][kMostHeads];
  const int row = blockIdx.z, first_head = blockIdx.y * C * kColumns;
  const int heads = min(C * kColumns, all_heads - first_head);
  const int64_t row_head = static_cast<int64_t>(row) * all_heads + first_head;
  const int begin = blockIdx.x * kPart, length = lengths[row];
  if (length == 0 && begin == 0) {
    for (int i = threadIdx.x; i < heads * rank; i += kThreads) {
      out[row_head * rank + i] = from_float<T>(0.f);
    }
  }
  const int seen = first_seen(length, window);
  if (begin >= length || begin + kPart <= seen) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const int count = min(length - begin, kPart), first = 32 * warp;  // keys
  const int steps = (width + 31) / 32, padded = 32 * steps;

  T* queries = dynamic_shared<T>();
  uint32_t* weights =
      reinterpret_cast<uint32_t*>(queries + C * kColumns * (padded + kPadding));
  int64_t* slots = reinterpret_cast<int64_t*>(weights + kPart / 16 * C * 64);
  const int64_t own_slot = first + lane < count ? cache.slot(row, begin + first + lane) : -1;
  slots[threadIdx.x] = own_slot;
  copy_queries(queries, query + row_head * width, heads, C * kColumns, width, padded);
  __syncthreads();

  float scores[C][2][4] = {};  // [c][t][2 i + e]: key r + 8 i of tile t, head 2 q + e of product c
  if (first < count) {
    int64_t from[2][2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int half = 0; half < 2; half++) from[t][half] = slots[first + 16 * t + 8 * half + r];
    }
    Registers keys[2][2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        keys[t][half] = load_or_zero(vectors, from[t][half], width, 8 * q);
      }
    }
    for (int j = 0; j < steps; j++) {
      Registers next[2][2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          next[t][half] = load_or_zero(vectors, from[t][half], width, 32 * (j + 1) + 8 * q);
        }
      }
#pragma unroll
      for (int c = 0; c < C; c++) {
        const Registers of_query = *reinterpret_cast<const Registers*>(
            queries + (c * kColumns + r) * (padded + kPadding) + 32 * j + 8 * q);
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const Registers &upper = keys[t][0], &lower = keys[t][1];
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const uint32_t a[4] = {upper.at[i], lower.at[i], upper.at[i + 1], lower.at[i + 1]};
            const uint32_t b[2] = {of_query.at[i], of_query.at[i + 1]};
            multiply_add(scores[c][t], a, b, T{});
          }
        }
      }
#pragma unroll
      for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int half = 0; half < 2; half++) keys[t][half] = next[t][half];
      }
    }
  }
#pragma unroll
  for (int c = 0; c < C; c++) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first + 16 * t + r + i / 2 * 8;
        const bool is_key = key < count && begin + key >= seen;
        scores[c][t][i] = is_key ? bounded(scores[c][t][i] * scale, softcap) : -INFINITY;
        largest[i % 2] = fmaxf(largest[i % 2], scores[c][t][i]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      largest[e] = reduce_rows<Max>(largest[e]);
      if (r == 0) warp_largest[warp][c * kColumns + 2 * q + e] = largest[e];
    }
  }
  __syncthreads();

#pragma unroll
  for (int c = 0; c < C; c++) {
    float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      for (int w = 0; w < kWarps; w++) {
        largest[e] = fmaxf(largest[e], warp_largest[w][c * kColumns + 2 * q + e]);
      }
    }
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[c][t][i] = exp2f(scores[c][t][i] - largest[i % 2]);
        total[i % 2] += scores[c][t][i];
      }
      const Vector<uint32_t, 2> both{{transposed(pack<T>(scores[c][t][0], scores[c][t][1])),
                                      transposed(pack<T>(scores[c][t][2], scores[c][t][3]))}};
      store(weights + (((2 * warp + t) * C + c) * 32 + lane) * 2, both);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      total[e] = reduce_rows<Sum>(total[e]);
      if (r == 0) warp_total[warp][c * kColumns + 2 * q + e] = total[e];
    }
  }
  __syncthreads();

  // sums[c][i]: in product i, row r is channel 64 warp + 8 r + 2 i, and row r + 8 the one after it.
  const int channel = 64 * warp + 8 * r, tiles = (count + 15) / 16;
  if (64 * warp >= rank) return;
  float sums[C][4][4] = {};
  const int own = 2 * q;  // keys 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of a tile
  Registers values[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    values[k] = load_or_zero(vectors, slots[own + k % 2 + k / 2 * 8], width, channel);
  }
  for (int tile = 0; tile < tiles; tile++) {
    Registers next[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int key = 16 * (tile + 1) + own + k % 2 + k / 2 * 8;
      next[k] = load_or_zero(vectors, key < kPart ? slots[key] : -1, width, channel);
    }
    uint32_t a[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i][0] = low_halves(values[0].at[i], values[1].at[i]);
      a[i][1] = high_halves(values[0].at[i], values[1].at[i]);
      a[i][2] = low_halves(values[2].at[i], values[3].at[i]);
      a[i][3] = high_halves(values[2].at[i], values[3].at[i]);
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
      const auto both = load<uint32_t, 2>(weights + ((tile * C + c) * 32 + lane) * 2);
      const uint32_t b[2] = {both.at[0], both.at[1]};
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_add(sums[c][i], a[i], b, T{});
    }
#pragma unroll
    for (int k = 0; k < 4; k++) values[k] = next[k];
  }
  if (channel >= rank) return;
  const int working = (count + 31) / 32;
#pragma unroll
  for (int c = 0; c < C; c++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = c * kColumns + 2 * q + e;
      if (head >= heads) continue;
      float total = 0.f, most = -INFINITY;
      for (int w = 0; w < working; w++) {
        total += warp_total[w][head];
        most = fmaxf(most, warp_largest[w][head]);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        tell(out, partial, row_head + head, rank, channel + i, length,
             sums[c][i / 2][i % 2 * 2 + e], most, total, sinks, first_head + head);
      }
    }
  }
}
