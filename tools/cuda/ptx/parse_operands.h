// The operands of a kernel's text: registers, constants, variables and addresses.
#pragma once

#include "ptx/ptx.h"

namespace ptxrun {

struct OperandParser {
  Kernel& k;
  std::vector<std::unordered_map<std::string, int>> scopes;
  std::map<std::pair<u64, int>, int> constant_of;
  std::map<std::string, u64> symbols;
  std::unordered_map<std::string, int> labels;
  std::vector<std::pair<int, std::string>> fixups;

  explicit OperandParser(Kernel& kernel) : k(kernel) {}

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
        {"pred", PRED}, {"b8", B8},   {"b16", B16}, {"b32", B32},     {"b64", B64},      {"u8", U8},   {"u16", U16},
        {"u32", U32},   {"u64", U64}, {"s8", S8},   {"s16", S16},     {"s32", S32},      {"s64", S64}, {"f16", F16},
        {"bf16", BF16}, {"f32", F32}, {"f64", F64}, {"f16x2", F16X2}, {"bf16x2", BF16X2}};
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
  void check(const Instr& in, int reg, bool wide, int line) {
    if (reg >= 0 && k.regs[reg].wide != static_cast<u8>(wide)) bad_ptx(k, line, "register width of " + in.text);
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
};

}  // namespace ptxrun
