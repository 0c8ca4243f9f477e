// y = x W^T + b for W of low-bit codes.
//
// A step's products are summed from 0, in order; the sum is then scaled and added to the element of
// y, and so is the sum of x over the step, times the offset. That too is one order whatever the
// number of rows, threads and blocks.
//
// One or two rows are multiplied with codes that are unpacked in registers: reading them is what
// takes time. For more rows, a part of a few panels is unpacked into memory that stays in cache.
#pragma once

#include "codes_vectors.h"
#include "gemm.h"

namespace codes {

using gemm::MAX_ROWS;
using gemm::Operand;

constexpr int DIRECT_ROWS = 2;      // at most, of those that are multiplied with codes in registers
constexpr long CHUNK_UNITS = 16;    // that are unpacked, or whose factors are read, at once
constexpr int MAX_STEPS = CHUNK_UNITS;
constexpr int MAX_PANELS = gemm::MAX_PANELS;

// Steps whose factors have been read, for up to MAX_PANELS panels.
struct Chunk {
  long first_unit = 0, first_step = 0;
  long units = 0, steps = 0;
  bool has_offsets = false;
  uint8_t lengths[MAX_STEPS];  // of the steps, in units
  alignas(64) float scales[MAX_STEPS * MAX_PANELS * PANEL];
  alignas(64) float offsets[MAX_STEPS * MAX_PANELS * PANEL];
};

// Panels of one strip.
struct Panels {
  const Matrix& matrix;
  const Segment& segment;
  Strip strip;
  long first;  // a panel of the segment

  Panels(const Matrix& matrix, const Segment& segment, long first)
      : matrix(matrix), segment(segment), strip(first, segment.panels()), first(first) {}

  // Where part i of an array starts, `parts` of each panel.
  const uint8_t* at(int64_t array, long parts, long i, long part_bytes) const {
    return matrix.at(array) + (strip.first * parts + i * strip.width + first - strip.first) * part_bytes;
  }
};

// Read P panels' factors of the step that starts at depth k.
template <int P>
void read_factors(const Panels& panels, const Factors& factors, long k, float* to) {
  const Segment& segment = panels.segment;
  long padded = panels.matrix.padded();
  const uint8_t* inner = panels.at(factors.inner, segment.groups(padded), k / segment.group,
                                   PANEL * factors.item_size());
  const uint8_t* outer = panels.at(factors.outer, outers(padded), k / OUTER, PANEL * 2);
  for (long i = 0; i < P * PANEL; i += LANES) {
    Floats value;
    switch (factors.storage) {
      case FLOAT32: value = load((const float*)inner + i); break;
      case FLOAT16: value = load_half((const uint16_t*)inner + i); break;
      case INT8: value = load_bytes((const int8_t*)inner + i); break;
      default: value = load_bytes(inner + i);
    }
    if (factors.is_nested()) value *= load_half((const uint16_t*)outer + i);
    store(to + i, value);
  }
}

// Read the steps after those of the chunk; return whether there are any.
template <int P>
bool read_next(const Panels& panels, Chunk& chunk) {
  const Segment& segment = panels.segment;
  long padded = panels.matrix.padded();
  chunk.first_unit += chunk.units;
  chunk.first_step += chunk.steps;
  chunk.units = chunk.steps = 0;
  chunk.has_offsets = segment.offsets.storage != NONE;
  long k = chunk.first_unit * UNIT;
  while (k < padded) {
    long end = segment.step_end(k, padded), length = (end - k) / UNIT;
    if (chunk.units + length > CHUNK_UNITS) break;
    long at = chunk.steps * P * PANEL;
    read_factors<P>(panels, segment.scales, k, chunk.scales + at);
    if (chunk.has_offsets) read_factors<P>(panels, segment.offsets, k, chunk.offsets + at);
    chunk.lengths[chunk.steps++] = (uint8_t)length;
    chunk.units += length;
    k = end;
  }
  return chunk.steps > 0;
}

// Rows of x, and their sums over the steps.
template <class X>
struct Rows {
  const X* x;
  const float* sums;
  long stride, sums_stride;

  Rows from(long row) const {
    return {x + row * stride, sums + row * sums_stride, stride, sums_stride};
  }
};

// Add the products of R rows with the steps of a chunk to y [R][P * PANEL].
template <int R, int P, class Source, class X>
__attribute__((noinline)) void tile(Source source, const Chunk& chunk, const Rows<X> rows, float* y) {
  constexpr int V = P * PANEL_VECTORS;
  const X* x = rows.x + chunk.first_unit * UNIT;
  long unit = 0;
  for (long step = 0; step < chunk.steps; step++) {
    Floats sums[R][V] = {};
    for (long end = unit + chunk.lengths[step]; unit < end; unit++)
      multiply<R, V>(source, unit, x + unit * UNIT, rows.stride, sums);
    const float* scales = chunk.scales + step * P * PANEL;
    const float* offsets = chunk.offsets + step * P * PANEL;
    const float* row_sums = rows.sums + chunk.first_step + step;
    if (chunk.has_offsets) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          float* at = y + (r * V + v) * LANES;
          Floats total = load(at) + load(scales + v * LANES) * sums[r][v];
          store(at, total + load(offsets + v * LANES) * row_sums[r * rows.sums_stride]);
        }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          float* at = y + (r * V + v) * LANES;
          store(at, load(at) + load(scales + v * LANES) * sums[r][v]);
        }
    }
  }
}

// Call `work` with the codes of some panels, from unit `unit` on.
template <class Work>
void with_packed(const Panels& panels, long unit, Work work) {
  const Segment& segment = panels.segment;
  long bytes = segment.bits * 64;
  const uint8_t* at =
      panels.at(segment.codes, panels.matrix.padded() / BLOCK, unit * UNIT / BLOCK, bytes);
  long stride = panels.strip.width * bytes;
  auto run = [&](auto bits) {
    constexpr int BITS = decltype(bits)::value;
    if constexpr (!PERMUTES && BITS < 8)
      if (!segment.is_affine) return work(Packed<BITS, true>{at, stride, segment.values});
    work(Packed<BITS, PERMUTES>{at, stride, segment.values});
  };
  switch (segment.bits) {
    case 4: return run(std::integral_constant<int, 4>{});
    case 5: return run(std::integral_constant<int, 5>{});
    case 6: return run(std::integral_constant<int, 6>{});
    default: return run(std::integral_constant<int, 8>{});
  }
}

// As `tile`, for any number of rows: few sizes, which are compiled quickly.
template <int P, class Source, class X>
void tiles(Source source, const Chunk& chunk, Rows<X> rows, int count, float* y) {
  constexpr int MOST = gemm::TILE_ROWS;
  for (int row = 0; row < count;) {
    int left = count - row, size = 1;
    float* at = y + row * P * PANEL;
    Rows<X> from = rows.from(row);
    if (left >= MOST) {
      tile<MOST, P>(source, chunk, from, at);
      size = MOST;
    } else if (MOST > 4 && left >= 4) {
      tile<4, P>(source, chunk, from, at);
      size = 4;
    } else if (MOST > 2 && left >= 2) {
      tile<2, P>(source, chunk, from, at);
      size = 2;
    } else {
      tile<1, P>(source, chunk, from, at);
    }
    row += size;
  }
}

// Multiply `count` rows with P panels: y [count][P * PANEL].
template <int P, bool DIRECT, class X>
void multiply_panels(const Panels& panels, Rows<X> rows, int count, float* y) {
  static thread_local Scratch<uint8_t> scratch;
  static thread_local Chunk chunk;
  std::fill(y, y + count * P * PANEL, 0.0f);
  chunk.first_unit = chunk.first_step = chunk.units = chunk.steps = 0;
  constexpr long STRIDE = CHUNK_UNITS * PAIRS * PAIR_BYTES;
  while (read_next<P>(panels, chunk)) {
    with_packed(panels, chunk.first_unit, [&](auto packed) {
      if constexpr (DIRECT) {
        count == 1 ? tile<1, P>(packed, chunk, rows, y) : tile<2, P>(packed, chunk, rows, y);
      } else {
        unpack<P>(packed, chunk.units, scratch.get(P * STRIDE), STRIDE);
      }
    });
    if (!DIRECT) tiles<P>(Unpacked{scratch.get(P * STRIDE), STRIDE}, chunk, rows, count, y);
  }
}

// Sums of rows of x over the steps of a segment.
class StepSums {
 public:
  const float* at = nullptr;
  long stride = 0;

  // Get sums that the thread may have got already in this call of `linear`. `block`: which rows.
  template <class X>
  void get(const X* x, long x_stride, int rows, const Segment& segment, long padded, long call,
           long block) {
    bool nested = segment.is_nested();
    if (call == call_ && block == block_ && segment.group == group_ && nested == is_nested_) return;
    call_ = call, block_ = block, group_ = segment.group, is_nested_ = nested;
    stride = 0;
    for (long k = 0; k < padded; k = segment.step_end(k, padded)) stride++;
    float* to = scratch_.get(rows * stride);
    at = to;
    for (int r = 0; r < rows; r++)
      for (long k = 0; k < padded;) {
        Floats sum{};
        for (long end = segment.step_end(k, padded); k < end; k += LANES)
          sum += load(x + r * x_stride + k);
        *to++ = sum_lanes(sum);
      }
  }

 private:
  Scratch<float> scratch_;
  long call_ = 0, block_ = 0, group_ = 0;
  bool is_nested_ = false;
};

// y, and what is added to it. T: the type of x and bias.
template <class T, class Y>
struct Output {
  const T* bias;  // or null
  Y* y;
  long stride;

  // Write rows [rows][P * PANEL] of sums to columns `column` to column + count.
  template <int P>
  void write(const float* sums, long row, int rows, long column, long count) const {
    for (long c = 0; c < count; c += LANES) {
      int part = (int)std::min<long>(LANES, count - c);
      Floats add = bias ? load_part(bias + column + c, part) : Floats{};
      for (int r = 0; r < rows; r++) {
        Floats sum = load(sums + r * P * PANEL + c);
        if (bias) sum += add;
        Y* to = y + (row + r) * stride + column + c;
        part == LANES ? store(to, sum) : store_part(to, sum, part);
      }
    }
  }
};

// Multiply some rows of x with all panels of a strip.
template <int P, bool DIRECT, class T, class Y>
void multiply_strip(const Matrix& matrix, const Segment& segment, long first, long width,
                    Rows<Operand<T>> rows, long row, int count, long column,
                    const Output<T, Y>& output) {
  alignas(64) float sums[(DIRECT ? DIRECT_ROWS : MAX_ROWS) * P * PANEL];
  for (long panel = first; panel < first + width;) {
    Panels panels(matrix, segment, panel);
    long from = panel * PANEL, left = segment.rows - from;
    if (first + width - panel >= P) {
      multiply_panels<P, DIRECT>(panels, rows, count, sums);
      output.template write<P>(sums, row, count, column + from, std::min<long>(left, P * PANEL));
      panel += P;
    } else {
      multiply_panels<1, DIRECT>(panels, rows, count, sums);
      output.template write<1>(sums, row, count, column + from, std::min<long>(left, PANEL));
      panel++;
    }
  }
}

// y [rows, columns] = x [rows, depth] W^T + bias.
template <class T, class Y>
void linear(const T* x, long x_stride, const uint8_t* packed, const T* bias, Y* y, long y_stride,
            long rows, long, long depth) {
  static thread_local gemm::Operands<T> operands;
  static thread_local StepSums sums;
  static std::atomic<long> calls{0};
  const Matrix& matrix = *(const Matrix*)packed;
  Output<T, Y> output{bias, y, y_stride};
  long call = ++calls, padded = matrix.padded(), strips = 0;
  for (long i = 0; i < matrix.count; i++)
    strips += (matrix.segment(i).panels() + STRIP - 1) / STRIP;
  long row_blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  long per_item = std::clamp<long>(strips / (4 * omp_get_max_threads()), 1, 8);
  long items = (strips + per_item - 1) / per_item;
  for_each_item(row_blocks * items, [&](long index) {
    long row = index / items * MAX_ROWS, first = index % items * per_item, column = 0;
    int count = (int)std::min<long>(MAX_ROWS, rows - row);
    operands.get(x + row * x_stride, x_stride, count, depth, padded, call);
    for (long i = 0; i < matrix.count; i++) {
      const Segment& segment = matrix.segment(i);
      long own = (segment.panels() + STRIP - 1) / STRIP;
      for (long strip = std::max(first, 0L); strip < std::min(first + per_item, own); strip++) {
        sums.get(operands.at, operands.stride, count, segment, padded, call, row);
        Rows<Operand<T>> part{operands.at, sums.at, operands.stride, sums.stride};
        long panel = strip * STRIP, width = std::min(STRIP, segment.panels() - panel);
        if (rows <= DIRECT_ROWS && (PERMUTES || segment.is_affine))
          multiply_strip<gemm::STREAM_PANELS, true>(matrix, segment, panel, width, part, row, count,
                                                    column, output);
        else
          multiply_strip<gemm::TILE_PANELS, false>(matrix, segment, panel, width, part, row, count,
                                                   column, output);
      }
      column += segment.rows;
      first -= own;
    }
  });
}

}  // namespace codes
