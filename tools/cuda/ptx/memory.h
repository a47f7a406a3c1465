// Global memory that kernels may access, and the last access to each byte.
#pragma once

#include "ptx/basics.h"

namespace ptxrun {

// The last accesses to a byte. Threads are numbered block * 1024 + thread + 1.
struct Cell {
  u32 writer, write_barrier, write_warp_sync, write_clock;
  u32 reader, read_barrier, read_warp_sync;  // reader: a thread, or kManyLanes, kManyWarps
  u32 launch : 31, atomic : 1;
};
constexpr u32 kManyWarps = 0xffffffffu;
constexpr u32 kManyLanes = 0x80000000u;  // combined with any thread of the warp

struct Allocation {
  u64 base, size;
  std::vector<u8> undefined;  // per byte; empty if every byte is defined
  Cell* cells = nullptr;  // per byte; allocated at the first access
};
inline std::map<u64, Allocation> allocations;

inline Allocation* last_found = nullptr;  // reset whenever the table changes

inline Allocation* find_allocation(u64 address) {
  if (last_found != nullptr && address - last_found->base < last_found->size) return last_found;
  auto it = allocations.upper_bound(address);
  if (it == allocations.begin()) return nullptr;
  --it;
  if (address - it->second.base >= it->second.size) return nullptr;
  return last_found = &it->second;
}

}  // namespace ptxrun
