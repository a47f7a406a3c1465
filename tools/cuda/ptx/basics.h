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

inline std::vector<std::string> errors;
struct Stop {};

}  // namespace ptxrun
