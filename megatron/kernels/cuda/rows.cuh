// For kernels that keep a row in the registers of the threads that share it.
#pragma once

#include "common.cuh"

// The most threads of a block that share a row, E elements each. Rows have at most 16384 elements where
// weights have 16 bits, or 8192 of 32.
template <int E>
constexpr int row_threads = E == 8 ? 256 : 512;
