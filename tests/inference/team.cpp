// Program of test_native.py: the promises of Team and Worker.
//
//   team lost     a thread stays away until another has ended all phases
//   team late     a thread comes to its first phase when another is in the last
//   team random   phases of random sizes, in which threads stop at random
//
// Prints "ok", or the broken promise.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "../../inference/native/team.h"

static void fail(const char *promise) {
    std::printf("%s\n", promise);
    std::exit(1);
}

// The others end 100 phases while thread 2, which is in the run, takes no piece.
static void stay_away(bool comes_late) {
    constexpr int PHASES = 100, PIECES = 7;
    Team team(3);
    for (int run = 0; run < 20; ++run) {
        std::atomic<int> ended{0}, done{0}, waiting{0};
        team.run([&](int index) {
            Worker worker(team, index);
            if (index == 2) {
                waiting = 1;
                while (!ended) std::this_thread::yield();
            } else if (index == 0) {
                // a run does not wait for threads that have not joined it yet
                while (!waiting) std::this_thread::yield();
            }
            for (int phase = 0; phase < PHASES; ++phase) {
                if (comes_late && phase + 1 == PHASES && index != 2) ++ended;
                worker.each(PIECES, [&](int64_t) { ++done; });
            }
            if (index != 2) ++ended;
        });
        if (done != PHASES * PIECES) fail("each piece is done once, whoever stays away");
    }
}

static void stop_at_random() {
    std::mt19937 random(7);
    for (int size = 1; size <= 5; ++size) {
        Team team(size);
        for (int run = 0; run < 60; ++run) {
            const int phases = int(random() % 30);
            std::vector<int> counts(phases);
            for (int &count : counts) count = random() % 3 ? int(random() % 6) : int(random() % 200);
            std::vector<std::unique_ptr<std::atomic<int>[]>> taken;
            std::vector<std::atomic<int>> done(phases + 1);
            for (int count : counts) taken.emplace_back(new std::atomic<int>[count]{});
            const uint32_t seed = uint32_t(random());
            piece_order = random() % 2 ? uint32_t(random()) : 0;
            team.run([&](int index) {
                std::mt19937 own(seed + index);
                const auto stop = [&] {
                    if (own() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
                };
                Worker worker(team, index);
                for (int phase = 0; phase < phases; ++phase) {
                    stop();
                    worker.each(counts[phase], [&](int64_t piece) {
                        stop();
                        for (int before = 0; before < phase; ++before)
                            if (done[before] != counts[before]) fail("a phase begins when the one before it is over");
                        if (piece < 0 || piece >= counts[phase]) fail("pieces are below the count");
                        if (taken[phase][piece]++) fail("a piece is taken once");
                        ++done[phase];
                    });
                    if (done[phase] != counts[phase]) fail("a call ends when its phase is over");
                }
            });
            for (int phase = 0; phase < phases; ++phase)
                if (done[phase] != counts[phase]) fail("a run ends when all phases are over");
        }
    }
}

int main(int, char **arguments) {
    if (!std::strcmp(arguments[1], "random")) stop_at_random();
    else stay_away(!std::strcmp(arguments[1], "late"));
    std::printf("ok\n");
}
