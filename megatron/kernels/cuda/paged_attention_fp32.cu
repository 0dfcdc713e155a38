// Attention of one new token per sequence over a key-value cache in blocks, in fp32, which tensor
// cores do not support.
#include "paged_attention.cuh"

constexpr int kThreads = 256;
constexpr int kKeysAtOnce = 4;  // keys that a team loads at a time
constexpr int kMostHeads = 4;   // heads per block; 8 do not fit into the registers

// A block handles one row, one part of its keys, and up to H of the heads that share a key. The
// threads of a team of L have four channels each, and the team loops over every teams-th key.
template <int L, int H>
__global__ void __launch_bounds__(kThreads)
    paged_attention_fp32_kernel(const float* __restrict__ query, const float* keys,
                                const float* values, const int* tables,
                                const int* __restrict__ lengths, float* __restrict__ partial,
                                float* __restrict__ out, const float* __restrict__ sinks,
                                int groups, int per_group, int head_size, int table_width,
                                int block_size, int window, float scale, float softcap) {
  const Cache<float> cache{keys, values, tables, table_width, block_size};
  scale *= kLog2E;
  softcap *= kLog2E;
  constexpr int V = vector_size<float>, U = kKeysAtOnce;
  const int chunks = (per_group + H - 1) / H;
  const int row = blockIdx.z, group = blockIdx.y / chunks;
  const int first_head = (blockIdx.y - group * chunks) * H;
  const int64_t row_head = (static_cast<int64_t>(row) * groups + group) * per_group + first_head;
  const int heads = min(H, per_group - first_head);
  const int begin = blockIdx.x * kPart, length = lengths[row];
  if (length == 0 && begin == 0) {
    for (int i = threadIdx.x; i < heads * head_size; i += kThreads) {
      out[row_head * head_size + i] = 0.f;
    }
  }
  const int seen = first_seen(length, window);
  if (begin >= length || begin + kPart <= seen) return;
  const int end = min(begin + kPart, length);
  const int lane = threadIdx.x % L, team = threadIdx.x / L, teams = kThreads / L;
  const bool has_channels = lane * V < head_size;

  float q[H][V], most[H], total[H], sum[H][V];
#pragma unroll
  for (int h = 0; h < H; h++) {
    most[h] = -INFINITY;
    total[h] = 0.f;
    const bool any = has_channels && h < heads;
    Vector<float, V> x;
    if (any) x = load<float, V>(query + (row_head + h) * head_size + lane * V);
#pragma unroll
    for (int i = 0; i < V; i++) {
      q[h][i] = any ? x.at[i] * scale : 0.f;
      sum[h][i] = 0.f;
    }
  }

  for (int first = begin; first < end; first += teams * U) {  // equally often for every team
    Vector<float, V> k[U], v[U];
    bool has_key[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int key = first + u * teams + team;
      has_key[u] = key < end && key >= seen;
      if (!has_key[u] || !has_channels) continue;
      const int64_t at = (cache.slot(row, key) * groups + group) * head_size + lane * V;
      k[u] = load<float, V>(cache.keys + at);
      v[u] = load<float, V>(cache.values + at);
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
          for (int i = 0; i < V; i++) score[u] += q[h][i] * k[u].at[i];
        }
#pragma unroll
        for (int mask = L / 2; mask > 0; mask >>= 1) {
          score[u] += __shfl_xor_sync(0xffffffffu, score[u], mask);
        }
        score[u] = has_key[u] ? bounded(score[u], softcap) : -INFINITY;
        largest = fmaxf(largest, score[u]);
      }
      if (largest == -INFINITY) continue;  // this team has no key yet
      const float shrink = exp2f(most[h] - largest);
      most[h] = largest;
      total[h] *= shrink;
#pragma unroll
      for (int i = 0; i < V; i++) sum[h][i] *= shrink;
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (!has_key[u] || !has_channels) continue;
        const float weight = exp2f(score[u] - largest);
        total[h] += weight;
#pragma unroll
        for (int i = 0; i < V; i++) sum[h][i] += weight * v[u].at[i];
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
  for (int item = threadIdx.x; item < heads * head_size; item += kThreads) {
    const int h = item / head_size, channel = item - h * head_size;
    float largest = -INFINITY;
    for (int t = 0; t < teams; t++) {
      largest = fmaxf(largest, shared[(t * H + h) * width + head_size]);
    }
    float value = 0.f, weights = 0.f;
    for (int t = 0; t < teams; t++) {
      const float* theirs = shared + (t * H + h) * width;
      const float share = exp2f(theirs[head_size] - largest);
      value += share * theirs[channel];
      weights += share * theirs[head_size + 1];
    }
    tell(out, partial, row_head + h, head_size, channel, length, value, largest, weights,
         sinks, group * per_group + first_head + h);
  }
}

