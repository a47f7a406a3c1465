// A stand-in for the CUDA runtime that runs a kernel's threads on the CPU, one fiber each, so that indexing, barriers,
// shuffles and shared memory can be tested without a GPU. Test-only: slow, x86-64, one block at a time, and blind to
// memory ordering; but threads run in a random order between barriers, so a missing barrier rarely goes unseen.
#pragma once

#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
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
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
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

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace shim {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 256 << 10;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "cuda shim: %s\n", what);
  abort();
}

// What a fiber waits for. A shuffle is told from a barrier, so that threads which meet at different ones are caught.
enum class Wait { kNone, kBlock, kWarp, kShuffle, kDone };

struct Fiber {
  void* stack_pointer = nullptr;
  Wait wait = Wait::kDone;
  unsigned shuffles = 0;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<char*> stacks;
  std::vector<uint64_t> slots;  // [2, threads]: what each lane offers to the shuffle
  void* scheduler = nullptr;
  int current = -1;
  int threads = 0;
  uint64_t seed = 1;
  std::function<void()> body;

  uint64_t random() {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return seed >> 33;
  }
};
inline Machine machine;

// Saves the callee-saved registers on the stack, and goes on on another one.
extern "C" void shim_switch(void** save_stack_pointer, void* stack_pointer);

inline void yield(Wait wait) {
  Machine& m = machine;
  const int self = m.current;
  m.fibers[self].wait = wait;
  shim_switch(&m.fibers[self].stack_pointer, m.scheduler);
  ::threadIdx.x = static_cast<unsigned>(self);
}

inline void fiber_main() {
  machine.body();
  yield(Wait::kDone);
  fail("a finished thread was resumed");
}

inline void release(int begin, int end, Wait wait) {
  for (int i = begin; i < end; ++i) {
    if (machine.fibers[i].wait != wait) return;
  }
  for (int i = begin; i < end; ++i) machine.fibers[i].wait = Wait::kNone;
}

inline void run_block() {
  Machine& m = machine;
  m.threads = static_cast<int>(blockDim.x);
  m.fibers.assign(m.threads, Fiber());
  m.slots.assign(2 * m.threads, 0);
  while (static_cast<int>(m.stacks.size()) < m.threads) {
    m.stacks.push_back(static_cast<char*>(aligned_alloc(16, kStackBytes)));
  }
  for (int i = 0; i < m.threads; ++i) {
    void** top = reinterpret_cast<void**>(m.stacks[i] + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);  // the address that shim_switch returns to
    m.fibers[i].stack_pointer = top - 6;
    m.fibers[i].wait = Wait::kNone;
  }
  std::vector<int> order(m.threads);
  for (int i = 0; i < m.threads; ++i) order[i] = i;
  int done = 0;
  while (done < m.threads) {
    for (int i = m.threads - 1; i > 0; --i) std::swap(order[i], order[m.random() % (i + 1)]);
    int ran = 0;
    for (int i : order) {
      if (m.fibers[i].wait != Wait::kNone) continue;
      ++ran;
      m.current = i;
      ::threadIdx.x = static_cast<unsigned>(i);
      shim_switch(&m.scheduler, m.fibers[i].stack_pointer);
      done += m.fibers[i].wait == Wait::kDone;
    }
    if (ran == 0) fail("deadlock: threads wait at different barriers, or some have left");
    for (int first = 0; first < m.threads; first += kWarpSize) {
      const int last = std::min(first + kWarpSize, m.threads);
      release(first, last, Wait::kWarp);
      release(first, last, Wait::kShuffle);
    }
    release(0, m.threads, Wait::kBlock);
  }
}

template <typename T>
T shuffle(unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  if (mask != 0xffffffffu) fail("only full-warp shuffles are known");
  Machine& m = machine;
  const int self = m.current;
  // Two sets of slots in turn: a fast lane may offer its next value before a slow one has read the last.
  uint64_t* slots = m.slots.data() + (m.fibers[self].shuffles++ % 2) * m.threads;
  memcpy(&slots[self], &value, sizeof(T));
  yield(Wait::kShuffle);
  T result;
  memcpy(&result, &slots[self / kWarpSize * kWarpSize + source_lane], sizeof(T));
  return result;
}

inline int lane() { return machine.current % kWarpSize; }

// What the harness tells of its memory: here pages guard it, and that is all.
inline void memory_made(void*, int64_t) {}
inline void memory_gone(void*) {}
inline void memory_undefined(void*, int64_t) {}

}  // namespace shim

inline void __syncthreads() { shim::yield(shim::Wait::kBlock); }
inline void __syncwarp() { shim::yield(shim::Wait::kWarp); }
inline void __threadfence() {}
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
T __ldcg(const T* address) {
  return *address;
}
// Shared memory is static here: the module's own, between these two.
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];
template <typename T>
void __stcg(T* address, T value) {
  const auto at = reinterpret_cast<char*>(address);
  if (at >= __bss_start && at < _end) shim::fail("a global store to shared memory");
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) shim::fail("a vector store off its boundary");
  *address = value;
}
template <typename T, typename U>
T atomicAdd(T* address, U value) {
  const T old = *address;
  *address = old + static_cast<T>(value);
  return old;
}

template <typename T>
T atomicMin(T* address, T value) {
  const T old = *address;
  *address = value < old ? value : old;
  return old;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  ::gridDim = config->gridDim;
  ::blockDim = config->blockDim;
  std::tuple<std::decay_t<Arguments>...> values(arguments...);
  shim::machine.body = [&] { std::apply(kernel, values); };
  std::vector<unsigned> blocks(config->gridDim.x);
  for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
  for (size_t i = blocks.size() - 1; i > 0; --i) std::swap(blocks[i], blocks[shim::machine.random() % (i + 1)]);
  for (unsigned block : blocks) {
    ::blockIdx.x = block;
    shim::run_block();
  }
  return cudaSuccess;
}
