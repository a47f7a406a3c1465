// Buffers of exact size, random numbers for them, and the hash of all results.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>

#include "math/storage.h"

namespace {

using namespace focalkern;

std::mt19937 rng(7);
uint64_t hash = 1469598103934665603ull;

template <typename T>
void mix(const T* p, size_t n) {
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < n * sizeof(T); ++i) h = (h ^ reinterpret_cast<const unsigned char*>(p)[i]) * 1099511628211ull;
  hash = (hash ^ h) * 1099511628211ull;
}
template <typename T>
struct Buffer {
  char* base;
  T* p;
  size_t n;
  explicit Buffer(size_t n_, size_t offset = 0) : n(n_) {  // offset in bytes from a 16-byte boundary
    base = static_cast<char*>(malloc(n * sizeof(T) + offset + (n == 0)));
    p = reinterpret_cast<T*>(base + offset);
    memset(base, 0xff, n * sizeof(T) + offset);
  }
  ~Buffer() { free(base); }
  Buffer(const Buffer&) = delete;
  T& operator[](size_t i) { return p[i]; }
};
template <typename S>
S make(float x) {
  return Store<S>::from_compute(x);
}
template <typename S>
void fill(S* p, size_t n, float scale = 3) {
  std::normal_distribution<float> d(0, scale);
  for (size_t i = 0; i < n; ++i) p[i] = make<S>(d(rng));
}

template <typename S>
void softmax(S* x, int rows, int classes) {
  for (int r = 0; r < rows; ++r, x += classes) {
    double sum = 0;
    for (int c = 0; c < classes; ++c) sum += std::exp(static_cast<double>(load_as_compute(x[c])));
    for (int c = 0; c < classes; ++c) {
      x[c] = make<S>(static_cast<float>(std::exp(static_cast<double>(load_as_compute(x[c]))) / sum));
    }
  }
}

}  // namespace
