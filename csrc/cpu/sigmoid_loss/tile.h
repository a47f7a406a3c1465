// A tile of elements of the losses of one logit: its labels, and the pointers that the loops read.
#pragma once

#include <cstdint>

#include "kernels/sigmoid_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTile = 1024;     // elements
constexpr int64_t kBlock = 64;      // elements between two requests for memory
constexpr int64_t kFewClasses = 8;  // in a row of labels, whose shares are written down
constexpr int64_t kRowGroup = 16;   // rows of few classes at once

enum class Targets { kSoft, kHard, kLabels };  // any share; 0 or 1; 0 everywhere but at TileLabels::one

// The labels of a tile, where they do not become shares.
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

// The inputs of the loops: a buffer of the tile, or the user's memory.
template <typename Real>
struct TileView {
  const Real* input;
  const Real* target;
  const Real* gamma;
  const Real* second;    // alpha, or gamma_positive
  const Real* negative;  // 1 - alpha
  const Real* scale;     // weight, and in the backward pass times the upstream gradient
  const Real* one;   // of hard focal losses: alpha times scale, negative in the backward pass, where -x is looked at
  const Real* zero;  // and (1 - alpha) times scale; of labels also where they say 1
  const Real* sign;  // of labels: -1 where they say 1, otherwise 1
  Targets targets;
  const char* target_source;  // the dense target's elements as they lie in the user's memory,
  int64_t target_size;        // and the bytes of one; 0 for what is not dense
};

// The kind of the gammas: kSmall saves the loop a logarithm and an exponential, kSquare a handful of products more.
enum class Powers { kAny, kSmall, kSquare };

}  // namespace
}  // namespace focalkern::cpu
