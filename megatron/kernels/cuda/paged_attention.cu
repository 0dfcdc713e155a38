// Attention of one new token a sequence over a key-value cache in blocks, and writing to the cache.
//
// Keys are cut into parts of a fixed number, each a block's work; a second kernel joins the parts.
// Every sum has an order that depends on the sequence's own length alone: the same bits come out
// whatever else is in the batch.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kKeysAtOnce = 4;  // that a team has under way

// The cache: [slots, groups, d]; block i is slots i * block_size and on.
template <typename T>
struct Cache {
  const T* keys;
  const T* values;
  const int* tables;  // [rows, table_width]: blocks of each row
  int table_width, block_size;
};

// A block has one row, one part of its keys, and up to H of the heads that share a key. A team of L
// threads has a vector of channels each, and goes through every teams-th key. What it leaves in
// `partial` [rows, heads, parts, d + 2]: weighted values, largest score, sum of weights.
template <typename T, int L, int H>
__global__ void __launch_bounds__(kThreads)
    paged_attention_kernel(const T* __restrict__ query, Cache<T> cache,
                           const int* __restrict__ lengths, float* __restrict__ partial, int groups,
                           int per_group, int head_size, int part_size, float scale) {
  constexpr int V = vector_size<T>, U = kKeysAtOnce;
  const int chunks = (per_group + H - 1) / H;
  const int row = blockIdx.z, group = blockIdx.y / chunks;
  const int first_head = (blockIdx.y - group * chunks) * H;
  const int begin = blockIdx.x * part_size;
  const int end = min(begin + part_size, lengths[row]);
  if (begin >= end) return;
  const int lane = threadIdx.x % L, team = threadIdx.x / L, teams = kThreads / L;
  const bool has_channels = lane * V < head_size;
  const int* table = cache.tables + static_cast<int64_t>(row) * cache.table_width;
  const int64_t row_head = static_cast<int64_t>(row) * groups * per_group + group * per_group;

  float q[H][V], most[H], total[H], sum[H][V];
#pragma unroll
  for (int h = 0; h < H; h++) {
    most[h] = -INFINITY;
    total[h] = 0.f;
    const bool any = has_channels && first_head + h < per_group;
    Vector<T, V> x;
    if (any) x = load<T, V>(query + (row_head + first_head + h) * head_size + lane * V);
#pragma unroll
    for (int i = 0; i < V; i++) {
      q[h][i] = any ? to_float(x.at[i]) * scale : 0.f;
      sum[h][i] = 0.f;
    }
  }

  for (int first = begin; first < end; first += teams * U) {  // as often for every team of a warp
    Vector<T, V> k[U], v[U];
    bool has_key[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int key = first + u * teams + team;
      has_key[u] = key < end;
      if (!has_key[u] || !has_channels) continue;
      const int block = key / cache.block_size;
      const int64_t slot =
          static_cast<int64_t>(table[block]) * cache.block_size + key - block * cache.block_size;
      const int64_t at = (slot * groups + group) * head_size + lane * V;
      k[u] = load<T, V>(cache.keys + at);
      v[u] = load<T, V>(cache.values + at);
    }
#pragma unroll
    for (int h = 0; h < H; h++) {
      float score[U];
      float largest = most[h];
#pragma unroll
      for (int u = 0; u < U; u++) {
        score[u] = 0.f;
        if (has_key[u] && has_channels) {
#pragma unroll
          for (int i = 0; i < V; i++) score[u] += q[h][i] * to_float(k[u].at[i]);
        }
#pragma unroll
        for (int mask = L / 2; mask > 0; mask >>= 1) {
          score[u] += __shfl_xor_sync(0xffffffffu, score[u], mask);
        }
        if (!has_key[u]) score[u] = -INFINITY;
        largest = fmaxf(largest, score[u]);
      }
      if (largest == -INFINITY) continue;  // no key for this team yet
      const float shrink = __expf(most[h] - largest);
      most[h] = largest;
      total[h] *= shrink;
#pragma unroll
      for (int i = 0; i < V; i++) sum[h][i] *= shrink;
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (!has_key[u] || !has_channels) continue;
        const float weight = __expf(score[u] - largest);
        total[h] += weight;
#pragma unroll
        for (int i = 0; i < V; i++) sum[h][i] += weight * to_float(v[u].at[i]);
      }
    }
  }

  float* shared = dynamic_shared<float>();  // [teams, H, d + 2]
  const int width = head_size + 2;
#pragma unroll
  for (int h = 0; h < H; h++) {
    float* mine = shared + (team * H + h) * width;
#pragma unroll
    for (int i = 0; i < V; i++) {
      if (has_channels) mine[lane * V + i] = sum[h][i];
    }
    if (lane == 0) {
      mine[head_size] = most[h];
      mine[head_size + 1] = total[h];
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < H * head_size; item += kThreads) {
    const int h = item / head_size, channel = item - h * head_size;
    if (first_head + h >= per_group) break;
    float largest = -INFINITY;
    for (int t = 0; t < teams; t++) {
      largest = fmaxf(largest, shared[(t * H + h) * width + head_size]);
    }
    float value = 0.f, weights = 0.f;
    for (int t = 0; t < teams; t++) {
      const float* theirs = shared + (t * H + h) * width;
      const float share = __expf(theirs[head_size] - largest);
      value += share * theirs[channel];
      weights += share * theirs[head_size + 1];
    }
    float* to = partial + ((row_head + first_head + h) * gridDim.x + blockIdx.x) * width;
    to[channel] = value;
    if (channel == 0) {
      to[head_size] = largest;
      to[head_size + 1] = weights;
    }
  }
}

// A block has one head of one row, a thread a channel.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    join_parts_kernel(const float* __restrict__ partial, const int* __restrict__ lengths,
                      T* __restrict__ out, int head_size, int part_size, int parts) {
  const int64_t row_head = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int width = head_size + 2, channel = threadIdx.x;
  const int count = (lengths[blockIdx.y] + part_size - 1) / part_size;
  const float* mine = partial + row_head * parts * width;
  float largest = -INFINITY;
  for (int p = 0; p < count; p++) largest = fmaxf(largest, mine[p * width + head_size]);
  float value = 0.f, weights = 0.f;
  for (int p = 0; p < count; p++) {
    const float share = __expf(mine[p * width + head_size] - largest);
    value += share * mine[p * width + channel];
    weights += share * mine[p * width + head_size + 1];
  }
  out[row_head * head_size + channel] = from_float<T>(count ? value / weights : 0.f);
}

// f(l, h): constants for how many threads have a head's channels, and how many heads a block has.
template <typename F>
cudaError_t with_shape(int64_t vectors, int64_t per_group, F f) {
  const auto with_lanes = [&](auto h) {
    if (vectors <= 4) return f(std::integral_constant<int, 4>{}, h);
    if (vectors <= 8) return f(std::integral_constant<int, 8>{}, h);
    if (vectors <= 16) return f(std::integral_constant<int, 16>{}, h);
    return f(std::integral_constant<int, 32>{}, h);
  };
  if (per_group == 1) return with_lanes(std::integral_constant<int, 1>{});
  if (per_group == 2) return with_lanes(std::integral_constant<int, 2>{});
  if (per_group <= 4) return with_lanes(std::integral_constant<int, 4>{});
  return with_lanes(std::integral_constant<int, 8>{});
}

// query, out [rows, groups * per_group, d]; keys, values [slots, groups, d]; tables int32 [rows,
// table_width]; lengths int32 [rows], of which none is above parts * part_size; partial fp32 [rows,
// heads, parts, d + 2] is scratch. d is a multiple of 16 bytes, at most 32 of them.
extern "C" int paged_attention(const void* query, const void* keys, const void* values,
                               const int* tables, const int* lengths, float* partial, void* out,
                               int64_t rows, int64_t groups, int64_t per_group, int64_t head_size,
                               int64_t table_width, int64_t block_size, int64_t part_size,
                               int64_t parts, int64_t dtype, double scale, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t vectors = head_size / vector_size<T>;
    if (head_size % vector_size<T> || vectors < 1 || vectors > 32) return cudaErrorInvalidValue;
    const Cache<T> cache{static_cast<const T*>(keys), static_cast<const T*>(values), tables,
                         static_cast<int>(table_width), static_cast<int>(block_size)};
    constexpr bool kIsWide = sizeof(T) == 4;  // 8 heads would not fit in the registers
    const int64_t most = kIsWide && per_group > 4 ? 4 : per_group;
    const cudaError_t error = with_shape(vectors, most, [&](auto l, auto h) {
      constexpr int L = decltype(l)::value;
      constexpr int H = kIsWide && decltype(h)::value > 4 ? 4 : decltype(h)::value;
      const size_t shared = kThreads / L * H * (head_size + 2) * sizeof(float);
      const dim3 grid(parts, groups * divide_up(per_group, H), rows);
      return launch(paged_attention_kernel<T, L, H>, grid, dim3(kThreads), shared, stream,
                    static_cast<const T*>(query), cache, lengths, partial, groups, per_group,
                    head_size, part_size, static_cast<float>(scale));
    });
    if (error != cudaSuccess) return error;
    return launch(join_parts_kernel<T>, dim3(groups * per_group, rows), dim3(head_size), 0, stream,
                  partial, lengths, static_cast<T*>(out), head_size, part_size, parts);
  });
}

// A block has one token.
__global__ void __launch_bounds__(kThreads)
    append_to_cache_kernel(const Vector<float, 4>* __restrict__ key,
                           const Vector<float, 4>* __restrict__ value,
                           Vector<float, 4>* __restrict__ keys,
                           Vector<float, 4>* __restrict__ values,
                           const int64_t* __restrict__ slots, int width) {
  const int64_t from = static_cast<int64_t>(blockIdx.x) * width, to = slots[blockIdx.x] * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    keys[to + i] = key[from + i];
    values[to + i] = value[from + i];
  }
}

// key, value [tokens, width] to rows slots[token] of keys and values; width in 16 bytes.
extern "C" int append_to_cache(const void* key, const void* value, void* keys, void* values,
                               const int64_t* slots, int64_t tokens, int64_t width,
                               cudaStream_t stream) {
  using Four = Vector<float, 4>;
  const int64_t threads = width < kThreads ? divide_up(width, 32) * 32 : kThreads;
  return launch(append_to_cache_kernel, dim3(tokens), dim3(threads), 0, stream,
                static_cast<const Four*>(key), static_cast<const Four*>(value),
                static_cast<Four*>(keys), static_cast<Four*>(values), slots, width);
}
