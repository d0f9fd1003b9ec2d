#pragma once
#include "esp/sources.h"

namespace esp {

struct LearnWeightsArgs {
  SourcesArgs sources;
  const int32_t* committed;  // [batch, steps], up to the first negative one
  int64_t steps;
  float rate;
};

void learn_weights_cpu(const LearnWeightsArgs& args);

}  // namespace esp
