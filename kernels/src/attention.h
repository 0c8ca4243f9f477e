// Attention over keys and values in blocks of a cache.
//
// A block's tokens are in groups of 16. Keys are [block][kv head][group] of a panel of gemm.h whose
// columns are the group's tokens and whose depth is the head; values, behind all keys of the block,
// [block][kv head][group][16 elements of the head] of a panel whose columns are the elements and
// whose depth is the tokens. So both products are those of gemm.h. What pads a group or a head is
// never read as a result. A cache of codes (S is not T) has those of kv_codes.h, and scales, in the
// place of panels: scores are multiplied by the scales of keys, weights by those of values. Keys are
// rotated before they are coded, and queries are.
//
// A sequence is cut into parts of GROUPS groups at fixed borders. The maximum, the sum and the
// weighted sum of values of each part are computed in a fixed order, by what a query sees of it
// alone, and merged in order of the parts. So a query's result is the same, bit for bit, whatever
// else is in the step, whichever of its keys were cached, and however the work is cut into items.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_tiles.h"
#include "gemm.h"
#include "kv_codes.h"

namespace attention {

using gemm::multiply;
using kv_codes::multiply;

constexpr int GROUPS = 8;  // of a part
constexpr int PART = GROUPS * PANEL;
constexpr int TILE_ROWS = 96;  // queries times heads of an item, about
constexpr int SLICE = 128;     // of a head: queries are [slices][rows][SLICE] in an item
constexpr long MOST_RESULTS = 1 << 17;  // of rows, heads and parts, that cut runs leave in memory

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12, SUMS = 24;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6, SUMS = 12;
#else
constexpr int MAX_ROWS = 2, SUMS = 8;
#endif

// Rows that are attended together.
template <class T, class S>
constexpr int ROWS = attention_tiles::AVAILABLE<T, S> ? attention_tiles::MAX_ROWS : MAX_ROWS;
constexpr int MOST_ROWS = std::max(ROWS<bf16, bf16>, MAX_ROWS);

// Queries that are attended together over parts of one block table.
struct Item {
  int32_t first, count;  // of `rows`: their tokens
  int32_t seq;           // whose table is read
  int32_t from, to;      // parts
  int32_t piece;         // where the results wait to be merged; -1: they are complete
};

// A token whose result is merged from pieces.
struct Merge {
  int32_t row, first, count;  // of `order`
};

// What all layers of the same heads and window share in a step. The arrays follow it in memory.
struct Plan {
  const int64_t *table, *slots;
  int64_t table_stride, block_size, window, heads, kv_heads;
  int64_t tokens = 0, items = 0, merges = 0, rows = 0, order = 0, pieces = 0;
  int64_t work = 0;  // some 0.3 us each, for heads of 64

  const Item* item_list() const { return (const Item*)(this + 1); }
  const Merge* merge_list() const { return (const Merge*)(item_list() + items); }
  const int32_t* row_list() const { return (const int32_t*)(merge_list() + merges); }
  const int32_t* order_list() const { return row_list() + rows; }
  const int32_t* positions() const { return order_list() + order; }
  // The last position that each token sees.
  const int32_t* ends() const { return positions() + tokens; }
  size_t size() const { return (const char*)(ends() + tokens) - (const char*)this; }
};

// Where groups lie among positions.
struct Blocks {
  long size, groups;  // tokens and groups of a block

  explicit Blocks(long block_size) : size(block_size), groups((block_size + PANEL - 1) / PANEL) {}
  long group_of(long token) const { return token / size * groups + token % size / PANEL; }
  long part_of(long token) const { return group_of(token) / GROUPS; }
  long first_token(long group) const {
    return group / groups * size + std::min(group % groups * PANEL, size);
  }
  int tokens(long group) const {
    return (int)std::min<long>(PANEL, size - group % groups * PANEL);
  }
};

// ---- The plan ----

struct Sequence {
  int32_t row, count, length;  // first token, tokens in the step, tokens altogether
};

class Planner {
 public:
  // `sees`: the last position that each token sees; null: its own.
  Planner(const int64_t* query_starts, const int64_t* seq_lens, long seqs, const int64_t* sees,
          Plan plan, int threads)
      : plan_(plan), blocks_(plan.block_size), group_(plan.heads / plan.kv_heads), sees_(sees) {
    for (long i = 0; i < seqs; i++)
      sequences_.push_back({(int32_t)query_starts[i],
                            (int32_t)(query_starts[i + 1] - query_starts[i]),
                            (int32_t)seq_lens[i]});
    plan_.tokens = query_starts[seqs];
    find_runs();
    long total = 0;
    for (const Item& run : runs_) total += cost(run.count, run.to - run.from);
    plan_.work = total * plan_.kv_heads;
    for (const Item& run : runs_) count_rows(run);
    // Items of about a sixteenth of a thread's share of all heads; the results do not depend on it.
    grain_ = threads > 1 ? std::max<long>(plan_.work / (16 * threads), 1)
                         : std::numeric_limits<long>::max();
    while (cut_results() > MOST_RESULTS) grain_ *= 2;
    split_runs();
    std::stable_sort(items_.begin(), items_.end(), [this](const Item& a, const Item& b) {
      return cost(a.count, a.to - a.from) > cost(b.count, b.to - b.from);
    });
    plan_.items = items_.size();
    plan_.merges = merges_.size();
    plan_.rows = rows_.size();
    plan_.order = order_.size();
  }

  size_t size() const { return plan_.size(); }

  void write(void* to) const {
    Plan* plan = (Plan*)to;
    *plan = plan_;
    std::copy(items_.begin(), items_.end(), (Item*)plan->item_list());
    std::copy(merges_.begin(), merges_.end(), (Merge*)plan->merge_list());
    std::copy(rows_.begin(), rows_.end(), (int32_t*)plan->row_list());
    std::copy(order_.begin(), order_.end(), (int32_t*)plan->order_list());
    int32_t *positions = (int32_t*)plan->positions(), *ends = (int32_t*)plan->ends();
    for (const Sequence& sequence : sequences_)
      for (int i = 0; i < sequence.count; i++) {
        positions[sequence.row + i] = sequence.length - sequence.count + i;
        ends[sequence.row + i] = (int32_t)end_of(sequence, i);
      }
  }

 private:
  // Reading keys and values costs about what six rows cost.
  long cost(long count, long parts) const { return (count * group_ + 6) * parts; }

  long first_part(long position) const {
    long first = plan_.window ? std::max<long>(position + 1 - plan_.window, 0) : 0;
    return blocks_.part_of(first);
  }
  // The last position that a token of a sequence sees.
  long end_of(const Sequence& sequence, int token) const {
    return sees_ ? sees_[sequence.row + token] : sequence.length - sequence.count + token;
  }
  // Parts all of whose tokens are in a sequence.
  long whole_parts(const Sequence& sequence) const {
    return blocks_.group_of(sequence.length) / GROUPS;
  }

  // The blocks of a part.
  const int64_t* blocks_of(int seq, long part) const {
    return plan_.table + seq * plan_.table_stride + part * GROUPS / blocks_.groups;
  }
  size_t blocks_size(long part) const {
    long first = part * GROUPS / blocks_.groups, last = ((part + 1) * GROUPS - 1) / blocks_.groups;
    return (last - first + 1) * sizeof(int64_t);
  }

  void add_run(const int* seqs, int count, long from, long to) {
    runs_.push_back({(int32_t)rows_.size(), count, seqs[0], (int32_t)from, (int32_t)to, -1});
    for (int i = 0; i < count; i++) rows_.push_back(sequences_[seqs[i]].row);
  }

  void find_runs() {
    std::vector<int> singles;
    for (int i = 0; i < (int)sequences_.size(); i++) {
      if (sequences_[i].count == 1) singles.push_back(i);
    }
    auto first = [this](int seq) { return first_part(sequences_[seq].length - 1); };
    std::stable_sort(singles.begin(), singles.end(),
                     [&](int a, int b) { return first(a) < first(b); });
    for (size_t i = 0, end; i < singles.size(); i = end) {
      for (end = i; end < singles.size() && first(singles[end]) == first(singles[i]);) end++;
      divide(singles.data() + i, (int)(end - i), first(singles[i]));
    }
    for (int i = 0; i < (int)sequences_.size(); i++) {
      if (sequences_[i].count > 1) add_chunk(i);
    }
  }

  // Add the runs of sequences that have the same blocks before `part`.
  void divide(int* seqs, int count, long part) {
    std::sort(seqs, seqs + count, [&](int a, int b) { return before(a, b, part); });
    for (int i = 0, end; i < count; i = end) {
      for (end = i + 1; end < count && same(seqs[i], seqs[end], part);) end++;
      if (end == i + 1) {
        add_run(seqs + i, 1, part, blocks_.part_of(sequences_[seqs[i]].length - 1) + 1);
        continue;
      }
      long to = part + 1;
      while (std::all_of(seqs + i + 1, seqs + end,
                         [&](int seq) { return same(seqs[i], seq, to); }))
        to++;
      add_run(seqs + i, end - i, part, to);
      // Those that end here have no tokens beyond the shared ones.
      int* rest = std::partition(seqs + i, seqs + end, [&](int seq) {
        return sequences_[seq].length <= blocks_.first_token(to * GROUPS);
      });
      divide(rest, (int)(seqs + end - rest), to);
    }
  }
  bool before(int a, int b, long part) const {
    bool whole_a = part < whole_parts(sequences_[a]), whole_b = part < whole_parts(sequences_[b]);
    if (!whole_a || !whole_b) return whole_a != whole_b ? whole_a : a < b;
    const int64_t *x = blocks_of(a, part), *y = blocks_of(b, part);
    long count = blocks_size(part) / sizeof(int64_t);
    for (long i = 0; i < count; i++)
      if (x[i] != y[i]) return x[i] < y[i];
    return a < b;
  }
  bool same(int a, int b, long part) const {
    return part < whole_parts(sequences_[a]) && part < whole_parts(sequences_[b]) &&
           !memcmp(blocks_of(a, part), blocks_of(b, part), blocks_size(part));
  }

  // Tiles of consecutive queries.
  void add_chunk(int seq) {
    const Sequence& sequence = sequences_[seq];
    int tile = std::max<int>(TILE_ROWS / (int)group_, 4);
    for (int done = 0; done < sequence.count; done += tile) {
      int count = std::min(tile, sequence.count - done);
      long position = sequence.length - sequence.count + done;
      runs_.push_back({(int32_t)rows_.size(), count, seq, (int32_t)first_part(position),
                       (int32_t)blocks_.part_of(end_of(sequence, done + count - 1)) + 1, -1});
      for (int i = 0; i < count; i++) rows_.push_back(sequence.row + done + i);
    }
  }

  void count_rows(const Item& run) {
    runs_of_row_.resize(plan_.tokens);
    for (int i = 0; i < run.count; i++) runs_of_row_[rows_[run.first + i]]++;
  }
  bool is_alone(const Item& run) const { return runs_of_row_[rows_[run.first]] == 1; }
  // The parts of an item of a run.
  long parts_at_once(const Item& run) const {
    return std::clamp<long>(grain_ / cost(run.count, 1), 1, run.to - run.from);
  }

  // Results that runs leave in memory because they are cut.
  long cut_results() const {
    long results = 0;
    for (const Item& run : runs_) {
      long parts = run.to - run.from;
      if (is_alone(run) && parts_at_once(run) < parts) results += run.count * parts;
    }
    return results * plan_.heads;
  }

  // Cut runs into items, and collect where the pieces of each row are.
  void split_runs() {
    std::vector<std::vector<int32_t>> pieces(plan_.tokens);
    long next = 0;
    // Runs of a row are in order of their parts.
    for (const Item& run : runs_) {
      long parts = parts_at_once(run);
      bool complete = parts == run.to - run.from && is_alone(run);
      for (long from = run.from; from < run.to; from += parts) {
        Item item = run;
        item.from = (int32_t)from;
        item.to = (int32_t)std::min<long>(from + parts, run.to);
        if (!complete) {
          // Each part is a piece of its own: merging them in order is not associative.
          item.piece = (int32_t)next;
          for (int i = 0; i < run.count; i++)
            for (int part = item.from; part < item.to; part++)
              pieces[rows_[run.first + i]].push_back((int32_t)next++);
        }
        items_.push_back(item);
      }
    }
    plan_.pieces = next;
    for (int row = 0; row < plan_.tokens; row++) {
      if (pieces[row].empty()) continue;
      merges_.push_back({row, (int32_t)order_.size(), (int32_t)pieces[row].size()});
      order_.insert(order_.end(), pieces[row].begin(), pieces[row].end());
    }
  }

  Plan plan_;
  Blocks blocks_;
  long group_, grain_ = 0;
  const int64_t* sees_;
  std::vector<Sequence> sequences_;
  std::vector<Item> runs_, items_;
  std::vector<int> runs_of_row_;
  std::vector<Merge> merges_;
  std::vector<int32_t> rows_, order_;
};

// ---- A layer ----

// Heads and groups as operands of type T.
template <class T>
struct Heads {
  long head_size, depth;        // elements of a head, and of a query as an operand
  long panels;                  // of a head
  size_t key_size, value_size;  // elements of a group of a head

  explicit Heads(long head_size)
      : head_size(head_size),
        depth(sizeof(T) == 2 ? (head_size + 1) / 2 * 2 : head_size),
        panels((head_size + PANEL - 1) / PANEL),
        key_size(gemm::panel_size<T>(head_size)),
        value_size(panels * gemm::panel_size<T>(PANEL)) {}
};

template <class T, class S>
constexpr bool CODED = !std::is_same_v<T, S>;

// Where a cache of S has them.
template <class T, class S>
struct Layout {
  size_t key_size, value_size;  // of a group of a head
  Blocks blocks;
  size_t key_head, value_head, values, block;  // from one to the next; where values begin

  Layout(const Heads<T>& heads, long kv_heads, long block_size)
      : key_size(CODED<T, S> ? heads.head_size * PANEL + kv_codes::SCALES : heads.key_size),
        value_size(CODED<T, S> ? heads.panels * PANEL * PANEL + kv_codes::SCALES : heads.value_size),
        blocks(block_size),
        key_head(blocks.groups * key_size),
        value_head(blocks.groups * value_size),
        values(kv_heads * key_head),
        block(kv_heads * (key_head + value_head)) {}
};

template <class T, class S>
struct Layer {
  const T *q, *k, *v;
  long q_stride, k_stride, v_stride;  // of tokens
  T* out;
  S* cache;
  const Plan& plan;
  Heads<T> heads;
  Layout<T, S> layout;
  float scale, softcap;  // 0 is without a soft cap
  const float* sinks;    // of heads; null is without

  long group() const { return plan.heads / plan.kv_heads; }
  // A result: the weighted sum of values, the maximum, the sum of exponentials.
  size_t result_size() const { return heads.panels * PANEL + PANEL; }
};

// Write a head of a token, whose lane is given, to its group of keys and that of values.
template <class T>
void write_head(const Heads<T>& heads, const T* k, const T* v, long lane, T* key, T* value) {
  constexpr int PER = sizeof(T) == 2 ? 2 : 1;
  key += lane * PER;
  value += lane / PER * PER * PANEL + lane % PER;
  long d = 0;
  for (; d + PER <= heads.head_size; d += PER) memcpy(key + d * PANEL, k + d, PER * sizeof(T));
  if (d < heads.head_size) {
    key[d * PANEL] = k[d];
    key[d * PANEL + 1] = T{};
  }
  for (d = 0; d + PANEL <= heads.head_size; d += PANEL)
    for (int i = 0; i < PANEL; i++) value[d * PANEL + i * PER] = v[d + i];
  for (int i = 0; d + i < heads.panels * PANEL; i++)
    value[d * PANEL + i * PER] = d + i < heads.head_size ? v[d + i] : T{};
}

template <class T, class S>
void write_head(const Heads<T>& heads, const T* k, const T* v, long lane, S* key, S* value) {
  long size = heads.head_size;
  alignas(64) S codes[SLICE];
  static thread_local Scratch<float> scratch;
  float* rotated = scratch.get(size);
  for (long d = 0; d < size; d++) rotated[d] = to_float(k[d]);
  kv_codes::rotate_head(rotated, size);
  float key_scale = kv_codes::find_scale<S>(rotated, size), scale = kv_codes::find_scale<S>(v, size);
  memcpy(key + size * PANEL + lane * sizeof(float), &key_scale, sizeof(float));
  memcpy(value + heads.panels * PANEL * PANEL + lane * sizeof(float), &scale, sizeof(float));
  for (long from = 0; from < size; from += SLICE) {
    long count = std::min<long>(SLICE, size - from);
    kv_codes::encode(rotated + from, count, key_scale, codes);
    for (long d = 0; d < count; d++) key[(from + d) * PANEL + lane] = codes[d];
    kv_codes::encode(v + from, count, scale, codes);
    std::fill(codes + count, codes + (count + PANEL - 1) / PANEL * PANEL, S{});
    for (long d = 0; d < count; d += PANEL)
      memcpy(value + (from + d) * PANEL + lane * PANEL, codes + d, PANEL);
  }
}

template <class T, class S>
void write_token(const Layer<T, S>& layer, long token) {
  const Layout<T, S>& layout = layer.layout;
  long slot = layer.plan.slots[token], in_block = slot % layout.blocks.size;
  long group = in_block / PANEL, lane = in_block % PANEL;
  S* block = layer.cache + slot / layout.blocks.size * layout.block;
  for (long head = 0; head < layer.plan.kv_heads; head++)
    write_head(layer.heads, layer.k + token * layer.k_stride + head * layer.heads.head_size,
               layer.v + token * layer.v_stride + head * layer.heads.head_size, lane,
               block + head * layout.key_head + group * layout.key_size,
               block + layout.values + head * layout.value_head + group * layout.value_size);
}

// What a row sees of a part, in lanes of its groups.
struct Lanes {
  int from, to;
};

// Scale scores and limit them smoothly, in place: softcap * tanh(score * scale / softcap).
__attribute__((noinline)) inline void cap_scores(float* scores, int groups, float scale,
                                                 float softcap) {
  float factor = scale / softcap;
  for (float* at = scores; at < scores + groups * PANEL; at += LANES)
    store(at, softcap * tanh(load(at) * factor));
}

// Turn scores [groups of `lanes`] into weights, and give their maximum and sum. A NaN stays one.
// CODED: the weights of a group are multiplied by those at `factors`.
template <class T, bool CODED>
__attribute__((noinline)) void weigh(const float* scores, const Lanes* lanes, int groups,
                                     float scale, const float* const* factors,
                                     gemm::Operand<T>* weights, float* maximum_out,
                                     float* sum_out) {
  constexpr bool SHORT = std::is_same_v<gemm::Operand<T>, bf16>;
  Floats infinity = splat(std::numeric_limits<float>::infinity());
  Ints index[PANEL_VECTORS];
  for (int v = 0; v < PANEL_VECTORS; v++)
    for (int i = 0; i < LANES; i++) index[v][i] = v * LANES + i;
  auto visible = [&](int g, int v) {
    return (index[v] >= lanes[g].from) & (index[v] < lanes[g].to);
  };
  Floats highest = -infinity;
  for (int g = 0; g < groups; g++)
    for (int v = 0; v < PANEL_VECTORS; v++) {
      Floats score = load(scores + g * PANEL + v * LANES) * scale;
      if (lanes[g].to - lanes[g].from < PANEL) score = choose(visible(g, v), score, -infinity);
      highest = maximum(score, highest);
    }
  float limit = max_lanes(highest);
  Floats sum[PANEL_VECTORS] = {};
  for (int g = 0; g < groups; g++)
    for (int v = 0; v < PANEL_VECTORS; v++) {
      Floats difference = load(scores + g * PANEL + v * LANES) * scale - limit;
      Floats weight = SHORT ? exp_short(difference) : exp_negative(difference), product = weight;
      if (CODED) product *= load(factors[g] + v * LANES);
      if (lanes[g].to - lanes[g].from < PANEL) {
        weight = choose(visible(g, v), weight, Floats{});
        product = CODED ? choose(visible(g, v), product, Floats{}) : weight;
      }
      store(weights + g * PANEL + v * LANES, product);
      sum[v] += weight;
    }
  for (int width = PANEL_VECTORS / 2; width; width /= 2)
    for (int v = 0; v < width; v++) sum[v] += sum[v + width];
  *maximum_out = limit;
  *sum_out = sum_lanes(sum[0]);
}

// A result without a key.
inline void clear(float* result, size_t size) {
  std::fill(result, result + size, 0.0f);
  result[size - PANEL] = -std::numeric_limits<float>::infinity();
}

// Add the result of a part to that of the parts before it.
__attribute__((noinline)) inline void merge(float* result, const float* part, size_t size) {
  size_t width = size - PANEL;
  float* limits = result + width;
  const float* added = part + width;
  if (added[1] == 0.0f) return;  // no key of it is visible
  // One of the two is multiplied by 1.
  if (added[0] > limits[0]) {
    float factor = exp_negative(limits[0] - added[0]);
    for (size_t i = 0; i < width; i += LANES)
      store(result + i, load(result + i) * factor + load(part + i));
    limits[1] = limits[1] * factor + added[1];
    limits[0] = added[0];
  } else {
    float factor = exp_negative(added[0] - limits[0]);
    for (size_t i = 0; i < width; i += LANES)
      store(result + i, load(part + i) * factor + load(result + i));
    limits[1] = added[1] * factor + limits[1];
  }
}

template <class T, class S>
void finish(const Layer<T, S>& layer, const float* result, long row, long head) {
  size_t width = layer.result_size() - PANEL;
  long size = layer.heads.head_size;
  float sum = result[width + 1];
  if (layer.sinks) sum += std::exp(layer.sinks[head] - result[width]);
  float factor = 1.0f / sum;
  T* out = layer.out + (row * layer.plan.heads + head) * size;
  for (long i = 0; i < size; i += LANES) {
    Floats value = load(result + i) * factor;
    long count = std::min<long>(LANES, size - i);
    count == LANES ? store(out + i, value) : store_part(out + i, value, (int)count);
  }
}

template <class T>
struct Workspace {
  Scratch<gemm::Operand<T>> queries;
  Scratch<float> results;
  alignas(64) float scores[MOST_ROWS * PART];
  alignas(64) gemm::Operand<T> weights[MOST_ROWS * PART];
  Scratch<float> rotated;
  Scratch<T> edges;
  Scratch<float> partials;
};

// Turn the scores of rows into weights.
template <bool CODED, class T>
INLINE void weigh_rows(const Heads<T>& heads, const Lanes* const* lanes, int rows, int groups,
                       float scale, float softcap, const float* const* factors, Workspace<T>& work,
                       float* const* results) {
  for (int r = 0; r < rows; r++) {
    float *scores = work.scores + r * PART, *limits = results[r] + heads.panels * PANEL;
    if (softcap != 0.0f) cap_scores(scores, groups, scale, softcap);
    weigh<T, CODED>(scores, lanes[r], groups, softcap != 0.0f ? 1.0f : scale, factors,
                    work.weights + r * PART, limits, limits + 1);
  }
}

// A part of a sequence's keys and values of one head.
template <class S>
struct Part {
  const S *keys[GROUPS], *values[GROUPS];
  long token[GROUPS];  // first of each group
  int tokens[GROUPS];
  long last;          // position
  Lanes all[GROUPS];  // that hold tokens
};

// Queries of an item from some row on.
template <class T>
struct Queries {
  const gemm::Operand<T>* at;
  long slice;  // elements from one slice to the next
};

// Where a vector of columns begins in a panel.
template <class S>
constexpr int vector_at(int v) {
  return v % PANEL_VECTORS * LANES * (sizeof(S) == 2 ? 2 : 1);
}

template <int R, int N, class T, class S>
INLINE void score_groups(const Queries<T>& q, const Heads<T>& heads, const S* const* keys,
                         const S* const* ahead, float* scores) {
  constexpr int V = N * PANEL_VECTORS;
  Floats sums[R][V] = {};
  const gemm::Operand<T>* x = q.at;
  for (long from = 0; from < heads.depth; from += SLICE, x += q.slice) {
    const S *weights[V], *next[N];
    for (int v = 0; v < V; v++)
      weights[v] = keys[v / PANEL_VECTORS] + from * PANEL + vector_at<S>(v);
    for (int n = 0; n < N; n++) next[n] = ahead[n] + from * PANEL;
    int depth = (int)std::min<long>(SLICE, heads.depth - from);
    multiply<R, V>(x, (long)SLICE, weights, depth, sums, next);
  }
  if constexpr (CODED<T, S>)
    for (int v = 0; v < V; v++) {
      Floats scale = load(kv_codes::scales(keys[v / PANEL_VECTORS], heads.head_size * PANEL) +
                          v % PANEL_VECTORS * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][v] *= scale;
    }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(scores + r * PART + v * LANES, sums[r][v]);
}

template <int R, int N, class T, class S>
INLINE void sum_values(const gemm::Operand<T>* weights, const S* const* values,
                       const S* const* ahead, int groups, long panel, float* const* results) {
  constexpr int V = N * PANEL_VECTORS;
  constexpr size_t SIZE = gemm::panel_size<S>(PANEL);
  Floats sums[R][V] = {};
  for (int g = 0; g < groups; g++) {
    const S *at[V], *next[N];
    for (int v = 0; v < V; v++)
      at[v] = values[g] + (panel + v / PANEL_VECTORS) * SIZE + vector_at<S>(v);
    for (int n = 0; n < N; n++) next[n] = ahead[g] + (panel + n) * SIZE;
    multiply<R, V>(weights + g * PANEL, (long)PART, at, PANEL, sums, next);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(results[r] + panel * PANEL + v * LANES, sums[r][v]);
}

constexpr int at_once(int rows) {
  int groups = SUMS / (rows * PANEL_VECTORS);
  return groups >= 4 ? 4 : groups >= 2 ? 2 : 1;
}

constexpr int AHEAD = 4;  // groups

// The groups of a part that rows see: keys, then values, then the groups that come next.
template <class S>
struct Groups {
  const S* at[2 * GROUPS + AHEAD];
  int count;
};

// Compute the results of R rows (of `rows` that count) over groups of a part.
template <int R, class T, class S>
__attribute__((noinline)) void attend_rows(const Heads<T>& heads, const Queries<T>& q,
                                           const Groups<S>& groups, const Lanes* const* lanes,
                                           int rows, float scale, float softcap,
                                           Workspace<T>& work, float* const* results) {
  constexpr int N = at_once(R);
  float* scores = work.scores;
  int count = groups.count, g = 0;
  const S* const* at = groups.at;
  for (; g + N <= count; g += N)
    score_groups<R, N, T, S>(q, heads, at + g, at + g + AHEAD, scores + g * PANEL);
  if constexpr (N > 1)
    for (; g < count; g++)
      score_groups<R, 1, T, S>(q, heads, at + g, at + g + AHEAD, scores + g * PANEL);
  const float* factors[GROUPS];
  if constexpr (CODED<T, S>)
    for (g = 0; g < count; g++)
      factors[g] = kv_codes::scales(at[count + g], heads.panels * PANEL * PANEL);
  weigh_rows<CODED<T, S>>(heads, lanes, rows, count, scale, softcap, factors, work, results);
  const gemm::Operand<T>* weights = work.weights;
  at += count;
  long panel = 0;
  for (; panel + N <= heads.panels; panel += N)
    sum_values<R, N, T, S>(weights, at, at + AHEAD, count, panel, results);
  if constexpr (N > 1)
    for (; panel < heads.panels; panel++)
      sum_values<R, 1, T, S>(weights, at, at + AHEAD, count, panel, results);
}

template <class T, class S>
void attend_tile(const Heads<T>& heads, const Queries<T>& q, const Groups<S>& groups,
                 const Lanes* const* lanes, int rows, float scale, float softcap,
                 Workspace<T>& work, float* const* results) {
  auto run = [&](auto attend) {
    attend(heads, q, groups, lanes, rows, scale, softcap, work, results);
  };
  // Rows that are missing to the next size are computed and dropped.
  if (rows == 1) return run(attend_rows<1, T, S>);
  if (rows == 2) return run(attend_rows<2, T, S>);
  if constexpr (MAX_ROWS > 2) {
    if (rows == 3) return run(attend_rows<3, T, S>);
    if (rows == 4) return run(attend_rows<4, T, S>);
    if (rows <= 6) return run(attend_rows<6, T, S>);
  }
  if constexpr (MAX_ROWS > 6) {
    if (rows <= 8) return run(attend_rows<8, T, S>);
    if (rows == 9) return run(attend_rows<9, T, S>);
    run(attend_rows<12, T, S>);
  }
}

#if defined(__AMX_BF16__)
// As `attend_rows` by products of tiles. Results follow each other.
inline void attend_tiles(const Heads<bf16>& heads, const Queries<bf16>& q,
                         const Groups<bf16>& groups, bool prefetches, const Lanes* const* lanes,
                         int rows, float scale, float softcap, Workspace<bf16>& work,
                         float* const* results, attention_tiles::Registers& registers) {
  const bf16 *const *keys = groups.at, *const *values = keys + groups.count;
  registers.use_for_keys();
  attention_tiles::score(q.at, SLICE, q.slice, rows, keys, groups.count, heads.depth,
                         prefetches ? keys + AHEAD : nullptr, work.scores, PART);
  weigh_rows<false>(heads, lanes, rows, groups.count, scale, softcap, nullptr, work, results);
  registers.use_for_values();
  attention_tiles::sum_values(work.weights, PART, rows, values, groups.count, (int)heads.panels,
                              prefetches ? values + AHEAD : nullptr, results[0],
                              heads.panels * PANEL + PANEL);
}
#endif

// Copy a group of values of a head; tokens outside of `lanes` become 0.
template <class T>
void copy_visible(const Heads<T>& heads, const T* from, Lanes lanes, T* to) {
  constexpr int PER = sizeof(T) == 2 ? 2 : 1;
  constexpr size_t LINE = PER * PANEL, SIZE = gemm::panel_size<T>(PANEL);
  size_t first = lanes.from / PER, end = (lanes.to + PER - 1) / PER;
  for (long panel = 0; panel < heads.panels; panel++, from += SIZE, to += SIZE) {
    std::fill(to, to + SIZE, T{});
    std::copy(from + first * LINE, from + end * LINE, to + first * LINE);
    if (lanes.from % PER)
      for (size_t i = 0; i < LINE; i += PER) to[first * LINE + i] = T{};
    if (lanes.to % PER)
      for (size_t i = 1; i < LINE; i += PER) to[(end - 1) * LINE + i] = T{};
  }
}

template <class T>
bool is_finite(const T* from, size_t size) {
  Ints found = {};
  for (size_t i = 0; i < size; i += LANES)
    found |= (bits_of(load(from + i)) & 0x7f800000u) == 0x7f800000u;
  for (int i = 0; i < LANES; i++)
    if (found[i]) return false;
  return true;
}

// Attends the queries of an item with one head of keys.
template <class T, class S>
class Attended {
 public:
  Attended(const Layer<T, S>& layer, const Item& item, long kv_head, bool more, float* pieces,
           Workspace<T>& work, attention_tiles::Registers& registers)
      : layer_(layer),
        heads_(layer.heads),
        layout_(layer.layout),
        item_(item),
        kv_head_(kv_head),
        more_(more),
        group_((int)layer.group()),
        count_(item.count * group_),
        pieces_(pieces),
        work_(work),
        registers_(registers) {}

  void run() {
    padded_ = (count_ + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    slices_ = (heads_.depth + SLICE - 1) / SLICE;
    // Behind the last one, rows may be read that do not count.
    queries_ = work_.queries.get((slices_ * padded_ + AT_ONCE) * SLICE);
    for (int i = 0; i < (TILED ? count_ : padded_); i++) take_query(i);
    size_t size = layer_.result_size();
    results_ = work_.results.get(count_ * size);
    for (int i = 0; i < count_; i++) clear(results_ + i * size, size);
    partials_ = work_.partials.get(AT_ONCE * size);
    if (!CODED<T, S>) edges_ = work_.edges.get(GROUPS * heads_.value_size);
    for (long part = item_.from; part < item_.to; part++) attend_part(part);
    if (item_.piece >= 0) return;
    for (int i = 0; i < count_; i++)
      finish(layer_, results_ + i * size, row(i), kv_head_ * group_ + i % group_);
  }

 private:
  static constexpr int AT_ONCE = ROWS<T, S>;
  static constexpr bool TILED = attention_tiles::AVAILABLE<T, S>;

  long row(int i) const { return layer_.plan.row_list()[item_.first + i / group_]; }

  void take_query(int i) {
    const T* q = i < count_ ? layer_.q + row(i) * layer_.q_stride +
                                  (kv_head_ * group_ + i % group_) * heads_.head_size
                            : nullptr;
    if constexpr (CODED<T, S>) {
      float* rotated = work_.rotated.get(heads_.head_size);
      if (q) {
        for (long d = 0; d < heads_.head_size; d++) rotated[d] = to_float(q[d]);
        kv_codes::rotate_head(rotated, heads_.head_size);
      }
      put_query(i, q ? rotated : nullptr);
    } else {
      put_query(i, q);
    }
  }

  template <class Q>
  void put_query(int i, const Q* from) {
    for (long slice = 0; slice < slices_; slice++) {
      gemm::Operand<T>* to = queries_ + (slice * padded_ + i) * SLICE;
      long size = from ? std::min<long>(SLICE, heads_.head_size - slice * SLICE) : 0, d = 0;
      for (; d + LANES <= size; d += LANES) store(to + d, load(from + slice * SLICE + d));
      for (; d < size; d++) store_one(to + d, to_float(from[slice * SLICE + d]));
      std::fill(to + d, to + SLICE, gemm::Operand<T>{});
    }
  }

  // The lanes of a group that positions from `from` to `to` are in.
  Lanes lanes(int g, long from, long to) const {
    long first = part_.token[g];
    int end = (int)std::clamp<long>(to + 1 - first, 0, part_.tokens[g]);
    return {(int)std::clamp<long>(from - first, 0, end), end};
  }

  const S* block(long group) const {
    const int64_t* table = layer_.plan.table + item_.seq * layer_.plan.table_stride;
    return layer_.cache + table[group / layout_.blocks.groups] * layout_.block;
  }
  const S* keys(long group, long next = 0) const {
    return block(group) + (kv_head_ + next) * layout_.key_head +
           group % layout_.blocks.groups * layout_.key_size;
  }
  const S* values(long group) const {
    return block(group) + layout_.values + kv_head_ * layout_.value_head +
           group % layout_.blocks.groups * layout_.value_size;
  }

  // Find what the queries from `begin` to `end` see of a part.
  void find_part(long part, int begin, int end) {
    find_limits(begin, end);
    const Blocks& blocks = layout_.blocks;
    for (int g = 0; g < GROUPS; g++) {
      long group = part * GROUPS + g;
      part_.token[g] = blocks.first_token(group);
      part_.tokens[g] = blocks.tokens(group);
      part_.all[g] = {0, part_.tokens[g]};
      part_.last = part_.token[g] + part_.tokens[g] - 1;
      if (part_.token[g] > last_) continue;  // the table may end here
      part_.keys[g] = keys(group);
      part_.values[g] = values(group);
      if constexpr (CODED<T, S>)
        __builtin_prefetch(part_.values[g] + heads_.panels * PANEL * PANEL);  // their scales
      else
        hide(g);
    }
    for (int i = 0; i < AHEAD; i++) {
      bool ends = part + 1 == item_.to;
      long group = (ends ? item_.from : part + 1) * GROUPS + i;
      next_[i] = (!ends || more_) && blocks.first_token(group) <= last_ ? keys(group, ends)
                                                                        : part_.keys[0];
    }
  }

  // Values that none of the queries sees may be anything, also NaN, which 0 times it is too. Codes
  // are finite, and weights are 0 whatever the scale is.
  void hide(int g) {
    Lanes seen = lanes(g, first_, last_);
    if (seen.to - seen.from == PANEL || seen.from == seen.to) return;
    T* copy = edges_ + g * heads_.value_size;
    copy_visible(heads_, part_.values[g], seen, copy);
    part_.values[g] = copy;
  }

  long oldest(long position) const {
    return layer_.plan.window ? std::max<long>(position + 1 - layer_.plan.window, 0) : 0;
  }

  void attend_part(long part) {
    find_part(part, 0, item_.count);
    if (CODED<T, S> || !spoils()) return attend_rows_of(part, 0, count_);
    for (int i = 0; i < item_.count; i++) {
      find_part(part, i, i + 1);
      attend_rows_of(part, i * group_, (i + 1) * group_);
    }
  }

  void find_limits(int begin, int end) {
    last_ = common_first_ = 0;
    first_ = common_last_ = std::numeric_limits<long>::max();
    for (int i = begin; i < end; i++) {
      long token = row(i * group_), end = layer_.plan.ends()[token];
      long old = oldest(layer_.plan.positions()[token]);
      last_ = std::max(last_, end);
      first_ = std::min(first_, old);
      common_last_ = std::min(common_last_, end);
      common_first_ = std::max(common_first_, old);
    }
  }

  // Whether some queries see a value that is not finite, and others do not: 0 times it is NaN. Each
  // is attended by itself then.
  bool spoils() const {
    for (int g = 0; g < GROUPS && part_.token[g] <= last_; g++) {
      Lanes some = lanes(g, first_, last_), all = lanes(g, common_first_, common_last_);
      bool differ = some.from != all.from || some.to != all.to;
      if (differ && !is_finite((const T*)part_.values[g], heads_.value_size)) return true;
    }
    return false;
  }

  void attend_rows_of(long part, int begin, int end) {
    for (; begin < end; begin += AT_ONCE)
      attend_rows_at(part, begin, std::min(AT_ONCE, end - begin));
  }

  void attend_rows_at(long part, int first, int rows) {
    size_t size = layer_.result_size();
    Lanes own[AT_ONCE][GROUPS];
    const Lanes* lanes_of[AT_ONCE];
    long from = std::numeric_limits<long>::max(), to = 0;
    for (int r = 0; r < rows; r++) {
      long token = row(first + r);
      to = std::max<long>(to, layer_.plan.ends()[token]);
      from = std::min(from, oldest(layer_.plan.positions()[token]));
    }
    int begin = 0, end = GROUPS;
    while (end > 0 && part_.token[end - 1] > to) end--;
    while (begin < end && part_.token[begin] + part_.tokens[begin] <= from) begin++;
    float* results[AT_ONCE];
    for (int r = 0; r < AT_ONCE; r++) {
      results[r] = partials_ + r * size;
      if (r >= rows) continue;
      long token = row(first + r), old = oldest(layer_.plan.positions()[token]);
      long seen = layer_.plan.ends()[token];
      if (old <= part_.token[0] && seen >= part_.last) {
        lanes_of[r] = part_.all + begin;
      } else {
        for (int g = begin; g < end; g++) own[r][g] = lanes(g, old, seen);
        lanes_of[r] = own[r] + begin;
      }
      if (item_.piece >= 0 && !TILED) results[r] = piece(part, first + r);
    }
    if (begin == end) {
      if (item_.piece >= 0)
        for (int r = 0; r < rows; r++) clear(piece(part, first + r), size);
      return;
    }
    Queries<T> queries{queries_ + first * SLICE, padded_ * SLICE};
#if defined(__AMX_BF16__)
    if constexpr (TILED) {
      attend_tiles(heads_, queries, groups(begin, end), first == 0, lanes_of, rows, layer_.scale,
                   layer_.softcap, work_, results, registers_);
      for (int r = 0; r < rows && item_.piece >= 0; r++)
        std::copy_n(results[r], size, piece(part, first + r));
    } else
#endif
      attend_tile(heads_, queries, groups(begin, end), lanes_of, rows, layer_.scale, layer_.softcap,
                  work_, results);
    if (item_.piece < 0)
      for (int r = 0; r < rows; r++) merge(results_ + (first + r) * size, results[r], size);
  }

  Groups<S> groups(int begin, int end) const {
    Groups<S> groups;
    const S** to = groups.at;
    groups.count = end - begin;
    to = std::copy(part_.keys + begin, part_.keys + end, to);
    to = std::copy(part_.values + begin, part_.values + end, to);
    std::copy(next_, next_ + AHEAD, to);
    return groups;
  }

  float* piece(long part, int i) const {
    long index = item_.piece + (long)(i / group_) * (item_.to - item_.from) + part - item_.from;
    long head = kv_head_ * group_ + i % group_;
    return pieces_ + (index * layer_.plan.heads + head) * layer_.result_size();
  }

  const Layer<T, S>& layer_;
  const Heads<T>& heads_;
  const Layout<T, S>& layout_;
  const Item& item_;
  long kv_head_;
  bool more_;  // whether the next head comes next
  long padded_ = 0, slices_ = 0;
  int group_, count_;  // query heads of the key head; rows: queries times these heads
  float* pieces_;
  Workspace<T>& work_;
  attention_tiles::Registers& registers_;
  gemm::Operand<T>* queries_ = nullptr;
  float *results_ = nullptr, *partials_ = nullptr;
  T* edges_ = nullptr;
  Part<S> part_;
  const S* next_[AHEAD];  // the first keys of the next part
  long first_ = 0, last_ = 0;  // the oldest and the newest position that any of the queries sees
  long common_first_ = 0, common_last_ = 0;  // and that all of them see
};

template <class T, class S>
void attend(const T* q, long q_stride, const T* k, long k_stride, const T* v, long v_stride, T* out,
            S* cache, const Plan* plan, long head_size, float scale, float softcap,
            const float* sinks) {
  static thread_local Workspace<T> work;
  static thread_local Scratch<float> scratch;
  Heads<T> heads_of(head_size);
  Layer<T, S> layer{q,        k,     v,     q_stride, k_stride,
                    v_stride, out,   cache, *plan,    heads_of,
                    Layout<T, S>(heads_of, plan->kv_heads, plan->block_size), scale, softcap,
                    sinks};
  // Waking a thread takes about as long as this much work.
  int threads = (int)std::clamp<long>(plan->work * head_size / (64 * 20), 1, omp_get_max_threads());
  for_each_item(plan->tokens, [&](long token) { write_token(layer, token); }, threads);
  float* pieces = scratch.get(plan->pieces * plan->heads * layer.result_size() + 1);
  // All heads of an item one after another where there are many items.
  bool many = plan->items >= 16 * threads || (attention_tiles::AVAILABLE<T, S> && threads == 1);
  long heads = many ? plan->kv_heads : 1, units = plan->kv_heads / heads;
  for_each_item(plan->items * units, [&](long index) {
    const Item& item = plan->item_list()[index / units];
    attention_tiles::Registers registers(item.count * layer.group(), layer.heads.depth);
    for (long head = index % units * heads, end = head + heads; head < end; head++)
      Attended<T, S>(layer, item, head, head + 1 < end, pieces, work, registers).run();
  }, threads);
  for_each_item(plan->merges, [&](long index) {
    const Merge& merged = plan->merge_list()[index];
    size_t size = layer.result_size();
    float* result = work.results.get(size);
    for (long head = 0; head < plan->heads; head++) {
      clear(result, size);
      for (int i = 0; i < merged.count; i++) {
        long piece = plan->order_list()[merged.first + i];
        merge(result, pieces + (piece * plan->heads + head) * size, size);
      }
      finish(layer, result, merged.row, head);
    }
  }, threads);
}

// Elements of a block of a cache of S.
template <class T, class S>
long block_size(long head_size, long kv_heads, long block_size) {
  return (long)Layout<T, S>(Heads<T>(head_size), kv_heads, block_size).block;
}

}  // namespace attention
