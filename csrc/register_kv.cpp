// Ops that write the K/V cache: checks, then one call into csrc/cpu.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "check.h"
#include "esp/commit_kv.h"
#include "esp/rope_append.h"

namespace esp {
namespace {

// Dense rows on the device of `like`, of its dtype.
void check_like(const at::Tensor& t, const std::string& name, const at::Tensor& like,
                std::initializer_list<int64_t> dims) {
  check_device(t, name.c_str(), like);
  check_dtype(t, name.c_str(), like.scalar_type());
  check_shape(t, name.c_str(), dims);
  check_rows(t, name.c_str());
}

Pages pages_of(const at::Tensor& cache, const std::optional<at::Tensor>& block_table, int64_t batch) {
  if (!block_table) return {cache.size(0), cache.size(1), nullptr, 1};
  check_index(*block_table, "block_table", cache, {batch, kAny});
  return {cache.size(0), cache.size(1), block_table->const_data_ptr<int32_t>(), block_table->size(1)};
}

void check_slot(const Pages& pages, const int32_t* prefix_len, int64_t b, int64_t row) {
  const int64_t slot = prefix_len[b] + row;
  ESP_REQUIRE(prefix_len[b] >= 0, "prefix_len[", b, "] must be at least 0, got ", prefix_len[b]);
  ESP_REQUIRE(slot < pages.capacity(), "prefix_len[", b, "] + row ", row, " must be below the capacity of ",
              pages.capacity(), " slots, got ", slot);
  const int64_t page = pages.page(b, slot);
  ESP_REQUIRE(page >= 0 && page < pages.count, "block_table[", b, ", ", slot / pages.page_size,
              "] must be in 0..", pages.count - 1, ", got ", page);
}

Cache cache_of(const at::Tensor& t, int64_t unit = 1) {
  return {t.mutable_data_ptr(), t.stride(0) * unit, t.stride(1) * unit, t.stride(2) * unit};
}

RopeAppendArgs::Rows rows_of(const at::Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

at::Tensor rope_append(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos,
                       const at::Tensor& sin, const at::Tensor& prefix_len, const at::Tensor& depth,
                       const at::Tensor& k_cache, const at::Tensor& v_cache,
                       const std::optional<at::Tensor>& block_table,
                       const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale) {
  const DType dtype = check_float(q, "q");
  check_shape(q, "q", {kAny, kAny, kAny, kAny});
  check_rows(q, "q");
  const int64_t batch = q.size(0), rows = q.size(1), n = q.size(3);
  check_like(k, "k", q, {batch, rows, kAny, n});
  const int64_t kv_heads = k.size(2);
  check_like(v, "v", q, {batch, rows, kv_heads, n});
  check_device(cos, "cos", q);
  check_dtype(cos, "cos", at::kFloat);
  check_shape(cos, "cos", {kAny, kAny});
  check_contiguous(cos, "cos");
  const int64_t positions = cos.size(0), half = cos.size(1);
  ESP_REQUIRE(2 * half <= n, "cos must have at most ", n / 2, " columns, half the head dimension, got ",
              half);
  check_device(sin, "sin", q);
  check_dtype(sin, "sin", at::kFloat);
  check_shape(sin, "sin", {positions, half});
  check_contiguous(sin, "sin");
  check_index(prefix_len, "prefix_len", q, {batch});
  check_index(depth, "depth", q, {batch, rows});
  check_device(k_cache, "k_cache", q);
  ESP_REQUIRE(k_cache.scalar_type() != at::kFloat8_e4m3fn,
              "k_cache is float8_e4m3fn, which backend 'cpp' does not write; 'ref' and 'triton' do");
  ESP_REQUIRE(k_cache.scalar_type() == q.scalar_type(), "k_cache must be ", name_of(q.scalar_type()),
              " or float8_e4m3fn, got ", name_of(k_cache.scalar_type()));
  check_shape(k_cache, "k_cache", {block_table ? kAny : batch, kAny, kv_heads, n});
  check_rows(k_cache, "k_cache");
  check_like(v_cache, "v_cache", q, {k_cache.size(0), k_cache.size(1), kv_heads, n});
  const Pages pages = pages_of(k_cache, block_table, batch);
  ESP_REQUIRE(!k_scale, "k_scale goes with float8_e4m3fn caches, got ", name_of(k_cache.scalar_type()));
  ESP_REQUIRE(!v_scale, "v_scale goes with float8_e4m3fn caches, got ", name_of(k_cache.scalar_type()));

  const int32_t *prefix = prefix_len.const_data_ptr<int32_t>(), *depths = depth.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t d = depths[b * rows + r];
      ESP_REQUIRE(d >= -1 && d < rows, "depth[", b, ", ", r, "] must be in -1..", rows - 1, ", got ", d);
      if (d < 0) continue;
      check_slot(pages, prefix, b, r);
      ESP_REQUIRE(prefix[b] + d < positions, "prefix_len[", b, "] + depth[", b, ", ", r,
                  "] must be below the ", positions, " positions of cos, got ", prefix[b] + d);
    }
  at::Tensor rotated = at::empty(q.sizes(), q.options());
  rope_append_cpu({dtype, batch, rows, q.size(2), kv_heads, n, rows_of(q), rows_of(k), rows_of(v),
                   cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), half, prefix, depths,
                   cache_of(k_cache), cache_of(v_cache), pages, rotated.mutable_data_ptr()});
  return rotated;
}

void commit_kv(at::TensorList caches, const at::Tensor& path, const at::Tensor& accepted,
               const at::Tensor& prefix_len, const std::optional<at::Tensor>& block_table) {
  ESP_REQUIRE(!caches.empty(), "caches must hold at least one tensor, got 0");
  const at::Tensor& first = caches[0];
  check_cache(first, "caches[0]");
  check_shape(first, "caches[0]", {kAny, kAny, kAny, kAny});
  for (size_t i = 0; i < caches.size(); ++i)
    check_like(caches[i], "caches[" + std::to_string(i) + "]", first,
               {first.size(0), first.size(1), kAny, kAny});
  check_index(path, "path", first, {block_table ? kAny : first.size(0), kAny});
  const int64_t batch = path.size(0), length = path.size(1);
  check_index(accepted, "accepted", first, {batch});
  check_index(prefix_len, "prefix_len", first, {batch});
  const Pages pages = pages_of(first, block_table, batch);

  const int32_t *rows = path.const_data_ptr<int32_t>(), *count = accepted.const_data_ptr<int32_t>(),
                *prefix = prefix_len.const_data_ptr<int32_t>();
  int64_t moved = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* row = rows + b * length;
    ESP_REQUIRE(count[b] >= -1 && count[b] < length, "accepted[", b, "] must be in -1..", length - 1,
                ", got ", count[b]);
    if (count[b] < 1) continue;
    ESP_REQUIRE(row[0] == 0, "path[", b, ", 0] must be 0, the root, got ", row[0]);
    for (int64_t i = 1; i <= count[b]; ++i) {
      ESP_REQUIRE(row[i] > row[i - 1], "path[", b, ", ", i, "] must be above path[", b, ", ", i - 1, "] = ",
                  row[i - 1], ", got ", row[i]);
      check_slot(pages, prefix, b, i);
      check_slot(pages, prefix, b, row[i]);
    }
    moved += count[b];
  }
  if (moved == 0) return;

  std::vector<CommitKvArgs::Target> targets;
  targets.reserve(caches.size());
  int64_t bytes = 0;
  for (const at::Tensor& cache : caches) {
    const int64_t unit = cache.element_size(), heads = cache.size(2), head_bytes = cache.size(3) * unit;
    const bool merged = cache.stride(2) == cache.size(3);
    targets.push_back({cache_of(cache, unit), merged ? 1 : heads, merged ? heads * head_bytes : head_bytes});
    bytes += moved * heads * head_bytes;
  }
  commit_kv_cpu({targets.data(), int64_t(targets.size()), pages, rows, count, prefix, batch, length, bytes});
}

}  // namespace

TORCH_LIBRARY_IMPL(esp_kernels, CPU, m) {
  m.impl("rope_append", &rope_append);
  m.impl("commit_kv", &commit_kv);
}

}  // namespace esp
