// What the tests of the emulator's calls share: a kernel on one core, its complaint, buffers that hold known values.
#pragma once
#define ASCENDC_CPU_EMULATOR 1
#define NPU_GR_CANN 90000  // with what is newer than the least
#include "../ascendc_emulator.h"

#include <atomic>

using namespace AscendC;

namespace {

int failures = 0, checks = 0;

void expect(bool ok, const char *what) {
  ++checks;
  if (!ok) std::printf("FAILED %s\n", what), ++failures;
}

// The complaint of a kernel on one core; empty if it has none.
std::string complaint(const std::function<void()> &kernel, uint32_t cores = 1) {
  emulator::Report report;
  try {
    emulator::launch(cores, report, kernel);
  } catch (const emulator::Error &error) {
    return error.what();
  }
  return "";
}
void clean(const char *what, const std::function<void()> &kernel) {
  std::string found = complaint(kernel);
  expect(found.empty(), (std::string(what) + ": " + found).c_str());
}
void rejected(const char *why, const std::function<void()> &kernel, uint32_t cores = 1) {
  std::string found = complaint(kernel, cores);
  expect(found.find(why) != std::string::npos, (std::string("wants '") + why + "', gives '" + found + "'").c_str());
}

// Buffers of a small kernel: scratch tensors that hold known values, as a vector instruction would have left them.
struct Bench {
  TPipe pipe;
  template <typename T>
  LocalTensor<T> empty(uint32_t count) {
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, uint32_t(emulator::up(count * sizeof(T), 256)));
    return buffer.Get<T>();
  }
  template <typename T>
  LocalTensor<T> holding(const std::vector<T> &values) {
    auto tensor = empty<T>(uint32_t(values.size()));
    std::copy(values.begin(), values.end(), tensor.at());
    return tensor;
  }
};
template <typename T>
bool holds(const LocalTensor<T> &tensor, const std::vector<T> &want) {
  return std::memcmp(tensor.at(), want.data(), want.size() * sizeof(T)) == 0;
}
template <typename T>
GlobalTensor<T> gm(std::vector<T> &values) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer((__gm__ T *)values.data(), values.size());
  return tensor;
}
bool poison(const void *at, size_t bytes) {
  auto p = static_cast<const uint8_t *>(at);
  return std::all_of(p, p + bytes, [](uint8_t b) { return b == emulator::kPoison; });
}
std::vector<float> iota(int count, float first = 0) {
  std::vector<float> values(count);
  for (int i = 0; i < count; ++i) values[i] = first + float(i);
  return values;
}
constexpr float INF = std::numeric_limits<float>::infinity();
using In = TQue<TPosition::VECIN, 2>;
using Out = TQue<TPosition::VECOUT, 2>;

}  // namespace
