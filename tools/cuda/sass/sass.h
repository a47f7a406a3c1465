// Machine code of sm_90 and sm_100 as cuobjdump prints it (tools/cuda/sass/extract.py), decoded. NVIDIA documents only
// the mnemonics of SASS; their meaning is inferred, and tested by the results.
#pragma once

#include "ptx/parser.h"
#include "sass/known.h"

namespace ptxrun {

enum SOp : u8 {
  s_NOP,
  s_YIELD,
  s_MOV,
  s_IADD3,
  s_IADD3X,
  s_IMAD,
  s_IMADX,
  s_IMADHI,
  s_IMADWIDE,
  s_IMADWIDEX,
  s_LEA,
  s_LEAHI,
  s_LEAHIX,
  s_LOP3,
  s_PLOP3,
  s_SHF,
  s_PRMT,
  s_SEL,
  s_IABS,
  s_FMNMX,
  s_FMNMX3,
  s_HMNMX2,
  s_VHMNMX,
  s_HSET2,
  s_VIMNMX,
  s_VIMNMX3,
  s_VIADDMNMX,
  s_VIADD,
  s_ISETP,
  s_FSETP,
  s_FSET,
  s_DSETP,
  s_DSETPMAX,
  s_DSETPMIN,
  s_FCHK,
  s_MUFU,
  s_F2I,
  s_I2F,
  s_F2F,
  s_FRND,
  s_F2FP,
  s_HADD2,
  s_HFMA2,
  s_I2FP,
  s_FADD,
  s_FMUL,
  s_FFMA,
  s_DADD,
  s_DMUL,
  s_DFMA,
  s_LDC,
  s_LDS,
  s_STS,
  s_LDG,
  s_STG,
  s_LDL,
  s_STL,
  s_ATOMS_ADD,
  s_ATOMS_INC,
  s_ATOMS_CAST,
  s_ATOMG,
  s_REDG,
  s_SHFL,
  s_VOTE,
  s_S2R,
  s_CS2R,
  s_R2UR,
  s_P2R,
  s_R2P,
  s_BRA,
  s_BRADIV,
  s_BRX,
  s_BRXU,
  s_CALL,
  s_RET,
  s_EXIT,
  s_BSSY,
  s_BSYNC,
  s_BREAK,
  s_WARPSYNC,
  s_BAR,
  s_MEMBAR,
  s_POPC,
  s_FLO
};
constexpr u32 kParams90 = 0x210, kParams100 = 0x380;  // offset of the parameters in c[0x0]
constexpr int kZero = 255;                            // RZ and URZ; neither register file has as many registers
enum OKind : u8 { oNONE, oR, oU, oP, oUP, oIMM, oCONST, oPR };
struct Operand {
  OKind kind = oNONE;
  u8 neg = 0, abs = 0, inv = 0, half = 0;
  int index = 0;  // register
  int via = -1;   // constant: index register (UR: 1000 + n)
  int bank = 0;
  u32 imm = 0;
};
struct SInstr {
  SOp op = s_NOP;
  Operand guard;
  std::vector<Operand> o;
  std::string mnemonic;
  std::vector<std::string> mod;
  u8 cmp = 0, boolean = 0, width = 4, rnd = RN;
  bool ex = false, is_unsigned = false, sat = false, ftz = false, hi = false, left = false, s64 = false, u64_ = false,
       uniform = false, is_signed = false;
  bool lock = false;  // LDS of a compare-and-swap loop
  int target = -1;
  int ra = -1, ua = -1;  // address registers
  i64 off = 0;
  int mufu = 0;
  u32 stall = 0, write_bar = 7, read_bar = 7, wait = 0;
  u8 pipe = 0, busy = 1;
  u16 latency = 0;
  u64 low = 0;
};
struct SassKernel {
  Kernel carrier;  // names, texts and counts
  std::vector<SInstr> code;
  std::vector<u8> table;
  u32 shared = 0;
  u32 params_at = 0;  // in c[0x0]
};
inline std::unordered_map<std::string, std::unique_ptr<SassKernel>>& sass_kernels() {
  static auto* all = new std::unordered_map<std::string, std::unique_ptr<SassKernel>>;
  return *all;
}

[[noreturn]] inline void bad_sass(const std::string& text) {
  fprintf(stderr, "sassrun: %s\n", text.c_str());
  errors.push_back("sassrun: " + text);
  throw Stop{};
}

inline Operand parse_operand(std::string s, u64 low) {
  Operand o;
  size_t at;
  while ((at = s.find(".reuse")) != std::string::npos) s.erase(at, 6);
  while (!s.empty() && (s[0] == '-' || s[0] == '|' || s[0] == '~' || s[0] == '!')) {
    if (s[0] == '-') {
      // a negative literal is not a negated operand
      if (isdigit(static_cast<unsigned char>(s[1])) || s.compare(0, 4, "-QNA") == 0 || s.compare(0, 4, "-INF") == 0)
        break;
      o.neg = 1;
    }
    if (s[0] == '|') o.abs = 1;
    if (s[0] == '~') o.inv = 1;
    if (s[0] == '!') o.inv = 1;
    s = s.substr(1);
  }
  if (!s.empty() && s.back() == '|') s.pop_back();
  if ((at = s.find("|.")) != std::string::npos) s.erase(at, 1);
  const size_t dot = s.find(".H");
  if (dot != std::string::npos && s[0] == 'R') {
    o.half = s.compare(dot, 3, ".H0") == 0 ? 1 : 2;
    s = s.substr(0, dot);
  }
  const auto number = [](const std::string& t, size_t skip) { return atoi(t.c_str() + skip); };
  if (s == "RZ" || s == "SRZ") {
    o.kind = oR;
    o.index = kZero;
    return o;
  }
  if (s == "URZ") {
    o.kind = oU;
    o.index = kZero;
    return o;
  }
  if (s == "PT") {
    o.kind = oP;
    o.index = 7;
    return o;
  }
  if (s == "UPT") {
    o.kind = oUP;
    o.index = 7;
    return o;
  }
  if (s == "PR" || s == "UPR") {
    o.kind = oPR;
    return o;
  }
  if (s[0] == 'R' && isdigit(static_cast<unsigned char>(s[1]))) {
    o.kind = oR;
    o.index = number(s, 1);
    return o;
  }
  if (s.compare(0, 2, "UR") == 0) {
    o.kind = oU;
    o.index = number(s, 2);
    return o;
  }
  if (s.compare(0, 2, "UP") == 0 && isdigit(static_cast<unsigned char>(s[2]))) {
    o.kind = oUP;
    o.index = number(s, 2);
    return o;
  }
  if (s[0] == 'P' && isdigit(static_cast<unsigned char>(s[1]))) {
    o.kind = oP;
    o.index = number(s, 1);
    return o;
  }
  if (s.compare(0, 2, "c[") == 0) {
    o.kind = oCONST;
    o.bank = static_cast<int>(strtol(s.c_str() + 2, nullptr, 0));
    std::string inside = s.substr(s.find("][") + 2);
    inside.pop_back();
    size_t plus = inside.find('+');
    std::string first = inside.substr(0, plus);
    if (first[0] == 'R') {
      o.via = first == "RZ" ? -1 : atoi(first.c_str() + 1);
    } else if (first[0] == 'U') {
      o.via = 1000 + atoi(first.c_str() + 2);
    } else
      o.imm = static_cast<u32>(strtoul(first.c_str(), nullptr, 0));
    if (plus != std::string::npos) o.imm = static_cast<u32>(strtoul(inside.c_str() + plus + 1, nullptr, 0));
    return o;
  }
  o.kind = oIMM;
  if (s.find("0x") != std::string::npos) {
    o.imm = static_cast<u32>(strtoll(s.c_str(), nullptr, 0));
    if (s[0] == '-') o.imm = static_cast<u32>(0 - strtoull(s.c_str() + 1, nullptr, 0));
  } else {
    o.imm = static_cast<u32>(low >> 32);  // a floating-point literal, as encoded
  }
  return o;
}

}  // namespace ptxrun
