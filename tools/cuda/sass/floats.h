// Instructions of floats, and conversions, of one lane.
#pragma once

#include "sass/memory.h"

namespace ptxrun {

struct SassFloats : SassMemory {
  using SassMemory::SassMemory;

  void floats(const SInstr& in, const Instr& carrier, int l) {
    const std::vector<Operand>& o = in.o;
    switch (in.op) {
      case s_FMNMX: {
        const float a = f32(o[1], l), b2 = f32(o[2], l);
        return setf(o[0], l, float_minmax(in, a, b2, pred(o[3], l)));
      }
      case s_FMNMX3: {
        const float a = f32(o[1], l), b2 = f32(o[2], l), c = f32(o[3], l);
        const bool smaller = pred(o[4], l);
        return setf(o[0], l, float_minmax(in, float_minmax(in, a, b2, smaller), c, smaller));
      }
      case s_HMNMX2:
      case s_VHMNMX: {
        u32 max = larger_pair(raw(o[1], l), raw(o[2], l), in.mufu == 1);
        if (in.op == s_VHMNMX) max = larger_pair(max, raw(o[3], l), in.mufu == 1);
        return set(o[0], l, max);
      }
      case s_HSET2: {
        const bool with = pred(o[3], l);
        return set(o[0], l, with ? where_greater(raw(o[1], l), raw(o[2], l), in.mufu == 1) : 0);
      }
      case s_FSETP: {
        float a = f32(o[2], l), b2 = f32(o[3], l);
        if (in.ftz) {
          a = flush(a);
          b2 = flush(b2);
        }
        const bool r = compare<float>(in.cmp, a, b2), with = pred(o[4], l);
        setp(o[0], l, combine(in.boolean, r, with));
        setp(o[1], l, combine(in.boolean, !r, with));
        return;
      }
      case s_FSET: {  // 1 or all bits set, in place of a predicate
        const bool r = combine(in.boolean, compare<float>(in.cmp, f32(o[1], l), f32(o[2], l)), pred(o[3], l));
        return set(o[0], l, r ? in.mufu == 1 ? 0x3f800000u : ~0u : 0u);
      }
      case s_DSETP: {
        const bool r = compare<double>(in.cmp, f64(o[2], l), f64(o[3], l)), with = pred(o[4], l);
        setp(o[0], l, combine(in.boolean, r, with));
        setp(o[1], l, combine(in.boolean, !r, with));
        return;
      }
      case s_DSETPMAX:
      case s_DSETPMIN: {  // whether the first operand is the result, and whether both are NaN
        const double a = f64(o[2], l), b2 = f64(o[3], l);
        const bool beyond =
            in.op == s_DSETPMAX ? a > b2 || (a == b2 && !std::signbit(a)) : a < b2 || (a == b2 && std::signbit(a));
        setp(o[0], l, a == a && (b2 != b2 || beyond));
        setp(o[1], l, a != a && b2 != b2);
        return;
      }
      case s_FCHK: {
        u32 a = raw(o[1], l), b2 = raw(o[2], l);
        const int ea = a >> 23 & 255, eb = b2 >> 23 & 255;
        setp(o[0], l, eb <= 1 || eb >= 253 || ea == 255 || ea <= 24 || ea - eb <= -125 || ea - eb >= 126);
        return;
      }
      case s_MUFU: {
        if (in.mufu >= 4 && in.mufu <= 5) {
          u64 bits = static_cast<u64>(raw(o[1], l)) << 32;
          if ((bits & 0x7ff0000000000000ull) == 0) bits &= 0x8000000000000000ull;
          double d;
          memcpy(&d, &bits, 8);
          d = in.mufu == 4 ? 1.0 / d : 1.0 / std::sqrt(d);
          memcpy(&bits, &d, 8);
          if (d == d && std::isfinite(d) && (bits & 0x7ff0000000000000ull) == 0) bits &= 0x8000000000000000ull;
          return set(o[0], l, static_cast<u32>(bits >> 32));
        }
        const float a = flush(f32(o[1], l));
        float r = in.mufu == 1   ? 1.0f / a
                  : in.mufu == 2 ? 1.0f / std::sqrt(a)
                  : in.mufu == 3 ? static_cast<float>(std::exp2(static_cast<double>(a)))
                  : in.mufu == 6 ? static_cast<float>(std::log2(static_cast<double>(a)))
                                 : std::sqrt(a);
        if (!(in.mufu == 3 && a == 0)) r = off(r, a, in.mufu == 1 ? 1 : 2);
        return setf(o[0], l, flush(r));
      }
      case s_F2I: {
        const bool from64 = std::find(in.mod.begin(), in.mod.end(), "F64") != in.mod.end();
        const bool to_u64 = std::find(in.mod.begin(), in.mod.end(), "U64") != in.mod.end();
        const bool to_s64 = std::find(in.mod.begin(), in.mod.end(), "S64") != in.mod.end();
        double v = from64 ? f64(o[1], l) : static_cast<double>(f32(o[1], l));
        v = std::find(in.mod.begin(), in.mod.end(), "TRUNC") != in.mod.end() ? std::trunc(v) : std::nearbyint(v);
        const int n = to_u64 || to_s64 ? 64 : 32;
        const bool is_u = to_u64 || in.is_unsigned;
        u64 out;
        if (v != v)
          out = n == 64 || from64 ? 1ull << (n - 1) : 0;
        else if (!is_u) {
          const double bound = std::ldexp(1.0, n - 1);
          const i64 most = n == 64 ? INT64_MAX : (i64{1} << 31) - 1;
          out = static_cast<u64>(v >= bound ? most : v < -bound ? -most - 1 : static_cast<i64>(v));
        } else {
          const double bound = std::ldexp(1.0, n);
          out = v >= bound ? (n == 64 ? UINT64_MAX : 0xffffffffull) : v <= 0 ? 0 : static_cast<u64>(v);
        }
        if (n == 64)
          set64(o[0], l, out);
        else
          set(o[0], l, static_cast<u32>(out));
        return;
      }
      case s_I2F: {
        const auto has = [&](const char* t) { return std::find(in.mod.begin(), in.mod.end(), t) != in.mod.end(); };
        const bool wide = has("S64") || has("U64");
        const u64 bits = wide ? int64(o[1], l) : ival(o[1], l);
        if (has("F64")) {
          const double d = has("U64")   ? static_cast<double>(bits)
                           : has("S64") ? static_cast<double>(static_cast<i64>(bits))
                           : has("U16") ? static_cast<double>(static_cast<u16>(bits))
                           : has("U32") ? static_cast<double>(static_cast<u32>(bits))
                                        : static_cast<double>(static_cast<i32>(bits));
          return setd(o[0], l, d);
        }
        const float f = rounded_as(in.rnd, [&] {
          volatile u64 v = bits;
          return has("U64")       ? static_cast<float>(v)
                 : has("S64")     ? static_cast<float>(static_cast<i64>(v))
                 : in.is_unsigned ? static_cast<float>(static_cast<u32>(v))
                                  : static_cast<float>(static_cast<i32>(v));
        });
        return setf(o[0], l, f);
      }
      case s_I2FP:
        return setf(o[0], l, rounded_as(in.rnd, [&] {
                      volatile u32 v = ival(o[1], l);
                      return in.is_unsigned ? static_cast<float>(v) : static_cast<float>(static_cast<i32>(v));
                    }));
      case s_F2F: {
        if (in.mod[0] == "F64") return setd(o[0], l, static_cast<double>(f32(o[1], l)));
        return setf(o[0], l, static_cast<float>(f64(o[1], l)));
      }
      case s_FRND: {
        const auto whole = [&](auto x) { return in.mufu & 1 ? std::floor(x) : std::nearbyint(x); };
        if (in.mufu & 2) return setd(o[0], l, whole(f64(o[1], l)));
        return setf(o[0], l, whole(f32(o[1], l)));
      }
      case s_F2FP: {
        const float a = f32(o[1], l), b2 = f32(o[2], l);
        const u32 r = in.mufu == 1 ? static_cast<u32>(float_to_bfloat(a)) << 16 | float_to_bfloat(b2)
                                   : static_cast<u32>(float_to_half(a)) << 16 | float_to_half(b2);
        return set(o[0], l, r);
      }
      case s_HADD2:
        return setf(o[0], l, f32(o[1], l) + f32(o[2], l));
      case s_HFMA2:
        return set(o[0], l, static_cast<u32>(in.low >> 32));
      case s_FADD: {
        const float a = f32(o[1], l), b2 = f32(o[2], l);
        return setf(o[0], l, finish(in, rounded_as(in.rnd, [&] {
                                      volatile float p = a, q = b2;
                                      return p + q;
                                    })));
      }
      case s_FMUL: {
        const float a = f32(o[1], l), b2 = f32(o[2], l);
        return setf(o[0], l, finish(in, rounded_as(in.rnd, [&] {
                                      volatile float p = a, q = b2;
                                      return p * q;
                                    })));
      }
      case s_FFMA: {
        const float a = f32(o[1], l), b2 = f32(o[2], l), c = f32(o[3], l);
        return setf(o[0], l, finish(in, rounded_as(in.rnd, [&] {
                                      volatile float p = a, q = b2, r = c;
                                      return std::fma(static_cast<float>(p), static_cast<float>(q),
                                                      static_cast<float>(r));
                                    })));
      }
      case s_DADD: {
        const double a = f64(o[1], l), b2 = f64(o[2], l);
        return setd(o[0], l, rounded_as(in.rnd, [&] {
                      volatile double p = a, q = b2;
                      return p + q;
                    }));
      }
      case s_DMUL: {
        const double a = f64(o[1], l), b2 = f64(o[2], l);
        return setd(o[0], l, rounded_as(in.rnd, [&] {
                      volatile double p = a, q = b2;
                      return p * q;
                    }));
      }
      case s_DFMA: {
        const double a = f64(o[1], l), b2 = f64(o[2], l), c = f64(o[3], l);
        return setd(o[0], l, rounded_as(in.rnd, [&] {
                      volatile double p = a, q = b2, r = c;
                      return std::fma(static_cast<double>(p), static_cast<double>(q), static_cast<double>(r));
                    }));
      }
      default:
        memory(in, carrier, l);
    }
  }
  float finish(const SInstr& in, float r) {
    if (in.ftz) r = flush(r);
    if (in.sat) r = r != r ? 0 : std::min(1.0f, std::max(0.0f, r));
    return r;
  }
  float float_minmax(const SInstr& in, float a, float b2, bool smaller) {
    if (in.mufu == 1 && (a != a || b2 != b2)) return std::numeric_limits<float>::quiet_NaN();
    return smaller ? fmin_ptx(a, b2) : fmax_ptx(a, b2);
  }
};

}  // namespace ptxrun
