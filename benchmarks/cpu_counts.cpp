// Counts the instructions of focal_loss on this processor by stepping through one chunk of rows: see cpu_counts.py.
//
//   cpu_counts classes float32|bfloat16 [table]   prints: rows forward backward

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/focal_loss.cpp"

namespace {

using namespace focalkern;

// The instructions of a child between its stops: [0] of a stop itself, [1] forward, [2] backward.
bool count_steps(pid_t child, long (&steps)[3]) {
  int status;
  for (int part = -1; waitpid(child, &status, 0) == child && WIFSTOPPED(status);) {
    if (WSTOPSIG(status) == SIGSTOP) {
      if (++part == 3) return true;
    } else if (WSTOPSIG(status) == SIGTRAP) {
      ++steps[part];
    } else {
      return false;
    }
    if (ptrace(PTRACE_SINGLESTEP, child, 0, 0) != 0) return false;
  }
  return false;
}

template <typename Scalar>
int run(int64_t classes, bool with_table) {
  using Real = compute_t<Scalar>;
  const int64_t rows = cpu::row_loss_chunk_rows(int64_t(1) << 20, classes);
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0, 3);
  std::vector<Scalar> logits(rows * classes), grad(rows * classes);
  for (auto& z : logits) z = Store<Scalar>::from_compute(normal(random));
  std::vector<int64_t> labels(rows);
  for (auto& label : labels) label = random() % classes;
  std::vector<Real> saved(3 * rows), edges(16), gammas(15);
  for (int k = 0; k < 16; ++k) edges[k] = Real(k) / 15;
  for (int k = 0; k < 15; ++k) gammas[k] = Real(3 - 0.3 * k);

  FocalLossForward<Scalar> forward{};
  forward.rows = rows;
  forward.classes = classes;
  forward.logits = logits.data();
  forward.layout = {1, classes, 0, 1};
  forward.labels = {labels.data(), Labels::Type::kInt64};
  forward.ignore_index = -100;
  forward.gamma_value = 2;
  forward.saved = saved.data();
  if (with_table) {
    forward.edges = edges.data();
    forward.gamma = gammas.data();
    forward.n_bins = 15;
  }
  const Real upstream = 1, divisor = static_cast<Real>(rows);
  FocalLossBackward<Scalar> backward{};
  static_cast<FocalLossArgs<Scalar>&>(backward) = forward;
  backward.grad_loss = &upstream;
  backward.divisor = &divisor;
  backward.grad_logits = grad.data();
  backward.grad_layout = forward.layout;

  const auto both = [&](bool stops) {
    if (stops) raise(SIGSTOP);
    cpu::row_loss_forward<FocalRow>(forward, 0, rows);
    if (stops) raise(SIGSTOP);
    cpu::row_loss_backward<FocalRow>(backward, 0, rows);
    if (stops) raise(SIGSTOP);
  };
  both(false);  // the loader has bound every function
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, 0, 0);
    raise(SIGSTOP);
    both(true);
    _exit(0);
  }
  long steps[3] = {};
  const bool counted = count_steps(child, steps);
  kill(child, SIGKILL);
  if (!counted) return 1;
  std::printf("%ld %ld %ld\n", static_cast<long>(rows), steps[1] - steps[0], steps[2] - steps[0]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int64_t classes = std::atoll(argv[1]);
  const bool with_table = argc > 3;
  return std::strcmp(argv[2], "float32") == 0 ? run<float>(classes, with_table) : run<BFloat16>(classes, with_table);
}
