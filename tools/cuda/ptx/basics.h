// Settings, the random numbers that order threads, and error reports.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptxrun {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 32;
constexpr u64 kParamBase = 0x5a00000000000000ull;
constexpr u32 kSharedBase = 1024;  // so that null is not a shared address
constexpr u32 kRedZone = 64;

// ---- settings and results ------------------------------------------------------------------------------------------

struct Settings {
  i64 random_lanes = 0;  // 1: a random group of lanes continues, instead of the one that is furthest behind
  i64 resident = 3;  // number of blocks that run interleaved
  i64 global_races = 1;
  i64 approx_error = 0;  // if not 0, a seed: approximate instructions have errors as large as the ISA allows
  i64 max_errors = 8;
  i64 only_blocks = 0;  // if not 0, only the first blocks of a grid run, for timing
};
inline Settings settings;

struct Random {
  u64 state = 88172645463325252ull;
  u32 next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<u32>(state >> 32);
  }
};
inline Random rng;

// The logical function of three operands whose table of eight bits is `lut`.
inline u32 lut3(u32 a, u32 b, u32 c, u32 lut) {
  u32 r = 0;
  if (lut == 0xc0) return a & b;
  for (int i = 0; i < 8; ++i)
    if (lut >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
// Four of the eight bytes of (b, a), chosen by the nibbles of `selectors`; bit 3 of a nibble repeats the sign.
inline u32 permuted_bytes(u32 a, u32 b, u32 selectors) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 select = selectors >> (4 * i) & 15;
    u32 byte = static_cast<u32>(both >> (8 * (select & 7))) & 255;
    if (select & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}

inline std::vector<std::string> errors;
struct Stop {};

}  // namespace ptxrun
