// Registers, constants and predicates of a warp, and the value of each operand of an instruction.
#pragma once

#include "ptx/launch.h"
#include "sass/sass.h"

namespace ptxrun {

// Instructions that each warp of the first blocks issued, for sassrun_simulate.
struct Event {
  u32 pc;
  u16 miss, hit;  // sectors of 32 bytes
};
struct Trace {
  const SassKernel* kernel = nullptr;
  int warps = 0;
  std::vector<std::vector<Event>> of;  // [block * warps + warp]
  std::vector<std::set<u64>> seen;     // sectors that a block has touched
};
inline Trace trace;
inline i64 trace_blocks = 0;

struct SassWarp {
  u32 P[8], U[128];
  u8 UP[8];
  u32 barrier[16][kLanes];
  std::unordered_map<u32, u32> local[kLanes];  // words of the thread's own memory, by address
};

struct SassOperands : Launch {
  SassKernel& s;
  std::vector<u8> bank;  // c[0x0]
  std::vector<SassWarp> state;
  SassWarp* x = nullptr;
  SassOperands(SassKernel& kernel, const u32 (&g)[3], const u32 (&c)[3]) : Launch(kernel.carrier, g, c), s(kernel) {}

  u32* R(int i) { return w->file + i * 32; }
  u32 reg(int i, int lane) { return i == kZero ? 0 : R(i)[lane]; }
  u64 reg64(int i, int lane) { return i == kZero ? 0 : R(i)[lane] | static_cast<u64>(R(i + 1)[lane]) << 32; }
  void set(const Operand& o, int lane, u32 v, int plus = 0) {
    if (o.kind == oU) {
      if (o.index != kZero) x->U[o.index + plus] = v;
    } else if (o.index != kZero)
      R(o.index + plus)[lane] = v;
  }
  void set64(const Operand& o, int lane, u64 v) {
    set(o, lane, static_cast<u32>(v));
    set(o, lane, static_cast<u32>(v >> 32), 1);
  }
  // The contents of c[0x0] before the parameters. sm_100 also has the size of a block at another offset, which no
  // kernel reads.
  u32 grid_at() const { return s.params_at == kParams100 ? 0x370 : 0xc; }
  bool is_set(u32 at) const {
    if (at >= grid_at() && at < grid_at() + 12) return true;
    if (s.params_at == kParams100) return at == 0x37c || at == 0x358 || at == 0x35c;
    return at < 12 || at == 0x28 || at == 0x208 || at == 0x20c;
  }
  u32 constant(const Operand& o, int lane, u32 plus) {
    u32 at = o.imm + plus;
    if (o.via >= 1000)
      at += x->U[o.via - 1000];
    else if (o.via >= 0)
      at += reg(o.via, lane);
    const std::vector<u8>& from = o.bank == 0 ? bank : s.table;
    u32 v = 0;
    if (o.bank != 0 && o.bank != 2) fail(lane, "constant bank");
    if (o.bank == 0 && at < s.params_at && !is_set(at)) fail(lane, "constant bank offset " + std::to_string(at));
    if (at + 4 > from.size()) {
      if (at + 4 > from.size() + 8) fail(lane, "constant bank offset " + std::to_string(at));
    } else
      memcpy(&v, from.data() + at, 4);
    return v;
  }
  // The bits of an operand, without modifiers.
  u32 raw(const Operand& o, int lane, int plus = 0) {
    switch (o.kind) {
      case oR:
        return o.index == kZero ? 0 : R(o.index + plus)[lane];
      case oU:
        return o.index == kZero ? 0 : x->U[o.index + plus];
      case oIMM:
        return plus == 0 ? o.imm : 0;
      case oCONST:
        return constant(o, lane, static_cast<u32>(4 * plus));
      default:
        fail(lane, "operand");
    }
  }
  u32 ival(const Operand& o, int lane) {
    u32 v = raw(o, lane);
    if (o.inv) v = ~v;
    if (o.neg) v = 0 - v;
    return v;
  }
  float f32(const Operand& o, int lane) {
    u32 v = raw(o, lane);
    if (o.half) {
      const float h = half_to_float(static_cast<u16>(o.half == 1 ? v : v >> 16));
      memcpy(&v, &h, 4);
    }
    if (o.abs) v &= 0x7fffffffu;
    if (o.neg) v ^= 0x80000000u;
    float f;
    memcpy(&f, &v, 4);
    return f;
  }
  u64 raw64(const Operand& o, int lane) {
    if (o.kind == oIMM) return static_cast<u64>(o.imm) << 32;  // of a double
    return raw(o, lane) | static_cast<u64>(raw(o, lane, 1)) << 32;
  }
  u64 int64(const Operand& o, int lane) {
    u64 v;
    if (o.kind == oIMM)
      v = o.imm;
    else if ((o.kind == oR || o.kind == oU) && o.index == kZero)
      v = 0;
    else
      v = raw(o, lane) | static_cast<u64>(raw(o, lane, 1)) << 32;
    if (o.neg) v = 0 - v;
    return v;
  }
  double f64(const Operand& o, int lane) {
    u64 v = (o.kind == oR && o.index == kZero) ? 0 : raw64(o, lane);
    if (o.abs) v &= 0x7fffffffffffffffull;
    if (o.neg) v ^= 0x8000000000000000ull;
    double d;
    memcpy(&d, &v, 8);
    return d;
  }
  void setf(const Operand& o, int lane, float f) {
    u32 v;
    memcpy(&v, &f, 4);
    set(o, lane, v);
  }
  void setd(const Operand& o, int lane, double f) {
    u64 v;
    memcpy(&v, &f, 8);
    set64(o, lane, v);
  }
  bool pred(const Operand& o, int lane) {
    bool v = o.index == 7 ? true : o.kind == oUP ? x->UP[o.index] != 0 : (x->P[o.index] >> lane & 1) != 0;
    return v != (o.inv != 0);
  }
  void setp(const Operand& o, int lane, bool v) {
    if (o.index == 7) return;
    if (o.kind == oUP)
      x->UP[o.index] = v;
    else
      x->P[o.index] = (x->P[o.index] & ~(1u << lane)) | static_cast<u32>(v) << lane;
  }
  static bool is_pred(const Operand& o) { return o.kind == oP || o.kind == oUP; }
  template <typename T>
  static bool compare(u8 cmp, T a, T b) {
    const bool un = a != a || b != b;
    switch (cmp) {
      case EQ:
        return a == b;
      case NE:
        return a != b && !un;
      case LT:
        return a < b;
      case LE:
        return a <= b;
      case GT:
        return a > b;
      case GE:
        return a >= b;
      case EQU:
        return un || a == b;
      case NEU:
        return un || a != b;
      case LTU:
        return un || a < b;
      case LEU:
        return un || a <= b;
      case GTU:
        return un || a > b;
      case GEU:
        return un || a >= b;
      case NUM:
        return !un;
      default:
        return un;
    }
  }
  static bool combine(u8 boolean, bool a, bool b) { return boolean == 1 ? a && b : boolean == 2 ? a || b : a != b; }
  // An operand of an addition: -x is ~x + 1, and the carry of this addition counts.
  u64 addend(const Operand& o, int lane) {
    const u32 v = raw(o, lane);
    if (o.inv) return static_cast<u32>(~v);
    if (o.neg) return static_cast<u64>(static_cast<u32>(~v)) + 1;
    return v;
  }
  template <typename F>
  static auto rounded_as(u8 rnd, F f) {
    if (rnd == RN) return f();
    Rounding mode(mode_of(rnd));
    asm volatile("" ::: "memory");
    volatile auto r = f();
    asm volatile("" ::: "memory");
    return static_cast<decltype(f())>(r);
  }

  u64 address_of(const SInstr& in, int lane, bool global) {
    u64 a = static_cast<u64>(in.off);
    if (in.ra >= 0) a += global ? reg64(in.ra, lane) : reg(in.ra, lane);
    if (in.ua >= 0) a += global ? x->U[in.ua] | static_cast<u64>(x->U[in.ua + 1]) << 32 : x->U[in.ua];
    return global ? a : a & 0xffffffffull;
  }
};

}  // namespace ptxrun
