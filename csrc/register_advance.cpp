// advance_block: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "check.h"
#include "esp/advance_block.h"

namespace esp {
namespace {

void check_values(const at::Tensor& ids, const at::Tensor& mask_ordinal, int64_t vocabulary, int64_t nodes) {
  const int32_t* choice = ids.const_data_ptr<int32_t>();
  const int32_t* ordinal = mask_ordinal.const_data_ptr<int32_t>();
  const int64_t rows = ids.size(1), candidates = ids.size(2);
  for (int64_t i = 0; i < ids.size(0) * rows; ++i, choice += candidates) {
    ESP_REQUIRE(*choice >= -1 && *choice < vocabulary, "ids[", i / rows, ", ", i % rows,
                ", 0] must be -1 or in the vocabulary of ", vocabulary, " tokens, got ", *choice);
    ESP_REQUIRE(ordinal[i] != 0 || i % rows < nodes, "mask_ordinal[", i / rows, ", ", i % rows,
                "] must not be 0, with ", nodes, " nodes tokens are rows 0..", nodes - 1);
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> advance_block(
    const at::Tensor& ids, const at::Tensor& logprobs, const at::Tensor& tokens, const at::Tensor& parent,
    const at::Tensor& mask_ordinal, const at::Tensor& depth, const at::Tensor& ancestors,
    const at::Tensor& probe, const at::Tensor& embedding, double lam, int64_t budget, int64_t masks,
    at::OptionalIntArrayRef widths, bool prune) {
  check_index(ids, "ids", ids, {kAny, kAny, kAny});
  const int64_t batch = ids.size(0), rows = ids.size(1), candidates = ids.size(2), words = (rows + 63) / 64;
  ESP_REQUIRE(candidates >= 1, "ids must have at least 1 candidate a row, got ", candidates);
  check_device(logprobs, "logprobs", ids);
  check_dtype(logprobs, "logprobs", at::kFloat);
  check_shape(logprobs, "logprobs", {batch, rows, candidates});
  check_contiguous(logprobs, "logprobs");
  check_index(tokens, "tokens", ids, {batch, rows});
  check_index(parent, "parent", ids, {batch, rows});
  check_index(mask_ordinal, "mask_ordinal", ids, {batch, rows});
  check_index(depth, "depth", ids, {batch, rows});
  check_device(ancestors, "ancestors", ids);
  check_dtype(ancestors, "ancestors", at::kLong);
  check_shape(ancestors, "ancestors", {batch, rows, words});
  check_contiguous(ancestors, "ancestors");
  const DType dtype = check_embedding(embedding);
  check_device(embedding, "embedding", ids);
  check_probe(probe, embedding, batch);
  ESP_REQUIRE(lam >= 0 && lam <= 1, "lam must be in 0..1, got ", lam);
  ESP_REQUIRE(budget >= 1 && budget <= rows, "budget must be 1 to ", rows, ", the rows of the block, got ",
              budget);
  ESP_REQUIRE(masks >= 0 && masks < budget, "masks must be 0 to ", budget - 1, " with a budget of ", budget,
              ", got ", masks);
  ESP_REQUIRE(probe.size(1) >= masks, "probe must have a vector for each of ", masks, " masks, got ",
              probe.size(1));
  const int64_t nodes = widths ? check_widths(*widths, masks, budget, masks) : budget / (masks + 1);
  check_values(ids, mask_ordinal, embedding.size(0), nodes);

  at::Tensor path = at::empty_like(tokens), committed = at::empty_like(tokens);
  at::Tensor accepted = at::empty({batch}, tokens.options());
  AdvanceBlockArgs args{};
  args.ids = ids.const_data_ptr<int32_t>();
  args.logprobs = logprobs.const_data_ptr<float>();
  args.tokens = tokens.mutable_data_ptr<int32_t>();
  args.parent = parent.mutable_data_ptr<int32_t>();
  args.mask_ordinal = mask_ordinal.mutable_data_ptr<int32_t>();
  args.depth = depth.mutable_data_ptr<int32_t>();
  args.ancestors = ancestors.mutable_data_ptr<int64_t>();
  args.path = path.mutable_data_ptr<int32_t>();
  args.accepted = accepted.mutable_data_ptr<int32_t>();
  args.committed = committed.mutable_data_ptr<int32_t>();
  args.batch = batch;
  args.rows = rows;
  args.words = words;
  args.candidates = candidates;
  args.nodes = nodes;
  args.masks = masks;
  args.widths = widths ? widths->data() : nullptr;
  args.width_levels = widths ? int64_t(widths->size()) : 0;
  args.prune = prune;
  args.dtype = dtype;
  args.probe = probe.mutable_data_ptr<float>();
  args.probe_masks = probe.size(1);
  args.n = probe.size(2);
  args.stride_batch = probe.stride(0);
  args.stride_mask = probe.stride(1);
  args.embedding = embedding.const_data_ptr();
  args.stride_token = embedding.stride(0);
  args.lam = float(lam);
  advance_block_cpu(args);
  return {path, accepted, committed};
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("advance_block", &advance_block);
}

}  // namespace esp
