// Running sums of the calibration grid on the CPU: per cell and bucket, the number of samples, the sum of their
// confidences, and how many are correct. One pass over the confidences of a cell; a thread owns whole cells.

#include <cmath>
#include <vector>

#include "cpu/simd/dispatch.h"
#include "kernels/calibration_grid.h"

namespace focalkern::cpu {

namespace {

// With few buckets, neighbouring samples mostly share one, and additions to it would wait for each other. So they go to
// several copies in turn.
constexpr int kCopies = 4;
constexpr int64_t kMaxCopiedBuckets = 64;

struct Bucket {
  double confidence;
  uint64_t count_and_correct;  // count << 32 | correct
};

template <typename Real>
void add_to_few(const Real* confidence, const uint8_t* correct, int64_t rows, int64_t n_buckets, bool sketch,
                std::vector<Bucket>& copies, int64_t* count, double* confidence_sum, int64_t* correct_sum) {
  copies.assign(kCopies * n_buckets, Bucket{0.0, 0});
  for (int64_t i = 0; i < rows; ++i) {
    const Real c = confidence[i];
    const int64_t place = sketch ? sketch_bucket(c, n_buckets) : equal_width_bin(c, n_buckets);
    Bucket& bucket = copies[(i % kCopies) * n_buckets + place];
    bucket.confidence += static_cast<double>(c);
    bucket.count_and_correct += uint64_t{1} << 32 | correct[i];
  }
  for (int64_t b = 0; b < n_buckets; ++b) {
    double sum = 0;
    uint64_t counts = 0;
    for (int copy = 0; copy < kCopies; ++copy) {
      sum += copies[copy * n_buckets + b].confidence;
      counts += copies[copy * n_buckets + b].count_and_correct;
    }
    count[b] += static_cast<int64_t>(counts >> 32);
    confidence_sum[b] += sum;
    correct_sum[b] += static_cast<int64_t>(counts & 0xffffffff);
  }
}

// A loop without branches, which vectorizes.
template <typename Real>
FK_VECTOR_CLONES void sketch_buckets(const Real* __restrict confidence, int64_t n, int64_t n_buckets,
                                     int32_t* __restrict place) {
  for (int64_t i = 0; i < n; ++i) place[i] = sketch_bucket(confidence[i], n_buckets);
}

template <typename Real>
void add_to_many(const Real* confidence, const uint8_t* correct, int64_t rows, int64_t n_buckets, bool sketch,
                 int64_t* count, double* confidence_sum, int64_t* correct_sum) {
  constexpr int64_t kRun = 256;
  int32_t place[kRun];
  for (int64_t begin = 0; begin < rows; begin += kRun) {
    const int64_t n = rows - begin < kRun ? rows - begin : kRun;
    if (sketch) {
      sketch_buckets(confidence + begin, n, n_buckets, place);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        place[i] = static_cast<int32_t>(equal_width_bin(confidence[begin + i], n_buckets));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      count[place[i]] += 1;
      confidence_sum[place[i]] += static_cast<double>(confidence[begin + i]);
      correct_sum[place[i]] += correct[begin + i];
    }
  }
}

}  // namespace

template <typename Real>
void calibration_sums(const CalibrationSums<Real>& args, int64_t cell_begin, int64_t cell_end) {
  std::vector<Bucket> copies;
  for (int64_t cell = cell_begin; cell < cell_end; ++cell) {
    const int64_t out = (cell % args.n_gammas * args.cell_stride + cell / args.n_gammas) * args.n_buckets;
    const Real* confidence = args.confidence + cell * args.rows;
    if (args.n_buckets <= kMaxCopiedBuckets) {
      add_to_few(confidence, args.correct, args.rows, args.n_buckets, args.sketch, copies, args.count + out,
                 args.confidence_sum + out, args.correct_sum + out);
    } else {
      add_to_many(confidence, args.correct, args.rows, args.n_buckets, args.sketch, args.count + out,
                  args.confidence_sum + out, args.correct_sum + out);
    }
  }
}

template void calibration_sums(const CalibrationSums<float>&, int64_t, int64_t);
template void calibration_sums(const CalibrationSums<double>&, int64_t, int64_t);

}  // namespace focalkern::cpu
