// What the fuzzed kernels share: random numbers, buffers that end where the data ends, and comparison in doubles.
#ifndef NPU_GR_FUZZ_H
#define NPU_GR_FUZZ_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

#include "kernels.h"

extern const Kernels fuzzed_table;  // the linker is told which

namespace {

const Kernels &kernels = fuzzed_table;
std::mt19937 random_bits;

int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

int64_t one_of(std::initializer_list<int64_t> choices) {
  return choices.begin()[below(static_cast<int64_t>(choices.size()))];
}

float number() { return static_cast<float>(below(4001) - 2000) / 1000; }

typedef uint16_t bf16;

float wide(float x) { return x; }
float wide(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

template <typename T>
T rounded(float x) {  // to nearest, ties to even
  if constexpr (sizeof(T) == 4) return x;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t half = bits & 0xffff, up = half > 0x8000 || (half == 0x8000 && (bits >> 16 & 1));
  return static_cast<T>((bits >> 16) + up);
}

template <typename T>
constexpr int64_t kElement = sizeof(T) == 1   ? kInt8
                             : sizeof(T) == 2 ? kBFloat16
                                              : kFloat32;

// Half a unit in the last place, relative.
template <typename T>
constexpr double kRounding = sizeof(T) == 2 ? 1.0 / 256 : 1.0 / (1 << 24);

[[noreturn]] void fail(const char *what, int64_t place, double got, double want, double limit) {
  fprintf(stderr, "%s, element %ld: got %g, want %g within %g\n", what, static_cast<long>(place), got, want, limit);
  exit(1);
}

void expect(const char *what, int64_t place, double got, double want, double limit) {
  if (!(fabs(got - want) <= limit)) fail(what, place, got, want, limit);
}

// Bytes that start as NaN, at an address that is a multiple of 64; the byte behind the last is not there.
class Memory {
 public:
  explicit Memory(int64_t bytes) : at_(nullptr, free) {
    void *made;
    if (posix_memalign(&made, 64, static_cast<size_t>(bytes ? bytes : 1))) abort();
    memset(made, 0xff, static_cast<size_t>(bytes));
    at_.reset(made);
  }
  void *at() const { return at_.get(); }

 private:
  std::unique_ptr<void, void (*)(void *)> at_;
};

// A matrix [rows, width] of elements whose rows lie `stride` apart, at any address that an element may have.
template <typename T>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t width, int64_t stride)
      : rows_(rows),
        width_(width),
        stride_(stride),
        shift_(below(4)),
        memory_(static_cast<int64_t>(sizeof(T)) * (shift_ + (rows ? (rows - 1) * stride + width : 0))) {}

  static Matrix filled(int64_t rows, int64_t width, int64_t stride) {
    Matrix made(rows, width, stride);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < width; i++) made.at(r, i) = rounded<T>(number());
    return made;
  }

  static Matrix contiguous(int64_t rows, int64_t width) { return filled(rows, width, width); }

  T *data() const { return static_cast<T *>(memory_.at()) + shift_; }
  T &at(int64_t row, int64_t i) const { return data()[row * stride_ + i]; }
  double operator()(int64_t row, int64_t i) const { return wide(at(row, i)); }
  int64_t rows() const { return rows_; }
  int64_t width() const { return width_; }
  int64_t stride() const { return stride_; }

 private:
  int64_t rows_, width_, stride_, shift_;
  Memory memory_;
};

int64_t stride_of(int64_t width) { return width + below(2) * below(9); }  // sometimes columns of something wider

}  // namespace

#endif
