#pragma once
#include "esp/types.h"

namespace esp {

struct RmsNormArgs {
  DType dtype;
  const void* x;       // [outer, inner, n], rows of n elements
  void* residual;      // [outer, inner, n] contiguous, or null: x + residual is written here and normalised
  const void* weight;  // [n]
  void* y;             // [outer, inner, n] contiguous
  int64_t outer, inner, n;
  int64_t stride_outer, stride_inner;  // of x, in elements
  float eps;
};

void rms_norm_cpu(const RmsNormArgs& args);

}  // namespace esp
