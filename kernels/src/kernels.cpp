// The C interface. Pointers are of contiguous rows; strides count elements. They compute
// in as many threads as OpenMP has been told in the calling thread (torch.set_num_threads).
#include <cstdint>
#include <utility>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "codes.h"
#include "codes_linear.h"
#include "collectives.h"
#include "experts.h"
#include "gemm.h"
#include "lora.h"
#include "rows.h"
#include "suffix_tree.h"
#include "vocabulary.h"

// An argument from a word of a recorded call.
template <class A>
A from_word(int64_t word) {
  if constexpr (std::is_same_v<A, float>) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return (A)word;
  }
}

template <class... A, size_t... I>
void call(void (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
  function(from_word<A>(words[I])...);
}

template <class... A>
void call(void (*function)(A...), const int64_t* words) {
  call(function, words, std::index_sequence_for<A...>{});
}

// Call a function with an element of a cache of keys and values of T: 0, T itself; codes of 8 bits,
// 1 is int8, 2 is fp8.
template <class T, class Function>
long with_stored(long stored, Function function) {
  if (stored == 1) return function(kv_codes::Int8{});
  if (stored == 2) return function(kv_codes::Float8{});
  return function(T{});
}

// The function hp_call_X calls hp_X with recorded arguments.
#define RECORDED(NAME) \
  void hp_call_##NAME(const int64_t* words) { call(hp_##NAME, words); }

using codes::integers::NONE;
using codes::integers::TO_BYTES;
using codes::integers::TO_WORDS;

constexpr long RECORD = 18;  // words of a recorded call: a function hp_call_X, then the arguments

#pragma GCC visibility push(default)
extern "C" {

// Which of the paths the processor can run; the library that is asked is the plain one.
int hp_supports(const char* path) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(path, "avx2")) return avx2;
  if (!strcmp(path, "avx512")) return avx512;
  bool bf16s =
      avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!strcmp(path, "avx512_bf16")) return bf16s;
#if defined(__linux__)
  // Linux has a process ask for the registers of tiles.
  unsigned a, b, c, d;
  // Of EDX: AMX-BF16, AMX-TILE and AMX-INT8.
  constexpr unsigned TILES = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  if (!strcmp(path, "amx_bf16"))
    return bf16s && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES) == TILES &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
#endif
  return !strcmp(path, "plain");
}

#define OF_TYPE(NAME, T)                                                                          \
  long hp_packed_size_##NAME(long columns, long depth) {                                          \
    return (columns + PANEL - 1) / PANEL * (long)gemm::panel_size<T>(gemm::padded_depth<T>(depth)); \
  }                                                                                               \
  void hp_pack_##NAME(const T* from, T* to, long columns, long depth) {                           \
    gemm::pack(from, to, columns, depth);                                                         \
  }                                                                                               \
  void hp_linear_##NAME(const T* x, long x_stride, const T* w, const T* bias, T* y,               \
                        long y_stride, long rows, long columns, long depth) {                     \
    gemm::linear(x, x_stride, w, bias, y, y_stride, rows, columns, depth);                        \
  }                                                                                               \
  void hp_linear_codes_##NAME(const T* x, long x_stride, const uint8_t* w, const T* bias, T* y,   \
                              long y_stride, long rows, long columns, long depth) {               \
    codes::linear<NONE>(x, x_stride, w, bias, y, y_stride, rows, columns, depth);                 \
  }                                                                                               \
  void hp_linear_int8_##NAME(const T* x, long x_stride, const uint8_t* w, const T* bias, T* y,    \
                             long y_stride, long rows, long columns, long depth) {                \
    codes::linear<TO_BYTES>(x, x_stride, w, bias, y, y_stride, rows, columns, depth);             \
  }                                                                                               \
  void hp_linear_int16_##NAME(const T* x, long x_stride, const uint8_t* w, const T* bias, T* y,   \
                              long y_stride, long rows, long columns, long depth) {               \
    codes::linear<TO_WORDS>(x, x_stride, w, bias, y, y_stride, rows, columns, depth);             \
  }                                                                                               \
  void hp_gather_codes_##NAME(const uint8_t* w, const int64_t* ids, long count, T* out) {         \
    codes::gather(w, ids, count, out);                                                            \
  }                                                                                               \
  void hp_rms_norm_##NAME(const T* x, long x_stride, long parts, long part_stride, T* residual,   \
                          long residual_stride, const T* weight, T* y, long y_stride,             \
                          long count, long width, float eps) {                                    \
    rows::rms_norm(x, x_stride, parts, part_stride, residual, residual_stride, weight, y,         \
                   y_stride, count, width, eps);                                                  \
  }                                                                                               \
  void hp_rms_norm_float_##NAME(const T* x, long x_stride, long parts, long part_stride,          \
                                T* residual, long residual_stride, const float* weight, T* y,     \
                                long y_stride, long count, long width, float eps) {               \
    rows::rms_norm(x, x_stride, parts, part_stride, residual, residual_stride, weight, y,         \
                   y_stride, count, width, eps);                                                  \
  }                                                                                               \
  void hp_rotate_##NAME(T* x, long row_stride, long head_stride, const float* angles,             \
                        long count, long heads, long head_size) {                                 \
    rows::rotate(x, row_stride, head_stride, angles, count, heads, head_size);                    \
  }                                                                                               \
  void hp_silu_and_mul_##NAME(const T* x, long x_stride, T* y, long y_stride, long count,         \
                              long width) {                                                       \
    rows::activate_and_mul<rows::SILU>(x, x_stride, y, y_stride, count, width);                   \
  }                                                                                               \
  void hp_gelu_and_mul_##NAME(const T* x, long x_stride, T* y, long y_stride, long count,         \
                              long width) {                                                       \
    rows::activate_and_mul<rows::GELU_TANH>(x, x_stride, y, y_stride, count, width);              \
  }                                                                                               \
  void hp_scale_add_##NAME(T* x, long x_stride, float factor, const T* delta, long delta_stride,    \
                           long count, long width) {                                              \
    rows::scale_add(x, x_stride, factor, delta, delta_stride, count, width);                      \
  }                                                                                               \
  void hp_experts_##NAME(const T* x, long x_stride, const int64_t* chosen, const float* weights,  \
                         long rows, long per_row, const T* const* gate_up, const T* const* down,  \
                         long experts, T* y, long hidden, long width) {                           \
    experts::Sizes sizes{rows, per_row, experts, hidden, width};                                  \
    experts::run(x, x_stride, chosen, weights, sizes, gate_up, down, y);                          \
  }                                                                                               \
  void hp_add_lora_##NAME(T* y, long y_stride, const T* x, long x_stride, const T* a,             \
      long a_stride, long a_row_stride, const T* b, long b_stride, long b_row_stride,             \
      const int64_t* adapters, const float* scales, long rows, long count, long rank, long depth, \
                          long columns) {                                                         \
    lora::Adapters<T> all{a, a_stride, a_row_stride, b, b_stride, b_row_stride, scales, count,    \
                          rank, depth, columns};                                                  \
    lora::add(y, y_stride, x, x_stride, all, adapters, rows);                                     \
  }                                                                                               \
  void hp_add_lora_float_##NAME(float* y, long y_stride, const T* x, long x_stride, const T* a,   \
      long a_stride, long a_row_stride, const T* b, long b_stride, long b_row_stride,             \
      const int64_t* adapters, const float* scales, long rows, long count, long rank, long depth, \
                                long columns) {                                                   \
    lora::Adapters<T> all{a, a_stride, a_row_stride, b, b_stride, b_row_stride, scales, count,    \
                          rank, depth, columns};                                                  \
    lora::add(y, y_stride, x, x_stride, all, adapters, rows);                                     \
  }                                                                                               \
  long hp_attention_block_##NAME(long stored, long head_size, long kv_heads, long block_size) {   \
    return with_stored<T>(stored, [=](auto s) {                                                   \
      return attention::block_size<T, decltype(s)>(head_size, kv_heads, block_size);              \
    });                                                                                           \
  }                                                                                               \
  void hp_attend_##NAME(const T* q, long q_stride, const T* k, long k_stride, const T* v,         \
                        long v_stride, T* out, long stored, void* cache, const void* const* plan, \
                        long head_size, float scale, float softcap, const float* sinks) {         \
    with_stored<T>(stored, [=](auto s) {                                                          \
      attention::attend(q, q_stride, k, k_stride, v, v_stride, out, (decltype(s)*)cache,          \
                        (const attention::Plan*)*plan, head_size, scale, softcap, sinks);         \
      return 0L;                                                                                  \
    });                                                                                           \
  }                                                                                               \
  RECORDED(linear_##NAME)                                                                         \
  RECORDED(linear_codes_##NAME)                                                                   \
  RECORDED(linear_int8_##NAME)                                                                    \
  RECORDED(linear_int16_##NAME)                                                                   \
  RECORDED(gather_codes_##NAME)                                                                   \
  RECORDED(rms_norm_##NAME)                                                                       \
  RECORDED(rms_norm_float_##NAME)                                                                 \
  RECORDED(rotate_##NAME)                                                                         \
  RECORDED(experts_##NAME)                                                                        \
  RECORDED(add_lora_##NAME)                                                                       \
  RECORDED(add_lora_float_##NAME)                                                                 \
  RECORDED(silu_and_mul_##NAME)                                                                   \
  RECORDED(gelu_and_mul_##NAME)                                                                   \
  RECORDED(scale_add_##NAME)                                                                      \
  RECORDED(attend_##NAME)

OF_TYPE(bfloat16, bf16)
OF_TYPE(float32, float)

// Write the plan of an attention step to `to`, if it has `capacity` bytes; return how many it needs.
long hp_attention_plan(const int64_t* query_starts, const int64_t* seq_lens, long seqs,
                       const int64_t* table, long table_stride, const int64_t* slots,
                       const int64_t* sees, long block_size, long window, long heads,
                       long kv_heads, void* to, long capacity) {
  attention::Plan plan{table, slots, table_stride, block_size, window, heads, kv_heads};
  attention::Planner planner(query_starts, seq_lens, seqs, sees, plan, omp_get_max_threads());
  if ((long)planner.size() <= capacity) planner.write(to);
  return (long)planner.size();
}

void hp_choose(const float* x, long stride, const uint8_t* greedy, const int64_t* seeds,
               const int64_t* positions, int64_t* tokens, long rows, long width) {
  vocabulary::choose(x, stride, greedy, seeds, positions, tokens, rows, width);
}
void hp_keep_top_k(float* x, long stride, const int64_t* k, long rows, long width) {
  vocabulary::keep_top_k(x, stride, k, rows, width);
}
void hp_keep_top_p(float* x, long stride, const float* p, long rows, long width) {
  vocabulary::keep_top_p(x, stride, p, rows, width);
}
void hp_keep_tokens(float* x, long stride, const int64_t* rows, const uint32_t* words,
                    long word_stride, long count, long width) {
  vocabulary::keep_tokens(x, stride, rows, words, word_stride, count, width);
}
void hp_keep_near(float* x, long stride, const float* distance, long rows, long width) {
  vocabulary::keep_near(x, stride, distance, rows, width);
}

// Logits in float32.
void hp_logits_bfloat16(const bf16* x, long x_stride, const bf16* w, const bf16* bias, float* y,
                        long y_stride, long rows, long columns, long depth) {
  gemm::linear(x, x_stride, w, bias, y, y_stride, rows, columns, depth);
}
RECORDED(logits_bfloat16)
void hp_logits_codes_bfloat16(const bf16* x, long x_stride, const uint8_t* w, const bf16* bias,
                              float* y, long y_stride, long rows, long columns, long depth) {
  codes::linear<NONE>(x, x_stride, w, bias, y, y_stride, rows, columns, depth);
}
RECORDED(logits_codes_bfloat16)
void hp_logits_int8_bfloat16(const bf16* x, long x_stride, const uint8_t* w, const bf16* bias,
                             float* y, long y_stride, long rows, long columns, long depth) {
  codes::linear<TO_BYTES>(x, x_stride, w, bias, y, y_stride, rows, columns, depth);
}
RECORDED(logits_int8_bfloat16)
void hp_logits_int16_bfloat16(const bf16* x, long x_stride, const uint8_t* w, const bf16* bias,
                              float* y, long y_stride, long rows, long columns, long depth) {
  codes::linear<TO_WORDS>(x, x_stride, w, bias, y, y_stride, rows, columns, depth);
}
RECORDED(logits_int16_bfloat16)

// Low-bit codes: bytes of a packed matrix of some forms, and the packing of form `index`.
long hp_codes_size(const int64_t* forms, long count, long depth) {
  return codes::plan((const codes::Form*)forms, count, depth);
}
void hp_pack_codes(const int64_t* forms, long count, long depth, long index, const uint8_t* codes,
                   const void* scales, const void* outer_scales, const void* offsets,
                   const void* outer_offsets, const float* values, uint8_t* to) {
  codes::Source source{codes, scales, outer_scales, offsets, outer_offsets, values};
  codes::pack((const codes::Form*)forms, count, depth, index, source, to);
}
// Whether they are a packed matrix, by its header.
long hp_check_codes(const uint8_t* packed, long bytes, long rows, long depth) {
  return codes::is_packed(packed, bytes, rows, depth);
}

// out [count] = table[ids], of rows of any type.
void hp_gather_rows(const char* table, long row_bytes, const int64_t* ids, long count, char* out) {
  for_each_item((count + 63) / 64, [=](long part) {
    for (long i = part * 64; i < std::min(count, part * 64 + 64); i++)
      memcpy(out + i * row_bytes, table + ids[i] * row_bytes, row_bytes);
  });
}
RECORDED(gather_rows)

// Shared memory. `memory` is all zeros when it is created. Calls return a number >= 0, or what
// waiting.h says.
void hp_shared_abort(void* memory, const char* reason, long length) {
  shared::abort((shared::Common*)memory, reason, length);
}
// Return the length of the reason, -1 if there was no abort.
long hp_shared_reason(void* memory, char* to) {
  shared::Common* common = (shared::Common*)memory;
  for (int i = 0; common->aborted.load() == 1 && i < 1000; i++) sched_yield();
  if (!common->aborted.load()) return -1;
  memcpy(to, common->reason, sizeof common->reason);
  return common->reason_length;
}
shared::Session* hp_shared_join(void* memory, long member) {
  return shared::join((shared::Common*)memory, member);
}
// Return a member whose process has ended, -1 if there is none.
long hp_shared_dead_member(shared::Session* session) { return shared::dead_member(*session); }
void hp_shared_notes(const shared::Session* session, uint64_t* to) {
  memcpy(to, session->notes, sizeof session->notes);
}
void hp_shared_leave(shared::Session* session) { shared::leave(session); }

long hp_group_bytes(long ranks, long slot, long ring) {
  return (long)shared::Group::bytes(ranks, slot, ring);
}
void hp_group_create(void* memory, long ranks, long slot, long ring) {
  shared::Group::create((shared::Common*)memory, ranks, slot, ring);
}
long hp_group_all_reduce(shared::Session* session, char* x, long bytes, long type) {
  return shared::Group(*session).all_reduce(x, bytes, type);
}
long hp_group_all_gather(shared::Session* session, const char* x, char* to, long bytes, long type) {
  return shared::Group(*session).all_gather(x, to, bytes, type);
}
long hp_group_all_to_all(shared::Session* session, const char* x, char* to, long row, long type) {
  return shared::Group(*session).all_to_all(x, to, row, type);
}
long hp_group_broadcast(shared::Session* session, char* x, long bytes, long type, long source) {
  return shared::Group(*session).broadcast(x, bytes, type, (int)source);
}
long hp_group_send(shared::Session* session, const char* x, long bytes, long type, long to) {
  return shared::Group(*session).send(x, bytes, type, (int)to);
}
long hp_group_recv(shared::Session* session, char* x, long bytes, long type, long from) {
  return shared::Group(*session).recv(x, bytes, type, (int)from);
}

long hp_broadcast_ring_bytes(long readers, long size) {
  return (long)shared::broadcast_ring::bytes(readers, size);
}
void hp_broadcast_ring_create(void* memory, long readers, long size) {
  shared::broadcast_ring::create((shared::Common*)memory, readers, size);
}
long hp_broadcast_ring_write(shared::Session* session, const char* from, long count,
                             long deadline) {
  return shared::broadcast_ring::write(*session, from, count, deadline);
}
long hp_broadcast_ring_read(shared::Session* session, char* to, long capacity, long deadline) {
  return shared::broadcast_ring::read(*session, to, capacity, deadline);
}

// Trees of suffixes. Calls that allocate return -1, or no tree, if there is no memory.
suffix::Tree* hp_suffix_tree_create(long depth) {
  suffix::Tree* tree = nullptr;
  suffix::allocates([&] { return (tree = new suffix::Tree(depth)), 0l; });
  return tree;
}
void hp_suffix_tree_free(suffix::Tree* tree) { delete tree; }
long hp_suffix_tree_nodes(const suffix::Tree* tree) { return tree->nodes(); }
long hp_suffix_tree_bytes(const suffix::Tree* tree) { return tree->bytes(); }
// Return the number of the sequence.
long hp_suffix_tree_begin(suffix::Tree* tree) {
  return suffix::allocates([=] { return tree->begin(); });
}
long hp_suffix_tree_append(suffix::Tree* tree, long number, const int32_t* tokens, long count) {
  return suffix::allocates([=] { return tree->append((uint32_t)number, tokens, count), 0l; });
}
void hp_suffix_tree_remove_oldest(suffix::Tree* tree) { tree->remove_oldest(); }
// Return the number of drafts.
long hp_suffix_tree_draft(suffix::Tree* tree, const int32_t* pattern, long count, long limit,
                          double factor, long offset, double probability, int32_t* drafts,
                          double* score) {
  suffix::Extent extent{limit, offset, factor, probability};
  return suffix::allocates([&] { return tree->draft(pattern, count, extent, drafts, score); });
}

// Repeat recorded calls.
void hp_replay(const int64_t* calls, long count) {
  for (long i = 0; i < count; i++) {
    const int64_t* words = calls + i * RECORD;
    ((void (*)(const int64_t*))words[0])(words + 1);
  }
}
}
