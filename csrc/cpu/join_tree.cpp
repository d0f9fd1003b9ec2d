// Best first: every node offers its best child not drafted yet, and a heap holds these offers. Some
// microseconds a node, nearly all of them in the features and exponentials of its candidates.
#include "esp/join_tree.h"

#include <algorithm>
#include <vector>

namespace esp {
namespace {

struct Node {
  Context context;
  int32_t depth, parent;
  float chance, deepest;  // that it is accepted; that it is and none of its drafts
  int32_t masks;
};

struct Child {
  int32_t token;
  float chance;  // given its parent
};

struct Offer {
  float chance;
  int32_t depth, parent, rank;
};

bool later(const Offer& a, const Offer& b) {
  if (a.chance != b.chance) return a.chance < b.chance;
  if (a.depth != b.depth) return a.depth > b.depth;
  return a.parent > b.parent;
}

struct Tree {
  const JoinTreeArgs& a;
  const Sources sources;
  const float* weights;
  std::vector<Node> nodes;
  std::vector<std::vector<Child>> children;
  std::vector<Offer> heap;

  Tree(const JoinTreeArgs& args, int64_t b)
      : a(args), sources(args.sources, b), weights(args.sources.weights + b * kPatterns * (kSources + 1)) {}

  void offer(int32_t v, int32_t rank) {
    if (size_t(rank) >= children[v].size()) return;
    heap.push_back({nodes[v].chance * children[v][rank].chance, nodes[v].depth + 1, v, rank});
    std::push_heap(heap.begin(), heap.end(), later);
  }

  // A node comes with its children, at most so many as there is room for.
  void add(const Context& context, int32_t depth, int32_t parent, float chance) {
    Mixture mixture;
    sources.behind(context, depth, mixture);
    mixture.weigh(weights);
    std::vector<Child> mine;
    for (int i = 0; i < mixture.count; ++i) mine.push_back({mixture.token[i], mixture.chance[i]});
    std::stable_sort(mine.begin(), mine.end(),
                     [](const Child& x, const Child& y) { return x.chance > y.chance; });
    nodes.push_back({context, depth, parent, chance, 0.0f, 0});
    children.push_back(std::move(mine));
    offer(int32_t(nodes.size()) - 1, 0);
  }

  void grow() {
    add(sources.memory.end(), 0, kRoot, 1.0f);
    while (int64_t(nodes.size()) < a.budget && !heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), later);
      const Offer best = heap.back();
      heap.pop_back();
      if (best.chance < a.least || best.chance == 0.0f) return;
      Context context = nodes[best.parent].context;
      context.push(children[best.parent][best.rank].token);
      add(context, best.depth, best.parent, best.chance);
      offer(best.parent, best.rank + 1);
    }
  }

  // Keeps the most drafts that leave room for the masks that are worth no less than the last of them.
  void cut() {
    for (Node& node : nodes) node.deepest = node.chance;
    for (size_t v = 1; v < nodes.size(); ++v) nodes[nodes[v].parent].deepest -= nodes[v].chance;
    while (nodes.size() > 1 && !fits()) {
      nodes[nodes.back().parent].deepest += nodes.back().chance;
      nodes.pop_back();
    }
  }

  bool fits() const {
    int64_t rows = int64_t(nodes.size());
    for (const Node& node : nodes)
      for (int level = 0; level < a.levels; ++level)
        rows += node.deepest * a.reach[level] >= nodes.back().chance;
    return rows <= a.budget;
  }

  void give_masks() {
    for (int64_t rows = int64_t(nodes.size()); rows < a.budget; ++rows) {
      Node* best = nullptr;
      float most = 0.0f;
      for (Node& node : nodes) {
        const float value = node.masks < a.levels ? node.deepest * a.reach[node.masks] : 0.0f;
        if (value <= most) continue;
        most = value;
        best = &node;
      }
      if (best == nullptr || most < a.least) return;
      ++best->masks;
    }
  }

  void write(int64_t b) const {
    int32_t row = 0;
    const auto put = [&](int32_t token, int32_t parent, int32_t ordinal, float chance) {
      const int64_t i = b * a.budget + row++;
      a.tokens[i] = token;
      a.parent[i] = parent;
      a.mask_ordinal[i] = ordinal;
      a.chance[i] = chance;
    };
    for (const Node& node : nodes)
      put(node.context.token[node.context.count - 1], node.parent, 0, node.chance);
    for (size_t v = 0; v < nodes.size(); ++v)
      for (int32_t ordinal = 1; ordinal <= nodes[v].masks; ++ordinal)
        put(-1, ordinal == 1 ? int32_t(v) : row - 1, ordinal, nodes[v].deepest);
    while (row < a.budget) put(-1, kPadding, -1, 0.0f);
  }
};

}  // namespace

void join_tree_cpu(const JoinTreeArgs& a) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t b = 0; b < a.sources.batch; ++b) {
    Tree tree(a, b);
    if (*tree.sources.memory.length > 0) {
      tree.grow();
      tree.cut();
      tree.give_masks();
    }
    tree.write(b);
  }
}

}  // namespace esp
