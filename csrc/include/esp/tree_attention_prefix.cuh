// tree_attention over the prefix that rows have in common, by Hopper's matrix units.
//
// A block serves a split, a KV head, and up to 128 rows packed with the query heads of its group. One
// warpgroup loads tiles of 64 positions into a ring; one or two others take 64 rows each through scores,
// softmax and weighted values. A row's bits do not depend on which rows share its tile, since rows of a
// product do not mix and a tile of which a row sees nothing leaves it as it is.
//
// Tiles are loaded by cp.async and swizzled by hand, not by TMA: a tensor map takes boxes of rows at one
// stride, and pages of any size, 1 included, have them at another stride every few rows. The maps would also
// have to be made on the host for each cache and layer.
//
// Every operand is made of panels of 64 columns, the width of the swizzle: one shape of wgmma serves keys as
// they lie and values transposed, at every head dimension; what is above the real one is zeros.
//
// Reads 2 * prefix * D elements of K and V a KV head and tile of packed rows, and does 4 * prefix * D FLOPs a
// row and query head. Writes 4 * (D + 2) bytes a row, query head and split in use: one of each kChunk
// positions of the prefix, at most kTreeAttentionSplits.
#pragma once
#include "esp/hopper.cuh"
#include "esp/tree_attention.cuh"

namespace esp {

constexpr int kTile = kPanelRows;  // positions

template <int kDim, int kGroups>
struct PrefixShape {
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kStages = kDim > 128 ? 2 : 4;
  static constexpr int kRows = kGroups * kPanelRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Rows that no warpgroup needs to itself leave room for a second block.
  static constexpr int kBlocks = kDim == 64 && kGroups == 1 ? 2 : 1;
  static constexpr size_t kBytes = kPanelBytes * (1 + size_t(kPanels) * (kGroups + 2 * kStages));
};

// Shared memory: queries, then keys and values of each stage, then the barriers.
template <int kDim, int kGroups>
struct PrefixShared {
  using Shape = PrefixShape<kDim, kGroups>;

  unsigned char* panels;
  uint64_t *full, *empty;  // [kStages]: a stage has landed; a stage has been read

  ESP_DEVICE PrefixShared() {
    const uint32_t address = shared_address(dynamic_shared());
    panels = dynamic_shared() + (0u - address) % 1024;
    full = reinterpret_cast<uint64_t*>(keys(Shape::kStages));
    empty = full + Shape::kStages;
  }

  ESP_DEVICE unsigned char* queries(int group) const { return panels + group * Shape::kPanels * kPanelBytes; }
  ESP_DEVICE unsigned char* keys(int stage) const {
    return panels + (kGroups + 2 * stage) * Shape::kPanels * kPanelBytes;
  }
  ESP_DEVICE unsigned char* values(int stage) const { return keys(stage) + Shape::kPanels * kPanelBytes; }
};

// The tiles of a split: those from position `at` in each of its chunks, as far as any row sees.
struct Tiles {
  int start, end, at, count;

  ESP_DEVICE void advance() {
    at += kTile;
    if (at % kChunk == 0) at += (kTreeAttentionSplits - 1) * kChunk;
  }
};

// Row `packed` of all that share a KV head.
struct PackedRow {
  int row, member;
  bool inside;

  ESP_DEVICE PackedRow(const TreeAttentionArgs& a, int packed) {
    const int group = group_of(a);
    row = packed / group;
    member = packed % group;
    inside = row < a.rows;
  }
};

// Empty where nothing is seen. Without branches, so that several rows are read side by side.
ESP_DEVICE Span span_of(const TreeAttentionArgs& a, int b, int prefix, int packed) {
  const PackedRow r(a, packed);
  const int row = min(r.row, int(a.rows) - 1);
  const bool real = is_real(a, b, row);
  const Span span = matrix_part(a, prefix, a.depth[b * a.rows + row]);
  return real & r.inside & (span.first < span.last) ? span : Span{0, 0};
}

// Each warp looks at all rows of the block.
template <int kRows>
ESP_DEVICE Tiles tiles_of(const TreeAttentionParams& p, int b, int first_row, int split) {
  const int prefix = cached(p, b);
  int low = INT32_MAX, high = 0;
  ESP_UNROLL(kRows / kWarp)
  for (int i = 0; i < kRows / kWarp; ++i) {
    const Span span = span_of(p.args, b, prefix, first_row + i * kWarp + lane_index());
    low = span.last > 0 ? min(low, span.first) : low;
    high = max(high, span.last);
  }
  Tiles t{};
  t.end = int(__reduce_max_sync(kAllLanes, unsigned(high)));
  t.start = min(int(__reduce_min_sync(kAllLanes, unsigned(low))), t.end);
  const int first = t.start / kChunk;
  const int chunk = first + ((split - first) & (kTreeAttentionSplits - 1));
  t.at = chunk * kChunk;
  if (t.at >= t.end) return t;
  const int more = ((t.end - 1) / kChunk - chunk) / kTreeAttentionSplits;
  const int rest = t.end - (chunk + more * kTreeAttentionSplits) * kChunk;
  t.count = more * (kChunk / kTile) + (min(rest, kChunk) - 1) / kTile + 1;
  return t;
}

// What a thread of the loading warpgroup copies: one chunk of 16 bytes of every kStep-th row.
template <int kDim>
struct Share {
  static constexpr int kChunks = kDim / 8, kStep = kWarpgroup / kChunks;
  int row = int(threadIdx.x) % kWarpgroup / kChunks, chunk = int(threadIdx.x) % kChunks;

  ESP_DEVICE unsigned char* in(unsigned char* panels, int row) const {
    return panel_chunk(panels + chunk / 8 * kPanelBytes, row, chunk % 8);
  }
};

template <typename T, int kDim>
ESP_DEVICE void load_queries(const TreeAttentionArgs& a, int b, int kv_head, int first_row,
                             unsigned char* panels) {
  const T* q = static_cast<const T*>(a.q) + b * a.q_strides[0];
  const Share<kDim> mine;
  ESP_UNROLL(1)
  for (int row = mine.row; row < kPanelRows; row += mine.kStep) {
    const PackedRow r(a, first_row + row);
    const int64_t head = kv_head * group_of(a) + r.member;
    const bool real = r.inside && mine.chunk * 8 < a.dim;
    const T* from = q + r.row * a.q_strides[1] + head * a.q_strides[2] + mine.chunk * 8;
    copy_async(mine.in(panels, row), real ? from : q, real);
  }
}

// Four rows at once, so that their pages are looked up side by side.
template <typename T, int kDim>
ESP_DEVICE void load_tile(const TreeAttentionParams& p, int b, int kv_head, const Tiles& t,
                          unsigned char* keys, unsigned char* values) {
  const TreeAttentionArgs& a = p.args;
  const Share<kDim> mine;
  const T *k = static_cast<const T*>(a.keys), *v = static_cast<const T*>(a.values);
  ESP_UNROLL(1)
  for (int first = mine.row; first < kPanelRows; first += 4 * mine.kStep) {
    Place place[4];
    ESP_UNROLL(4)
    for (int i = 0; i < 4; ++i) place[i] = {b, min(max(t.at + first + i * mine.kStep, t.start), t.end - 1)};
    if (a.pages != nullptr) {
      ESP_UNROLL(4)
      for (int i = 0; i < 4; ++i) place[i] = in_pages(p, b, place[i].offset);
    }
    ESP_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const int row = first + i * mine.kStep, slot = t.at + row;
      const bool real = slot >= t.start && slot < t.end && place[i].page >= 0 && mine.chunk * 8 < a.dim;
      const T* from_k = k + place[i].element(a.key_strides, kv_head) + mine.chunk * 8;
      const T* from_v = v + place[i].element(a.value_strides, kv_head) + mine.chunk * 8;
      copy_async(mine.in(keys, row), real ? from_k : k, real);
      copy_async(mine.in(values, row), real ? from_v : v, real);
    }
  }
}

template <typename T, int kDim, int kGroups>
ESP_DEVICE void produce(const TreeAttentionParams& p, int b, int kv_head, int first_row, Tiles t,
                        const PrefixShared<kDim, kGroups>& s) {
  constexpr int kStages = PrefixShape<kDim, kGroups>::kStages;
  for (int group = 0; group < kGroups; ++group)
    load_queries<T, kDim>(p.args, b, kv_head, first_row + group * kPanelRows, s.queries(group));
  for (int i = 0; i < t.count; ++i, t.advance()) {
    const int stage = i % kStages, round = i / kStages;
    if (round > 0) mbarrier_wait(&s.empty[stage], (round - 1) & 1);
    load_tile<T, kDim>(p, b, kv_head, t, s.keys(stage), s.values(stage));
    mbarrier_arrive_after_copies(&s.full[stage]);
  }
  wait_for_copies();
}

// A thread has columns column_of(i) of rows 0 and 8 from its own first one: i / 2 % 2 says which.
ESP_DEVICE int column_of(int i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }

ESP_DEVICE float over_row(float x, bool add) {
  ESP_UNROLL(2)
  for (int mask = 1; mask <= 2; mask *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, mask);
    x = add ? x + other : fmaxf(x, other);
  }
  return x;
}

// One of the thread's two rows.
struct PrefixRow {
  Span span;
  float top = -INFINITY, total = 0;  // the total is over this thread's columns
};

// From scores to weights, in place; returns by how much what was summed before fades.
ESP_DEVICE float weigh(int at, int half, PrefixRow& row, float (&s)[32]) {
  float higher = row.top;
  ESP_UNROLL(16)
  for (int j = 0; j < 16; ++j) {
    const int i = j / 2 * 4 + half * 2 + j % 2, slot = at + column_of(i);
    s[i] = slot >= row.span.first && slot < row.span.last ? s[i] : -INFINITY;
    higher = fmaxf(higher, s[i]);
  }
  higher = over_row(higher, false);
  const float shift = higher == -INFINITY ? 0.0f : higher, fade = fast_exp2(row.top - shift);
  float sum = 0;
  ESP_UNROLL(16)
  for (int j = 0; j < 16; ++j) {
    const int i = j / 2 * 4 + half * 2 + j % 2;
    s[i] = fast_exp2(s[i] - shift);
    sum += s[i];
  }
  row.top = higher;
  row.total = fmaf(row.total, fade, sum);
  return fade;
}

template <typename T, int kDim, int kGroups>
ESP_DEVICE void consume(const TreeAttentionParams& p, int b, int kv_head, int first_row, int split, Tiles t,
                        const PrefixShared<kDim, kGroups>& shared) {
  using Shape = PrefixShape<kDim, kGroups>;
  constexpr int kPanels = Shape::kPanels;
  const TreeAttentionArgs& a = p.args;
  const int group = __shfl_sync(kAllLanes, warp_index() / 4, 0);  // to the compiler, the same in all lanes
  first_row += group * kPanelRows + warp_index() % 4 * 16 + lane_index() / 4;
  const int prefix = cached(p, b);
  PrefixRow rows[2] = {{span_of(a, b, prefix, first_row)}, {span_of(a, b, prefix, first_row + 8)}};
  const uint32_t queries = shared_address(shared.queries(group));
  float acc[kPanels][32] = {};

  for (int i = 0; i < t.count; ++i, t.advance()) {
    const int stage = i % Shape::kStages, round = i / Shape::kStages;
    const uint32_t keys = shared_address(shared.keys(stage)), values = shared_address(shared.values(stage));
    mbarrier_wait(&shared.full[stage], round & 1);
    fence_async_proxy();

    float s[32] = {};
    wgmma_fence(s);
    ESP_UNROLL(4 * kPanels)
    for (int k = 0; k < 4 * kPanels; ++k) {
      const uint32_t offset = k / 4 * kPanelBytes + k % 4 * 32;  // 16 columns further
      wgmma<T>(s, panel_operand(queries + offset), panel_operand(keys + offset), k > 0);
    }
    wgmma_commit();
    wgmma_wait(s);

    score(a, s);
    const float fade[2] = {weigh(t.at, 0, rows[0], s), weigh(t.at, 1, rows[1], s)};
    uint32_t weights[4][4];
    ESP_UNROLL(16)
    for (int j = 0; j < 16; ++j) weights[j / 4][j % 4] = packed<T>(s[2 * j], s[2 * j + 1]);
    ESP_UNROLL(32 * kPanels)
    for (int j = 0; j < 32 * kPanels; ++j) acc[j / 32][j % 32] *= fade[j / 2 % 2];

    wgmma_fence(acc, weights);
    ESP_UNROLL(4 * kPanels)
    for (int k = 0; k < 4 * kPanels; ++k) {
      const uint32_t offset = k / 4 * kPanelBytes + k % 4 * 16 * kPanelRowBytes;  // 16 rows further
      wgmma<T>(acc[k / 4], weights[k % 4], panel_operand(values + offset), true);
    }
    wgmma_commit();
    wgmma_wait(acc);
    if (lane_index() == 0) mbarrier_arrive(&shared.empty[stage]);
  }

  ESP_UNROLL(2)
  for (int half = 0; half < 2; ++half) {
    const PrefixRow& mine = rows[half];
    const PackedRow r(a, first_row + 8 * half);
    const float total = over_row(mine.total, true);
    if (mine.span.first >= mine.span.last) continue;
    const int64_t head = kv_head * group_of(a) + r.member;
    const int64_t one = ((split * a.batch + b) * a.rows + r.row) * a.q_heads + head;
    if (lane_index() % 4 == 0) {
      p.parts.tops[one] = mine.top;
      p.parts.totals[one] = total;
    }
    ESP_UNROLL(8 * kPanels)
    for (int j = 0; j < 8 * kPanels; ++j) {
      const int i = j % 8 * 4 + 2 * half, column = j / 8 * kPanelColumns + column_of(i);
      float* sums = p.parts.sums + one * a.dim + column;
      if (column < a.dim) *reinterpret_cast<Pack<float, 2>*>(sums) = {acc[j / 8][i], acc[j / 8][i + 1]};
    }
  }
}

template <typename T, int kDim, int kGroups>
__global__ void __launch_bounds__(PrefixShape<kDim, kGroups>::kThreads, PrefixShape<kDim, kGroups>::kBlocks)
    tree_attention_prefix_kernel(const __grid_constant__ TreeAttentionParams p) {
#if ESP_HOPPER
  using Shape = PrefixShape<kDim, kGroups>;
  const TreeAttentionArgs& a = p.args;
  const int split = int(blockIdx.x), kv_heads = int(a.kv_heads);
  const int b = int(blockIdx.y) / kv_heads, kv_head = int(blockIdx.y) % kv_heads;
  const int first_row = int(blockIdx.z) * Shape::kRows;
  const Tiles tiles = tiles_of<Shape::kRows>(p, b, first_row, split);
  if (tiles.count == 0) return;

  const PrefixShared<kDim, kGroups> shared;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], kWarpgroup);
      mbarrier_init(&shared.empty[stage], kGroups * kWarpgroup / kWarp);
    }
  __syncthreads();
  // Of the 65536 registers of an SM, those that loading does not need go to the sums.
  if (warp_index() / 4 == kGroups) {
    if (kGroups == 2) give_registers<56>();
    produce<T, kDim, kGroups>(p, b, kv_head, first_row, tiles, shared);
  } else {
    if (kGroups == 2) take_registers<224>();
    consume<T, kDim, kGroups>(p, b, kv_head, first_row, split, tiles, shared);
  }
#endif
}

}  // namespace esp
