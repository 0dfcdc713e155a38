// For kernels that treat [rows, columns] elementwise, with something common to a column (a bias, and
// the sum of its gradient): a thread keeps its columns and goes through rows.
#pragma once

#include "common.cuh"

// Blocks of up to 256 threads in y cover the columns; blocks in x take `at_once` rows at a time.
struct ColumnShape {
  dim3 grid;
  int threads;
};

// row_blocks: the most blocks in x; they then loop. 0: as many as there are rows for.
inline ColumnShape column_shape(int64_t rows, int64_t vectors, int at_once, int64_t row_blocks) {
  const int64_t warps = divide_up(vectors, 32);
  const int64_t across = divide_up(warps, 8);
  int64_t down = divide_up(rows, at_once);
  if (row_blocks > 0 && down > row_blocks) down = row_blocks;
  return {dim3(down, across), static_cast<int>(divide_up(warps, across) * 32)};
}

// Blocks in x of a kernel that sums over rows: all that the GPU holds at a time, and no more than
// there are rows of partial sums.
inline int64_t summing_blocks(int64_t vectors, int64_t resident, int64_t capacity) {
  const int64_t across = divide_up(divide_up(vectors, 32), 8);
  const int64_t wanted = divide_up(resident, across);
  return wanted < capacity ? wanted : capacity;
}
