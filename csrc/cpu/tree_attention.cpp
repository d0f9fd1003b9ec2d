// FLOPs: 4 dim a (query, key) pair. Bytes: K and V once per KV head and tile of up to 64 block rows.
//
// The logical keys of a row are the prefix, then its ancestors by depth, the row itself last. They are summed
// in chunks of 64 positions and splits of 512, both at absolute multiples, so a row's bits depend on its own
// keys alone: not on where its ancestors sit in the block, nor on whether they are in the prefix by now.
//   score    one FMA chain over dim
//   softmax  online, one step a chunk over all of its 64 slots; an unseen slot holds -inf
//   value    one FMA chain over the seen keys of a split in logical order; splits are merged in order
#include "esp/tree_attention.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "tree_attention_math.h"

namespace esp {
namespace {

constexpr int64_t kSplit = 512;
constexpr int64_t kBlockRows = 64;      // block rows of a tile: bounds scratch, and the waste of a causal block
constexpr int64_t kTileQueries = 512;  // its rows times the query heads of a KV head
constexpr double kParallelWork = 1 << 20;

constexpr auto kInOrder = [] {
  std::array<int32_t, 256> order{};
  for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
  return order;
}();

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], AlignedDelete>;

Floats floats(int64_t n) { return Floats(new (std::align_val_t{64}) float[size_t(n)]); }

// ---------------------------------------------------------------- what there is to do

// The rows that are no padding and how they hang together; arrays of [batch, rows].
struct Trees {
  std::vector<int32_t> row;     // of a rank: the real rows of a sequence in order
  std::vector<int32_t> rank;    // of a real row
  std::vector<int32_t> parent;  // of a real row, -1 for a root
};

struct Unit {
  int64_t batch, head;  // head of the KV cache
  int64_t begin, rows;  // ranks
  int64_t split;
  bool first, last;  // of the splits of these rows
};

int32_t highest_ancestor(const int64_t* words, int64_t row) {
  for (int64_t w = row / 64; w >= 0; --w) {
    uint64_t word = uint64_t(words[w]);
    if (w == row / 64) word &= (uint64_t(1) << row % 64) - 1;
    if (word != 0) return int32_t(w * 64 + 63 - std::countl_zero(word));
  }
  return -1;
}

struct Plan {
  Trees trees;
  std::vector<Unit> units;
  int64_t queries = 0;  // of the largest tile
  double work = 0;
};

Plan plan_of(const TreeAttentionArgs& a) {
  const int64_t group = a.q_heads / a.kv_heads;
  Plan plan;
  for (auto* v : {&plan.trees.row, &plan.trees.rank, &plan.trees.parent}) v->resize(size_t(a.batch * a.rows));
  for (int64_t b = 0; b < a.batch; ++b) {
    int32_t* row = plan.trees.row.data() + b * a.rows;
    const int32_t* depth = a.depth + b * a.rows;
    int64_t real = 0;
    for (int64_t r = 0; r < a.rows; ++r) {
      const int64_t* words = a.ancestors + (b * a.rows + r) * a.words;
      if ((uint64_t(words[r / 64]) >> r % 64 & 1) == 0) continue;
      plan.trees.parent[size_t(b * a.rows + r)] = highest_ancestor(words, r);
      plan.trees.rank[size_t(b * a.rows + r)] = int32_t(real);
      row[real++] = int32_t(r);
    }
    const int64_t most = std::clamp<int64_t>(kTileQueries / group, 1, kBlockRows);
    const int64_t tiles = (real + most - 1) / most;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = real * tile / tiles, end = real * (tile + 1) / tiles;
      int64_t low = a.rows, high = 0;
      for (int64_t i = begin; i < end; ++i) {
        low = std::min<int64_t>(low, depth[row[i]]);
        high = std::max<int64_t>(high, depth[row[i]]);
      }
      const int64_t unseen = a.window ? std::max<int64_t>(0, a.prefix_len[b] + low + 1 - a.window) : 0;
      const int64_t first = unseen / kSplit, last = (a.prefix_len[b] + high) / kSplit;
      // Heads innermost: their keys are neighbours in memory, which the prefetcher brings along anyway.
      for (int64_t split = first; split <= last; ++split)
        for (int64_t head = 0; head < a.kv_heads; ++head)
          plan.units.push_back({b, head, begin, end - begin, split, split == first, split == last});
      plan.queries = std::max(plan.queries, (end - begin) * group);
      plan.work += double(a.prefix_len[b] + high + 1 - unseen) * double(a.q_heads * a.dim) * double(end - begin + 4);
    }
  }
  return plan;
}

// ---------------------------------------------------------------- one unit

struct OwnedSums {
  Floats max, sum, value;

  OwnedSums(int64_t queries, int64_t dim)
      : max(floats(queries)), sum(floats(queries)), value(floats(queries * dim)) {}

  operator Sums() const { return {max.get(), sum.get(), value.get()}; }
};

// Computes units one after the other; its scratch is allocated once.
template <typename T>
class Worker {
 public:
  // Of the last unit's queries, over its split alone.
  Sums sums() const { return partial; }

  Worker(const TreeAttentionArgs& args, const Plan& plan)
      : partial(plan.queries, args.dim), a(args), trees(plan.trees), group(args.q_heads / args.kv_heads),
        query_at(size_t(plan.queries + kAhead)), query(floats(plan.queries * args.dim)),
        scores(floats(plan.queries * kChunk)), products(floats(plan.queries * kChunk)),
        key_at(size_t(args.rows + kChunk + 2 * kAhead)), value_at(key_at),
        keys(floats(kChunk * args.dim)), panel(floats(kChunk * args.dim)),
        values(floats((args.rows + kChunk) * args.dim)), lane_of(size_t(args.rows)) {}

  void run(const Unit& next) {
    unit = next;
    prefix = a.prefix_len[unit.batch];
    queries = unit.rows * group;
    row = trees.row.data() + unit.batch * a.rows + unit.begin;
    depth = a.depth + unit.batch * a.rows;
    int64_t shallow = a.rows, deep = 0;
    for (int64_t i = 0; i < unit.rows; ++i) {
      shallow = std::min<int64_t>(shallow, depth[row[i]]);
      deep = std::max<int64_t>(deep, depth[row[i]]);
    }
    // Positions from `open` on are seen by some row, from `shared` on by all of them, as far as they reach.
    const int64_t open = a.window ? prefix + shallow + 1 - a.window : 0;
    const int64_t shared = a.window ? prefix + deep + 1 - a.window : 0;
    const int64_t end = std::min((unit.split + 1) * kSplit, prefix + deep + 1);

    load_queries();
    clear(sums(), queries, a.dim);
    for (int64_t base = unit.split * kSplit; base < end; base += kChunk) {
      if (base + kChunk <= open) continue;
      if (shared <= base && base + kChunk <= prefix) add_whole_chunk(base);
      else add_ragged_chunk(base);
    }
  }

 private:
  void load_queries() {
    for (int64_t i = 0; i < queries; ++i)
      query_at[size_t(i)] = unit.batch * a.q_strides[0] + row[i / group] * a.q_strides[1] +
                            (unit.head * group + i % group) * a.q_strides[2];
    copy(static_cast<const T*>(a.q), query_at.data(), queries, a.dim, query.get());
  }

  // The keys in n slots of the cache get the next lanes.
  void add_lanes(int64_t slot, int64_t n) {
    int64_t page = slot / a.page_size, within = slot % a.page_size;
    for (; n > 0; --n) {
      const int64_t at = a.pages ? a.pages[unit.batch * a.max_pages + page] : unit.batch;
      const auto lane = size_t(lanes++);
      key_at[lane] = at * a.key_strides[0] + within * a.key_strides[1] + unit.head * a.key_strides[2];
      value_at[lane] = at * a.value_strides[0] + within * a.value_strides[1] + unit.head * a.value_strides[2];
      if (++within == a.page_size) within = 0, ++page;
    }
  }

  // What is read beyond the last lane is a key as well.
  void end_lanes() {
    std::fill_n(key_at.begin() + lanes, kAhead, key_at[size_t(lanes - 1)]);
    std::fill_n(value_at.begin() + lanes, kAhead, value_at[size_t(lanes - 1)]);
  }

  // to [queries, 64]: products with the keys in up to 64 lanes.
  void multiply_keys(int64_t first, float* to) {
    const int64_t n = std::min(lanes - first, kChunk), padded = (n + 15) / 16 * 16;
    copy(static_cast<const T*>(a.keys), key_at.data() + first, padded, a.dim, keys.get());
    transpose(keys.get(), padded, a.dim, panel.get());
    std::fill_n(to, queries * kChunk, 0.0f);
    multiply(query.get(), a.dim, panel.get(), kChunk, kInOrder.data(), a.dim, to, kChunk, queries, padded);
  }

  // Every row sees all 64 positions, and they are in the prefix.
  void add_whole_chunk(int64_t base) {
    lanes = 0;
    add_lanes(base, std::min(kChunk + kAhead, prefix - base));
    end_lanes();
    lanes = kChunk;
    multiply_keys(0, scores.get());
    soften(scores.get(), a.scale, a.softcap, nullptr, nullptr, queries, group, sums(), a.dim);
    copy(static_cast<const T*>(a.values), value_at.data(), kChunk, a.dim, values.get());
    multiply(scores.get(), kChunk, values.get(), a.dim, kInOrder.data(), kChunk, partial.value.get(), a.dim, queries,
             a.dim);
  }

  // Every row sees its own slots of the chunk: some of the prefix, then some of its ancestors.
  void add_ragged_chunk(int64_t base) {
    find_lanes(base);
    const bool all_flat = lanes <= kChunk && std::all_of(flat.begin(), flat.begin() + unit.rows, std::identity());
    if (all_flat) {
      multiply_keys(0, scores.get());
    } else {
      for (int64_t first = 0; first < lanes; first += kChunk) {
        multiply_keys(first, products.get());
        for (int64_t i = 0; i < queries; ++i) {
          const int32_t* lane = lane_at[size_t(i / group)].data();
          for (int64_t s = low[size_t(i / group)]; s < high[size_t(i / group)]; ++s)
            if (lane[s] >= first && lane[s] < first + kChunk)
              scores[size_t(i * kChunk + s)] = products[size_t(i * kChunk + lane[s] - first)];
        }
      }
    }
    soften(scores.get(), a.scale, a.softcap, low.data(), high.data(), queries, group, sums(), a.dim);
    copy(static_cast<const T*>(a.values), value_at.data(), lanes, a.dim, values.get());
    for (int64_t i = 0; i < unit.rows; ++i) {
      const int64_t from = low[size_t(i)], n = high[size_t(i)] - from;
      if (n > 0)
        multiply(scores.get() + i * group * kChunk + from, kChunk, values.get(), a.dim,
                 lane_at[size_t(i)].data() + from, n, partial.value.get() + i * group * a.dim, a.dim, group, a.dim);
    }
  }

  // Lanes for what the tile's rows see of a chunk, and each row's lane for each of its slots.
  void find_lanes(int64_t base) {
    const int64_t cached = std::clamp<int64_t>(prefix - base, 0, kChunk);
    const int32_t* parent = trees.parent.data() + unit.batch * a.rows;
    const int32_t* rank = trees.rank.data() + unit.batch * a.rows;
    lanes = 0;
    if (cached > 0) add_lanes(base, cached);
    std::fill(lane_of.begin(), lane_of.end(), -1);
    for (int64_t i = 0; i < unit.rows; ++i) {
      const int64_t end = prefix + depth[row[i]] + 1 - base;
      low[size_t(i)] = a.window ? int32_t(std::clamp<int64_t>(end - a.window, 0, kChunk)) : 0;
      high[size_t(i)] = int32_t(std::clamp<int64_t>(end, 0, kChunk));

      // A row sees what its parent sees and itself; a parent in an earlier tile is walked instead.
      auto& lane = lane_at[size_t(i)];
      const int32_t up = parent[row[i]];
      const bool near = up >= 0 && rank[up] >= unit.begin;
      int64_t fresh = cached;
      if (near) {
        lane = lane_at[size_t(rank[up] - unit.begin)];
        flat[size_t(i)] = flat[size_t(rank[up] - unit.begin)];
        fresh = std::max<int64_t>(0, end - 1);
      } else {
        std::copy_n(kInOrder.begin(), kChunk, lane.begin());
        flat[size_t(i)] = true;
      }
      int32_t j = row[i];
      for (int64_t slot = end - 1; slot >= fresh; --slot, j = parent[j])
        if (slot < kChunk) lane[size_t(slot)] = j;
      for (int64_t slot = fresh; slot < high[size_t(i)]; ++slot) {
        int32_t& place = lane_of[size_t(lane[size_t(slot)])];
        if (place < 0) {
          place = int32_t(lanes);
          add_lanes(prefix + lane[size_t(slot)], 1);
        }
        lane[size_t(slot)] = place;
        flat[size_t(i)] = flat[size_t(i)] && place == slot;
      }
    }
    end_lanes();
  }

  OwnedSums partial;
  const TreeAttentionArgs& a;
  const Trees& trees;
  int64_t group;

  Unit unit;
  int64_t prefix, queries;
  const int32_t *row, *depth;  // row: of the unit; depth: of a block row

  std::vector<int64_t> query_at;  // in elements
  Floats query;                   // [queries, dim]
  Floats scores;                  // [queries, 64] by slot
  Floats products;                // [queries, 64] by lane

  // The keys of a chunk stand in lanes: those in the prefix by position, then block rows as they are met.
  int64_t lanes;
  std::vector<int64_t> key_at, value_at;  // of a lane, in elements
  Floats keys, panel, values;             // [64, dim], its transpose, [lanes, dim]
  std::vector<int32_t> lane_of;           // of a block row, -1 if it has none
  std::array<std::array<int32_t, kChunk>, kBlockRows> lane_at;  // of a row's slot
  std::array<int32_t, kBlockRows> low, high;                    // a row sees slots [low, high)
  std::array<bool, kBlockRows> flat;                            // its slots are its lanes
};

// ---------------------------------------------------------------- all units

template <typename T>
void finish(const TreeAttentionArgs& a, const Trees& trees, const Unit& unit, Sums sums) {
  const int64_t group = a.q_heads / a.kv_heads;
  for (int64_t i = 0; i < unit.rows * group; ++i) {
    const int64_t row = trees.row[size_t(unit.batch * a.rows + unit.begin + i / group)];
    const int64_t head = unit.head * group + i % group;
    const int64_t at = (unit.batch * a.rows + row) * a.q_heads + head;
    const Sums sum = sums.of(i, a.dim);
    if (a.sinks != nullptr) add_sink(a.sinks[head], sum, a.dim);
    a.lse[at] = *sum.max + std::log(*sum.sum);
    divide(sum.value, *sum.sum, static_cast<T*>(a.out) + at * a.dim, a.dim);
  }
}

template <typename T>
void attend(const TreeAttentionArgs& a) {
  const int64_t group = a.q_heads / a.kv_heads, row = a.q_heads * a.dim;
  for (int64_t r = 0; r < a.batch * a.rows; ++r) {
    if (a.ancestors[r * a.words + r % a.rows / 64] >> r % a.rows % 64 & 1) continue;
    std::memset(static_cast<T*>(a.out) + r * row, 0, size_t(row) * sizeof(T));
    std::fill_n(a.lse + r * a.q_heads, a.q_heads, kNothing);
  }
  const Plan plan = plan_of(a);
  const auto units = int64_t(plan.units.size());
  const int threads = plan.work < kParallelWork ? 1 : int(std::min<int64_t>(omp_get_max_threads(), units));
  const OwnedSums totals(plan.queries * a.kv_heads, a.dim);
  std::vector<Worker<T>> workers;
  for (int i = 0; i < threads; ++i) workers.emplace_back(a, plan);
#pragma omp parallel for ordered schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < units; ++i) {
    Worker<T>& worker = workers[size_t(omp_get_thread_num())];
    const Unit& unit = plan.units[size_t(i)];
    worker.run(unit);
    if (unit.first && unit.last) {
      finish<T>(a, plan.trees, unit, worker.sums());
    } else {
#pragma omp ordered
      {
        const Sums total = Sums(totals).of(unit.head * plan.queries, a.dim);
        if (unit.first) clear(total, unit.rows * group, a.dim);
        merge(total, worker.sums(), unit.rows * group, a.dim);
        if (unit.last) finish<T>(a, plan.trees, unit, total);
      }
    }
  }
}

}  // namespace

void tree_attention_cpu(const TreeAttentionArgs& a) {
  switch (a.dtype) {
    case DType::f32: return attend<float>(a);
    case DType::bf16: return attend<bf16>(a);
    case DType::f16: return attend<f16>(a);
  }
}

}  // namespace esp
