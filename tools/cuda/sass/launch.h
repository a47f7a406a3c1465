// Scheduling: branches, convergence barriers, shuffles.
#pragma once

#include "sass/execute.h"

namespace ptxrun {

struct SassLaunch : SassExecute {
  using SassExecute::SassExecute;

  void try_warp_sync() override {
    u32 waiting = w->wait_warp;
    while (waiting != 0) {
      const int lane = __builtin_ctz(waiting);
      const SInstr& in = s.code[static_cast<size_t>(w->pc[lane])];
      u32 members;
      if (in.op == s_BSYNC)
        members = x->barrier[in.ra][lane];
      else
        members = in.o.empty() ? ~0u : raw(in.o[0], lane);
      members &= ~w->exited;
      bool complete = (members & ~w->wait_warp) == 0;
      for (int l = 0; complete && l < kLanes; ++l) {
        if (!(members >> l & 1)) continue;
        const SInstr& other = s.code[static_cast<size_t>(w->pc[l])];
        if (in.op == s_BSYNC ? w->pc[l] != w->pc[lane] : other.op != in.op) complete = false;
      }
      if (!complete) {
        waiting &= ~(1u << lane);
        continue;
      }
      if (in.op == s_WARPSYNC) ++w->warp_syncs;
      go_on(members);
      waiting &= ~members;
    }
  }

  // Lets lanes `m` of `mask` jump to an address plus a register. Returns the next instruction if all lanes share it,
  // else -1.
  int jump(const SInstr& in, u32 m, u32 mask, i64 from) {
    const u32 stay = mask & ~m;
    park(stay, pc + 1);
    bool same = stay == 0;
    int first = -1;
    for (int l = 0; l < kLanes; ++l) {
      if (!(m >> l & 1)) continue;
      const i64 to = from + static_cast<i32>(raw(in.o[0], l));
      if (to < 0 || to % 16 != 0 || to / 16 >= static_cast<i64>(s.code.size()))
        fail(l, "jump to " + std::to_string(to));
      w->pc[l] = static_cast<int>(to / 16);
      if (first < 0) first = w->pc[l];
      same &= w->pc[l] == first;
    }
    return same ? first : -1;
  }

  int run_group(u32 mask, int limit, int steps) override {
    x = &state[static_cast<size_t>((b - slots.data()) * warps + w->index)];
    int done = 0;
    while (done < steps && pc < limit) {
      const SInstr& in = s.code[static_cast<size_t>(pc)];
      u32 m = mask;
      if (in.guard.kind != oNONE) {
        u32 on = 0;
        if (in.guard.kind == oUP)
          on = pred(in.guard, 0) ? ~0u : 0;
        else
          on = in.guard.index == 7 ? ~0u : x->P[in.guard.index];
        if (in.guard.kind == oP && in.guard.inv) on = ~on;
        m &= on;
      }
      ++done;
      tick(m);
      if (static_cast<i64>(b->index) < trace_blocks) {
        Event e{static_cast<u32>(pc), 0, 0};
        if (in.op == s_LDG || in.op == s_STG) {
          std::set<u64>& seen = trace.seen[b->index];
          for (int l = 0; l < kLanes; ++l) {
            if (!(m >> l & 1)) continue;
            const u64 at = address_of(in, l, true);
            for (u64 sector = at / 32; sector <= (at + in.width - 1) / 32; ++sector) {
              if (seen.insert(sector).second)
                ++e.miss;
              else if (l == 0)
                ++e.hit;
            }
          }
        }
        trace.of[b->index * static_cast<u32>(warps) + static_cast<u32>(w->index)].push_back(e);
      }
      switch (in.op) {
        case s_BRA:
        case s_CALL:
        case s_BRADIV: {
          u32 taken = m;
          if (in.op == s_BRADIV) {
            const u32 want = raw(in.o[0], __builtin_ctz(mask));
            if ((mask & want) == (want & ~w->exited)) taken = 0;
          } else if (!in.o.empty()) {
            const bool on = pred(in.o[0], 0);
            if (in.o[0].kind == oUP)
              taken = on ? m : 0;
            else {
              taken = 0;
              for (int l = 0; l < kLanes; ++l)
                if ((m >> l & 1) && pred(in.o[0], l)) taken |= 1u << l;
            }
          }
          const u32 stay = mask & ~taken;
          if (taken == 0)
            ++pc;
          else if (stay == 0)
            pc = in.target;
          else {
            park(taken, in.target);
            park(stay, pc + 1);
            return done;
          }
          continue;
        }
        case s_BRX:
        case s_BRXU:
        case s_RET: {
          const i64 from = in.op == s_RET ? 0 : static_cast<i64>(k.code[static_cast<size_t>(pc)].line) + 16;
          const int to = jump(in, m, mask, from + in.off);
          if (to < 0) return done;
          pc = to;
          continue;
        }
        case s_EXIT:
          leave(m, mask);
          return done;
        case s_BAR:
          if (m != mask) fail(0, "barrier under a guard");
          wait_for_block(m);
          return done;
        case s_NOP:
          // ptxas replaces a __syncwarp by this if it knows that the warp is converged: memory order only.
          if (m == (~0u & ~w->exited)) ++w->warp_syncs;
          ++pc;
          continue;
        case s_BSSY:
          for (int l = 0; l < kLanes; ++l)
            if (m >> l & 1) x->barrier[in.ra][l] = m;
          ++pc;
          continue;
        case s_BREAK: {
          u32 gone = m;
          for (int l = 0; l < kLanes && !in.o.empty(); ++l)
            if ((m >> l & 1) && !pred(in.o[0], l)) gone &= ~(1u << l);
          for (int l = 0; l < kLanes; ++l) x->barrier[in.ra][l] &= ~gone;
          ++pc;
          if (gone != 0) {
            park(mask, pc);
            try_warp_sync();
            return done;
          }
          continue;
        }
        case s_BSYNC:
        case s_WARPSYNC: {
          if (m == 0) {
            ++pc;
            continue;
          }
          park(m, pc);
          park(mask & ~m, pc + 1);
          w->run &= ~m;
          w->wait_warp |= m;
          const int before = pc;
          try_warp_sync();
          if (m == mask && (w->wait_warp & m) == 0 && w->run == m) {
            pc = before + 1;
            continue;
          }
          return done;
        }
        case s_MEMBAR:
          fence(m);
          ++pc;
          continue;
        case s_SHFL: {
          u32 value[kLanes];
          for (int l = 0; l < kLanes; ++l) value[l] = raw(in.o[2], l);
          for (int l = 0; l < kLanes; ++l) {
            if (!(m >> l & 1)) continue;
            const auto [j, inside] = shuffle_source(in.mufu, l, raw(in.o[3], l), raw(in.o[4], l));
            if (!(m >> j & 1)) fail(l, "shuffle from lane " + std::to_string(j) + ", which is not active");
            set(in.o[1], l, value[j]);
            setp(in.o[0], l, inside);
          }
          ++pc;
          continue;
        }
        case s_VOTE: {
          u32 votes = 0;
          for (int l = 0; l < kLanes; ++l)
            if ((m >> l & 1) && pred(in.o[1], l)) votes |= 1u << l;
          if (m != 0 && in.o[0].kind == oU) set(in.o[0], 0, votes);
          if (m != 0 && in.o[0].kind == oUP) setp(in.o[0], 0, in.mufu == 1 ? votes == m : votes != 0);
          ++pc;
          continue;
        }
        default:
          if (in.uniform || in.op == s_R2UR || (in.op == s_S2R && in.o[0].kind == oU)) {
            if (m != 0) exec(in, k.code[static_cast<size_t>(pc)], __builtin_ctz(m));
          } else {
            for (u32 rest = m; rest != 0; rest &= rest - 1)
              exec(in, k.code[static_cast<size_t>(pc)], __builtin_ctz(rest));
          }
          ++pc;
      }
    }
    park(mask, pc);
    return done;
  }

  void start_block(Block& slot, u32 index) override {
    if (bank.empty()) {
      bank.assign(s.params_at, 0);
      if (s.params_at == kParams90) memcpy(bank.data(), block, 12);
      memcpy(bank.data() + grid_at(), grid, 12);
      bank.insert(bank.end(), params.begin(), params.end());
      state.resize(slots.size() * static_cast<size_t>(warps));
    }
    Launch::start_block(slot, index);
    for (Warp& warp : slot.warps) {
      for (u32& v : warp.file_memory) v = 0x7fa00000u | (rng.next() & 0xffff);  // an uninitialised register: any value
      SassWarp& e = state[static_cast<size_t>((&slot - slots.data()) * warps + warp.index)];
      for (u32& p : e.P) p = rng.next();
      for (int i = 0; i < (s.params_at == kParams100 ? 128 : 64); ++i) e.U[i] = rng.next();
      for (u8& u : e.UP) u = rng.next() & 1;
      for (auto& words : e.local) words.clear();
    }
  }
};

}  // namespace ptxrun
