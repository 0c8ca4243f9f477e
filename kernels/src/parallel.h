// Loops over threads of the OpenMP runtime that torch has loaded.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

constexpr int MAX_RUNS = 64;

// Call work(item) for items 0..count-1, each once, on as many threads as OpenMP has been told to use,
// or fewer. Each takes one item after the other: a thread whose core is busy with another program
// takes fewer. in_runs: it begins with items that follow each other, since what it reads does.
template <class Work>
void for_each_item(long count, Work work, int threads = omp_get_max_threads(),
                   bool in_runs = false) {
  if (threads <= 1 || count <= 1) {
    for (long item = 0; item < count; item++) work(item);
    return;
  }
  struct alignas(64) Run {
    std::atomic<long> next;
  } all[MAX_RUNS];
  int runs = in_runs ? std::min(threads, MAX_RUNS) : 1;
  auto start = [=](long run) { return run * count / runs; };
  for (int run = 0; run < runs; run++) all[run].next.store(start(run), std::memory_order_relaxed);
#pragma omp parallel num_threads(threads)
  for (int i = 0; i < runs; i++) {
    int run = (omp_get_thread_num() + i) % runs;
    auto take = [&] { return all[run].next.fetch_add(1, std::memory_order_relaxed); };
    for (long item; (item = take()) < start(run + 1);) work(item);
  }
}

// Memory of a thread that lasts from one call to the next.
template <class T>
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  T* get(size_t count) {
    if (count > count_) {
      free(memory_);
      count_ = count;
      memory_ = (T*)aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  T* memory_ = nullptr;
  size_t count_ = 0;
};
