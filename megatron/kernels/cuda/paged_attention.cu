// Attention of one new token per sequence over a key-value cache in blocks, in 16 bits on tensor
// cores. In a matrix product, keys are the rows and the heads that share a key are the columns, so
// a key is read once for all of these heads, from memory directly into the product's registers.
// This works because channels may be summed in any order and values may be in any row of the
// result.
#include "paged_attention.cuh"
#include "tensor_cores.cuh"

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kTiles = 2;  // tiles of 16 keys per warp, so that each of 32 lanes has a key
constexpr int kHeads = 8;  // columns of a product
static_assert(kWarps * kTiles * 16 == kPart, "a block goes through its part once");

using Registers = Vector<uint32_t, 4>;  // 8 elements

// Loads 8 channels of a slot, or zeros if the slot or the channels do not exist.
template <typename T>
__device__ __forceinline__ Registers load_or_zero(const T* from, int64_t slot, int64_t stride,
                                                  int channel, int head_size) {
  if (slot < 0 || channel >= head_size) return Registers{};
  return *reinterpret_cast<const Registers*>(from + slot * stride + channel);
}

// scores[t] += keys (rows) times heads (columns) of this warp's tiles. `query` points to the first
// head.
template <typename T, int D>
__device__ __forceinline__ void score(float (&scores)[kTiles][4], const T* query, int heads,
                                      const T* keys, int64_t own_slot, int64_t stride,
                                      int head_size) {
  const int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  // A lane holds 8 of every 32 channels, from 8q on, of the query and of the keys.
  Registers of_query[D / 32], of_keys[kTiles][2][D / 32];
#pragma unroll
  for (int t = 0; t < kTiles; t++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t slot = __shfl_sync(0xffffffffu, own_slot, 16 * t + 8 * half + r);
#pragma unroll
      for (int j = 0; j < D / 32; j++) {
        of_keys[t][half][j] = load_or_zero(keys, slot, stride, 32 * j + 8 * q, head_size);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    of_query[j] = load_or_zero(query, r < heads ? r : -1, head_size, 32 * j + 8 * q, head_size);
  }
#pragma unroll
  for (int t = 0; t < kTiles; t++) {
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const Registers &upper = of_keys[t][0][j], &lower = of_keys[t][1][j];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {upper.at[i], lower.at[i], upper.at[i + 1], lower.at[i + 1]};
        const uint32_t b[2] = {of_query[j].at[i], of_query[j].at[i + 1]};
        multiply_add(scores[t], a, b, T{});
      }
    }
  }
}

// sums[j][i] += values (channels are rows) times weights (heads are columns) of a tile. In product
// i of channel group j (64 channels), row r is channel 64 j + 8 r + 2 i, and row r + 8 is the
// channel after it.
template <typename T, int D>
__device__ __forceinline__ void add_values(float (&sums)[D / 64][4][4], const uint32_t (&weights)[2],
                                           const T* values, int64_t own_slot, int tile,
                                           int64_t stride, int head_size) {
  const int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  Registers of_values[D / 64][4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int key = 16 * tile + 2 * q + k % 2 + k / 2 * 8;
    const int64_t slot = __shfl_sync(0xffffffffu, own_slot, key);
#pragma unroll
    for (int j = 0; j < D / 64; j++) {
      of_values[j][k] = load_or_zero(values, slot, stride, 64 * j + 8 * r, head_size);
    }
  }
#pragma unroll
  for (int j = 0; j < D / 64; j++) {
    const Registers(&v)[4] = of_values[j];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t a[4] = {
          low_halves(v[0].at[i], v[1].at[i]), high_halves(v[0].at[i], v[1].at[i]),
          low_halves(v[2].at[i], v[3].at[i]), high_halves(v[2].at[i], v[3].at[i])};
      multiply_add(sums[j][i], a, weights, T{});
    }
  }
}

template <typename Op>  // over the lanes with the same q
__device__ __forceinline__ float reduce_rows(float value) {
#pragma unroll
  for (int mask = 4; mask < 32; mask <<= 1) {
    value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

// A block handles one row, one part of its keys, and up to kHeads of the heads that share a key. A
// warp handles 32 of the keys. D is at least head_size.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    paged_attention_kernel(const T* __restrict__ query, const T* keys, const T* values,
                           const int* tables, const int* __restrict__ lengths,
                           float* __restrict__ partial, T* __restrict__ out,
                           const float* __restrict__ sinks, int groups, int per_group,
                           int head_size, int table_width, int block_size, int window,
                           float scale, float softcap) {
  const Cache<T> cache{keys, values, tables, table_width, block_size};
  scale *= kLog2E;
  softcap *= kLog2E;
  __shared__ float warp_largest[kWarps][kHeads], warp_total[kWarps][kHeads];
  const int chunks = (per_group + kHeads - 1) / kHeads;
  const int row = blockIdx.z, group = blockIdx.y / chunks;
  const int first_head = (blockIdx.y - group * chunks) * kHeads;
  const int heads = min(kHeads, per_group - first_head);
  const int64_t row_head = (static_cast<int64_t>(row) * groups + group) * per_group + first_head;
  const int begin = blockIdx.x * kPart, length = lengths[row];
  if (length == 0 && begin == 0) {
    for (int i = threadIdx.x; i < heads * head_size; i += kThreads) {
      out[row_head * head_size + i] = from_float<T>(0.f);
    }
  }
  const int seen = first_seen(length, window);
  if (begin >= length || begin + kPart <= seen) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const int count = min(length - begin, kPart), first = 32 * warp;  // keys
  const bool works = first < count;

  const int64_t stride = static_cast<int64_t>(groups) * head_size;
  const int64_t slot = first + lane < count ? cache.slot(row, begin + first + lane) : -1;
  float scores[kTiles][4] = {};  // [.][2 i + e]: key r + 8 i of the tile, head 2 q + e
  float largest[2] = {-INFINITY, -INFINITY};
  if (works) {
    score<T, D>(scores, query + row_head * head_size, heads, cache.keys + group * head_size, slot,
                stride, head_size);
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first + 16 * t + r + i / 2 * 8;
        const bool is_key = key < count && begin + key >= seen;
        scores[t][i] = is_key ? bounded(scores[t][i] * scale, softcap) : -INFINITY;
        largest[i % 2] = fmaxf(largest[i % 2], scores[t][i]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    largest[e] = reduce_rows<Max>(largest[e]);
    if (r == 0) warp_largest[warp][2 * q + e] = largest[e];
  }
  __syncthreads();

  float* shared = dynamic_shared<float>();  // [kWarps, heads, head_size]
  if (works) {
    float sums[D / 64][4][4] = {}, total[2] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      for (int w = 0; w < kWarps; w++) largest[e] = fmaxf(largest[e], warp_largest[w][2 * q + e]);
    }
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[t][i] = exp2f(scores[t][i] - largest[i % 2]);
        total[i % 2] += scores[t][i];
      }
      const uint32_t weights[2] = {transposed(pack<T>(scores[t][0], scores[t][1])),
                                   transposed(pack<T>(scores[t][2], scores[t][3]))};
      add_values<T, D>(sums, weights, cache.values + group * head_size, slot, t, stride, head_size);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = 2 * q + e;
      total[e] = reduce_rows<Sum>(total[e]);
      if (r == 0) warp_total[warp][head] = total[e];
      float* mine = shared + (warp * heads + head) * head_size;
#pragma unroll
      for (int j = 0; j < D / 64; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int channel = 64 * j + 8 * r + 2 * i;
          if (head >= heads || channel >= head_size) continue;
          store(mine + channel, Vector<float, 2>{{sums[j][i][e], sums[j][i][2 + e]}});
        }
      }
    }
  }
  __syncthreads();

  const int working = (count + 31) / 32;
  for (int item = threadIdx.x; item < heads * head_size; item += kThreads) {
    const int head = item / head_size;
    float value = 0.f, weights = 0.f, most = -INFINITY;
    for (int w = 0; w < working; w++) {
      value += shared[w * heads * head_size + item];
      weights += warp_total[w][head];
      most = fmaxf(most, warp_largest[w][head]);
    }
    tell(out, partial, row_head + head, head_size, item - head * head_size, length, value, most,
         weights, sinks, group * per_group + first_head + head);
  }
}
