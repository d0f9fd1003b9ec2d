#pragma once
#include "esp/types.h"

namespace esp {

// Weights come in panels of this many outputs, padded with zeros: [ceil(n / 32), k, 32] for float32 and
// float16, [ceil(n / 32), ceil(k / 2), 32, 2] for bfloat16.
constexpr int kPanel = 32;

struct LinearRowsArgs {
  DType dtype;
  const void* x;       // [rows, k], rows stride_x elements apart
  const void* packed;  // panels of the weight
  const void* bias;    // [n], or null
  void* y;             // [rows, n] contiguous
  int64_t rows, k, n, stride_x;
};

void linear_rows_cpu(const LinearRowsArgs& args);

}  // namespace esp
