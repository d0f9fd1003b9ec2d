// Attention over a cached prefix and a tree of block rows: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <bit>
#include <cmath>
#include <tuple>

#include "check.h"
#include "tree_attention_args.h"

namespace esp {
namespace {

struct Cache {
  int64_t pages, page_size, max_pages;
};

Cache check_cache(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                  const std::optional<at::Tensor>& block_table) {
  const int64_t batch = q.size(0), q_heads = q.size(2), dim = q.size(3);
  check_device(k_cache, "k_cache", q);
  ESP_REQUIRE(k_cache.scalar_type() != at::kFloat8_e4m3fn,
              "k_cache is float8_e4m3fn, which backend 'cpp' does not read; 'ref' and 'triton' do");
  ESP_REQUIRE(k_cache.scalar_type() == q.scalar_type(), "k_cache must be ", name_of(q.scalar_type()),
              " or float8_e4m3fn, got ", name_of(k_cache.scalar_type()));
  check_shape(k_cache, "k_cache", {block_table ? kAny : batch, kAny, kAny, dim});
  check_rows(k_cache, "k_cache");
  const int64_t kv_heads = k_cache.size(2);
  ESP_REQUIRE(kv_heads > 0 && q_heads % kv_heads == 0, "q must have a multiple of k_cache's ", kv_heads,
              " heads, got ", q_heads);
  check_device(v_cache, "v_cache", q);
  check_dtype(v_cache, "v_cache", q.scalar_type());
  check_shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), kv_heads, dim});
  check_rows(v_cache, "v_cache");
  Cache cache{k_cache.size(0), k_cache.size(1), 1};
  if (block_table) {
    check_index(*block_table, "block_table", q, {batch, kAny});
    cache.max_pages = block_table->size(1);
  }
  return cache;
}

// The set bits of a row name one row of each depth 0, 1, ... in order, the row itself last; or there are
// none.
void check_tree(const at::Tensor& ancestors, const at::Tensor& depth) {
  const int64_t rows = ancestors.size(1), words = ancestors.size(2);
  const int64_t* word = ancestors.const_data_ptr<int64_t>();
  const int32_t* depths = depth.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < ancestors.size(0); ++b, depths += rows) {
    for (int64_t r = 0; r < rows; ++r) {
      ESP_REQUIRE(depths[r] >= -1 && depths[r] < rows, "depth[", b, ", ", r, "] must lie in -1..", rows - 1,
                  ", got ", depths[r]);
      int64_t named = 0, last = -1;
      bool agree = true;
      for (int64_t w = 0; w < words; ++w, ++word) {
        for (uint64_t bits = uint64_t(*word); bits != 0; bits &= bits - 1, ++named) {
          last = w * 64 + std::countr_zero(bits);
          ESP_REQUIRE(last <= r, "ancestors[", b, ", ", r, "] names row ", last, ", after ", r);
          agree = agree && depths[last] == named;
        }
      }
      ESP_REQUIRE(named == 0 || (agree && last == r), "ancestors[", b, ", ", r,
                  "] must name one row of each depth 0, 1, ... up to row ", r, ", or none");
    }
  }
}

void check_slots(const at::Tensor& prefix_len, const std::optional<at::Tensor>& block_table,
                 const Cache& cache, int64_t rows) {
  const int32_t* prefix = prefix_len.const_data_ptr<int32_t>();
  const int64_t capacity = cache.page_size * cache.max_pages;
  for (int64_t b = 0; b < prefix_len.size(0); ++b) {
    ESP_REQUIRE(prefix[b] >= 0 && prefix[b] + rows <= capacity, "prefix_len[", b, "] must lie in 0..",
                capacity - rows, " (", capacity, " slots, ", rows, " block rows), got ", prefix[b]);
    if (!block_table) continue;
    const int32_t* page = block_table->const_data_ptr<int32_t>() + b * cache.max_pages;
    for (int64_t i = 0; i * cache.page_size < prefix[b] + rows; ++i)
      ESP_REQUIRE(page[i] >= 0 && page[i] < cache.pages, "block_table[", b, ", ", i, "] must lie in 0..",
                  cache.pages - 1, ", got ", page[i]);
  }
}

std::tuple<at::Tensor, at::Tensor> tree_attention(
    const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& prefix_len,
    const at::Tensor& ancestors, const at::Tensor& depth, const std::optional<at::Tensor>& block_table,
    std::optional<double> scale, std::optional<int64_t> window, std::optional<double> softcap,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& k_scale,
    const std::optional<at::Tensor>& v_scale) {
  check_float(q, "q");
  check_shape(q, "q", {kAny, kAny, kAny, kAny});
  check_rows(q, "q");
  const int64_t batch = q.size(0), rows = q.size(1), q_heads = q.size(2), dim = q.size(3);
  ESP_REQUIRE(dim % 16 == 0 && 16 <= dim && dim <= 256,
              "q must have a head dimension that is a multiple of 16 up to 256, got ", dim);
  const Cache cache = check_cache(q, k_cache, v_cache, block_table);
  check_index(prefix_len, "prefix_len", q, {batch});
  check_device(ancestors, "ancestors", q);
  check_dtype(ancestors, "ancestors", at::kLong);
  check_shape(ancestors, "ancestors", {batch, rows, (rows + 63) / 64});
  check_contiguous(ancestors, "ancestors");
  check_index(depth, "depth", q, {batch, rows});
  ESP_REQUIRE(!scale || (*scale > 0 && std::isfinite(*scale)), "scale must be positive and finite, got ",
              *scale);
  ESP_REQUIRE(!window || *window >= 1, "window must be at least 1, got ", *window);
  ESP_REQUIRE(!softcap || (*softcap > 0 && std::isfinite(*softcap)),
              "softcap must be positive and finite, got ", *softcap);
  if (sinks) {
    check_device(*sinks, "sinks", q);
    check_dtype(*sinks, "sinks", at::kFloat);
    check_shape(*sinks, "sinks", {q_heads});
    check_contiguous(*sinks, "sinks");
  }
  ESP_REQUIRE(!k_scale, "k_scale goes with float8_e4m3fn caches, got ", name_of(k_cache.scalar_type()));
  ESP_REQUIRE(!v_scale, "v_scale goes with float8_e4m3fn caches, got ", name_of(k_cache.scalar_type()));
  check_tree(ancestors, depth);
  check_slots(prefix_len, block_table, cache, rows);

  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor lse = at::empty({batch, rows, q_heads}, q.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse};
  tree_attention_cpu(tree_attention_args(out, lse, q, k_cache, v_cache, prefix_len, ancestors, depth,
                                         block_table, scale, window, softcap, sinks));
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("tree_attention", &tree_attention);
}

}  // namespace esp
