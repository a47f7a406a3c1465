// One statement of a kernel's text as an instruction.
#pragma once

#include "ptx/parse_operands.h"

namespace ptxrun {

struct StatementParser : OperandParser {
  using OperandParser::OperandParser;

  void statement(const std::string& raw, int line) {
    std::string s = raw;
    Instr in;
    in.line = line;
    in.text = s;
    size_t at = 0;
    const auto skip = [&] {
      while (at < s.size() && isspace(static_cast<unsigned char>(s[at]))) ++at;
    };
    skip();
    if (s[at] == '@') {
      ++at;
      if (s[at] == '!') {
        in.guard_not = true;
        ++at;
      }
      size_t end = at;
      while (end < s.size() && !isspace(static_cast<unsigned char>(s[end]))) ++end;
      in.guard = operand(s.substr(at, end - at), false, line);
      at = end;
      skip();
    }
    size_t end = at;
    while (end < s.size() && !isspace(static_cast<unsigned char>(s[end]))) ++end;
    const std::string mnemonic = s.substr(at, end - at);
    std::vector<std::string> m = split(mnemonic, '.');
    std::vector<std::string> ops = split(s.substr(end), ',');
    const std::string& name = m[0];
    const auto has = [&](const char* x) { return std::find(m.begin() + 1, m.end(), x) != m.end(); };
    std::vector<Ty> types;
    for (size_t i = 1; i < m.size(); ++i) {
      const Ty t = type_of(m[i]);
      if (t != NO_TYPE) types.push_back(t);
    }
    in.ty = types.empty() ? NO_TYPE : types[0];
    in.from = types.size() > 1 ? types[1] : in.ty;
    in.ftz = has("ftz");
    in.sat = has("sat");
    in.approx = has("approx");
    in.rnd = has("rz")    ? RZ
             : has("rm")  ? RM
             : has("rp")  ? RP
             : has("rni") ? RNI
             : has("rzi") ? RZI
             : has("rmi") ? RMI
             : has("rpi") ? RPI
                          : RN;
    in.n = has("v4") ? 4 : has("v2") ? 2 : has("v8") ? 8 : 1;
    if (in.n == 8) bad_ptx(k, line, "v8");
    in.space = has("global") ? GLOBAL : has("shared") ? SHARED : has("param") ? PARAM : GENERIC;
    if (has("local") || has("const")) bad_ptx(k, line, "state space of " + s);
    const bool wide = in.ty != NO_TYPE && bytes_of(in.ty) == 8;
    const auto simple = [&](Op op, size_t sources) {
      in.op = op;
      if (ops.size() != sources + 1) bad_ptx(k, line, "operands of " + s);
      in.d[0] = operand(ops[0], wide, line);
      for (size_t i = 0; i < sources; ++i) in.a[i] = operand(ops[i + 1], wide, line);
      check(in, in.d[0], wide, line);
      for (size_t i = 0; i < sources; ++i) check(in, in.a[i], wide, line);
    };
    if (name == "mov") {
      if (ops[0][0] == '{') {
        in.op = UNPACK;
        auto parts = list(ops[0]);
        in.n = static_cast<u8>(parts.size());
        for (size_t i = 0; i < parts.size(); ++i) in.d[i] = operand(parts[i], false, line);
        in.a[0] = operand(ops[1], wide, line);
      } else if (ops[1][0] == '{') {
        in.op = PACK;
        auto parts = list(ops[1]);
        in.n = static_cast<u8>(parts.size());
        for (size_t i = 0; i < parts.size(); ++i) in.a[i] = operand(parts[i], false, line);
        in.d[0] = operand(ops[0], wide, line);
      } else {
        in.op = MOV;
        in.d[0] = operand(ops[0], wide, line);
        in.a[0] = operand(ops[1], k.regs[in.d[0]].wide, line);
      }
    } else if (name == "ld" || name == "ldu") {
      in.op = LD;
      auto parts = list(ops[0]);
      if (parts.size() != in.n) bad_ptx(k, line, "vector of " + s);
      for (size_t i = 0; i < parts.size(); ++i) in.d[i] = operand(parts[i], wide, line);
      address(in, ops[1], line);
    } else if (name == "st") {
      in.op = ST;
      auto parts = list(ops[1]);
      if (parts.size() != in.n) bad_ptx(k, line, "vector of " + s);
      for (size_t i = 0; i < parts.size(); ++i) in.a[i + 1] = operand(parts[i], wide, line);
      address(in, ops[0], line);
    } else if (name == "atom" || name == "red") {
      in.op = ATOM;
      in.mode = has("add")    ? A_ADD
                : has("min")  ? A_MIN
                : has("max")  ? A_MAX
                : has("exch") ? A_EXCH
                : has("cas")  ? A_CAS
                : has("and")  ? A_AND
                : has("or")   ? A_OR
                              : 255;
      if (in.mode == 255) bad_ptx(k, line, s);
      const size_t first = name == "atom" ? 1 : 0;
      in.d[0] = first == 1 ? operand(ops[0], wide, line) : -1;
      address(in, ops[first], line);
      in.a[1] = operand(ops[first + 1], wide, line);
      if (in.mode == A_CAS) in.a[2] = operand(ops[first + 2], wide, line);
    } else if (name == "cvta") {
      in.op = MOV;  // only global addresses
      if (in.space == SHARED || in.space == PARAM) bad_ptx(k, line, "generic address of " + s);
      in.d[0] = operand(ops[0], true, line);
      in.a[0] = operand(ops[1], true, line);
    } else if (name == "add")
      simple(ADD, 2);
    else if (name == "sub")
      simple(SUB, 2);
    else if (name == "mul") {
      if (has("wide")) {
        in.op = MULWIDE;
        const bool from_wide = bytes_of(in.ty) == 8;
        in.d[0] = operand(ops[0], bytes_of(in.ty) >= 4, line);
        in.a[0] = operand(ops[1], from_wide, line);
        in.a[1] = operand(ops[2], from_wide, line);
      } else
        simple(has("hi") ? MULHI : MUL, 2);
    } else if (name == "mad") {
      if (has("wide")) {
        in.op = MADWIDE;
        in.d[0] = operand(ops[0], bytes_of(in.ty) >= 4, line);
        in.a[0] = operand(ops[1], false, line);
        in.a[1] = operand(ops[2], false, line);
        in.a[2] = operand(ops[3], bytes_of(in.ty) >= 4, line);
      } else
        simple(is_float(in.ty) ? FMA : has("hi") ? MADHI : MAD, 3);
    } else if (name == "fma")
      simple(FMA, 3);
    else if (name == "div")
      simple(DIV, 2);
    else if (name == "rem")
      simple(REM, 2);
    else if (name == "neg")
      simple(NEG, 1);
    else if (name == "abs")
      simple(ABS, 1);
    else if (name == "min")
      simple(MIN, 2);
    else if (name == "max")
      simple(MAX, 2);
    else if (name == "and")
      simple(AND, 2);
    else if (name == "or")
      simple(OR, 2);
    else if (name == "xor")
      simple(XOR, 2);
    else if (name == "not")
      simple(NOT, 1);
    else if (name == "rcp")
      simple(RCP, 1);
    else if (name == "sqrt")
      simple(SQRT, 1);
    else if (name == "rsqrt")
      simple(RSQRT, 1);
    else if (name == "ex2")
      simple(EX2, 1);
    else if (name == "lg2")
      simple(LG2, 1);
    else if (name == "copysign")
      simple(COPYSIGN, 2);
    else if (name == "brev")
      simple(BREV, 1);
    else if (name == "prmt")
      simple(PRMT, 3);
    else if (name == "lop3") {
      in.op = LOP3;
      in.d[0] = operand(ops[0], false, line);
      for (int i = 0; i < 3; ++i) in.a[i] = operand(ops[i + 1], false, line);
      in.imm = strtol(ops[4].c_str(), nullptr, 0);
    } else if (name == "shf") {
      in.op = SHFF;
      in.mode = static_cast<u8>((has("l") ? 1 : 0) | (has("wrap") ? 2 : 0));
      in.d[0] = operand(ops[0], false, line);
      for (int i = 0; i < 3; ++i) in.a[i] = operand(ops[i + 1], false, line);
    } else if (name == "popc" || name == "clz") {
      in.op = name == "popc" ? POPC : CLZ;
      in.d[0] = operand(ops[0], false, line);
      in.a[0] = operand(ops[1], wide, line);
    } else if (name == "bfe") {
      in.op = BFE;
      in.d[0] = operand(ops[0], wide, line);
      in.a[0] = operand(ops[1], wide, line);
      in.a[1] = operand(ops[2], false, line);
      in.a[2] = operand(ops[3], false, line);
    } else if (name == "bfi") {
      in.op = BFI;
      in.d[0] = operand(ops[0], wide, line);
      for (int i = 0; i < 2; ++i) in.a[i] = operand(ops[i + 1], wide, line);
      for (int i = 2; i < 4; ++i) in.a[i] = operand(ops[i + 1], false, line);
    } else if (name == "shl" || name == "shr") {
      in.op = name == "shl" ? SHL : SHR;
      in.d[0] = operand(ops[0], wide, line);
      in.a[0] = operand(ops[1], wide, line);
      in.a[1] = operand(ops[2], false, line);
    } else if (name == "testp") {
      bad_ptx(k, line, s);
    } else if (name == "set") {
      if (in.ty != U32 || (in.from != F16X2 && in.from != BF16X2) || !has("gt") || m.size() != 4) bad_ptx(k, line, s);
      simple(SETGT, 2);
      in.ty = in.from;
    } else if (name == "setp") {
      in.op = SETP;
      static const std::map<std::string, Cmp> cmps = {
          {"eq", EQ},   {"ne", NE},    {"lt", LT},   {"le", LE},   {"gt", GT},   {"ge", GE},
          {"equ", EQU}, {"neu", NEU},  {"ltu", LTU}, {"leu", LEU}, {"gtu", GTU}, {"geu", GEU},
          {"num", NUM}, {"nan", NAN_}, {"lo", LT},   {"ls", LE},   {"hi", GT},   {"hs", GE}};
      auto it = cmps.find(m[1]);
      if (it == cmps.end()) bad_ptx(k, line, s);
      in.cmp = it->second;
      in.mode = has("and") ? 1 : has("or") ? 2 : has("xor") ? 3 : 0;
      auto outs = split(ops[0], '|');
      in.d[0] = operand(outs[0], false, line);
      if (outs.size() > 1) in.d[1] = operand(outs[1], false, line);
      in.a[0] = operand(ops[1], wide, line);
      in.a[1] = operand(ops[2], wide, line);
      check(in, in.a[0], wide, line);
      check(in, in.a[1], wide, line);
      if (in.mode != 0) {
        std::string q = ops[3];
        if (q[0] == '!') {
          in.negate_q = true;
          q = q.substr(1);
        }
        in.a[2] = operand(q, false, line);
      }
    } else if (name == "selp") {
      in.op = SELP;
      in.d[0] = operand(ops[0], wide, line);
      in.a[0] = operand(ops[1], wide, line);
      in.a[1] = operand(ops[2], wide, line);
      in.a[2] = operand(ops[3], false, line);
      check(in, in.d[0], wide, line);
      check(in, in.a[0], wide, line);
      check(in, in.a[1], wide, line);
    } else if (name == "cvt") {
      in.op = CVT;
      if (types.size() != 2 || has("relu") || has("satfinite")) bad_ptx(k, line, s);
      in.d[0] = operand(ops[0], wide, line);
      in.a[0] = operand(ops[1], bytes_of(in.from) == 8, line);
    } else if (name == "bra") {
      in.op = BRA;
      fixups.push_back({static_cast<int>(k.code.size()), ops[0]});
    } else if (name == "ret" || name == "exit") {
      in.op = RET;
    } else if (name == "bar" || name == "barrier") {
      if (has("warp")) {
        in.op = BARWARP;
        in.a[0] = operand(ops[0], false, line);
      } else {
        in.op = BAR;
        if (!has("sync") || ops.size() != 1 || ops[0] != "0") bad_ptx(k, line, s);
      }
    } else if (name == "membar" || name == "fence") {
      in.op = MEMBAR;
    } else if (name == "shfl") {
      in.op = SHFL;
      in.mode = has("up") ? 0 : has("down") ? 1 : has("bfly") ? 2 : 3;
      if (!has("sync")) bad_ptx(k, line, s);
      auto outs = split(ops[0], '|');
      in.d[0] = operand(outs[0], false, line);
      if (outs.size() > 1) in.d[1] = operand(outs[1], false, line);
      for (int i = 0; i < 4; ++i) in.a[i] = operand(ops[i + 1], false, line);
    } else {
      bad_ptx(k, line, "unknown instruction " + s);
    }
    k.code.push_back(std::move(in));
  }
};

}  // namespace ptxrun
