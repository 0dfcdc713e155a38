// A key-value cache in blocks, and what the kernels that read it share.
//
// A sequence's keys are cut into parts of kPart, each a block's work; another kernel joins the parts.
// Every sum has an order that depends on the sequence's own length alone: the same bits come out
// whatever else is in the batch.
#pragma once

#include "common.cuh"

constexpr int kPart = 256;  // paged_attention.py has the same
constexpr float kLog2E = 1.4426950408889634f;

// [slots, groups, d]; block i is slots i * block_size and on.
template <typename T>
struct Cache {
  const T* keys;
  const T* values;
  const int* tables;  // [rows, table_width]: blocks of each row
  int table_width, block_size;

  __device__ __forceinline__ int64_t slot(int row, int key) const {
    const int block = key / block_size;
    const int* table = tables + static_cast<int64_t>(row) * table_width;
    return static_cast<int64_t>(table[block]) * block_size + (key - block * block_size);
  }
};

// The first key that the last token sees: its own and those of `window` tokens before it. Blocks of
// parts that end before it do nothing.
__device__ __forceinline__ int first_seen(int length, int window) {
  return max(0, length - 1 - window);
}

// tanh(x / cap) * cap of a score in powers of two; the same score where cap is 0.
__device__ __forceinline__ float bounded(float score, float cap) {
  return cap > 0.f ? tanhf(score / cap) * cap : score;
}

// What a head's sink adds to a sum of weights, of which the largest score is `largest`.
__device__ __forceinline__ float sink_weight(const float* sinks, int head, float largest) {
  return sinks == nullptr ? 0.f : exp2f(sinks[head] * kLog2E - largest);
}

// One channel of what a part's block has found: the attention itself where the row has no other
// part, else in `partial` [rows * heads, parts, d + 2] weighted values, largest score (of powers of
// two), sum of weights.
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
