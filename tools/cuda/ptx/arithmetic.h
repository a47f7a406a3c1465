// Arithmetic of a warp, lane by lane, which also tracks whether each result depends on a value that was never written.
#pragma once

#include "ptx/access.h"

namespace ptxrun {

struct Arithmetic : Access {
  using Access::Access;

  template <bool full, typename T, typename F>
  void unary(const Instr& in, u32 mask, F f) {
    T* d = reinterpret_cast<T*>(r32(in.d[0]));
    const T* a = reinterpret_cast<const T*>(r32(in.a[0]));
    for (int l = 0; l < kLanes; ++l) {
      if (full || (mask >> l & 1)) d[l] = f(a[l]);
    }
    set_def(in.d[0], mask, def(in.a[0]));
  }
  template <bool full, typename T, typename F>
  void binary(const Instr& in, u32 mask, F f) {
    T* d = reinterpret_cast<T*>(r32(in.d[0]));
    const T* a = reinterpret_cast<const T*>(r32(in.a[0]));
    const T* c = reinterpret_cast<const T*>(r32(in.a[1]));
    for (int l = 0; l < kLanes; ++l) {
      if (full || (mask >> l & 1)) d[l] = f(a[l], c[l]);
    }
    set_def(in.d[0], mask, def(in.a[0]) & def(in.a[1]));
  }
  template <bool full, typename T, typename F>
  void ternary(const Instr& in, u32 mask, F f) {
    T* d = reinterpret_cast<T*>(r32(in.d[0]));
    const T* a = reinterpret_cast<const T*>(r32(in.a[0]));
    const T* c = reinterpret_cast<const T*>(r32(in.a[1]));
    const T* e = reinterpret_cast<const T*>(r32(in.a[2]));
    for (int l = 0; l < kLanes; ++l) {
      if (full || (mask >> l & 1)) d[l] = f(a[l], c[l], e[l]);
    }
    set_def(in.d[0], mask, def(in.a[0]) & def(in.a[1]) & def(in.a[2]));
  }
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

  struct Rounding {
    int old;
    explicit Rounding(int mode) : old(fegetround()) { fesetround(mode); }
    ~Rounding() { fesetround(old); }
  };
  static int mode_of(u8 rnd) {
    return rnd == RZ ? FE_TOWARDZERO : rnd == RM ? FE_DOWNWARD : rnd == RP ? FE_UPWARD : FE_TONEAREST;
  }
  template <typename T>
  __attribute__((noinline)) void rounded(const Instr& in, u32 mask) {
    T* d = reinterpret_cast<T*>(r32(in.d[0]));
    const T* a = reinterpret_cast<const T*>(r32(in.a[0]));
    const T* c = reinterpret_cast<const T*>(r32(in.a[1]));
    const T* e = in.a[2] >= 0 ? reinterpret_cast<const T*>(r32(in.a[2])) : nullptr;
    {
      Rounding mode(mode_of(in.rnd));
      asm volatile("" ::: "memory");
      for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) continue;
        volatile T x = a[l], y = c[l];
        volatile T result;
        switch (in.op) {
          case ADD:
            result = x + y;
            break;
          case SUB:
            result = x - y;
            break;
          case MUL:
            result = x * y;
            break;
          case DIV:
            result = x / y;
            break;
          case FMA:
            result = std::fma(static_cast<T>(x), static_cast<T>(y), e[l]);
            break;
          default:
            fail(l, "rounding");
        }
        d[l] = result;
      }
      asm volatile("" ::: "memory");
    }
    u32 dm = def(in.a[0]) & def(in.a[1]);
    if (e != nullptr) dm &= def(in.a[2]);
    set_def(in.d[0], mask, dm);
  }

  static float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
  // From -units to units, as a function of the operand: the chip gives the same result for the same operand.
  static i32 error_of(u64 operand, int units) {
    u64 h = (operand + static_cast<u64>(settings.approx_error)) * 0x9e3779b97f4a7c15ull;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ull;
    return static_cast<i32>((h >> 33) % static_cast<u64>(2 * units + 1)) - units;
  }
  // The result of an approximate instruction, off by up to `units` in the last place of a float.
  static float off(float x, float operand, int units) {
    if (settings.approx_error == 0 || !std::isfinite(x) || x == 0) return x;
    u32 bits, from;
    memcpy(&bits, &x, 4);
    memcpy(&from, &operand, 4);
    const i32 by = error_of(from, units);
    if ((bits & 0x7fffffffu) < 0x00800010u) return x;
    bits += static_cast<u32>(by);
    memcpy(&x, &bits, 4);
    return x;
  }
  template <typename T>
  static T fmin_ptx(T a, T b) {
    if (a != a) return b != b ? std::numeric_limits<T>::quiet_NaN() : b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? a : b;
    return a < b ? a : b;
  }
  template <typename T>
  static T fmax_ptx(T a, T b) {
    if (a != a) return b != b ? std::numeric_limits<T>::quiet_NaN() : b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? b : a;
    return a > b ? a : b;
  }

  template <bool full, typename T>
  bool float_op(const Instr& in, u32 mask) {
    if (in.ftz && sizeof(T) == 4) {
      if (in.op != EX2 && in.op != LG2 && in.op != RCP && in.op != SQRT && in.op != RSQRT) return false;
    }
    if (in.sat) return false;
    if (in.rnd != RN && (in.op == ADD || in.op == SUB || in.op == MUL || in.op == DIV || in.op == FMA)) {
      rounded<T>(in, mask);
      return true;
    }
    switch (in.op) {
      case ADD:
        binary<full, T>(in, mask, [](T a, T b) { return a + b; });
        return true;
      case SUB:
        binary<full, T>(in, mask, [](T a, T b) { return a - b; });
        return true;
      case MUL:
        binary<full, T>(in, mask, [](T a, T b) { return a * b; });
        return true;
      case DIV:
        if (in.approx) return false;
        binary<full, T>(in, mask, [](T a, T b) { return a / b; });
        return true;
      case FMA:
        ternary<full, T>(in, mask, [](T a, T b, T c) { return std::fma(a, b, c); });
        return true;
      case NEG:
        unary<full, T>(in, mask, [](T a) { return -a; });
        return true;
      case ABS:
        unary<full, T>(in, mask, [](T a) { return std::fabs(a); });
        return true;
      case MIN:
        binary<full, T>(in, mask, [](T a, T b) { return fmin_ptx(a, b); });
        return true;
      case MAX:
        binary<full, T>(in, mask, [](T a, T b) { return fmax_ptx(a, b); });
        return true;
      case COPYSIGN:
        binary<full, T>(in, mask, [](T a, T b) { return std::copysign(b, a); });
        return true;
      case RCP:
        if (!in.approx) {
          unary<full, T>(in, mask, [](T a) { return T(1) / a; });
        } else if constexpr (sizeof(T) == 8) {
          // Applied to the upper 32 bits of the operand; returns the upper 32 bits of the result.
          unary<full, T>(in, mask, [](T a) {
            u64 bits;
            memcpy(&bits, &a, 8);
            bits &= 0xffffffff00000000ull;
            if ((bits & 0x7ff0000000000000ull) == 0) bits &= 0x8000000000000000ull;
            double x;
            memcpy(&x, &bits, 8);
            double y = 1.0 / x;
            memcpy(&bits, &y, 8);
            if (y == y && std::isfinite(y)) {
              if (settings.approx_error != 0 && y != 0)
                bits += static_cast<u64>(static_cast<i64>(error_of(bits, 1))) << 32;
              bits &= 0xffffffff00000000ull;
              if ((bits & 0x7ff0000000000000ull) == 0) bits &= 0x8000000000000000ull;
            }
            memcpy(&y, &bits, 8);
            return static_cast<T>(y);
          });
        } else {
          const bool ftz = in.ftz;
          unary<full, T>(in, mask, [ftz](T a) {
            const T y = off(T(1) / (ftz ? flush(a) : a), a, 1);
            return ftz ? static_cast<T>(flush(y)) : y;
          });
        }
        return true;
      case SQRT:
        if (in.approx) return false;
        unary<full, T>(in, mask, [](T a) { return std::sqrt(a); });
        return true;
      case EX2:
        if constexpr (sizeof(T) == 4) {
          const bool ftz = in.ftz;
          unary<full, T>(in, mask, [ftz](T a) {
            const float exact = static_cast<float>(std::exp2(static_cast<double>(ftz ? flush(a) : a)));
            const float y = a == 0 ? exact : off(exact, a, 2);  // 2^0 is 1 in the table of special values
            return ftz ? flush(y) : y;
          });
          return true;
        }
        return false;
      case LG2:
        if constexpr (sizeof(T) == 4) {
          const bool ftz = in.ftz;
          unary<full, T>(in, mask, [ftz](T a) {
            return off(static_cast<float>(std::log2(static_cast<double>(ftz ? flush(a) : a))), a, 2);
          });
          return true;
        }
        return false;
      default:
        return false;
    }
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
    // If one predicate decides the result, the other need not be defined: && and
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
