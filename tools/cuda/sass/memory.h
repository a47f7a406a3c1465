// Loads, stores and atomics of one lane.
#pragma once

#include "sass/operands.h"

namespace ptxrun {

struct SassMemory : SassOperands {
  using SassOperands::SassOperands;

  u32 local_address(const SInstr& in, int l) {
    const u32 at = static_cast<u32>(address_of(in, l, false));
    if (at % in.width != 0) fail(l, "local memory, misaligned");
    return at;
  }

  void memory(const SInstr& in, const Instr& carrier, int l) {
    const std::vector<Operand>& o = in.o;
    switch (in.op) {
      case s_LDC: {
        if (in.width >= 8) {
          u32 words[4];  // the instruction may overwrite the register of the address
          for (int i = 0; i < in.width / 4; ++i) words[i] = constant(o[1], l, static_cast<u32>(4 * i));
          for (int i = 0; i < in.width / 4; ++i) set(o[0], l, words[i], i);
          return;
        }
        u32 v;
        if (in.width == 1) {
          Operand aligned = o[1];
          const u32 rest = aligned.imm & 3;
          aligned.imm &= ~3u;
          v = constant(aligned, l, 0) >> (8 * rest) & 255;
        } else
          v = constant(o[1], l, 0);
        return set(o[0], l, v);
      }
      case s_LDS:
      case s_LDG: {
        bool undefined = false;
        const u64 at = address_of(in, l, in.op == s_LDG);
        u8* from;
        if (in.lock) {
          from = b->shared.data() + at;
          if (at + in.width > b->shared.size()) fail(l, "shared access");
        } else
          from = locate(carrier, l, at, in.width, false, false, undefined);
        if (in.width <= 2) {
          u32 v = 0;
          memcpy(&v, from, in.width);
          if (in.mod.back() == "S16") v = static_cast<u32>(static_cast<i16>(v));
          set(o[0], l, undefined ? rng.next() & 0xffff : v);
        } else {
          for (int i = 0; i < in.width / 4; ++i) {
            u32 v;
            memcpy(&v, from + 4 * i, 4);
            set(o[0], l, undefined ? rng.next() : v, i);
          }
        }
        return;
      }
      case s_STS:
      case s_STG: {
        bool ignored = false;
        const u64 at = address_of(in, l, in.op == s_STG);
        u8* to = locate(carrier, l, at, in.width, true, false, ignored);
        if (in.width <= 2) {
          const u32 v = raw(o[0], l);
          memcpy(to, &v, in.width);
        } else
          for (int i = 0; i < in.width / 4; ++i) {
            const u32 v = raw(o[0], l, i);
            memcpy(to + 4 * i, &v, 4);
          }
        mark_defined(carrier, to, in.width, false);
        return;
      }
      case s_LDL: {  // memory of the thread, to which registers are spilled
        const u32 at = local_address(in, l);
        for (u32 i = 0; i < in.width / 4u; ++i) {
          const auto found = x->local[l].find(at + 4 * i);
          if (found == x->local[l].end()) fail(l, "local memory never written");
          set(o[0], l, found->second, static_cast<int>(i));
        }
        return;
      }
      case s_STL: {
        const u32 at = local_address(in, l);
        for (u32 i = 0; i < in.width / 4u; ++i) x->local[l][at + 4 * i] = raw(o[0], l, static_cast<int>(i));
        return;
      }
      case s_ATOMS_ADD:
      case s_ATOMS_INC: {
        bool undefined = false;
        u8* at = locate(carrier, l, address_of(in, l, false), 4, true, true, undefined);
        if (undefined) report(l, "an atomic on memory never written");
        u32 v;
        memcpy(&v, at, 4);
        const u32 next = v + (in.op == s_ATOMS_INC ? 1 : raw(o[1], l));
        memcpy(at, &next, 4);
        return set(o[0], l, v);
      }
      case s_ATOMS_CAST: {
        bool undefined = false;
        u8* at = locate(carrier, l, address_of(in, l, false), 8, true, true, undefined);
        if (undefined) report(l, "an atomic on memory never written");
        u64 v;
        memcpy(&v, at, 8);
        const bool same = v == reg64(o[1].index, l);
        if (same) {
          v = reg64(o[2].index, l);
          memcpy(at, &v, 8);
        }
        return set64(o[0], l, same ? 1 : 0);
      }
      case s_ATOMG: {
        bool undefined = false;
        u8* at = locate(carrier, l, address_of(in, l, true), 4, true, true, undefined);
        if (undefined) report(l, "an atomic on memory never written");
        u32 v;
        memcpy(&v, at, 4);
        const u32 next = v + raw(o[1], l);
        memcpy(at, &next, 4);
        set(o[0], l, v);
        const u32 thread = static_cast<u32>(w->index * kLanes + l);
        b->atomic = ++clock;
        if (b->fenced[thread] != 0 && !released_by.empty())
          released_by[b->index * static_cast<u32>(threads) + thread] = {b->fenced[thread], clock};
        return;
      }
      case s_REDG: {
        bool undefined = false;
        u8* at = locate(carrier, l, address_of(in, l, true), 8, true, true, undefined);
        i64 v;
        memcpy(&v, at, 8);
        const i64 mine = static_cast<i64>(reg64(o[0].index, l));
        if (mine < v) memcpy(at, &mine, 8);
        return;
      }
      default:
        fail(l, "unknown instruction");
    }
  }
};

}  // namespace ptxrun
