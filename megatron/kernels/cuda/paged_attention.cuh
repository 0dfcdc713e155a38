// A key-value cache in blocks, and code shared by the kernels that read it.
// The keys of a sequence are divided into parts of kPart keys. A thread block handles a part, and
// another kernel merges the parts. The order of every sum depends only on the sequence's own
// length, so the bits of a result do not depend on the other sequences of the batch.
#pragma once

#include "common.cuh"

constexpr int kPart = 256;  // as in paged_attention.py
constexpr float kLog2E = 1.4426950408889634f;

// Tensors are [slots, groups, d]. Block i begins at slot i * block_size.
template <typename T>
struct Cache {
  const T* keys;
  const T* values;
  const int* tables;  // [rows, table_width]: the blocks of each row
  int table_width, block_size;

  __device__ __forceinline__ int64_t slot(int row, int key) const {
    const int block = key / block_size;
    const int* table = tables + static_cast<int64_t>(row) * table_width;
    return static_cast<int64_t>(table[block]) * block_size + (key - block * block_size);
  }
};

// Returns the first key that the last token sees, `window` tokens before the token's own key. The
// thread blocks of parts that end before this key do nothing.
__device__ __forceinline__ int first_seen(int length, int window) {
  return max(0, length - 1 - window);
}

// Returns tanh(score / cap) * cap for a score in powers of two, or the score itself if cap is 0.
__device__ __forceinline__ float bounded(float score, float cap) {
  return cap > 0.f ? tanhf(score / cap) * cap : score;
}

// Returns the weight that a head's sink adds to a sum of weights whose largest score is `largest`.
__device__ __forceinline__ float sink_weight(const float* sinks, int head, float largest) {
  return sinks == nullptr ? 0.f : exp2f(sinks[head] * kLog2E - largest);
}

// Stores one channel of the result of a part. If the row has no other part, this is the final
// result. Otherwise the weighted values, the largest score (for powers of two) and the sum of
// weights are stored in `partial` [rows * heads, parts, d + 2].
template <typename T>
__device__ __forceinline__ void tell(T* out, float* partial, int64_t row_head, int head_size,
                                     int channel, int length, float value, float largest,
                                     float weights, const float* sinks, int head) {
  if (length <= kPart) {
    weights += sink_weight(sinks, head, largest);
    out[row_head * head_size + channel] = from_float<T>(value / weights);
    return;
  }
  float* to = partial + (row_head * gridDim.x + blockIdx.x) * (head_size + 2);
  to[channel] = value;
  if (channel == 0) {
    to[head_size] = largest;
    to[head_size + 1] = weights;
  }
}
