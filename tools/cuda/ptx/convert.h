// Conversions between the number types.
#pragma once

#include "ptx/arithmetic.h"

namespace ptxrun {

struct Conversions : Arithmetic {
  using Arithmetic::Arithmetic;

  static float half_to_float(u16 h) {
    _Float16 x;
    memcpy(&x, &h, 2);
    return static_cast<float>(x);
  }
  static u16 float_to_half(float f) {
    const _Float16 x = static_cast<_Float16>(f);
    u16 h;
    memcpy(&h, &x, 2);
    return f != f ? 0x7fff : h;
  }
  static u16 float_to_bfloat(float f) {
    if (f != f) return 0x7fff;
    u32 bits;
    memcpy(&bits, &f, 4);
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }
  // One number of a pair of 16 bits.
  static float of_pair(u32 pair, int shift, bool is_bfloat) {
    u32 bits = pair >> shift & 0xffff;
    if (!is_bfloat) return half_to_float(static_cast<u16>(bits));
    float f;
    bits <<= 16;
    memcpy(&f, &bits, 4);
    return f;
  }
  // The larger numbers of two pairs of 16 bits. If one of two is NaN, the result is the other.
  static u32 larger_pair(u32 a, u32 b, bool is_bfloat) {
    u32 result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      const float max = fmax_ptx(of_pair(a, shift, is_bfloat), of_pair(b, shift, is_bfloat));
      result |= static_cast<u32>(is_bfloat ? float_to_bfloat(max) : float_to_half(max)) << shift;
    }
    return result;
  }
  // The bits of the numbers of a pair that are greater than those of another.
  static u32 where_greater(u32 a, u32 b, bool is_bfloat) {
    u32 result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      if (of_pair(a, shift, is_bfloat) > of_pair(b, shift, is_bfloat)) result |= 0xffffu << shift;
    }
    return result;
  }
  template <typename F>
  static F round_float(F x, u8 rnd) {
    switch (rnd) {
      case RNI:
        return std::nearbyint(x);
      case RZI:
        return std::trunc(x);
      case RMI:
        return std::floor(x);
      case RPI:
        return std::ceil(x);
      default:
        return x;
    }
  }
  void convert(const Instr& in, u32 mask) {
    const Ty to = in.ty, from = in.from;
    for (int l = 0; l < kLanes; ++l) {
      if (!(mask >> l & 1)) continue;
      const u64 bits = get(in.a[0], l);
      u64 out = 0;
      if (!is_float(from)) {
        const int s = 64 - 8 * bytes_of(from);
        const u64 unsigned_value = bits << s >> s;
        const i64 signed_value = static_cast<i64>(bits << s) >> s;
        if (!is_float(to)) {
          if (in.sat) fail(l, "saturating conversion");
          const u64 value = is_signed(from) ? static_cast<u64>(signed_value) : unsigned_value;
          const int t = 64 - 8 * bytes_of(to);
          out = is_signed(to) ? static_cast<u64>(static_cast<i64>(value << t) >> t) : value << t >> t;
        } else {
          if (in.rnd != RN) fail(l, "rounding of a conversion");
          if (to == F32) {
            const float f = is_signed(from) ? static_cast<float>(signed_value) : static_cast<float>(unsigned_value);
            memcpy(&out, &f, 4);
          } else if (to == F64) {
            const double f = is_signed(from) ? static_cast<double>(signed_value) : static_cast<double>(unsigned_value);
            memcpy(&out, &f, 8);
          } else
            fail(l, "conversion");
        }
      } else {
        double x = 0;
        float x32 = 0;
        const bool narrow = from != F64;
        if (from == F32)
          memcpy(&x32, &bits, 4);
        else if (from == F64)
          memcpy(&x, &bits, 8);
        else if (from == F16)
          x32 = half_to_float(static_cast<u16>(bits));
        else {
          const u32 wide = static_cast<u32>(bits) << 16;
          memcpy(&x32, &wide, 4);
        }
        if (narrow) {
          if (in.ftz) x32 = flush(x32);
          x = static_cast<double>(x32);
        }
        if (is_float(to)) {
          if (to == F64) {
            double y = round_float(x, in.rnd);
            if (in.sat) y = y != y ? 0 : std::min(1.0, std::max(0.0, y));
            memcpy(&out, &y, 8);
          } else {
            if (in.rnd == RZ || in.rnd == RM || in.rnd == RP) fail(l, "rounding of a conversion");
            float y = narrow ? x32 : static_cast<float>(x);
            y = round_float(y, in.rnd);
            if (in.sat) y = y != y ? 0.0f : std::min(1.0f, std::max(0.0f, y));
            if (to == F32)
              memcpy(&out, &y, 4);
            else if (!narrow)
              fail(l, "conversion");
            else
              out = to == F16 ? float_to_half(y) : float_to_bfloat(y);
          }
        } else {
          if (in.rnd < RNI) fail(l, "rounding of a conversion");
          const double y = round_float(x, in.rnd);
          const int n = 8 * bytes_of(to);
          if (y != y) {
            out = n == 64 || from == F64 ? 1ull << (n - 1) : 0;
          } else if (is_signed(to)) {
            const double bound = std::ldexp(1.0, n - 1);
            const i64 most = n == 64 ? INT64_MAX : (i64{1} << (n - 1)) - 1;
            const i64 value = y >= bound ? most : y < -bound ? -most - 1 : static_cast<i64>(y);
            out = static_cast<u64>(value);
          } else {
            const double bound = std::ldexp(1.0, n);
            const u64 most = n == 64 ? UINT64_MAX : (u64{1} << n) - 1;
            out = y >= bound ? most : y <= 0 ? 0 : static_cast<u64>(y);
          }
        }
      }
      if (!is_float(to) && bytes_of(to) == 2)
        out &= is_signed(to) && k.regs[static_cast<size_t>(in.d[0])].wide ? ~0ull : 0xffffffffull;
      put(in.d[0], l, out);
    }
    set_def(in.d[0], mask, def(in.a[0]));
  }
};

}  // namespace ptxrun
