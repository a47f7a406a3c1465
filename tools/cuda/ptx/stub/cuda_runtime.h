// The functions that tools/cuda/shim/harness.cpp calls, implemented by ptxrun.
#pragma once

#include <cstdint>
#include <cstring>

extern "C" {
void ptxrun_set(const char* name, int64_t value);
void ptxrun_register(void* memory, int64_t size);
void ptxrun_unregister(void* memory);
void ptxrun_mark_undefined(void* memory, int64_t size);
}

namespace shim {

struct Seed {
  Seed& operator=(uint64_t value) {
    ptxrun_set("seed", static_cast<int64_t>(value));
    return *this;
  }
};
struct Machine {
  Seed seed;
};
inline Machine machine;

inline void memory_made(void* memory, int64_t bytes) { ptxrun_register(memory, bytes); }
inline void memory_gone(void* memory) { ptxrun_unregister(memory); }
inline void memory_undefined(void* memory, int64_t bytes) { ptxrun_mark_undefined(memory, bytes); }

}  // namespace shim
