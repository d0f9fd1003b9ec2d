#pragma once
#include "esp/types.h"

namespace esp {

struct SwigluArgs {
  DType dtype;
  const void* gate_up;  // [outer, inner, 2 n]: n gates, then n ups
  void* y;              // [outer, inner, n] contiguous
  int64_t outer, inner, n;
  int64_t stride_outer, stride_inner;  // of gate_up, in elements
};

void swiglu_cpu(const SwigluArgs& args);

}  // namespace esp
