// Blocks, warps and their registers.
#pragma once

#include "ptx/memory.h"
#include "ptx/ptx.h"

namespace ptxrun {

struct Block;
struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::vector<u32> file_memory;
  u32* file = nullptr;
  std::vector<u32> defined;
  int pc[kLanes];
  u32 run, wait_bar, wait_warp, exited;
  u32 warp_syncs = 0;
};

struct Block {
  u32 index = 0;
  std::vector<Warp> warps;
  std::vector<u8> shared;
  std::vector<u8> shared_undefined;
  std::vector<u8> shared_valid;
  std::vector<Cell> cells;
  u32 barriers = 0;
  u32 atomic = 0;           // clock of the last global atomic
  u32 acquired = 0;  // the same, for atomics that a fence has followed
  std::vector<u32> fenced;  // per thread: clock of the last fence
  bool live = false;
};

// A launch, as its parts share it: the current warp, its registers, and error reports.
struct Threads {
  Kernel& k;
  u32 grid[3], block[3];
  int threads, warps;
  std::vector<u8> params;
  std::vector<Block> slots;
  // A write before `fence` is visible to a block that has acquired `atomic`.
  struct Release {
    u32 fence, atomic;
  };
  std::vector<Release> released_by;  // [grid * threads]; only if global races are checked
  Threads(Kernel& kernel, const u32 (&g)[3], const u32 (&c)[3])
      : k(kernel),
        grid{g[0], g[1], g[2]},
        block{c[0], c[1], c[2]},
        threads(static_cast<int>(c[0] * c[1] * c[2])),
        warps((threads + 31) / 32) {}
  u32 clock = 1;
  u32 id = 0;
  // the current warp
  Warp* w = nullptr;
  Block* b = nullptr;
  int pc = 0;

  [[noreturn]] void fail(int lane, const std::string& what) {
    report(lane, what);
    throw Stop{};
  }
  void report(int lane, const std::string& what) {
    const Instr& in = k.code[static_cast<size_t>(pc)];
    std::string message = "ptxrun: " + k.name + ": block " + std::to_string(b == nullptr ? 0 : b->index) + " thread " +
                          std::to_string(w == nullptr ? 0 : w->index * kLanes + lane) + ": " + what + " at PTX line " +
                          std::to_string(in.line) + ": " + in.text;
    if (static_cast<i64>(errors.size()) < settings.max_errors) fprintf(stderr, "%s\n", message.c_str());
    errors.push_back(message);
    if (static_cast<i64>(errors.size()) >= settings.max_errors) throw Stop{};
  }

  // -- registers
  u32* r32(int reg) { return w->file + k.regs[static_cast<size_t>(reg)].offset; }
  u64* r64(int reg) { return reinterpret_cast<u64*>(w->file + k.regs[static_cast<size_t>(reg)].offset); }
  u64 get(int reg, int lane) { return k.regs[static_cast<size_t>(reg)].wide ? r64(reg)[lane] : r32(reg)[lane]; }
  void put(int reg, int lane, u64 value) {
    if (k.regs[static_cast<size_t>(reg)].wide)
      r64(reg)[lane] = value;
    else
      r32(reg)[lane] = static_cast<u32>(value);
  }
  u32 def(int reg) { return w->defined[static_cast<size_t>(reg)]; }
  void set_def(int reg, u32 mask, u32 value) {
    u32& d = w->defined[static_cast<size_t>(reg)];
    d = (d & ~mask) | (value & mask);
  }
};

}  // namespace ptxrun
