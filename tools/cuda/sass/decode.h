// Decodes an instruction of machine code from its text and its low word.
#pragma once

#include "sass/sass.h"

namespace ptxrun {

inline bool is_true(const Operand& o) { return (o.kind == oP || o.kind == oUP) && o.index == 7 && !o.inv; }

inline void decode(SassKernel& k, SInstr& in, std::string text, u64 low, const std::unordered_map<u32, int>& at_of,
                   u32 address) {
  in.low = low;
  size_t at = 0;
  if (text[0] == '@') {
    const size_t end = text.find(' ');
    in.guard = parse_operand(text.substr(1, end - 1), low);
    at = end + 1;
  }
  while (text[at] == ' ') ++at;
  size_t end = text.find(' ', at);
  if (end == std::string::npos) end = text.size();
  in.mnemonic = text.substr(at, end - at);
  std::vector<std::string> m = Parser::split(in.mnemonic, '.');
  in.mod.assign(m.begin() + 1, m.end());
  const auto has = [&](const char* x) { return std::find(in.mod.begin(), in.mod.end(), x) != in.mod.end(); };
  std::vector<std::string> ops = Parser::split(text.substr(end), ',');
  std::string base = m[0];
  if (base.size() > 1 && base[0] == 'U' && base != "UNUSED") {
    static const std::set<std::string> u = {"UIADD3", "UIMAD", "ULEA", "ULOP3", "USEL",  "USHF",
                                            "UISETP", "UMOV",  "UFLO", "ULDC",  "UP2UR", "UPRMT"};
    if (u.count(base)) {
      in.uniform = true;
      base = base == "UP2UR" ? "P2R" : base.substr(1);
    }
  }
  if (base == "LDCU") {  // ULDC of sm_90
    in.uniform = true;
    base = "LDC";
  }
  const auto known = modifiers().find(base);
  if (known == modifiers().end()) bad_sass("unknown instruction " + text);
  for (const std::string& mod : in.mod) {
    if (known->second.count(mod) == 0) bad_sass("unknown modifier " + mod + " of " + text);
  }
  static const std::map<std::string, Cmp> cmps = {{"EQ", EQ},   {"NE", NE},   {"LT", LT},   {"LE", LE},   {"GT", GT},
                                                  {"GE", GE},   {"EQU", EQU}, {"NEU", NEU}, {"LTU", LTU}, {"LEU", LEU},
                                                  {"GTU", GTU}, {"GEU", GEU}, {"NUM", NUM}, {"NAN", NAN_}};
  in.ftz = has("FTZ");
  in.sat = has("SAT");
  in.rnd = has("RZ") ? RZ : has("RM") ? RM : has("RP") ? RP : RN;
  in.is_unsigned = has("U32");
  in.ex = has("EX");
  in.width = has("128") ? 16 : has("64") ? 8 : has("U16") || has("S16") ? 2 : has("U8") || has("S8") ? 1 : 4;
  in.boolean = has("OR") ? 2 : has("XOR") ? 3 : 1;
  if (base.size() > 3 && base.find("SETP") != std::string::npos && !has("MAX") && !has("MIN")) {
    auto it = cmps.find(in.mod[0]);
    if (it == cmps.end()) bad_sass(text);
    in.cmp = it->second;
  }
  const auto all = [&] {
    for (auto& s : ops) in.o.push_back(parse_operand(s, low));
  };
  const auto goto_of = [&](const std::string& s) {
    const u32 to = static_cast<u32>(strtoul(s.c_str(), nullptr, 0));
    auto it = at_of.find(to);
    if (it == at_of.end()) bad_sass("target of " + text);
    in.target = it->second;
  };
  const auto address_of = [&](std::string s) {
    if (s.compare(0, 4, "desc") == 0) s = s.substr(s.find("][") + 1);
    s = s.substr(1, s.size() - 2);
    std::string part;
    s += '+';
    for (char c : s) {
      if (c != '+') {
        part += c;
        continue;
      }
      const size_t d = part.find(".64");
      if (d != std::string::npos) part = part.substr(0, d);
      if (part == "RZ" || part == "URZ") {
      } else if (part[0] == 'R')
        in.ra = atoi(part.c_str() + 1);
      else if (part[0] == 'U')
        in.ua = atoi(part.c_str() + 2);
      else
        in.off += part[0] == '-' ? -static_cast<i64>(strtoull(part.c_str() + 1, nullptr, 0))
                                 : static_cast<i64>(strtoull(part.c_str(), nullptr, 0));
      part.clear();
    }
  };
  (void)address;
  (void)k;
  if (base == "NOP")
    in.op = s_NOP;
  else if (base == "YIELD" || base == "ERRBAR" || base == "CGAERRBAR" || base == "CCTL" || base == "ENDCOLLECTIVE")
    in.op = s_YIELD;
  else if (base == "MOV") {
    in.op = s_MOV;
    all();
  } else if (base == "IADD3") {
    in.op = has("X") ? s_IADD3X : s_IADD3;
    all();
  } else if (base == "VIADD") {
    in.op = s_VIADD;
    all();
  } else if (base == "IMAD") {
    in.op = has("WIDE") ? (has("X") ? s_IMADWIDEX : s_IMADWIDE) : has("HI") ? s_IMADHI : has("X") ? s_IMADX : s_IMAD;
    all();
  } else if (base == "LEA") {
    in.op = has("HI") ? (has("X") ? s_LEAHIX : s_LEAHI) : s_LEA;
    in.is_signed = has("SX32");
    all();
  } else if (base == "LOP3") {
    in.op = s_LOP3;
    all();
  } else if (base == "PLOP3") {
    in.op = s_PLOP3;
    all();
  } else if (base == "SHF") {
    in.op = s_SHF;
    in.left = has("L");
    in.hi = has("HI");
    in.s64 = has("S64") || has("U64");
    in.is_signed = has("S32") || has("S64");
    all();
  } else if (base == "PRMT") {
    in.op = s_PRMT;
    all();
  } else if (base == "SEL" || base == "FSEL") {
    in.op = s_SEL;
    all();
    if (base == "FSEL") in.mufu = 1;
  } else if (base == "IABS") {
    in.op = s_IABS;
    all();
  } else if (base == "FMNMX" || base == "FMNMX3") {
    in.op = base == "FMNMX" ? s_FMNMX : s_FMNMX3;
    in.mufu = has("NAN");
    all();
  } else if (base == "HMNMX2" || base == "VHMNMX") {
    in.op = base == "HMNMX2" ? s_HMNMX2 : s_VHMNMX;
    in.mufu = has("BF16_V2");
    // An immediate operand has a text for each of its two numbers.
    const auto both = std::find(ops.begin(), ops.end(), "-INF");
    if (both != ops.end()) {
      if (both + 1 == ops.end() || both[1] != "-INF") bad_sass(text);
      ops.erase(both);
    }
    all();
    const size_t sources = in.op == s_HMNMX2 ? 2 : 3;
    if (in.o.size() != sources + 2 || !in.o.back().inv || in.o.back().index != 7) bad_sass(text);  // the minimum
    for (const Operand& o : in.o) {
      if (o.neg || o.abs || o.half) bad_sass(text);
    }
  } else if (base == "HSET2") {
    in.op = s_HSET2;
    in.mufu = has("BF16_V2");
    all();
    if (in.o.size() != 4 || !has("GT") || !has("AND")) bad_sass(text);
    for (const Operand& o : in.o) {
      if (o.neg || o.abs || o.half || o.inv) bad_sass(text);
    }
  } else if (base == "VIMNMX") {
    in.op = s_VIMNMX;
    all();
    if (in.o.size() == 6) {  // sm_100 names two predicates, too
      if (!is_true(in.o[1]) || !is_true(in.o[2])) bad_sass(text);
      in.o.erase(in.o.begin() + 1, in.o.begin() + 3);
    }
  } else if (base == "VIMNMX3") {
    in.op = s_VIMNMX3;
    all();
  } else if (base == "VIADDMNMX") {
    in.op = s_VIADDMNMX;
    all();
  } else if (base == "ISETP") {
    in.op = s_ISETP;
    all();
  } else if (base == "FSETP") {
    in.op = s_FSETP;
    all();
  } else if (base == "FSET") {
    in.op = s_FSET;
    all();
    in.mufu = has("BF") ? 1 : 0;
    in.cmp = cmps.at(in.mod[in.mufu]);
  } else if (base == "DSETP") {
    in.op = has("MAX") ? s_DSETPMAX : has("MIN") ? s_DSETPMIN : s_DSETP;
    all();
  } else if (base == "FCHK") {
    in.op = s_FCHK;
    all();
  } else if (base == "MUFU") {
    in.op = s_MUFU;
    all();
    in.mufu = has("RCP64H")   ? 4
              : has("RSQ64H") ? 5
              : has("RCP")    ? 1
              : has("RSQ")    ? 2
              : has("EX2")    ? 3
              : has("LG2")    ? 6
              : has("SQRT")   ? 7
                              : 0;
    if (in.mufu == 0) bad_sass(text);
  } else if (base == "F2I") {
    in.op = s_F2I;
    all();
  } else if (base == "I2F") {
    in.op = s_I2F;
    all();
  } else if (base == "F2F") {
    in.op = s_F2F;
    all();
  } else if (base == "FRND") {
    in.op = s_FRND;
    all();
    in.mufu = (has("F64") ? 2 : 0) + (has("FLOOR") ? 1 : 0);
  } else if (base == "F2FP") {
    in.op = s_F2FP;
    in.mufu = has("BF16") ? 1 : 0;
    all();
  } else if (base == "HADD2") {
    in.op = s_HADD2;
    if (!has("F32")) bad_sass(text);
    all();
  } else if (base == "HFMA2") {
    in.op = s_HFMA2;
    all();
    if (!(in.o[1].index == kZero && in.o[2].index == kZero && in.o.size() == 5)) bad_sass(text);
  } else if (base == "I2FP") {
    in.op = s_I2FP;
    all();
  } else if (base == "FADD") {
    in.op = s_FADD;
    all();
  } else if (base == "FMUL") {
    in.op = s_FMUL;
    all();
  } else if (base == "FFMA") {
    in.op = s_FFMA;
    all();
  } else if (base == "DADD") {
    in.op = s_DADD;
    all();
  } else if (base == "DMUL") {
    in.op = s_DMUL;
    all();
  } else if (base == "DFMA") {
    in.op = s_DFMA;
    all();
  } else if (base == "LDC") {
    in.op = s_LDC;
    all();
  } else if (base == "LDS" || base == "LDL") {
    in.op = base == "LDS" ? s_LDS : s_LDL;
    in.o.push_back(parse_operand(ops[0], low));
    address_of(ops[1]);
  } else if (base == "STS" || base == "STL") {
    in.op = base == "STS" ? s_STS : s_STL;
    address_of(ops[0]);
    in.o.push_back(parse_operand(ops[1], low));
  } else if (base == "LDG" || base == "LD") {  // LD: generic; an access to a shared address is reported
    in.op = s_LDG;
    in.o.push_back(parse_operand(ops[0], low));
    address_of(ops[1]);
  } else if (base == "STG") {
    in.op = s_STG;
    address_of(ops[0]);
    in.o.push_back(parse_operand(ops[1], low));
  } else if (base == "ATOMS") {
    if (has("POPC") && has("INC")) {
      in.op = s_ATOMS_INC;
      in.o.push_back(parse_operand(ops[0], low));
      address_of(ops[1]);
      if (in.o[0].index != kZero) bad_sass(text);
    } else if (has("ADD") && in.width == 4) {
      in.op = s_ATOMS_ADD;
      in.o.push_back(parse_operand(ops[0], low));
      address_of(ops[1]);
      in.o.push_back(parse_operand(ops[2], low));
    } else if (has("CAST")) {
      in.op = s_ATOMS_CAST;
      in.o.push_back(parse_operand(ops[0], low));
      address_of(ops[1]);
      in.o.push_back(parse_operand(ops[2], low));
      in.o.push_back(parse_operand(ops[3], low));
    } else
      bad_sass(text);
  } else if (base == "ATOMG") {
    in.op = s_ATOMG;
    if (!has("ADD")) bad_sass(text);
    in.o.push_back(parse_operand(ops[1], low));
    address_of(ops[2]);
    in.o.push_back(parse_operand(ops[3], low));
  } else if (base == "REDG") {
    in.op = s_REDG;
    if (!has("MIN") || !has("S64")) bad_sass(text);
    address_of(ops[0]);
    in.o.push_back(parse_operand(ops[1], low));
  } else if (base == "SHFL") {
    in.op = s_SHFL;
    in.mufu = has("UP") ? 0 : has("DOWN") ? 1 : has("BFLY") ? 2 : 3;
    all();
  } else if (base == "VOTEU") {
    in.op = s_VOTE;
    in.mufu = has("ALL");
    for (size_t i = 0; i + 1 < ops.size(); ++i) {
      const Operand to = parse_operand(ops[i], low);
      if (to.kind != oU && to.kind != oUP) bad_sass(text);
      if (!is_true(to)) in.o.push_back(to);
    }
    in.o.push_back(parse_operand(ops.back(), low));
    if (in.o.size() != 2 || in.o[1].kind != oP) bad_sass(text);
  } else if (base == "S2R" || base == "S2UR") {
    in.op = s_S2R;
    in.o.push_back(parse_operand(ops[0], low));
    in.mufu = ops[1] == "SR_TID.X"      ? 1
              : ops[1] == "SR_CTAID.X"  ? 2
              : ops[1] == "SR_CgaCtaId" ? 3
              : ops[1] == "SR_LANEID"   ? 4
              : ops[1] == "SR_LTMASK"   ? 5
                                        : 0;
    if (in.mufu == 0) bad_sass(text);
  } else if (base == "CS2R") {
    in.op = s_CS2R;
    if (ops[1] != "SRZ") bad_sass(text);
    in.o.push_back(parse_operand(ops[0], low));
    in.width = has("32") ? 4 : 8;
  } else if (base == "R2UR") {
    in.op = s_R2UR;
    all();
  } else if (base == "P2R") {
    in.op = s_P2R;
    all();
  } else if (base == "R2P") {
    in.op = s_R2P;
    all();
  } else if (base == "POPC") {
    in.op = s_POPC;
    all();
  } else if (base == "FLO") {
    in.op = s_FLO;
    in.mufu = has("SH");
    all();
  } else if (base == "BRA") {
    if (has("DIV")) {
      in.op = s_BRADIV;
      in.o.push_back(parse_operand(ops[0], low));
      goto_of(ops[1]);
    } else {
      in.op = s_BRA;
      if (ops.size() > 1) {
        in.o.push_back(parse_operand(ops[0], low));
      }
      goto_of(ops.back());
    }
  } else if (base == "BRX" || base == "BRXU") {  // jumps relative to the named address, by a register
    in.op = base == "BRX" ? s_BRX : s_BRXU;
    const std::string rest = text.substr(text.find(base == "BRX" ? " R" : " UR", at) + 1);
    in.o.push_back(parse_operand(rest.substr(0, rest.find(' ')), low));
    std::string d = rest.substr(rest.find(' ') + 1);
    in.off = d[0] == '-' ? -static_cast<i64>(strtoull(d.c_str() + 1, nullptr, 0))
                         : static_cast<i64>(strtoull(d.c_str(), nullptr, 0));
  } else if (base == "CALL") {
    in.op = s_CALL;
    goto_of(ops[0]);
  } else if (base == "RET") {
    in.op = s_RET;
    const std::string rest = text.substr(text.find(" R") + 1);
    in.o.push_back(parse_operand(rest.substr(0, rest.find(' ')), low));
    in.off = strtoll(rest.c_str() + rest.find(' ') + 1, nullptr, 0);
  } else if (base == "EXIT")
    in.op = s_EXIT;
  else if (base == "BSSY") {
    in.op = s_BSSY;
    in.ra = atoi(ops[0].c_str() + 1);
  } else if (base == "BSYNC") {
    in.op = s_BSYNC;
    in.ra = atoi(ops[0].c_str() + 1);
  } else if (base == "BREAK") {
    in.op = s_BREAK;
    if (ops.size() == 2) in.o.push_back(parse_operand(ops[0], low));
    if (ops.back()[0] != 'B') bad_sass(text);
    in.ra = atoi(ops.back().c_str() + 1);
  } else if (base == "WARPSYNC") {
    in.op = s_WARPSYNC;
    if (!has("ALL")) in.o.push_back(parse_operand(ops[0], low));
  } else if (base == "BAR") {
    in.op = s_BAR;
    if (!has("SYNC")) bad_sass(text);
  } else if (base == "MEMBAR")
    in.op = s_MEMBAR;
  else
    bad_sass("unknown instruction " + text);
}

}  // namespace ptxrun
