// Comparisons, and the execution of one instruction by a group of lanes.
#pragma once

#include "ptx/convert.h"

namespace ptxrun {

struct Execute : Conversions {
  using Conversions::Conversions;

  template <bool full, typename T>
  void setp_as(const Instr& in, u32 mask, const T* a, const T* c) {
    u32 result[kLanes];
    const auto with = [&](auto f) {
      for (int l = 0; l < kLanes; ++l) result[l] = f(a[l], c[l]) ? 1 : 0;
    };
    const auto unordered = [](T x, T y) { return x != x || y != y; };
    switch (in.cmp) {
      case EQ:
        with([](T x, T y) { return x == y; });
        break;
      case NE:
        // For floats: ordered and different.
        with([&](T x, T y) { return x != y && !unordered(x, y); });
        break;
      case LT:
        with([](T x, T y) { return x < y; });
        break;
      case LE:
        with([](T x, T y) { return x <= y; });
        break;
      case GT:
        with([](T x, T y) { return x > y; });
        break;
      case GE:
        with([](T x, T y) { return x >= y; });
        break;
      case EQU:
        with([&](T x, T y) { return unordered(x, y) || x == y; });
        break;
      case NEU:
        with([&](T x, T y) { return unordered(x, y) || x != y; });
        break;
      case LTU:
        with([&](T x, T y) { return unordered(x, y) || x < y; });
        break;
      case LEU:
        with([&](T x, T y) { return unordered(x, y) || x <= y; });
        break;
      case GTU:
        with([&](T x, T y) { return unordered(x, y) || x > y; });
        break;
      case GEU:
        with([&](T x, T y) { return unordered(x, y) || x >= y; });
        break;
      case NUM:
        with([&](T x, T y) { return !unordered(x, y); });
        break;
      case NAN_:
        with([&](T x, T y) { return unordered(x, y); });
        break;
    }
    u32 dm = def(in.a[0]) & def(in.a[1]);
    u32* d = r32(in.d[0]);
    u32* d2 = in.d[1] >= 0 ? r32(in.d[1]) : nullptr;
    const u32* q = in.mode != 0 ? r32(in.a[2]) : nullptr;
    if (q != nullptr) dm &= def(in.a[2]);
    for (int l = 0; l < kLanes; ++l) {
      if (!full && !(mask >> l & 1)) continue;
      u32 p = result[l], not_p = p ^ 1;
      if (q != nullptr) {
        const u32 other = q[l] ^ (in.negate_q ? 1 : 0);
        p = in.mode == 1 ? p & other : in.mode == 2 ? p | other : p ^ other;
        not_p = in.mode == 1 ? not_p & other : in.mode == 2 ? not_p | other : not_p ^ other;
      }
      d[l] = p;
      if (d2 != nullptr) d2[l] = not_p;
    }
    set_def(in.d[0], mask, dm);
    if (d2 != nullptr) set_def(in.d[1], mask, dm);
  }
  template <bool full, typename T>
  void setp_short(const Instr& in, u32 mask) {
    i32 a[kLanes], c[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      a[l] = static_cast<T>(r32(in.a[0])[l]);
      c[l] = static_cast<T>(r32(in.a[1])[l]);
    }
    setp_as<full, i32>(in, mask, a, c);
  }
  template <bool full>
  void setp(const Instr& in, u32 mask) {
    const void *a = r32(in.a[0]), *c = r32(in.a[1]);
#define FK_CASE(T) setp_as<full, T>(in, mask, static_cast<const T*>(a), static_cast<const T*>(c))
    switch (in.ty) {
      case F32:
        return FK_CASE(float);
      case F64:
        return FK_CASE(double);
      case S32:
        return FK_CASE(i32);
      case U32:
      case B32:
        return FK_CASE(u32);
      case S64:
        return FK_CASE(i64);
      case U64:
      case B64:
        return FK_CASE(u64);
      case S16:
        return setp_short<full, i16>(in, mask);
      case U16:
      case B16:
        return setp_short<full, u16>(in, mask);
      default:
        fail(0, "type of setp");
    }
#undef FK_CASE
  }

  template <bool full>
  void execute(const Instr& in, u32 mask) {
    switch (in.op) {
      case NOP:
        return;
      case MOV:
        if (k.regs[static_cast<size_t>(in.d[0])].wide != k.regs[static_cast<size_t>(in.a[0])].wide) {
          for (int l = 0; l < kLanes; ++l)
            if (mask >> l & 1) put(in.d[0], l, get(in.a[0], l));
          set_def(in.d[0], mask, def(in.a[0]));
        } else if (k.regs[static_cast<size_t>(in.d[0])].wide) {
          unary<full, u64>(in, mask, [](u64 x) { return x; });
        } else {
          const bool pred = in.ty == PRED;
          unary<full, u32>(in, mask, [pred](u32 x) { return pred ? x & 1u : x; });
        }
        return;
      case PACK: {
        const int bits = 8 * bytes_of(in.ty) / in.n;
        u32 dm = ~0u;
        for (int i = 0; i < in.n; ++i) dm &= def(in.a[i]);
        for (int l = 0; l < kLanes; ++l) {
          if (!full && !(mask >> l & 1)) continue;
          u64 value = 0;
          for (int i = 0; i < in.n; ++i) value |= (get(in.a[i], l) & ((1ull << bits) - 1)) << (i * bits);
          put(in.d[0], l, value);
        }
        set_def(in.d[0], mask, dm);
        return;
      }
      case UNPACK: {
        const int bits = 8 * bytes_of(in.ty) / in.n;
        for (int l = 0; l < kLanes; ++l) {
          if (!full && !(mask >> l & 1)) continue;
          const u64 value = get(in.a[0], l);
          for (int i = 0; i < in.n; ++i)
            if (in.d[i] >= 0) put(in.d[i], l, value >> (i * bits) & ((1ull << bits) - 1));
        }
        for (int i = 0; i < in.n; ++i)
          if (in.d[i] >= 0) set_def(in.d[i], mask, def(in.a[0]));
        return;
      }
      case LD:
        return load(in, mask);
      case ST:
        return store(in, mask);
      case ATOM:
        return atomic(in, mask);
      case SETP:
        return setp<full>(in, mask);
      case CVT:
        return convert(in, mask);
      case SELP: {
        const u32* p = r32(in.a[2]);
        u32 chosen = 0;
        if (bytes_of(in.ty) == 8) {
          u64* d = r64(in.d[0]);
          const u64 *a = r64(in.a[0]), *c = r64(in.a[1]);
          for (int l = 0; l < kLanes; ++l)
            if (full || (mask >> l & 1)) d[l] = p[l] != 0 ? a[l] : c[l];
        } else {
          u32* d = r32(in.d[0]);
          const u32 *a = r32(in.a[0]), *c = r32(in.a[1]);
          for (int l = 0; l < kLanes; ++l)
            if (full || (mask >> l & 1)) d[l] = p[l] != 0 ? a[l] : c[l];
        }
        for (int l = 0; l < kLanes; ++l) chosen |= (p[l] != 0 ? 1u : 0u) << l;
        set_def(in.d[0], mask, def(in.a[2]) & ((chosen & def(in.a[0])) | (~chosen & def(in.a[1]))));
        return;
      }
      case MULWIDE:
      case MADWIDE: {
        u32 dm = def(in.a[0]) & def(in.a[1]);
        if (in.op == MADWIDE) dm &= def(in.a[2]);
        if (bytes_of(in.ty) == 8) fail(0, "128 bits");
        const int s = 64 - 8 * bytes_of(in.ty);
        for (int l = 0; l < kLanes; ++l) {
          if (!full && !(mask >> l & 1)) continue;
          u64 x = get(in.a[0], l), y = get(in.a[1], l);
          if (is_signed(in.ty)) {
            x = static_cast<u64>(static_cast<i64>(x << s) >> s);
            y = static_cast<u64>(static_cast<i64>(y << s) >> s);
          } else {
            x = x << s >> s;
            y = y << s >> s;
          }
          put(in.d[0], l, x * y + (in.op == MADWIDE ? get(in.a[2], l) : 0));
        }
        set_def(in.d[0], mask, dm);
        return;
      }
      case LOP3:
        ternary<full, u32>(in, mask, [&](u32 a, u32 b, u32 c) { return lut3(a, b, c, static_cast<u32>(in.imm)); });
        return;
      case SHFF:
        ternary<full, u32>(in, mask, [&](u32 a, u32 b, u32 c) {
          const u32 n = in.mode & 2 ? c & 31 : std::min(c, 32u);
          const u64 both = static_cast<u64>(b) << 32 | a;
          return static_cast<u32>(in.mode & 1 ? (both << n) >> 32 : both >> n);
        });
        return;
      case PRMT:
        ternary<full, u32>(in, mask, [](u32 a, u32 b, u32 c) { return permuted_bytes(a, b, c); });
        return;
      case BFI:  // the lowest bits of a replace bits of b from a position on
        for (int l = 0; l < kLanes; ++l) {
          if (!(mask >> l & 1)) continue;
          const u64 bits = 8 * bytes_of(in.ty);
          const u64 first = get(in.a[2], l) & 255;
          const u64 count = get(in.a[3], l) & 255;
          u64 field = count < 64 ? (u64{1} << count) - 1 : ~u64{0};
          field = first < bits ? field << first : 0;
          const u64 shifted = first < bits ? get(in.a[0], l) << first : 0;
          put(in.d[0], l, (get(in.a[1], l) & ~field) | (shifted & field));
        }
        set_def(in.d[0], mask, def(in.a[0]) & def(in.a[1]) & def(in.a[2]) & def(in.a[3]));
        return;
      case POPC:
      case CLZ:
        for (int l = 0; l < kLanes; ++l) {
          if (!(mask >> l & 1)) continue;
          const u64 x = get(in.a[0], l);
          const int bits = 8 * bytes_of(in.ty);
          put(in.d[0], l,
              static_cast<u64>(in.op == POPC ? __builtin_popcountll(x)
                               : x == 0      ? bits
                                             : __builtin_clzll(x) - (64 - bits)));
        }
        set_def(in.d[0], mask, def(in.a[0]));
        return;
      default:
        break;
    }
    bool done = false;
    switch (in.ty) {
      case F32:
        done = float_op<full, float>(in, mask);
        break;
      case F64:
        done = float_op<full, double>(in, mask);
        break;
      case S32:
        done = int_op<full, i32>(in, mask);
        break;
      case U32:
      case B32:
        done = int_op<full, u32>(in, mask);
        break;
      case S64:
        done = int_op<full, i64>(in, mask);
        break;
      case U64:
      case B64:
        done = int_op<full, u64>(in, mask);
        break;
      case S16:
      case U16:
      case B16:
        done = short_op<full>(in, mask);
        break;
      case F16X2:
      case BF16X2:
        done = (in.op == MAX || in.op == SETGT) && !in.ftz;
        if (done) {
          binary<full, u32>(in, mask, [&](u32 a, u32 b) {
            return in.op == MAX ? larger_pair(a, b, in.ty == BF16X2) : where_greater(a, b, in.ty == BF16X2);
          });
        }
        break;
      case PRED:
        done = pred_op<full>(in, mask);
        break;
      default:
        break;
    }
    if (!done) fail(0, "unknown instruction");
  }
};

}  // namespace ptxrun
