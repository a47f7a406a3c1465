// Operations of integers and predicates on the lanes of a warp, one after the other.
#pragma once

#include "ptx/float_arithmetic.h"

namespace ptxrun {

struct Arithmetic : FloatArithmetic {
  using FloatArithmetic::FloatArithmetic;

  // 16-bit types lie zero-extended in 32 bits.
  template <bool full, typename F>
  void binary16(const Instr& in, u32 mask, F f) {
    u32* d = r32(in.d[0]);
    const u32 *a = r32(in.a[0]), *c = r32(in.a[1]);
    const bool s = is_signed(in.ty);
    for (int l = 0; l < kLanes; ++l) {
      if (!full && !(mask >> l & 1)) continue;
      const i32 x = s ? static_cast<i16>(a[l]) : static_cast<i32>(static_cast<u16>(a[l]));
      const i32 y = s ? static_cast<i16>(c[l]) : static_cast<i32>(static_cast<u16>(c[l]));
      d[l] = static_cast<u16>(f(x, y));
    }
    set_def(in.d[0], mask, def(in.a[0]) & def(in.a[1]));
  }

  template <bool full, typename T>
  bool int_op(const Instr& in, u32 mask) {
    using U = std::make_unsigned_t<T>;
    constexpr int kBits = 8 * sizeof(T);
    switch (in.op) {
      case ADD:
        binary<full, U>(in, mask, [](U a, U b) { return a + b; });
        return !in.sat;
      case SUB:
        binary<full, U>(in, mask, [](U a, U b) { return a - b; });
        return !in.sat;
      case MUL:
        binary<full, U>(in, mask, [](U a, U b) { return a * b; });
        return true;
      case MULHI:
        binary<full, T>(in, mask, [](T a, T b) {
          using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
          return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> kBits);
        });
        return true;
      case MAD:
        ternary<full, U>(in, mask, [](U a, U b, U c) { return a * b + c; });
        return true;
      case MADHI:
        ternary<full, T>(in, mask, [](T a, T b, T c) {
          using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
          return static_cast<T>(static_cast<U>((static_cast<W>(a) * static_cast<W>(b)) >> kBits) + static_cast<U>(c));
        });
        return true;
      case DIV:
      case REM: {
        T* d = reinterpret_cast<T*>(r32(in.d[0]));
        const T* a = reinterpret_cast<const T*>(r32(in.a[0]));
        const T* c = reinterpret_cast<const T*>(r32(in.a[1]));
        for (int l = 0; l < kLanes; ++l) {
          if (!full && !(mask >> l & 1)) continue;
          if (c[l] == 0) {
            if (def(in.a[1]) >> l & 1) report(l, "an integer division by zero");
            d[l] = in.op == DIV ? static_cast<T>(~U(0)) : a[l];
          } else if (std::is_signed_v<T> && c[l] == static_cast<T>(-1)) {
            d[l] = in.op == DIV ? static_cast<T>(U(0) - static_cast<U>(a[l])) : T(0);
          } else {
            d[l] = in.op == DIV ? a[l] / c[l] : a[l] % c[l];
          }
        }
        set_def(in.d[0], mask, def(in.a[0]) & def(in.a[1]));
        return true;
      }
      case NEG:
        unary<full, U>(in, mask, [](U a) { return U(0) - a; });
        return true;
      case ABS:
        unary<full, T>(in, mask, [](T a) { return a < 0 ? static_cast<T>(U(0) - static_cast<U>(a)) : a; });
        return true;
      case MIN:
        binary<full, T>(in, mask, [](T a, T b) { return a < b ? a : b; });
        return true;
      case MAX:
        binary<full, T>(in, mask, [](T a, T b) { return a > b ? a : b; });
        return true;
      // A zero (and) or a one (or) in either operand decides the bit, even if the other is undefined. This code tracks
      // only whole words.
      case AND:
        binary<full, U>(in, mask, [](U a, U b) { return a & b; });
        return true;
      case OR:
        binary<full, U>(in, mask, [](U a, U b) { return a | b; });
        return true;
      case XOR:
        binary<full, U>(in, mask, [](U a, U b) { return a ^ b; });
        return true;
      case NOT:
        unary<full, U>(in, mask, [](U a) { return ~a; });
        return true;
      case BREV:
        unary<full, U>(in, mask, [](U a) {
          U r = 0;
          for (int i = 0; i < kBits; ++i) r |= static_cast<U>((a >> i) & 1) << (kBits - 1 - i);
          return r;
        });
        return true;
      case SHL:
      case SHR: {
        T* d = reinterpret_cast<T*>(r32(in.d[0]));
        const T* a = reinterpret_cast<const T*>(r32(in.a[0]));
        const u32* c = r32(in.a[1]);
        for (int l = 0; l < kLanes; ++l) {
          if (!full && !(mask >> l & 1)) continue;
          const u32 s = c[l];
          if (in.op == SHL)
            d[l] = s >= kBits ? T(0) : static_cast<T>(static_cast<U>(a[l]) << s);
          else
            d[l] = s >= kBits ? static_cast<T>(a[l] < 0 ? -1 : 0) : static_cast<T>(a[l] >> s);
        }
        set_def(in.d[0], mask, def(in.a[0]) & def(in.a[1]));
        return true;
      }
      default:
        return false;
    }
  }
  template <bool full>
  bool short_op(const Instr& in, u32 mask) {
    switch (in.op) {
      case ADD:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a + b; });
        return true;
      case SUB:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a - b; });
        return true;
      case MUL:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a * b; });
        return true;
      case DIV:
        for (int l = 0; l < kLanes; ++l) {
          if ((mask >> l & 1) && (def(in.a[1]) >> l & 1) && static_cast<u16>(r32(in.a[1])[l]) == 0)
            report(l, "an integer division by zero");
        }
        binary16<full>(in, mask, [](i32 a, i32 b) { return b == 0 ? -1 : a / b; });
        return true;
      case AND:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a & b; });
        return true;
      case OR:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a | b; });
        return true;
      case XOR:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a ^ b; });
        return true;
      case MIN:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a < b ? a : b; });
        return true;
      case MAX:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a > b ? a : b; });
        return true;
      case SHL:
        binary16<full>(in, mask, [](i32 a, i32 b) { return b >= 16 ? 0 : a << b; });
        return true;
      case SHR:
        binary16<full>(in, mask, [](i32 a, i32 b) { return a >> std::min(b, 31); });
        return true;
      case NOT: {
        for (int l = 0; l < kLanes; ++l)
          if (mask >> l & 1) r32(in.d[0])[l] = static_cast<u16>(~r32(in.a[0])[l]);
        set_def(in.d[0], mask, def(in.a[0]));
        return true;
      }
      default:
        return false;
    }
  }
  template <bool full>
  bool pred_op(const Instr& in, u32 mask) {
    // If one predicate decides the result, the other need not be defined: && and ||
    // in the source compile to these.
    const auto logic = [&](auto f, auto decides) {
      u32* d = r32(in.d[0]);
      const u32 *a = r32(in.a[0]), *c = r32(in.a[1]);
      u32 decided = 0;
      const u32 da = def(in.a[0]), dc = def(in.a[1]);
      for (int l = 0; l < kLanes; ++l) {
        if (!full && !(mask >> l & 1)) continue;
        if (((da >> l & 1) && decides(a[l])) || ((dc >> l & 1) && decides(c[l]))) decided |= 1u << l;
        d[l] = f(a[l], c[l]) & 1;
      }
      set_def(in.d[0], mask, (da & dc) | decided);
    };
    switch (in.op) {
      case AND:
        logic([](u32 a, u32 b) { return a & b; }, [](u32 a) { return a == 0; });
        return true;
      case OR:
        logic([](u32 a, u32 b) { return a | b; }, [](u32 a) { return a == 1; });
        return true;
      case XOR:
        logic([](u32 a, u32 b) { return a ^ b; }, [](u32) { return false; });
        return true;
      case NOT:
        unary<full, u32>(in, mask, [](u32 a) { return a ^ 1u; });
        return true;
      default:
        return false;
    }
  }
};

}  // namespace ptxrun
