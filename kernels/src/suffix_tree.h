// A path-compressed tree of the suffixes of token sequences, cut to `depth` tokens; the same drafts
// as builtin_plugins/speculators/suffix_tree.py, which explains it.
//
// Nodes lie in one array and name each other by index; 0 is the root, whose count is 0. The child
// of a node that begins with a token is found by a hash table of indices. The children of a node
// are a list whose head is the most frequent one, unless the node is stale: then none is known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <vector>

namespace suffix {

constexpr int32_t NONE = -1;

// How far drafts go, see Extent in suffix_tree.py.
struct Extent {
  long limit, offset;
  double factor, probability;
};

struct Node {
  uint32_t sequence, start;  // the newest place of its tokens
  int32_t length, count;     // of its tokens; a free node's count is -1
  int32_t token;             // the first of them
  int32_t parent, first, next, previous;
  bool stale;
};
static_assert(sizeof(Node) == 40, "NODE_BYTES counts it");

struct Sequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> ends;  // where the suffix from place p ends, at p % depth
};

// For each node: arrays are at most a third longer than the nodes in use, a table has at most 3
// entries a node of the array.
constexpr long NODE_BYTES = (40 + 3 * 4) * 4 / 3 + 1;
constexpr long TOKEN_BYTES = 8, SEQUENCE_BYTES = 256, TREE_BYTES = 1024;

class Tree {
 public:
  explicit Tree(long depth) : depth_(depth) {
    resize(32);
    take();
    nodes_[0] = Node{0, 0, 0, 0, 0, NONE, NONE, NONE, NONE, false};
  }
  ~Tree() {
    free(nodes_);
    free(table_);
  }
  Tree(const Tree&) = delete;

  long nodes() const { return used_ - 1; }
  long bytes() const {
    return TREE_BYTES + (used_ + 2 * depth_ + 64) * NODE_BYTES + num_tokens_ * TOKEN_BYTES +
           (long)sequences_.size() * (SEQUENCE_BYTES + depth_ * (long)sizeof(int32_t));
  }

  long begin() {
    sequences_.push_back({{}, std::vector<int32_t>(depth_)});
    return (uint32_t)(oldest_ + sequences_.size() - 1);
  }

  // If there is no memory, the tokens from some one on are not appended.
  void append(uint32_t number, const int32_t* tokens, long count) {
    Sequence& sequence = at(number);
    for (long i = 0; i < count; i++) {
      reserve(depth_);
      sequence.tokens.push_back(tokens[i]);
      num_tokens_++;
      long place = (long)sequence.tokens.size() - 1;
      for (long p = std::max(0l, place - depth_ + 1); p <= place; p++) {
        int32_t& end = sequence.ends[p % depth_];
        end = advance(p == place ? 0 : end, tokens[i], number, (uint32_t)place);
      }
    }
  }

  void remove_oldest() {
    const std::vector<int32_t>& tokens = sequences_.front().tokens;
    for (size_t place = 0; place < tokens.size(); place++)
      remove(tokens.data() + place, std::min(tokens.size() - place, (size_t)depth_));
    num_tokens_ -= (long)tokens.size();
    sequences_.pop_front();
    oldest_++;
    if (used_ + 64 < capacity_ * 3 / 4) compact();
  }

  // Write the drafts with the highest score, and return their number.
  long draft(const int32_t* pattern, long count, const Extent& extent, int32_t* drafts,
             double* best) {
    long drafted = 0;
    *best = 0;
    found_.resize(extent.limit);
    for (long length = 1; length <= std::min(count, depth_); length++) {
      Place place = find(pattern + count - length, length);
      if (place.node == NONE) break;
      const Node& node = nodes_[place.node];
      if (node.length == place.matched && node.first == NONE) break;  // nothing followed
      long most = std::min(extent.limit, (long)(length * extent.factor) + extent.offset);
      double score = 0;
      long found = follow(place, most, extent.probability, &score);
      if (found && score >= *best) {
        std::copy_n(found_.data(), found, drafts);
        drafted = found;
        *best = score;
      }
    }
    return drafted;
  }

 private:
  struct Place {  // after some tokens of a node
    int32_t node, matched;
  };

  Sequence& at(uint32_t number) { return sequences_[number - oldest_]; }
  int32_t token_at(const Node& node, long index) {
    return at(node.sequence).tokens[node.start + index];
  }

  // Where a suffix ends that ended at node i, and goes on with a token.
  int32_t advance(int32_t i, int32_t token, uint32_t number, uint32_t place) {
    Node& node = nodes_[i];
    int32_t c = child(i, token);
    if (c == NONE) {
      if (node.count == 1) {  // it is the only one that ends here
        node.length++;
        return i;
      }
      c = take();
      nodes_[c] = Node{number, place, 1, 1, token, i, NONE, NONE, NONE, false};
      insert(c);
      add(c);
      return c;
    }
    if (nodes_[c].length > 1) {
      if (node.count == nodes_[c].count + 1) {  // nothing else ends here or goes another way
        node.length++;
        shorten(c, i);
        return i;
      }
      c = split(c);
    }
    Node& to = nodes_[c];
    to.count++;
    if ((int32_t)(number - to.sequence) >= 0) {
      to.sequence = number;
      to.start = place;
    }
    if (node.count == to.count)
      merge(i, c);
    else
      promote(c);
    return c;
  }

  // Leave the first token of node c to node `above`, which has no other child.
  void shorten(int32_t c, int32_t above) {
    Node& node = nodes_[c];
    erase(c);
    node.start++;
    node.length--;
    node.token = token_at(node, 0);
    node.parent = above;
    insert(c);
  }

  // Put a node of the first token of node c before it.
  int32_t split(int32_t c) {
    int32_t middle = take();
    nodes_[middle] = nodes_[c];
    nodes_[middle].length = 1;
    nodes_[middle].stale = false;
    nodes_[middle].first = c;
    shorten(c, middle);
    nodes_[c].next = nodes_[c].previous = NONE;
    insert(middle);
    relink(middle);
    return middle;
  }

  // Join node i to its only child c: they stand at the same places.
  void merge(int32_t i, int32_t c) {
    Node &node = nodes_[i], &child = nodes_[c];
    erase(c);
    erase(i);
    child.start -= (uint32_t)node.length;
    child.length += node.length;
    child.token = node.token;
    child.parent = node.parent;
    child.next = node.next;
    child.previous = node.previous;
    insert(c);
    relink(c);
    release(i);
  }

  // Remove the suffix of the oldest sequence that is these tokens.
  void remove(const int32_t* tokens, size_t count) {
    int32_t i = 0;
    for (size_t place = 0; place < count; place += (size_t)nodes_[i].length) {
      int32_t c = child(i, tokens[place]);
      Node &node = nodes_[i], &to = nodes_[c];
      if (node.first == c && to.next != NONE) node.stale = true;
      if (!--to.count) {
        erase(c);
        unlink(c);
        release(c);
        break;
      }
      i = c;
    }
    int32_t only = nodes_[i].first;
    if (only != NONE && nodes_[only].next == NONE && nodes_[only].count == nodes_[i].count)
      merge(i, only);
  }

  // Where a pattern ends; in no node if it is nowhere.
  Place find(const int32_t* pattern, long length) {
    int32_t i = 0;
    for (long done = 0; done < length;) {
      i = child(i, pattern[done]);
      if (i == NONE) return {NONE, 0};
      const Node& node = nodes_[i];
      const int32_t* tokens = at(node.sequence).tokens.data() + node.start;
      int32_t matched = (int32_t)std::min((long)node.length, length - done);
      if (!std::equal(tokens, tokens + matched, pattern + done)) return {NONE, 0};
      if ((done += matched) == length) return {i, matched};
    }
    return {NONE, 0};
  }

  // Find what followed most often, and return its length.
  long follow(Place place, long most, double least, double* score) {
    long found = 0;
    double probability = 1;
    while (found < most) {
      const Node* node = &nodes_[place.node];
      if (place.matched == node->length) {
        int32_t places = node->count;
        place = {most_frequent(place.node), 0};
        if (place.node == NONE) break;
        node = &nodes_[place.node];
        // A division last, so that no compiler joins it to the sum.
        probability = probability * node->count / (double)places;
        if (probability < least) break;
      }
      found_[found++] = token_at(*node, place.matched++);
      *score += probability;
    }
    return found;
  }

  // The list of children.

  bool before(const Node& a, const Node& b) const {
    if (a.count != b.count) return a.count > b.count;
    if (a.sequence != b.sequence) return (int32_t)(a.sequence - b.sequence) > 0;
    return a.start > b.start;
  }
  int32_t most_frequent(int32_t i) {
    if (nodes_[i].stale && nodes_[i].first != NONE) {
      int32_t best = nodes_[i].first;
      for (int32_t c = best; c != NONE; c = nodes_[c].next)
        if (before(nodes_[c], nodes_[best])) best = c;
      lead(best);
      nodes_[i].stale = false;
    }
    return nodes_[i].first;
  }
  // Make node c the head if it comes before it.
  void promote(int32_t c) {
    const Node& parent = nodes_[nodes_[c].parent];
    if (parent.first != c && !parent.stale && before(nodes_[c], nodes_[parent.first])) lead(c);
  }
  void lead(int32_t c) {
    Node &node = nodes_[c], &parent = nodes_[node.parent];
    if (parent.first == c) return;
    unlink(c);
    node.previous = NONE;
    node.next = parent.first;
    nodes_[node.next].previous = c;
    parent.first = c;
  }
  void add(int32_t c) {  // after the head, then perhaps before it
    Node &node = nodes_[c], &parent = nodes_[node.parent];
    if (parent.first == NONE) {
      parent.first = c;
      return;
    }
    node.previous = parent.first;
    node.next = nodes_[parent.first].next;
    relink(c);
    promote(c);
  }
  void unlink(int32_t c) {
    const Node& node = nodes_[c];
    (node.previous == NONE ? nodes_[node.parent].first : nodes_[node.previous].next) = node.next;
    if (node.next != NONE) nodes_[node.next].previous = node.previous;
  }
  void relink(int32_t c) {  // in the place of another one
    const Node& node = nodes_[c];
    (node.previous == NONE ? nodes_[node.parent].first : nodes_[node.previous].next) = c;
    if (node.next != NONE) nodes_[node.next].previous = c;
  }

  // The table of children.

  long slot(int32_t parent, int32_t token) const {
    uint64_t key = ((uint64_t)(uint32_t)parent << 32 | (uint32_t)token) * 0x9e3779b97f4a7c15u;
    return (long)((key ^ key >> 32) * 0xd6e8feb86659fd93u >> 32) & (table_size_ - 1);
  }
  long slot(int32_t i) const { return slot(nodes_[i].parent, nodes_[i].token); }
  int32_t child(int32_t i, int32_t token) const {
    int32_t first = nodes_[i].first;
    if (first == NONE || nodes_[first].token == token) return first;
    if (nodes_[first].next == NONE) return NONE;
    for (long s = slot(i, token);; s = (s + 1) & (table_size_ - 1)) {
      int32_t c = table_[s];
      if (c == NONE || (nodes_[c].token == token && nodes_[c].parent == i)) return c;
    }
  }
  void insert(int32_t i) {
    long s = slot(i);
    while (table_[s] != NONE) s = (s + 1) & (table_size_ - 1);
    table_[s] = i;
  }
  void erase(int32_t i) {
    long mask = table_size_ - 1, hole = slot(i);
    while (table_[hole] != i) hole = (hole + 1) & mask;
    for (long s = (hole + 1) & mask; table_[s] != NONE; s = (s + 1) & mask) {
      // Move what was inserted at or before the hole.
      if (((s - slot(table_[s])) & mask) < ((s - hole) & mask)) continue;
      table_[hole] = table_[s];
      hole = s;
    }
    table_[hole] = NONE;
  }

  // Memory of the nodes.

  int32_t take() {
    used_++;
    if (free_ == NONE) return (int32_t)end_++;
    int32_t i = free_;
    free_ = nodes_[i].next;
    return i;
  }
  void release(int32_t i) {
    nodes_[i].count = -1;
    nodes_[i].next = free_;
    free_ = i;
    used_--;
  }
  void reserve(long count) {
    if (used_ + count > capacity_) resize(used_ + used_ / 8 + 2 * count);
  }
  void resize(long capacity) {
    if (capacity >= INT32_MAX) throw std::bad_alloc();
    long size = 64;
    while (size < capacity + capacity / 2) size *= 2;
    int32_t* table = nullptr;
    if (size != table_size_ && !(table = (int32_t*)malloc((size_t)size * sizeof(int32_t))))
      throw std::bad_alloc();
    Node* nodes = (Node*)realloc(nodes_, (size_t)capacity * sizeof(Node));
    if (!nodes) {
      free(table);
      throw std::bad_alloc();
    }
    nodes_ = nodes;
    capacity_ = capacity;
    if (!table) return;
    free(table_);
    table_ = table;
    table_size_ = size;
    fill();
  }
  void fill() {
    std::fill_n(table_, table_size_, NONE);
    for (int32_t i = 1; i < end_; i++)
      if (nodes_[i].count > 0) insert(i);
  }
  // Close the gaps, and give memory back; nothing happens if there is none for it.
  void compact() try {
    std::vector<int32_t> to(end_ + 1, NONE);  // new indices; the last is that of NONE
    int32_t used = 0;
    for (long i = 0; i < end_; i++)
      if (nodes_[i].count >= 0) to[i] = used++;
    auto moved = [&](int32_t& i) { i = i == NONE ? NONE : to[i]; };
    for (long i = 0; i < end_; i++) {
      if (to[i] == NONE) continue;
      Node& node = nodes_[to[i]] = nodes_[i];
      for (int32_t* link : {&node.parent, &node.first, &node.next, &node.previous}) moved(*link);
    }
    for (Sequence& sequence : sequences_)
      for (int32_t& i : sequence.ends) moved(i);
    end_ = used;
    free_ = NONE;
    fill();
    resize(used + used / 8 + 32);
  } catch (const std::bad_alloc&) {
  }

  long depth_, num_tokens_ = 0;
  uint32_t oldest_ = 0;
  std::deque<Sequence> sequences_;
  std::vector<int32_t> found_;
  Node* nodes_ = nullptr;
  int32_t* table_ = nullptr;
  long capacity_ = 0, used_ = 0, end_ = 0;  // nodes there is memory for, in use, ever taken
  long table_size_ = 0;                     // a power of 2
  int32_t free_ = NONE;                     // the first of a list
};

// What a call returns, -1 if there is no memory for it.
template <class Call>
long allocates(Call call) try {
  return call();
} catch (const std::bad_alloc&) {
  return -1;
}

}  // namespace suffix
