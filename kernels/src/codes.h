// Matrices of low-bit codes: W[r, k] = scale[r, k / group] * value[code[r, k]] + offset[r, k / group].
//
// A packed matrix is a header and one segment after the other: rows of W in one form, since parts of
// a fused matrix may have different ones. A segment's rows are packed in panels of 16 columns of y,
// and up to 3 panels lie interleaved in a strip, 32 depths of each in turn, so that a pass over a
// strip reads memory in order. Scales and offsets have arrays of their own, in the same order.
//
// The codes of 16 columns and 32 depths, a block: 4 vectors of one word for each column. Bits 4j of
// word v are of depth 8v + 2j, bits 16 + 4j of depth 8v + 2j + 1: one shift moves a pair of depths to
// where a permutation of 16-bit values looks for its indices. What 5 and 6 bits have in addition is
// in one vector (bits i and 16 + i are of depths 2i and 2i + 1), or in two (2 bits each, a
// vector for 16 depths). Codes of 8 bits lie depth by depth, 16 columns each, or in quads: 4 depths of
// each column side by side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace codes {

constexpr int64_t MAGIC = 0x3173'6564'6f63'7068;  // "hpcodes1"
constexpr long STRIP = 3;       // panels that are interleaved
constexpr long BLOCK = 32;     // depths of a block of codes
constexpr long UNIT = 16;      // depths that have one scale at least
constexpr long OUTER = 256;    // depths that share an outer factor
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool IN_QUADS = true;  // codes of 8 bits
#else
constexpr bool IN_QUADS = false;
#endif
constexpr long MAX_STEP = 128;  // depths that are summed before they are scaled

enum Storage : int64_t { NONE, FLOAT16, FLOAT32, INT8, UINT8 };

// Scales or offsets. Those of 8 bits are multiplied with outer ones of 16 bits.
struct Factors {
  int64_t storage, inner, outer;  // the arrays start so many bytes after the matrix does

  bool is_nested() const { return storage == INT8 || storage == UINT8; }
  long item_size() const { return storage == FLOAT32 ? 4 : storage == FLOAT16 ? 2 : 1; }
};

struct alignas(64) Segment {
  int64_t rows, bits, group, codes;
  Factors scales, offsets;
  int64_t is_affine;    // value[code] is code + value[0]
  bf16 values[64];      // repeated where codes have fewer bits; of no meaning for 8 bits

  long panels() const { return (rows + PANEL - 1) / PANEL; }
  long groups(long padded) const { return (padded + group - 1) / group; }
  bool is_nested() const { return scales.is_nested() || offsets.is_nested(); }

  // Repeat the first values where codes have fewer than 6 bits, and note whether they are affine.
  void complete_values() {
    long count = bits == 8 ? 64 : 1L << bits;
    is_affine = true;
    for (long i = 0; i < 64; i++) {
      values[i] = values[i % count];
      if (bits != 8)
        is_affine = is_affine && to_float(values[i]) == to_float(values[0]) + (float)(i % count);
    }
  }
};

struct alignas(64) Matrix {
  int64_t magic, count, rows, depth;

  const Segment& segment(long i) const { return ((const Segment*)(this + 1))[i]; }
  const uint8_t* at(int64_t offset) const { return (const uint8_t*)this + offset; }
  long padded() const { return (depth + BLOCK - 1) / BLOCK * BLOCK; }
};

// Steps through the depth: within a step no factor changes.
struct Walk {
  long k = 0, group = 0;  // where the next step starts

  // Go to the step after the next one; return how many depths lie between them, 0 at the end.
  long next(const Segment& segment, long padded) {
    long group_end = (group + 1) * segment.group;
    long end = std::min({k + MAX_STEP, group_end, padded});
    if (segment.is_nested()) end = std::min(end, (k / OUTER + 1) * OUTER);
    long length = end - k;
    k = end;
    group += end == group_end;
    return length;
  }
};

inline long outers(long padded) { return (padded + OUTER - 1) / OUTER; }

// Panels that are interleaved.
struct Strip {
  long first, width;

  Strip(long panel, long panels)
      : first(panel / STRIP * STRIP), width(std::min(STRIP, panels - first)) {}
  // Position of part i of a panel's `parts`.
  long position(long panel, long parts, long i) const {
    return first * parts + i * width + panel - first;
  }
};

inline float half_to_float(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  if (bits >= 0x0f800000) bits |= 0x70000000;  // infinite or NaN
  float value;
  memcpy(&value, &bits, sizeof value);
  if (bits < 0x70000000) value *= 0x1p112f;  // the exponents' biases differ
  return half & 0x8000 ? -value : value;
}

// One factor, of column `column` of a panel.
inline float factor(const Matrix& matrix, const Segment& segment, const Factors& factors, long panel,
                    long column, long k) {
  long padded = matrix.padded(), groups = segment.groups(padded);
  Strip strip(panel, segment.panels());
  const uint8_t* inner =
      matrix.at(factors.inner) +
      (strip.position(panel, groups, k / segment.group) * PANEL + column) * factors.item_size();
  uint16_t half;
  float value;
  switch (factors.storage) {
    case FLOAT32: memcpy(&value, inner, sizeof value); return value;
    case FLOAT16: memcpy(&half, inner, sizeof half); return half_to_float(half);
    case INT8: value = (float)(int8_t)*inner; break;
    case UINT8: value = (float)*inner; break;
    default: return 0;
  }
  long at = strip.position(panel, outers(padded), k / OUTER) * PANEL + column;
  memcpy(&half, matrix.at(factors.outer) + at * 2, sizeof half);
  return value * half_to_float(half);
}

// Words that describe a segment before it is packed.
struct Form {
  int64_t rows, bits, group, scales, offsets;  // the last two: how they are stored
};

// Plan a matrix: return its size in bytes, and write its segments, without values, to `to`.
inline long plan(const Form* forms, long count, long depth, Segment* to = nullptr) {
  long padded = (depth + BLOCK - 1) / BLOCK * BLOCK;
  long size = (long)(sizeof(Matrix) + count * sizeof(Segment));
  auto reserve = [&](long bytes) {
    long start = size;
    size += (bytes + 63) / 64 * 64;
    return start;
  };
  for (long i = 0; i < count; i++) {
    const Form& form = forms[i];
    Segment segment{};
    segment.rows = form.rows;
    segment.bits = form.bits;
    segment.group = form.group < depth ? form.group : std::max(padded, BLOCK);
    segment.scales.storage = form.scales;
    segment.offsets.storage = form.offsets;
    long lines = segment.panels() * PANEL;
    segment.codes = reserve(lines * padded * form.bits / 8);
    for (Factors* factors : {&segment.scales, &segment.offsets}) {
      if (factors->storage == NONE) continue;
      factors->inner = reserve(lines * segment.groups(padded) * factors->item_size());
      if (factors->is_nested()) factors->outer = reserve(lines * outers(padded) * 2);
    }
    if (to) to[i] = segment;
  }
  return size;
}

// What a segment is packed from, rows contiguous; what it does not have is null.
struct Source {
  const uint8_t* codes;
  const void *scales, *outer_scales, *offsets, *outer_offsets;
  const float* values;
};

// Where the code of 8 bits of a depth and column is in a block.
inline long place(long k, long column) {
  return IN_QUADS ? k / 4 * 4 * PANEL + column * 4 + k % 4 : k * PANEL + column;
}

// Write a block of codes: 32 depths of 16 columns, from [16][32].
inline void pack_block(const uint8_t (*codes)[BLOCK], long bits, uint8_t* to) {
  if (bits == 8) {
    for (int k = 0; k < BLOCK; k++)
      for (int c = 0; c < PANEL; c++) to[place(k, c)] = codes[c][k];
    return;
  }
  for (int c = 0; c < PANEL; c++) {
    uint32_t words[6] = {};
    for (int k = 0; k < BLOCK; k++) {
      uint32_t code = codes[c][k], odd = k % 2 * 16;
      words[k / 8] |= (code & 15) << (odd + k % 8 / 2 * 4);
      if (bits == 5) words[4] |= (code >> 4 & 1) << (odd + k / 2);
      if (bits == 6) words[4 + k / 16] |= (code >> 4 & 3) << (odd + k % 16 / 2 * 2);
    }
    for (int i = 0; i < 6 && i < bits; i++) memcpy(to + i * 64 + c * 4, words + i, 4);
  }
}

// The inverse for one column: the codes of a block, to [32].
inline void unpack_column(const uint8_t* from, long bits, long column, int (&to)[BLOCK]) {
  if (bits == 8) {
    for (int k = 0; k < BLOCK; k++) to[k] = (int8_t)from[place(k, column)];
    return;
  }
  uint32_t words[6] = {};
  for (int i = 0; i < 6 && i < bits; i++) memcpy(words + i, from + i * 64 + column * 4, 4);
  for (int k = 0; k < BLOCK; k++) {
    int odd = k % 2 * 16;
    uint32_t code = words[k / 8] >> (odd + k % 8 / 2 * 4) & 15;
    if (bits == 5) code |= (words[4] >> (odd + k / 2) & 1) << 4;
    if (bits == 6) code |= (words[4 + k / 16] >> (odd + k % 16 / 2 * 2) & 3) << 4;
    to[k] = (int)code;
  }
}

// Write a panel of an array [rows, given] in the order of `Strip`; what is padded is 0.
inline void pack_factors(const void* from, long given, long item, const Segment& segment, long panel,
                         long parts, uint8_t* to) {
  Strip strip(panel, segment.panels());
  for (long i = 0; i < parts; i++) {
    uint8_t* out = to + strip.position(panel, parts, i) * PANEL * item;
    memset(out, 0, PANEL * item);
    if (i >= given) continue;
    for (long c = 0; c < PANEL && panel * PANEL + c < segment.rows; c++)
      memcpy(out + c * item, (const uint8_t*)from + ((panel * PANEL + c) * given + i) * item, item);
  }
}

inline void pack_panel(const Segment& segment, const Source& source, long panel, long depth,
                       uint8_t* to) {
  Matrix shape{MAGIC, 1, segment.rows, depth};
  long padded = shape.padded(), blocks = padded / BLOCK;
  Strip strip(panel, segment.panels());
  for (long block = 0; block < blocks; block++) {
    uint8_t codes[PANEL][BLOCK] = {};
    long from = block * BLOCK, count = std::min(BLOCK, depth - from);
    for (long c = 0; c < PANEL && panel * PANEL + c < segment.rows; c++)
      memcpy(codes[c], source.codes + (panel * PANEL + c) * depth + from, count);
    long at = strip.position(panel, blocks, block) * segment.bits * 64;
    pack_block(codes, segment.bits, to + segment.codes + at);
  }
  long group = segment.group, given = (depth + group - 1) / group;
  auto pack = [&](const Factors& factors, const void* inner, const void* outer) {
    if (factors.storage == NONE) return;
    pack_factors(inner, given, factors.item_size(), segment, panel, segment.groups(padded),
                 to + factors.inner);
    if (factors.is_nested())
      pack_factors(outer, (depth + OUTER - 1) / OUTER, 2, segment, panel, outers(padded),
                   to + factors.outer);
  };
  pack(segment.scales, source.scales, source.outer_scales);
  pack(segment.offsets, source.offsets, source.outer_offsets);
}

// Pack segment `index` of a matrix, and write its part of the header.
inline void pack(const Form* forms, long count, long depth, long index, const Source& source,
                 uint8_t* to) {
  std::vector<Segment> segments(count);
  plan(forms, count, depth, segments.data());
  Segment& segment = segments[index];
  for (long code = 0; segment.bits != 8 && code < 1L << segment.bits; code++)
    segment.values[code] = to_bf16(source.values ? source.values[code] : (float)code);
  segment.complete_values();
  Matrix header{MAGIC, count, 0, depth};
  for (long i = 0; i < count; i++) header.rows += forms[i].rows;
  memcpy(to, &header, sizeof header);
  memcpy(to + sizeof header + index * sizeof segment, &segment, sizeof segment);
  for_each_item(segment.panels(),
                [&](long panel) { pack_panel(segment, source, panel, depth, to); });
}

// Return whether `bytes` of memory have the header and the size of a packed matrix [rows, depth].
// Kernels trust what it says; only the values of codes and the numbers behind it may be any.
inline bool is_packed(const uint8_t* packed, long bytes, long rows, long depth) {
  if (bytes < (long)sizeof(Matrix) || depth < 1) return false;
  const Matrix& matrix = *(const Matrix*)packed;
  if (matrix.magic != MAGIC || matrix.rows != rows || matrix.depth != depth) return false;
  long most = (bytes - (long)sizeof(Matrix)) / (long)sizeof(Segment);
  if (matrix.count < 1 || matrix.count > most) return false;
  std::vector<Form> forms;
  long total = 0;
  for (long i = 0; i < matrix.count; i++) {
    const Segment& found = matrix.segment(i);
    int64_t bits = found.bits, scales = found.scales.storage, offsets = found.offsets.storage;
    if (found.rows < 0 || found.rows > rows - total) return false;
    if (bits != 4 && bits != 5 && bits != 6 && bits != 8) return false;
    if (found.group != UNIT && (found.group < BLOCK || found.group % BLOCK)) return false;
    if (scales < FLOAT16 || scales > UINT8 || offsets < NONE || offsets > UINT8) return false;
    forms.push_back({found.rows, bits, found.group, scales, offsets});
    total += found.rows;
  }
  std::vector<Segment> planned(matrix.count);
  long size = plan(forms.data(), matrix.count, depth, planned.data());
  if (total != rows || size != bytes) return false;
  for (long i = 0; i < matrix.count; i++) {
    const Segment& found = matrix.segment(i);
    memcpy(planned[i].values, found.values, sizeof found.values);
    planned[i].complete_values();
    // What lies behind the values is padding.
    if (memcmp(&planned[i], &found, offsetof(Segment, values) + sizeof found.values)) return false;
  }
  return true;
}

// to [depth] = row `row` of a segment, each element rounded once.
template <class T>
void read_row(const Matrix& matrix, const Segment& segment, long row, T* to) {
  long panel = row / PANEL, column = row % PANEL, blocks = matrix.padded() / BLOCK;
  Strip strip(panel, segment.panels());
  for (long block = 0; block * BLOCK < matrix.depth; block++) {
    int codes[BLOCK];
    long at = strip.position(panel, blocks, block) * segment.bits * 64;
    unpack_column(matrix.at(segment.codes) + at, segment.bits, column, codes);
    for (long k = block * BLOCK; k < std::min((block + 1) * BLOCK, matrix.depth);) {
      // Exact products and one rounding, whether or not the processor has fused ones.
      double scale = factor(matrix, segment, segment.scales, panel, column, k);
      double offset = factor(matrix, segment, segment.offsets, panel, column, k);
      for (long end = std::min(k + UNIT, matrix.depth); k < end; k++) {
        int code = codes[k % BLOCK];
        double value = segment.bits == 8 ? code : to_float(segment.values[code]);
        store_one(to + k, (float)(scale * value + offset));
      }
    }
  }
}

// out [count, depth] = W[ids].
template <class T>
void gather(const uint8_t* packed, const int64_t* ids, long count, T* out) {
  const Matrix& matrix = *(const Matrix*)packed;
  for_each_item((count + 7) / 8, [&](long part) {
    for (long i = part * 8; i < std::min(count, part * 8 + 8); i++) {
      long row = ids[i], s = 0;
      while (row >= matrix.segment(s).rows) row -= matrix.segment(s++).rows;
      read_row(matrix, matrix.segment(s), row, out + i * matrix.depth);
    }
  });
}

}  // namespace codes
