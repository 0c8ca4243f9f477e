// Memory that several members share, threads or processes of one host: how they wait for each
// other, and how those that wait learn that another one has failed.
//
// A region begins with a Common, its members and its counters. Each counter is advanced by one
// member. One that waits for it spins, yields, then sleeps in the kernel, and looks now and then
// at the abort word and at whether the others' processes live.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace shared {

constexpr int MAX_MEMBERS = 64;
constexpr int SPINS = 50;                   // 1 to 3 microseconds
constexpr int64_t YIELD_NS = 100'000;       // how long a member yields before it sleeps
constexpr int64_t LOOK_NS = 50'000'000;     // how often one that sleeps looks at the others
constexpr int64_t RETURN_NS = 1'000'000'000;  // how often a wait that may be interrupted ends
constexpr int64_t FOR_EVER = INT64_MAX;
constexpr uint64_t MAGIC = 0x3130676e69746177;
constexpr size_t LINE = 64;

// What calls return: a number >= 0, or one of these. GONE and DIFFERS are minus a member.
constexpr long OK = 0, ABORTED = -1, TIMED_OUT = -2, INTERRUPTED = -3, GONE = -1000, DIFFERS = -2000;

typedef std::atomic<uint32_t> Word;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "the kernel sleeps on plain words");

// Counts modulo 2^32.
struct alignas(LINE) Counter {
  Word value, sleepers;
  uint64_t notes[2];  // what the member says about an odd and an even step
};

struct alignas(LINE) Member {
  Word pid, has_left;
};

struct alignas(LINE) Common {
  uint64_t magic;
  uint64_t bytes;  // of the region
  uint32_t member_count, counter_count;
  uint64_t sizes[2];  // of what follows the counters
  Word aborted;       // 0, 1 while the reason is written, then 2
  uint32_t reason_length;
  char reason[512];

  Member* members() { return (Member*)(this + 1); }
  Counter* counters() { return (Counter*)(members() + member_count); }
  char* data() { return (char*)(counters() + counter_count); }
};

inline size_t head_bytes(size_t members, size_t counters) {
  return sizeof(Common) + members * sizeof(Member) + counters * sizeof(Counter);
}

// The memory is all zeros.
inline void create(Common* common, size_t bytes, int members, int counters, size_t a, size_t b) {
  common->bytes = bytes;
  common->member_count = members;
  common->counter_count = counters;
  common->sizes[0] = a;
  common->sizes[1] = b;
  common->magic = MAGIC;
}

// What a member has in its own memory.
struct Session {
  Common* common;
  int me;
  int spins;                // before the first yield; none where there are more members than cores
  uint32_t step;            // of collectives, so far
  uint64_t notes[2];        // that differ: this member's, and the other's
  int pidfds[MAX_MEMBERS];  // of the others' processes; NOT_OPEN or WITHOUT
};

constexpr int NOT_OPEN = -1, WITHOUT = -2;

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

// By the monotonic clock; negative is none.
inline int64_t deadline_of(long nanoseconds) { return nanoseconds < 0 ? FOR_EVER : nanoseconds; }

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void wake_all(Common* common) {
  for (uint32_t i = 0; i < common->counter_count; i++) wake(common->counters()[i].value);
}

// Sequentially consistent, as is what one does that goes to sleep: either it sees the new value, or
// this sees that it sleeps.
inline void advance(Counter& counter, uint32_t value) {
  counter.value.store(value);
  if (counter.sleepers.load()) wake(counter.value);
}

inline void abort(Common* common, const char* reason, long length) {
  uint32_t none = 0;
  if (common->aborted.compare_exchange_strong(none, 1)) {
    common->reason_length = std::min<long>(length, sizeof common->reason);
    memcpy(common->reason, reason, common->reason_length);
    common->aborted.store(2);
  }
  wake_all(common);
}

// Whether a process has ended, its parent told or not, by the files of /proc.
inline bool has_ended(uint32_t pid) {
  char path[32], text[512];
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  FILE* file = fopen(path, "r");
  if (!file) return kill((pid_t)pid, 0) && errno == ESRCH;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  const char* name_end = strrchr(text, ')');
  return name_end && name_end[1] && (name_end[2] == 'Z' || name_end[2] == 'X');
}

// Whether a member's process has ended, although the member has not left.
inline bool is_dead(Session& session, int member) {
  Member& other = session.common->members()[member];
  uint32_t pid = other.pid.load();
  if (!pid || other.has_left.load() || pid == (uint32_t)getpid()) return false;
  int& pidfd = session.pidfds[member];
  bool ended = false;
  if (pidfd == NOT_OPEN) {
    pidfd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (pidfd < 0) {
      ended = errno == ESRCH;
      pidfd = ended ? NOT_OPEN : WITHOUT;  // the kernel is old, or forbids it
    }
  }
  if (pidfd >= 0) {
    pollfd entry{pidfd, POLLIN, 0};
    ended = poll(&entry, 1, 0) == 1;
  } else if (!ended) {
    ended = has_ended(pid);
  }
  return ended && !other.has_left.load();
}

inline long dead_member(Session& session) {
  for (int i = 0; i < (int)session.common->member_count; i++)
    if (i != session.me && is_dead(session, i)) return i;
  return -1;
}

inline long sleep_until(Word& word, uint32_t value, int64_t nanoseconds) {
  timespec time{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  return syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0) ? errno : 0;
}

// Wait until is_ready(counter's value). `member` is the one that advances it. With `may_interrupt`
// a signal ends the wait too, or a second, since a signal may come while the member is awake.
template <class Ready>
long wait(Session& session, Counter& counter, int member, Ready is_ready, int64_t deadline = FOR_EVER,
          bool may_interrupt = false) {
  Common* common = session.common;
  for (int i = 0; i < session.spins; i++) {
    if (is_ready(counter.value.load(std::memory_order_acquire))) return OK;
    pause();
  }
  int64_t began = now(), looked = began;
  for (int64_t time = began; time - began < YIELD_NS && time < deadline; time = now()) {
    if (is_ready(counter.value.load(std::memory_order_acquire))) return OK;
    if (common->aborted.load(std::memory_order_relaxed)) return ABORTED;
    sched_yield();
  }
  for (;;) {
    counter.sleepers.fetch_add(1);
    // In this order: who leaves has advanced its counters before.
    bool has_left = common->members()[member].has_left.load();
    uint32_t value = counter.value.load();
    int64_t time = now(), left = std::min(looked + LOOK_NS, deadline) - time;
    bool ready = is_ready(value), aborted = common->aborted.load();
    int error = 0;
    if (!ready && !aborted && !has_left && left > 0)
      error = (int)sleep_until(counter.value, value, left);
    counter.sleepers.fetch_sub(1);
    if (ready) return OK;
    if (aborted) return ABORTED;
    if (has_left) return GONE - member;
    if (error == EINTR && may_interrupt) return INTERRUPTED;
    time = now();
    if (may_interrupt && time >= began + RETURN_NS) return INTERRUPTED;
    if (time >= deadline) return is_ready(counter.value.load()) ? OK : TIMED_OUT;
    if (time >= looked + LOOK_NS) {
      looked = time;
      long dead = dead_member(session);
      if (dead >= 0 && !is_ready(counter.value.load())) return GONE - dead;
    }
  }
}

inline Session* join(Common* common, long me) {
  Session* session = (Session*)calloc(1, sizeof(Session));
  if (!session) return nullptr;
  session->common = common;
  session->me = (int)me;
  cpu_set_t cores;
  if (!sched_getaffinity(0, sizeof cores, &cores) &&
      CPU_COUNT(&cores) >= (int)common->member_count)
    session->spins = SPINS;
  std::fill_n(session->pidfds, MAX_MEMBERS, NOT_OPEN);
  common->members()[me].pid.store((uint32_t)getpid());
  return session;
}

inline void leave(Session* session) {
  session->common->members()[session->me].has_left.store(1);
  wake_all(session->common);
  for (int pidfd : session->pidfds)
    if (pidfd >= 0) close(pidfd);
  free(session);
}

}  // namespace shared
