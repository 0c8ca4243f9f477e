// Operations on rows of logits: the best token, random draws, truncation. A row's result depends on
// that row alone, and not on how many threads compute.
#pragma once

#include <algorithm>
#include <functional>

#include "parallel.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vocabulary {

constexpr long GRAIN = 16 << 10;  // logits that are worth a thread
constexpr float NONE = -std::numeric_limits<float>::infinity();

INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  uint64_t parts[LANES / 2];
  memcpy(parts, &mask, sizeof parts);
  uint64_t all = 0;
  for (uint64_t part : parts) all |= part;
  return all != 0;
#endif
}

// The next logits of a row, -inf after its last one.
INLINE Floats load_logits(const float* from, long count) {
  if (count >= LANES) return load(from);
  float part[LANES];
  for (int i = 0; i < LANES; i++) part[i] = i < count ? from[i] : NONE;
  return load(part);
}

INLINE bool is_nan(float value) { return value != value; }

// The largest of `count` logits; NaN if one is.
INLINE float largest(const float* x, long count) {
  Floats best[4], nan = {};
  for (Floats& set : best) set = splat(NONE);
  long i = 0;
  Ints found = nan != nan;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int set = 0; set < 4; set++) {
      Floats value = load(x + i + set * LANES);
      found |= value != value;
      best[set] = maximum(value, best[set]);
    }
  for (; i < count; i += LANES) {
    Floats value = load_logits(x + i, count - i);
    found |= value != value;
    best[0] = maximum(value, best[0]);
  }
  if (any(found)) return std::numeric_limits<float>::quiet_NaN();
  return max_lanes(maximum(maximum(best[0], best[1]), maximum(best[2], best[3])));
}

// Call work(row) for each row.
template <class Work>
void for_each_row(long rows, long width, Work work) {
  for_each_item(rows, work, rows * width < 2 * GRAIN ? 1 : omp_get_max_threads());
}

// Noise: u = (bits + 0.5) / 2^31, where bits is a hash of seed, position and token.

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

// splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
INLINE uint64_t mix(uint64_t value) {
  value += GOLDEN;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

INLINE Words hash(Words token, uint64_t key) {
  Words x = token ^ 0x5BD1E995u;
  // lowbias32 (Wellons, "hash prospector").
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  x ^= x >> 16;
  x = (x ^ (uint32_t)key) * 0x7FEB352Du;
  x = (x ^ (x >> 15) ^ (uint32_t)(key >> 32)) * 0x846CA68Bu;
  return (x ^ (x >> 16)) & 0x7FFFFFFFu;
}

// A token; the one with the largest logit - noise is chosen.
struct Pick {
  double logit, noise;
  long token;
};

// Whether a is chosen rather than b: NaN is before all, and of equals the lower token.
INLINE bool wins(Pick a, Pick b) {
  bool a_nan = a.logit != a.logit, b_nan = b.logit != b.logit;
  if (a_nan != b_nan) return a_nan;
  double ahead = a.logit - b.logit, more = a.noise - b.noise;  // ahead is NaN for two infinities
  return ahead > more || (!(ahead < more) && a.token < b.token);
}

// The first logit that is `value`, which there is; the first NaN if it is that.
INLINE long find(const float* x, long count, float value) {
  long i = 0;
  bool nan = is_nan(value);
  for (; i + LANES <= count; i += LANES) {
    Floats logits = load(x + i);
    if (any(nan ? logits != logits : logits == value)) break;
  }
  while (i < count - 1 && !(nan ? is_nan(x[i]) : x[i] == value)) i++;
  return i;
}

// The largest of the logits from..to-1; `maxima` gets the largest of each `block`.
inline Pick best(const float* x, long from, long to, long block, float* maxima) {
  float value = NONE;
  long where = from;
  for (long i = from; i < to; i += block) {
    long count = std::min(block, to - i);
    float top = largest(x + i, count);
    if (is_nan(top)) return {top, 0, i + find(x + i, count, top)};
    if (maxima) maxima[(i - from) / block] = top;
    if (top > value) {
      value = top;
      where = i;
    }
  }
  return {value, 0, where + find(x + where, std::min(block, to - where), value)};
}

// The winner of an exponential race: the token with the largest logit - log E, where
// E = -log(1 - u).
//
// Since E >= u, a token wins against another only if u < e^(logit - the other's logit + log E), which
// is seldom. Only then is its own E computed, so that there are hardly any logarithms.
class Race {
 public:
  static constexpr long BLOCK = 64;

  // Of the logits from..to-1; `maxima` has the largest of each block, and room for `limits`.
  Race(const float* x, long from, long to, uint64_t key, const float* maxima, int32_t* limits)
      : x_(x), from_(from), to_(to), key_(key), maxima_(maxima), limits_(limits) {}

  // Return the winner; `start` is one of the tokens.
  Pick run(long start) {
    winner_ = runner(start, x_[start], hash(splat((uint32_t)start), key_)[0]);
    set_limits(0);
    Words lane;
    for (int i = 0; i < LANES; i++) lane[i] = (uint32_t)i;
    for (long block = 0, first = from_; first < to_; block++, first += BLOCK) {
      if (limits_[block] < 0) continue;
      Words bits[BLOCK / LANES];
      Ints limit = (Ints)splat((uint32_t)limits_[block]), near = {};
      for (int set = 0; set < BLOCK / LANES; set++) {
        bits[set] = hash(lane + (uint32_t)(first + set * LANES), key_);
        near |= (Ints)bits[set] <= limit;
      }
      if (!any(near)) continue;
      long before = winner_.token;
      for (int set = 0; set < BLOCK / LANES && first + set * LANES < to_; set++)
        enter(first + set * LANES, bits[set]);
      if (winner_.token != before) set_limits(block + 1);
    }
    return winner_;
  }

 private:
  static Pick runner(long token, float logit, uint32_t bits) {
    return {logit, std::log(-std::log1p(((double)bits + 0.5) * -0x1p-31)), token};
  }

  // Bounds of each u with which a logit wins, in float32: with a slack above its errors.
  Floats bound(Floats logits) const {
    const float slack = 1e-4f;
    Floats ahead = (logits - (float)winner_.logit) + ((float)winner_.noise + slack);
    return exp_negative(choose(ahead < 0.0f, ahead, Floats{}));
  }

  // Set the largest bits with which a logit of a block, from the given one on, may win.
  void set_limits(long block) {
    const float most = 2147483520.0f;  // the largest float below 2^31
    for (long count = (to_ - from_ + BLOCK - 1) / BLOCK; block < count; block += LANES) {
      Floats scaled = bound(load_logits(maxima_ + block, count - block)) * 0x1p31f + 0.5f;
      Ints bits = __builtin_convertvector(choose(scaled < most, scaled, splat(most)), Ints) - 1;
      bits = scaled < most ? bits : bits * 0 + 0x7FFFFFFF;
      memcpy(limits_ + block, &bits, sizeof bits);
    }
  }

  // Let the tokens of a vector run.
  void enter(long at, Words bits) {
    Floats logits = load_logits(x_ + at, to_ - at);
    Ints near = __builtin_convertvector((Ints)bits, Floats) * 0x1p-31f <= bound(logits);
    if (!any(near)) return;
    for (int i = 0; i < LANES; i++) {
      if (!near[i] || !(logits[i] > NONE)) continue;
      Pick pick = runner(at + i, logits[i], bits[i]);
      if (wins(pick, winner_)) winner_ = pick;
    }
  }

  const float* x_;
  long from_, to_;
  uint64_t key_;
  const float* maxima_;
  int32_t* limits_;
  Pick winner_;
};

// A row's token: the one with the largest logit if `greedy`, or if that is not finite; else the
// winner of the race.
inline Pick pick(const float* x, long from, long to, bool greedy, uint64_t key) {
  if (greedy) return best(x, from, to, 4096, nullptr);
  static thread_local Scratch<float> largest_of;
  static thread_local Scratch<int32_t> limits;
  long blocks = (to - from) / Race::BLOCK + 1;
  float* maxima = largest_of.get(blocks);
  Pick top = best(x, from, to, Race::BLOCK, maxima);
  if (!std::isfinite(top.logit)) return top;
  return Race(x, from, to, key, maxima, limits.get(blocks + LANES)).run(top.token);
}

// Choose each row's token. Without `greedy`, all rows are greedy.
inline void choose(const float* x, long stride, const uint8_t* greedy, const int64_t* seeds,
                   const int64_t* positions, int64_t* tokens, long rows, long width) {
  if (!rows) return;
  static thread_local Scratch<Pick> scratch;
  long threads = omp_get_max_threads();
  long parts = std::clamp<long>(std::min(width / GRAIN, threads / rows), 1, 64);
  long size = (width + parts - 1) / parts;
  Pick* picks = scratch.get(rows * parts);
  for_each_row(rows * parts, width / parts, [=](long item) {
    long row = item / parts, from = item % parts * size;
    bool is_greedy = !greedy || greedy[row];
    uint64_t key = is_greedy ? 0 : mix(mix((uint64_t)seeds[row]) + (uint64_t)positions[row]);
    picks[item] = pick(x + row * stride, from, std::min(from + size, width), is_greedy, key);
  });
  for (long row = 0; row < rows; row++) {
    Pick winner = picks[row * parts];
    for (long part = 1; part < parts; part++)
      if (wins(picks[row * parts + part], winner)) winner = picks[row * parts + part];
    tokens[row] = winner.token;
  }
}

// Set the logits below `threshold` to -inf.
INLINE void mask_below(float* x, long width, float threshold) {
  long i = 0;
  for (; i + LANES <= width; i += LANES) {
    Floats value = load(x + i);
    store(x + i, ::choose(value < threshold, splat(NONE), value));
  }
  for (; i < width; i++)
    if (x[i] < threshold) x[i] = NONE;
}

// Of each row rows[i], keep the tokens whose bit is set in words[i * word_stride ...].
inline void keep_tokens(float* x, long stride, const int64_t* rows, const uint32_t* words,
                        long word_stride, long count, long width) {
  for_each_row(count, width, [=](long index) {
    float* logits = x + rows[index] * stride;
    const uint32_t* bits = words + index * word_stride;
    for (long i = 0; i < width; i += 32) {
      uint32_t word = bits[i / 32];
      long end = std::min(width - i, 32L);
      if (word == 0)
        for (long j = 0; j < end; j++) logits[i + j] = NONE;
      else if (word != 0xFFFFFFFFu)
        for (long j = 0; j < end; j++) logits[i + j] = word >> j & 1 ? logits[i + j] : NONE;
    }
  });
}

// Keep the logits that are at most `distance` below the row's largest one.
inline void keep_near(float* x, long stride, const float* distance, long rows, long width) {
  for_each_row(rows, width, [=](long row) {
    float* logits = x + row * stride;
    float top = largest(logits, width);
    if (std::isfinite(top)) mask_below(logits, width, top + distance[row]);
  });
}

// Append the logits of x that are finite and at least `least` to `to`; return how many.
inline long collect(const float* x, long width, float least, float* to) {
  long count = 0;
  for (long i = 0; i < width; i += LANES) {
    Floats value = load_logits(x + i, width - i);
    if (!any((value >= least) & (value > NONE))) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (value[lane] >= least && value[lane] > NONE) to[count++] = value[lane];
  }
  return count;
}

// Keep the k largest logits, and those equal to the smallest of them; all if k is not in
// 1..width-1.
inline void keep_top_k(float* x, long stride, const int64_t* k, long rows, long width) {
  for_each_row(rows, width, [=](long row) {
    if (k[row] <= 0 || k[row] >= width) return;
    static thread_local Scratch<float> scratch;
    float *logits = x + row * stride, *found = scratch.get(width + LANES);
    float top = largest(logits, width);
    if (!std::isfinite(top)) return;
    long nth = k[row] - 1;
    auto select = [=](long count) {
      std::nth_element(found, found + nth, found + count, std::greater<float>());
      return found[nth];
    };
    // The k-th largest of the maxima of more than k sets of logits: at least k logits reach it.
    long depth = 64;
    while (depth > 1 && width / depth < 4 * k[row]) depth /= 2;
    float least = NONE;
    if (depth > 2) {
      long sets = 0;
      for (long i = 0; i + depth * LANES <= width; i += depth * LANES, sets += LANES) {
        Floats maxima = load(logits + i);
        for (long step = 1; step < depth; step++)
          maxima = maximum(load(logits + i + step * LANES), maxima);
        store(found + sets, maxima);
      }
      if (sets > nth) least = select(sets);
    }
    long count = collect(logits, width, least, found);
    if (count > nth) mask_below(logits, width, select(count));
  });
}

// Half as many floats as a vector has lanes, with a double and a number of 64 bits for each.
constexpr int HALF = LANES / 2;
typedef float HalfFloats __attribute__((vector_size(4 * HALF)));
typedef double Doubles __attribute__((vector_size(8 * HALF)));
typedef int64_t Longs __attribute__((vector_size(8 * HALF)));

constexpr float RANGE = 29;  // weights of logits that are further below the largest one are 0
constexpr int BUCKETS_PER_UNIT = 64;
constexpr int BUCKETS = (int)RANGE * BUCKETS_PER_UNIT + 1;

// e^-distance * 2^40, rounded to a whole number: sums do not depend on their order. For distances
// in 0..RANGE. The polynomial of the rest, which is at most ln 2 / 2, is the one with the least
// error, 2.4e-16.
INLINE Longs weight(HalfFloats distance) {
  const double magic = 0x1.8p52;  // adding it rounds to a whole number
  Doubles x = -__builtin_convertvector(distance, Doubles);
  Doubles shifted = x * 0x1.71547652b82fep0 + magic;
  Doubles whole = shifted - magic;
  Doubles rest = x - whole * 0x1.62e42fefa39efp-1;
  Doubles power = rest * 0x1.27315ac00c5e3p-22 + 0x1.72f79417bc479p-19;
  for (double factor :
       {0x1.a01b59e268e5cp-16, 0x1.a0197c98d59c6p-13, 0x1.6c16c0cdbe6e6p-10, 0x1.1111112c5adfdp-7,
        0x1.555555558b6ccp-5, 0x1.555555554c5a1p-3, 0x1.ffffffffffe94p-2, 1., 1.})
    power = power * rest + factor;
  Doubles scale = (Doubles)(((Longs)shifted + 1023) << 52);
  return (Longs)(power * scale + 0x1p12) - 0x40B0000000000000;  // the last place of 2^12 is 2^-40
}

INLINE Floats distance_below(Floats value, float top) {
  Floats distance = top - value;
  return ::choose(distance < RANGE, distance, splat(RANGE));
}
INLINE Ints bucket_of(Floats distance) {
  return __builtin_convertvector(distance * (float)BUCKETS_PER_UNIT, Ints);
}

// The smallest logit of a row's nucleus: the largest one at which the weights of all logits that
// are at least as large reach `p` of all weights.
class Nucleus {
 public:
  Nucleus(const float* x, long width, float top) : x_(x), width_(width), top_(top) {}

  float smallest(double p) {
    uint64_t sums[BUCKETS] = {};
    for (long i = 0; i < width_; i += LANES) {
      Floats distance = distances(i);
      int32_t buckets[LANES];
      int64_t weights[LANES];
      Ints found = bucket_of(distance);
      memcpy(buckets, &found, sizeof found);
      weigh(distance, weights);
      for (int lane = 0; lane < LANES; lane++) sums[buckets[lane]] += weights[lane];
    }
    uint64_t total = 0, before = 0;
    for (uint64_t sum : sums) total += sum;
    double reached = p * (double)total;
    if (reached <= 0) return top_;
    uint64_t goal = (uint64_t)reached;
    int end = 0;
    while (before + sums[end] < goal) before += sums[end++];
    return within(end, goal - before);
  }

 private:
  struct Weighted {
    float logit;
    uint64_t weight;
  };

  // How far logits are below the largest one; RANGE, whose weight is 0, after the last one.
  __attribute__((always_inline)) Floats distances(long i) const {
    return distance_below(load_logits(x_ + i, width_ - i), top_);
  }

  // Write the weights of LANES logits.
  __attribute__((always_inline)) static void weigh(Floats distance, int64_t* to) {
    float part[LANES];
    store(part, distance);
    for (int half = 0; half < LANES; half += HALF) {
      HalfFloats each;
      memcpy(&each, part + half, sizeof each);
      Longs weights = weight(each);
      memcpy(to + half, &weights, sizeof weights);
    }
  }

  // The logit of a bucket at which the weights reach `goal`.
  float within(int wanted, uint64_t goal) const {
    static thread_local Scratch<Weighted> scratch;
    Weighted* from = scratch.get(width_);
    long count = 0;
    for (long i = 0; i < width_; i += LANES) {
      Floats distance = distances(i);
      Ints is_wanted = bucket_of(distance) == wanted;
      if (!any(is_wanted)) continue;
      int64_t weights[LANES];
      weigh(distance, weights);
      for (int lane = 0; lane < LANES && i + lane < width_; lane++)
        if (is_wanted[lane]) from[count++] = {x_[i + lane], (uint64_t)weights[lane]};
    }
    Weighted* to = from + count;
    while (to - from > 1) {
      Weighted* middle = from + (to - from) / 2;
      std::nth_element(from, middle, to,
                       [](Weighted a, Weighted b) { return a.logit > b.logit; });
      uint64_t sum = 0;
      for (Weighted* each = from; each < middle; each++) sum += each->weight;
      if (sum >= goal) {
        to = middle;
      } else {
        goal -= sum;
        from = middle;
      }
    }
    return from->logit;
  }

  const float* x_;
  long width_;
  float top_;
};

// Keep the smallest set of largest logits whose probability reaches p - 1e-6, and what equals the
// smallest of them; all if p >= 1.
inline void keep_top_p(float* x, long stride, const float* p, long rows, long width) {
  for_each_row(rows, width, [=](long row) {
    if (p[row] >= 1) return;
    float* logits = x + row * stride;
    float top = largest(logits, width);
    if (!std::isfinite(top)) return;
    mask_below(logits, width, Nucleus(logits, width, top).smallest((double)p[row] - 1e-6));
  });
}

}  // namespace vocabulary
