// Ops that make a block's rows and keep its probe: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"
#include "esp/embed_block.h"
#include "esp/swiglu.h"
#include "esp/update_probe.h"

namespace esp {
namespace {

at::Tensor embed_block(const at::Tensor& tokens, const at::Tensor& mask_ordinal, const at::Tensor& embedding,
                       const at::Tensor& probe) {
  const DType dtype = check_embedding(embedding);
  check_index(tokens, "tokens", embedding, {kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1);
  check_index(mask_ordinal, "mask_ordinal", embedding, {batch, rows});
  check_probe(probe, embedding, batch);

  const int32_t* token = tokens.const_data_ptr<int32_t>();
  const int32_t* ordinal = mask_ordinal.const_data_ptr<int32_t>();
  const int64_t vocabulary = embedding.size(0), masks = probe.size(1), n = embedding.size(1);
  for (int64_t i = 0; i < batch * rows; ++i) {
    ESP_REQUIRE(ordinal[i] >= -1 && ordinal[i] <= masks, "mask_ordinal[", i / rows, ", ", i % rows,
                "] must be in -1..", masks, ", got ", ordinal[i]);
    ESP_REQUIRE(ordinal[i] != 0 || (token[i] >= 0 && token[i] < vocabulary), "tokens[", i / rows, ", ",
                i % rows, "] must be in the vocabulary of ", vocabulary, " tokens, got ", token[i]);
  }
  at::Tensor x = at::empty({batch, rows, n}, embedding.options());
  embed_block_cpu({dtype, batch, rows, n, token, ordinal, embedding.const_data_ptr(), embedding.stride(0),
                   probe.const_data_ptr<float>(), probe.stride(0), probe.stride(1), x.mutable_data_ptr()});
  return x;
}

void update_probe(const at::Tensor& probe, const at::Tensor& embedding, const at::Tensor& committed,
                  double lam) {
  const DType dtype = check_embedding(embedding);
  check_index(committed, "committed", embedding, {kAny, kAny});
  const int64_t batch = committed.size(0), length = committed.size(1);
  check_probe(probe, embedding, batch);
  ESP_REQUIRE(lam >= 0 && lam <= 1, "lam must be in 0..1, got ", lam);

  const int32_t* token = committed.const_data_ptr<int32_t>();
  const int64_t vocabulary = embedding.size(0);
  for (int64_t i = 0; i < batch * length; ++i)
    ESP_REQUIRE(token[i] >= -1 && token[i] < vocabulary, "committed[", i / length, ", ", i % length,
                "] must be -1 or in the vocabulary of ", vocabulary, " tokens, got ", token[i]);
  update_probe_cpu({dtype, probe.mutable_data_ptr<float>(), batch, probe.size(1), probe.size(2),
                    probe.stride(0), probe.stride(1), embedding.const_data_ptr(), embedding.stride(0), token,
                    length, float(lam)});
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  const DType dtype = check_float(gate_up, "gate_up");
  ESP_REQUIRE(gate_up.dim() >= 1, "gate_up must have at least 1 dimension, got 0");
  ESP_REQUIRE(gate_up.size(-1) % 2 == 0, "gate_up must have an even last dimension, got ", gate_up.size(-1));
  check_rows(gate_up, "gate_up");
  at::DimVector shape(gate_up.sizes());
  const int64_t n = shape.back() /= 2;
  at::Tensor y = at::empty(shape, gate_up.options());
  if (y.numel() == 0) return y;
  // Everything but the last two dimensions must collapse into one stride; a copy does for the rest.
  const at::Tensor rows = gate_up.dim() <= 2 ? gate_up : gate_up.flatten(0, -3);
  const bool flat = rows.dim() < 3, single = rows.dim() == 1;
  swiglu_cpu({dtype, rows.const_data_ptr(), y.mutable_data_ptr(), flat ? 1 : rows.size(0),
              single ? 1 : rows.size(-2), n, flat ? 0 : rows.stride(0), single ? 0 : rows.stride(-2)});
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("embed_block", &embed_block);
  m.impl("update_probe", &update_probe);
  m.impl("swiglu", &swiglu);
}

}  // namespace esp
