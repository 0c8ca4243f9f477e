// Low-bit codes in registers: pairs of depths as bf16, or single depths as float32.
#pragma once

#include <type_traits>

#include "codes.h"
#include "gemm.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace codes {

constexpr long AHEAD = 8192;   // bytes of codes that the second cache asks for ahead of their use
constexpr int PAIRS = 8;       // of depths in a unit

INLINE Floats load_half(const uint16_t* from) {
  Halves halves;
  memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  __m256i value;
  memcpy(&value, &halves, sizeof value);
  return (Floats)_mm512_cvtph_ps(value);
#elif defined(__F16C__)
  __m128i value;
  memcpy(&value, &halves, sizeof value);
  return (Floats)_mm256_cvtph_ps(value);
#else
  Words words = __builtin_convertvector(halves, Words), bits = (words & 0x7fff) << 13;
  Words special = (Words)(bits >= 0x0f800000u);  // infinite or NaN
  Floats finite = (Floats)bits * 0x1p112f;       // the exponents' biases differ
  bits = (special & (bits | 0x70000000u)) | (~special & bits_of(finite));
  return (Floats)(bits | (words & 0x8000) << 16);
#endif
}

// Signed or unsigned bytes.
template <class Byte>
INLINE Floats load_bytes(const Byte* from) {
#if defined(__AVX512F__)
  __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  return (Floats)_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes)
                                           : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
  return (Floats)_mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes)
                                           : _mm256_cvtepu8_epi32(bytes));
#else
  typedef Byte Bytes __attribute__((vector_size(LANES)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

INLINE Floats lower(Words pairs) { return (Floats)(pairs << 16); }
INLINE Floats upper(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

// Take the bits of `mask` from `yes`, the others from `no`.
INLINE Words merge(uint32_t mask, Words yes, Words no) {
#if defined(__AVX512F__)
  __m512i bits = _mm512_set1_epi32((int)mask);
  return (Words)_mm512_ternarylogic_epi32(bits, (__m512i)yes, (__m512i)no, 0xca);
#else
  return (yes & mask) | (no & ~mask);
#endif
}

#if defined(__AVX512F__)
constexpr bool PERMUTES = true;  // values are looked up in registers
#else
constexpr bool PERMUTES = false;
#endif

// Of a panel, unpacked: as bf16, or as float32 where converting bf16 takes instructions of its own.
constexpr long PAIR_BYTES = PERMUTES ? 64 : 128;

#if defined(__AVX512VBMI__)
constexpr int FOUR_ROWS = 4;  // that are multiplied with codes of 8 bits of four depths at a time

// How codes of 8 bits become bf16: where those of 4 depths and 16 columns go to lie in pairs, and the
// two bytes of the sizes from 0 to 128. What is at 0 is for 128.
struct alignas(64) ByteTables {
  uint8_t order[64]{}, low[128]{}, high[128]{};

  constexpr ByteTables() {
    for (int i = 0; i < 64; i++) {
      int depth = i % 16 / 8 * 2 + i % 2, column = i / 16 * 4 + i % 8 / 2;
      order[i] = (uint8_t)(depth * PANEL + column);
    }
    for (int size = 1, exponent = 0; size <= 128; size++) {
      if (size == 2 << exponent) exponent++;
      int bits = (127 + exponent) << 7 | (size << (7 - exponent) & 127);
      low[size % 128] = (uint8_t)bits;
      high[size % 128] = (uint8_t)(bits >> 8);
    }
  }
};
constexpr ByteTables BYTE_TABLES;

// Look up bytes by their lower 7 bits; 0 where `mask` is.
INLINE __m512i look_up(const uint8_t (&table)[128], __m512i bytes, __mmask64 mask) {
  return _mm512_maskz_permutex2var_epi8(mask, _mm512_load_si512(table), bytes,
                                        _mm512_load_si512(table + 64));
}

// Codes of 8 bits of 4 depths, as pairs of bf16.
INLINE void read_pairs(const uint8_t* from, Words& first, Words& second) {
  __m512i order = _mm512_load_si512(BYTE_TABLES.order);
  __m512i codes = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(from));
  __m512i sizes = _mm512_abs_epi8(codes), signs = _mm512_set1_epi8(-128);
  __m512i low = look_up(BYTE_TABLES.low, sizes, ~0ull);
  __m512i high = look_up(BYTE_TABLES.high, sizes, _mm512_test_epi8_mask(codes, codes));
  high = _mm512_ternarylogic_epi32(high, codes, signs, 0xf8);  // high | (codes & signs)
  first = (Words)_mm512_unpacklo_epi8(low, high);
  second = (Words)_mm512_unpackhi_epi8(low, high);
}
#endif

// Codes of panels in packed memory. TABLE: their values are looked up, else they are the codes plus
// a constant, which has to be a whole number where values can be looked up.
template <int BITS, bool TABLE>
struct Packed {
  static constexpr long BYTES = BITS * 64;  // of a block of a panel
  static constexpr int MOST_ROWS = PERMUTES ? gemm::TILE_ROWS : 2;

  const uint8_t* at;  // the first panel's first block
  long stride;        // from block to block
  const bf16* values;

  // Of some depths and V vectors of columns.
  template <int V>
  struct Unit {
    const uint8_t* low[V];
    Words high[V];
  };

  template <int V>
  __attribute__((always_inline)) Unit<V> unit(long index) const {
    Unit<V> result;
    long half = index % 2;
    const uint8_t* block = at + index / 2 * stride;
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const uint8_t* panel = block + v / PANEL_VECTORS * BYTES;
      long part = v % PANEL_VECTORS * LANES * (BITS == 8 && !IN_QUADS ? 1 : 4);
      result.low[v] = panel + half * (BITS == 8 ? 256 : 128) + part;
      if (BITS == 5) result.high[v] = load_words(panel + 256 + part) >> (uint32_t)(8 * half);
      if (BITS == 6) result.high[v] = load_words(panel + 256 + 64 * half + part);
      if (v % PANEL_VECTORS) continue;
#pragma GCC unroll 4
      for (int line = 0; line < (BITS + 1) / 2; line++)
        __builtin_prefetch(panel + half * BITS * 32 + line * 64 + AHEAD, 0, 2);
    }
    return result;
  }

  // The codes of pair p in the low bits of the halves of each word.
  template <int V>
  __attribute__((always_inline)) Words indices(const Unit<V>& unit, int v, int p) const {
    Words words = load_words(unit.low[v] + p / 4 * 64) >> (uint32_t)(p % 4 * 4);
    if (BITS == 4) return words;
    int shift = BITS == 5 ? p - 4 : 2 * p - 4;
    Words high = shift < 0 ? unit.high[v] << (uint32_t)-shift : unit.high[v] >> (uint32_t)shift;
    return merge(BITS == 5 ? 0x00100010 : 0x00300030, high, words);
  }

  // Pair p of vector v, as float32.
  template <int V>
  __attribute__((always_inline)) void floats(const Unit<V>& unit, int v, int p, Floats& even,
                                             Floats& odd) const {
    if constexpr (BITS == 8 && IN_QUADS) {
      Words quads = load_words(unit.low[v] + p / 2 * 64);
      uint32_t left = p % 2 ? 8 : 24;
      even = __builtin_convertvector((Ints)(quads << left) >> 24, Floats);
      odd = __builtin_convertvector((Ints)(quads << (left - 8)) >> 24, Floats);
    } else if constexpr (BITS == 8) {
      const int8_t* from = (const int8_t*)unit.low[v] + p * 2 * PANEL;
      even = load_bytes(from);
      odd = load_bytes(from + PANEL);
    } else if constexpr (PERMUTES) {
#if defined(__AVX512F__)
      if constexpr (BITS < 6) {  // permutations of 32 bits look at the lower code of a pair alone
        __m512i words = (__m512i)indices(unit, v, p);
        __m512 table = (__m512)load(values);
        if (BITS == 4)
          even = (Floats)_mm512_permutexvar_ps(words, table);
        else
          even = (Floats)_mm512_permutex2var_ps(table, words, (__m512)load(values + 16));
        odd = (Floats)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, words, _mm512_loadu_si512(values));
        return;
      }
#endif
      if constexpr (!TABLE) {  // codes in the lower digits of 2^23, and in those of 128
        Words words = indices(unit, v, p);
        even = (Floats)merge((1 << BITS) - 1, words, splat(0x4b000000u)) -
               (8388608.0f - to_float(values[0]));
        odd = (Floats)merge(((1 << BITS) - 1) << 16, words, splat(0x43000000u)) -
              (128.0f - to_float(values[0]));
        return;
      }
      Words words = pair(unit, v, p);
      even = lower(words);
      odd = upper(words);
    } else {
      Words words = indices(unit, v, p);
      even = floats_of(words & ((1 << BITS) - 1));
      odd = floats_of(words >> 16 & ((1 << BITS) - 1));
    }
  }

  // Pair p of vector v, as bf16.
  template <int V>
  __attribute__((always_inline)) Words pair(const Unit<V>& unit, int v, int p) const {
#if defined(__AVX512F__)
    if constexpr (BITS < 8) {
      __m512i words = (__m512i)indices(unit, v, p);
      __m512i table = _mm512_loadu_si512(values);
      if (BITS < 6) return (Words)_mm512_permutexvar_epi16(words, table);
      return (Words)_mm512_permutex2var_epi16(table, words, _mm512_loadu_si512(values + 32));
    }
#endif
    if constexpr (BITS == 8 || !PERMUTES) {
      Floats even, odd;
      floats(unit, v, p, even, odd);
      return bits_of(even) >> 16 | bits_of(odd);
    }
  }

 private:
  __attribute__((always_inline)) Floats floats_of(Words codes) const {
    if constexpr (!TABLE)
      return __builtin_convertvector((Ints)codes, Floats) + to_float(values[0]);
    Floats result;
    for (int i = 0; i < LANES; i++) result[i] = to_float(values[codes[i]]);
    return result;
  }
};

// Values that were unpacked, for each panel the pairs of depths one after the other: pairs of bf16, or
// those of one depth, then of the other one.
struct Unpacked {
  static constexpr int MOST_ROWS = gemm::TILE_ROWS;

  const uint8_t* at;
  long stride;  // from panel to panel

  template <int V>
  struct Unit {
    const uint8_t* vectors[V];
  };

  template <int V>
  __attribute__((always_inline)) Unit<V> unit(long index) const {
    Unit<V> result;
#pragma GCC unroll 16
    for (int v = 0; v < V; v++)
      result.vectors[v] = at + v / PANEL_VECTORS * stride + index * PAIRS * PAIR_BYTES +
                          v % PANEL_VECTORS * LANES * 4;
    return result;
  }

  template <int V>
  __attribute__((always_inline)) Words pair(const Unit<V>& unit, int v, int p) const {
    return load_words(unit.vectors[v] + p * PAIR_BYTES);
  }

  template <int V>
  __attribute__((always_inline)) void floats(const Unit<V>& unit, int v, int p, Floats& even,
                                             Floats& odd) const {
    if constexpr (!PERMUTES) {
      const float* from = (const float*)(unit.vectors[v] + p * PAIR_BYTES);
      even = load(from);
      odd = load(from + PANEL);
      return;
    }
    Words words = pair(unit, v, p);
    even = lower(words);
    odd = upper(words);
  }
};

// Unpack `units` units of P panels, as float32.
template <int P, class Source>
void unpack(const Source& source, long units, uint8_t* to, long stride) {
  constexpr int V = P * PANEL_VECTORS;
  for (long i = 0; i < units; i++, to += PAIRS * PAIR_BYTES) {
    auto unit = source.template unit<V>(i);
#pragma GCC unroll 8
    for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) {
        Floats even, odd;
        source.floats(unit, v, p, even, odd);
        float* at = (float*)(to + v / PANEL_VECTORS * stride + p * PAIR_BYTES) +
                    v % PANEL_VECTORS * LANES;
        store(at, even);
        store(at + PANEL, odd);
      }
  }
}

// Codes that are unpacked into memory, laid out as `Unpacked` says, while they are multiplied.
template <class Source>
struct Unpacking {
  static constexpr int MOST_ROWS = gemm::TILE_ROWS;

  Source source;
  uint8_t* to;
  long stride;  // from panel to panel

  template <int V>
  struct Unit {
    typename Source::template Unit<V> packed;
    uint8_t* to;
  };

  template <int V>
  __attribute__((always_inline)) Unit<V> unit(long index) const {
    return {source.template unit<V>(index), to + index * PAIRS * PAIR_BYTES};
  }

  template <int V>
  __attribute__((always_inline)) Words pair(const Unit<V>& unit, int v, int p) const {
    Words words = source.pair(unit.packed, v, p);
    memcpy(unit.to + v / PANEL_VECTORS * stride + p * PAIR_BYTES + v % PANEL_VECTORS * LANES * 4,
           &words, sizeof words);
    return words;
  }

  template <int V>
  __attribute__((always_inline)) void floats(const Unit<V>& unit, int v, int p, Floats& even,
                                             Floats& odd) const {
    Words words = pair(unit, v, p);
    even = lower(words);
    odd = upper(words);
  }
};

// sums += x * values of pair p over its two depths, in order. at: x's rows.
template <int R, int V, class Source, class Unit>
INLINE void add_pair(const Source& source, const Unit& unit, int p, const float* const (&at)[R],
                     int k, Floats (&sums)[R][V]) {
  if constexpr (R <= 2) {  // few registers: one vector after the other
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      Floats even, odd;
      source.floats(unit, v, p, even, odd);
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) {
        sums[r][v] += at[r][k] * even;
        sums[r][v] += at[r][k + 1] * odd;
      }
    }
    return;
  }
  Floats even[V], odd[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; v++) source.floats(unit, v, p, even[v], odd[v]);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] += at[r][k] * even[v];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] += at[r][k + 1] * odd[v];
}

#if defined(__AVX512BF16__)
template <int R, int V, class Source, class Unit>
INLINE void add_pair(const Source& source, const Unit& unit, int p, const bf16* const (&at)[R],
                     int k, Floats (&sums)[R][V]) {
#if defined(__AVX512VBMI__)
  if constexpr (R <= FOUR_ROWS && std::is_same_v<Source, Packed<8, true>>) {
    if (p % 2) return;  // was added with the pair before it
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      Words first, second;
      read_pairs(unit.low[v] + k * PANEL, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sums[r][v] = add_products(sums[r][v], splat_pair(at[r] + k), (Pairs)first);
        sums[r][v] = add_products(sums[r][v], splat_pair(at[r] + k + 2), (Pairs)second);
      }
    }
    return;
  }
#endif
  Pairs pairs[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; v++) pairs[v] = (Pairs)source.pair(unit, v, p);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    Pairs value = splat_pair(at[r] + k);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] = add_products(sums[r][v], value, pairs[v]);
  }
}
#endif

// sums += x * values over `units` units from unit `first` on; x is that of the first depth.
template <int R, int V, class Source, class X>
INLINE void multiply(const Source& source, long first, long units, const X* x, long stride,
                     Floats (&sums)[R][V]) {
  const X* at[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) at[r] = x + r * stride;
  for (long i = 0; i < units; i++) {
    auto unit = source.template unit<V>(first + i);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) asm("" : "+r"(at[r]));  // one register each, for all pairs
#pragma GCC unroll 8
    for (int p = 0; p < PAIRS; p++) add_pair(source, unit, p, at, 2 * p, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) at[r] += UNIT;
  }
}

}  // namespace codes
