// Reads the text of extract.py.
#pragma once

#include "sass/decode.h"

namespace ptxrun {

// Pipes of a quarter of a multiprocessor: 0 none, 1 FMA (32 lanes a cycle), 2 FMA for integers (16; it also takes an
// issue slot of FMA), 3 ALU (16), 4 special functions and conversions (4), 5 FP64 (16), 6 load/store (8: 32 per
// multiprocessor).
inline void set_timing(SInstr& in) {
  switch (in.op) {
    case s_FADD:
    case s_FMUL:
    case s_FFMA:
    case s_HADD2:
    case s_HFMA2:
      in.pipe = 1;
      in.busy = 1;
      in.latency = 4;
      break;
    case s_IMAD:
    case s_IMADX:
    case s_IMADHI:
    case s_IMADWIDE:
    case s_IMADWIDEX:
      in.pipe = 2;
      in.busy = 2;
      in.latency = 5;
      break;
    case s_DADD:
    case s_DMUL:
    case s_DFMA:
    case s_DSETP:
    case s_DSETPMAX:
    case s_DSETPMIN:
      in.pipe = 5;
      in.busy = 2;
      in.latency = 16;
      break;
    case s_MUFU:
    case s_F2I:
    case s_I2F:
    case s_F2F:
    case s_FRND:
    case s_FCHK:
    case s_POPC:
      in.pipe = 4;
      in.busy = 8;
      in.latency = 20;
      break;
    case s_LDG:
    case s_STG:
    case s_LDL:
    case s_STL:
    case s_ATOMG:
    case s_REDG:
      in.pipe = 6;
      in.busy = static_cast<u8>(in.width == 16 ? 4 : in.width == 8 ? 2 : 1);
      in.latency = 34;
      break;
    case s_LDS:
    case s_STS:
    case s_ATOMS_ADD:
    case s_ATOMS_INC:
    case s_ATOMS_CAST:
      in.pipe = 6;
      in.busy = static_cast<u8>(in.width == 16 ? 4 : in.width == 8 ? 2 : 1);
      in.latency = 29;
      break;
    case s_SHFL:
      in.pipe = 6;
      in.busy = 1;
      in.latency = 24;
      break;
    case s_LDC:
      in.pipe = 6;
      in.busy = 1;
      in.latency = 35;
      break;
    case s_S2R:
      in.pipe = 0;
      in.latency = 25;
      break;
    case s_BRA:
    case s_BRADIV:
    case s_BRX:
    case s_BRXU:
    case s_CALL:
    case s_RET:
    case s_EXIT:
    case s_BSSY:
    case s_BSYNC:
    case s_BREAK:
    case s_WARPSYNC:
    case s_BAR:
    case s_MEMBAR:
    case s_NOP:
    case s_YIELD:
      in.pipe = 0;
      in.latency = 12;
      break;
    default:
      in.pipe = in.uniform ? 0 : 3;
      in.busy = 2;
      in.latency = in.uniform ? 12 : 5;
      break;
  }
}

inline void load_sass(const char* path) {
  FILE* file = fopen(path, "r");
  if (file == nullptr) return;
  char* line = nullptr;
  size_t capacity = 0;
  SassKernel* k = nullptr;
  struct Raw {
    u32 address;
    u64 low, high;
    std::string text;
  };
  std::vector<Raw> raw;
  const auto finish = [&] {
    if (k == nullptr) return;
    std::unordered_map<u32, int> at_of;
    for (size_t i = 0; i < raw.size(); ++i) at_of[raw[i].address] = static_cast<int>(i);
    for (const Raw& r : raw) {
      SInstr in;
      try {
        decode(*k, in, r.text, r.low, at_of, r.address);
      } catch (Stop) {
        // An unknown instruction is reported only if its kernel is launched.
        errors.clear();
        sass_kernels().erase(std::string(k->carrier.name));
        k = nullptr;
        raw.clear();
        return;
      }
      in.stall = static_cast<u32>(r.high >> 41 & 15);
      in.write_bar = static_cast<u32>(r.high >> 46 & 7);
      in.read_bar = static_cast<u32>(r.high >> 49 & 7);
      in.wait = static_cast<u32>(r.high >> 52 & 63);
      set_timing(in);
      Instr carrier;
      carrier.text = r.text;
      carrier.line = static_cast<int>(r.address);
      carrier.space =
          in.op == s_LDS || in.op == s_STS || in.op == s_ATOMS_ADD || in.op == s_ATOMS_INC || in.op == s_ATOMS_CAST
              ? SHARED
              : GLOBAL;
      k->carrier.code.push_back(carrier);
      k->code.push_back(std::move(in));
    }
    for (size_t i = 0; i < k->code.size(); ++i) {
      if (k->code[i].op != s_ATOMS_CAST) continue;
      for (size_t j = i; j-- > 0 && i - j < 6;)
        if (k->code[j].op == s_LDS) k->code[j].lock = true;
    }
    k->carrier.warp_count.assign(raw.size(), 0);
    k->carrier.lane_count.assign(raw.size(), 0);
    raw.clear();
  };
  while (getline(&line, &capacity, file) > 0) {
    std::string s = line;
    while (!s.empty() && isspace(static_cast<unsigned char>(s.back()))) s.pop_back();
    if (s[0] == 'K') {
      finish();
      char name[1024], table[4096];
      unsigned shared = 0, params_at = 0;
      if (sscanf(s.c_str(), "K %1023s %u %u %4095s", name, &shared, &params_at, table) != 4) bad_sass(s);
      if (params_at != kParams90 && params_at != kParams100) bad_sass("parameters in another place: " + s);
      auto& slot = sass_kernels()[name];
      slot = std::make_unique<SassKernel>();
      k = slot.get();
      k->carrier.name = name;
      k->shared = shared;
      k->params_at = params_at;
      if (table[0] != '-')
        for (size_t i = 0; table[i] && table[i + 1]; i += 2) {
          unsigned byte = 0;
          sscanf(table + i, "%2x", &byte);
          k->table.push_back(static_cast<u8>(byte));
        }
    } else {
      Raw r;
      char* end = line;
      r.address = static_cast<u32>(strtoul(end, &end, 16));
      r.low = strtoull(end, &end, 16);
      r.high = strtoull(end, &end, 16);
      while (*end == ' ') ++end;
      r.text = end;
      while (!r.text.empty() && isspace(static_cast<unsigned char>(r.text.back()))) r.text.pop_back();
      raw.push_back(r);
    }
  }
  finish();
  free(line);
  fclose(file);
}
}  // namespace ptxrun
