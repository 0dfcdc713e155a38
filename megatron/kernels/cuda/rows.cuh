// Sizes for kernels that keep a row in the registers of the threads that share it.
#pragma once

#include "common.cuh"

// The maximum number of threads that share a row, with E elements each. Rows have at most 16384
// elements with 16-bit weights, or 8192 with 32-bit weights.
template <int E>
constexpr int row_threads = E == 8 ? 256 : 512;
