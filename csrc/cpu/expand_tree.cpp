// Best first: every node offers its best child not drafted yet, and a heap holds these offers. A drafted
// child leaves its place to its next sibling and adds an offer of its own, so the heap never outgrows the
// tree, and nodes come out in their final order in O(nodes log nodes).
#include "esp/expand_tree.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace esp {
namespace {

struct Node {
  float score;  // cumulative log-probability
  int32_t depth;
};

struct Offer {
  float score;
  int32_t depth, parent;
  int64_t rank;
};

// The order of drafting, reversed. Siblings never meet in the heap, so their rank need not be compared.
bool later(const Offer& a, const Offer& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.depth != b.depth) return a.depth > b.depth;
  return a.parent > b.parent;
}

// The growing tree of one sequence; rows that are not drafted stay padding.
struct Tree {
  const ExpandTreeArgs& a;
  const int32_t* ids;
  const float* logprobs;
  int32_t *tokens, *parent;
  Node* nodes;               // [a.nodes]
  std::vector<Offer>& heap;  // empty

  // The first candidate from `rank` on that may hang from row v.
  bool find(int32_t v, int64_t rank, Offer& offer) const {
    const Node node = nodes[v];
    if (node.depth == a.levels) return false;
    for (int64_t i = node.depth * a.candidates; rank < a.candidates; ++rank) {
      const int32_t id = ids[i + rank];
      const float logprob = logprobs[i + rank], score = node.score + std::min(logprob, 0.0f);
      if (id < 0 || !std::isfinite(logprob) || !std::isfinite(score)) continue;
      if (a.prune && id == tokens[v]) continue;
      offer = {score, node.depth + 1, v, rank};
      return true;
    }
    return false;
  }

  void draft(int32_t row, const Offer& offer) {
    tokens[row] = ids[(offer.depth - 1) * a.candidates + offer.rank];
    parent[row] = offer.parent;
    nodes[row] = {offer.score, offer.depth};
  }

  void push(int32_t v, int64_t rank) {
    Offer offer;
    if (!find(v, rank, offer)) return;
    heap.push_back(offer);
    std::push_heap(heap.begin(), heap.end(), later);
  }

  void grow_best_first() {
    push(0, 0);
    for (int32_t row = 1; row < a.nodes && !heap.empty(); ++row) {
      std::pop_heap(heap.begin(), heap.end(), later);
      const Offer best = heap.back();
      heap.pop_back();
      draft(row, best);
      push(best.parent, best.rank + 1);
      push(row, 0);
    }
    heap.clear();
  }

  void grow_levels() {
    Offer offer;
    int32_t best = 0, first = 1;
    for (int64_t level = 0; level < a.width_levels; ++level) {
      const int32_t end = first + int32_t(a.widths[level]);
      int32_t row = first;
      for (int64_t rank = 0; row < end && find(best, rank, offer); rank = offer.rank + 1) draft(row++, offer);
      if (row == first) return;
      best = first;
      first = end;
    }
  }
};

void append_masks(const ExpandTreeArgs& a, int32_t* tokens, int32_t* parent, int32_t* mask_ordinal) {
  for (int64_t v = 0; v < a.nodes; ++v) {
    const bool real = parent[v] != kPadding;
    mask_ordinal[v] = real ? 0 : -1;
    for (int64_t i = 1, row = a.nodes + v * a.masks; i <= a.masks; ++i, ++row) {
      tokens[row] = -1;
      parent[row] = !real ? kPadding : int32_t(i == 1 ? v : row - 1);
      mask_ordinal[row] = real ? int32_t(i) : -1;
    }
  }
}

}  // namespace

void expand_tree_cpu(const ExpandTreeArgs& a) {
  const int64_t level_size = a.levels * a.candidates, rows = a.nodes * (a.masks + 1);
#pragma omp parallel if (a.batch > 1 && a.batch * a.nodes > 4096)
  {
    std::vector<Node> nodes(static_cast<size_t>(a.nodes));
    std::vector<Offer> heap;
    heap.reserve(static_cast<size_t>(a.nodes) + 1);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < a.batch; ++b) {
      Tree tree{a, a.ids + b * level_size, a.logprobs + b * level_size,
                a.tokens + b * rows, a.parent + b * rows, nodes.data(), heap};
      std::fill_n(tree.tokens, a.nodes, -1);
      std::fill_n(tree.parent, a.nodes, kPadding);
      if (a.root[b] >= 0) {
        tree.tokens[0] = a.root[b];
        tree.parent[0] = kRoot;
        nodes[0] = {0.0f, 0};
        if (a.widths == nullptr) tree.grow_best_first();
        else tree.grow_levels();
      }
      append_masks(a, tree.tokens, tree.parent, a.mask_ordinal + b * rows);
    }
  }
}

}  // namespace esp
