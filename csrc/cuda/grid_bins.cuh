// Stage 2 of the calibration grid (calibration_grid.cu): the bins of each cell, kBinsAtOnce at a time.
//
// A block computes one cell. Equal-mass bins begin at order statistics. Radix selection over (confidence, row) finds
// all of them at once, digit by digit. Order statistics with the same digits so far share a histogram. A sample whose
// first digit differs from all of theirs costs one look-up. Pairs of confidence and row are unique, so ties need no
// special case; without ties the row numbers are not read. Then each sample searches its bin among the edges. Sums are
// integers in units of 2^-40, so they do not depend on the order of the threads.
#pragma once

#include "cuda/common.cuh"
#include "kernels/calibration_grid.h"

namespace focalkern::cuda {

constexpr int kBinsAtOnce = 16;
constexpr int kEdges = kBinsAtOnce + 1;
constexpr int kCuts = 2 * kEdges;  // order statistics that are found together: two per edge
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSearch = 32;  // edges, padded to a power of two

template <typename Real>
using KeyOf = std::conditional_t<sizeof(Real) == sizeof(float), uint32_t, uint64_t>;

// A one-to-one key that ascends with the confidence c. Each octave of c up to 1/2 is a run of keys; above 1/2, each
// octave of 1 - c, which is exact there. The first digit then already separates the many high confidences.
template <typename Real>
__device__ __forceinline__ KeyOf<Real> key_of(Real c) {
  using Key = KeyOf<Real>;
  const Key half = bit_cast<Key>(Real(0.5));
  const Key key = c <= Real(0.5) ? bit_cast<Key>(c) : half + (half - bit_cast<Key>(Real(1) - c));
  return key << 1;
}
template <typename Real>
__device__ __forceinline__ Real confidence_of(KeyOf<Real> key) {
  using Key = KeyOf<Real>;
  const Key half = bit_cast<Key>(Real(0.5));
  key >>= 1;
  return key <= half ? bit_cast<Real>(key) : Real(1) - bit_cast<Real>(half - (key - half));
}

// An order statistic of (confidence, row), found digit by digit: the digits known so far, and its rank among the
// samples with these digits.
template <typename Real>
struct Cut {
  KeyOf<Real> key;
  uint32_t row;
  uint32_t rank;
};

template <typename Real>
struct CellShared {
  alignas(kVectorBytes) uint32_t counts[kCuts][kDigits];
  Cut<Real> cuts[kCuts];   // in ascending order
  uint8_t leader[kCuts];   // the first cut with the same digits so far; the two share its histogram
  uint8_t first[kDigits];  // the first cut with this first digit, or kCuts
  uint32_t tied;           // number of cuts whose confidence occurs more than once
  // Edges of the bins: the lower edges and the last upper edge, padded with infinities.
  Real edges[kSearch];
  uint32_t edge_rows[kSearch];  // a sample equal to an edge lies above it from this row on
  uint32_t low_sum[kBinsAtOnce];
  uint32_t high_sum[kBinsAtOnce];
  uint32_t count[kBinsAtOnce];
  BinSums bins[kBinsAtOnce];
};

// The bits above `shift` of a number of `bits` bits.
template <typename Key>
__device__ __forceinline__ Key high_bits(Key key, int shift, int bits) {
  return shift >= bits ? Key(0) : key >> shift;
}

// Finds shared.cuts[0 .. n_cuts), whose ranks ascend; by confidence only if row_digits is 0.
template <typename Real>
__device__ void select_cuts(const Real* confidence, int rows, int n_cuts, int row_digits, CellShared<Real>& shared) {
  using Key = KeyOf<Real>;
  constexpr int kKeyBits = 8 * static_cast<int>(sizeof(Key));
  constexpr int kKeyDigits = kKeyBits / kDigitBits;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  __syncthreads();  // all ranks have been written
  if (thread == 0) shared.tied = 0;
  for (int pass = 0; pass < kKeyDigits + row_digits; ++pass) {
    const bool in_key = pass < kKeyDigits;
    const int shift = kDigitBits * ((in_key ? kKeyDigits : kKeyDigits + row_digits) - 1 - pass);
    // Shifts to the digits that are known so far, of a key and of a row.
    const int key_shift = in_key ? shift + kDigitBits : 0;
    const int row_shift = in_key ? 32 : shift + kDigitBits;
    const int histograms = pass == 0 ? 1 : n_cuts;
    for (int i = thread; i < histograms * kDigits / 4; i += kBlock) {
      reinterpret_cast<uint4*>(shared.counts)[i] = uint4{};
    }
    if (thread < n_cuts) {
      const Cut<Real> cut = shared.cuts[thread];
      int leader = thread;
      while (leader > 0 &&
             high_bits(shared.cuts[leader - 1].key, key_shift, kKeyBits) == high_bits(cut.key, key_shift, kKeyBits) &&
             high_bits(shared.cuts[leader - 1].row, row_shift, 32) == high_bits(cut.row, row_shift, 32)) {
        --leader;
      }
      shared.leader[thread] = static_cast<uint8_t>(leader);
      if (pass == 1 && leader == thread) {
        shared.first[cut.key >> (kKeyBits - kDigitBits)] = static_cast<uint8_t>(thread);
      }
    }
    if (pass == 0) shared.first[thread] = kCuts;
    __syncthreads();
    for (int i = thread; i < rows; i += kBlock) {
      const Key key = key_of(confidence[i]);
      const auto row = static_cast<uint32_t>(i);
      const Key key_part = high_bits(key, key_shift, kKeyBits);
      const uint32_t row_part = high_bits(row, row_shift, 32);
      for (int c = pass == 0 ? 0 : shared.first[key >> (kKeyBits - kDigitBits)]; c < n_cuts; ++c) {
        const Key cut_key = high_bits(shared.cuts[c].key, key_shift, kKeyBits);
        const uint32_t cut_row = high_bits(shared.cuts[c].row, row_shift, 32);
        if (cut_key == key_part && cut_row == row_part) {
          const auto digit = static_cast<uint32_t>((in_key ? key >> shift : Key(row >> shift)) & (kDigits - 1));
          atomicAdd(&shared.counts[c][digit], 1u);
          break;
        }
        if (cut_key > key_part || (cut_key == key_part && cut_row > row_part)) break;
      }
    }
    __syncthreads();
    // One warp per cut, a run of digits for each lane.
    constexpr int kRun = kDigits / kWarp;
    for (int c = thread / kWarp; c < n_cuts; c += kWarpsPerBlock) {
      const uint32_t* counts = shared.counts[shared.leader[c]] + lane * kRun;
      const uint32_t rank = shared.cuts[c].rank;
      uint32_t mine = 0;
      for (int d = 0; d < kRun; ++d) mine += counts[d];
      uint32_t up_to = mine;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t before = __shfl_up_sync(kFullWarp, up_to, offset);
        if (lane >= offset) up_to += before;
      }
      const uint32_t below = up_to - mine;
      __syncwarp();  // every lane has read the rank
      if (below <= rank && rank < up_to) {
        uint32_t left = rank - below;
        int digit = 0;
        for (; digit < kRun - 1 && left >= counts[digit]; ++digit) left -= counts[digit];
        if (pass == kKeyDigits - 1 && counts[digit] > 1) atomicAdd(&shared.tied, 1u);
        Cut<Real>& cut = shared.cuts[c];
        cut.rank = left;
        if (in_key) {
          cut.key |= static_cast<Key>(lane * kRun + digit) << shift;
        } else {
          cut.row |= static_cast<uint32_t>(lane * kRun + digit) << shift;
        }
      }
    }
    __syncthreads();
    if (pass == kKeyDigits - 1 && shared.tied == 0) break;
  }
}

template <typename Real>
struct CellArgs {
  const Real* confidence;  // [n_temperatures, n_gammas, rows]
  const uint8_t* correct;  // [rows]
  int rows;
  int64_t n_gammas;
  int64_t n_bins;
  BinEstimator estimator;
  double* ece;  // or null
  double* mce;  // or null
  int64_t table_stride;
};

// The most rows for which sums in units of 2^-40 fit 63 bits and counts fit 32.
constexpr int kRowsAtOnce = 1 << 22;
constexpr double kBinUnit = 0x1p-40;

// Adds the samples to the sums of the bins between the edges.
template <typename Real>
__device__ void add_samples(const CellArgs<Real>& args, const Real* confidence, bool by_rank, int bins, int begin,
                            int end, CellShared<Real>& shared) {
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kBlock) {
    const Real value = confidence[i];
    // The number of edges below the sample; its bin begins at the last of them.
    int below = 0;
#pragma unroll
    for (int step = kSearch / 2; step > 0; step /= 2) {
      const Real edge = shared.edges[below + step - 1];
      bool is_above = value > edge;
      if (by_rank && value == edge) is_above = static_cast<uint32_t>(i) >= shared.edge_rows[below + step - 1];
      below += is_above ? step : 0;
    }
    const int b = below - 1;
    if (b < 0 || b >= bins) continue;
    const double excess = static_cast<double>(value) - static_cast<double>(args.correct[i]);
    const auto units = static_cast<unsigned long long>(llrint(excess * (1 / kBinUnit)));
    const auto low = static_cast<unsigned int>(units);
    // Adds the halves one after the other: a 64-bit atomic in shared memory would compile to a loop.
    const unsigned int carry = atomicAdd(&shared.low_sum[b], low) + low < low ? 1 : 0;
    atomicAdd(&shared.high_sum[b], static_cast<unsigned int>(units >> 32) + carry);
    atomicAdd(&shared.count[b], 1u);
  }
}

// Three blocks per multiprocessor: by default the compiler aims at more and spills.
template <typename Real>
__global__ __launch_bounds__(kBlock, 3) void calibration_grid_bins_kernel(const __grid_constant__ CellArgs<Real> args) {
  using Key = KeyOf<Real>;
  __shared__ CellShared<Real> shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t cell = blockIdx.x;
  const Real* confidence = args.confidence + cell * args.rows;
  const bool by_rank = args.estimator == BinEstimator::kEqualMass;
  const bool by_position = args.estimator == BinEstimator::kEqualMassInterp;
  int row_digits = 1;
  while (row_digits < 4 && (static_cast<uint32_t>(args.rows - 1) >> (kDigitBits * row_digits)) != 0) ++row_digits;

  double ece = 0;
  double mce = 0;
  for (int64_t first_bin = 0; first_bin < args.n_bins; first_bin += kBinsAtOnce) {
    const int64_t left = args.n_bins - first_bin;
    const int bins = left < kBinsAtOnce ? static_cast<int>(left) : kBinsAtOnce;
    if (by_rank && thread <= bins) {
      const int64_t rank = equal_mass_begin(first_bin + thread, args.rows, args.n_bins);
      // A rank past the last sample finds the last sample; the edge is replaced below.
      shared.cuts[thread] = {Key(0), 0u, static_cast<uint32_t>(rank < args.rows ? rank : args.rows - 1)};
    }
    int lower_cut = 0;
    int upper_cut = 0;
    if (by_position && thread <= bins) {
      const InterpolatedRank at = equal_mass_interp_rank(first_bin + thread, args.rows, args.n_bins);
      // With more bins than samples, several edges fall between the same two samples; their lower cuts come first, to
      // keep ranks ascending.
      const auto rank_of = [&](int b) { return equal_mass_interp_rank(first_bin + b, args.rows, args.n_bins).rank; };
      int begin = thread;
      int end = thread + 1;
      while (begin > 0 && rank_of(begin - 1) == at.rank) --begin;
      while (end <= bins && rank_of(end) == at.rank) ++end;
      lower_cut = begin + thread;
      upper_cut = end + thread;
      shared.cuts[lower_cut] = {Key(0), 0u, static_cast<uint32_t>(at.rank)};
      shared.cuts[upper_cut] = {Key(0), 0u, static_cast<uint32_t>(at.next)};
    }
    if (by_rank) select_cuts(confidence, args.rows, bins + 1, row_digits, shared);
    if (by_position) select_cuts(confidence, args.rows, 2 * (bins + 1), 0, shared);

    if (thread < kSearch) {
      // Bins that do not exist have edges above every confidence.
      Real edge = kInfinity<Real>;
      uint32_t edge_row = 0;
      if (thread <= bins && by_position) {
        const InterpolatedRank at = equal_mass_interp_rank(first_bin + thread, args.rows, args.n_bins);
        edge = equal_mass_interp_edge(confidence_of<Real>(shared.cuts[lower_cut].key),
                                      confidence_of<Real>(shared.cuts[upper_cut].key), at.fraction);
      } else if (thread <= bins && by_rank) {
        if (equal_mass_begin(first_bin + thread, args.rows, args.n_bins) < args.rows) {
          edge = confidence_of<Real>(shared.cuts[thread].key);
          edge_row = shared.cuts[thread].row;
        }
      } else if (thread <= bins) {
        // A confidence of 0 belongs to the first bin.
        edge = first_bin + thread == 0 ? Real(-1) : equal_width_edge<Real>(first_bin + thread, args.n_bins);
      }
      shared.edges[thread] = edge;
      shared.edge_rows[thread] = edge_row;
    }
    BinSums sums = {};  // sums of the bin of this thread
    for (int begin = 0; begin < args.rows;) {
      const int end = args.rows - begin < kRowsAtOnce ? args.rows : begin + kRowsAtOnce;
      if (thread < kBinsAtOnce) shared.low_sum[thread] = shared.high_sum[thread] = shared.count[thread] = 0;
      __syncthreads();
      add_samples(args, confidence, by_rank, bins, begin, end, shared);
      __syncthreads();
      if (thread < bins) {
        const uint64_t units = static_cast<uint64_t>(shared.high_sum[thread]) << 32 | shared.low_sum[thread];
        sums.count += shared.count[thread];
        sums.excess += static_cast<double>(static_cast<int64_t>(units)) * kBinUnit;
      }
      begin = end;
    }
    if (thread < bins) shared.bins[thread] = sums;
    __syncthreads();
    if (thread == 0) {
      for (int b = 0; b < bins; ++b) {
        ece += weighted_gap(shared.bins[b], args.rows);
        mce = fmax(mce, gap(shared.bins[b]));
      }
    }
  }
  if (thread == 0) {
    const int64_t out = cell % args.n_gammas * args.table_stride + cell / args.n_gammas;
    if (args.ece != nullptr) args.ece[out] = ece;
    if (args.mce != nullptr) args.mce[out] = mce;
  }
}

}  // namespace focalkern::cuda
