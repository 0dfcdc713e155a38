// Merges the results of paged attention for the parts of a sequence.
#include "paged_attention.cuh"

// A block handles channels of one head of one row, and a thread handles one channel.
template <typename T>
__global__ void __launch_bounds__(256)
    join_parts_kernel(const float* __restrict__ partial, const int* __restrict__ lengths,
                      T* __restrict__ out, const float* __restrict__ sinks, int head_size,
                      int parts, int window) {
  const int length = lengths[blockIdx.y];
  if (length <= kPart) return;  // nothing to merge
  const int64_t row_head = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int width = head_size + 2, count = (length + kPart - 1) / kPart;
  const int channel = blockIdx.z * blockDim.x + threadIdx.x;
  if (channel >= head_size) return;
  const float* mine = partial + row_head * parts * width;
  float largest = -INFINITY;
  const int first = first_seen(length, window) / kPart;
  for (int p = first; p < count; p++) largest = fmaxf(largest, mine[p * width + head_size]);
  float value = 0.f, weights = 0.f;
#pragma unroll 4
  for (int p = first; p < count; p++) {
    const float share = exp2f(mine[p * width + head_size] - largest);
    value += share * mine[p * width + channel];
    weights += share * mine[p * width + head_size + 1];
  }
  weights += sink_weight(sinks, blockIdx.x, largest);
  out[row_head * head_size + channel] = from_float<T>(value / weights);
}
