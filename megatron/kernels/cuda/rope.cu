// Splits the fused product of queries, keys and values into heads and rotates queries and keys, in
// one pass; backward gathers the three gradients and rotates them back, in one pass.
#include "amax.cuh"

// Heads [s, b, n, d] with any strides (in elements) but that of d, which is 1.
template <typename T>
struct Heads {
  T* at;
  int64_t s, b, n;
};

constexpr int kHeadsAtOnce = 2;

// A block has one position. threadIdx.x is a pair of vectors of a head: of channels that turn
// together (i and i + rotary / 2), or two neighbours of the rest. threadIdx.y goes through the heads
// of all samples, so that cosines and sines are read once.
template <typename T, bool BACKWARD>
__global__ void __launch_bounds__(256, 3)
    split_rotate_kernel(T* __restrict__ fused, const float* __restrict__ cosine,
                        const float* __restrict__ sine, Heads<T> query, Heads<T> key,
                        Heads<T> value, unsigned* __restrict__ amax, int batch, int groups,
                        int per_group, int head_size, int rotary) {
  constexpr int V = vector_size<T>, H = kHeadsAtOnce;
  const int64_t position = blockIdx.x;
  const int turning = rotary / (2 * V);
  const bool turns = threadIdx.x < turning;
  const int low = turns ? threadIdx.x * V : rotary + 2 * (threadIdx.x - turning) * V;
  const int high = low + (turns ? rotary / 2 : V);
  float c[V], s[V];
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    if (!turns) break;
    const auto four_c = load<float, 4>(cosine + position * rotary + low + i);
    const auto four_s = load<float, 4>(sine + position * rotary + low + i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      c[i + j] = four_c.at[j];
      s[i + j] = BACKWARD ? -four_s.at[j] : four_s.at[j];
    }
  }
  const int heads = groups * (per_group + 2);
  const int items = batch * heads;
  unsigned largest = 0;
  for (int first = threadIdx.y; first < items; first += blockDim.y * H) {
    Vector<T, V> a[H], b[H];
    T* to[H];
    bool rotates[H];
#pragma unroll
    for (int h = 0; h < H; h++) {
      const int item = first + h * blockDim.y;
      if (item >= items) break;
      const int sample = item / heads, head = item - sample * heads;
      const int group = head / (per_group + 2), member = head - group * (per_group + 2);
      rotates[h] = turns && member <= per_group;
      const Heads<T>& which = member < per_group ? query : member == per_group ? key : value;
      const int index = member < per_group ? group * per_group + member : group;
      T* part = which.at + position * which.s + sample * which.b + index * which.n;
      T* whole = fused + ((position * batch + sample) * heads + head) * head_size;
      const T* from = BACKWARD ? part : whole;
      to[h] = BACKWARD ? whole : part;
      a[h] = load<T, V>(from + low);
      b[h] = load<T, V>(from + high);
    }
#pragma unroll
    for (int h = 0; h < H; h++) {
      if (first + h * static_cast<int>(blockDim.y) >= items) break;
      if (rotates[h]) {
#pragma unroll
        for (int i = 0; i < V; i++) {
          const float x = to_float(a[h].at[i]), y = to_float(b[h].at[i]);
          a[h].at[i] = from_float<T>(x * c[i] - y * s[i]);
          b[h].at[i] = from_float<T>(y * c[i] + x * s[i]);
        }
      }
      store(to[h] + low, a[h]);
      store(to[h] + high, b[h]);
      if (BACKWARD && amax) largest = max(largest, max(magnitude_of(a[h]), magnitude_of(b[h])));
    }
  }
  if (BACKWARD && amax) raise_by_block(amax, largest);
}

// fused [s, b, groups, per_group + 2, d] <-> query [s, b, groups * per_group, d], key and value
// [s, b, groups, d] of the given strides; cosine and sine fp32 [s, rotary], whose second half repeats
// the first (null and 0: nothing turns). backward: from heads into fused, turning back; the largest
// magnitude of fused then in amax (zero before) unless null.
extern "C" int split_rotate(void* fused, const float* cosine, const float* sine, void* query,
                            void* key, void* value, unsigned* amax, int64_t query_s, int64_t query_b,
                            int64_t query_n, int64_t key_s, int64_t key_b, int64_t key_n,
                            int64_t value_s, int64_t value_b, int64_t value_n, int64_t positions,
                            int64_t batch, int64_t groups, int64_t per_group, int64_t head_size,
                            int64_t rotary, int64_t backward, int64_t dtype,
                            cudaStream_t stream) {
  return with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t pairs = head_size / (2 * vector_size<T>);
    if (pairs < 1 || pairs > 256) return cudaErrorInvalidValue;
    const int64_t items = batch * groups * (per_group + 2);
    const int64_t lanes = 256 / pairs < items ? 256 / pairs : items;
    const auto kernel = backward ? split_rotate_kernel<T, true> : split_rotate_kernel<T, false>;
    return launch(kernel, dim3(positions), dim3(pairs, lanes), 0, stream, static_cast<T*>(fused),
                  cosine, sine, Heads<T>{static_cast<T*>(query), query_s, query_b, query_n},
                  Heads<T>{static_cast<T*>(key), key_s, key_b, key_n},
                  Heads<T>{static_cast<T*>(value), value_s, value_b, value_n}, amax, batch,
                  groups, per_group, head_size, rotary);
  });
}
