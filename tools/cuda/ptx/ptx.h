// PTX, decoded: instructions, registers and the variables of a kernel.
#pragma once

#include "ptx/basics.h"

namespace ptxrun {

enum Ty : u8 {
  PRED,
  B8,
  B16,
  B32,
  B64,
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  F16,
  BF16,
  F32,
  F64,
  NO_TYPE,
  F16X2,
  BF16X2
};
inline int bytes_of(Ty t) {
  switch (t) {
    case PRED:
      return 4;
    case B8:
    case U8:
    case S8:
      return 1;
    case B16:
    case U16:
    case S16:
    case F16:
    case BF16:
      return 2;
    case B32:
    case U32:
    case S32:
    case F32:
    case F16X2:
    case BF16X2:
      return 4;
    default:
      return 8;
  }
}
inline bool is_signed(Ty t) { return t >= S8 && t <= S64; }
inline bool is_float(Ty t) { return t >= F16 && t <= F64; }

enum Op : u8 {
  MOV,
  PACK,
  UNPACK,
  LD,
  ST,
  ATOM,
  ADD,
  SUB,
  MUL,
  MULHI,
  MULWIDE,
  MAD,
  MADWIDE,
  MADHI,
  FMA,
  DIV,
  REM,
  NEG,
  ABS,
  MIN,
  MAX,
  AND,
  OR,
  XOR,
  NOT,
  SHL,
  SHR,
  SETP,
  SETGT,
  SELP,
  CVT,
  RCP,
  SQRT,
  RSQRT,
  EX2,
  LG2,
  BRA,
  RET,
  BAR,
  BARWARP,
  MEMBAR,
  SHFL,
  PRMT,
  BFE,
  BFI,
  POPC,
  CLZ,
  BREV,
  LOP3,
  SHFF,
  COPYSIGN,
  TESTNAN,
  NOP
};
enum Space : u8 { GENERIC, GLOBAL, SHARED, PARAM };
enum Cmp : u8 { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
enum Rnd : u8 { RN, RZ, RM, RP, RNI, RZI, RMI, RPI };
enum Atom : u8 { A_ADD, A_MIN, A_MAX, A_EXCH, A_CAS, A_AND, A_OR };

struct Instr {
  Op op = NOP;
  Ty ty = NO_TYPE, from = NO_TYPE;
  Space space = GENERIC;
  u8 cmp = 0, rnd = RN, mode = 0;  // mode: shfl kind, atom kind, bool op of setp
  bool sat = false, ftz = false, approx = false, guard_not = false, negate_q = false;
  u8 n = 1;  // vector length
  int guard = -1;
  int d[4] = {-1, -1, -1, -1};
  int a[5] = {-1, -1, -1, -1, -1};
  i64 imm = 0;  // of an address
  int target = -1;
  int line = 0;
  std::string text;
};

struct RegInfo {
  u32 offset;  // in u32
  u8 wide;
};

struct SharedVariable {
  std::string name;
  u32 begin, size;
};

struct Kernel {
  std::string name;
  std::string text;  // parameters and body
  int first_line = 0;
  bool parsed = false;
  std::vector<Instr> code;
  std::vector<RegInfo> regs;
  u32 file_size = 0;  // in u32, for a warp
  struct Param {
    std::string name;
    u32 offset, size;
  };
  std::vector<Param> params;
  u32 param_bytes = 0;
  std::map<std::string, std::vector<std::string>>* module_shared = nullptr;  // declarations, by name
  std::vector<SharedVariable> shared;
  u32 shared_end = kSharedBase;
  struct Constant {
    int reg;
    u64 bits;
  };
  std::vector<Constant> constants;
  std::map<std::string, int> specials;
  int max_threads = 0;
  // results
  u64 launches = 0, blocks = 0;
  std::vector<u64> warp_count, lane_count;
  u64 mixed_barriers = 0, mixed_shuffles = 0;
};

// Adds launches, blocks, and instructions of warps and of threads.
inline void add_totals(const Kernel& k, int64_t* totals) {
  totals[0] += static_cast<int64_t>(k.launches);
  totals[1] += static_cast<int64_t>(k.blocks);
  for (const u64 count : k.warp_count) totals[2] += static_cast<int64_t>(count);
  for (const u64 count : k.lane_count) totals[3] += static_cast<int64_t>(count);
}

[[noreturn]] inline void bad_ptx(const Kernel& k, int line, const std::string& what) {
  std::string message = "ptxrun: " + k.name + ", PTX line " + std::to_string(line) + ": " + what;
  fprintf(stderr, "%s\n", message.c_str());
  errors.push_back(message);
  throw Stop{};
}

}  // namespace ptxrun
