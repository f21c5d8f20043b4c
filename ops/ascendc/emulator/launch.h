// A kernel launch: one thread a core, then the check of GM between cores.
#pragma once
#include <functional>
#include <thread>

#include "pipe.h"

namespace AscendC {
namespace emulator {

struct Report {
  Counters total{};             // of all cores
  Counters critical{};          // of each counter, the core with most; summed over launches
  std::vector<Counters> cores;  // of the last launch
  uint32_t launches = 0, ub_bytes = 0;

  void add(const std::vector<Counters> &last) {
    ++launches;
    cores = last;
    for (int c = 0; c < COUNTERS; ++c) {
      uint64_t most = 0;
      for (const auto &core : cores) total[c] += core[c], most = std::max(most, core[c]);
      critical[c] += most;
    }
  }
};

// No core may write what another one writes or reads: nothing orders cores within a launch.
inline void check_between_cores(std::vector<std::pair<GmAccess, uint32_t>> &accesses) {
  std::sort(accesses.begin(), accesses.end(),
            [](const auto &a, const auto &b) { return a.first.begin < b.first.begin; });
  struct Reach {
    uintptr_t end = 0;
    uint32_t core = 0;
  } read[2], wrote[2];  // the two furthest reaches by different cores
  auto meets = [](const Reach(&reach)[2], uintptr_t begin, uint32_t core) {
    return (reach[0].end > begin && reach[0].core != core) || (reach[1].end > begin && reach[1].core != core);
  };
  auto extend = [](Reach(&reach)[2], uintptr_t end, uint32_t core) {
    if (core == reach[0].core) {
      reach[0].end = std::max(reach[0].end, end);
    } else if (end > reach[0].end) {
      reach[1] = reach[0];
      reach[0] = {end, core};
    } else if (end > reach[1].end) {
      reach[1] = {end, core};
    }
  };
  for (const auto &[access, core] : accesses) {
    EMULATOR_CHECK(!meets(wrote, access.begin, core), "core %u %s GM that another core writes in the same launch", core,
                   access.write ? "writes" : "reads");
    EMULATOR_CHECK(!access.write || !meets(read, access.begin, core),
                   "core %u writes GM that another core reads in the same launch", core);
    extend(access.write ? wrote : read, access.end, core);
  }
}

// Of a launch of more cores than this only the first and the last run, as a sample: that reaches the end of a tensor
// which no test could walk through. No machine has so many.
constexpr uint32_t kMostCores = 1024;
constexpr uint32_t kSampled = 2;

inline void launch(uint32_t blocks, Report &report, const std::function<void()> &kernel) {
  EMULATOR_CHECK(blocks > 0, "a launch of no blocks");
  std::vector<uint32_t> run_here;
  uint32_t from_start = blocks <= kMostCores ? blocks : kSampled, from_end = blocks <= kMostCores ? 0 : kSampled;
  for (uint32_t block = 0; block < from_start; ++block) run_here.push_back(block);
  for (uint32_t block = blocks - from_end; block < blocks; ++block) run_here.push_back(block);
  size_t runs = run_here.size();
  std::vector<std::thread> threads;
  std::vector<Counters> counters(runs);
  std::vector<std::string> errors(runs);
  std::vector<std::vector<GmAccess>> gm(runs);
  std::vector<uint32_t> used(runs);
  auto run = [&](size_t at) {
    uint32_t index = run_here[at];
    core.start(index, blocks);
    try {
      kernel();
      EMULATOR_CHECK(core.flags.empty(), "core %u ends with a flag set: the next kernel finds it", index);
      EMULATOR_CHECK(core.event_ids.empty(), "core %u ends with an event id that was not released", index);
    } catch (const std::exception &error) {
      errors[at] = error.what();
    }
    counters[at] = core.counters;
    gm[at] = std::move(core.gm);
    used[at] = core.used();
  };
  for (size_t at = 0; at < runs; ++at) threads.emplace_back(run, at);
  for (auto &thread : threads) thread.join();
  for (const auto &error : errors)
    if (!error.empty()) throw Error(error);
  std::vector<std::pair<GmAccess, uint32_t>> all;
  for (size_t at = 0; at < runs; ++at)
    for (const auto &access : gm[at]) all.push_back({access, run_here[at]});
  check_between_cores(all);
  report.add(counters);
  report.ub_bytes = std::max(report.ub_bytes, *std::max_element(used.begin(), used.end()));
}

}  // namespace emulator
}  // namespace AscendC
