// Ops that remember a sequence and draft from all sources: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "check.h"
#include "esp/join_tree.h"
#include "esp/learn_weights.h"
#include "esp/remember_block.h"

namespace esp {
namespace {

void check_like_ids(const at::Tensor& logprobs, const char* name, const at::Tensor& ids) {
  check_device(logprobs, name, ids);
  check_dtype(logprobs, name, at::kFloat);
  bool same = logprobs.dim() == ids.dim();
  for (int64_t i = 0; same && i < ids.dim(); ++i) same = logprobs.size(i) == ids.size(i);
  ESP_REQUIRE(same, name, " must have shape ", listed(ids.sizes()), ", got ", listed(logprobs.sizes()));
  check_contiguous(logprobs, name);
}

struct MemoryTensors {
  const at::Tensor &history, &length, &heads, &links, &keys, &list_ids, &list_logprobs;

  Memory checked() const {
    check_index(history, "history", history, {kAny, kAny});
    const int64_t batch = history.size(0), capacity = history.size(1);
    check_index(length, "length", history, {batch});
    check_index(heads, "heads", history, {batch, kOrders, kAny});
    ESP_REQUIRE(heads.size(2) >= 1, "heads must have at least 1 bucket, got 0");
    check_index(links, "links", history, {batch, kOrders, capacity});
    check_index(keys, "keys", history, {batch, kOrders, kAny, kOrders});
    const int64_t slots = keys.size(2);
    ESP_REQUIRE(slots >= 1, "keys must have at least 1 slot, got 0");
    check_index(list_ids, "list_ids", history, {batch, kOrders, slots, kAny});
    const int64_t width = list_ids.size(3);
    ESP_REQUIRE(width <= kMaxList, "list_ids must have at most ", kMaxList, " tokens a list, got ", width);
    check_like_ids(list_logprobs, "list_logprobs", list_ids);
    for (int64_t b = 0; b < batch; ++b) {
      const int32_t used = length.const_data_ptr<int32_t>()[b];
      ESP_REQUIRE(used >= 0 && used <= capacity, "length[", b, "] must be 0 to ", capacity,
                  ", the capacity, got ", used);
    }
    return {history.mutable_data_ptr<int32_t>(),
            length.mutable_data_ptr<int32_t>(),
            heads.mutable_data_ptr<int32_t>(),
            links.mutable_data_ptr<int32_t>(),
            keys.mutable_data_ptr<int32_t>(),
            list_ids.mutable_data_ptr<int32_t>(),
            list_logprobs.mutable_data_ptr<float>(),
            capacity,
            heads.size(2),
            slots,
            width};
  }
};

SourcesArgs checked(const MemoryTensors& memory, const at::Tensor& mask_ids, const at::Tensor& mask_logprobs,
                    const at::Tensor& prior_ids, const at::Tensor& prior_logprobs,
                    const at::Tensor& weights) {
  SourcesArgs args{};
  args.memory = memory.checked();
  const at::Tensor& history = memory.history;
  args.batch = history.size(0);
  check_index(mask_ids, "mask_ids", history, {args.batch, kAny, kAny});
  args.masks = mask_ids.size(1);
  args.candidates = mask_ids.size(2);
  ESP_REQUIRE(args.masks <= kMaxMasks, "mask_ids must have at most ", kMaxMasks, " masks, got ", args.masks);
  ESP_REQUIRE(args.candidates <= kMaxMaskCandidates, "mask_ids must have at most ", kMaxMaskCandidates,
              " candidates a mask, got ", args.candidates);
  check_like_ids(mask_logprobs, "mask_logprobs", mask_ids);
  check_index(prior_ids, "prior_ids", history, {kAny, kAny});
  args.vocabulary = prior_ids.size(0);
  args.prior_width = prior_ids.size(1);
  ESP_REQUIRE(args.prior_width <= kMaxList, "prior_ids must have at most ", kMaxList,
              " tokens a list, got ", args.prior_width);
  check_like_ids(prior_logprobs, "prior_logprobs", prior_ids);
  check_device(weights, "weights", history);
  check_dtype(weights, "weights", at::kFloat);
  check_shape(weights, "weights", {args.batch, kPatterns, kSources + 1});
  check_contiguous(weights, "weights");
  args.mask_ids = mask_ids.const_data_ptr<int32_t>();
  args.mask_logprobs = mask_logprobs.const_data_ptr<float>();
  args.prior_ids = prior_ids.const_data_ptr<int32_t>();
  args.prior_logprobs = prior_logprobs.const_data_ptr<float>();
  args.weights = weights.mutable_data_ptr<float>();
  return args;
}

void remember_block(const at::Tensor& history, const at::Tensor& length, const at::Tensor& heads,
                    const at::Tensor& links, const at::Tensor& keys, const at::Tensor& list_ids,
                    const at::Tensor& list_logprobs, const at::Tensor& tokens, const at::Tensor& parent,
                    const at::Tensor& mask_ordinal, const at::Tensor& ids, const at::Tensor& logprobs,
                    const at::Tensor& committed) {
  RememberBlockArgs args{};
  args.memory = MemoryTensors{history, length, heads, links, keys, list_ids, list_logprobs}.checked();
  args.batch = history.size(0);
  check_index(tokens, "tokens", history, {args.batch, kAny});
  args.rows = tokens.size(1);
  check_index(parent, "parent", history, {args.batch, args.rows});
  check_index(mask_ordinal, "mask_ordinal", history, {args.batch, args.rows});
  check_index(ids, "ids", history, {args.batch, args.rows, kAny});
  args.candidates = ids.size(2);
  check_like_ids(logprobs, "logprobs", ids);
  check_index(committed, "committed", history, {args.batch, kAny});
  args.steps = committed.size(1);
  args.tokens = tokens.const_data_ptr<int32_t>();
  args.parent = parent.const_data_ptr<int32_t>();
  args.mask_ordinal = mask_ordinal.const_data_ptr<int32_t>();
  args.ids = ids.const_data_ptr<int32_t>();
  args.logprobs = logprobs.const_data_ptr<float>();
  args.committed = committed.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < args.batch * args.rows; ++i)
    ESP_REQUIRE(args.mask_ordinal[i] != 0 || args.parent[i] < i % args.rows, "parent[", i / args.rows, ", ",
                i % args.rows, "] must be negative or an earlier row, got ", args.parent[i]);
  for (int64_t b = 0; b < args.batch; ++b) {
    int64_t added = 0;
    for (int64_t i = 0; i < args.steps; ++i) added += args.committed[b * args.steps + i] >= 0;
    ESP_REQUIRE(args.memory.length[b] + added <= args.memory.capacity, "history has room for ",
                args.memory.capacity, " tokens, sequence ", b, " has ", args.memory.length[b], " and ", added,
                " are committed");
  }
  remember_block_cpu(args);
}

void learn_weights(const at::Tensor& history, const at::Tensor& length, const at::Tensor& heads,
                   const at::Tensor& links, const at::Tensor& keys, const at::Tensor& list_ids,
                   const at::Tensor& list_logprobs, const at::Tensor& mask_ids,
                   const at::Tensor& mask_logprobs, const at::Tensor& prior_ids,
                   const at::Tensor& prior_logprobs, const at::Tensor& weights, const at::Tensor& committed,
                   double rate) {
  LearnWeightsArgs args{};
  args.sources = checked({history, length, heads, links, keys, list_ids, list_logprobs}, mask_ids,
                         mask_logprobs, prior_ids, prior_logprobs, weights);
  check_index(committed, "committed", history, {args.sources.batch, kAny});
  ESP_REQUIRE(rate >= 0 && std::isfinite(rate), "rate must be at least 0, got ", rate);
  args.committed = committed.const_data_ptr<int32_t>();
  args.steps = committed.size(1);
  args.rate = float(rate);
  learn_weights_cpu(args);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> join_tree(
    const at::Tensor& history, const at::Tensor& length, const at::Tensor& heads, const at::Tensor& links,
    const at::Tensor& keys, const at::Tensor& list_ids, const at::Tensor& list_logprobs,
    const at::Tensor& mask_ids, const at::Tensor& mask_logprobs, const at::Tensor& prior_ids,
    const at::Tensor& prior_logprobs, const at::Tensor& weights, int64_t budget, at::ArrayRef<double> reach,
    double least) {
  JoinTreeArgs args{};
  args.sources = checked({history, length, heads, links, keys, list_ids, list_logprobs}, mask_ids,
                         mask_logprobs, prior_ids, prior_logprobs, weights);
  ESP_REQUIRE(budget >= 1 && budget <= kMaxJoinBudget, "budget must be 1 to ", kMaxJoinBudget, ", got ",
              budget);
  ESP_REQUIRE(reach.size() <= size_t(kMaxMasks), "reach must have at most ", kMaxMasks, " values, got ",
              reach.size());
  double above = 1;
  for (const double value : reach) {
    ESP_REQUIRE(value >= 0 && value <= above, "reach must descend from at most 1 to at least 0, got [",
                c10::Join(", ", reach), "]");
    above = value;
  }
  ESP_REQUIRE(least >= 0 && least <= 1, "least must be in 0..1, got ", least);

  at::Tensor tokens = at::empty({args.sources.batch, budget}, history.options());
  at::Tensor parent = at::empty_like(tokens), mask_ordinal = at::empty_like(tokens);
  at::Tensor chance = at::empty({args.sources.batch, budget}, weights.options());
  args.tokens = tokens.mutable_data_ptr<int32_t>();
  args.parent = parent.mutable_data_ptr<int32_t>();
  args.mask_ordinal = mask_ordinal.mutable_data_ptr<int32_t>();
  args.chance = chance.mutable_data_ptr<float>();
  args.budget = budget;
  args.levels = int(reach.size());
  for (int i = 0; i < args.levels; ++i) args.reach[i] = float(reach[size_t(i)]);
  args.least = float(least);
  join_tree_cpu(args);
  return {tokens, parent, mask_ordinal, chance};
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("remember_block", &remember_block);
  m.impl("learn_weights", &learn_weights);
  m.impl("join_tree", &join_tree);
}

}  // namespace esp
