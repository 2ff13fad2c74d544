// Threads that compute a step together.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>

#include "numbers.h"

namespace {

// about 20 us: longer than the imbalance between cores in a phase
constexpr int SPINS_BEFORE_SLEEP = 4000;
// between steps workers yield before they sleep; longer than the pause between two decode steps
constexpr int YIELDS_BEFORE_SLEEP = 200;

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Threads that run one function together and meet at barriers. Not OpenMP, whose pool would wake
// and spin beside torch's; these threads yield to other processes of the machine, such as the
// API's.
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
            round_.notify_all(); // a system call only if a thread sleeps
            return;
        }
        for (int spins = 0; spins < SPINS_BEFORE_SLEEP; ++spins, relax())
            if (round_.load(std::memory_order_acquire) != round) return;
        // Another process has the core of a thread that is not here yet: this core is then free
        // for that thread.
        round_.wait(round, std::memory_order_acquire);
    }

    std::atomic<int64_t> &counter(unsigned phase) { return counters_[phase % 4].value; }

  private:
    void serve(int index) {
        unsigned seen = 0;
        for (bool is_last = false; !is_last;) {
            wait_for_work(seen);
            ++seen;
            // read before the barrier: after it the flag may belong to the next run
            is_last = stopping_;
            call_(context_, index);
            barrier();
        }
    }

    void wait_for_work(unsigned seen) {
        for (int turns = 0; turns < SPINS_BEFORE_SLEEP + YIELDS_BEFORE_SLEEP; ++turns) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
            turns < SPINS_BEFORE_SLEEP ? relax() : (void)sched_yield();
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

// One thread's view of a team, inside `Team::run`. All threads make the same calls in the same
// order.
class Worker {
  public:
    Worker(Team &team, int index) : team_(team), index_(index) {}
    int team_size() const { return team_.size(); }

    // Runs body(i) for all i below count on any free thread; returns when all are done. A phase's
    // counter is reset after its barrier and reused four phases later, which no thread reaches
    // before thread 0 has been here.
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

} // namespace
