#pragma once
#include "esp/types.h"

namespace esp {

struct UpdateProbeArgs {
  DType dtype;   // of embedding
  float* probe;  // [batch, masks, n]
  int64_t batch, masks, n;
  int64_t stride_batch, stride_mask;
  const void* embedding;  // [vocabulary, n]
  int64_t stride_token;
  const int32_t* committed;  // [batch, length], -1 for none
  int64_t length;
  float lam;
};

void update_probe_cpu(const UpdateProbeArgs& args);

}  // namespace esp
