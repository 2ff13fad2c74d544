// Threads that compute a step together.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "numbers.h"

namespace {

// How long a thread waits for the others before it looks whether one of them has lost its core, and how often it looks
// before it sleeps: longer than the imbalance between cores in a phase, and than the longest pieces.
constexpr std::chrono::microseconds WAIT_BEFORE_LOOK(20);
constexpr int LOOKS_BEFORE_SLEEP = 10;
// how long a thread is watched to see whether it runs
constexpr std::chrono::microseconds LOOK(3);
// between steps workers spin and yield before they sleep: longer than the pause between two decode steps
constexpr int SPINS_BEFORE_YIELD = 4000, YIELDS_BEFORE_SLEEP = 200;

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Seed of the order in which pieces are taken, for tests; 0 for ascending.
std::atomic<uint32_t> piece_order{0};

inline int64_t in_order(int64_t index, int64_t count) {
    const int64_t seed = piece_order.load(std::memory_order_relaxed);
    if (!seed) return index;
    int64_t stride = seed % count + 1;
    while (std::gcd(stride, count) != 1) ++stride;
    return (index * stride + seed) % count;
}

// Whether `is_done` comes true within `limit`.
template <class F> bool spin(std::chrono::microseconds limit, const F &is_done) {
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
        for (int turn = 0; turn < 16; ++turn, relax())
            if (is_done()) return true;
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// One of the team's threads, as the others see it.
struct alignas(64) Member {
    enum State { OUTSIDE, INSIDE, TAKING_PIECES };
    std::atomic<int> state{OUTSIDE};
    std::atomic<bool> is_moving{false}; // another thread gives it a core
    pid_t thread = 0;
    clockid_t clock = 0; // of its CPU time

    void identify() {
        thread = gettid();
        pthread_getcpuclockid(pthread_self(), &clock);
    }

    // Whether the thread could run but has no core: its CPU time stands still.
    bool has_lost_core() const {
        timespec before, after;
        if (clock_gettime(clock, &before)) return false;
        spin(LOOK, [] { return false; });
        if (clock_gettime(clock, &after)) return false;
        return before.tv_sec == after.tv_sec && before.tv_nsec == after.tv_nsec;
    }

    // Moves the thread to the caller's core, and the caller away from it. False if the system does not allow it. A
    // scheduler moves a thread that has just run only after milliseconds, even to an idle core.
    bool take_core_of_caller() {
        cpu_set_t its, own, one;
        const int core = sched_getcpu();
        if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(thread, sizeof its, &its) || sched_getaffinity(0, sizeof own, &own))
            return false;
        if (!CPU_ISSET(core, &its) || CPU_COUNT(&own) < 2) return false;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        if (sched_setaffinity(thread, sizeof one, &one)) return false;
        sched_setaffinity(thread, sizeof its, &its);
        cpu_set_t elsewhere = own;
        CPU_CLR(core, &elsewhere);
        if (sched_setaffinity(0, sizeof elsewhere, &elsewhere) == 0) sched_setaffinity(0, sizeof own, &own);
        return true;
    }
};

// Threads that run one function together, phase by phase. A phase is a number of pieces, which any thread takes; it
// ends with its last piece. Nobody waits for a thread that holds none: it passes the phases that are over when it comes
// to them. To a thread that has lost its core with a piece, one that waits for it gives its own core.
//
// Not OpenMP, whose pool would wake and spin beside torch's; these threads yield to other processes of the machine,
// such as the API's.
class Team {
  public:
    explicit Team(int size) : size_(size), members_(size) {
        for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
    }
    ~Team() {
        stopping_ = true;
        call_threads();
        for (auto &thread : threads_) thread.join();
    }
    int size() const { return size_; }

    // Calls function(index) on all threads that have a core in time, the caller's being 0; returns when all phases
    // are over.
    template <class F> void run(const F &function) {
        if (size_ == 1) return function(0);
        context_ = &function;
        call_ = [](const void *context, int index) { (*static_cast<const F *>(context))(index); };
        first_phase_ = phase_of(ticket_.load(std::memory_order_relaxed));
        members_[0].identify();
        call_threads();
        work(0);
        open_.store(0); // threads that come now are too late
        await(0, Member::INSIDE, [this] { return inside_.load() == 0; });
    }

    uint32_t first_phase() const { return first_phase_; }

    // Calls body(i) for the pieces below count that this thread gets; returns when all are done. count > 0.
    template <class F> void take_pieces(int index, uint32_t phase, int64_t count, const F &body) {
        Member &member = members_[index];
        member.state.store(Member::TAKING_PIECES, std::memory_order_relaxed);
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (phase_of(ticket) == phase && piece_of(ticket) < count) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            body(in_order(piece_of(ticket), count));
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) end_phase(phase);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        member.state.store(Member::INSIDE, std::memory_order_relaxed);
        if (phase_of(ticket) == phase)
            await(index, Member::TAKING_PIECES, [&] { return phase_of(ticket_.load(std::memory_order_acquire)) != phase; });
    }

  private:
    static uint32_t phase_of(uint64_t ticket) { return uint32_t(ticket >> 32); }
    static int64_t piece_of(uint64_t ticket) { return int64_t(ticket & 0xffffffff); }

    void end_phase(uint32_t phase) {
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(uint64_t(phase + 1) << 32, std::memory_order_release);
        wake();
    }

    // Ends the sleep of threads in `await`.
    void wake() {
        wakes_.fetch_add(1);
        wakes_.notify_all(); // a system call only if a thread sleeps
    }

    // Waits until `is_done` comes true, which depends on members whose state is at least `state`.
    template <class F> void await(int index, int state, const F &is_done) {
        for (int looks = 0; looks < LOOKS_BEFORE_SLEEP; ++looks) {
            if (spin(WAIT_BEFORE_LOOK, is_done)) return;
            for (int other = 0; other < size_; ++other) {
                Member &member = members_[other];
                if (other == index || member.state.load(std::memory_order_relaxed) < state || member.is_moving.exchange(true)) continue;
                const bool has_moved = member.has_lost_core() && !is_done() && member.take_core_of_caller();
                member.is_moving.store(false);
                if (has_moved) break;
            }
        }
        for (uint32_t seen = wakes_.load(); !is_done(); seen = wakes_.load()) wakes_.wait(seen);
    }

    // Begins a run, which threads may join until it is closed.
    void call_threads() {
        {
            std::lock_guard<std::mutex> guard(lock_);
            const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
            open_.store(generation);
            generation_.store(generation, std::memory_order_release);
        }
        called_.notify_all();
    }

    void work(int index) {
        members_[index].state.store(Member::INSIDE, std::memory_order_relaxed);
        call_(context_, index);
        members_[index].state.store(Member::OUTSIDE, std::memory_order_relaxed);
    }

    void serve(int index) {
        members_[index].identify();
        for (uint32_t seen = 0;;) {
            wait_for_work(seen);
            seen = generation_.load(std::memory_order_acquire);
            if (stopping_) return;
            inside_.fetch_add(1); // before the look at `open_`: either run() sees it, or this thread that the run is over
            if (open_.load() == seen) work(index);
            if (inside_.fetch_sub(1) == 1) wake();
        }
    }

    void wait_for_work(uint32_t seen) {
        for (int turns = 0; turns < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP; ++turns) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
            turns < SPINS_BEFORE_YIELD ? relax() : (void)sched_yield();
        }
        std::unique_lock<std::mutex> guard(lock_);
        called_.wait(guard, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }

    int size_;
    std::vector<Member> members_;
    std::vector<std::thread> threads_;
    std::mutex lock_;
    std::condition_variable called_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> generation_{0}; // of runs; never 0 in one
    std::atomic<uint32_t> open_{0};                   // generation that threads may still join
    uint32_t first_phase_ = 0;
    const void *context_ = nullptr;
    void (*call_)(const void *, int) = nullptr;
    alignas(64) std::atomic<int> inside_{0}; // threads beside the caller's that are in a run
    alignas(64) std::atomic<uint64_t> ticket_{0}; // phase and next piece of it: a late thread takes none of another phase
    alignas(64) std::atomic<int64_t> done_{0};    // pieces of the phase
    alignas(64) std::atomic<uint32_t> wakes_{0};  // to sleep on
};

// One thread's view of a team, inside `Team::run`. All threads make the same calls in the same
// order.
class Worker {
  public:
    Worker(Team &team, int index) : team_(team), index_(index), phase_(team.first_phase()) {}
    int team_size() const { return team_.size(); }

    // Calls body(i) for all i below count, on any free thread; returns when all are done.
    template <class F> void each(int64_t count, const F &body) {
        if (team_.size() == 1) {
            for (int64_t i = 0; i < count; ++i) body(in_order(i, count));
        } else if (count > 0) {
            team_.take_pieces(index_, phase_++, count, body);
        }
    }

    // The same for short bodies, several of which are a piece.
    template <class F> void each_row(int64_t count, const F &body) {
        const int64_t size = std::clamp<int64_t>(count / (8 * team_.size()), 1, ROWS_OF_PIECE);
        each((count + size - 1) / size, [&](int64_t piece) {
            for (int64_t i = piece * size; i < std::min(count, (piece + 1) * size); ++i) body(i);
        });
    }

  private:
    static constexpr int64_t ROWS_OF_PIECE = 16;

    Team &team_;
    int index_;
    uint32_t phase_;
};

} // namespace
