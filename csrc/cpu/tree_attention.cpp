// FLOPs: 4 dim a (query, key) pair. Bytes: K and V once per KV head and tile of up to 64 block rows.
//
// The logical keys of a row are the prefix, then its ancestors by depth, the row itself last. They are summed
// in chunks of 64 positions and splits of 256, both at absolute multiples, so a row's bits depend on its own
// keys alone: not on where its ancestors sit in the block, nor on whether they are in the prefix by now.
//   score    an FMA chain over each 64 of dim
//   softmax  online, one step a chunk over all of its 64 slots; an unseen slot holds -inf
//   value    an FMA chain over the seen keys of a chunk; chunks are added and splits merged in order
#include "esp/tree_attention.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "tree_attention_multiply.h"
#include "tree_attention_plan.h"
#include "tree_attention_softmax.h"

namespace esp {
namespace {

constexpr int64_t kFewQueries = 4;
constexpr double kParallelWork = 1 << 20;

constexpr auto kInOrder = [] {
  std::array<int64_t, kChunk> order{};
  for (size_t i = 0; i < order.size(); ++i) order[i] = int64_t(i);
  return order;
}();

// Computes one unit after the other; its scratch is allocated once.
template <typename T>
class Worker {
 public:
  Worker(const TreeAttentionArgs& args, const Plan& plan)
      : a(args),
        trees(plan.trees),
        group(args.q_heads / args.kv_heads),
        query_at(plan.queries + kAhead),
        query(floats(plan.queries * args.dim)),
        scores(floats(plan.queries * kChunk)),
        products(floats(plan.queries * kChunk)),
        key_at(args.rows + kChunk + 2 * kAhead),
        value_at(key_at),
        panel(floats(kChunk * args.dim)),
        values(floats((args.rows + kChunk) * args.dim)),
        lane_of(args.rows) {}

  // The softmax of the unit's queries over its split alone.
  void run(const Unit& next, Sums to) {
    unit = next;
    sums = to;
    prefix = a.prefix_len[unit.batch];
    queries = unit.rows * group;
    row = trees.row.data() + unit.batch * a.rows + unit.begin;
    depth = a.depth + unit.batch * a.rows;
    const Depths depths = depths_of(depth, row, unit.rows);
    // Positions from `open` on are seen by some row, from `shared` on by all of them, as far as they reach.
    const int64_t open = a.window ? prefix + depths.low + 1 - a.window : 0;
    const int64_t shared = a.window ? prefix + depths.high + 1 - a.window : 0;
    const int64_t end = std::min((unit.split + 1) * kSplit, prefix + depths.high + 1);

    load_queries();
    clear(sums, queries, a.dim);
    for (int64_t base = unit.split * kSplit; base < end; base += kChunk) {
      if (base + kChunk <= open) continue;
      if (shared <= base && base + kChunk <= prefix) add_whole_chunk(base);
      else add_ragged_chunk(base);
    }
  }

 private:
  const T* q() const { return static_cast<const T*>(a.q); }
  const T* k() const { return static_cast<const T*>(a.keys); }
  const T* v() const { return static_cast<const T*>(a.values); }

  void load_queries() {
    for (int64_t i = 0; i < queries; ++i)
      query_at[i] = unit.batch * a.q_strides[0] + row[i / group] * a.q_strides[1] +
                    (unit.head * group + i % group) * a.q_strides[2];
    copy(q(), query_at.data(), queries, a.dim, query.get());
  }

  // The keys in n slots of the cache get the next lanes.
  void add_lanes(int64_t slot, int64_t n) {
    int64_t page = slot / a.page_size, within = slot % a.page_size;
    for (; n > 0; --n, ++lanes) {
      const int64_t at = a.pages ? a.pages[unit.batch * a.max_pages + page] : unit.batch;
      key_at[lanes] = at * a.key_strides[0] + within * a.key_strides[1] + unit.head * a.key_strides[2];
      value_at[lanes] =
          at * a.value_strides[0] + within * a.value_strides[1] + unit.head * a.value_strides[2];
      if (++within == a.page_size) within = 0, ++page;
    }
  }

  // What is read beyond the last lane is a key as well.
  void end_lanes() {
    std::fill_n(key_at.begin() + lanes, kAhead, key_at[lanes - 1]);
    std::fill_n(value_at.begin() + lanes, kAhead, value_at[lanes - 1]);
  }

  // to [queries, 64]: products with the keys in up to 64 lanes.
  void multiply_keys(int64_t first, float* to) {
    const int64_t n = (std::min(lanes - first, kChunk) + 15) / 16 * 16;
    transpose(k(), key_at.data() + first, n, a.dim, panel.get());
    std::fill_n(to, queries * kChunk, 0.0f);
    for (int64_t d = 0; d < a.dim; d += kChunk)
      multiply(query.get() + d, a.dim, panel.get() + d * kChunk, kChunk, kInOrder.data(),
               std::min(a.dim - d, kChunk), to, kChunk, queries, n);
  }

  // Every row sees all 64 positions, and they are in the prefix.
  void add_whole_chunk(int64_t base) {
    lanes = 0;
    add_lanes(base, std::min(kChunk + kAhead, prefix - base));
    end_lanes();
    lanes = kChunk;
    multiply_keys(0, scores.get());
    soften(scores.get(), a.scale, a.softcap, nullptr, nullptr, queries, group, sums, a.dim);
    if (queries <= kFewQueries) {
      multiply_cached(scores.get(), kChunk, v(), value_at.data(), kChunk, sums.value, a.dim, queries, a.dim);
    } else {
      copy(v(), value_at.data(), kChunk, a.dim, values.get());
      multiply(scores.get(), kChunk, values.get(), a.dim, kInOrder.data(), kChunk, sums.value, a.dim, queries,
               a.dim);
    }
  }

  // Every row sees its own slots of the chunk: some of the prefix, then some of its ancestors.
  void add_ragged_chunk(int64_t base) {
    find_lanes(base);
    if (flat && lanes <= kChunk) {
      multiply_keys(0, scores.get());
    } else {
      for (int64_t first = 0; first < lanes; first += kChunk) {
        multiply_keys(first, products.get());
        gather_scores(first);
      }
    }
    soften(scores.get(), a.scale, a.softcap, low.data(), high.data(), queries, group, sums, a.dim);
    copy(v(), value_at.data(), lanes, a.dim, values.get());
    for (int64_t i = 0; i < unit.rows; ++i)
      if (low[i] < high[i])
        multiply(scores.get() + i * group * kChunk + low[i], kChunk, values.get(), a.dim,
                 lane_at[i].data() + low[i], high[i] - low[i], sums.value + i * group * a.dim, a.dim, group,
                 a.dim);
  }

  // Products by lane become scores by slot.
  void gather_scores(int64_t first) {
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t r = i / group;
      for (int64_t slot = low[r]; slot < high[r]; ++slot) {
        const int64_t lane = lane_at[r][slot] - first;
        if (0 <= lane && lane < kChunk) scores[i * kChunk + slot] = products[i * kChunk + lane];
      }
    }
  }

  // Lanes for what the tile's rows see of a chunk, and each row's lane for each of its slots.
  void find_lanes(int64_t base) {
    const int64_t cached = std::clamp<int64_t>(prefix - base, 0, kChunk);
    lanes = 0;
    flat = true;
    if (cached > 0) add_lanes(base, cached);
    std::fill(lane_of.begin(), lane_of.end(), -1);
    for (int64_t i = 0; i < unit.rows; ++i) {
      const int64_t end = prefix + depth[row[i]] + 1 - base;
      low[i] = a.window ? int32_t(std::clamp<int64_t>(end - a.window, 0, kChunk)) : 0;
      high[i] = int32_t(std::clamp<int64_t>(end, 0, kChunk));
      find_row_lanes(i, end, std::max<int64_t>(0, prefix - base));
    }
    end_lanes();
  }

  // A row sees what its parent sees, and itself. A parent in an earlier tile is walked up from instead. Slot
  // `end` follows the row's own, `first` is the root's or 0.
  void find_row_lanes(int64_t i, int64_t end, int64_t first) {
    const int32_t* parent = trees.parent.data() + unit.batch * a.rows;
    const int32_t up = parent[row[i]];
    const int64_t near = up < 0 ? -1 : trees.rank[unit.batch * a.rows + up] - unit.begin;
    int64_t fresh = near < 0 ? first : std::max<int64_t>(0, end - 1);
    lane_at[i] = near < 0 ? kInOrder : lane_at[near];
    int64_t j = row[i];
    for (int64_t slot = end - 1; slot >= fresh; --slot, j = parent[j])
      if (slot < kChunk) lane_at[i][slot] = j;
    for (; fresh < high[i]; ++fresh) {
      int64_t& lane = lane_at[i][fresh];
      int32_t& known = lane_of[lane];
      if (known < 0) {
        known = int32_t(lanes);
        add_lanes(prefix + lane, 1);
      }
      lane = known;
      flat = flat && lane == fresh;
    }
  }

  const TreeAttentionArgs& a;
  const Trees& trees;
  int64_t group;

  Unit unit{};
  Sums sums;
  int64_t prefix, queries;
  const int32_t *row, *depth;  // of the unit's ranks; of block rows

  std::vector<int64_t> query_at;  // in elements
  Floats query;                   // [queries, dim]
  Floats scores;                  // [queries, 64] by slot
  Floats products;                // [queries, 64] by lane

  // The keys of a chunk stand in lanes: those in the prefix by position, then block rows as they are met.
  int64_t lanes;
  std::vector<int64_t> key_at, value_at;  // of a lane, in elements
  Floats panel, values;                   // keys [dim, 64], values [lanes, dim]
  std::vector<int32_t> lane_of;           // of a block row, -1 if it has none
  std::array<std::array<int64_t, kChunk>, kBlockRows> lane_at;  // of a row's slot
  std::array<int32_t, kBlockRows> low, high;                    // a row sees slots [low, high)
  bool flat = true;                                             // every row's slots are its lanes
};

template <typename T>
void finish(const TreeAttentionArgs& a, const Trees& trees, const Unit& unit, Sums sums) {
  const int64_t group = a.q_heads / a.kv_heads;
  for (int64_t i = 0; i < unit.rows * group; ++i) {
    const int64_t row = trees.row[unit.batch * a.rows + unit.begin + i / group];
    const int64_t head = unit.head * group + i % group;
    const int64_t at = (unit.batch * a.rows + row) * a.q_heads + head;
    const Sums own = sums.of(i, a.dim);
    if (a.sinks != nullptr) add_sink(a.sinks[head], own, a.dim);
    a.lse[at] = *own.max + std::log(*own.sum);
    divide(own.value, *own.sum, static_cast<T*>(a.out) + at * a.dim, a.dim);
  }
}

template <typename T>
void attend(const TreeAttentionArgs& a) {
  const int64_t size = a.q_heads * a.dim;
  for (int64_t i = 0; i < a.batch * a.rows; ++i) {
    if (is_real(a, i / a.rows, i % a.rows)) continue;
    std::memset(static_cast<T*>(a.out) + i * size, 0, size * sizeof(T));
    std::fill_n(a.lse + i * a.q_heads, a.q_heads, kNothing);
  }
  const Plan plan = plan_of(a);
  const auto units = int64_t(plan.units.size());
  const int threads = plan.work < kParallelWork ? 1 : int(std::min<int64_t>(omp_get_max_threads(), units));
  std::vector<Worker<T>> workers;
  workers.reserve(threads);
  for (int i = 0; i < threads; ++i) workers.emplace_back(a, plan);
  Queue queue(plan, a.dim, a.q_heads / a.kv_heads, threads == 1 ? 1 : 4 * threads,
              [&](const Unit& unit, Sums sums) { finish<T>(a, plan.trees, unit, sums); });
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker<T>& worker = workers[omp_get_thread_num()];
    for (auto job = queue.take(); job.unit != nullptr; job = queue.take()) {
      worker.run(*job.unit, job.sums);
      queue.give(job);
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
