// The decoder's forward pass for one CPU: paged attention, fused small operators, and matrix products over packed weights.
//
// Compiled on the machine that runs it (`loader.py`), called through a plain C interface, and checked against the torch
// decoder in the tests. Everything is a template over the stored type: float, or bfloat16 with sums in fp32.
//
// Shapes in the comments: N rows (tokens of a step), E hidden size, H heads, H_kv key-value heads, D head size, V vocabulary.
// "Unit": values that one multiplication instruction takes from one row: 2 neighbours in bfloat16, 1 in fp32. Everything that
// stands on the right of a product is stored unit by unit, 16 columns side by side, so that it streams through registers:
//
//   weights  [panel of 64 columns][K / unit][64][unit]
//   keys     [block][H_kv][D / unit][16 positions][unit]      a score tile is query x block, as it lies
//   values   [block][H_kv][16 positions / unit][D][unit]      an output tile is probabilities x block, as it lies

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using Vector = float __attribute__((vector_size(64)));
using IntVector = int32_t __attribute__((vector_size(64)));
using ShortVector = uint16_t __attribute__((vector_size(32)));
using ByteVector = int8_t __attribute__((vector_size(16)));

constexpr int LANES = 16;        // floats in a vector: one AVX-512 register, or as many smaller ones as it takes
constexpr int BLOCK_TOKENS = 16; // positions of a KV block; as in kv_cache.py, checked at load
constexpr int PANEL = 64;        // weight columns that lie together
constexpr int CHUNK_KEYS = 512;  // keys whose scores are held at once: 6 rows of them fit the first-level cache
constexpr int STREAM_KEYS = 128; // the same where blocks come from memory: short, since a sequence's first chunk comes unannounced
constexpr int ROW_CHUNK = 192;   // rows of one matrix task: few enough that two cores share a prefill evenly
constexpr size_t HUGE_PAGE_BYTES = 2 << 20;
constexpr int64_t COPIED_ROWS = 1024;    // of the embedding, by one task
constexpr float HIDDEN_SCORE = -1e30f;   // finite, so that a row without any visible key yields no NaN before one comes
constexpr int SPINS_BEFORE_YIELD = 4000; // some 20 us: longer than a well-balanced phase differs between cores
constexpr int YIELDS_BEFORE_SLEEP = 200; // then workers sleep; the pause between two decode steps is shorter than that

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4; // 24 sums, 4 weights and a broadcast fill the 32 registers
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2;
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

struct Bfloat16 {
    uint16_t bits;
};

template <class T> constexpr int UNIT = 1;
template <> constexpr int UNIT<Bfloat16> = 2;

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- numbers ----

INLINE Vector load(const float *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE Vector load(const Bfloat16 *from) {
    ShortVector bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Vector)(__builtin_convertvector(bits, IntVector) << 16);
}

INLINE void store(float *to, Vector value) { std::memcpy(to, &value, sizeof value); }

INLINE void store(Bfloat16 *to, Vector value) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    IntVector bits = (IntVector)value;
    bits += 0x7fff + ((bits >> 16) & 1); // to nearest, ties to even; what is not finite is caught by the caller's check
    ShortVector high = __builtin_convertvector((bits >> 16) & 0xffff, ShortVector);
    std::memcpy(to, &high, sizeof high);
#endif
}

INLINE float to_float(float value) { return value; }

INLINE float to_float(Bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE Vector splat(float value) { return value - Vector{}; }

INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Lane i of the result is lane i + shift of the value: a step of folding a vector in halves.
template <int SHIFT> INLINE Vector lanes_from(Vector value) {
    constexpr int S = SHIFT;
    const IntVector from = {S, S + 1, S + 2, S + 3, S + 4, S + 5, S + 6, S + 7,
                            S, S + 1, S + 2, S + 3, S + 4, S + 5, S + 6, S + 7};
    return __builtin_shuffle(value, from & 15);
}

INLINE float sum_of(Vector value) {
    value += lanes_from<8>(value);
    value += lanes_from<4>(value);
    value += lanes_from<2>(value);
    return value[0] + value[1];
}

INLINE float largest_of(Vector value) {
    value = larger(value, lanes_from<8>(value));
    value = larger(value, lanes_from<4>(value));
    value = larger(value, lanes_from<2>(value));
    return std::max(value[0], value[1]);
}

// Index of the largest of `count` values, the first of equal ones; -1 if one of them is not finite.
inline int32_t best_of(const float *values, int64_t count) {
    constexpr int32_t EXPONENT = 0x7f800000; // all of it set: infinite, or not a number
    const IntVector lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vector largest = splat(-std::numeric_limits<float>::infinity());
    IntVector where = {}, broken = {};
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) {
        const Vector value = load(values + index);
        const IntVector is_larger = value > largest;
        broken |= ((IntVector)value & EXPONENT) == EXPONENT;
        largest = is_larger ? value : largest;
        where = is_larger ? lanes + int32_t(index) : where;
    }
    bool finite = true;
    int32_t best = 0;
    float best_value = -std::numeric_limits<float>::infinity();
    for (int lane = 0; lane < LANES && index > 0; ++lane) {
        finite &= broken[lane] == 0;
        if (largest[lane] > best_value || (largest[lane] == best_value && where[lane] < best)) {
            best = where[lane];
            best_value = largest[lane];
        }
    }
    for (; index < count; ++index) {
        finite &= std::isfinite(values[index]);
        if (values[index] > best_value) best = int32_t(index), best_value = values[index];
    }
    return finite ? best : -1;
}

// e^x for x <= 88: 2^n times a polynomial of degree 6 on half an octave to each side; relative error below 2e-7.
INLINE Vector exponential(Vector x) {
    x = larger(x, splat(-87.0f));
    Vector scaled = x * 1.44269504f;
    IntVector n = __builtin_convertvector(scaled + (scaled > splat(0) ? splat(0.5f) : splat(-0.5f)), IntVector);
    Vector whole = __builtin_convertvector(n, Vector);
    Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; // ln 2 in two parts keeps the low bits
    Vector series = splat(1.0f / 720);
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    return series * (Vector)((n + 127) << 23);
}

// ---- memory ----

// Zeroed memory that the system gives page by page as it is touched.
template <class T> class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t count) : count_(count) {
        const size_t bytes = std::max<int64_t>(count, 1) * sizeof(T);
        void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T *>(memory);
        bytes_ = bytes;
    }
    Buffer(Buffer &&other) noexcept { *this = std::move(other); }
    Buffer &operator=(Buffer &&other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Buffer() {
        if (data_) munmap(data_, bytes_);
    }
    T *data() const { return data_; }
    int64_t count() const { return count_; }
    void reserve(int64_t count) {
        if (count > count_) *this = Buffer(count);
    }
    // Lets the system join the pages into huge ones in its own time: streaming gets some 3 % faster. Asking before they are filled
    // would make it clear huge pages at once, which took 5 times as long on a virtual machine.
    void join_pages() const {
        if (bytes_ >= HUGE_PAGE_BYTES) madvise(data_, bytes_, MADV_HUGEPAGE);
    }

  private:
    T *data_ = nullptr;
    int64_t count_ = 0;
    size_t bytes_ = 0;
};

// ---- threads ----

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Threads that run one function together and meet at barriers. Own ones rather than OpenMP's: torch's pool would wake and spin
// beside them, and these give their core away as soon as others want it, since the API's process shares the machine.
class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
    }
    ~Team() {
        stopping_ = true;
        run([](int) {});
        for (auto &thread : threads_) thread.join();
    }
    int size() const { return size_; }

    // Calls function(index) on every thread, the caller's being 0; returns when all are done.
    template <class F> void run(const F &function) {
        if (size_ == 1) return function(0);
        context_ = &function;
        call_ = [](const void *context, int index) { (*static_cast<const F *>(context))(index); };
        {
            std::lock_guard<std::mutex> guard(lock_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        function(0);
        barrier();
    }

    void barrier() {
        if (size_ == 1) return;
        unsigned round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
            spins < SPINS_BEFORE_YIELD ? relax() : (void)sched_yield();
    }

    std::atomic<int64_t> &counter(unsigned phase) { return counters_[phase % 4].value; }

  private:
    void serve(int index) {
        unsigned seen = 0;
        for (bool is_last = false; !is_last;) {
            wait_for_work(seen);
            ++seen;
            is_last = stopping_; // read before the barrier: behind it the flag may be that of the next run
            call_(context_, index);
            barrier();
        }
    }

    void wait_for_work(unsigned seen) {
        for (int spins = 0; spins < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP; ++spins) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
            spins < SPINS_BEFORE_YIELD ? relax() : (void)sched_yield();
        }
        std::unique_lock<std::mutex> guard(lock_);
        wake_.wait(guard, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }

    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    int size_;
    std::vector<std::thread> threads_;
    std::mutex lock_;
    std::condition_variable wake_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<unsigned> generation_{0};
    alignas(64) std::atomic<unsigned> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    Counter counters_[4];
    const void *context_ = nullptr;
    void (*call_)(const void *, int) = nullptr;
};

// One thread's place in a team, inside `Team::run`. Every thread makes the same calls in the same order.
class Worker {
  public:
    Worker(Team &team, int index) : team_(team), index_(index) {}
    int team_size() const { return team_.size(); }

    // body(i) for all i below count, each on whichever thread is free; returns when all are done. The counter of a phase is
    // reset behind its barrier: it is used again four phases later, which nobody reaches before thread 0 has been here.
    template <class F> void each(int64_t count, const F &body) {
        std::atomic<int64_t> &next = team_.counter(phase_);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
        team_.barrier();
        if (index_ == 0) next.store(0, std::memory_order_relaxed);
        ++phase_;
    }

  private:
    Team &team_;
    int index_;
    unsigned phase_ = 0;
};

// ---- products ----

INLINE void multiply_add(Vector &sum, const float *left, Vector right) { sum += *left * right; }

// Two neighbours of a row times two neighbours of each of 16 columns.
INLINE void multiply_add(Vector &sum, const Bfloat16 *left, Vector right) {
    uint32_t pair;
    std::memcpy(&pair, left, sizeof pair);
#if defined(__AVX512BF16__)
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(pair)), (__m512bh)right);
#else
    IntVector bits = (IntVector)right;
    sum += to_float(Bfloat16{uint16_t(pair)}) * (Vector)(bits << 16);
    sum += to_float(Bfloat16{uint16_t(pair >> 16)}) * (Vector)(bits & int32_t(0xffff0000));
#endif
}

INLINE Vector load_units(const void *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Lines of memory that a product touches on its way, one at each of `begins` per step, so that they have come when they are needed.
template <int COUNT> struct Ahead {
    const void *begins[COUNT];
    INLINE void touch(int64_t step) const {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) __builtin_prefetch(static_cast<const char *>(begins[i]) + step * 64, 0, 2);
    }
};
template <> struct Ahead<0> {
    INLINE void touch(int64_t) const {}
};

// sums[r][c] += left row r x right columns c, over `steps` units. Rows lie `left_stride` apart; vector c begins at right[c] and
// goes on every `right_stride`.
template <class T, int R, int C, int A = 0> INLINE void multiply(
    Vector (&sums)[R][C], const T *left, int64_t left_stride, const T *const (&right)[C], int64_t right_stride, int64_t steps,
    const Ahead<A> &ahead = {}
) {
    for (int64_t step = 0; step < steps; ++step) {
        Vector columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) columns[c] = load_units(right[c] + step * right_stride);
        ahead.touch(step);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) multiply_add(sums[r][c], left + r * left_stride + step * UNIT<T>, columns[c]);
        }
    }
}

// Calls function.template operator()<count>() for a count from 1 to MOST that is known only now.
template <int MOST, class F> INLINE void with_count(int count, const F &function) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, function);
    function.template operator()<MOST>();
}

// A linear layer's weights, packed. Either `packed`, or `quantized` with one scale per column.
template <class T> struct Linear {
    Buffer<T> packed;
    Buffer<int8_t> quantized;
    Buffer<float> scales;
    Buffer<float> bias; // empty if there is none
    int64_t columns = 0, inner = 0;

    int64_t panel_count() const { return round_up(columns, PANEL) / PANEL; }
    int64_t panel_size() const { return inner * PANEL; }
};

// Where in its panel the weight of a column and an inner index lies.
template <class T> int64_t packed_index(int64_t column, int64_t inner) {
    return (inner / UNIT<T> * PANEL + column % PANEL) * UNIT<T> + inner % UNIT<T>;
}

template <class T> struct Scratch {
    Buffer<T> panel;         // one panel of int8 weights, widened
    Buffer<float> scores;    // [TILE_ROWS][CHUNK_KEYS]
    Buffer<T> probabilities; // [TILE_ROWS][CHUNK_KEYS]
    Buffer<float> attended;  // [TILE_ROWS][D]
};

template <class T> INLINE const T *widened(const Linear<T> &linear, int64_t panel, Scratch<T> &scratch) {
    if (linear.packed.data()) return linear.packed.data() + panel * linear.panel_size();
    const int8_t *from = linear.quantized.data() + panel * linear.panel_size();
    T *to = scratch.panel.data();
    for (int64_t index = 0; index < linear.panel_size(); index += LANES) {
        ByteVector bytes;
        std::memcpy(&bytes, from + index, sizeof bytes);
        store(to + index, __builtin_convertvector(bytes, Vector));
    }
    return to;
}

// keep(row, first column, sums) for each row and each TILE_VECTORS vectors of columns of left (rows, K) x weights, bias included.
template <class T, class Keep> void linear_product(
    Worker &worker, const T *left, int64_t left_stride, int64_t rows, const Linear<T> &linear, Scratch<T> *scratches, int index,
    const Keep &keep
) {
    const int64_t row_chunks = std::max<int64_t>(1, (rows + ROW_CHUNK / 2) / ROW_CHUNK);
    const int64_t row_chunk = round_up((rows + row_chunks - 1) / row_chunks, TILE_ROWS);
    const int64_t steps = linear.inner / UNIT<T>;
    const float *scales = linear.scales.data(), *bias = linear.bias.data();
    worker.each(linear.panel_count() * row_chunks, [&](int64_t task) {
        const int64_t panel = task / row_chunks, first_row = task % row_chunks * row_chunk;
        const int64_t end_row = std::min(rows, first_row + row_chunk);
        const T *weights = widened(linear, panel, scratches[index]);
        const int64_t later = std::min(panel + worker.team_size(), linear.panel_count() - 1);
        const bool is_last_chunk = task % row_chunks == row_chunks - 1;
        const bool reads_ahead = linear.packed.data() && is_last_chunk && later > panel;
        const char *ahead = reinterpret_cast<const char *>(linear.packed.data() + later * linear.panel_size());
        const int64_t ahead_bytes = linear.panel_size() * int64_t(sizeof(T));
        int64_t ahead_offset = 0;
        for (int64_t row = first_row; row < end_row; row += TILE_ROWS) {
            for (int64_t vector = 0; vector < PANEL / LANES; vector += TILE_VECTORS) {
                const bool reads = reads_ahead && ahead_offset + steps * 64 <= ahead_bytes;
                const char *line = reads ? ahead + ahead_offset : nullptr;
                ahead_offset += steps * 64;
                with_count<TILE_ROWS>(int(std::min<int64_t>(TILE_ROWS, end_row - row)), [&]<int R>() INLINE_LAMBDA {
                    const T *columns[TILE_VECTORS];
                    Vector sums[R][TILE_VECTORS] = {};
                    for (int c = 0; c < TILE_VECTORS; ++c) columns[c] = weights + (vector + c) * LANES * UNIT<T>;
                    const T *rows_left = left + row * left_stride;
                    if (line) // the next panel is on its way from memory while this one is multiplied
                        multiply(sums, rows_left, left_stride, columns, PANEL * UNIT<T>, steps, Ahead<1>{{line}});
                    else
                        multiply(sums, rows_left, left_stride, columns, PANEL * UNIT<T>, steps);
                    const int64_t column = panel * PANEL + vector * LANES;
                    for (int r = 0; r < R; ++r) {
                        for (int c = 0; c < TILE_VECTORS; ++c) {
                            if (scales) sums[r][c] *= load(scales + column + c * LANES);
                            if (bias) sums[r][c] += load(bias + column + c * LANES);
                        }
                        keep(row + r, column, sums[r]);
                    }
                });
            }
        }
    });
}

// ---- attention ----

// One KV head of one layer's pool, seen from a sequence's block table.
template <class T> struct PagedHead {
    const T *keys, *values; // of block 0
    int64_t block_stride;   // values between the same head of two blocks
    const int32_t *table;
    const T *key_block(int64_t index) const { return keys + table[index] * block_stride; }
    const T *value_block(int64_t index) const { return values + table[index] * block_stride; }
};

// Blocks `begin` to `end` of a sequence, whose keys will be read.
template <class T> struct KeyRun {
    PagedHead<T> head;
    int64_t begin, end;
};

// Attention of R query rows over the positions begins[r] to ends[r] (exclusive) of one head, in chunks of keys with a running
// maximum and sum, as in Milakov and Gimelshein 2018. queries and out: rows of D values. STREAMS: the blocks come from memory, and
// nobody has read them just before. Then every product asks for what a later one reads: that of queries and keys for the chunk's
// values, that of probabilities and values for the next chunk's keys, so that memory has something to do all the time; `then` is
// what this thread will read after these keys.
template <class T, int R, bool STREAMS> void attend(
    const T *queries, int64_t query_stride, const int64_t *begins, const int64_t *ends, const PagedHead<T> &head,
    int64_t head_dim, float scale, T *out, int64_t out_stride, Scratch<T> &scratch, const KeyRun<T> &then
) {
    constexpr int64_t U = UNIT<T>, CHUNK_BLOCKS = (STREAMS ? STREAM_KEYS : CHUNK_KEYS) / BLOCK_TOKENS;
    static_assert(CHUNK_BLOCKS % TILE_VECTORS == 0);
    const IntVector lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t first_block = *std::min_element(begins, begins + R) / BLOCK_TOKENS;
    const int64_t latest_begin = *std::max_element(begins, begins + R);
    const int64_t earliest_end = *std::min_element(ends, ends + R);
    const int64_t block_end = (*std::max_element(ends, ends + R) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    float *scores = scratch.scores.data(), *attended = scratch.attended.data();
    T *probabilities = scratch.probabilities.data();
    float largest[R], total[R];
    std::fill_n(largest, R, HIDDEN_SCORE);
    std::fill_n(total, R, 0.0f);
    std::memset(attended, 0, R * head_dim * sizeof(float));

    for (int64_t chunk = first_block; chunk < block_end; chunk += CHUNK_BLOCKS) {
        const int64_t block_count = std::min(CHUNK_BLOCKS, block_end - chunk);
        const bool is_last_chunk = chunk + block_count == block_end;
        const KeyRun<T> upcoming = is_last_chunk ? then : KeyRun<T>{head, chunk + block_count, block_end};
        Vector chunk_largest[R];
        for (int r = 0; r < R; ++r) chunk_largest[r] = splat(HIDDEN_SCORE);
        for (int64_t block = 0; block < block_count; block += TILE_VECTORS) {
            const T *columns[TILE_VECTORS];
            for (int c = 0; c < TILE_VECTORS; ++c) // a short last tile repeats its last block, and keeps nothing of it
                columns[c] = head.key_block(chunk + std::min(block + c, block_count - 1));
            Vector sums[R][TILE_VECTORS] = {};
            if constexpr (STREAMS) { // a block has as many lines as this product has steps
                Ahead<TILE_VECTORS> values;
                for (int64_t c = 0; c < TILE_VECTORS; ++c)
                    values.begins[c] = head.value_block(chunk + std::min(block + c, block_count - 1));
                multiply(sums, queries, query_stride, columns, BLOCK_TOKENS * U, head_dim / U, values);
            } else {
                multiply(sums, queries, query_stride, columns, BLOCK_TOKENS * U, head_dim / U);
            }
            for (int c = 0; c < TILE_VECTORS && block + c < block_count; ++c) {
                const int64_t position = (chunk + block + c) * BLOCK_TOKENS;
                const bool partly_hidden = position < latest_begin || position + BLOCK_TOKENS > earliest_end;
                for (int r = 0; r < R; ++r) {
                    Vector score = sums[r][c] * scale;
                    if (partly_hidden) {
                        const int64_t begin = std::clamp<int64_t>(begins[r] - position, 0, LANES);
                        const int64_t end = std::clamp<int64_t>(ends[r] - position, 0, LANES);
                        score = ((lanes >= int32_t(begin)) & (lanes < int32_t(end))) ? score : splat(HIDDEN_SCORE);
                    }
                    chunk_largest[r] = larger(chunk_largest[r], score);
                    store(scores + r * CHUNK_KEYS + (block + c) * BLOCK_TOKENS, score);
                }
            }
        }
        float correction[R];
        for (int r = 0; r < R; ++r) {
            const float now_largest = std::max(largest[r], largest_of(chunk_largest[r]));
            correction[r] = std::exp(largest[r] - now_largest);
            largest[r] = now_largest;
            Vector sum = {};
            for (int64_t key = 0; key < block_count * BLOCK_TOKENS; key += LANES) {
                const Vector score = load(scores + r * CHUNK_KEYS + key);
                Vector weight = exponential(score - now_largest);
                weight = score > splat(HIDDEN_SCORE / 2) ? weight : Vector{}; // a row may see nothing of this chunk
                sum += weight;
                store(probabilities + r * CHUNK_KEYS + key, weight);
            }
            total[r] = total[r] * correction[r] + sum_of(sum);
        }
        for (int64_t vector = 0; vector < head_dim / LANES; vector += TILE_VECTORS) {
            with_count<TILE_VECTORS>(int(std::min<int64_t>(TILE_VECTORS, head_dim / LANES - vector)), [&]<int C>() INLINE_LAMBDA {
                Vector sums[R][C];
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) sums[r][c] = load(attended + r * head_dim + (vector + c) * LANES) * correction[r];
                for (int64_t block = 0; block < block_count; ++block) {
                    const T *columns[C];
                    for (int c = 0; c < C; ++c) columns[c] = head.value_block(chunk + block) + (vector + c) * LANES * U;
                    const T *weights = probabilities + block * BLOCK_TOKENS;
                    const int64_t upcoming_block = upcoming.begin + block;
                    if (STREAMS && upcoming_block < upcoming.end) { // as many lines per vector as the product has steps
                        Ahead<C> keys;
                        const T *key_block = upcoming.head.key_block(upcoming_block);
                        for (int c = 0; c < C; ++c) keys.begins[c] = key_block + (vector + c) * LANES * BLOCK_TOKENS;
                        multiply(sums, weights, CHUNK_KEYS, columns, head_dim * U, BLOCK_TOKENS / U, keys);
                    } else {
                        multiply(sums, weights, CHUNK_KEYS, columns, head_dim * U, BLOCK_TOKENS / U);
                    }
                }
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) store(attended + r * head_dim + (vector + c) * LANES, sums[r][c]);
            });
        }
    }
    for (int r = 0; r < R; ++r)
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(out + r * out_stride + d, load(attended + r * head_dim + d) * (1.0f / total[r]));
}

// ---- the decoder ----

extern "C" {

// Sizes; the same fields in the same order as `_Shape` in decoder.py.
struct Shape {
    int64_t hidden_size, intermediate_size, layer_count, head_count, kv_head_count, head_dim, vocabulary_size;
    int64_t block_count; // KV blocks of the pool
    float rms_norm_eps;
    int32_t thread_count;
};

// A run of rows of one sequence: rows `row` to row + count, at positions from `position`; its block table begins at `table`.
// rotary_row: of the rotation tables, that of its first row.
struct Span {
    int32_t row, count, position, table, rotary_row;
};

// One step. token_ids (N,), spans in order of rows and covering them all, tables: block ids, wanted_rows (R,) ascending: rows whose
// logits are wanted. logits: (R, logits_stride) fp32, written. best: (R,) the token with the largest logit, the first of equal ones;
// -1 if one of the row's logits is not finite. Written.
struct Step {
    int64_t row_count, span_count, wanted_count;
    const int32_t *token_ids;
    const Span *spans;
    const int32_t *tables;
    const int32_t *wanted_rows;
    float *logits;
    int64_t logits_stride;
    int32_t *best;
};
}

// What the host calls, whatever the stored type.
class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    virtual void set_linear(int64_t layer, int kind, const void *weight, const float *scales, const float *bias) = 0;
    virtual void set_norm(int64_t layer, int kind, const float *weight) = 0;
    virtual void set_window(int64_t layer, int64_t positions) = 0;
    virtual void set_embedding(const void *weight) = 0;
    virtual void set_rotation(const float *cosines, const float *sines) = 0;
    virtual void forward(const Step &step) = 0;
    virtual void copy_blocks(const int64_t *pairs, int64_t count) = 0;
};

enum LinearKind { QKV, ATTENTION_OUT, GATE_UP, DOWN, LM_HEAD, LINEAR_KIND_COUNT };
enum NormKind { ATTENTION_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, FINAL_NORM, NORM_KIND_COUNT };

template <class T> class Decoder final : public AnyDecoder {
  public:
    explicit Decoder(const Shape &shape)
        : shape_(shape), team_(std::max(1, shape.thread_count)), layers_(shape.layer_count + 1),
          hidden_stride_(round_up(shape.hidden_size, PANEL)),
          mixed_stride_(round_up((shape.head_count + 2 * shape.kv_head_count) * shape.head_dim, PANEL)),
          gated_stride_(round_up(2 * round_up(shape.intermediate_size, LANES), PANEL) / 2),
          layer_stride_(shape.block_count * shape.kv_head_count * BLOCK_TOKENS * shape.head_dim),
          keys_(shape.layer_count * layer_stride_), values_(shape.layer_count * layer_stride_) {
        const int64_t most_inner = std::max({shape.hidden_size, shape.intermediate_size, shape.head_count * shape.head_dim});
        scratches_ = std::vector<Scratch<T>>(team_.size());
        for (auto &scratch : scratches_) {
            scratch.panel = Buffer<T>(most_inner * PANEL);
            scratch.scores = Buffer<float>(TILE_ROWS * CHUNK_KEYS);
            scratch.probabilities = Buffer<T>(TILE_ROWS * CHUNK_KEYS);
            scratch.attended = Buffer<float>(TILE_ROWS * shape.head_dim);
        }
    }

    // weight: (columns, inner) rows of T, or of int8 with one scale per column. bias: (columns,) or null.
    void set_linear(int64_t layer, int kind, const void *weight, const float *scales, const float *bias) override {
        Linear<T> &linear = layers_[layer].linears[kind];
        const int64_t heads = shape_.head_count * shape_.head_dim, kv_heads = shape_.kv_head_count * shape_.head_dim;
        const int64_t inner_half = round_up(shape_.intermediate_size, LANES);
        int64_t sources = 0; // rows of `weight`
        switch (kind) {
            case QKV: linear.inner = shape_.hidden_size, sources = linear.columns = heads + 2 * kv_heads; break;
            case ATTENTION_OUT: linear.inner = heads, sources = linear.columns = shape_.hidden_size; break;
            case GATE_UP:
                linear.inner = shape_.hidden_size, sources = 2 * shape_.intermediate_size, linear.columns = 2 * inner_half;
                break;
            case DOWN: linear.inner = shape_.intermediate_size, sources = linear.columns = shape_.hidden_size; break;
            default: linear.inner = shape_.hidden_size, sources = linear.columns = shape_.vocabulary_size;
        }
        const int64_t size = linear.panel_count() * linear.panel_size(), columns = linear.panel_count() * PANEL;
        if (bias) linear.bias = Buffer<float>(columns);
        if (scales) {
            linear.scales = Buffer<float>(columns);
            linear.quantized = Buffer<int8_t>(size);
        } else {
            linear.packed = Buffer<T>(size);
        }
        team_.run([&](int index) {
            Worker(team_, index).each(linear.panel_count(), [&](int64_t panel) {
                for (int64_t column = panel * PANEL; column < (panel + 1) * PANEL; ++column) {
                    const int64_t source = source_row(kind, column, sources);
                    if (source < 0) continue;
                    if (bias) linear.bias.data()[column] = bias[source];
                    if (scales) linear.scales.data()[column] = scales[source];
                    if (scales)
                        pack_column(
                            linear.quantized.data() + panel * linear.panel_size(),
                            static_cast<const int8_t *>(weight) + source * linear.inner, column, linear.inner
                        );
                    else
                        pack_column(
                            linear.packed.data() + panel * linear.panel_size(),
                            static_cast<const T *>(weight) + source * linear.inner, column, linear.inner
                        );
                }
            });
        });
        linear.packed.join_pages();
        linear.quantized.join_pages();
    }

    void set_norm(int64_t layer, int kind, const float *weight) override {
        const bool of_heads = kind == QUERY_NORM || kind == KEY_NORM;
        const int64_t count = of_heads ? shape_.head_dim : shape_.hidden_size;
        Buffer<float> &norm = layers_[layer].norms[kind];
        norm = Buffer<float>(hidden_stride_ + shape_.head_dim);
        std::memcpy(norm.data(), weight, count * sizeof(float));
    }

    // positions: that a row of this layer looks back on, itself included; 0: all.
    void set_window(int64_t layer, int64_t positions) override { layers_[layer].window = positions; }

    // weight: (V, E) rows of T. Copied, since a memory-mapped file costs a page fault for each new token.
    void set_embedding(const void *weight) override {
        const int64_t row_size = shape_.hidden_size;
        embedding_ = Buffer<T>(shape_.vocabulary_size * row_size);
        team_.run([&](int index) {
            Worker(team_, index).each((shape_.vocabulary_size + COPIED_ROWS - 1) / COPIED_ROWS, [&](int64_t task) {
                const int64_t first = task * COPIED_ROWS, count = std::min(COPIED_ROWS, shape_.vocabulary_size - first);
                std::memcpy(
                    embedding_.data() + first * row_size, static_cast<const T *>(weight) + first * row_size,
                    count * row_size * sizeof(T)
                );
            });
        });
    }

    void set_rotation(const float *cosines, const float *sines) override {
        cosines_ = cosines;
        sines_ = sines;
    }

    void forward(const Step &step) override {
        reserve(step.row_count);
        span_of_row_.resize(step.row_count);
        for (int64_t span = 0; span < step.span_count; ++span)
            for (int32_t row = 0; row < step.spans[span].count; ++row) span_of_row_[step.spans[span].row + row] = int32_t(span);
        wanted_spans_.clear();
        for (int64_t index = 0; index < step.wanted_count; ++index) {
            const int32_t row = step.wanted_rows[index];
            const Span &span = step.spans[span_of_row_[row]];
            wanted_spans_.push_back({int32_t(index), 1, span.position + row - span.row, span.table, span.rotary_row + row - span.row});
        }
        plan_attention(all_tasks_, step.spans, step.span_count);
        plan_attention(wanted_tasks_, wanted_spans_.data(), int64_t(wanted_spans_.size()));
        team_.run([&](int index) { run(step, index); });
    }

    // pairs: (count, 2) KV blocks, from and to, copied one after the other in all layers.
    void copy_blocks(const int64_t *pairs, int64_t count) override {
        const int64_t block_size = shape_.kv_head_count * BLOCK_TOKENS * shape_.head_dim;
        for (int64_t layer = 0; layer < shape_.layer_count; ++layer)
            for (int64_t pair = 0; pair < count; ++pair)
                for (T *pool : {keys_.data() + layer * layer_stride_, values_.data() + layer * layer_stride_})
                    std::memcpy(
                        pool + pairs[2 * pair + 1] * block_size, pool + pairs[2 * pair] * block_size, block_size * sizeof(T)
                    );
    }

  private:
    struct Layer {
        Linear<T> linears[LINEAR_KIND_COUNT];
        Buffer<float> norms[NORM_KIND_COUNT];
        int64_t window = 0;
    };

    // Rows of one span and one KV head: `row_count` rows from `row` of the span; all its query heads.
    struct AttentionTask {
        int32_t span, kv_head, row, row_count;
    };

    // Which row of the given weights a packed column holds; -1 for padding. Gate and up stand in turn, 16 columns each, so that a
    // tile holds both halves of its outputs.
    int64_t source_row(int kind, int64_t column, int64_t sources) const {
        if (kind != GATE_UP) return column < sources ? column : -1;
        const int64_t output = column / (2 * LANES) * LANES + column % LANES;
        if (output >= shape_.intermediate_size) return -1;
        return column / LANES % 2 == 0 ? output : output + shape_.intermediate_size;
    }

    template <class W> static void pack_column(W *panel, const W *weights, int64_t column, int64_t inner) {
        for (int64_t index = 0; index < inner; ++index) panel[packed_index<T>(column, index)] = weights[index];
    }

    void reserve(int64_t rows) {
        hidden_.reserve(rows * hidden_stride_);
        normed_.reserve(rows * hidden_stride_);
        mixed_.reserve(rows * mixed_stride_);
        queries_.reserve(rows * heads_size());
        attended_.reserve(rows * heads_size());
        gated_.reserve(rows * gated_stride_);
    }

    int64_t heads_size() const { return shape_.head_count * shape_.head_dim; }

    // KV heads outermost: what several sequences share of a prefix is then still in the cache for the next of them.
    void plan_attention(std::vector<AttentionTask> &tasks, const Span *spans, int64_t span_count) {
        constexpr int32_t ROWS = 4 * TILE_ROWS; // of one task: enough work to be worth handing out
        tasks.clear();
        for (int32_t head = 0; head < shape_.kv_head_count; ++head)
            for (int32_t span = 0; span < span_count; ++span)
                for (int32_t row = 0; row < spans[span].count; row += ROWS)
                    tasks.push_back({span, head, row, std::min(ROWS, spans[span].count - row)});
    }

    void run(const Step &step, int index) {
        Worker worker(team_, index);
        worker.each(step.row_count, [&](int64_t row) { embed(step.token_ids[row], hidden_.data() + row * hidden_stride_); });
        int64_t rows = step.row_count;
        for (int64_t number = 0; number < shape_.layer_count; ++number) {
            const Layer &layer = layers_[number];
            T *keys = keys_.data() + number * layer_stride_, *values = values_.data() + number * layer_stride_;
            normalize(worker, layer.norms[ATTENTION_NORM], rows);
            product(
                worker, index, normed_.data(), hidden_stride_, rows, layer.linears[QKV],
                [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
                    for (int c = 0; c < TILE_VECTORS; ++c)
                        store(mixed_.data() + row * mixed_stride_ + column + c * LANES, sums[c]);
                }
            );
            worker.each(rows, [&](int64_t row) { rotate_and_keep(step, layer, row, keys, values); });
            const bool is_last = number + 1 == shape_.layer_count;
            if (is_last) { // beyond its keys and values, the last layer is computed for the wanted rows alone
                worker.each(1, [&](int64_t) { gather_wanted(step); });
                rows = step.wanted_count;
                if (rows == 0) return;
            }
            const Span *spans = is_last ? wanted_spans_.data() : step.spans;
            const auto &tasks = is_last ? wanted_tasks_ : all_tasks_;
            worker.each(int64_t(tasks.size()), [&](int64_t task) {
                attend_task(task, tasks, step, spans, layer.window, keys, values, scratches_[index]);
            });
            add_product(worker, index, attended_.data(), heads_size(), rows, layer.linears[ATTENTION_OUT]);
            normalize(worker, layer.norms[MLP_NORM], rows);
            product(
                worker, index, normed_.data(), hidden_stride_, rows, layer.linears[GATE_UP],
                [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
                    for (int c = 0; c < TILE_VECTORS; c += 2) {
                        const Vector gate = sums[c], up = sums[c + 1];
                        store(
                            gated_.data() + row * gated_stride_ + column / 2 + c / 2 * LANES,
                            gate / (1.0f + exponential(-gate)) * up
                        );
                    }
                }
            );
            add_product(worker, index, gated_.data(), gated_stride_, rows, layer.linears[DOWN]);
        }
        const Layer &top = layers_[shape_.layer_count];
        normalize(worker, top.norms[FINAL_NORM], rows);
        product(
            worker, index, normed_.data(), hidden_stride_, rows, top.linears[LM_HEAD],
            [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
                for (int c = 0; c < TILE_VECTORS; ++c)
                    store(step.logits + row * step.logits_stride + column + c * LANES, sums[c]);
            }
        );
        worker.each(rows, [&](int64_t row) {
            step.best[row] = best_of(step.logits + row * step.logits_stride, shape_.vocabulary_size);
        });
    }

    template <class Keep> INLINE void
    product(Worker &worker, int index, const T *left, int64_t stride, int64_t rows, const Linear<T> &linear, const Keep &keep) {
        linear_product(worker, left, stride, rows, linear, scratches_.data(), index, keep);
    }

    // hidden += left x weights.
    void add_product(Worker &worker, int index, const T *left, int64_t stride, int64_t rows, const Linear<T> &linear) {
        product(worker, index, left, stride, rows, linear, [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
            float *hidden = hidden_.data() + row * hidden_stride_ + column;
            for (int c = 0; c < TILE_VECTORS; ++c) store(hidden + c * LANES, load(hidden + c * LANES) + sums[c]);
        });
    }

    void embed(int32_t token_id, float *hidden) const {
        const T *row = embedding_.data() + token_id * shape_.hidden_size;
        for (int64_t e = 0; e < shape_.hidden_size; ++e) hidden[e] = to_float(row[e]);
        for (int64_t e = shape_.hidden_size; e < hidden_stride_; ++e) hidden[e] = 0;
    }

    void normalize(Worker &worker, const Buffer<float> &weight, int64_t rows) {
        worker.each(rows, [&](int64_t row) {
            const float *hidden = hidden_.data() + row * hidden_stride_;
            T *normed = normed_.data() + row * hidden_stride_;
            Vector squares = {};
            for (int64_t e = 0; e < hidden_stride_; e += LANES) squares += load(hidden + e) * load(hidden + e);
            const float scale = 1.0f / std::sqrt(sum_of(squares) / float(shape_.hidden_size) + shape_.rms_norm_eps);
            for (int64_t e = 0; e < hidden_stride_; e += LANES)
                store(normed + e, load(hidden + e) * scale * load(weight.data() + e));
        });
    }

    // One row's query heads to `queries_`, its key and value heads to their slot of the pool; queries and keys rotated.
    void rotate_and_keep(const Step &step, const Layer &layer, int64_t row, T *keys, T *values) const {
        const int64_t head_dim = shape_.head_dim, unit = UNIT<T>;
        const Span &span = step.spans[span_of_row_[row]];
        const int64_t position = span.position + row - span.row;
        const int64_t block = step.tables[span.table + position / BLOCK_TOKENS], slot = position % BLOCK_TOKENS;
        const int64_t rotary_row = span.rotary_row + row - span.row;
        const float *cosines = cosines_ + rotary_row * head_dim, *sines = sines_ + rotary_row * head_dim;
        float *mixed = mixed_.data() + row * mixed_stride_;
        float *key_heads = mixed + heads_size(), *value_heads = key_heads + shape_.kv_head_count * head_dim;
        for (int64_t head = 0; head < shape_.head_count; ++head) {
            float *query = mixed + head * head_dim;
            rotate(query, layer.norms[QUERY_NORM], cosines, sines);
            T *to = queries_.data() + row * heads_size() + head * head_dim;
            for (int64_t d = 0; d < head_dim; d += LANES) store(to + d, load(query + d));
        }
        for (int64_t head = 0; head < shape_.kv_head_count; ++head) {
            rotate(key_heads + head * head_dim, layer.norms[KEY_NORM], cosines, sines);
            const int64_t start = (block * shape_.kv_head_count + head) * BLOCK_TOKENS * head_dim;
            keep_key(key_heads + head * head_dim, keys + start + slot * unit);
            keep_value(value_heads + head * head_dim, values + start + slot / unit * head_dim * unit, int(slot % unit));
        }
    }

    // One position's column of a key block: a unit in each row of 16.
    INLINE void keep_key(const float *from, T *to) const {
        constexpr int64_t U = UNIT<T>;
        T narrowed[LANES];
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) {
            store(narrowed, load(from + d));
#pragma GCC unroll 16
            for (int64_t unit = 0; unit < LANES / U; ++unit)
                std::memcpy(to + (d / U + unit) * BLOCK_TOKENS * U, narrowed + unit * U, sizeof(T) * U);
        }
    }

    // One position's row of a value block; of two in bfloat16, which lie value by value side by side, so the other is read too.
    INLINE void keep_value(const float *from, float *to, int) const {
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) store(to + d, load(from + d));
    }

    INLINE void keep_value(const float *from, Bfloat16 *to, int half) const {
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) {
            Bfloat16 narrowed[LANES];
            ShortVector bits;
            IntVector pairs;
            store(narrowed, load(from + d));
            std::memcpy(&bits, narrowed, sizeof bits);
            std::memcpy(&pairs, to + 2 * d, sizeof pairs);
            const IntVector value = __builtin_convertvector(bits, IntVector);
            pairs = half ? (pairs & 0xffff) | value << 16 : (pairs & int32_t(0xffff0000)) | value;
            std::memcpy(to + 2 * d, &pairs, sizeof pairs);
        }
    }

    // In place: norm of the head if the model has one, then dimension i turns with i + D/2.
    INLINE void rotate(float *head, const Buffer<float> &norm, const float *cosines, const float *sines) const {
        const int64_t head_dim = shape_.head_dim, half = head_dim / 2;
        if (norm.data()) {
            float squares = 0;
            for (int64_t d = 0; d < head_dim; ++d) squares += head[d] * head[d];
            const float scale = 1.0f / std::sqrt(squares / float(head_dim) + shape_.rms_norm_eps);
            for (int64_t d = 0; d < head_dim; ++d) head[d] *= scale * norm.data()[d];
        }
        int64_t d = 0;
        for (; d + LANES <= half; d += LANES) {
            const Vector low = load(head + d), high = load(head + d + half);
            store(head + d, low * load(cosines + d) - high * load(sines + d));
            store(head + d + half, high * load(cosines + d + half) + low * load(sines + d + half));
        }
        for (; d < half; ++d) {
            const float low = head[d], high = head[d + half];
            head[d] = low * cosines[d] - high * sines[d];
            head[d + half] = high * cosines[d + half] + low * sines[d + half];
        }
    }

    // Moves the wanted rows to the front, in place: they are in ascending order.
    void gather_wanted(const Step &step) {
        for (int64_t index = 0; index < step.wanted_count; ++index) {
            const int64_t row = step.wanted_rows[index];
            if (row == index) continue;
            std::memcpy(
                hidden_.data() + index * hidden_stride_, hidden_.data() + row * hidden_stride_, hidden_stride_ * sizeof(float)
            );
            std::memcpy(queries_.data() + index * heads_size(), queries_.data() + row * heads_size(), heads_size() * sizeof(T));
        }
    }

    // What of a layer's pool the rows of a task read.
    PagedHead<T> paged_head(const AttentionTask &task, const Step &step, const Span *spans, const T *keys, const T *values) const {
        const int64_t block_size = BLOCK_TOKENS * shape_.head_dim, start = task.kv_head * block_size;
        return {keys + start, values + start, shape_.kv_head_count * block_size, step.tables + spans[task.span].table};
    }

    static int64_t first_visible(int64_t end, int64_t window) { return window ? std::max<int64_t>(0, end - window) : 0; }

    // The first keys of the task that this thread will probably take after `index`; none if that one does not stream.
    KeyRun<T> after(
        int64_t index, const std::vector<AttentionTask> &tasks, const Step &step, const Span *spans, int64_t window, const T *keys,
        const T *values
    ) const {
        const int64_t next = index + team_.size();
        if (next >= int64_t(tasks.size()) || tasks[next].row_count != 1) return {};
        const AttentionTask &task = tasks[next];
        const int64_t end = spans[task.span].position + task.row + 1;
        return {
            paged_head(task, step, spans, keys, values), first_visible(end, window) / BLOCK_TOKENS,
            (end + BLOCK_TOKENS - 1) / BLOCK_TOKENS
        };
    }

    void attend_task(
        int64_t index, const std::vector<AttentionTask> &tasks, const Step &step, const Span *spans, int64_t window, const T *keys,
        const T *values, Scratch<T> &scratch
    ) {
        const AttentionTask &task = tasks[index];
        const Span &span = spans[task.span];
        const int64_t head_dim = shape_.head_dim, group = shape_.head_count / shape_.kv_head_count, stride = heads_size();
        const PagedHead<T> head = paged_head(task, step, spans, keys, values);
        const int64_t first = (span.row + task.row) * stride + task.kv_head * group * head_dim;
        const int64_t position = span.position + task.row;
        if (task.row_count == 1) { // the group's heads are the rows of a tile: its keys are read once for all of them
            const KeyRun<T> then = after(index, tasks, step, spans, window, keys, values);
            return attend_tiles<true>(first, head_dim, group, 0, position, window, head, scratch, then);
        }
        for (int64_t member = 0; member < group; ++member)
            attend_tiles<false>(first + member * head_dim, stride, task.row_count, 1, position, window, head, scratch, {});
    }

    // row_count rows, `stride` values apart in queries and output, of which each is `advance` positions after the one before.
    template <bool STREAMS> void attend_tiles(
        int64_t first, int64_t stride, int64_t row_count, int64_t advance, int64_t position, int64_t window,
        const PagedHead<T> &head, Scratch<T> &scratch, const KeyRun<T> &then
    ) {
        const float scale = 1.0f / std::sqrt(float(shape_.head_dim));
        for (int64_t row = 0; row < row_count; row += TILE_ROWS) {
            int64_t begins[TILE_ROWS], ends[TILE_ROWS];
            for (int64_t r = 0; r < TILE_ROWS; ++r) {
                ends[r] = position + (row + r) * advance + 1;
                begins[r] = first_visible(ends[r], window);
            }
            with_count<TILE_ROWS>(int(std::min<int64_t>(TILE_ROWS, row_count - row)), [&]<int R>() {
                attend<T, R, STREAMS>(
                    queries_.data() + first + row * stride, stride, begins, ends, head, shape_.head_dim, scale,
                    attended_.data() + first + row * stride, stride, scratch, then
                );
            });
        }
    }

    Shape shape_;
    Team team_;
    std::vector<Layer> layers_; // the last entry holds what is above all layers
    std::vector<Scratch<T>> scratches_;
    Buffer<T> embedding_;
    const float *cosines_ = nullptr, *sines_ = nullptr;
    int64_t hidden_stride_, mixed_stride_, gated_stride_, layer_stride_;
    // The pool. Zeroed, since blocks are read to their ends, whose weight is 0, so they must be finite; the system gives zeros, and
    // takes memory, only where it is touched.
    Buffer<T> keys_, values_;
    Buffer<float> hidden_, mixed_;
    Buffer<T> normed_, queries_, attended_, gated_;
    std::vector<int32_t> span_of_row_;
    std::vector<Span> wanted_spans_;
    std::vector<AttentionTask> all_tasks_, wanted_tasks_;
};

} // namespace

extern "C" {

// The interface below is what loader.py declares. What the set functions point at is copied, but for the rotation tables, which
// must outlive the decoder.

int32_t weir_kv_block_tokens() { return BLOCK_TOKENS; }

int32_t weir_best_of(const float *values, int64_t count) { return best_of(values, count); } // for tests

void *weir_decoder_open(const Shape *shape, int32_t is_bfloat16) try {
    if (is_bfloat16) return static_cast<AnyDecoder *>(new Decoder<Bfloat16>(*shape));
    return static_cast<AnyDecoder *>(new Decoder<float>(*shape));
} catch (...) {
    return nullptr;
}

void weir_decoder_close(void *decoder) { delete static_cast<AnyDecoder *>(decoder); }

int32_t weir_decoder_set_linear(
    void *decoder, int64_t layer, int32_t kind, const void *weight, const float *scales, const float *bias
) try {
    static_cast<AnyDecoder *>(decoder)->set_linear(layer, kind, weight, scales, bias);
    return 0;
} catch (...) {
    return 1;
}

int32_t weir_decoder_set_norm(void *decoder, int64_t layer, int32_t kind, const float *weight) try {
    static_cast<AnyDecoder *>(decoder)->set_norm(layer, kind, weight);
    return 0;
} catch (...) {
    return 1;
}

void weir_decoder_set_window(void *decoder, int64_t layer, int64_t positions) {
    static_cast<AnyDecoder *>(decoder)->set_window(layer, positions);
}

void weir_decoder_set_embedding(void *decoder, const void *weight) { static_cast<AnyDecoder *>(decoder)->set_embedding(weight); }

void weir_decoder_set_rotation(void *decoder, const float *cosines, const float *sines) {
    static_cast<AnyDecoder *>(decoder)->set_rotation(cosines, sines);
}

void weir_decoder_copy_blocks(void *decoder, const int64_t *pairs, int64_t count) {
    static_cast<AnyDecoder *>(decoder)->copy_blocks(pairs, count);
}

int32_t weir_decoder_forward(void *decoder, const Step *step) try {
    static_cast<AnyDecoder *>(decoder)->forward(*step);
    return 0;
} catch (...) {
    return 1; // out of memory is all that can be thrown
}
}
