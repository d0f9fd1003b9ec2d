// Ops that treat every row alike: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"
#include "esp/rms_norm.h"

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

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("rms_norm", &rms_norm);
}

}  // namespace esp
