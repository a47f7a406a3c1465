// The one instruction that a lane executes: integers, predicates and registers here.
#pragma once

#include "sass/floats.h"

namespace ptxrun {

struct SassExecute : SassFloats {
  using SassFloats::SassFloats;

  static Operand predicate(const SInstr& in, int index) {
    Operand p;
    p.kind = in.uniform ? oUP : oP;
    p.index = index;
    return p;
  }

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
      case s_PRMT:
        return set(o[0], l, permuted_bytes(raw(o[1], l), raw(o[3], l), raw(o[2], l)));
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
          if (m >> i & 1) v = (v & ~(1u << i)) | static_cast<u32>(pred(predicate(in, i), l)) << i;
        }
        return set(o[0], l, v);
      }
      case s_R2P: {
        const u32 v = raw(o[1], l), m = raw(o[2], l);
        for (int i = 0; i < 7; ++i) {
          if (m >> i & 1) setp(predicate(in, i), l, v >> i & 1);
        }
        return;
      }
      case s_FLO: {
        const u32 v = ival(o[1], l);
        return set(o[0], l,
                   v == 0 ? 0xffffffffu : static_cast<u32>(in.mufu == 1 ? __builtin_clz(v) : 31 - __builtin_clz(v)));
      }
      case s_POPC:
        return set(o[0], l, static_cast<u32>(__builtin_popcount(ival(o[1], l))));
      default:
        floats(in, carrier, l);
    }
  }
  u32 minmax(const SInstr& in, u32 a, u32 b2, bool smaller) {
    const bool less = in.is_unsigned ? a < b2 : static_cast<i32>(a) < static_cast<i32>(b2);
    return less == smaller ? a : b2;
  }
};

}  // namespace ptxrun
