// Loads, stores and atomics: bounds, alignment, races, and memory that was never written.
#pragma once

#include <sys/mman.h>

#include "ptx/threads.h"

namespace ptxrun {

struct Access : Threads {
  using Threads::Threads;

  void touch(Cell& c, int lane, bool write, bool atomic, bool global) {
    const u32 thread = static_cast<u32>(w->index * kLanes + lane);
    const u32 me = (global ? b->index * 1024 : 0) + thread + 1;
    const u32 warp_of_me = (me - 1) / kLanes;
    if (c.launch != (id & 0x7fffffffu)) {
      c = Cell{};
      c.launch = id & 0x7fffffffu;
    }
    const u32 barrier = b->barriers + 1, sync = w->warp_syncs;
    const auto ordered_after_write = [&] {
      if (c.writer == 0 || c.writer == me || (atomic && c.atomic)) return true;
      const u32 other = c.writer - 1;
      if (global && other / 1024 != b->index) {
        if (released_by.empty()) return false;
        const Release& released = released_by[other / 1024 * static_cast<u32>(threads) + other % 1024];
        return released.fence > c.write_clock && b->acquired >= released.atomic;
      }
      if (c.write_barrier != barrier) return true;
      return other / kLanes == warp_of_me && c.write_warp_sync != sync;
    };
    if (!ordered_after_write()) {
      report(lane, std::string(global ? "global" : "shared") + " race: " + (write ? "write" : "read") +
                       " after a write by thread " + std::to_string((c.writer - 1) % 1024) + " of block " +
                       std::to_string(global ? (c.writer - 1) / 1024 : b->index));
    }
    if (write) {
      if (c.reader != 0 && !atomic) {
        bool ok = true;
        if (c.reader == kManyWarps) {
          ok = c.read_barrier != barrier;
        } else {
          const u32 other = (c.reader & ~kManyLanes) - 1;
          if (global && other / 1024 != b->index)
            ok = false;
          else if (c.read_barrier == barrier) {
            if (other / kLanes != warp_of_me)
              ok = false;
            else if (c.read_warp_sync == sync && c.reader != me)
              ok = false;
          }
        }
        if (!ok)
          report(lane, std::string(global ? "global" : "shared") + " race: write after a read by another thread");
      }
      c.writer = me;
      c.write_barrier = barrier;
      c.write_warp_sync = sync;
      c.write_clock = clock;
      c.atomic = atomic;
    } else {
      if (c.reader == 0 || (c.reader != kManyWarps && (c.reader & ~kManyLanes) == me && !(c.reader & kManyLanes))) {
        c.reader = me;
      } else if (c.reader == kManyWarps) {
        if (c.read_barrier != barrier && !global) c.reader = me;
      } else {
        const u32 other = (c.reader & ~kManyLanes) - 1;
        if (!global && c.read_barrier != barrier)
          c.reader = me;
        else if (other / kLanes == warp_of_me)
          c.reader = (c.read_warp_sync == sync ? kManyLanes : 0) | me;
        else
          c.reader = kManyWarps;
      }
      c.read_barrier = barrier;
      c.read_warp_sync = sync;
    }
  }

  // Returns the address of `size` bytes at `at` and checks the access. Sets `undefined` if a byte was never written.
  u8* locate(const Instr& in, int lane, u64 at, u32 size, bool write, bool atomic, bool& undefined) {
    if (at % size != 0) fail(lane, "misaligned access to " + hex(at));
    if (in.space == PARAM || (in.space == GENERIC && at - kParamBase < params.size())) {
      if (write || at - kParamBase > params.size() || at - kParamBase + size > params.size())
        fail(lane, "parameter access at " + hex(at));
      return params.data() + (at - kParamBase);
    }
    if (in.space == SHARED) {
      at &= 0xffffffffull;
      if (at + size > b->shared.size() || !b->shared_valid[at] || !b->shared_valid[at + size - 1]) {
        fail(lane, "shared access outside every variable, at " + std::to_string(at) + name_near(at));
      }
      for (u32 i = 0; i < size; ++i) {
        touch(b->cells[at + i], lane, write, atomic, false);
        undefined |= b->shared_undefined[at + i] != 0;
      }
      return b->shared.data() + at;
    }
    Allocation* allocation = find_allocation(at);
    if (allocation == nullptr || at - allocation->base + size > allocation->size) {
      fail(lane, "global access outside known memory, " + hex(at) + (allocation ? " beyond the end" : ""));
    }
    const u64 offset = at - allocation->base;
    if (settings.global_races != 0) {
      if (allocation->cells == nullptr) {
        void* memory = mmap(nullptr, allocation->size * sizeof(Cell), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        allocation->cells = static_cast<Cell*>(memory);
      }
      for (u32 i = 0; i < size; ++i) touch(allocation->cells[offset + i], lane, write, atomic, true);
    }
    if (!allocation->undefined.empty()) {
      for (u32 i = 0; i < size; ++i) undefined |= allocation->undefined[offset + i] != 0;
    }
    return reinterpret_cast<u8*>(at);
  }
  static std::string hex(u64 x) {
    char text[32];
    snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
    return text;
  }
  std::string name_near(u64 at) {
    std::string best;
    for (const auto& v : k.shared) {
      if (at + kRedZone >= v.begin && at < v.begin + v.size + kRedZone) best = " near " + v.name;
    }
    return best;
  }
  // One byte for each byte of shared or global memory from `where` on: 1 if it was never written. Null if none of
  // the allocation is tracked.
  u8* undefined_at(const Instr& in, const u8* where) {
    if (in.space == SHARED) return b->shared_undefined.data() + (where - b->shared.data());
    Allocation* a = find_allocation(reinterpret_cast<u64>(where));
    return a->undefined.empty() ? nullptr : a->undefined.data() + (reinterpret_cast<u64>(where) - a->base);
  }
  void mark_defined(const Instr& in, u8* where, u32 size, bool undefined) {
    if (u8* bytes = undefined_at(in, where)) memset(bytes, undefined ? 1 : 0, size);
  }

  void load(const Instr& in, u32 mask) {
    const u32 unit = static_cast<u32>(bytes_of(in.ty));
    const u32 size = unit * in.n;
    need_defined(in.a[0], mask, "an address");
    u32 dm[] = {mask, mask, mask, mask};
    static_assert(sizeof(dm) / sizeof(*dm) == sizeof(in.d) / sizeof(*in.d));
    for (int l = 0; l < kLanes; ++l) {
      if (!(mask >> l & 1)) continue;
      bool undefined = false;
      const u64 at = get(in.a[0], l) + static_cast<u64>(in.imm);
      const u8* from = locate(in, l, at, size, false, false, undefined);
      const u8* bytes = undefined ? undefined_at(in, from) : nullptr;
      for (int i = 0; i < in.n; ++i) {
        const u32 first = static_cast<u32>(i) * unit;
        if (bytes != nullptr && memchr(bytes + first, 1, unit) != nullptr) dm[i] &= ~(1u << l);
        u64 value = 0;
        memcpy(&value, from + first, unit);
        if (is_signed(in.ty) && unit < 8) {
          const int s = 64 - 8 * static_cast<int>(unit);
          value = static_cast<u64>(static_cast<i64>(value << s) >> s);
        }
        if (in.d[i] >= 0) put(in.d[i], l, value);
      }
    }
    for (int i = 0; i < in.n; ++i)
      if (in.d[i] >= 0) set_def(in.d[i], mask, dm[i]);
  }
  void store(const Instr& in, u32 mask) {
    const u32 unit = static_cast<u32>(bytes_of(in.ty));
    const u32 size = unit * in.n;
    need_defined(in.a[0], mask, "an address");
    for (int l = 0; l < kLanes; ++l) {
      if (!(mask >> l & 1)) continue;
      bool ignored = false;
      const u64 at = get(in.a[0], l) + static_cast<u64>(in.imm);
      u8* to = locate(in, l, at, size, true, false, ignored);
      bool all_defined = true;
      for (int i = 0; i < in.n; ++i) {
        const u64 value = get(in.a[i + 1], l);
        const bool is_defined = def(in.a[i + 1]) >> l & 1;
        all_defined &= is_defined;
        memcpy(to + static_cast<u32>(i) * unit, &value, unit);
        mark_defined(in, to + static_cast<u32>(i) * unit, unit, !is_defined);
      }
      if (in.space != SHARED && !all_defined) report(l, "a global store of an undefined value");
    }
  }
  template <typename T>
  static T atom_op(int mode, T old, T x, T y) {
    switch (mode) {
      case A_ADD:
        return static_cast<T>(old + x);
      case A_MIN:
        return x < old ? x : old;
      case A_MAX:
        return x > old ? x : old;
      case A_EXCH:
        return x;
      case A_CAS:
        return old == x ? y : old;
      default:
        break;
    }
    if constexpr (std::is_integral_v<T>) return mode == A_AND ? old & x : old | x;
    return old;
  }
  template <typename T>
  void atomic_as(const Instr& in, u32 mask) {
    need_defined(in.a[0], mask, "an address");
    need_defined(in.a[1], mask, "an atomic");
    u32 dm = mask;
    for (int l = 0; l < kLanes; ++l) {
      if (!(mask >> l & 1)) continue;
      bool undefined = false;
      const u64 at = get(in.a[0], l) + static_cast<u64>(in.imm);
      u8* where = locate(in, l, at, sizeof(T), true, true, undefined);
      if (undefined) report(l, "an atomic on memory never written");
      T old, x, y{};
      memcpy(&old, where, sizeof(T));
      u64 bits = get(in.a[1], l);
      memcpy(&x, &bits, sizeof(T));
      if (in.a[2] >= 0) {
        bits = get(in.a[2], l);
        memcpy(&y, &bits, sizeof(T));
      }
      const T next = atom_op<T>(in.mode, old, x, y);
      memcpy(where, &next, sizeof(T));
      mark_defined(in, where, sizeof(T), false);
      u64 result = 0;
      memcpy(&result, &old, sizeof(T));
      if (in.d[0] >= 0) put(in.d[0], l, result);
      if (in.space != SHARED) {
        const u32 thread = static_cast<u32>(w->index * kLanes + l);
        b->atomic = ++clock;
        if (b->fenced[thread] != 0 && !released_by.empty())
          released_by[b->index * static_cast<u32>(threads) + thread] = {b->fenced[thread], clock};
      }
    }
    if (in.d[0] >= 0) set_def(in.d[0], mask, dm);
  }
  void atomic(const Instr& in, u32 mask) {
    if (is_float(in.ty) && (in.mode == A_AND || in.mode == A_OR)) fail(0, "atomic type");
    switch (in.ty) {
      case U32:
      case B32:
        return atomic_as<u32>(in, mask);
      case S32:
        return atomic_as<i32>(in, mask);
      case U64:
      case B64:
        return atomic_as<u64>(in, mask);
      case S64:
        return atomic_as<i64>(in, mask);
      case F32:
        return atomic_as<float>(in, mask);
      case F64:
        return atomic_as<double>(in, mask);
      default:
        fail(0, "atomic type");
    }
  }
  void need_defined(int reg, u32 mask, const char* what) {
    const u32 missing = mask & ~def(reg);
    if (missing != 0) report(__builtin_ctz(missing), std::string(what) + " depends on an undefined value");
  }
};

}  // namespace ptxrun
