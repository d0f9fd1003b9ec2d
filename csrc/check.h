// Argument checks of the native ops. The sentences are the same as in esp_kernels/_check.py; a test holds
// both to it.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <sstream>
#include <string>

#include "esp/types.h"

#define ESP_REQUIRE(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)

namespace esp {

constexpr int64_t kAny = -1;

inline std::string listed(at::IntArrayRef values) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i) out << ", ";
    if (values[i] == kAny) out << '*';
    else out << values[i];
  }
  out << ']';
  return out.str();
}

inline const char* name_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kBFloat16: return "bfloat16";
    case at::kHalf: return "float16";
    case at::kDouble: return "float64";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kBool: return "bool";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    default: return at::toString(type);
  }
}

inline void check_shape(const at::Tensor& t, const char* name, std::initializer_list<int64_t> dims) {
  bool same = t.dim() == int64_t(dims.size());
  for (size_t i = 0; same && i < dims.size(); ++i)
    same = dims.begin()[i] == kAny || t.size(int64_t(i)) == dims.begin()[i];
  ESP_REQUIRE(same, name, " must have shape ", listed(at::IntArrayRef(dims.begin(), dims.size())), ", got ",
              listed(t.sizes()));
}

inline void check_dtype(const at::Tensor& t, const char* name, at::ScalarType type) {
  ESP_REQUIRE(t.scalar_type() == type, name, " must be ", name_of(type), ", got ", name_of(t.scalar_type()));
}

inline DType check_float(const at::Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    default:
      ESP_REQUIRE(false, name, " must be float32, bfloat16 or float16, got ", name_of(t.scalar_type()));
  }
}

inline void check_cache(const at::Tensor& t, const char* name) {
  const at::ScalarType type = t.scalar_type();
  const bool known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  ESP_REQUIRE(known || type == at::kFloat8_e4m3fn, name,
              " must be float32, bfloat16, float16 or float8_e4m3fn, got ", name_of(type));
}

inline void check_device(const at::Tensor& t, const char* name, const at::Tensor& like) {
  ESP_REQUIRE(t.device() == like.device(), name, " must be on ", like.device().str(), ", got ",
              t.device().str());
}

inline void check_contiguous(const at::Tensor& t, const char* name) {
  ESP_REQUIRE(t.is_contiguous(), name, " must be contiguous, got strides ", listed(t.strides()));
}

// The last dimension must be dense; the others may have any stride.
inline void check_rows(const at::Tensor& t, const char* name) {
  ESP_REQUIRE(t.size(-1) <= 1 || t.stride(-1) == 1, name,
              " must have stride 1 in its last dimension, got strides ", listed(t.strides()));
}

// An int32 tensor on the device of `like`, contiguous.
inline void check_index(const at::Tensor& t, const char* name, const at::Tensor& like,
                        std::initializer_list<int64_t> dims) {
  check_device(t, name, like);
  check_dtype(t, name, at::kInt);
  check_shape(t, name, dims);
  check_contiguous(t, name);
}

inline DType check_embedding(const at::Tensor& embedding) {
  const DType dtype = check_float(embedding, "embedding");
  check_shape(embedding, "embedding", {kAny, kAny});
  check_rows(embedding, "embedding");
  return dtype;
}

inline void check_probe(const at::Tensor& probe, const at::Tensor& embedding, int64_t batch) {
  check_device(probe, "probe", embedding);
  check_dtype(probe, "probe", at::kFloat);
  check_shape(probe, "probe", {batch, kAny, embedding.size(1)});
  check_rows(probe, "probe");
}

constexpr int64_t kMaxBudget = 4096;

// The widths of a static tree; returns its nodes, root included.
inline int64_t check_widths(at::IntArrayRef widths, int64_t levels, int64_t budget, int64_t masks) {
  ESP_REQUIRE(int64_t(widths.size()) <= levels, "widths must have at most ", levels,
              " levels, as ids has, got ", widths.size());
  int64_t nodes = 1;
  for (const int64_t width : widths) {
    ESP_REQUIRE(width >= 1 && width <= kMaxBudget, "widths must each be 1 to ", kMaxBudget, ", got ", width);
    nodes += width;
  }
  ESP_REQUIRE(nodes * (masks + 1) <= budget, "widths ", listed(widths), " with ", masks, " masks need ",
              nodes * (masks + 1), " rows, budget is ", budget);
  return nodes;
}

}  // namespace esp
