// Checks the vectors of every width of csrc/cpu/spline_narrow.h that this processor has, also those that it would not
// choose: order of the classes, errors, and rows without a result; its functions where a table's entry or an exponent
// changes. Prints the widths in bytes, or the first fault.

#include "cpu/spline_map.cpp"

#include <cstdio>
#include <random>

using namespace focalkern;
using namespace focalkern::cpu;

namespace {

// Continuous curves with the least slope that keeps the order, with kinks, and with knots that fill the tables.
struct Curve {
  std::vector<double> positions, coefficients;
  Curve(int64_t knots, double first, double step, double slope, double rise) {
    double value = 0;
    for (int64_t piece = 0; piece <= knots; ++piece) {
      const double bend = piece % 3 == 1 && piece < knots ? rise / 8 : 0;  // of a cubic piece
      if (piece < knots) positions.push_back(first + step * piece);
      const double c[] = {value, slope, bend / step, -bend / (2 * step * step)};
      coefficients.insert(coefficients.end(), c, c + 4);
      if (piece > 0) value += step * (c[1] + step * (c[2] + step * c[3]));
      slope += rise;
    }
  }
  SplineCurve arguments() const {
    return {static_cast<int64_t>(positions.size()), positions.data(), coefficients.data()};
  }
};

// Rows of all scales, with ties, neighbours one unit in the last place apart, and -inf.
std::vector<float> make_logits(int64_t rows, int64_t classes, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> logits(rows * classes);
  for (int64_t row = 0; row < rows; ++row) {
    float* z = logits.data() + row * classes;
    const float scale = std::pow(10.0f, static_cast<float>(row % 7) - 4);
    for (int64_t c = 0; c < classes; ++c) z[c] = normal(random) * scale;
    const auto any = [&] { return static_cast<int64_t>(random() % classes); };
    if (row % 2 == 0) z[any()] += 8;
    for (int64_t i = 0; i < classes / 3; ++i) {
      const float other = z[any()];
      z[any()] = i % 2 ? other : std::nextafter(other, 9e9f);
    }
    if (row % 5 == 0) z[(any() + 1) % classes] = static_cast<float>(kMinusInfinity);
  }
  return logits;
}

struct Case {
  int64_t rows, classes;
  bool log_output, keep_zeros;
  double floor;
};

SplineMapForward map_of(const Case& of, const void* input, SplineStorage storage, const SplineCurve& curve,
                        void* output) {
  const SplineInput rows{input, storage, false, of.rows, of.classes, 1.3, of.floor};
  const SplineScores scores{0.01, nullptr, nullptr, nullptr, of.keep_zeros};
  return {rows, curve, scores, of.log_output, storage != SplineStorage::kDouble, output, storage, 1e-3};
}

const char* fault_in_order(const Case& of, const float* z, const float* p) {
  std::vector<int64_t> order(of.classes);
  for (int64_t row = 0; row < of.rows; ++row, z += of.classes, p += of.classes) {
    for (int64_t c = 0; c < of.classes; ++c) order[c] = c;
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return z[a] < z[b]; });
    for (int64_t c = 1; c < of.classes; ++c) {
      const int64_t low = order[c - 1], high = order[c];
      if (!(p[low] <= p[high])) return "a larger logit has a smaller result";
      if (z[low] == z[high] && p[low] != p[high]) return "equal logits have different results";
    }
  }
  return nullptr;
}

// A result differs from that of the double code by at most one unit in the last place.
const char* fault_in_results(const Case& of, const std::vector<float>& found, const std::vector<double>& exact) {
  for (size_t i = 0; i < found.size(); ++i) {
    const auto nearest = static_cast<float>(exact[i]);
    const float up = std::nextafter(nearest, 9e9f), down = std::nextafter(nearest, -9e9f);
    // Rounding the exponents to steps moves log p by up to 1e-9.
    const bool is_near = of.log_output && std::abs(found[i] - exact[i]) < 1e-8;
    if (!is_near && !(found[i] == nearest || found[i] == up || found[i] == down)) {
      std::printf("%.9g instead of %.17g: ", found[i], exact[i]);
      return "an error of more than one unit";
    }
  }
  return nullptr;
}

template <int64_t bytes>
const char* fault_of(const Case& of, const Curve& curve) {
  std::mt19937 random(of.classes);
  std::vector<float> logits = make_logits(of.rows, of.classes, random), found(logits.size());
  const std::vector<double> wide(logits.begin(), logits.end());
  std::vector<double> exact(logits.size());
  const auto general = map_of(of, wide.data(), SplineStorage::kDouble, curve.arguments(), exact.data());
  if (spline_map_forward(general, 0, of.rows) >= 0) return "the double code finds an invalid row";
  const auto map = map_of(of, logits.data(), SplineStorage::kFloat, curve.arguments(), found.data());
  if (!is_narrow(map)) return "another code serves this map";
  if (NarrowMap<bytes>(map).forward(0, of.rows) >= 0) return "an invalid row";
  if (const char* fault = fault_in_order(of, logits.data(), found.data())) return fault;
  if (const char* fault = fault_in_results(of, found, exact)) return fault;

  const int64_t bad = of.rows - 2;
  for (const double value : {kNan, -kMinusInfinity}) {
    std::vector<float> spoilt = logits, results(found.size());
    spoilt[bad * of.classes + of.classes / 2] = static_cast<float>(value);
    const auto other = map_of(of, spoilt.data(), SplineStorage::kFloat, curve.arguments(), results.data());
    if (NarrowMap<bytes>(other).forward(0, of.rows) != bad) return "an invalid row was not found";
    for (int64_t i = 0; i < of.rows * of.classes; ++i) {
      const bool is_right = i / of.classes == bad ? results[i] != results[i] : results[i] == found[i];
      if (!is_right) return "results beside an invalid row";
    }
  }
  return nullptr;
}

struct Functions {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(std::vector<double>& powers, std::vector<double>& logarithms) {
    constexpr int64_t n = bytes / sizeof(double);
    for (size_t i = 0; i < powers.size(); i += n) {
      store_simd(narrow_powers_of_two<n>(load_simd<simd_t<double, n>>(&powers[i])), &powers[i]);
      store_simd(narrow_logarithms<n>(load_simd<simd_t<double, n>>(&logarithms[i])), &logarithms[i]);
    }
  }
};

// Both functions rise with the least step of their argument, and have errors of at most 3e-9, around the 16ths of the
// powers and those of each octave of the logarithms.
template <int64_t bytes>
const char* fault_at_borders() {
  constexpr double kScoreStep = 4e-13 * kNarrowLog2e, kPStep = 0x1p-30;
  constexpr int64_t kSteps = 8;  // a border is in the middle of so many arguments
  std::vector<double> scores, p;
  for (int64_t border = -14400; border < 14400; ++border) {
    const double octave = std::exp2(border % 30 - 30), place = 1 + static_cast<double>(border & 15) / 16;
    for (int64_t i = 0; i < kSteps; ++i) {
      const auto away = static_cast<double>(i - kSteps / 2);
      scores.push_back(static_cast<double>(border) / 16 + away * kScoreStep);
      p.push_back(octave * place * (1 + away * kPStep));
    }
  }
  std::vector<double> powers = scores, logarithms = p;
  run_in<bytes, Functions>(powers, logarithms);
  for (size_t i = 0; i < scores.size(); ++i) {
    const bool is_first = i % kSteps == 0, is_whole = scores[i] == std::round(scores[i]);
    if (!is_first && powers[i] <= powers[i - 1]) return "a power does not rise";
    if (!is_first && logarithms[i] <= logarithms[i - 1]) return "a logarithm does not rise";
    if (std::abs(powers[i] / std::exp2(scores[i]) - 1) > 3e-9) return "the error of a power";
    if (is_whole && powers[i] != std::exp2(scores[i])) return "the power of an integer";
    if (std::abs(logarithms[i] - std::log(p[i])) > 3e-9) return "the error of a logarithm";
  }
  return nullptr;
}

template <int64_t bytes>
bool is_right() {
  if (const char* fault = fault_at_borders<bytes>()) {
    std::printf("%s: %d bytes\n", fault, static_cast<int>(bytes));
    return false;
  }
  const Curve curves[] = {{10, -9, 1.5, 0.05, 0.045}, {15, -8, 0.8, 0.002, 0.02}, {1, -2, 1, 0.3, 0.4}};
  for (const Curve& curve : curves) {
    for (const int64_t classes : {2, 3, 10, 32, 33, 39, 40, 100, 1001}) {
      for (const int options : {0, 1, 2, 3}) {
        const Case of{classes < 40 ? 135 : 21, classes, options % 2 == 1, options >= 2, options >= 2 ? 1e-6 : 1e-4};
        if (const char* fault = fault_of<bytes>(of, curve)) {
          std::printf("%s: %lld bytes, %lld classes, options %d, %d knots\n", fault, static_cast<long long>(bytes),
                      static_cast<long long>(classes), options, static_cast<int>(curve.positions.size()));
          return false;
        }
      }
    }
  }
  std::printf("%d\n", static_cast<int>(bytes));
  return true;
}

}  // namespace

int main() {
  bool all = is_right<16>();
#ifdef FK_HAS_AVX512_CODE
  if (has_avx2()) all &= is_right<32>();
  if (has_avx512()) all &= is_right<64>();
#endif
  return all ? 0 : 1;
}
