// A mixture of experts: y = the sum over a row's experts of weight * down(silu(gate x) * up x).
//
// The rows of an expert are multiplied with its matrices together. A row's experts are added up from
// the lowest to the highest, so that its result never depends on the other rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "rows.h"

namespace experts {

constexpr long BLOCK = 2048;   // rows whose sums are kept in float32 at once
constexpr long AT_ONCE = 128;  // rows of an expert, whose results are kept

struct Sizes {
  long rows, per_row, experts, hidden, width;
};

// The pairs of a row and one of its experts, by expert: `starts` [experts + 1] into `order`.
struct Groups {
  int64_t *starts, *order;
};

inline Groups group(const int64_t* chosen, const Sizes& sizes) {
  static thread_local Scratch<int64_t> scratch;
  long pairs = sizes.rows * sizes.per_row;
  int64_t* starts = scratch.get(sizes.experts + 2 + pairs);
  int64_t* order = starts + sizes.experts + 2;
  std::fill(starts, order, 0);
  auto is_here = [&](int64_t expert) { return expert >= 0 && expert < sizes.experts; };
  for (long i = 0; i < pairs; i++)
    if (is_here(chosen[i])) starts[chosen[i] + 2]++;
  for (long e = 2; e < sizes.experts + 2; e++) starts[e] += starts[e - 1];
  // starts[e + 1] moves from the start of expert e to its end.
  for (long i = 0; i < pairs; i++)
    if (is_here(chosen[i])) order[starts[chosen[i] + 1]++] = i;
  return {starts, order};
}

// total[row] += weight * result, for the rows of some pairs.
inline void add(const int64_t* pairs, long count, long per_row, const float* weights,
                const float* result, float* total, long hidden) {
  rows::for_rows(count, hidden, [=](long from, long to) {
    for (long i = from; i < to; i++) {
      const float* in = result + i * hidden;
      float* out = total + pairs[i] / per_row * hidden;
      float weight = weights[pairs[i]];
      long k = 0;
      for (; k + LANES <= hidden; k += LANES) store(out + k, load(out + k) + weight * load(in + k));
      for (; k < hidden; k++) out[k] += weight * in[k];
    }
  });
}

// At most BLOCK rows.
template <class T>
void run_block(const T* x, long x_stride, const int64_t* chosen, const float* weights,
               const Sizes& sizes, const T* const* gate_up, const T* const* down, T* y) {
  static thread_local Scratch<T> values;
  static thread_local Scratch<float> sums;
  long hidden = sizes.hidden, width = sizes.width;
  Groups groups = group(chosen, sizes);
  long most = 0;
  for (long e = 0; e < sizes.experts; e++)
    most = std::max<long>(most, groups.starts[e + 1] - groups.starts[e]);
  most = std::min(most, AT_ONCE);
  T* taken = values.get(most * (hidden + 3 * width));
  T *wide = taken + most * hidden, *gated = wide + most * 2 * width;
  float* total = sums.get((sizes.rows + most) * hidden);
  float* result = total + sizes.rows * hidden;
  std::fill(total, result, 0.0f);
  for (long e = 0; e < sizes.experts; e++)
    for (long at = groups.starts[e]; at < groups.starts[e + 1]; at += AT_ONCE) {
      const int64_t* pairs = groups.order + at;
      long count = std::min<long>(groups.starts[e + 1] - at, AT_ONCE);
      for (long i = 0; i < count; i++)
        memcpy(taken + i * hidden, x + pairs[i] / sizes.per_row * x_stride, hidden * sizeof(T));
      gemm::linear(taken, hidden, gate_up[e], (const T*)nullptr, wide, 2 * width, count, 2 * width,
                   hidden);
      rows::activate_and_mul<rows::SILU>(wide, 2 * width, gated, width, count, width);
      gemm::linear(gated, width, down[e], (const T*)nullptr, result, hidden, count, hidden, width);
      add(pairs, count, sizes.per_row, weights, result, total, hidden);
    }
  rows::for_rows(sizes.rows, hidden, [=](long from, long to) {
    for (long i = from * hidden; i < to * hidden; i++) store_one(y + i, total[i]);
  });
}

template <class T>
void run(const T* x, long x_stride, const int64_t* chosen, const float* weights, const Sizes& sizes,
         const T* const* gate_up, const T* const* down, T* y) {
  for (long row = 0; row < sizes.rows; row += BLOCK) {
    Sizes block = sizes;
    block.rows = std::min(BLOCK, sizes.rows - row);
    long pair = row * sizes.per_row;
    run_block(x + row * x_stride, x_stride, chosen + pair, weights + pair, block, gate_up, down,
              y + row * sizes.hidden);
  }
}

}  // namespace experts
