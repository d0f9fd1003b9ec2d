// Ops that treat every row alike: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "check.h"
#include "esp/linear_rows.h"
#include "esp/rms_norm.h"
#include "esp/topk_logprobs.h"

namespace esp {
namespace {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    const std::optional<at::Tensor>& residual) {
  const DType dtype = check_float(x, "x");
  ESP_REQUIRE(x.dim() >= 1 && x.dim() <= 4, "x must have 1 to 4 dimensions, got ", x.dim());
  const int64_t n = x.size(-1);
  check_rows(x, "x");
  check_device(weight, "weight", x);
  check_dtype(weight, "weight", x.scalar_type());
  check_shape(weight, "weight", {n});
  check_contiguous(weight, "weight");
  ESP_REQUIRE(eps >= 0, "eps must be at least 0, got ", eps);
  if (residual) {
    check_device(*residual, "residual", x);
    check_dtype(*residual, "residual", x.scalar_type());
    ESP_REQUIRE(residual->sizes() == x.sizes(), "residual must have shape ", listed(x.sizes()), ", got ",
                listed(residual->sizes()));
    check_contiguous(*residual, "residual");
  }
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  // Everything but the last two dimensions must collapse into one stride; a copy does for the rest.
  const at::Tensor rows = x.dim() <= 2 ? x : x.flatten(0, -3);
  const bool flat = rows.dim() < 3;
  rms_norm_cpu({dtype, rows.const_data_ptr(), residual ? residual->mutable_data_ptr() : nullptr,
                weight.const_data_ptr(), y.mutable_data_ptr(),
                flat ? 1 : rows.size(0), rows.dim() == 1 ? 1 : rows.size(-2), n,
                flat ? 0 : rows.stride(0), rows.dim() == 1 ? 0 : rows.stride(-2), float(eps)});
  return y;
}

// [..., n] as [rows, n] with one stride between rows; a copy where the leading dimensions do not collapse.
at::Tensor as_rows(const at::Tensor& t) {
  if (t.dim() == 1) return t.unsqueeze(0);
  return t.dim() == 2 ? t : t.flatten(0, -2);
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> out = sizes.vec();
  out.back() = last;
  return out;
}

at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& packed_weight, int64_t out_features,
                       const std::optional<at::Tensor>& bias) {
  const DType dtype = check_float(x, "x");
  ESP_REQUIRE(x.dim() >= 1, "x must have at least 1 dimension, got 0");
  ESP_REQUIRE(x.size(-1) >= 1, "x must have at least 1 element in its last dimension, got 0");
  check_rows(x, "x");
  ESP_REQUIRE(out_features >= 1, "out_features must be at least 1, got ", out_features);
  const int64_t k = x.size(-1), panels = (out_features - 1) / kPanel + 1;
  check_device(packed_weight, "packed_weight", x);
  check_dtype(packed_weight, "packed_weight", x.scalar_type());
  if (dtype == DType::bf16) check_shape(packed_weight, "packed_weight", {panels, (k + 1) / 2, kPanel, 2});
  else check_shape(packed_weight, "packed_weight", {panels, k, kPanel});
  check_contiguous(packed_weight, "packed_weight");
  if (bias) {
    check_device(*bias, "bias", x);
    check_dtype(*bias, "bias", x.scalar_type());
    check_shape(*bias, "bias", {out_features});
    check_contiguous(*bias, "bias");
  }
  at::Tensor y = at::empty(with_last(x.sizes(), out_features), x.options());
  if (y.numel() == 0) return y;
  const at::Tensor rows = as_rows(x);
  linear_rows_cpu({dtype, rows.const_data_ptr(), packed_weight.const_data_ptr(),
                   bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), rows.size(0), k,
                   out_features, rows.stride(0)});
  return y;
}

std::tuple<at::Tensor, at::Tensor> topk_logprobs(const at::Tensor& logits, int64_t k) {
  const DType dtype = check_float(logits, "logits");
  ESP_REQUIRE(logits.dim() >= 1, "logits must have at least 1 dimension, got 0");
  const int64_t n = logits.size(-1);
  ESP_REQUIRE(n >= 1, "logits must have at least 1 element in its last dimension, got 0");
  check_rows(logits, "logits");
  const int64_t most = std::min<int64_t>(n, kMaxTopk);
  ESP_REQUIRE(k >= 1 && k <= most, "k must be between 1 and ", most, ", got ", k);
  const auto sizes = with_last(logits.sizes(), k);
  at::Tensor logprobs = at::empty(sizes, logits.options().dtype(at::kFloat));
  at::Tensor ids = at::empty(sizes, logits.options().dtype(at::kInt));
  if (ids.numel() == 0) return {logprobs, ids};
  const at::Tensor rows = as_rows(logits);
  topk_logprobs_cpu({dtype, rows.const_data_ptr(), logprobs.mutable_data_ptr<float>(),
                     ids.mutable_data_ptr<int32_t>(), rows.size(0), n, k, rows.stride(0)});
  return {logprobs, ids};
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("linear_rows", &linear_rows);
  m.impl("rms_norm", &rms_norm);
  m.impl("topk_logprobs", &topk_logprobs);
}

}  // namespace esp
