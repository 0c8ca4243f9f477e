// Operations on each row alone: norms, rotary embedding, gated activations, scaled sums.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "vector.h"

namespace rows {

constexpr long GRAIN = 8 << 10;  // elements that are worth a thread

// Call work(from, to) for parts of the rows, of about the same size.
template <class Work>
void for_rows(long rows, long width, Work work) {
  long worth = std::min(rows * width / GRAIN, rows);
  long items = std::clamp<long>(worth, 1, 4 * omp_get_max_threads());
  for_each_item(items, [&](long item) {
    work(rows * item / items, rows * (item + 1) / items);
  });
}

// y = x / sqrt(mean(x^2) + eps) * weight; before that, if `residual`, x is added to it and taken
// from it. x has rows of `parts` parts each, which are normalised on their own; `count` is of parts.
// W is T or float.
template <class T, class W>
void rms_norm(const T* x, long x_stride, long parts, long part_stride, T* residual,
              long residual_stride, const W* weight, T* y, long y_stride, long count, long width,
              float eps) {
  for_rows(count, width, [=](long from, long to) {
    for (long row = from; row < to; row++) {
      const T* in = x + row / parts * x_stride + row % parts * part_stride;
      T* kept = residual ? residual + row * residual_stride : nullptr;
      T* out = y + row * y_stride;
      Floats squares[4] = {};
      long i = 0;
      auto add = [&](int lane_set, Floats value, int lanes) {
        if (kept) {
          value += lanes == LANES ? load(kept + i) : load_part(kept + i, lanes);
          lanes == LANES ? store(kept + i, value) : store_part(kept + i, value, lanes);
          // As the stored value, which later layers read.
          value = lanes == LANES ? load(kept + i) : load_part(kept + i, lanes);
        }
        squares[lane_set] += value * value;
      };
      for (int set = 0; i + LANES <= width; i += LANES, set = (set + 1) % 4)
        add(set, load(in + i), LANES);
      if (i < width) add(0, load_part(in + i, (int)(width - i)), (int)(width - i));
      float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
      float scale = 1.0f / std::sqrt(sum / (float)width + eps);
      const T* values = kept ? kept : in;
      for (i = 0; i + LANES <= width; i += LANES)
        store(out + i, load(values + i) * scale * load(weight + i));
      if (i < width) {
        int lanes = (int)(width - i);
        store_part(out + i, load_part(values + i, lanes) * scale * load_part(weight + i, lanes), lanes);
      }
    }
  });
}

// Rotate heads in place: of each, the first half a and the second half b become a cos - b sin and
// b cos + a sin. `angles` [count][cosines, then sines], of half a head each.
template <class T>
void rotate(T* x, long row_stride, long head_stride, const float* angles, long count,
            long heads, long head_size) {
  long half = head_size / 2;
  for_rows(count, heads * head_size, [=](long from, long to) {
    for (long row = from; row < to; row++) {
      const float* cosines = angles + row * head_size;
      const float* sines = cosines + half;
      for (long head = 0; head < heads; head++) {
        T* a = x + row * row_stride + head * head_stride;
        T* b = a + half;
        long i = 0;
        for (; i + LANES <= half; i += LANES) {
          Floats c = load(cosines + i), s = load(sines + i);
          Floats first = load(a + i), second = load(b + i);
          store(a + i, first * c - second * s);
          store(b + i, second * c + first * s);
        }
        if (i < half) {
          int lanes = (int)(half - i);
          Floats c = load_part(cosines + i, lanes), s = load_part(sines + i, lanes);
          Floats first = load_part(a + i, lanes), second = load_part(b + i, lanes);
          store_part(a + i, first * c - second * s, lanes);
          store_part(b + i, second * c + first * s, lanes);
        }
      }
    }
  });
}

INLINE Floats sigmoid(Floats x) {
  // Of -|x|, whose exponential cannot overflow.
  Ints negative = x < 0.0f;
  Floats power = exp_negative(choose(negative, x, -x));
  return choose(negative, power, splat(1.0f)) / (1.0f + power);
}

enum Activation { SILU = 0, GELU_TANH = 1 };

template <int KIND>
INLINE Floats activate(Floats x) {
  if constexpr (KIND == SILU) return x * sigmoid(x);
  // 0.5 (1 + tanh(z)) = sigmoid(2 z).
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

// y [count, width] = activation(x[:, :width]) * x[:, width:].
template <int KIND, class T>
void activate_and_mul(const T* x, long x_stride, T* y, long y_stride, long count, long width) {
  for_rows(count, 2 * width, [=](long from, long to) {
    for (long row = from; row < to; row++) {
      const T *gate = x + row * x_stride, *up = gate + width;
      T* out = y + row * y_stride;
      long i = 0;
      for (; i + LANES <= width; i += LANES)
        store(out + i, activate<KIND>(load(gate + i)) * load(up + i));
      if (i < width) {
        int lanes = (int)(width - i);
        store_part(out + i, activate<KIND>(load_part(gate + i, lanes)) * load_part(up + i, lanes), lanes);
      }
    }
  });
}

// x = x * factor + delta, in place; without `delta` (null), x * factor.
template <class T>
void scale_add(T* x, long x_stride, float factor, const T* delta, long delta_stride, long count,
               long width) {
  for_rows(count, width, [=](long from, long to) {
    for (long row = from; row < to; row++) {
      T* kept = x + row * x_stride;
      const T* added = delta ? delta + row * delta_stride : nullptr;
      long i = 0;
      for (; i + LANES <= width; i += LANES) {
        Floats value = load(kept + i) * factor;
        store(kept + i, added ? value + load(added + i) : value);
      }
      if (i < width) {
        int lanes = (int)(width - i);
        Floats value = load_part(kept + i, lanes) * factor;
        store_part(kept + i, added ? value + load_part(added + i, lanes) : value, lanes);
      }
    }
  });
}

}  // namespace rows
