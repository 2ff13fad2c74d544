// Forward pass of the decoder on a CPU: paged attention, fused operators, products with packed
// weights.
//
// Compiled on the machine that runs it (`loader.py`), called through a C interface, and compared
// with the torch decoder in tests. Templates over the stored type: float, or bfloat16 with sums in
// fp32.
//
// Shapes in comments: N rows (tokens of a step), E hidden size, H heads, H_kv key-value heads, D
// head size, V vocabulary. "Unit": values of one row per multiplication instruction: 2 neighbours
// in bfloat16, 1 in fp32. Right operands of products are stored unit by unit, 16 columns side by
// side, so that they stream through registers:
//
//   weights  [panel of 64 columns][K / unit][64][unit]
//   keys     [block][H_kv][D / unit][16 positions][unit]      a score tile is query x block, without a copy
//   values   [block][H_kv][16 positions / unit][D][unit]      an output tile is probabilities x block, without a copy
//
// numbers.h, memory.h and team.h are independent of models; products.h and attention.h compute;
// decoder.h runs a step; this file is the C interface. One translation unit: all else is in an
// unnamed namespace.

#include <cstdint>

#include "decoder.h"

extern "C" {

// C interface, as declared in loader.py. `weir_decoder_set` copies its arguments.

int32_t weir_kv_block_tokens() { return BLOCK_TOKENS; }

int32_t weir_best_of(const float *values, int64_t count) { return best_of(values, count); } // for tests

void *weir_decoder_open(const Shape *shape, int32_t is_bfloat16) try {
    if (is_bfloat16) return static_cast<AnyDecoder *>(new Decoder<Bfloat16>(*shape));
    return static_cast<AnyDecoder *>(new Decoder<float>(*shape));
} catch (...) {
    return nullptr;
}

void weir_decoder_close(void *decoder) { delete static_cast<AnyDecoder *>(decoder); }

int32_t weir_decoder_set(
    void *decoder, int64_t layer, int32_t kind, const void *weight, const float *scales, const float *bias
) try {
    static_cast<AnyDecoder *>(decoder)->set(layer, kind, weight, scales, bias);
    return 0;
} catch (...) {
    return 1;
}

void weir_decoder_copy_blocks(void *decoder, const int64_t *pairs, int64_t count) {
    static_cast<AnyDecoder *>(decoder)->copy_blocks(pairs, count);
}

// Packed parts: see `with_part` for their kinds. Adopted memory is used in place and must outlive
// the decoder.

const void *weir_decoder_part(void *decoder, int64_t layer, int32_t kind, int64_t *bytes) {
    return static_cast<AnyDecoder *>(decoder)->part(layer, kind, bytes);
}

int32_t weir_decoder_adopt(void *decoder, int64_t layer, int32_t kind, const void *memory, int64_t bytes) {
    return static_cast<AnyDecoder *>(decoder)->adopt(layer, kind, memory, bytes) ? 0 : 1;
}

int32_t weir_decoder_forward(void *decoder, const Step *step) try {
    static_cast<AnyDecoder *>(decoder)->forward(*step);
    return 0;
} catch (...) {
    return 1; // only allocation failures can be thrown
}
}
