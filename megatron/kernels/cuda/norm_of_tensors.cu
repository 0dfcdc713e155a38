// Sum of squares and number of zeros over many tensors: every block adds up one piece, a second
// kernel the blocks' results, both in a fixed order, in fp64.
#include "numbers.cuh"

namespace megatron {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // independent 16-byte loads of a thread

struct ReadTensor {  // as the Python side packs it
    const void* data;
    int64_t size;
};

struct Totals {
    double squares, zeros;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    pieces_kernel(const ReadTensor* __restrict__ tensors, const longlong2* __restrict__ pieces,
                  int64_t chunk, Totals* __restrict__ results) {
    constexpr int N = kPerAccess<T>;
    const longlong2 piece = pieces[blockIdx.x];
    const ReadTensor tensor = tensors[piece.x];
    const T* data = static_cast<const T*>(tensor.data) + piece.y;
    const int64_t size = min(chunk, tensor.size - static_cast<int64_t>(piece.y));
    double squares = 0.0;
    int zeros = 0;
    const auto take = [&](const auto& values) {
        float sum = 0.0f;  // of one access at most: fp32 loses nothing that counts
        for (const T& value : values.values) {
            const float x = to_float(value);
            sum += x * x;
            zeros += x == 0.0f;
        }
        squares += sum;
    };
    const auto* packs = reinterpret_cast<const Pack<T, N>*>(data);
    const int64_t whole = is_aligned(data, 16) ? size / N : 0;
    int64_t i = threadIdx.x;
    for (; i + (kInFlight - 1) * kThreads < whole; i += kInFlight * kThreads) {
        Pack<T, N> loaded[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) loaded[k] = packs[i + k * kThreads];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) take(loaded[k]);
    }
    for (; i < whole; i += kThreads) take(packs[i]);
    for (i = whole * N + threadIdx.x; i < size; i += kThreads)
        take(reinterpret_cast<const Pack<T, 1>*>(data)[i]);
    squares = block_reduce(squares, 0.0, Sum());
    const double count = block_reduce(static_cast<double>(zeros), 0.0, Sum());
    if (threadIdx.x == 0) results[blockIdx.x] = {squares, count};
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const Totals* __restrict__ results, int64_t count, Totals* __restrict__ total) {
    Totals sum{0.0, 0.0};
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
        sum.squares += results[i].squares;
        sum.zeros += results[i].zeros;
    }
    sum.squares = block_reduce(sum.squares, 0.0, Sum());
    sum.zeros = block_reduce(sum.zeros, 0.0, Sum());
    if (threadIdx.x == 0) *total = sum;
}

}  // namespace
}  // namespace megatron

// total = (sum of squares, number of zeros) over all pieces (tensor, first element), each of up to
// `chunk` elements. results: room for two doubles a piece.
extern "C" int sum_of_squares_and_zeros(const void* tensors, const void* pieces, int64_t count,
                                        int64_t chunk, int format, double* results, double* total,
                                        cudaStream_t stream) {
    using namespace megatron;
    auto* parts = reinterpret_cast<Totals*>(results);
    if (count > 0)
        MEGATRON_WITH_FORMAT(format, T,
                             pieces_kernel<T><<<count, kThreads, 0, stream>>>(
                                 static_cast<const ReadTensor*>(tensors),
                                 static_cast<const longlong2*>(pieces), chunk, parts))
    finish_kernel<<<1, kThreads, 0, stream>>>(parts, count, reinterpret_cast<Totals*>(total));
    return cudaGetLastError();
}
