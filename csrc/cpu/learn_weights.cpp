#include "esp/learn_weights.h"

namespace esp {
namespace {

void climb(const Mixture& mixture, int32_t token, float rate, float* weights) {
  float gradient[kSources + 1] = {};
  bool known = false;
  for (int i = 0; i < mixture.count; ++i) {
    const float surprise = (mixture.token[i] == token ? 1.0f : 0.0f) - mixture.chance[i];
    known |= mixture.token[i] == token;
    for (int s = 0; s < kSources; ++s) gradient[s] += surprise * mixture.feature[i][s];
  }
  gradient[kSources] = (known ? 0.0f : 1.0f) - mixture.other;
  float* w = weights + mixture.pattern * (kSources + 1);
  for (int s = 0; s <= kSources; ++s) w[s] += rate * gradient[s];
}

}  // namespace

void learn_weights_cpu(const LearnWeightsArgs& a) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t b = 0; b < a.sources.batch; ++b) {
    const Sources sources(a.sources, b);
    if (*sources.memory.length == 0) continue;
    float* weights = a.sources.weights + b * kPatterns * (kSources + 1);
    const int32_t* committed = a.committed + b * a.steps;
    Context context = sources.memory.end();
    Mixture mixture;
    for (int64_t i = 0; i < a.steps && committed[i] >= 0; ++i) {
      sources.behind(context, int(i), mixture);
      mixture.weigh(weights);
      climb(mixture, committed[i], a.rate, weights);
      context.push(committed[i]);
    }
  }
}

}  // namespace esp
