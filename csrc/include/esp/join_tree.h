#pragma once
#include "esp/block.h"
#include "esp/sources.h"

namespace esp {

constexpr int kMaxJoinBudget = 256;

struct JoinTreeArgs {
  SourcesArgs sources;
  int32_t* tokens;  // [batch, budget], as are the next three
  int32_t* parent;
  int32_t* mask_ordinal;
  float* chance;
  int64_t budget;
  float reach[kMaxMasks];
  int levels;  // of reach
  float least;
};

void join_tree_cpu(const JoinTreeArgs& args);

}  // namespace esp
