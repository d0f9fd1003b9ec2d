// Ops that describe, verify and draft a block's tree: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "check.h"
#include "esp/expand_tree.h"
#include "esp/tree_metadata.h"
#include "esp/verify_tree.h"

namespace esp {
namespace {

void check_parent(const at::Tensor& parent) {
  check_index(parent, "parent", parent, {kAny, kAny});
  const int64_t batch = parent.size(0), rows = parent.size(1);
  const int32_t* value = parent.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; ++b, value += rows) {
    ESP_REQUIRE(rows == 0 || value[0] == kRoot || value[0] == kPadding, "parent[", b,
                ", 0] must be -1 (the root) or -2 (a padded sequence), got ", value[0]);
    for (int64_t r = 1; r < rows; ++r) {
      const int32_t p = value[r];
      ESP_REQUIRE(p == kPadding || (p >= 0 && p < r && value[p] != kPadding), "parent[", b, ", ", r,
                  "] must be -2 (padding) or an earlier row that is not padding, got ", p);
    }
  }
}

std::tuple<at::Tensor, at::Tensor> tree_metadata(const at::Tensor& parent) {
  check_parent(parent);
  const int64_t batch = parent.size(0), rows = parent.size(1), words = (rows + 63) / 64;
  at::Tensor depth = at::empty_like(parent);
  at::Tensor ancestors = at::empty({batch, rows, words}, parent.options().dtype(at::kLong));
  tree_metadata_cpu({parent.const_data_ptr<int32_t>(), depth.mutable_data_ptr<int32_t>(),
                     ancestors.mutable_data_ptr<int64_t>(), batch, rows, words});
  return {depth, ancestors};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> verify_tree(const at::Tensor& choice, const at::Tensor& tokens,
                                                           const at::Tensor& parent,
                                                           const at::Tensor& mask_ordinal) {
  check_index(choice, "choice", choice, {kAny, kAny});
  const int64_t batch = choice.size(0), rows = choice.size(1);
  check_index(tokens, "tokens", choice, {batch, rows});
  check_index(parent, "parent", choice, {batch, rows});
  check_index(mask_ordinal, "mask_ordinal", choice, {batch, rows});
  const int32_t* ordinal = mask_ordinal.const_data_ptr<int32_t>();
  for (int64_t b = 0; rows > 0 && b < batch; ++b)
    ESP_REQUIRE(ordinal[b * rows] == 0 || ordinal[b * rows] == -1, "mask_ordinal[", b,
                ", 0] must be 0 (the root) or -1 (a padded sequence), got ", ordinal[b * rows]);
  at::Tensor path = at::empty_like(choice);
  at::Tensor accepted = at::empty({batch}, choice.options()), bonus = at::empty({batch}, choice.options());
  verify_tree_cpu({choice.const_data_ptr<int32_t>(), tokens.const_data_ptr<int32_t>(),
                   parent.const_data_ptr<int32_t>(), ordinal, path.mutable_data_ptr<int32_t>(),
                   accepted.mutable_data_ptr<int32_t>(), bonus.mutable_data_ptr<int32_t>(), batch, rows});
  return {path, accepted, bonus};
}

void check_descending(const at::Tensor& root, const at::Tensor& ids, const at::Tensor& logprobs) {
  const int32_t* id = ids.const_data_ptr<int32_t>();
  const float* value = logprobs.const_data_ptr<float>();
  const int32_t* first = root.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < ids.size(0); ++b)
    for (int64_t level = 0; level < ids.size(1); ++level) {
      float last = std::numeric_limits<float>::infinity();
      for (int64_t n = 0; n < ids.size(2); ++n, ++id, ++value) {
        if (first[b] < 0 || *id < 0 || !std::isfinite(*value)) continue;
        ESP_REQUIRE(*value <= last, "logprobs must descend in each level, got ", *value, " after ", last,
                    " at logprobs[", b, ", ", level, ", ", n, "]");
        last = *value;
      }
    }
}

// The nodes of a tree, root included.
int64_t check_size(int64_t levels, int64_t budget, int64_t masks, at::OptionalIntArrayRef widths) {
  ESP_REQUIRE(budget >= 1 && budget <= kMaxBudget, "budget must be 1 to ", kMaxBudget, ", got ", budget);
  ESP_REQUIRE(masks >= 0 && masks < budget, "masks must be 0 to ", budget - 1, " with a budget of ", budget,
              ", got ", masks);
  if (!widths) return budget / (masks + 1);
  return check_widths(*widths, levels, budget, masks);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> expand_tree(const at::Tensor& root, const at::Tensor& ids,
                                                           const at::Tensor& logprobs, int64_t budget,
                                                           int64_t masks, at::OptionalIntArrayRef widths,
                                                           bool prune) {
  check_index(root, "root", root, {kAny});
  const int64_t batch = root.size(0);
  check_index(ids, "ids", root, {batch, kAny, kAny});
  const int64_t levels = ids.size(1), candidates = ids.size(2);
  check_device(logprobs, "logprobs", root);
  check_dtype(logprobs, "logprobs", at::kFloat);
  check_shape(logprobs, "logprobs", {batch, levels, candidates});
  check_contiguous(logprobs, "logprobs");
  const int64_t nodes = check_size(levels, budget, masks, widths);
  check_descending(root, ids, logprobs);
  const auto block = [&] { return at::empty({batch, nodes * (masks + 1)}, root.options()); };
  at::Tensor tokens = block(), parent = block(), mask_ordinal = block();
  expand_tree_cpu({root.const_data_ptr<int32_t>(), ids.const_data_ptr<int32_t>(),
                   logprobs.const_data_ptr<float>(), tokens.mutable_data_ptr<int32_t>(),
                   parent.mutable_data_ptr<int32_t>(), mask_ordinal.mutable_data_ptr<int32_t>(), batch,
                   levels, candidates, nodes, masks, widths ? widths->data() : nullptr,
                   widths ? int64_t(widths->size()) : 0, prune});
  return {tokens, parent, mask_ordinal};
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("tree_metadata", &tree_metadata);
  m.impl("verify_tree", &verify_tree);
  m.impl("expand_tree", &expand_tree);
}

}  // namespace esp
