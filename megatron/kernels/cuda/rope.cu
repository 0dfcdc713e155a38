// Splits the fused projection to queries, keys and values into heads and rotates queries and keys,
// in one pass. Backward gathers the three gradients and rotates them back, also in one pass.
#include "amax.cuh"

// Heads [s, b, n, d] with any strides, in elements; the stride of d is 1.
template <typename T>
struct Heads {
  T* at;
  int64_t s, b, n;
};

constexpr int kHeadsAtOnce = 2;
constexpr int kMostThreads = 256;

// threadIdx.x selects a pair of vectors of a head: channels that rotate together (i and
// i + rotary / 2), or two adjacent vectors of the other channels. threadIdx.y selects a row (a
// position of a sample) and one of `lanes` shares of the row's heads, kHeadsAtOnce each. blockIdx.y
// divides rows that are too large for a block. A thread loads all its data before using any.
template <typename T, bool BACKWARD>
__global__ void __launch_bounds__(kMostThreads, 4)
    split_rotate_kernel(T* __restrict__ fused, const float* __restrict__ cosine,
                        const float* __restrict__ sine, T* query_at, T* key_at, T* value_at,
                        unsigned* __restrict__ amax, int64_t query_s, int64_t query_b,
                        int64_t query_n, int64_t key_s, int64_t key_b, int64_t key_n,
                        int64_t value_s, int64_t value_b, int64_t value_n, int rows, int batch,
                        int lanes, int groups, int per_group, int others, int head_size,
                        int rotary) {
  const Heads<T> query{query_at, query_s, query_b, query_n}, key{key_at, key_s, key_b, key_n};
  const Heads<T> value{value_at, value_s, value_b, value_n};
  constexpr int V = vector_size<T>, H = kHeadsAtOnce;
  const int turning = rotary / (2 * V);
  const bool turns = threadIdx.x < turning;
  const int low = turns ? threadIdx.x * V : rotary + 2 * (threadIdx.x - turning) * V;
  const int apart = turns ? rotary / 2 : V;  // distance of the two vectors
  const int heads = groups * (per_group + others);
  const int turn = threadIdx.y / lanes;
  const int first = blockIdx.y * lanes * H + threadIdx.y - turn * lanes;
  const int row = blockIdx.x * (blockDim.y / lanes) + turn;
  const int inside = row < rows ? heads : 0;
  const int position = row / batch, sample = row - position * batch;
  Vector<T, V> x[H], y[H];
  T* part[H];
  bool rotates[H];
  T* const whole = fused + (static_cast<int64_t>(row) * heads + first) * head_size + low;
#pragma unroll
  for (int h = 0; h < H; h++) {
    const int head = first + h * lanes;
    if (head >= inside) break;
    const int group = head / (per_group + others), member = head - group * (per_group + others);
    const Heads<T>& which = member < per_group ? query : member == per_group ? key : value;
    const int index = member < per_group ? group * per_group + member : group;
    part[h] = which.at + position * which.s + sample * which.b + index * which.n + low;
    rotates[h] = turns && member <= per_group;
    const T* from = BACKWARD ? part[h] : whole + h * lanes * head_size;
    x[h] = load<T, V>(from);
    y[h] = load<T, V>(from + apart);
  }
  float c[V], s[V];
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    if (!turns || inside == 0) break;
    const int64_t at = static_cast<int64_t>(position) * rotary + low + i;
    const auto four_c = load<float, 4>(cosine + at), four_s = load<float, 4>(sine + at);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      c[i + j] = four_c.at[j];
      s[i + j] = BACKWARD ? -four_s.at[j] : four_s.at[j];
    }
  }
  unsigned largest = 0;
#pragma unroll
  for (int h = 0; h < H; h++) {
    if (first + h * lanes >= inside) break;
    if (rotates[h]) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float u = to_float(x[h].at[i]), v = to_float(y[h].at[i]);
        x[h].at[i] = from_float<T>(u * c[i] - v * s[i]);
        y[h].at[i] = from_float<T>(v * c[i] + u * s[i]);
      }
    }
    T* to = BACKWARD ? whole + h * lanes * head_size : part[h];
    store_away(to, x[h]);
    store_away(to + apart, y[h]);
    if (BACKWARD && amax) largest = max(largest, max(magnitude_of(x[h]), magnitude_of(y[h])));
  }
  if (BACKWARD && amax) raise_by_block(amax, largest);
}
