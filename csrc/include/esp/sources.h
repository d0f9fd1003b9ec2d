// What may follow a context, and how probable it is: a weighted product of what the sources say (see
// esp_kernels/ops/join_tree.py).
#pragma once
#include <cmath>

#include "esp/memory.h"

namespace esp {

constexpr int kMaxMasks = 3;
constexpr int kSources = 5;  // mask, prior, recycled, context, copy
constexpr int kPatterns = 16;
constexpr int kPlaces = 8;
constexpr int kMaxMaskCandidates = 64;
constexpr int kMaxCandidates = kMaxMaskCandidates + 3 * kMaxList + kPlaces;

struct SourcesArgs {
  Memory memory;
  const int32_t* mask_ids;      // [batch, masks, candidates]
  const float* mask_logprobs;   // [batch, masks, candidates]
  const int32_t* prior_ids;     // [vocabulary, prior_width]
  const float* prior_logprobs;  // [vocabulary, prior_width]
  float* weights;               // [batch, kPatterns, kSources + 1], the last one of anything else
  int64_t batch, masks, candidates, vocabulary, prior_width;
};

struct Mixture {
  int count = 0, pattern = 0;
  int32_t token[kMaxCandidates];
  float feature[kMaxCandidates][kSources];
  float chance[kMaxCandidates];
  float other;

  ESP_INLINE void add(int32_t id, int source, float value) {
    int i = 0;
    while (i < count && token[i] != id) ++i;
    if (i == count) {
      token[count++] = id;
      for (int s = 0; s < kSources; ++s) feature[i][s] = 0.0f;
    }
    feature[i][source] = value > 0.0f ? value : 0.0f;
  }

  // Sets the chances.
  ESP_INLINE void weigh(const float* weights) {
    const float* w = weights + pattern * (kSources + 1);
    float top = w[kSources];
    for (int i = 0; i < count; ++i) {
      chance[i] = 0.0f;
      for (int s = 0; s < kSources; ++s) chance[i] += w[s] * feature[i][s];
      top = chance[i] > top ? chance[i] : top;
    }
    float total = other = std::exp(w[kSources] - top);
    for (int i = 0; i < count; ++i) total += chance[i] = std::exp(chance[i] - top);
    other /= total;
    for (int i = 0; i < count; ++i) chance[i] /= total;
  }
};

// The sources of one sequence.
struct Sources {
  const SourcesArgs& a;
  Sequence memory;
  int64_t b;

  ESP_INLINE Sources(const SourcesArgs& args, int64_t sequence)
      : a(args), memory(args.memory, sequence), b(sequence) {}

  // What may follow a context that is `level` drafts deep.
  ESP_INLINE void behind(const Context& context, int level, Mixture& found) const {
    found.count = 0;
    const bool masked = level < a.masks && take_mask(level, found);
    const int32_t token = context.token[context.count - 1];
    if (token >= 0 && token < a.vocabulary)
      take(a.prior_ids + token * a.prior_width, a.prior_logprobs + token * a.prior_width, a.prior_width, 1,
           found);
    if (memory.has(context, 1)) take_kept(context, 1, 2, found);
    for (int n = kOrders; n > 1; --n) {
      if (!memory.has(context, n)) continue;
      take_kept(context, n, 3, found);
      break;
    }
    const int copied = take_copies(context, found);
    found.pattern = 4 * (masked ? level + 1 : 0) + (copied < 3 ? copied : 3);
  }

 private:
  ESP_INLINE bool take_mask(int level, Mixture& found) const {
    const int64_t first = (b * a.masks + level) * a.candidates;
    take(a.mask_ids + first, a.mask_logprobs + first, a.candidates, 0, found);
    return found.count > 0;
  }

  ESP_INLINE void take_kept(const Context& context, int n, int source, Mixture& found) const {
    const int64_t first = memory.slot(context, n) * memory.width;
    take(memory.list_ids + first, memory.list_logprobs + first, memory.width, source, found);
  }

  ESP_INLINE static void take(const int32_t* ids, const float* logprobs, int64_t count, int source,
                              Mixture& found) {
    for (int64_t i = 0; i < count; ++i)
      if (ids[i] >= 0) found.add(ids[i], source, logprobs[i] + 9.0f);
  }

  // Returns the length of the context that was found before.
  ESP_INLINE int take_copies(const Context& context, Mixture& found) const {
    for (int n = context.count; n > 0; --n) {
      int32_t token[kPlaces];
      float share[kPlaces], fade = 1.0f, total = 0.0f;
      int places = 0, kinds = 0;
      memory.each_place(context, n, [&](int32_t next) {
        int i = 0;
        while (i < kinds && token[i] != next) ++i;
        if (i == kinds) {
          token[kinds] = next;
          share[kinds++] = 0.0f;
        }
        share[i] += fade;
        total += fade;
        fade *= 0.6f;
        return ++places < kPlaces;
      });
      if (places == 0) continue;
      for (int i = 0; i < kinds; ++i) found.add(token[i], 4, std::log(share[i] / (total + 0.5f)) + 4.0f);
      return n;
    }
    return 0;
  }
};

}  // namespace esp
