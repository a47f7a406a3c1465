// Decodes the text of a kernel into instructions.
#pragma once

#include "ptx/ptx.h"

namespace ptxrun {

struct Parser {
  Kernel& k;
  std::vector<std::unordered_map<std::string, int>> scopes;
  std::map<std::pair<u64, int>, int> constant_of;
  std::map<std::string, u64> symbols;
  std::unordered_map<std::string, int> labels;
  std::vector<std::pair<int, std::string>> fixups;

  int new_reg(bool wide) {
    if (wide && k.file_size % 64 != 0) k.file_size = (k.file_size + 63) / 64 * 64;
    k.regs.push_back({k.file_size, static_cast<u8>(wide)});
    k.file_size += wide ? 64 : 32;
    return static_cast<int>(k.regs.size()) - 1;
  }
  int constant(u64 bits, bool wide) {
    if (!wide) bits &= 0xffffffffull;
    auto [it, is_new] = constant_of.insert({{bits, wide}, 0});
    if (is_new) {
      it->second = new_reg(wide);
      k.constants.push_back({it->second, bits});
    }
    return it->second;
  }
  static Ty type_of(const std::string& s) {
    static const std::map<std::string, Ty> table = {
        {"pred", PRED}, {"b8", B8},   {"b16", B16},   {"b32", B32}, {"b64", B64}, {"u8", U8},
        {"u16", U16},   {"u32", U32}, {"u64", U64},   {"s8", S8},   {"s16", S16}, {"s32", S32},
        {"s64", S64},   {"f16", F16}, {"bf16", BF16}, {"f32", F32}, {"f64", F64}};
    auto it = table.find(s);
    return it == table.end() ? NO_TYPE : it->second;
  }

  void declare(const std::string& name, bool wide) { scopes.back()[name] = new_reg(wide); }
  int lookup(const std::string& name) const {
    for (size_t i = scopes.size(); i-- > 0;) {
      auto it = scopes[i].find(name);
      if (it != scopes[i].end()) return it->second;
    }
    return -1;
  }

  static u64 parse_number(const std::string& s, bool& ok) {
    ok = true;
    const bool negative = s[0] == '-';
    const std::string t = negative ? s.substr(1) : s;
    u64 value = 0;
    if (t.size() > 2 && t[0] == '0' && (t[1] == 'f' || t[1] == 'F') && t.size() == 10) {
      value = strtoull(t.c_str() + 2, nullptr, 16);
      if (negative) value ^= 0x80000000ull;
      return value;
    }
    if (t.size() > 2 && t[0] == '0' && (t[1] == 'd' || t[1] == 'D') && t.size() == 18) {
      value = strtoull(t.c_str() + 2, nullptr, 16);
      if (negative) value ^= 0x8000000000000000ull;
      return value;
    }
    char* end = nullptr;
    value = strtoull(t.c_str(), &end, 0);
    if (end == t.c_str() || (*end != 0 && *end != 'U')) ok = false;
    return negative ? 0 - value : value;
  }

  int operand(const std::string& s, bool wide, int line) {
    if (s == "_") return -1;
    if (const int reg = lookup(s); reg >= 0) return reg;
    if (s[0] == '%') {
      auto it = k.specials.find(s);
      if (it != k.specials.end()) return it->second;
      static const std::set<std::string> known = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                                  "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                                  "%nctaid.y", "%nctaid.z", "%laneid"};
      if (known.count(s)) return k.specials[s] = new_reg(false);
      bad_ptx(k, line, "unknown register " + s);
    }
    if (s == "WARP_SZ") return constant(32, wide);
    bool ok = false;
    const u64 value = parse_number(s, ok);
    if (ok && (isdigit(s[0]) || s[0] == '-')) return constant(value, wide);
    auto it = symbols.find(s);
    if (it != symbols.end()) return constant(it->second, wide);
    auto outside = k.module_shared->find(s);
    if (outside != k.module_shared->end()) {
      shared_variable(outside->second, line);
      return constant(symbols[s], wide);
    }
    bad_ptx(k, line, "unknown operand " + s);
  }

  void address(Instr& in, std::string s, int line) {
    s = s.substr(1, s.size() - 2);
    size_t plus = s.find('+');
    std::string base = s.substr(0, plus);
    if (plus != std::string::npos) {
      bool ok = false;
      in.imm = static_cast<i64>(parse_number(s.substr(plus + 1), ok));
      if (!ok) bad_ptx(k, line, "address " + s);
    }
    in.a[0] = operand(base, true, line);
  }

  static std::vector<std::string> split(const std::string& s, char c) {
    std::vector<std::string> out;
    std::string part;
    int depth = 0;
    for (char x : s) {
      if (x == '{' || x == '[') ++depth;
      if (x == '}' || x == ']') --depth;
      if (x == c && depth == 0) {
        out.push_back(part);
        part.clear();
      } else if (!isspace(static_cast<unsigned char>(x))) {
        part += x;
      }
    }
    if (!part.empty()) out.push_back(part);
    return out;
  }
  static std::vector<std::string> list(const std::string& s) {  // {a,b} or a
    if (s[0] != '{') return {s};
    return split(s.substr(1, s.size() - 2), ',');
  }

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
  void check(const Instr& in, int reg, bool wide, int line) {
    if (reg >= 0 && k.regs[reg].wide != static_cast<u8>(wide)) bad_ptx(k, line, "register width of " + in.text);
  }

  void directive(const std::string& s, int line) {
    std::vector<std::string> words;
    std::string word;
    for (char c : s) {
      if (isspace(static_cast<unsigned char>(c))) {
        if (!word.empty()) words.push_back(word);
        word.clear();
      } else {
        word += c;
      }
    }
    if (!word.empty()) words.push_back(word);
    if (words[0] == ".reg") {
      const Ty t = type_of(words[1].substr(1));
      if (t == NO_TYPE) bad_ptx(k, line, s);
      const bool wide = t != PRED && bytes_of(t) == 8;
      std::string names;
      for (size_t i = 2; i < words.size(); ++i) names += words[i];
      for (const std::string& name : split(names, ',')) {
        const size_t open = name.find('<');
        if (open == std::string::npos) {
          declare(name, wide);
        } else {
          const int count = atoi(name.c_str() + open + 1);
          for (int i = 0; i < count; ++i) declare(name.substr(0, open) + std::to_string(i), wide);
        }
      }
    } else if (words[0] == ".shared") {
      shared_variable(words, line);
    } else if (words[0] == ".pragma" || words[0] == ".loc" || words[0] == ".file") {
    } else {
      bad_ptx(k, line, "directive " + s);
    }
  }
  void shared_variable(const std::vector<std::string>& words, int line) {
    u32 align = 1;
    Ty t = NO_TYPE;
    std::string last = words.back();
    for (size_t i = 1; i + 1 < words.size(); ++i) {
      if (words[i] == ".align") align = static_cast<u32>(atoi(words[i + 1].c_str()));
      if (words[i][0] == '.' && type_of(words[i].substr(1)) != NO_TYPE) t = type_of(words[i].substr(1));
    }
    if (t == NO_TYPE) bad_ptx(k, line, "shared variable " + last);
    u32 count = 1;
    const size_t open = last.find('[');
    if (open != std::string::npos) {
      count = static_cast<u32>(atoi(last.c_str() + open + 1));
      last = last.substr(0, open);
    }
    align = std::max(align, static_cast<u32>(bytes_of(t)));
    const u32 begin = (k.shared_end + kRedZone + align - 1) / align * align;
    const u32 size = count * static_cast<u32>(bytes_of(t));
    k.shared.push_back({last, begin, size});
    symbols[last] = begin;
    k.shared_end = begin + size;
  }

  void run() {
    scopes.emplace_back();
    // parameters
    const std::string& t = k.text;
    size_t open = t.find('(');
    size_t brace = t.find('{');
    size_t at = 0;
    if (open != std::string::npos && open < brace) {
      size_t close = t.find(')', open);
      // The list has no nested parentheses.
      for (const auto& p : split_raw(t.substr(open + 1, close - open - 1))) {
        u32 align = 0;
        Ty ty = NO_TYPE;
        std::string name;
        std::vector<std::string> words;
        std::string word;
        for (char c : p + " ") {
          if (isspace(static_cast<unsigned char>(c))) {
            if (!word.empty()) words.push_back(word);
            word.clear();
          } else {
            word += c;
          }
        }
        for (size_t i = 0; i < words.size(); ++i) {
          if (words[i] == ".align") align = static_cast<u32>(atoi(words[i + 1].c_str()));
          if (words[i][0] == '.' && type_of(words[i].substr(1)) != NO_TYPE) ty = type_of(words[i].substr(1));
        }
        name = words.back();
        u32 count = 1;
        const size_t bracket = name.find('[');
        if (bracket != std::string::npos) {
          count = static_cast<u32>(atoi(name.c_str() + bracket + 1));
          name = name.substr(0, bracket);
        }
        const u32 unit = static_cast<u32>(bytes_of(ty));
        align = std::max(align, unit);
        const u32 offset = (k.param_bytes + align - 1) / align * align;
        k.params.push_back({name, offset, unit * count});
        symbols[name] = kParamBase + offset;
        k.param_bytes = offset + unit * count;
      }
    }
    const size_t maxntid = t.find(".maxntid");
    if (maxntid != std::string::npos && maxntid < brace) k.max_threads = atoi(t.c_str() + maxntid + 8);
    // body
    at = brace;
    int line = k.first_line + static_cast<int>(std::count(t.begin(), t.begin() + static_cast<long>(at), '\n'));
    int depth = 0;
    std::string s;
    int start_line = line;
    int operand_depth = 0;
    for (; at < t.size(); ++at) {
      const char c = t[at];
      if (c == '\n') ++line;
      if (c == '/' && t[at + 1] == '/') {
        while (at < t.size() && t[at] != '\n') ++at;
        ++line;
        continue;
      }
      const bool blank = s.find_first_not_of(" \t\r\n") == std::string::npos;
      if (blank && c == '{') {
        ++depth;
        scopes.emplace_back();
        s.clear();
        continue;
      }
      if (blank && c == '}') {
        scopes.pop_back();
        s.clear();
        if (--depth == 0) break;
        continue;
      }
      if (blank && isspace(static_cast<unsigned char>(c))) continue;
      if (blank) {
        s.clear();
        start_line = line;
      }
      if (c == '{') ++operand_depth;
      if (c == '}') --operand_depth;
      if (c == ':' && operand_depth == 0 && s[0] == '$') {
        labels[s] = static_cast<int>(k.code.size());
        s.clear();
        continue;
      }
      if (c == ';') {
        if (s[0] == '.')
          directive(s, start_line);
        else
          statement(s, start_line);
        s.clear();
        continue;
      }
      if (c == '\n' && s.compare(0, 4, ".loc") == 0) {
        s.clear();
        continue;
      }
      s += c;
    }
    for (auto& [index, label] : fixups) {
      auto it = labels.find(label);
      if (it == labels.end()) bad_ptx(k, k.code[static_cast<size_t>(index)].line, "label " + label);
      k.code[static_cast<size_t>(index)].target = it->second;
    }
    Instr end;
    end.op = RET;
    end.text = "(end)";
    k.code.push_back(end);
    k.warp_count.assign(k.code.size(), 0);
    k.lane_count.assign(k.code.size(), 0);
    k.file_size = (k.file_size + 63) / 64 * 64;
    k.parsed = true;
  }
  static std::vector<std::string> split_raw(const std::string& s) {
    std::vector<std::string> out;
    std::string part;
    for (char c : s) {
      if (c == ',') {
        out.push_back(part);
        part.clear();
      } else {
        part += c;
      }
    }
    if (part.find_first_not_of(" \t\r\n") != std::string::npos) out.push_back(part);
    return out;
  }
};

}  // namespace ptxrun
