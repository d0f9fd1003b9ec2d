// The arguments of tree_attention from tensors that passed its checks, for every device.
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "check.h"
#include "esp/tree_attention.h"

namespace esp {

inline TreeAttentionArgs tree_attention_args(
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& q, const at::Tensor& k_cache,
    const at::Tensor& v_cache, const at::Tensor& prefix_len, const at::Tensor& ancestors,
    const at::Tensor& depth, const std::optional<at::Tensor>& block_table, std::optional<double> scale,
    std::optional<int64_t> window, std::optional<double> softcap, const std::optional<at::Tensor>& sinks) {
  TreeAttentionArgs args{};
  args.dtype = check_float(q, "q");
  args.q = q.const_data_ptr();
  args.keys = k_cache.const_data_ptr();
  args.values = v_cache.const_data_ptr();
  args.pages = block_table ? block_table->const_data_ptr<int32_t>() : nullptr;
  args.prefix_len = prefix_len.const_data_ptr<int32_t>();
  args.ancestors = ancestors.const_data_ptr<int64_t>();
  args.depth = depth.const_data_ptr<int32_t>();
  args.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  args.out = out.mutable_data_ptr();
  args.lse = lse.mutable_data_ptr<float>();
  args.batch = q.size(0);
  args.rows = q.size(1);
  args.q_heads = q.size(2);
  args.kv_heads = k_cache.size(2);
  args.dim = q.size(3);
  args.words = ancestors.size(2);
  args.page_size = k_cache.size(1);
  args.max_pages = block_table ? block_table->size(1) : 1;
  for (int i = 0; i < 3; ++i) {
    args.q_strides[i] = q.stride(i);
    args.key_strides[i] = k_cache.stride(i);
    args.value_strides[i] = v_cache.stride(i);
  }
  args.scale = float(scale.value_or(1.0 / std::sqrt(double(args.dim))));
  args.softcap = float(softcap.value_or(0.0));
  args.window = window.value_or(0);
  return args;
}

}  // namespace esp
