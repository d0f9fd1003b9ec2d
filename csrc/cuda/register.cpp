// The CUDA ops, bound for esp_kernels/_backend.py, which has checked their arguments. They are ops of their
// own (esp_kernels_cuda::...), so that Triton's stay selectable. Under ESP_EMULATED they serve the CPU,
// for tests.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "check.h"
#include "esp/cuda_ops.h"
#include "tree_attention_args.h"

#ifdef ESP_EMULATED
#define ESP_KEY CPU
#else
#define ESP_KEY CUDA
// In libtorch_cuda. Weak, so that the library loads beside a torch for the CPU, where none of this is called.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace esp {
namespace {

#ifdef ESP_EMULATED
void* current_stream(const at::Tensor&) { return nullptr; }
#else
void* current_stream(const at::Tensor& t) {
  void* stream = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.device().index(), &stream) == 0, "no current CUDA stream");
  return stream;
}
#endif

std::tuple<at::Tensor, at::Tensor, at::Tensor> advance_block(
    const at::Tensor& ids, const at::Tensor& logprobs, const at::Tensor& tokens, const at::Tensor& parent,
    const at::Tensor& mask_ordinal, const at::Tensor& depth, const at::Tensor& ancestors,
    const at::Tensor& probe, const at::Tensor& embedding, double lam, int64_t budget, int64_t masks,
    at::OptionalIntArrayRef widths, bool prune) {
  const int64_t rows = ids.size(1);
  const c10::DeviceGuard guard(ids.device());
  at::Tensor path = at::empty_like(tokens), committed = at::empty_like(tokens);
  at::Tensor accepted = at::empty({ids.size(0)}, tokens.options());
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
  args.batch = ids.size(0);
  args.rows = rows;
  args.words = ancestors.size(2);
  args.candidates = ids.size(2);
  args.nodes = widths ? check_widths(*widths, masks, budget, masks) : budget / (masks + 1);
  args.masks = masks;
  args.widths = widths ? widths->data() : nullptr;
  args.width_levels = widths ? int64_t(widths->size()) : 0;
  args.prune = prune;
  args.dtype = check_embedding(embedding);
  args.probe = probe.mutable_data_ptr<float>();
  args.probe_masks = probe.size(1);
  args.n = probe.size(2);
  args.stride_batch = probe.stride(0);
  args.stride_mask = probe.stride(1);
  args.embedding = embedding.const_data_ptr();
  args.vocabulary = embedding.size(0);
  args.stride_token = embedding.stride(0);
  args.lam = float(lam);
  advance_block_cuda(args, current_stream(ids));
  return {path, accepted, committed};
}

void commit_kv(at::TensorList caches, const at::Tensor& path, const at::Tensor& accepted,
               const at::Tensor& prefix_len, const std::optional<at::Tensor>& block_table) {
  const at::Tensor& first = caches[0];
  const c10::DeviceGuard guard(first.device());
  std::vector<CommitKvArgs::Target> targets;
  targets.reserve(caches.size());
  for (const at::Tensor& cache : caches) {
    const int64_t unit = cache.element_size(), heads = cache.size(2), head_bytes = cache.size(3) * unit;
    const bool merged = cache.stride(2) == cache.size(3);
    targets.push_back({{cache.mutable_data_ptr(), cache.stride(0) * unit, cache.stride(1) * unit,
                        cache.stride(2) * unit},
                       merged ? 1 : heads, merged ? heads * head_bytes : head_bytes});
  }
  CommitKvArgs args{};
  args.targets = targets.data();
  args.count = int64_t(targets.size());
  args.pages = {first.size(0), first.size(1), block_table ? block_table->const_data_ptr<int32_t>() : nullptr,
                block_table ? block_table->size(1) : 1};
  args.path = path.const_data_ptr<int32_t>();
  args.accepted = accepted.const_data_ptr<int32_t>();
  args.prefix_len = prefix_len.const_data_ptr<int32_t>();
  args.batch = path.size(0);
  args.length = path.size(1);
  commit_kv_cuda(args, current_stream(path));
}

// Scales of the caches come with float8 alone, which these kernels do not read.
std::tuple<at::Tensor, at::Tensor> tree_attention(
    const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& prefix_len,
    const at::Tensor& ancestors, const at::Tensor& depth, const std::optional<at::Tensor>& block_table,
    std::optional<double> scale, std::optional<int64_t> window, std::optional<double> softcap,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&) {
  const c10::DeviceGuard guard(q.device());
  const int64_t batch = q.size(0), rows = q.size(1), q_heads = q.size(2), dim = q.size(3);
  const auto floats = q.options().dtype(at::kFloat);
  at::Tensor out = at::empty(q.sizes(), q.options()), lse = at::empty({batch, rows, q_heads}, floats);
  if (out.numel() == 0) return {out, lse};
  at::Tensor tops = at::empty({kTreeAttentionSplits, batch, rows, q_heads}, floats);
  at::Tensor totals = at::empty_like(tops);
  at::Tensor sums = at::empty({kTreeAttentionSplits, batch, rows, q_heads, dim}, floats);
  const TreeAttentionArgs args =
      tree_attention_args(out, lse, q, k_cache, v_cache, prefix_len, ancestors, depth, block_table, scale,
                          window, softcap, sinks);
  const TreeAttentionParts parts{tops.mutable_data_ptr<float>(), totals.mutable_data_ptr<float>(),
                                 sums.mutable_data_ptr<float>()};
  tree_attention_cuda(args, k_cache.size(0), parts, current_stream(q));
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels_cuda, ESP_KEY, m) {
  m.impl("advance_block", &advance_block);
  m.impl("commit_kv", &commit_kv);
  m.impl("tree_attention", &tree_attention);
}

}  // namespace esp
