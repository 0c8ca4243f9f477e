// Products of low-bit codes with activations that are rounded to integers: sums of whole numbers.
//
// x is divided in blocks of 32 depths. Each has the scale max |x| / limit, and integers from -limit to
// limit: bytes, or words of 16 bits. A block's products with codes are exact sums of integers, which
// one float32 multiplication scales; the blocks are added in order, so that a row has one result in
// any batch.
//
// Bounds: the instruction vpmaddubsw adds two products of an unsigned and a signed byte to 16 bits,
// and saturates. Codes of 4, 5 and 6 bits are at most 15, 31 and 63; SUMMED<BITS> sums of two of their
// products with bytes fit 32767. vpmaddwd adds two products of words to 32 bits. Codes of 8 bits are
// the upper bytes of words. All sums of a block with words are less than 2^24, times 256 for codes of
// 8 bits, and fit float32 exactly.
#pragma once

#include "codes_chunks.h"

namespace codes {
namespace integers {

typedef uint8_t Bytes __attribute__((vector_size(32)));  // 4 depths of 8 columns
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int32_t Totals __attribute__((vector_size(32)));
typedef uint32_t Quads __attribute__((vector_size(32)));
typedef float Sums __attribute__((vector_size(32)));

constexpr int COLUMNS = 8;                    // of a vector
constexpr int VECTORS = PANEL / COLUMNS;      // of a panel
constexpr int QUADS = (int)BLOCK / 4;         // of depths in a block
constexpr int UPPER = 256;                    // what codes of 8 bits are multiplied with

// How x becomes integers. For codes of 8 bits they are words always.
enum Rounding { NONE, TO_BYTES, TO_WORDS };

constexpr int largest_integer(long bits, bool words) {
  if (bits == 8) return 2047;
  return !words ? 127 : bits == 4 ? 32767 : bits == 5 ? 16383 : 8191;
}

// The order of 8 depths of x: as the codes of two quads lie in bytes, as the bytes of each quad lie in
// the even and the odd ones, or as they are.
constexpr int ORDERS[3][8] = {
    {0, 4, 1, 5, 2, 6, 3, 7}, {0, 2, 1, 3, 4, 6, 5, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};
constexpr const int (&order_of(long bits, bool words, bool by_tiles))[8] {
  if (by_tiles) return ORDERS[bits == 8 ? 2 : 0];
  return ORDERS[bits == 8 ? 1 : words ? 2 : 0];
}

// Bytes of a block of a row.
constexpr long x_bytes(bool words) { return words ? 2 * BLOCK : BLOCK; }

// Sums of two products that 16 bits hold, for codes below 8 bits.
template <int BITS>
constexpr int SUMMED = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
template <int BITS>
constexpr bool FITS = SUMMED<BITS> * 2 * ((1 << BITS) - 1) * largest_integer(BITS, false) <= INT16_MAX;
static_assert(FITS<4> && FITS<5> && FITS<6>);
template <int BITS>
constexpr bool IS_EXACT =
    BLOCK * (BITS == 8 ? 128 : (1 << BITS) - 1) * largest_integer(BITS, true) <= 1 << 24;
static_assert(IS_EXACT<4> && IS_EXACT<5> && IS_EXACT<6> && IS_EXACT<8>);
static_assert((int64_t)BLOCK * 128 * UPPER * largest_integer(8, true) <= INT32_MAX);

// Sums of two products, of unsigned and signed bytes.
INLINE Shorts multiply_pairs(Bytes codes, Bytes x) {
#if defined(__AVX2__)
  return (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
  Shorts sums;
  for (int i = 0; i < 16; i++)
    sums[i] = (int16_t)(codes[2 * i] * (int8_t)x[2 * i] + codes[2 * i + 1] * (int8_t)x[2 * i + 1]);
  return sums;
#endif
}

// Sums of two products, of numbers of 16 bits.
INLINE Totals multiply_wide(Shorts codes, Shorts x) {
#if defined(__AVX2__)
  return (Totals)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#else
  Totals a = (Totals)codes, b = (Totals)x;
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Add now: GCC would add sums of integers in another order, with more than all registers.
template <class V>
INLINE void add(V& sum, V value) {
  sum += value;
#if defined(__AVX2__)
  asm("" : "+x"(sum));
#endif
}

INLINE Sums multiply_add(Sums a, Sums b, Sums c) {
#if defined(__AVX2__)
  return (Sums)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE Quads splat_quad(const int8_t* from) {
  uint32_t quad;
  memcpy(&quad, from, sizeof quad);
  return quad + Quads{};
}

INLINE Quads load_quads(const uint8_t* from) {
  Quads value;
  memcpy(&value, from, sizeof value);
  return value;
}

INLINE Quads shift(Quads words, int left) {
  return left < 0 ? words >> (uint32_t)-left : words << (uint32_t)left;
}

// Codes of quad q of a block, of columns 8 * half and following.
template <int BITS>
INLINE Bytes read_quad(const uint8_t* block, int half, int q) {
  if constexpr (BITS == 8) {
    if constexpr (IN_QUADS) return (Bytes)load_quads(block + q * 4 * PANEL + half * 32);
    Bytes result;
    for (int c = 0; c < COLUMNS; c++)
      for (int k = 0; k < 4; k++)
        result[c * 4 + k] = block[(q * 4 + k) * PANEL + half * COLUMNS + c];
    return result;
  } else {
    Quads words = load_quads(block + q / 2 * 64 + half * 32);
    words = (q % 2 ? words >> 4 : words) & 0x0f0f0f0f;
    if constexpr (BITS == 5) {
      Quads high = load_quads(block + 256 + half * 32);
      int first = q / 2 * 4 + q % 2;
      words |= (shift(high, 4 - first) & 0x00100010) | (shift(high, 10 - first) & 0x10001000);
    }
    if constexpr (BITS == 6) {
      Quads high = load_quads(block + 256 + q / 4 * 64 + half * 32);
      int first = q / 2 % 2 * 8 + q % 2 * 2;
      words |= (shift(high, 4 - first) & 0x00300030) | (shift(high, 8 - first) & 0x30003000);
    }
    return (Bytes)words;
  }
}

// Panels that are multiplied with one row, and rows that are multiplied together.
#if defined(__AVX2__)
constexpr int ROW_PANELS = STRIP, MOST_ROWS = 4;
#else
constexpr int ROW_PANELS = 1, MOST_ROWS = 1;
#endif
constexpr int FEW_ROWS = std::min(2, MOST_ROWS);

// Return how many of `left` rows are multiplied together.
constexpr int group_size(long left) {
  return left >= MOST_ROWS ? MOST_ROWS : left >= FEW_ROWS ? FEW_ROWS : 1;
}

// Codes of pair p of depths of a block below 8 bits, as words.
template <int BITS>
INLINE Shorts read_pair(const uint8_t* block, int half, int p) {
  Quads words = shift(load_quads(block + p / 4 * 64 + half * 32), -(p % 4 * 4)) & 0x000f000f;
  if constexpr (BITS == 5) {
    Quads high = load_quads(block + 256 + half * 32);
    words |= shift(high, 4 - p) & 0x00100010;
  }
  if constexpr (BITS == 6) {
    Quads high = load_quads(block + 256 + p / 8 * 64 + half * 32);
    words |= shift(high, 4 - p % 8 * 2) & 0x00300030;
  }
  return (Shorts)words;
}

// Rows of x as integers. Rows that are multiplied together lie block by block, side by side.
struct Rows {
  const int8_t* x;      // [blocks][rows][32], of one or two bytes
  const float* scales;  // [blocks][rows]
  const float* sums;    // [blocks][2][rows], of what the integers of a unit stand for
  long blocks;

  Rows from(long row, bool words) const {
    long at = row * blocks;
    return {x + at * x_bytes(words), scales + at, sums + at * 2, blocks};
  }
};

// whole = the whole numbers next to values * factor; the product is exact before it is rounded.
INLINE void round_block(const float* values, float factor, int limit, int* whole) {
#if defined(__AVX512F__)
  __m256i most = _mm256_set1_epi32(limit), least = _mm256_set1_epi32(-limit);
  for (int k = 0; k < BLOCK; k += 8) {
    __m512d exact = _mm512_cvtps_pd(_mm256_loadu_ps(values + k)) * _mm512_set1_pd(factor);
    __m256i rounded = _mm512_cvtpd_epi32(exact);
    rounded = _mm256_max_epi32(_mm256_min_epi32(rounded, most), least);
    _mm256_storeu_si256((__m256i*)(whole + k), rounded);
  }
#else
  constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
  for (int k = 0; k < BLOCK; k++) {
    double rounded = (double)values[k] * factor + MAGIC;
    int64_t number;
    memcpy(&number, &rounded, sizeof number);
    whole[k] = std::clamp((int)number, -limit, limit);  // the lower half is the number
  }
#endif
}

// Write a block of integers as bytes, as words, or, by_tiles, as lower bytes and upper ones of words.
INLINE void write_block(const int* whole, const int (&order)[8], bool words, bool by_tiles,
                        int8_t* to) {
#if defined(__AVX512F__)
  __m256i first = _mm256_loadu_si256((const __m256i*)order);
  __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  __m512i from = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  for (int k = 0; k < BLOCK; k += LANES) {
    __m512i part = _mm512_permutexvar_epi32(from, _mm512_loadu_si512(whole + k));
    if (words && !by_tiles) {
      _mm256_storeu_si256((__m256i*)((int16_t*)to + k), _mm512_cvtepi32_epi16(part));
      continue;
    }
    _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(part));
    if (!words) continue;
    part = _mm512_srai_epi32(part, 8);
    _mm_storeu_si128((__m128i*)(to + BLOCK + k), _mm512_cvtepi32_epi8(part));
  }
#else
  for (int k = 0; k < BLOCK; k++) {
    int from = whole[k / 8 * 8 + order[k % 8]];
    words ? (void)(((int16_t*)to)[k] = (int16_t)from) : (void)(to[k] = (int8_t)from);
  }
#endif
}

// Round a block of x for codes of some bits; what is beyond `count` is 0. by_tiles: words are written
// as their lower bytes, then the upper ones.
template <class T>
void quantize_block(const T* x, long count, long bits, bool words, bool by_tiles, int8_t* to,
                    float* scale, float* sums, int sums_stride) {
  float values[BLOCK] = {};
  if (count == BLOCK)
    for (int k = 0; k < BLOCK; k += LANES) store(values + k, load(x + k));
  else
    for (long k = 0; k < count; k++) values[k] = to_float(x[k]);
  Floats sizes{}, zeros{};
  for (int k = 0; k < BLOCK; k += LANES) {
    Floats value = load(values + k);
    sizes = maximum(sizes, choose(value < 0.0f, -value, value));
    zeros += value * 0.0f;
  }
  float largest = max_lanes(sizes), special = sum_lanes(zeros);  // NaN if a value is not finite
  bool is_zero = largest < 0x1p-100f;  // the quotient would be infinite
  const int limit = largest_integer(bits, words);
  float factor = is_zero ? 0.0f : (float)limit / largest;
  float unit = (is_zero ? 0.0f : largest / (float)limit) + special;
  *scale = bits == 8 ? unit / UPPER : unit;
  int whole[BLOCK];
  round_block(values, factor, limit, whole);
  write_block(whole, order_of(bits, words, by_tiles), words, by_tiles, to);
  for (int half = 0; half < BLOCK / UNIT; half++) {
    int sum = 0;
    for (int k = 0; k < UNIT; k++) sum += whole[half * UNIT + k];
    sums[half * sums_stride] = (float)sum * unit;
  }
}

// Rows that are rounded, in memory of the thread.
class Quantized {
 public:
  // Get rows that the thread may have got already in this call of `linear`. by_tiles: as many lie side
  // by side as a tile has.
  template <class T>
  Rows get(const T* x, long x_stride, int rows, long depth, long padded, long bits, bool words,
           bool by_tiles, long call, long block) {
    long blocks = padded / BLOCK;
    long bytes = x_bytes(words);
    int limit = largest_integer(bits, words);
    int8_t* to = integers_.get((size_t)rows * blocks * bytes);
    float* scales = scales_.get((size_t)rows * blocks * 3);
    float* sums = scales + rows * blocks;
    if (call != call_ || block != block_ || limit != limit_) {
      call_ = call, block_ = block, limit_ = limit;
      for (int first = 0, size; first < rows; first += size) {
        size = by_tiles ? std::min(rows - first, ::tiles::ROWS) : group_size(rows - first);
        for (long i = 0; i < size * blocks; i++) {
          long r = i % size, b = i / size, at = first * blocks + i;
          quantize_block(x + (first + r) * x_stride + b * BLOCK, std::min(BLOCK, depth - b * BLOCK),
                         bits, words, by_tiles, to + at * bytes, scales + at,
                         sums + (first * blocks + b * size) * 2 + r, size);
        }
      }
    }
    return {to, scales, sums, blocks};
  }

 private:
  Scratch<int8_t> integers_;
  Scratch<float> scales_;
  long call_ = 0, block_ = 0;
  int limit_ = 0;
};

// totals = sums over COUNT quads from `first` on of a block, of R rows and P panels.
template <int BITS, int COUNT, int R, int P>
INLINE void add_up(const uint8_t* block, int first, const int8_t* x,
                   Totals (&totals)[R][P * VECTORS]) {
  constexpr int V = P * VECTORS, EACH = std::min(SUMMED<BITS>, COUNT);
  Shorts sums[R][V];
#pragma GCC unroll 8
  for (int q = first; q < first + COUNT; q++) {
    bool begins = (q - first) % EACH == 0, ends = (q - first) % EACH == EACH - 1;
    Bytes codes[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++)
      codes[v] = read_quad<BITS>(block + v / VECTORS * BITS * 64, v % VECTORS, q);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Bytes quad = (Bytes)splat_quad(x + r * x_bytes(false) + q * 4);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        Shorts pairs = multiply_pairs(codes[v], quad);
        if (begins)
          sums[r][v] = pairs;
        else
          add(sums[r][v], pairs);
        if (!ends) continue;
        Totals quads = multiply_wide(sums[r][v], 1 + Shorts{});
        if (q - first < EACH)
          totals[r][v] = quads;
        else
          add(totals[r][v], quads);
      }
    }
  }
}

// As `add_up`, with words; for codes of 8 bits totals are UPPER times the sums.
template <int BITS, int COUNT, int R, int P>
INLINE void add_up_words(const uint8_t* block, int first, const int8_t* x,
                         Totals (&totals)[R][P * VECTORS]) {
  constexpr int V = P * VECTORS;
#pragma GCC unroll 16
  for (int p = 2 * first; p < 2 * (first + COUNT); p++) {
    Shorts codes[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const uint8_t* panel = block + v / VECTORS * BITS * 64;
      if constexpr (BITS < 8) {
        codes[v] = read_pair<BITS>(panel, v % VECTORS, p);
      } else {
        Shorts quads = (Shorts)read_quad<BITS>(panel, v % VECTORS, p / 2);
        codes[v] = p % 2 ? quads & (int16_t)0xff00 : quads << 8;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Shorts pair = (Shorts)splat_quad(x + r * x_bytes(true) + p * 4);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        Totals products = multiply_wide(codes[v], pair);
        if (p == 2 * first)
          totals[r][v] = products;
        else
          add(totals[r][v], products);
      }
    }
  }
}

INLINE Sums load_sums(const float* from) {
  Sums value;
  memcpy(&value, from, sizeof value);
  return value;
}

// Add the products of R rows with the blocks of a chunk to y [R][P * PANEL]. HALVES: a step is half
// of a block. at: the chunk's first block. ahead: how far memory is asked for codes, or 0.
template <int BITS, bool WORDS, bool HALVES, int R, int P>
__attribute__((noinline)) void tile(const uint8_t* at, long stride, const Chunk& chunk,
                                    const Rows rows, float* y, long ahead) {
  constexpr int V = P * VECTORS, PARTS = HALVES ? 2 : 1, COUNT = QUADS / PARTS;
  long first = chunk.first_unit * UNIT / BLOCK, left = HALVES ? 0 : chunk.lengths[0] / 2;
  const uint8_t* length = chunk.lengths;
  const int8_t* x = rows.x + first * R * x_bytes(WORDS);
  const float *row_scales = rows.scales + first * R, *row_sums = rows.sums + first * R * 2;
  const float *scales = chunk.scales, *offsets = chunk.offsets;
  for (long b = 0; b < chunk.units / 2; b++) {
    if (ahead) {
#pragma GCC unroll 32
      for (long i = 0; i < P * BITS; i++) __builtin_prefetch(at + ahead + i * 64, 0, 2);
    }
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      Totals totals[R][V];
      if constexpr (WORDS)
        add_up_words<BITS, COUNT, R, P>(at, part * COUNT, x, totals);
      else
        add_up<BITS, COUNT, R, P>(at, part * COUNT, x, totals);
      Sums sums[R][V];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Sums scale = row_scales[r] - Sums{};
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
          sums[r][v] = multiply_add(__builtin_convertvector(totals[r][v], Sums),
                                    load_sums(scales + v * COLUMNS) * scale,
                                    load_sums(y + (r * V + v) * COLUMNS));
      }
      if (chunk.has_offsets) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          float sum = HALVES ? row_sums[part * R + r] : row_sums[r] + row_sums[R + r];
#pragma GCC unroll 8
          for (int v = 0; v < V; v++)
            sums[r][v] = multiply_add(load_sums(offsets + v * COLUMNS), sum - Sums{}, sums[r][v]);
        }
      }
      memcpy(y, sums, sizeof sums);
      if (HALVES || --left == 0) {
        scales += P * PANEL, offsets += P * PANEL;
        if (!HALVES) left = *++length / 2;
      }
    }
    at += stride, x += R * x_bytes(WORDS), row_scales += R, row_sums += R * 2;
  }
}

// As `tile`, for any number of rows.
template <int BITS, bool WORDS, bool HALVES, int P>
void tiles(const uint8_t* at, long stride, const Chunk& chunk, Rows rows, int count, float* y) {
  constexpr int MOST = P == 1 ? MOST_ROWS : 1, FEW = std::min(FEW_ROWS, MOST);
  for (int row = 0; row < count;) {
    int size = std::min(group_size(count - row), MOST);
    auto run = tile<BITS, WORDS, HALVES, 1, P>;
    if (size == FEW) run = tile<BITS, WORDS, HALVES, FEW, P>;
    if (size == MOST) run = tile<BITS, WORDS, HALVES, MOST, P>;
    // The first rows wait for memory.
    run(at, stride, chunk, rows.from(row, WORDS), y + row * P * PANEL, row == 0 ? AHEAD : 0);
    row += size;
  }
}

}  // namespace integers
}  // namespace codes
