// advance_block on a GPU: one block of threads a sequence, from the walk to the next tree's ancestors, in one
// launch.
//
// Bytes a sequence: 12 a row in (and one sector of `ids`), 24 and its ancestor words out, 8 a candidate of
// each mask of the deepest row, the probe vectors in and out, and every committed embedding. At decode sizes
// that is nothing: time is the chain of dependent loads (rows, candidates) and, in warp 0 alone, the drafts
// one after the other at two warp reductions each, while the other warps update the probe.
#pragma once
#include "esp/advance_block.h"
#include "esp/block.h"
#include "esp/cuda.h"

namespace esp {

constexpr int kAdvanceThreads = 512;
constexpr int kAdvanceMaxRows = 2048;  // so that Scratch fits 99 KB, which every card since sm_80 has
constexpr int kAdvanceMaxLevels = 44;  // of a static tree: 45 nodes with 44 masks each are 2025 rows

constexpr int32_t kNotToken = INT32_MIN;   // in Scratch::parent, for mask rows and padding
constexpr unsigned kNoOffer = UINT32_MAX;  // in Scratch::offer
constexpr float kLargest = 3.40282347e38f;

struct AdvanceBlockParams {
  AdvanceBlockArgs args;  // its widths are on the host
  int16_t width[kAdvanceMaxLevels];
};

// How deep a draft can be.
ESP_INLINE int draft_levels(const AdvanceBlockArgs& a) {
  return int(a.masks < a.nodes - 1 ? a.masks : a.nodes - 1);
}

// Shared memory. Costs are negated cumulative log-probabilities: at least 0, so that their bits order them.
struct Scratch {
  int rows, nodes, levels;
  int32_t *choice, *token, *parent;  // [rows], the block that was run
  int32_t *path, *committed;         // [rows]
  int32_t* accepted;                 // [1]
  int32_t *candidate, *candidates;   // [levels, nodes] tokens, and [levels] how many
  float* loss;                       // [levels, nodes]
  int32_t *next_token, *next_parent, *depth, *rank;  // [nodes], the next tree; rank is that of its offer
  float* cost;                                       // [nodes]
  unsigned* offer;                                   // [nodes], the cost of its best child not drafted yet

  static size_t bytes(const AdvanceBlockArgs& a) {
    const int64_t levels = draft_levels(a);
    return size_t(4 * (5 * a.rows + 1 + levels * (2 * a.nodes + 1) + 6 * a.nodes));
  }

  ESP_DEVICE explicit Scratch(const AdvanceBlockArgs& a)
      : rows(int(a.rows)), nodes(int(a.nodes)), levels(draft_levels(a)) {
    int32_t* free = reinterpret_cast<int32_t*>(dynamic_shared());
    const auto take = [&free](int count) { return (free += count) - count; };
    choice = take(rows);
    token = take(rows);
    parent = take(rows);
    path = take(rows);
    committed = take(rows);
    accepted = take(1);
    candidate = take(levels * nodes);
    candidates = take(levels);
    loss = reinterpret_cast<float*>(take(levels * nodes));
    next_token = take(nodes);
    next_parent = take(nodes);
    depth = take(nodes);
    rank = take(nodes);
    cost = reinterpret_cast<float*>(take(nodes));
    offer = reinterpret_cast<unsigned*>(take(nodes));
  }
};

ESP_DEVICE void read_block(const AdvanceBlockArgs& a, int64_t b, const Scratch& s) {
  for (int r = threadIdx.x; r < s.rows; r += kAdvanceThreads) {
    const int64_t i = b * a.rows + r;
    s.choice[r] = a.ids[i * a.candidates];
    s.token[r] = a.tokens[i];
    s.parent[r] = a.mask_ordinal[i] == 0 ? a.parent[i] : kNotToken;
  }
}

// One warp. Children come after their parents, so one pass over the rows meets the whole walk in order.
ESP_DEVICE void walk(const Scratch& s) {
  const int lane = lane_index();
  int accepted = -1, current = 0, wanted = s.choice[0];
  const auto take = [&] {
    ++accepted;
    if (lane != 0) return;
    s.path[accepted] = current;
    s.committed[accepted] = wanted;
  };
  if (s.parent[0] != kNotToken) {
    take();
    for (int first = 0; first < s.rows; first += kWarp) {
      const int r = first + lane;
      const int parent = r < s.rows ? s.parent[r] : kNotToken, token = r < s.rows ? s.token[r] : -1;
      while (true) {
        const unsigned found = __ballot_sync(kAllLanes, r > current && parent == current && token == wanted);
        if (found == 0) break;
        current = first + __ffs(int(found)) - 1;
        wanted = s.choice[current];
        take();
      }
    }
  }
  if (lane == 0) *s.accepted = accepted;
}

ESP_DEVICE void write_path(const AdvanceBlockArgs& a, int64_t b, const Scratch& s) {
  const int accepted = *s.accepted;
  if (threadIdx.x == 0) a.accepted[b] = accepted;
  for (int i = threadIdx.x; i < s.rows; i += kAdvanceThreads) {
    a.path[b * a.rows + i] = i <= accepted ? s.path[i] : -1;
    a.committed[b * a.rows + i] = i <= accepted ? s.committed[i] : -1;
  }
}

// A warp a level. The first `nodes` candidates that may be drafted are enough: at most nodes - 1 hang from
// one row, and pruning skips one.
ESP_DEVICE void read_candidates(const AdvanceBlockArgs& a, int64_t b, const Scratch& s) {
  const int deepest = *s.accepted < 0 ? 0 : s.path[*s.accepted];
  for (int level = warp_index(); level < s.levels; level += kAdvanceThreads / kWarp) {
    const int64_t guess = a.nodes + deepest * a.masks + level, row = guess < a.rows ? guess : a.rows - 1;
    const int32_t* ids = a.ids + (b * a.rows + row) * a.candidates;
    const float* logprobs = a.logprobs + (b * a.rows + row) * a.candidates;
    int kept = 0;
    for (int64_t first = 0; first < a.candidates && kept < s.nodes; first += kWarp) {
      const int64_t n = first + lane_index();
      const int32_t id = n < a.candidates ? ids[n] : -1;
      const float logprob = n < a.candidates ? logprobs[n] : 0.0f;
      const bool usable = id >= 0 && fabsf(logprob) <= kLargest;
      const unsigned found = __ballot_sync(kAllLanes, usable);
      const int place = kept + __popc(found & lanes_below());
      if (usable && place < s.nodes) {
        s.candidate[level * s.nodes + place] = id;
        s.loss[level * s.nodes + place] = fmaxf(-logprob, 0.0f);
      }
      kept += __popc(found);
    }
    if (lane_index() == 0) s.candidates[level] = kept < s.nodes ? kept : s.nodes;
  }
}

// The next tree is the bonus, or padding.
ESP_DEVICE void plant(const Scratch& s) {
  const int32_t bonus = *s.accepted < 0 ? -1 : s.committed[*s.accepted];
  for (int v = threadIdx.x; v < s.nodes; v += kAdvanceThreads) {
    const bool root = v == 0 && bonus >= 0;
    s.next_token[v] = root ? bonus : -1;
    s.next_parent[v] = root ? kRoot : kPadding;
    s.depth[v] = root ? 0 : -1;
    s.cost[v] = 0.0f;
  }
}

// The cost of candidate `rank` below row v, or more than kLargest where it may not hang there.
ESP_DEVICE float cost_below(const Scratch& s, int v, int rank, bool prune) {
  const int i = s.depth[v] * s.nodes + rank;
  return prune && s.candidate[i] == s.next_token[v] ? INFINITY : s.cost[v] + s.loss[i];
}

ESP_DEVICE void draft(const Scratch& s, int row, int parent, int rank, float cost) {
  s.next_token[row] = s.candidate[s.depth[parent] * s.nodes + rank];
  s.next_parent[row] = parent;
  s.depth[row] = s.depth[parent] + 1;
  s.cost[row] = cost;
}

// Row v offers its first candidate from `rank` on.
ESP_DEVICE void offer_child(const Scratch& s, int v, int rank, bool prune) {
  s.offer[v] = kNoOffer;
  const int count = s.depth[v] < s.levels ? s.candidates[s.depth[v]] : 0;
  for (; rank < count; ++rank) {
    const float cost = cost_below(s, v, rank, prune);
    if (!(cost <= kLargest)) continue;
    s.offer[v] = bits_of(cost);
    s.rank[v] = rank;
    return;
  }
}

// One warp. The least of all offers by (cost, depth, parent) is drafted, leaves its place to its next sibling
// and makes an offer of its own.
ESP_DEVICE void grow_best_first(const Scratch& s, bool prune) {
  const int lane = lane_index();
  if (lane == 0) offer_child(s, 0, 0, prune);
  __syncwarp();
  for (int row = 1; row < s.nodes; ++row) {
    unsigned cost = kNoOffer, place = kNoOffer;
    for (int v = lane; v < row; v += kWarp) {
      const unsigned here = unsigned(s.depth[v]) << 16 | unsigned(v);
      if (s.offer[v] > cost || (s.offer[v] == cost && here > place)) continue;
      cost = s.offer[v];
      place = here;
    }
    const unsigned least = __reduce_min_sync(kAllLanes, cost);
    if (least == kNoOffer) return;
    const int parent = int(__reduce_min_sync(kAllLanes, cost == least ? place : kNoOffer) & 0xffff);
    const int rank = s.rank[parent];
    __syncwarp();
    if (lane == 1) draft(s, row, parent, rank, float_of(least));
    if (lane < 2) offer_child(s, lane == 0 ? parent : row, lane == 0 ? rank + 1 : 0, prune);
    __syncwarp();
  }
}

// One warp. The drafts of a level all hang from the first one of the level before.
ESP_DEVICE void grow_levels(const AdvanceBlockParams& params, const Scratch& s, bool prune) {
  int best = 0, first = 1;
  for (int level = 0; level < params.args.width_levels; ++level) {
    const int width = params.width[level];
    int drafted = 0;
    for (int start = 0; start < s.candidates[level] && drafted < width; start += kWarp) {
      const int rank = start + lane_index();
      const float cost = rank < s.candidates[level] ? cost_below(s, best, rank, prune) : INFINITY;
      const bool usable = cost <= kLargest;
      const unsigned found = __ballot_sync(kAllLanes, usable);
      const int place = drafted + __popc(found & lanes_below());
      if (usable && place < width) draft(s, first + place, best, rank, cost);
      drafted += __popc(found);
    }
    if (drafted == 0) return;
    __syncwarp();
    best = first;
    first += width;
  }
}

// All warps but the first. A thread keeps V elements of one probe vector while it applies every token to
// them.
template <typename T, int V>
ESP_DEVICE void draw_probe(const AdvanceBlockArgs& a, int64_t b, const Scratch& s) {
  const int accepted = *s.accepted, packs = int(a.n) / V;
  if (a.lam == 0 || accepted < 0) return;
  const int64_t count = a.probe_masks * packs;
  for (int64_t i = int(threadIdx.x) - kWarp; i < count; i += kAdvanceThreads - kWarp) {
    const int64_t first = i % packs * V;
    float* vector = a.probe + b * a.stride_batch + i / packs * a.stride_mask;
    auto* own = reinterpret_cast<Pack<float, V>*>(vector + first);
    const T* embedding = static_cast<const T*>(a.embedding) + first;
    Pack<float, V> probe = *own;
    ESP_UNROLL(4)
    for (int c = 0; c <= accepted; ++c) {
      const uint32_t token = uint32_t(s.committed[c]);  // of no row of the embedding, -1 or worse: skipped
      if (token >= a.vocabulary) continue;
      const auto target = *reinterpret_cast<const Pack<T, V>*>(embedding + token * a.stride_token);
      ESP_UNROLL(V)
      for (int j = 0; j < V; ++j)
        probe.value[j] = fmaf(a.lam, load(target.value[j]) - probe.value[j], probe.value[j]);
    }
    *own = probe;
  }
}

// The node that a row of the next block belongs to, and which of its masks it is; 0 is the node itself.
struct Owner {
  int node, ordinal;
  bool real;
};

ESP_DEVICE Owner owner_of(const Scratch& s, int row, int masks) {
  const int mask = row - s.nodes;
  const int node = mask < 0 ? row : masks > 0 ? mask / masks : s.nodes;
  return {node, mask < 0 ? 0 : mask - node * masks + 1, node < s.nodes && s.next_parent[node] != kPadding};
}

ESP_DEVICE void write_block(const AdvanceBlockArgs& a, int64_t b, const Scratch& s) {
  for (int r = threadIdx.x; r < s.rows; r += kAdvanceThreads) {
    const Owner o = owner_of(s, r, int(a.masks));
    const int parent = o.ordinal == 0 ? s.next_parent[o.node] : o.ordinal == 1 ? o.node : r - 1;
    const int64_t i = b * a.rows + r;
    a.tokens[i] = o.real && o.ordinal == 0 ? s.next_token[o.node] : -1;
    a.parent[i] = o.real ? parent : kPadding;
    a.mask_ordinal[i] = o.real ? o.ordinal : -1;
    a.depth[i] = o.real ? s.depth[o.node] + o.ordinal : -1;
  }
}

// A thread a word.
ESP_DEVICE void write_ancestors(const AdvanceBlockArgs& a, int64_t b, const Scratch& s) {
  const int words = int(a.words);
  for (int i = threadIdx.x; i < s.rows * words; i += kAdvanceThreads) {
    const int r = i / words, word = i % words;
    const Owner o = owner_of(s, r, int(a.masks));
    uint64_t bits = 0;
    const auto see = [&](int row) {
      if (row / 64 == word) bits |= uint64_t{1} << row % 64;
    };
    if (o.real) {
      for (int mask = r - o.ordinal + 1; mask <= r && o.ordinal > 0; ++mask) see(mask);
      for (int v = o.node; v != kRoot; v = s.next_parent[v]) see(v);
    }
    a.ancestors[b * a.rows * words + i] = int64_t(bits);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kAdvanceThreads)
    advance_block_kernel(const __grid_constant__ AdvanceBlockParams params) {
  const AdvanceBlockArgs& a = params.args;
  const int64_t b = blockIdx.x;
  const Scratch s(a);

  read_block(a, b, s);
  __syncthreads();
  if (warp_index() == 0) walk(s);
  __syncthreads();
  read_candidates(a, b, s);
  plant(s);
  write_path(a, b, s);
  __syncthreads();
  if (warp_index() > 0) draw_probe<T, V>(a, b, s);
  else if (s.next_parent[0] == kRoot) {
    if (a.widths == nullptr) grow_best_first(s, a.prune);
    else grow_levels(params, s, a.prune);
  }
  __syncthreads();
  write_block(a, b, s);
  write_ancestors(a, b, s);
}

}  // namespace esp
