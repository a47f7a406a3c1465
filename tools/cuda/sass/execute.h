// The execution of one instruction by one lane.
#pragma once

#include "sass/operands.h"

namespace ptxrun {

struct SassExecute : SassOperands {
  using SassOperands::SassOperands;

  void exec(const SInstr& in, const Instr& carrier, int l) {
    const std::vector<Operand>& o = in.o;
    switch (in.op) {
      case s_NOP:
      case s_YIELD:
        return;
      case s_MOV:
        return set(o[0], l, raw(o[1], l));
      case s_VIADD:
        return set(o[0], l, ival(o[1], l) + ival(o[2], l));
      case s_IADD3:
      case s_IADD3X: {
        size_t i = 1;
        const Operand* co[2] = {nullptr, nullptr};
        for (int c = 0; i < o.size() && is_pred(o[i]) && c < 2; ++c) co[c] = &o[i++];
        u64 sum = addend(o[i], l) + addend(o[i + 1], l) + addend(o[i + 2], l);
        i += 3;
        if (in.op == s_IADD3X)
          for (; i < o.size(); ++i) sum += pred(o[i], l) ? 1 : 0;
        set(o[0], l, static_cast<u32>(sum));
        const u64 carry = sum >> 32;
        if (co[0] != nullptr) setp(*co[0], l, carry >= 1);
        if (co[1] != nullptr) setp(*co[1], l, carry >= 2);
        return;
      }
      case s_IMAD: {
        const size_t i = is_pred(o[1]) ? 2 : 1;
        return set(o[0], l, ival(o[i], l) * ival(o[i + 1], l) + ival(o[i + 2], l));
      }
      case s_IMADX:
        return set(o[0], l, ival(o[1], l) * ival(o[2], l) + ival(o[3], l) + (pred(o[4], l) ? 1 : 0));
      case s_IMADHI: {
        const size_t i = is_pred(o[1]) ? 2 : 1;
        const u32 a = ival(o[i], l), b2 = ival(o[i + 1], l);
        const u64 c = int64(o[i + 2], l);
        if (in.is_unsigned) {
          const unsigned __int128 r = static_cast<unsigned __int128>(static_cast<u64>(a) * b2) + c;
          set(o[0], l, static_cast<u32>(r >> 32));
          if (i == 2) setp(o[1], l, static_cast<bool>(r >> 64));
        } else {
          const i64 r = static_cast<i64>(static_cast<i32>(a)) * static_cast<i32>(b2) + static_cast<i64>(c);
          if (i == 2) fail(l, "carry of IMAD.HI");
          set(o[0], l, static_cast<u32>(static_cast<u64>(r) >> 32));
        }
        return;
      }
      case s_IMADWIDE:
      case s_IMADWIDEX: {
        const size_t i = is_pred(o[1]) ? 2 : 1;
        const u32 a = ival(o[i], l), b2 = ival(o[i + 1], l);
        const u64 c = int64(o[i + 2], l);
        const u64 product = in.is_unsigned
                                ? static_cast<u64>(a) * b2
                                : static_cast<u64>(static_cast<i64>(static_cast<i32>(a)) * static_cast<i32>(b2));
        unsigned __int128 r = static_cast<unsigned __int128>(product) + c;
        if (in.op == s_IMADWIDEX) r += pred(o[i + 3], l) ? 1 : 0;
        set64(o[0], l, static_cast<u64>(r));
        if (i == 2) {
          if (!in.is_unsigned) fail(l, "carry of IMAD.WIDE");
          setp(o[1], l, static_cast<bool>(r >> 64));
        }
        return;
      }
      case s_LEA: {
        const size_t i = is_pred(o[1]) ? 2 : 1;
        const u32 shifted = raw(o[i], l) << o[i + 2].imm;
        const u64 a = o[i].neg ? static_cast<u64>(static_cast<u32>(~shifted)) + 1 : shifted;
        const u64 sum = a + addend(o[i + 1], l);
        set(o[0], l, static_cast<u32>(sum));
        if (i == 2) setp(o[1], l, sum >> 32 != 0);
        return;
      }
      case s_LEAHI:
      case s_LEAHIX: {
        // d, a, b, c, shift, P -- or with SX32: d, a, b, shift, P
        size_t i = is_pred(o[1]) ? 2 : 1;
        const u32 a = raw(o[i], l);
        const Operand& b2 = o[i + 1];
        const u32 c = in.is_signed ? static_cast<u32>(static_cast<i32>(a) >> 31) : raw(o[i + 2], l);
        const size_t j = in.is_signed ? i + 2 : i + 3;
        const u32 n = o[j].imm;
        const u64 pair = static_cast<u64>(c) << 32 | a;
        u32 high = static_cast<u32>(pair >> (32 - n));
        if (o[i].neg) high = ~high;  // the low part has a carry
        u64 sum = high + addend(b2, l);
        if (in.op == s_LEAHIX)
          sum += pred(o[j + 1], l) ? 1 : 0;
        else if (o[i].neg)
          fail(l, "negated LEA.HI");
        set(o[0], l, static_cast<u32>(sum));
        if (i == 2) setp(o[1], l, sum >> 32 != 0);
        return;
      }
      case s_LOP3: {
        size_t i = 0;
        const Operand* p = nullptr;
        if (is_pred(o[0])) {
          p = &o[0];
          i = 1;
        }
        const u32 r = lut3(ival(o[i + 1], l), ival(o[i + 2], l), ival(o[i + 3], l), o[i + 4].imm);
        set(o[i], l, r);
        if (p != nullptr) setp(*p, l, r != 0 || pred(o[i + 5], l));
        return;
      }
      case s_PLOP3: {
        const u32 a = pred(o[2], l), b2 = pred(o[3], l), c = pred(o[4], l);
        const u32 at = a << 2 | b2 << 1 | c;
        const u32 l1 = o[5].imm, l2 = o[6].imm;
        setp(o[0], l, l1 >> at & 1);
        setp(o[1], l, l2 >> at & 1);
        return;
      }
      case s_SHF: {
        const u32 a = raw(o[1], l), n = raw(o[2], l), c = raw(o[3], l);
        u64 pair = static_cast<u64>(c) << 32 | a;
        if (in.left) {
          if (in.s64) {
            const u32 k2 = std::min(n, 63u);
            pair <<= k2;
            return set(o[0], l, static_cast<u32>(in.hi ? pair >> 32 : pair));
          }
          if (in.hi) fail(l, "SHF.L.HI");
          return set(o[0], l, n >= 32 ? 0 : a << n);
        }
        if (in.s64) {
          const u32 k2 = std::min(n, 63u);
          const u64 r = in.is_signed ? static_cast<u64>(static_cast<i64>(pair) >> k2) : pair >> k2;
          return set(o[0], l, static_cast<u32>(in.hi ? r >> 32 : r));
        }
        if (!in.hi) fail(l, "SHF.R");
        if (in.is_signed) return set(o[0], l, static_cast<u32>(static_cast<i32>(c) >> std::min(n, 31u)));
        return set(o[0], l, n >= 32 ? 0 : c >> n);
      }
      case s_PRMT: {
        const u64 both = static_cast<u64>(raw(o[3], l)) << 32 | raw(o[1], l);
        const u32 c = raw(o[2], l);
        u32 r = 0;
        for (int i = 0; i < 4; ++i) {
          const u32 select = c >> (4 * i) & 15;
          u32 byte = static_cast<u32>(both >> (8 * (select & 7))) & 255;
          if (select & 8) byte = byte & 128 ? 255 : 0;
          r |= byte << (8 * i);
        }
        return set(o[0], l, r);
      }
      case s_SEL: {
        const Operand& from = pred(o[3], l) ? o[1] : o[2];
        u32 v = raw(from, l);
        if (in.mufu == 1) {
          if (from.abs) v &= 0x7fffffffu;
          if (from.neg) v ^= 0x80000000u;
        } else
          v = ival(from, l);
        return set(o[0], l, v);
      }
      case s_IABS: {
        const u32 v = raw(o[1], l);
        return set(o[0], l, static_cast<i32>(v) < 0 ? 0 - v : v);
      }
      case s_FMNMX: {
        const float a = f32(o[1], l), b2 = f32(o[2], l);
        return setf(o[0], l, float_minmax(in, a, b2, pred(o[3], l)));
      }
      case s_FMNMX3: {
        const float a = f32(o[1], l), b2 = f32(o[2], l), c = f32(o[3], l);
        const bool smaller = pred(o[4], l);
        return setf(o[0], l, float_minmax(in, float_minmax(in, a, b2, smaller), c, smaller));
      }
      case s_VIMNMX:
        return set(o[0], l, minmax(in, ival(o[1], l), ival(o[2], l), pred(o[3], l)));
      case s_VIMNMX3: {
        const bool p = pred(o[4], l);
        return set(o[0], l, minmax(in, minmax(in, ival(o[1], l), ival(o[2], l), p), ival(o[3], l), p));
      }
      case s_VIADDMNMX:
        return set(o[0], l, minmax(in, ival(o[1], l) + ival(o[2], l), ival(o[3], l), pred(o[4], l)));
      case s_ISETP: {
        const u32 a = ival(o[2], l), b2 = ival(o[3], l);
        bool r = in.is_unsigned ? compare<u32>(in.cmp, a, b2)
                                : compare<i32>(in.cmp, static_cast<i32>(a), static_cast<i32>(b2));
        if (in.ex) {
          const bool lower = pred(o[5], l);
          if (in.cmp == EQ)
            r = a == b2 && lower;
          else if (in.cmp == NE)
            r = a != b2 || lower;
          else if (a == b2)
            r = lower;
        }
        const bool with = pred(o[4], l);
        setp(o[0], l, combine(in.boolean, r, with));
        setp(o[1], l, combine(in.boolean, !r, with));
        return;
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
      case s_S2R: {
        const u32 t = static_cast<u32>(w->index * kLanes + l);
        const u32 lane = static_cast<u32>(l);
        return set(o[0], l,
                   in.mufu == 1   ? t
                   : in.mufu == 2 ? b->index
                   : in.mufu == 3 ? 0
                   : in.mufu == 4 ? lane
                                  : (1u << lane) - 1);
      }
      case s_CS2R:
        set(o[0], l, 0);
        if (in.width == 8) set(o[0], l, 0, 1);
        return;
      case s_R2UR:
        return set(o[0], l, raw(o[1], l));
      case s_P2R: {
        u32 v = raw(o[2], l);
        const u32 m = raw(o[3], l);
        for (int i = 0; i < 7; ++i) {
          if (!(m >> i & 1)) continue;
          Operand p;
          p.kind = in.uniform ? oUP : oP;
          p.index = i;
          v = (v & ~(1u << i)) | static_cast<u32>(pred(p, l)) << i;
        }
        return set(o[0], l, v);
      }
      case s_FLO: {
        const u32 v = ival(o[1], l);
        return set(o[0], l,
                   v == 0 ? 0xffffffffu : static_cast<u32>(in.mufu == 1 ? __builtin_clz(v) : 31 - __builtin_clz(v)));
      }
      case s_POPC:
        return set(o[0], l, static_cast<u32>(__builtin_popcount(ival(o[1], l))));
      default:
        fail(l, "unknown instruction");
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
  u32 minmax(const SInstr& in, u32 a, u32 b2, bool smaller) {
    const bool less = in.is_unsigned ? a < b2 : static_cast<i32>(a) < static_cast<i32>(b2);
    return less == smaller ? a : b2;
  }
};

}  // namespace ptxrun
