// A stand-in for the CUDA runtime that runs a kernel's threads on the CPU, one fiber each, so that indexing, barriers,
// shuffles and shared memory can be tested without a GPU. For tests only: slow, x86-64, one block at a time. Threads
// run in random order between barriers, so a missing barrier rarely goes unnoticed; shared memory is filled with poison
// at the start of every block.
//
// Under ThreadSanitizer every thread is a ThreadSanitizer fiber: only __syncthreads and __syncwarp order memory,
// __threadfence is one total order, and shuffles do not order memory.
#pragma once

#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

// The kernels' shared variables are static ones; the build collects them in a section of this name.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_shim_shared[], __stop_shim_shared[];

namespace shim {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;

// The event that a fiber waits for. Shuffles and barriers are different events, so that threads which meet at different
// ones are detected.
enum class Wait { kNone, kBlock, kWarp, kShuffle, kDone };

struct Fiber {
  void* stack_pointer = nullptr;
  void* sanitizer = nullptr;  // ThreadSanitizer's handle of the fiber
  Wait wait = Wait::kDone;
  unsigned shuffles = 0;
  unsigned barriers = 0;
  unsigned warp_barriers = 0;
};

struct Machine {
  Fiber fibers[kMaxThreads];
  char* stacks[kMaxThreads] = {};
  uint64_t slots[2 * kMaxThreads];  // [2, threads]: the value that each lane offers to the shuffle
  void* scheduler = nullptr;
  int current = -1;
  int threads = 0;
  uint64_t seed = 1;
  int poison = 0xcd;
  dim3 grid, block, index;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
};
extern Machine machine;

[[noreturn]] void fail(const char* what);
uint64_t random();
void run_block();
void launch_done();
void launched(const void* kernel);
unsigned thread_index();
unsigned block_index();
int lane();
void sync_threads();
void sync_warp();
void fence();
uint64_t shuffle_bits(unsigned mask, uint64_t value, int source_lane);

template <typename T>
T shuffle(unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = shuffle_bits(mask, bits, source_lane);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

struct Index {
  unsigned x;
};

// Calls of the harness about its memory. They do nothing here, because protected pages guard it.
inline void memory_made(void*, int64_t) {}
inline void memory_gone(void*) {}
inline void memory_undefined(void*, int64_t) {}

}  // namespace shim

#define threadIdx (shim::Index{shim::thread_index()})
#define blockIdx (shim::Index{shim::block_index()})
inline dim3 gridDim, blockDim;

inline void __syncthreads() { shim::sync_threads(); }
inline void __syncwarp() { shim::sync_warp(); }
inline void __threadfence() { shim::fence(); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  return shim::shuffle(mask, value, shim::lane() ^ offset);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return shim::shuffle(mask, value, shim::lane() / width * width + source % width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int offset) {
  return shim::shuffle(mask, value, shim::lane() < offset ? shim::lane() : shim::lane() - offset);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int offset) {
  return shim::shuffle(mask, value, shim::lane() + offset < 32 ? shim::lane() + offset : shim::lane());
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, T value) {
  const auto at = reinterpret_cast<char*>(address);
  if (at >= __start_shim_shared && at < __stop_shim_shared) shim::fail("a global store to shared memory");
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) shim::fail("a vector store off its boundary");
  *address = value;
}
template <typename T, typename U>
T atomicAdd(T* address, U value) {
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(address, static_cast<T>(value), __ATOMIC_RELAXED);
  } else {
    T old;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    T next = old + static_cast<T>(value);
    while (!__atomic_compare_exchange(address, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      next = old + static_cast<T>(value);
    }
    return old;
  }
}
template <typename T>
T atomicMin(T* address, T value) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  shim::Machine& m = shim::machine;
  m.grid = ::gridDim = config->gridDim;
  m.block = ::blockDim = config->blockDim;
  struct Context {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> values;
  } context{kernel, {arguments...}};
  m.context = &context;
  m.body = [](void* p) {
    auto& c = *static_cast<Context*>(p);
    std::apply(c.kernel, c.values);
  };
  std::vector<unsigned> blocks(config->gridDim.x);
  for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
  for (size_t i = blocks.size(); i-- > 1;) std::swap(blocks[i], blocks[shim::random() % (i + 1)]);
  for (unsigned block : blocks) {
    m.index.x = block;
    shim::run_block();
  }
  shim::launch_done();
  shim::launched(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}
