// Loops over threads of the OpenMP runtime that torch has loaded.
#pragma once

#include <omp.h>

#include <cstdlib>

// Call work(item) for items 0..count-1, each once, on as many threads as OpenMP has been told to use,
// or fewer.
template <class Work>
void for_each_item(long count, Work work, int threads = omp_get_max_threads()) {
  if (threads <= 1 || count <= 1) {
    for (long item = 0; item < count; item++) work(item);
    return;
  }
  // Dynamic: a thread whose core is busy with another program takes fewer items.
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (long item = 0; item < count; item++) work(item);
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
