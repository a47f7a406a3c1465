// A tile of elements of the losses of one logit: its labels, and the pointers that the loops read.
#pragma once

#include <cstdint>

#include "kernels/sigmoid_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTile = 1024;     // elements
constexpr int64_t kBlock = 64;      // elements between two prefetches
constexpr int64_t kFewClasses = 8;  // up to this many, labels become one-hot shares
constexpr int64_t kRowGroup = 16;   // rows of few classes that are handled at once

enum class Targets { kSoft, kHard, kLabels };  // any share; 0 or 1; 0 except at TileLabels::one

// The labels of a tile, if they do not become shares. `one` also holds the positions of a few dense targets that are
// not 0.
struct TileLabels {
  bool is_valid = true;
  int64_t invalid_label = 0;
  int64_t ones = 0;
  int64_t ignored_runs = 0;
  int64_t ignored = 0;  // elements
  int16_t one[kTile];
  struct Run {
    int16_t first, length;
  } ignored_run[kTile];
};

// The inputs of the loops: in a buffer of the tile, or in the user's memory.
template <typename Real>
struct TileView {
  const Real* input;
  const Real* target;
  const Real* gamma;
  const Real* second;    // alpha, or gamma_positive
  const Real* negative;  // 1 - alpha
  const Real* scale;     // weight; in the backward pass times the upstream gradient
  const Real* one;       // hard focal losses: alpha times scale; negated in the backward pass, which works with -x
  const Real* zero;      // (1 - alpha) times scale; with labels, at the ones the same as `one`
  const Real* sign;      // labels: -1 at the ones, otherwise 1
  Targets targets;
  const char* target_source;  // the dense target in the user's memory
  int64_t target_size;        // bytes per element of it; 0 if the target is not dense
};

// The kind of the gammas. kSmall saves a logarithm and an exponential per element, kSquare a few products more.
enum class Powers { kAny, kSmall, kSquare };

}  // namespace
}  // namespace focalkern::cpu
