// Keys and values in codes of 8 bits, with a scale for each token and head; toolkit/kv_codes.py is
// the same in torch.
//
// A group of 16 tokens of a head is codes, then the 16 scales of its tokens. Codes are in the order
// of panels of float32: keys [head size][16 tokens], values [16 elements of the head][16 tokens][16].
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "gemm.h"

namespace kv_codes {

struct Int8 {
  static constexpr float LIMIT = 127.0f;
  uint8_t bits;
};
struct Float8 {  // e4m3fn, without numbers below 2^-6
  static constexpr float LIMIT = 448.0f;
  uint8_t bits;
};

constexpr size_t SCALES = PANEL * sizeof(float);  // bytes of the scales of a group

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

// GCC converts between bytes and words element by element.
INLINE Ints load_signed(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  SignedBytes codes;
  memcpy(&codes, from, sizeof codes);
  return __builtin_convertvector(codes, Ints);
#endif
}
INLINE void store_bytes(void* to, Words words) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)words));
#else
  Bytes bytes = __builtin_convertvector(words, Bytes);
  memcpy(to, &bytes, sizeof bytes);
#endif
}
INLINE Floats decode(const Int8* from) { return __builtin_convertvector(load_signed(from), Floats); }
INLINE Floats decode(const Float8* from) {
  // The bits are those of a float32 whose exponent is too low by 120.
  return (Floats)(((Words)load_signed(from) << 20) & 0x87f00000u) * 0x1p120f;
}

// Codes of quotients, in the lowest byte.
INLINE Words encode(Floats x, Int8) { return bits_of(x + 12582912.0f); }  // 1.5 * 2^23
INLINE Words encode(Floats x, Float8) {
  Words size = bits_of(x) & 0x7fffffff;
  Words rounded = (size + 0x7ffff + ((size >> 20) & 1)) >> 20;
  Words code = (rounded - (120 << 3)) | ((bits_of(x) >> 24) & 0x80);
  return size < 0x3c800000u ? Words{} : code;
}

template <class T>
INLINE Floats load_up_to(const T* from, long count) {
  return count >= LANES ? load(from) : load_part(from, (int)count);
}

// The scale of a head.
template <class S, class T>
float find_scale(const T* x, long size) {
  Words largest = {};
  for (long i = 0; i < size; i += LANES) {
    Words bits = bits_of(load_up_to(x + i, size - i)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits = std::max<uint32_t>(bits, largest[i]);
  if (bits >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
  float value;
  memcpy(&value, &bits, sizeof value);
  return value < 0x1p-100f ? 0.0f : value / S::LIMIT;
}

// Write the codes of elements; `to` has room for whole vectors.
template <class S, class T>
void encode(const T* x, long size, float scale, S* to) {
  for (long i = 0; i < size; i += LANES) {
    Words codes = {};
    if (scale > 0) codes = encode(load_up_to(x + i, size - i) / scale, S{});
    store_bytes(to + i, codes);
  }
}

// Store a vector of depth k and one of depth k + 1 to their place in a panel.
INLINE void store_depths(bf16* to, Floats even, Floats odd) {
#if defined(__AVX512BF16__)
  // The halves of `both` are element by element: 0, 16, 1, 17, ...
  const Words column = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i order = (__m512i)(column * 0x10001u + 0x100000u);
  __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, (__m512i)both));
#else
  Words low = __builtin_convertvector(to_bf16(even), Words);
  Words pairs = low | (__builtin_convertvector(to_bf16(odd), Words) << 16);
  memcpy(to, &pairs, sizeof pairs);
#endif
}
INLINE void store_depths(float* to, Floats even, Floats odd) {
  store(to, even);
  store(to + PANEL, odd);
}

// Decode the keys of a group to a panel, whose columns are tokens.
template <class S, class T>
__attribute__((noinline)) void decode_keys(const S* from, long head_size, T* to) {
  Floats scale[PANEL_VECTORS];
  for (int v = 0; v < PANEL_VECTORS; v++)
    scale[v] = load((const float*)(from + head_size * PANEL) + v * LANES);
  long d = 0;
  for (; d + 2 <= head_size; d += 2, from += 2 * PANEL, to += 2 * PANEL)
#pragma GCC unroll 16
    for (int v = 0; v < PANEL_VECTORS; v++)
      store_depths(to + v * LANES * (4 / sizeof(T)), decode(from + v * LANES) * scale[v],
                   decode(from + PANEL + v * LANES) * scale[v]);
  if (d == head_size) return;
  for (int v = 0; v < PANEL_VECTORS; v++) {
    Floats last = decode(from + v * LANES) * scale[v];
    if constexpr (sizeof(T) == 2)
      store_depths(to + v * LANES * 2, last, Floats{});
    else
      store(to + v * LANES, last);
  }
}

// Decode the values of a group to panels, whose columns are elements; tokens outside of `first` to
// `end` become 0.
template <class S, class T>
__attribute__((noinline)) void decode_values(const S* from, long panels, int first, int end, T* to) {
  alignas(64) float scales[PANEL];
  memcpy(scales, from + panels * PANEL * PANEL, sizeof scales);
  for (int i = 0; i < PANEL; i++)
    if (i < first || i >= end) scales[i] = 0.0f;
  for (long panel = 0; panel < panels; panel++)
    for (int t = 0; t < PANEL; t += 2, from += 2 * PANEL, to += 2 * PANEL)
#pragma GCC unroll 16
      for (int v = 0; v < PANEL_VECTORS; v++)
        store_depths(to + v * LANES * (4 / sizeof(T)), decode(from + v * LANES) * scales[t],
                     decode(from + PANEL + v * LANES) * scales[t + 1]);
}

// Ask memory for what is decoded soon.
INLINE void prefetch(const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

}  // namespace kv_codes
