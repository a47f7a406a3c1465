// The instructions and modifiers that sassrun knows. Any other is an error: sassrun never guesses.
#pragma once

#include <map>
#include <set>
#include <string>

#include "ptx/parser.h"

namespace ptxrun {

// Without the U of instructions that a warp executes once.
inline const std::map<std::string, std::set<std::string>>& modifiers() {
  static const auto* all = [] {
    static const std::map<std::string, std::string> text = {
        {"ATOMG", "ADD E GPU STRONG"},
        {"ATOMS", "32 64 ADD CAS CAST INC POPC SPIN"},
        {"BAR", "DEFER_BLOCKING SYNC"},
        {"BRA", "DIV U"},
        {"BREAK", "RELIABLE"},
        {"BRX", ""},
        {"BRXU", ""},
        {"BSSY", "RECONVERGENT RELIABLE"},
        {"BSYNC", "RECONVERGENT RELIABLE"},
        {"CALL", "NOINC REL"},
        {"CCTL", "IVALL"},
        {"CGAERRBAR", ""},
        {"CS2R", "32"},
        {"DADD", "RM RP RZ"},
        {"DFMA", "RM RP RZ"},
        {"DMUL", "RM RP RZ"},
        {"DSETP", "AND EQ EQU GE GEU GT GTU LE LEU LT LTU MAX MIN NAN NE NEU NUM OR XOR"},
        {"ENDCOLLECTIVE", ""},
        {"ERRBAR", ""},
        {"EXIT", ""},
        {"F2F", "F32 F64"},
        {"F2FP", "BF16 F16 F32 PACK_AB"},
        {"F2I", "F64 FTZ NTZ S64 TRUNC U32 U64"},
        {"FADD", "FTZ RM RP RZ SAT"},
        {"FCHK", ""},
        {"FFMA", "FTZ RM RP RZ SAT"},
        {"FLO", "SH U32"},
        {"FMNMX", "NAN"},
        {"FMNMX3", "NAN"},
        {"FMUL", "FTZ RM RP RZ SAT"},
        {"FRND", "F64 FLOOR"},
        {"FSEL", ""},
        {"FSET", "AND BF EQ EQU GE GEU GT GTU LE LEU LT LTU NAN NE NEU NUM OR XOR"},
        {"FSETP", "AND EQ EQU FTZ GE GEU GT GTU LE LEU LT LTU NAN NE NEU NUM OR XOR"},
        {"HADD2", "F32"},
        {"HFMA2", "MMA"},
        {"HMNMX2", "BF16_V2"},
        {"HSET2", "AND BF16_V2 GT"},
        {"I2F", "F64 RM RP RZ S64 U16 U32 U64"},
        {"I2FP", "F32 RM RP RZ S32 U32"},
        {"IABS", ""},
        {"IADD3", "X"},
        {"IMAD", "HI IADD MOV SHL U32 WIDE X"},
        {"ISETP", "AND EQ EX GE GT LE LT NE OR U32 XOR"},
        {"LD", "128 64 E U16 U8"},
        {"LDC", "128 64 U8"},
        {"LDG", "128 64 CONSTANT E GPU STRONG U16 U8"},
        {"LDL", "128 64 LU"},
        {"LDS", "128 64 S16 U16 U8"},
        {"LEA", "HI SX32 X"},
        {"LOP3", "LUT"},
        {"MEMBAR", "GPU SC"},
        {"MOV", "SPILL"},  // and R2UR.FILL: a uniform register is saved in a register of the thread, and restored
        {"MUFU", "EX2 LG2 RCP RCP64H RSQ RSQ64H SQRT"},
        {"NOP", ""},
        {"P2R", ""},
        {"PLOP3", "LUT"},
        {"POPC", ""},
        {"PRMT", ""},
        {"R2P", ""},
        {"R2UR", "FILL"},
        {"REDG", "E GPU MIN S64 STRONG"},
        {"RET", "NODEC REL"},
        {"S2R", ""},
        {"S2UR", ""},
        {"SEL", ""},
        {"SHF", "HI L R S32 S64 U32 U64"},
        {"SHFL", "BFLY DOWN IDX UP"},
        {"STG", "128 64 E GPU STRONG U16 U8"},
        {"STL", "128 64"},
        {"STS", "128 64 U16 U8"},
        {"VHMNMX", "BF16_V2"},
        {"VIADD", ""},
        {"VIADDMNMX", "U32"},
        {"VIMNMX", "U32"},
        {"VIMNMX3", "U32"},
        {"VOTEU", "ALL ANY"},
        {"WARPSYNC", "ALL COLLECTIVE"},
        {"YIELD", ""},
    };
    auto* found = new std::map<std::string, std::set<std::string>>;
    for (const auto& [name, mods] : text) {
      std::set<std::string>& of = (*found)[name];
      for (const std::string& mod : Parser::split(mods, ' ')) of.insert(mod);
    }
    return found;
  }();
  return *all;
}

}  // namespace ptxrun
