// y = x W^T + b for W of low-bit codes.
//
// A step's products are summed from 0, in order; the sum is then scaled and added to the element of
// y, and so is the sum of x over the step, times the offset. That too is one order whatever the
// number of rows, threads and blocks. Processors that have tiles sum the products of a step in the
// order of those (`codes_tiles.h`).
//
// Codes are unpacked in registers wherever that costs little beside reading or multiplying them.
// Else they are unpacked into memory that stays in cache, a few panels at a time: as bf16 while the
// first rows of a block are multiplied, or as float32 before.
#pragma once

#include "codes_chunks.h"
#include "codes_rounded.h"
#include "codes_tiles.h"

namespace codes {

// Return whether a block of rows is multiplied with codes that are unpacked into memory: with
// permutations, that pays only where it takes many of them.
inline bool unpacks(const Segment& segment, int rows) {
  if (PERMUTES) return segment.bits > 4 && rows >= 2 * gemm::TILE_ROWS;
  return rows > 2 || !segment.is_affine;
}

// Add the products of R rows with the steps of a chunk to y [R][P * PANEL].
template <int R, int P, class Source, class X>
__attribute__((noinline)) void tile(Source source, const Chunk& chunk, const Rows<X> rows, float* y) {
  constexpr int V = P * PANEL_VECTORS;
  const X* x = rows.x + chunk.first_unit * UNIT;
  long unit = 0;
  for (long step = 0; step < chunk.steps; step++) {
    Floats sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] = Floats{};
    long length = chunk.lengths[step];
    multiply<R, V>(source, unit, length, x + unit * UNIT, rows.stride, sums);
    unit += length;
    const float* scales = chunk.scales + step * P * PANEL;
    const float* offsets = chunk.offsets + step * P * PANEL;
    const float* row_sums = rows.sums + chunk.first_step + step;
    if (chunk.has_offsets) {
      asm("" ::: "memory");  // else y is loaded ahead of the branch, into more than all registers
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        float row_sum = row_sums[r * rows.sums_stride];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          float* at = y + (r * V + v) * LANES;
          Floats total = load(at) + load(scales + v * LANES) * sums[r][v];
          store(at, total + load(offsets + v * LANES) * row_sum);
        }
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

// As `tile`, for any number of rows: few sizes, which are compiled quickly.
template <int P, class Source, class X>
void tiles(Source source, const Chunk& chunk, Rows<X> rows, int count, float* y) {
  constexpr int MOST = Source::MOST_ROWS;
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
  const Segment& segment = panels.segment;
  long padded = panels.matrix.padded();
  Reader scales(panels, segment.scales), offsets(panels, segment.offsets);
  Chunk chunk;
  chunk.has_offsets = segment.offsets.storage != NONE;
  std::fill(y, y + count * P * PANEL, 0.0f);
  constexpr long STRIDE = CHUNK_UNITS * PAIRS * PAIR_BYTES;
  while (read_next<P>(segment, padded, scales, offsets, chunk)) {
    with_packed(panels, chunk.first_unit, [&](auto packed) {
      if constexpr (DIRECT) {
        tiles<P>(packed, chunk, rows, count, y);
      } else {
        uint8_t* memory = scratch.get(P * STRIDE);
        if constexpr (!PERMUTES) {
          unpack<P>(packed, chunk.units, memory, STRIDE);
          return tiles<P>(Unpacked{memory, STRIDE}, chunk, rows, count, y);
        }
        int first = std::min(count, gemm::TILE_ROWS);
        tiles<P>(Unpacking<decltype(packed)>{packed, memory, STRIDE}, chunk, rows, first, y);
        tiles<P>(Unpacked{memory, STRIDE}, chunk, rows.from(first), count - first,
                 y + first * P * PANEL);
      }
    });
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
    if (segment.offsets.storage == NONE) return;
    bool nested = segment.is_nested();
    if (call == call_ && block == block_ && segment.group == group_ && nested == is_nested_) return;
    call_ = call, block_ = block, group_ = segment.group, is_nested_ = nested;
    stride = 0;
    for (Walk walk; walk.next(segment, padded);) stride++;
    float* to = scratch_.get(rows * stride);
    at = to;
    for (int r = 0; r < rows; r++)
      for (Walk walk; long length = walk.next(segment, padded);) {
        const X* end = x + r * x_stride + walk.k;
        Floats sum{};
        for (long k = -length; k < 0; k += LANES) sum += load(end + k);
        *to++ = sum_lanes(sum);
      }
  }

 private:
  Scratch<float> scratch_;
  long call_ = 0, block_ = 0, group_ = 0;
  bool is_nested_ = false;
};

// Multiply some rows of x with all panels of a strip.
template <int P, bool DIRECT, class T, class Y>
void multiply_strip(const Matrix& matrix, const Segment& segment, long first, long width,
                    Rows<Operand<T>> rows, long row, int count, long column,
                    const Output<T, Y>& output) {
  alignas(64) float sums[ROWS_AT_ONCE<T> * P * PANEL];
  auto multiply = [&](const Panels& panels, auto number) {
    constexpr int N = decltype(number)::value;
    if constexpr (HAS_TILES<T>)
      multiply_panels<N>(panels, rows, count, sums);
    else
      multiply_panels<N, DIRECT>(panels, rows, count, sums);
  };
  for (long panel = first; panel < first + width;) {
    Panels panels(matrix, segment, panel);
    long from = panel * PANEL, left = segment.rows - from;
    if (first + width - panel >= P) {
      multiply(panels, std::integral_constant<int, P>{});
      output.template write<P>(sums, row, count, column + from, std::min<long>(left, P * PANEL));
      panel += P;
    } else {
      multiply(panels, std::integral_constant<int, 1>{});
      output.template write<1>(sums, row, count, column + from, std::min<long>(left, PANEL));
      panel++;
    }
  }
}

// y [rows, columns] = x [rows, depth] W^T + bias. x is rounded wherever codes are integers.
template <integers::Rounding ROUNDING, class T, class Y>
void linear(const T* x, long x_stride, const uint8_t* packed, const T* bias, Y* y, long y_stride,
            long rows, long, long depth) {
  static thread_local gemm::Operands<T> operands;
  static thread_local integers::Quantized quantized;
  static thread_local StepSums sums;
  static std::atomic<long> calls{0};
  const Matrix& matrix = *(const Matrix*)packed;
  Output<T, Y> output{bias, y, y_stride};
  if (!rows) return;
  long call = ++calls, padded = matrix.padded(), strips = 0;
  for (long i = 0; i < matrix.count; i++)
    strips += (matrix.segment(i).panels() + STRIP - 1) / STRIP;
  constexpr long MOST = ROWS_AT_ONCE<T>, UNIT_ROWS = HAS_TILES<T> ? ::tiles::ROWS : MOST;
  long row_blocks = (rows + MOST - 1) / MOST;
  // Blocks of about the same size: each unpacks all codes.
  long at_once = (rows + row_blocks * UNIT_ROWS - 1) / (row_blocks * UNIT_ROWS) * UNIT_ROWS;
  long per_item = std::clamp<long>(strips / (4 * omp_get_max_threads()), 1, 8);
  long items = (strips + per_item - 1) / per_item;
  auto multiply_item = [&](long index) {
    long row = index / items * at_once, first = index % items * per_item, column = 0;
    int count = (int)std::min<long>(at_once, rows - row);
    for (long i = 0; i < matrix.count; i++) {
      const Segment& segment = matrix.segment(i);
      long own = (segment.panels() + STRIP - 1) / STRIP;
      for (long strip = std::max(first, 0L); strip < std::min(first + per_item, own); strip++) {
        long panel = strip * STRIP, width = std::min(STRIP, segment.panels() - panel);
        if (ROUNDING != integers::NONE && integers::serves(segment)) {
          bool words = ROUNDING == integers::TO_WORDS || segment.bits == 8;
          auto part = quantized.get(x + row * x_stride, x_stride, count, depth, padded,
                                    segment.bits, words, count >= integers::LEAST_TILE_ROWS, call,
                                    row);
          integers::multiply_strip(matrix, segment, panel, width, part, row, count, words, column,
                                   output);
          continue;
        }
        operands.get(x + row * x_stride, x_stride, count, depth, padded, call);
        sums.get(operands.at, operands.stride, count, segment, padded, call, row);
        Rows<Operand<T>> part{operands.at, sums.at, operands.stride, sums.stride};
        auto run = multiply_strip<DIRECT_PANELS, true, T, Y>;
        if constexpr (!HAS_TILES<T>)
          if (unpacks(segment, count)) run = multiply_strip<TILE_PANELS, false, T, Y>;
        run(matrix, segment, panel, width, part, row, count, column, output);
      }
      column += segment.rows;
      first -= own;
    }
  };
  // Blocks of rows that are multiplied at the same time share what they read of W.
  for_each_item(row_blocks * items, multiply_item, omp_get_max_threads(), row_blocks == 1);
}

}  // namespace codes
