// tree_attention on a GPU, in two launches: what csrc/include/esp/tree_attention_prefix.cuh says of the prefix that
// rows have in common, and here the tail of each row, which takes in what the splits left.
//
// What a row adds up, and in which order, follows from its position p = prefix_len + depth alone, as in
// esp_kernels/triton/tree_attention.py:
//
//     keys below S(p) = floor16(p - kDeepest)  in chunks of kChunk; split i takes chunks i, i + kSplits, ...
//     keys from S(p) to p                      in tiles of kTail: rest of the prefix, ancestors by depth, itself
//
// Products that must be rounded before they are added are __fmul_rn, and those that must not are fmaf: else the
// compiler could choose otherwise in the build for few rows than in that for many.
#pragma once
#include "esp/cuda.h"
#include "esp/cuda_ops.h"

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
  const float far = 1.0f - 2.0f / (fast_exp2(fabsf(x) * 2.885390081777927f) + 1.0f);
  return fabsf(x) < 0.625f ? near : copysignf(far, x);
}

ESP_DEVICE float score_of(const TreeAttentionArgs& a, float product) {
  const float scaled = __fmul_rn(product, a.scale);
  return a.softcap == 0 ? scaled : __fmul_rn(a.softcap, smooth_tanh(scaled));
}

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

// Where a slot lies; in page -1 when it is not in the cache.
struct Place {
  int page, offset;

  ESP_DEVICE int64_t element(const int64_t (&strides)[3], int64_t head) const {
    return page * strides[0] + offset * strides[1] + head * strides[2];
  }
};

ESP_DEVICE Place place_of(const TreeAttentionParams& p, int b, int slot) {
  const TreeAttentionArgs& a = p.args;
  if (slot >= p.slots) return {-1, 0};
  if (a.pages == nullptr) return {b, slot};
  const int size = int(a.page_size), page = a.pages[b * a.max_pages + slot / size];
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

// What the splits in use have left of query head `head` of all rows, in order. The lane has columns from `column`.
template <int N>
ESP_DEVICE void merge_splits(const TreeAttentionParams& p, int64_t head, Span span, int column, Softmax<N>& own) {
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
    if (column < a.dim) sum = *reinterpret_cast<const Pack<float, N>*>(p.parts.sums + theirs * a.dim + column);
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

// All threads. Zeros where a key has no place.
template <typename T, int kDim, typename PlaceOf>
ESP_DEVICE void load_tail(const TreeAttentionArgs& a, int64_t kv_head, PlaceOf place_of_key, Tail<T, kDim>& s) {
  using Chunk = Pack<T, 8>;
  constexpr int kChunks = kDim / 8;
  ESP_UNROLL(4)
  for (int i = threadIdx.x; i < kTail * kChunks; i += blockDim.x) {
    const int key = i / kChunks, column = i % kChunks * 8;
    const Place place = column < a.dim ? place_of_key(key) : Place{-1, 0};
    Chunk k{}, v{};
    if (place.page >= 0) {
      const T* keys = static_cast<const T*>(a.keys) + place.element(a.key_strides, kv_head);
      const T* values = static_cast<const T*>(a.values) + place.element(a.value_strides, kv_head);
      k = *reinterpret_cast<const Chunk*>(keys + column);
      v = *reinterpret_cast<const Chunk*>(values + column);
    }
    *reinterpret_cast<Chunk*>(&s.key[key][column]) = k;
    *reinterpret_cast<Chunk*>(&s.value[key][column]) = v;
  }
}

// One warp. A lane takes the score of one key, as one chain, and then the sums of its columns over all keys.
template <typename T, int kDim, int N>
ESP_DEVICE void attend(const TreeAttentionArgs& a, const Tail<T, kDim>& s, typename Tail<T, kDim>::Head& head,
                       bool seen, Softmax<N>& own) {
  const int lane = lane_index();
  float product = 0;
  for (int column = 0; column < a.dim; column += 8) {
    const auto k = *reinterpret_cast<const Pack<T, 8>*>(&s.key[lane][column]);
    ESP_UNROLL(8)
    for (int i = 0; i < 8; ++i) product = fmaf(head.query[column + i], load(k.value[i]), product);
  }
  const float score = seen ? score_of(a, product) : -INFINITY;
  own.raise(fmaxf(own.top, warp_max(score)));
  const float weight = seen ? fast_exp2(score - own.top) : 0.0f;
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
// Reads 4 * (D + 2) bytes a row, query head and split in use. A key of the tail (17 to 32 of them down to depth
// kDeepest) costs 2 * D elements a row and KV head, and 4 * D FLOPs a row and query head.
template <typename T, int kDim>
__global__ void __launch_bounds__(kTailWarps* kWarp, 2)
    tree_attention_tail_kernel(const __grid_constant__ TreeAttentionParams p) {
  constexpr int N = kDim / kWarp;
  const TreeAttentionArgs& a = p.args;
  const int group = int(a.q_heads / a.kv_heads), warps = int(blockDim.x) / kWarp;
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
  Softmax<N> own;
  if (mine) {
    const T* q = static_cast<const T*>(a.q) + b * a.q_strides[0] + row * a.q_strides[1] + head * a.q_strides[2];
    for (int d = lane_index(); d < a.dim; d += kWarp) shared_head.query[d] = load(q[d]);
    merge_splits(p, one, span, column, own);
  }
  for (int at = span.last + max(span.first - span.last, 0) / kTail * kTail; at <= position; at += kTail) {
    if (at + kTail > prefix) find_block_rows(a, b, row, at - prefix, s.block_row);
    const auto place_of_key = [&](int i) -> Place {
      const int key = at + i;
      if (key < span.first || key > position) return {-1, 0};
      return place_of(p, b, key < prefix ? key : prefix + s.block_row[i]);
    };
    load_tail(a, kv_head, place_of_key, s);
    __syncthreads();
    if (mine) attend(a, s, shared_head, place_of_key(lane_index()).page >= 0, own);
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
