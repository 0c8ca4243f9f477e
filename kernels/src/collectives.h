// Collectives between the ranks of one host, through shared memory.
//
// They are made of steps, which all ranks count alike. In a step a rank writes to its slot, says
// so by advancing its counter, waits for the others, and reads their slots. Each rank has two
// slots, for odd and even steps: who has counted step n has read all slots of step n - 1, so a rank
// that has seen all others count n - 1 may write the slot of step n, which was last used in n - 2.
#pragma once

#include "stream.h"
#include "vector.h"

namespace shared {

enum Operation : uint64_t { ALL_REDUCE = 1, ALL_GATHER, ALL_TO_ALL, BROADCAST, SEND };

// What the ranks of a call have to agree on: bytes, type, root and operation.
inline uint64_t note_of(Operation operation, long type, long bytes, long root = 0) {
  return (uint64_t)operation << 60 | (uint64_t)root << 52 | (uint64_t)type << 44 | (uint64_t)bytes;
}

// ---- sums

INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// How the elements of a tensor are summed: in what type, and how they are read and rounded.
struct BFloat16 {
  typedef uint16_t Element;
  typedef float Sum;
  INLINE Sum widen(Element x) { return float_of((uint32_t)x << 16); }
  INLINE Element narrow(Sum x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (Element)(x != x ? 0x7fc0 : rounded);
  }
};

struct Float16 {
  typedef uint16_t Element;
  typedef float Sum;
  INLINE Sum widen(Element x) {
    uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13, sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t normal = magnitude + (112u << 23);
    normal += magnitude >= (0x7c00u << 13) ? 112u << 23 : 0;  // infinity and NaN
    uint32_t small = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    return float_of((magnitude < (1u << 23) ? small : normal) | sign);
  }
  INLINE Element narrow(Sum x) {
    uint32_t bits = bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 shifts the places below those of float16 out, rounded to even.
    uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t result = magnitude < (113u << 23) ? small : normal;
    result = magnitude >= (143u << 23) ? 0x7c00 : result;
    result = magnitude > (255u << 23) ? 0x7e00 : result;
    return (Element)(result | sign >> 16);
  }
};

template <class T>
struct Plain {
  typedef T Element;
  typedef T Sum;
  INLINE T widen(T x) { return x; }
  INLINE T narrow(T x) { return x; }
};

// to = the sum of the parts, in their order. It may be one of them.
template <class Type>
void sum(const char* const* parts, int count, char* to, size_t bytes) {
  typedef typename Type::Element Element;
  constexpr size_t BLOCK = 256;
  typename Type::Sum sums[BLOCK];
  for (size_t from = 0, length = bytes / sizeof(Element); from < length; from += BLOCK) {
    size_t size = std::min(BLOCK, length - from);
    const Element* part = (const Element*)parts[0] + from;
    for (size_t i = 0; i < size; i++) sums[i] = Type::widen(part[i]);
    for (int p = 1; p < count; p++) {
      part = (const Element*)parts[p] + from;
      for (size_t i = 0; i < size; i++) sums[i] += Type::widen(part[i]);
    }
    Element* result = (Element*)to + from;
    for (size_t i = 0; i < size; i++) result[i] = Type::narrow(sums[i]);
  }
}

struct Summed {
  void (*sum)(const char* const*, int, char*, size_t);
  size_t element;
};

// By the number that kernels/shared_memory.py has for a dtype. Whole numbers wrap around.
constexpr Summed SUMMED[] = {
    {sum<BFloat16>, 2},        {sum<Plain<float>>, 4},    {sum<Float16>, 2},
    {sum<Plain<double>>, 8},   {sum<Plain<uint8_t>>, 1},  {sum<Plain<uint8_t>>, 1},
    {sum<Plain<uint16_t>>, 2}, {sum<Plain<uint32_t>>, 4}, {sum<Plain<uint64_t>>, 8},
};

// ---- groups

// A rank of a group. The counters are those of the steps, then of what each pair has written and
// read; the data are two slots of each rank, then the rings of the pairs.
class Group {
 public:
  static constexpr size_t SMALL = 32 << 10;  // bytes up to which each rank sums all of a tensor

  static int counters(int ranks) { return ranks + 2 * ranks * ranks; }
  static size_t bytes(size_t ranks, size_t slot, size_t ring) {
    return head_bytes(ranks, counters((int)ranks)) + ranks * 2 * slot + ranks * (ranks - 1) * ring;
  }
  static void create(Common* common, long ranks, long slot, long ring) {
    shared::create(common, bytes(ranks, slot, ring), (int)ranks, counters((int)ranks), slot, ring);
  }

  explicit Group(Session& session)
      : session_(session), common_(session.common), me_(session.me),
        size_((int)session.common->member_count), slot_bytes_(session.common->sizes[0]) {}

  long all_reduce(char* x, size_t bytes, long type) {
    note_ = note_of(ALL_REDUCE, type, (long)bytes);
    const Summed& summed = SUMMED[type];
    size_t most = bytes <= SMALL ? SMALL : slot_bytes_;
    return in_pieces(bytes, std::min(most, slot_bytes_), [&](size_t from, size_t count) {
      return count <= SMALL ? reduce_whole(x + from, count, summed)
                            : reduce_parts(x + from, count, summed);
    });
  }

  long all_gather(const char* x, char* to, size_t bytes, long type) {
    note_ = note_of(ALL_GATHER, type, (long)bytes);
    return in_pieces(bytes, slot_bytes_, [&](size_t from, size_t count) {
      auto write = [&](char* slot) { memcpy(slot, x + from, count); };
      memcpy(to + me_ * bytes + from, x + from, count);
      return step(write, [&](int rank, const char* slot) {
        memcpy(to + rank * bytes + from, slot, count);
      });
    });
  }

  long all_to_all(const char* x, char* to, size_t row, long type) {
    note_ = note_of(ALL_TO_ALL, type, (long)row);
    size_t part = slot_bytes_ / size_ / LINE * LINE;
    return in_pieces(row, part, [&](size_t from, size_t count) {
      auto write = [&](char* slot) {
        for (int rank = 0; rank < size_; rank++)
          memcpy(rank == me_ ? to + rank * row + from : slot + rank * part, x + rank * row + from,
                 count);
      };
      return step(write, [&](int rank, const char* slot) {
        memcpy(to + rank * row + from, slot + me_ * part, count);
      });
    });
  }

  long broadcast(char* x, size_t bytes, long type, int source) {
    note_ = note_of(BROADCAST, type, (long)bytes, source);
    return in_pieces(bytes, slot_bytes_, [&](size_t from, size_t count) {
      long status = begin();
      if (status) return status;
      if (me_ == source) {
        memcpy(slot(me_), x + from, count);
        count_step();
        return OK;
      }
      count_step();
      status = wait_for(source);
      if (!status) memcpy(x + from, slot(source), count);
      return status;
    });
  }

  long send(const char* x, size_t bytes, long type, int destination) {
    uint64_t note = note_of(SEND, type, (long)bytes);
    return write(session_, stream(me_, destination), note, x, bytes, FOR_EVER, false);
  }

  long recv(char* x, size_t bytes, long type, int source) {
    Stream from = stream(source, me_);
    uint64_t note;
    long status = peek(session_, from, 0, note, FOR_EVER, false);
    if (status) return status;
    note_ = note_of(SEND, type, (long)bytes);
    if (note != note_) return differs(source, note);
    return take(session_, from, 0, x, bytes);
  }

 private:
  template <class Work>
  long in_pieces(size_t bytes, size_t most, Work work) {
    size_t from = 0;
    do {  // also once for nothing, since the ranks wait for each other in every call
      size_t count = std::min(most, bytes - from);
      long status = work(from, count);
      if (status) return status;
      from += count;
    } while (from < bytes);
    return OK;
  }

  // Each rank sums all of x.
  long reduce_whole(char* x, size_t bytes, const Summed& summed) {
    const char* parts[MAX_MEMBERS];
    auto write = [&](char* slot) { memcpy(slot, x, bytes); };
    long status = step(write, [&](int rank, const char* slot) { parts[rank] = slot; });
    if (status) return status;
    parts[me_] = x;
    summed.sum(parts, size_, x, bytes);
    return OK;
  }

  // Each rank sums a part of x, and takes those of the others from them.
  long reduce_parts(char* x, size_t bytes, const Summed& summed) {
    size_t each = (bytes + size_ - 1) / size_;
    each = (each + LINE - 1) / LINE * LINE;
    auto start = [&](int rank) { return std::min(rank * each, bytes); };
    size_t mine = start(me_), length = start(me_ + 1) - mine;
    const char* parts[MAX_MEMBERS];
    auto write = [&](char* slot) {
      memcpy(slot, x, mine);
      memcpy(slot + mine + length, x + mine + length, bytes - mine - length);
    };
    long status = step(write, [&](int rank, const char* slot) { parts[rank] = slot + mine; });
    if (status) return status;
    parts[me_] = x + mine;
    auto write_sum = [&](char* slot) {
      summed.sum(parts, size_, slot, length);
      memcpy(x + mine, slot, length);
    };
    return step(write_sum, [&](int rank, const char* slot) {
      memcpy(x + start(rank), slot, start(rank + 1) - start(rank));
    });
  }

  // Write the slot of this rank, then read those of the others as they come.
  template <class Write, class Read>
  long step(Write write, Read read) {
    long status = begin();
    if (status) return status;
    write(slot(me_));
    count_step();
    for (int i = 1; i < size_; i++) {
      int rank = (me_ + i) % size_;
      status = wait_for(rank);
      if (status) return status;
      read(rank, slot(rank));
    }
    return OK;
  }

  // Begin the next step: wait until the slot of this rank may be written.
  long begin() {
    if (common_->aborted.load(std::memory_order_relaxed)) return ABORTED;
    uint32_t before = session_.step++;
    for (int rank = 0; rank < size_; rank++) {
      if (rank == me_) continue;
      auto is_there = [=](uint32_t value) { return (int32_t)(value - before) >= 0; };
      long status = wait(session_, counter(rank), rank, is_there);
      if (status) return status;
    }
    return OK;
  }

  void count_step() {
    counter(me_).notes[session_.step & 1] = note_;
    advance(counter(me_), session_.step);
  }

  // Wait until a rank has written its slot.
  long wait_for(int rank) {
    uint32_t step = session_.step;
    auto is_there = [=](uint32_t value) { return (int32_t)(value - step) >= 0; };
    long status = wait(session_, counter(rank), rank, is_there);
    if (status) return status;
    uint64_t note = counter(rank).notes[step & 1];
    return note == note_ ? OK : differs(rank, note);
  }

  long differs(int rank, uint64_t note) {
    session_.notes[0] = note_;
    session_.notes[1] = note;
    return DIFFERS - rank;
  }

  Counter& counter(int rank) { return common_->counters()[rank]; }
  char* slot(int rank) { return common_->data() + (rank * 2 + (session_.step & 1)) * slot_bytes_; }

  Stream stream(int from, int to) {
    size_t ring = common_->sizes[1];
    int pair = from * (size_ - 1) + to - (to > from);
    Counter* counters = common_->counters() + size_ + 2 * pair;
    char* data = common_->data() + size_ * 2 * slot_bytes_ + pair * ring;
    return {data, (uint32_t)ring, counters, from, counters + 1, 1, to};
  }

  Session& session_;
  Common* common_;
  int me_, size_;
  size_t slot_bytes_;
  uint64_t note_ = 0;
};

}  // namespace shared
