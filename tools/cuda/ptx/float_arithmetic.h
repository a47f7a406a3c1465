// Operations of floats on the lanes of a warp, one after the other; a result is defined if all its operands are.
#pragma once

#include "ptx/access.h"

namespace ptxrun {

struct FloatArithmetic : Access {
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
};

}  // namespace ptxrun
