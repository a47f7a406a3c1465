// Scheduling: which lanes of a warp continue, which warp of a block, which block of the grid.
#pragma once

#include "ptx/execute.h"

namespace ptxrun {

struct Launch : Execute {
  using Execute::Execute;

  // The lane whose value shfl gives to a lane; the lane itself if the other lies outside its segment.
  struct ShuffleSource {
    int lane;
    bool inside;
  };
  static ShuffleSource shuffle_source(int mode, int lane, u32 b, u32 c) {
    const i32 by = static_cast<i32>(b & 31), clamp = static_cast<i32>(c & 31), segment = static_cast<i32>(c >> 8 & 31);
    const i32 least = lane & segment, most = least | (clamp & ~segment);
    const i32 from = mode == 0 ? lane - by : mode == 1 ? lane + by : mode == 2 ? lane ^ by : least | (by & ~segment);
    const bool inside = mode == 0 ? from >= most : from <= most;
    return {inside ? from : lane, inside};
  }

  // Lets lanes continue that have waited for each other.
  void go_on(u32 members) {
    for (int l = 0; l < kLanes; ++l)
      if (members >> l & 1) ++w->pc[l];
    w->wait_warp &= ~members;
    w->run |= members;
  }

  // For lanes that wait for others of their warp: lets them continue once all lanes of their mask have arrived.
  virtual void try_warp_sync() {
    u32 waiting = w->wait_warp;
    while (waiting != 0) {
      const int lane = __builtin_ctz(waiting);
      const Instr& in = k.code[static_cast<size_t>(w->pc[lane])];
      const int mask_reg = in.op == SHFL ? in.a[3] : in.a[0];
      u32 members = r32(mask_reg)[lane];
      members &= ~w->exited;
      bool complete = (members & ~w->wait_warp) == 0;
      bool mixed = false;
      for (int l = 0; complete && l < kLanes; ++l) {
        if (!(members >> l & 1)) continue;
        const Instr& other = k.code[static_cast<size_t>(w->pc[l])];
        if (other.op != in.op || other.mode != in.mode) complete = false;
        mixed |= w->pc[l] != w->pc[lane];
      }
      if (!complete) {
        waiting &= ~(1u << lane);
        continue;
      }
      if (mixed) ++k.mixed_shuffles;
      if (in.op == SHFL) {
        u32 value[kLanes], defined = 0;
        for (int l = 0; l < kLanes; ++l) {
          if (!(members >> l & 1)) continue;
          const Instr& mine = k.code[static_cast<size_t>(w->pc[l])];
          value[l] = r32(mine.a[0])[l];
          if (def(mine.a[0]) >> l & 1) defined |= 1u << l;
        }
        for (int l = 0; l < kLanes; ++l) {
          if (!(members >> l & 1)) continue;
          const Instr& mine = k.code[static_cast<size_t>(w->pc[l])];
          const auto [j, inside] = shuffle_source(mine.mode, l, r32(mine.a[1])[l], r32(mine.a[2])[l]);
          if (!(members >> j & 1)) {
            pc = w->pc[l];
            fail(l, "shuffle from lane " + std::to_string(j) + ", which takes no part");
          }
          r32(mine.d[0])[l] = value[j];
          set_def(mine.d[0], 1u << l, (defined >> j & 1) << l);
          if (mine.d[1] >= 0) {
            r32(mine.d[1])[l] = inside;
            set_def(mine.d[1], 1u << l, 1u << l);
          }
        }
      } else {
        ++w->warp_syncs;
      }
      go_on(members);
      waiting &= ~members;
    }
  }

  void run_warp(int budget) {
    while (budget > 0 && w->run != 0) {
      // Selects the group of lanes that continues.
      u32 mask = 0;
      int limit = INT32_MAX;
      int steps = budget;
      if (settings.random_lanes != 0) {
        int nth = static_cast<int>(rng.next() % static_cast<u32>(__builtin_popcount(w->run)));
        u32 rest = w->run;
        while (nth-- > 0) rest &= rest - 1;
        pc = w->pc[__builtin_ctz(rest)];
        steps = 1 + static_cast<int>(rng.next() % 64);
      } else {
        pc = INT32_MAX;
        for (int l = 0; l < kLanes; ++l)
          if (w->run >> l & 1) pc = std::min(pc, w->pc[l]);
      }
      for (int l = 0; l < kLanes; ++l) {
        if (!(w->run >> l & 1)) continue;
        if (w->pc[l] == pc)
          mask |= 1u << l;
        else if (w->pc[l] > pc)
          limit = std::min(limit, w->pc[l]);
      }
      if (settings.random_lanes != 0) limit = INT32_MAX;
      budget -= run_group(mask, limit, std::min(steps, budget));
    }
  }
  void park(u32 mask, int at) {
    for (int l = 0; l < kLanes; ++l)
      if (mask >> l & 1) w->pc[l] = at;
  }
  // Counts an instruction of lanes `m`.
  void tick(u32 m) {
    ++clock;
    if (clock > 0xfffffff0u) clock = 1;
    k.warp_count[static_cast<size_t>(pc)] += 1;
    k.lane_count[static_cast<size_t>(pc)] += static_cast<u64>(__builtin_popcount(m));
  }
  // The kernel ends for lanes `m` of `mask`.
  void leave(u32 m, u32 mask) {
    w->run &= ~m;
    w->exited |= m;
    park(m, pc);
    park(mask & ~m, pc + 1);
    try_warp_sync();
  }
  void wait_for_block(u32 m) {
    park(m, pc);
    w->run &= ~m;
    w->wait_bar |= m;
  }
  void fence(u32 m) {
    for (int l = 0; l < kLanes; ++l)
      if (m >> l & 1) b->fenced[static_cast<size_t>(w->index * kLanes + l)] = clock;
    b->acquired = b->atomic;
  }
  virtual int run_group(u32 mask, int limit, int steps) {
    int done = 0;
    while (done < steps && pc < limit) {
      const Instr& in = k.code[static_cast<size_t>(pc)];
      u32 m = mask;
      if (in.guard >= 0) {
        const u32* p = r32(in.guard);
        need_defined(in.guard, mask, "a branch or guard");
        u32 on = 0;
        for (int l = 0; l < kLanes; ++l) on |= (p[l] & 1u) << l;
        m &= in.guard_not ? ~on : on;
      }
      ++done;
      tick(m);
      switch (in.op) {
        case BRA: {
          const u32 stay = mask & ~m;
          if (m == 0) {
            ++pc;
          } else if (stay == 0) {
            pc = in.target;
          } else {
            park(m, in.target);
            park(stay, pc + 1);
            return done;
          }
          continue;
        }
        case RET: {
          leave(m, mask);
          return done;
        }
        case BAR:
          if (m != mask) fail(__builtin_ctz(mask & ~m), "a barrier under a guard that differs");
          wait_for_block(m);
          return done;
        case SHFL:
        case BARWARP: {
          if (m != mask) fail(__builtin_ctz(mask & ~m), "a warp barrier under a guard that differs");
          const int mask_reg = in.op == SHFL ? in.a[3] : in.a[0];
          for (int l = 0; l < kLanes; ++l) {
            if ((m >> l & 1) && !(r32(mask_reg)[l] >> l & 1)) fail(l, "a lane outside its own mask");
          }
          park(m, pc);
          w->run &= ~m;
          w->wait_warp |= m;
          const int before = pc;
          try_warp_sync();
          if ((w->wait_warp & m) == 0 && w->run == m) {
            pc = before + 1;
            continue;
          }
          return done;
        }
        case MEMBAR:
          fence(m);
          ++pc;
          continue;
        default:
          if (m == ~0u)
            execute<true>(in, m);
          else if (m != 0)
            execute<false>(in, m);
          ++pc;
      }
    }
    park(mask, pc);
    return done;
  }

  // -- blocks
  virtual void start_block(Block& slot, u32 index) {
    slot.index = index;
    slot.live = true;
    slot.barriers = 0;
    slot.atomic = slot.acquired = 0;
    std::fill(slot.shared.begin(), slot.shared.end(), 0xcd);
    std::fill(slot.shared_undefined.begin(), slot.shared_undefined.end(), 1);
    std::fill(slot.cells.begin(), slot.cells.end(), Cell{});
    std::fill(slot.fenced.begin(), slot.fenced.end(), 0);
    for (Warp& warp : slot.warps) {
      warp.block = &slot;
      std::fill(warp.defined.begin(), warp.defined.end(), 0);
      for (const auto& c : k.constants) warp.defined[static_cast<size_t>(c.reg)] = ~0u;
      for (auto& [name, reg] : k.specials) {
        warp.defined[static_cast<size_t>(reg)] = ~0u;
        u32* to = warp.file + k.regs[static_cast<size_t>(reg)].offset;
        for (int l = 0; l < kLanes; ++l) {
          const u32 t = static_cast<u32>(warp.index * kLanes + l);
          const u32 i = name.back() == 'x' ? 0 : name.back() == 'y' ? 1 : 2;
          u32 value = static_cast<u32>(l);
          if (name.compare(0, 5, "%tid.") == 0)
            value = i == 0 ? t % block[0] : i == 1 ? t / block[0] % block[1] : t / block[0] / block[1];
          else if (name.compare(0, 6, "%ntid.") == 0)
            value = block[i];
          else if (name.compare(0, 7, "%ctaid.") == 0)
            value = i == 0 ? index % grid[0] : i == 1 ? index / grid[0] % grid[1] : index / grid[0] / grid[1];
          else if (name.compare(0, 8, "%nctaid.") == 0)
            value = grid[i];
          to[l] = value;
        }
      }
      warp.warp_syncs = 0;
      const int left = threads - warp.index * kLanes;
      warp.run = left >= kLanes ? ~0u : (1u << left) - 1;
      warp.exited = ~warp.run;
      warp.wait_bar = warp.wait_warp = 0;
      std::fill(warp.pc, warp.pc + kLanes, 0);
    }
  }
  void run_all() {
    u64 blocks = static_cast<u64>(grid[0]) * grid[1] * grid[2];
    if (settings.only_blocks > 0) blocks = std::min(blocks, static_cast<u64>(settings.only_blocks));
    std::vector<u32> order(blocks);
    for (u64 i = 0; i < blocks; ++i) order[i] = static_cast<u32>(i);
    for (u64 i = blocks - 1; i > 0; --i) std::swap(order[i], order[rng.next() % (i + 1)]);
    slots.resize(static_cast<size_t>(std::min<u64>(blocks, static_cast<u64>(settings.resident))));
    for (Block& slot : slots) {
      slot.shared.resize(k.shared_end);
      slot.shared_undefined.resize(k.shared_end);
      slot.shared_valid.assign(k.shared_end, 0);
      slot.cells.resize(k.shared_end);
      slot.fenced.resize(static_cast<size_t>(warps * kLanes));
      for (const auto& v : k.shared) std::fill_n(slot.shared_valid.begin() + v.begin, v.size, 1);
      slot.warps.resize(static_cast<size_t>(warps));
      for (int i = 0; i < warps; ++i) {
        Warp& warp = slot.warps[static_cast<size_t>(i)];
        warp.index = i;
        warp.file_memory.resize(k.file_size + 16);
        warp.file = reinterpret_cast<u32*>((reinterpret_cast<uintptr_t>(warp.file_memory.data()) + 63) / 64 * 64);
        warp.defined.resize(k.regs.size());
        for (const auto& c : k.constants) {
          const RegInfo& reg = k.regs[static_cast<size_t>(c.reg)];
          for (int l = 0; l < kLanes; ++l) {
            if (reg.wide)
              reinterpret_cast<u64*>(warp.file + reg.offset)[l] = c.bits;
            else
              warp.file[reg.offset + static_cast<u32>(l)] = static_cast<u32>(c.bits);
          }
        }
      }
    }
    if (settings.global_races != 0) released_by.assign(blocks * static_cast<u64>(threads), Release{});
    size_t next = 0;
    size_t finished = 0;
    std::vector<int> ready;
    while (finished < blocks) {
      Block& slot = slots[rng.next() % slots.size()];
      if (!slot.live) {
        if (next == order.size()) continue;
        start_block(slot, order[next++]);
      }
      b = &slot;
      ready.clear();
      u32 alive = 0, at_barrier = 0, gone = 0;
      for (Warp& warp : slot.warps) {
        if (warp.run != 0) ready.push_back(warp.index);
        alive += static_cast<u32>(__builtin_popcount(~warp.exited));
        at_barrier += static_cast<u32>(__builtin_popcount(warp.wait_bar));
      }
      gone = static_cast<u32>(threads) - alive;
      if (ready.empty()) {
        if (alive == 0) {
          slot.live = false;
          ++finished;
          continue;
        }
        if (at_barrier == alive) {
          int first = -1;
          bool mixed = false;
          for (Warp& warp : slot.warps) {
            for (int l = 0; l < kLanes; ++l) {
              if (!(warp.wait_bar >> l & 1)) continue;
              if (first < 0) first = warp.pc[l];
              mixed |= warp.pc[l] != first;
              ++warp.pc[l];
            }
            warp.run |= warp.wait_bar;
            warp.wait_bar = 0;
          }
          if (mixed) ++k.mixed_barriers;
          if (gone != 0) {
            w = &slot.warps[0];
            pc = first;
            report(0, "a barrier after " + std::to_string(gone) + " threads of the block have left");
          }
          ++slot.barriers;
          continue;
        }
        for (Warp& warp : slot.warps) {
          if (warp.wait_warp == 0) continue;
          w = &warp;
          pc = warp.pc[__builtin_ctz(warp.wait_warp)];
          fail(__builtin_ctz(warp.wait_warp), "waiting for lanes that wait elsewhere (" + hex(warp.wait_warp) +
                                                  " here, " + hex(warp.wait_bar) + " at a barrier)");
        }
        fail(0, "endless wait");
      }
      w = &slot.warps[static_cast<size_t>(ready[rng.next() % ready.size()])];
      const u32 draw = rng.next();
      run_warp(draw % 8 == 0 ? 1 + static_cast<int>(draw >> 8 & 15) : 1 + static_cast<int>(draw >> 8 & 2047));
    }
    k.launches += 1;
    k.blocks += blocks;
  }
};

// The parts of a kernel launch: from its PTX, or from machine code (sassrun) if that was loaded.
using MakeLaunch = std::unique_ptr<Launch> (*)(Kernel&, const u32 (&)[3], const u32 (&)[3]);
inline std::unique_ptr<Launch> make_ptx_launch(Kernel& k, const u32 (&grid)[3], const u32 (&block)[3]) {
  return std::make_unique<Launch>(k, grid, block);
}
inline MakeLaunch make_launch = make_ptx_launch;

}  // namespace ptxrun
