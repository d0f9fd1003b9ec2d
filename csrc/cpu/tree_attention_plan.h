// What there is to do, and who does it: units of work that any thread may compute in any order, whose results
// are merged in the one order that makes the sum independent of the threads.
#pragma once
#include <algorithm>
#include <bit>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "esp/tree_attention.h"
#include "tree_attention_softmax.h"

namespace esp {
namespace {

constexpr int64_t kSplit = 256;        // logical positions of a unit, at absolute multiples
constexpr int64_t kBlockRows = 64;  // block rows of a tile: bounds scratch, and the waste of a causal block
constexpr int64_t kTileQueries = 512;  // its rows times the query heads of a KV head

// ---------------------------------------------------------------- plan

// The rows that are no padding and how they hang together; arrays of [batch, rows].
struct Trees {
  std::vector<int32_t> row;     // of a rank: the real rows of a sequence in order
  std::vector<int32_t> rank;    // of a real row
  std::vector<int32_t> parent;  // of a real row, -1 for a root
};

// One split of the keys of one KV head, for a tile of rows.
struct Unit {
  int64_t batch, head;  // of the KV cache
  int64_t begin, rows;  // ranks
  int64_t split;
  bool first, last;  // of its chain: the splits of these rows and this head
  int64_t chain;
};

struct Plan {
  Trees trees;
  std::vector<Unit> units;
  int64_t chains = 0;
  int64_t queries = 0;  // of the largest tile
  double work = 0;      // about FMAs
};

bool is_real(const TreeAttentionArgs& a, int64_t b, int64_t row) {
  return uint64_t(a.ancestors[(b * a.rows + row) * a.words + row / 64]) >> row % 64 & 1;
}

int32_t parent_of(const TreeAttentionArgs& a, int64_t b, int64_t row) {
  const int64_t* words = a.ancestors + (b * a.rows + row) * a.words;
  for (int64_t w = row / 64; w >= 0; --w) {
    uint64_t word = uint64_t(words[w]);
    if (w == row / 64) word &= (uint64_t(1) << row % 64) - 1;
    if (word != 0) return int32_t(w * 64 + 63 - std::countl_zero(word));
  }
  return -1;
}

// The lowest and the highest depth of some rows.
struct Depths {
  int64_t low, high;
};

Depths depths_of(const int32_t* depth, const int32_t* row, int64_t rows) {
  Depths d{depth[row[0]], depth[row[0]]};
  for (int64_t i = 1; i < rows; ++i) {
    d.low = std::min<int64_t>(d.low, depth[row[i]]);
    d.high = std::max<int64_t>(d.high, depth[row[i]]);
  }
  return d;
}

void plan_tile(const TreeAttentionArgs& a, int64_t b, int64_t begin, int64_t rows, Plan& plan) {
  const Depths d = depths_of(a.depth + b * a.rows, plan.trees.row.data() + b * a.rows + begin, rows);
  const int64_t unseen = a.window ? std::max<int64_t>(0, a.prefix_len[b] + d.low + 1 - a.window) : 0;
  const int64_t first = unseen / kSplit, last = (a.prefix_len[b] + d.high) / kSplit;
  // Heads innermost: their keys are neighbours in memory, which the prefetcher brings along anyway.
  for (int64_t split = first; split <= last; ++split)
    for (int64_t head = 0; head < a.kv_heads; ++head)
      plan.units.push_back({b, head, begin, rows, split, split == first, split == last, plan.chains + head});
  plan.chains += a.kv_heads;
  plan.queries = std::max(plan.queries, rows * (a.q_heads / a.kv_heads));
  plan.work += double(a.prefix_len[b] + d.high + 1 - unseen) * double(a.q_heads * a.dim) * double(rows + 4);
}

Plan plan_of(const TreeAttentionArgs& a) {
  Plan plan;
  for (auto* v : {&plan.trees.row, &plan.trees.rank, &plan.trees.parent}) v->resize(a.batch * a.rows);
  const int64_t most = std::clamp<int64_t>(kTileQueries * a.kv_heads / a.q_heads, 1, kBlockRows);
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t real = 0;
    for (int64_t r = 0; r < a.rows; ++r) {
      if (!is_real(a, b, r)) continue;
      plan.trees.parent[b * a.rows + r] = parent_of(a, b, r);
      plan.trees.rank[b * a.rows + r] = int32_t(real);
      plan.trees.row[b * a.rows + real++] = int32_t(r);
    }
    const int64_t tiles = (real + most - 1) / most;
    for (int64_t t = 0; t < tiles; ++t)
      plan_tile(a, b, real * t / tiles, real * (t + 1) / tiles - real * t / tiles, plan);
  }
  return plan;
}

// ---------------------------------------------------------------- sums in memory

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], AlignedDelete>;

Floats floats(int64_t n) { return Floats(new (std::align_val_t{64}) float[n]); }

class OwnedSums {
 public:
  OwnedSums(int64_t queries, int64_t dim)
      : max(floats(queries)), sum(floats(queries)), value(floats(queries * dim)) {}

  operator Sums() const { return {max.get(), sum.get(), value.get()}; }

 private:
  Floats max, sum, value;
};

// ---------------------------------------------------------------- queue

// Hands out units in order, each with a place for its sums, and merges the sums of a chain in the order of
// its splits. No thread waits for another's unit: what comes early is parked, as long as there are places.
template <typename Finish>
class Queue {
 public:
  struct Job {
    const Unit* unit;  // null: nothing is left to do
    Sums sums;
  };

  // finish(unit, sums) is called once a chain, with its last unit and the sums over all of its splits.
  Queue(const Plan& plan, int64_t dim, int64_t group, int64_t places, Finish finish)
      : plan(plan), dim(dim), group(group), finish(std::move(finish)), chains(plan.chains) {
    for (int64_t i = 0; i < places; ++i) {
      memory.emplace_back(plan.queries, dim);
      free.push_back(memory.back());
    }
  }

  // A unit comes with its place, so the earliest one under way always has one, and the rest can wait for it.
  Job take() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !free.empty() || next == plan.units.size(); });
    if (next == plan.units.size()) return {};
    const Sums place = free.back();
    free.pop_back();
    return {&plan.units[next++], place};
  }

  void give(const Job& job) {
    if (job.unit->first && job.unit->last) {
      finish(*job.unit, job.sums);
      std::lock_guard lock(mutex);
      release(job);
      return;
    }
    std::unique_lock lock(mutex);
    Chain& chain = chains[job.unit->chain];
    chain.parked.push_back(job);
    if (chain.merging) return;
    chain.merging = true;
    for (size_t i; (i = chain.due()) < chain.parked.size();) {
      const Job due = chain.parked[i];
      chain.parked.erase(chain.parked.begin() + int64_t(i));
      lock.unlock();
      add(due, chain);
      lock.lock();
      release(due);
      chain.merged = due.unit->split;
    }
    chain.merging = false;
  }

 private:
  struct Chain {
    std::unique_ptr<OwnedSums> total;
    int64_t merged = -1;  // the last split in total
    bool merging = false;
    std::vector<Job> parked;

    size_t due() const {
      size_t i = 0;
      while (i < parked.size() && !(parked[i].unit->first || parked[i].unit->split == merged + 1)) ++i;
      return i;
    }
  };

  void add(const Job& job, Chain& chain) {
    const int64_t queries = job.unit->rows * group;
    if (job.unit->first) {
      chain.total = std::make_unique<OwnedSums>(queries, dim);
      clear(*chain.total, queries, dim);
    }
    merge(*chain.total, job.sums, queries, dim);
    if (job.unit->last) {
      finish(*job.unit, *chain.total);
      chain.total.reset();
    }
  }

  void release(const Job& job) {
    free.push_back(job.sums);
    changed.notify_all();
  }

  const Plan& plan;
  const int64_t dim, group;
  const Finish finish;
  std::mutex mutex;
  std::condition_variable changed;
  size_t next = 0;
  std::vector<Chain> chains;
  std::vector<OwnedSums> memory;
  std::vector<Sums> free;
};

}  // namespace
}  // namespace esp
