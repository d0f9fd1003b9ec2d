#pragma once
#include "esp/memory.h"

namespace esp {

struct RememberBlockArgs {
  Memory memory;
  const int32_t* tokens;        // [batch, rows], as are the next two
  const int32_t* parent;
  const int32_t* mask_ordinal;
  const int32_t* ids;           // [batch, rows, candidates], best first
  const float* logprobs;        // [batch, rows, candidates]
  const int32_t* committed;     // [batch, steps], negative for none
  int64_t batch, rows, candidates, steps;
};

void remember_block_cpu(const RememberBlockArgs& args);

}  // namespace esp
