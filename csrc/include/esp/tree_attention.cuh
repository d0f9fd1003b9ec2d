// tree_attention on a GPU, in two launches: what csrc/include/esp/tree_attention_prefix.cuh says of the
// prefix that rows have in common, and here the tail of each row, which takes in what the splits left.
//
// What a row adds up, and in which order, follows from its position p = prefix_len + depth alone, as in
// esp_kernels/triton/tree_attention.py, where S(p) = floor16(p - kDeepest):
//
//     keys below S(p)      in chunks of kChunk; split i takes chunks i, i + kTreeAttentionSplits, ...
//     keys from S(p) to p  in tiles of kTail: rest of the prefix, ancestors by depth, itself
//
// Products that must be rounded before they are added are __fmul_rn, and those that must not are fmaf: else
// the compiler could choose otherwise in the build for few rows than in that for many.
#pragma once
#include "esp/cuda.h"
#include "esp/cuda_ops.h"
#include "esp/hopper.cuh"

namespace esp {

constexpr int kChunk = 256, kDeepest = 16, kTail = 32;
constexpr int kTailWarps = 8;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// With numbers in powers of two: scale and softcap hold the factor log2(e).
struct TreeAttentionParams {
  TreeAttentionArgs args;
  TreeAttentionParts parts;
  int page_count, slots;
};

// Odd polynomial near 0 (Cephes), where 1 - 2 / (e^2x + 1) would cancel.
ESP_DEVICE float smooth_tanh(float x) {
  const float y = x * x;
  float series = fmaf(-5.70498872745e-3f, y, 2.06390887954e-2f);
  series = fmaf(series, y, -5.37397155531e-2f);
  series = fmaf(series, y, 1.33314422036e-1f);
  series = fmaf(series, y, -3.33332819422e-1f);
  const float near = fmaf(x * y, series, x);
  const float far = 1.0f - __fdividef(2.0f, fast_exp2(fabsf(x) * 2.885390081777927f) + 1.0f);
  return fabsf(x) < 0.625f ? near : copysignf(far, x);
}

// From products of queries and keys.
template <int N>
ESP_DEVICE void score(const TreeAttentionArgs& a, float (&products)[N]) {
  ESP_UNROLL(N)
  for (int i = 0; i < N; ++i) products[i] = __fmul_rn(products[i], a.scale);
  if (a.softcap == 0) return;
  ESP_UNROLL(N)
  for (int i = 0; i < N; ++i) products[i] = __fmul_rn(a.softcap, smooth_tanh(products[i]));
}

// Query heads of a KV head. As all divisions here, by 32 bits: others take a hundred instructions.
ESP_DEVICE int group_of(const TreeAttentionArgs& a) { return int(a.q_heads) / int(a.kv_heads); }

// No launch knows what the lengths are: one beyond the cache must do no harm.
ESP_DEVICE int cached(const TreeAttentionParams& p, int64_t b) {
  return min(max(p.args.prefix_len[b], 0), p.slots);
}

// The positions [first, last) that the prefix kernel serves for a row.
struct Span {
  int first, last;
};

ESP_DEVICE Span matrix_part(const TreeAttentionArgs& a, int prefix, int depth) {
  const int position = prefix + depth;
  const int last = max(min(position - kDeepest, prefix), 0) / 16 * 16;
  return {a.window == 0 ? 0 : max(position - int(a.window) + 1, 0), last};
}

// A row names itself, and padding nobody.
ESP_DEVICE bool is_real(const TreeAttentionArgs& a, int64_t b, int row) {
  return a.ancestors[(b * a.rows + row) * a.words + row / 64] >> row % 64 & 1;
}

// Where a slot below p.slots lies; in a page below 0 when the table names none.
struct Place {
  int page, offset;

  ESP_DEVICE int64_t element(const int64_t (&strides)[3], int64_t head) const {
    return page * strides[0] + offset * strides[1] + head * strides[2];
  }
};

ESP_DEVICE Place in_pages(const TreeAttentionParams& p, int b, int slot) {
  const int size = int(p.args.page_size), page = p.args.pages[b * p.args.max_pages + slot / size];
  return {page < p.page_count ? page : -1, slot % size};
}

// What one warp knows of its query head, in powers of two. A lane holds N neighbouring sums.
template <int N>
struct Softmax {
  float top = -INFINITY, total = 0;
  float sum[N] = {};

  ESP_DEVICE void raise(float to) {
    if (to == -INFINITY) return;
    const float fade = fast_exp2(top - to);
    total *= fade;
    ESP_UNROLL(N)
    for (int i = 0; i < N; ++i) sum[i] *= fade;
    top = to;
  }
};

// What the splits in use have left of query head `head` of all rows, in order; the lane's columns start at
// `column`.
template <int N>
ESP_DEVICE void merge_splits(const TreeAttentionParams& p, int64_t head, Span span, int column,
                             Softmax<N>& own) {
  if (span.first >= span.last) return;
  const TreeAttentionArgs& a = p.args;
  const int chunk = span.first / kChunk;
  const int splits = min((span.last - 1) / kChunk + 1 - chunk, kTreeAttentionSplits);
  ESP_UNROLL(4)
  for (int i = 0; i < splits; ++i) {
    const int64_t split = (chunk + i) % kTreeAttentionSplits;
    const int64_t theirs = split * a.batch * a.rows * a.q_heads + head;
    const float top = p.parts.tops[theirs], total = p.parts.totals[theirs];
    Pack<float, N> sum{};
    if (column < a.dim)
      sum = *reinterpret_cast<const Pack<float, N>*>(p.parts.sums + theirs * a.dim + column);
    own.raise(fmaxf(own.top, top));
    const float fade = top == -INFINITY ? 0.0f : fast_exp2(top - own.top);
    own.total = fmaf(total, fade, own.total);
    ESP_UNROLL(N)
    for (int j = 0; j < N; ++j) own.sum[j] = fmaf(sum.value[j], fade, own.sum[j]);
  }
}

// Shared memory of a tail. Rows are padded, so that 8 lanes find 16 bytes of 8 rows in different banks.
template <typename T, int kDim>
struct Tail {
  T key[kTail][kDim + 8], value[kTail][kDim + 8];
  int block_row[kTail];
  Place place[kTail];

  struct Head {
    float query[kDim], weight[kTail];
  };

  ESP_DEVICE Head& head(int warp) { return reinterpret_cast<Head*>(this + 1)[warp]; }

  static size_t bytes(int warps) { return sizeof(Tail) + warps * sizeof(Head); }
};

// Sets block_row to the row's ancestor at each depth from `depth` on, or to row 0 where none stands.
ESP_DEVICE void find_block_rows(const TreeAttentionArgs& a, int64_t b, int row, int depth, int* block_row) {
  for (int i = threadIdx.x; i < kTail; i += blockDim.x) block_row[i] = 0;
  __syncthreads();
  const int64_t* words = a.ancestors + (b * a.rows + row) * a.words;
  for (int j = threadIdx.x; j <= row; j += blockDim.x) {
    const int i = a.depth[b * a.rows + j] - depth;
    if (words[j / 64] >> j % 64 & 1 && i >= 0 && i < kTail) block_row[i] = j;
  }
  __syncthreads();
}

// All threads: where the keys of the tile from position `at` on lie, those that the row does not see nowhere.
template <typename T, int kDim>
ESP_DEVICE void find_places(const TreeAttentionParams& p, int b, int row, int prefix, int first, int position,
                            int at, Tail<T, kDim>& s) {
  if (at + kTail > prefix) find_block_rows(p.args, b, row, at - prefix, s.block_row);
  if (threadIdx.x < kTail) {
    const int i = int(threadIdx.x), key = at + i, slot = key < prefix ? key : prefix + s.block_row[i];
    const bool seen = key >= first && key <= position && slot < p.slots;
    if (!seen) s.place[i] = {-1, 0};
    else s.place[i] = p.args.pages == nullptr ? Place{b, slot} : in_pages(p, b, slot);
  }
  __syncthreads();
}

// All threads: starts to copy the tile, and zeros where a key has no place.
template <typename T, int kDim>
ESP_DEVICE void load_tail(const TreeAttentionArgs& a, int64_t kv_head, Tail<T, kDim>& s) {
  constexpr int kChunks = kDim / 8;
  const T *keys = static_cast<const T*>(a.keys), *values = static_cast<const T*>(a.values);
  ESP_UNROLL(4)
  for (int i = threadIdx.x; i < kTail * kChunks; i += blockDim.x) {
    const int key = i / kChunks, column = i % kChunks * 8;
    const Place place = s.place[key];
    const bool real = place.page >= 0 && column < a.dim;
    const T* from_key = keys + place.element(a.key_strides, kv_head) + column;
    const T* from_value = values + place.element(a.value_strides, kv_head) + column;
    copy_async(&s.key[key][column], real ? from_key : keys, real);
    copy_async(&s.value[key][column], real ? from_value : values, real);
  }
}

// One warp. A lane takes the score of one key, as one chain, and then the sums of its columns over all keys.
template <typename T, int kDim, int N>
ESP_DEVICE void attend(const TreeAttentionArgs& a, const Tail<T, kDim>& s, typename Tail<T, kDim>::Head& head,
                       Softmax<N>& own) {
  const int lane = lane_index();
  const bool seen = s.place[lane].page >= 0;
  float product[1] = {};
  for (int column = 0; column < a.dim; column += 8) {
    const auto k = *reinterpret_cast<const Pack<T, 8>*>(&s.key[lane][column]);
    ESP_UNROLL(8)
    for (int i = 0; i < 8; ++i) product[0] = fmaf(head.query[column + i], load(k.value[i]), product[0]);
  }
  score(a, product);
  own.raise(fmaxf(own.top, warp_max(seen ? product[0] : -INFINITY)));
  const float weight = seen ? fast_exp2(product[0] - own.top) : 0.0f;
  own.total += warp_sum(weight);
  head.weight[lane] = weight;
  __syncwarp();
  ESP_UNROLL(8)
  for (int key = 0; key < kTail; ++key) {
    const auto v = *reinterpret_cast<const Pack<T, N>*>(&s.value[key][lane * N]);
    ESP_UNROLL(N)
    for (int i = 0; i < N; ++i) own.sum[i] = fmaf(head.weight[key], load(v.value[i]), own.sum[i]);
  }
}

// A block serves a row and KV head; each warp takes one query head. Where a group has more heads than a block
// has warps, several blocks do.
//
// Reads 4 * (D + 2) bytes a row, query head and split in use. A key of the tail (17 to 32 of them down to
// depth kDeepest) costs 2 * D elements a row and KV head, and 4 * D FLOPs a row and query head.
template <typename T, int kDim>
__global__ void __launch_bounds__(kTailWarps* kWarp, 2)
    tree_attention_tail_kernel(const __grid_constant__ TreeAttentionParams p) {
  constexpr int N = kDim / kWarp;
  const TreeAttentionArgs& a = p.args;
  const int group = group_of(a), warps = int(blockDim.x) / kWarp;
  const int blocks = (group - 1) / warps + 1, row = int(blockIdx.x) / blocks;
  const int b = int(blockIdx.z), kv_head = int(blockIdx.y), column = lane_index() * N;
  const int member = int(blockIdx.x) % blocks * warps + warp_index();
  const bool mine = member < group;
  const int head = kv_head * group + member;
  const int64_t one = (int64_t{b} * a.rows + row) * a.q_heads + head;
  auto* out = reinterpret_cast<Pack<T, N>*>(static_cast<T*>(a.out) + one * a.dim + column);
  if (!is_real(a, b, row)) {
    if (mine && column < a.dim) *out = {};
    if (mine && lane_index() == 0) a.lse[one] = -INFINITY;
    return;
  }

  auto& s = *reinterpret_cast<Tail<T, kDim>*>(dynamic_shared());
  auto& shared_head = s.head(warp_index());
  const int prefix = cached(p, b), depth = a.depth[b * a.rows + row], position = prefix + depth;
  const Span span = matrix_part(a, prefix, depth);
  const int first = span.last + max(span.first - span.last, 0) / kTail * kTail;
  Softmax<N> own;
  if (mine) {
    const int64_t query = b * a.q_strides[0] + row * a.q_strides[1] + head * a.q_strides[2];
    const T* q = static_cast<const T*>(a.q) + query;
    for (int d = lane_index(); d < a.dim; d += kWarp) shared_head.query[d] = load(q[d]);
  }
  for (int at = first; at <= position; at += kTail) {
    find_places(p, b, row, prefix, span.first, position, at, s);
    load_tail(a, kv_head, s);
    // While keys and values are on their way.
    if (mine && at == first) merge_splits(p, one, span, column, own);
    wait_for_copies();
    __syncthreads();
    if (mine) attend(a, s, shared_head, own);
    __syncthreads();
  }
  if (!mine) return;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head] * kLog2E;
    own.raise(fmaxf(own.top, sink));
    own.total += fast_exp2(sink - own.top);
  }
  if (lane_index() == 0) a.lse[one] = (own.top + log2f(own.total)) * kLn2;
  if (column >= a.dim) return;
  Pack<T, N> result;
  ESP_UNROLL(N)
  for (int i = 0; i < N; ++i) result.value[i] = store<T>(own.sum[i] / own.total);
  *out = result;
}

}  // namespace esp
