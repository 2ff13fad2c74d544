// Forward pass of the decoder on a CPU: paged attention, fused operators, products with packed
// weights.
//
// Compiled once per instruction set (`build.py`) and compared with the torch decoder in tests.
// Templates over the stored type: float, or bfloat16 with sums in fp32.
//
// Shapes in comments: N rows (tokens of a step), E hidden size, H heads, H_kv key-value heads, D
// head size, V vocabulary. "Unit": values of one row per multiplication instruction: 2 neighbours
// in bfloat16, 1 in fp32. Right operands of products are stored unit by unit, 16 columns side by
// side, so that they stream through registers:
//
//   weights  [panel of 64 columns][K / unit][64][unit]     int8: units of 4 where instructions multiply 4 bytes
//   keys     [block][H_kv][D / unit][16 positions][unit]      a score tile is query x block, without a copy
//   values   [block][H_kv][16 positions / unit][D][unit]      an output tile is probabilities x block, without a copy
//   scales   [block][H_kv][16 positions]                      of int8 keys and values
//
// numbers.h, memory.h and team.h are independent of models; tiles.h, products.h and attention.h
// compute; pool.h has the keys and values; decoder.h runs a step. All else is in an unnamed namespace, since library.cpp links
// several compilations of this file.

#include <new>

#include "decoder.h"

extern const Kernels WEIR_KERNELS; // the build names it after its instruction set

const Kernels WEIR_KERNELS = {
    [](const Shape &shape, bool is_bfloat16) -> AnyDecoder * {
        if (is_bfloat16) return new Decoder<Bfloat16>(shape);
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__) || defined(__AVXVNNI__)
        return nullptr; // fp32 gains nothing from these instructions
#else
        return new Decoder<float>(shape);
#endif
    },
    best_of,
    [](uint32_t seed) { piece_order = seed; },
};
