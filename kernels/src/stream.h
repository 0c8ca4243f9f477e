// Messages from one member to others, in the order of writing, through a ring of bytes in shared
// memory. Each begins with a word. What is larger than the ring streams through it in pieces.
#pragma once

#include "waiting.h"

namespace shared {

struct Stream {
  char* ring;
  uint32_t size;          // a power of two
  Counter* written;       // bytes so far
  int writer;             // the member
  Counter* read;          // bytes so far, one counter each reader
  int readers;
  int first_reader;       // the member; the others follow

  uint32_t piece() const { return size / 4; }
};

template <class Copy>
void each_part(const Stream& stream, uint32_t at, size_t count, Copy copy) {
  size_t start = at & (stream.size - 1), first = std::min<size_t>(count, stream.size - start);
  copy(stream.ring + start, 0, first);
  if (count > first) copy(stream.ring, first, count - first);
}

// Wait until `count` bytes after `at` are free.
inline long wait_for_room(Session& session, const Stream& stream, uint32_t at, uint32_t count,
                          int64_t deadline, bool may_interrupt) {
  for (int i = 0; i < stream.readers; i++) {
    auto has_room = [&](uint32_t read) { return stream.size - (at - read) >= count; };
    long status = wait(session, stream.read[i], stream.first_reader + i, has_room, deadline,
                       may_interrupt);
    if (status) return status;
  }
  return OK;
}

// Write a message. The deadline is for its beginning.
inline long write(Session& session, const Stream& stream, uint64_t word, const char* from,
                  size_t count, int64_t deadline, bool may_interrupt) {
  if (session.common->aborted.load(std::memory_order_relaxed)) return ABORTED;
  uint32_t at = stream.written->value.load(std::memory_order_relaxed);
  size_t done = 0, head = sizeof word;
  do {
    uint32_t piece = (uint32_t)std::min<size_t>(count - done, stream.piece());
    long status = wait_for_room(session, stream, at, (uint32_t)head + piece, deadline, may_interrupt);
    if (status) return status;
    if (head) {
      each_part(stream, at, head, [&](char* to, size_t skip, size_t bytes) {
        memcpy(to, (const char*)&word + skip, bytes);
      });
      at += (uint32_t)head;
      head = 0;
      deadline = FOR_EVER;
      may_interrupt = false;
    }
    each_part(stream, at, piece, [&](char* to, size_t skip, size_t bytes) {
      memcpy(to, from + done + skip, bytes);
    });
    at += piece;
    done += piece;
    advance(*stream.written, at);
  } while (done < count);
  return OK;
}

// Wait for a message, and return its word without taking it.
inline long peek(Session& session, const Stream& stream, int reader, uint64_t& word,
                 int64_t deadline, bool may_interrupt) {
  if (session.common->aborted.load(std::memory_order_relaxed)) return ABORTED;
  uint32_t at = stream.read[reader].value.load(std::memory_order_relaxed);
  auto has_come = [=](uint32_t written) { return written != at; };
  long status = wait(session, *stream.written, stream.writer, has_come, deadline, may_interrupt);
  if (status) return status;
  each_part(stream, at, sizeof word, [&](char* from, size_t skip, size_t bytes) {
    memcpy((char*)&word + skip, from, bytes);
  });
  return OK;
}

// Take the message that `peek` has seen, of `count` bytes.
inline long take(Session& session, const Stream& stream, int reader, char* to, size_t count) {
  Counter& read = stream.read[reader];
  uint32_t at = read.value.load(std::memory_order_relaxed) + (uint32_t)sizeof(uint64_t);
  size_t done = 0;
  do {
    uint32_t come = 0;
    auto has_come = [&](uint32_t written) { return (come = written - at) != 0 || done == count; };
    long status = wait(session, *stream.written, stream.writer, has_come);
    if (status) return status;
    uint32_t piece = (uint32_t)std::min({(size_t)come, (size_t)stream.piece(), count - done});
    each_part(stream, at, piece, [&](char* from, size_t skip, size_t bytes) {
      memcpy(to + done + skip, from, bytes);
    });
    at += piece;
    done += piece;
    advance(read, at);
  } while (done < count);
  return OK;
}

// A region of one stream to several readers. Member 0 writes; reader i is member i + 1.
namespace broadcast_ring {

inline size_t bytes(size_t readers, size_t size) { return head_bytes(readers + 1, readers + 1) + size; }

inline void create(Common* common, long readers, long size) {
  shared::create(common, bytes(readers, size), (int)readers + 1, (int)readers + 1, size, 0);
}

inline Stream stream(Common* common) {
  Counter* counters = common->counters();
  return {common->data(), (uint32_t)common->sizes[0], counters, 0, counters + 1,
          (int)common->member_count - 1, 1};
}

inline long write(Session& session, const char* from, long count, long deadline) {
  return shared::write(session, stream(session.common), (uint64_t)count, from, (size_t)count,
                       deadline_of(deadline), true);
}

// Return the size of the next message. It is taken, unless it is larger than `capacity`.
inline long read(Session& session, char* to, long capacity, long deadline) {
  Stream stream = broadcast_ring::stream(session.common);
  uint64_t count;
  long status = peek(session, stream, session.me - 1, count, deadline_of(deadline), true);
  if (!status && (long)count <= capacity)
    status = take(session, stream, session.me - 1, to, count);
  return status ? status : (long)count;
}

}  // namespace broadcast_ring
}  // namespace shared
