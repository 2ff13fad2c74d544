// C interface of the library, as declared in loader.py, and choice of the instruction set.
//
// Compiled for the oldest processor of the architecture. It calls code for newer ones only after
// the processor and the operating system have said that they support it.

#include <cstdint>
#include <cstring>

#include "interface.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Level {
    const char *name;
    const Kernels *kernels;
    bool computes_float;
    bool (*is_supported)();
};

#if defined(__x86_64__)

extern const Kernels kernels_avx2, kernels_avx_vnni, kernels_avx512, kernels_avx512_vnni, kernels_avx512_bf16, kernels_amx;

static bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
}

static bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_avx_vnni() {
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

static bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

static bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// The operating system gives the tiles' registers to processes that ask for them.
static bool has_amx() {
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, STATES = 3u << 17;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned a, b, c, d, low, high;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & STATES) == STATES && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

constexpr Level LEVELS[] = {
    // best first
    {"amx", &kernels_amx, false, has_amx},
    {"avx512_bf16", &kernels_avx512_bf16, false, has_avx512_bf16},
    {"avx512_vnni", &kernels_avx512_vnni, false, has_avx512_vnni},
    {"avx512", &kernels_avx512, true, has_avx512},
    {"avx_vnni", &kernels_avx_vnni, false, has_avx_vnni},
    {"avx2", &kernels_avx2, true, has_avx2},
};

#else

extern const Kernels kernels_portable;

constexpr Level LEVELS[] = {{"portable", &kernels_portable, true, [] { return true; }}};

#endif

constexpr int32_t LEVEL_COUNT = sizeof LEVELS / sizeof *LEVELS;

EXPORT int32_t weir_kv_block_tokens() { return BLOCK_TOKENS; }

// Levels are numbered from 0, best first. Name of one; null after the last.
EXPORT const char *weir_level_name(int32_t level) { return level < LEVEL_COUNT ? LEVELS[level].name : nullptr; }

// Whether this machine can run a level's code for the type.
EXPORT int32_t weir_level_computes(int32_t level, int32_t is_bfloat16) {
    return (is_bfloat16 || LEVELS[level].computes_float) && LEVELS[level].is_supported();
}

EXPORT int32_t weir_best_of(int32_t level, const float *values, int64_t count) { // for tests
    return LEVELS[level].kernels->best_of(values, count);
}

// Order in which threads take the pieces of their work, by a seed; 0 for ascending.
EXPORT void weir_shuffle_pieces(int32_t level, uint32_t seed) { // for tests
    LEVELS[level].kernels->shuffle_pieces(seed);
}

// Null without memory. Requires `weir_level_computes`.
EXPORT AnyDecoder *weir_decoder_open(int32_t level, const Shape *shape, int32_t is_bfloat16) try {
    return LEVELS[level].kernels->open(*shape, is_bfloat16);
} catch (...) {
    return nullptr;
}

EXPORT void weir_decoder_close(AnyDecoder *decoder) { delete decoder; }

// Copies its arguments.
EXPORT int32_t weir_decoder_set(
    AnyDecoder *decoder, int64_t layer, int32_t kind, const void *weight, const float *scales, const float *bias
) try {
    decoder->set(layer, kind, weight, scales, bias);
    return 0;
} catch (...) {
    return 1;
}

// Packed parts: see `with_part` for their kinds. Adopted memory is used in place and must outlive
// the decoder.

EXPORT const void *weir_decoder_part(AnyDecoder *decoder, int64_t layer, int32_t kind, int64_t *bytes) {
    return decoder->part(layer, kind, bytes);
}

EXPORT int32_t weir_decoder_adopt(AnyDecoder *decoder, int64_t layer, int32_t kind, const void *memory, int64_t bytes) {
    return decoder->adopt(layer, kind, memory, bytes) ? 0 : 1;
}

EXPORT int32_t weir_decoder_forward(AnyDecoder *decoder, const Step *step) try {
    decoder->forward(*step);
    return 0;
} catch (...) {
    return 1; // only allocation failures can be thrown
}
