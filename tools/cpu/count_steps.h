// Counts the instructions of two functions on this processor, one step at a time, and makes the logits they read.
#pragma once

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "math/portable.h"

namespace {

using namespace focalkern;

// The numbers of instructions of a child: [0] of a stop itself, [1] of the forward pass, [2] of the backward pass.
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

// Prints the number of elements and the instructions of both passes.
template <typename Forward, typename Backward>
int count(int64_t elements, Forward forward, Backward backward) {
  const auto both = [&](bool stops) {
    if (stops) raise(SIGSTOP);
    forward();
    if (stops) raise(SIGSTOP);
    backward();
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
  std::printf("%ld %ld %ld\n", static_cast<long>(elements), steps[1] - steps[0], steps[2] - steps[0]);
  return 0;
}

template <typename Scalar>
std::vector<Scalar> normal_logits(int64_t size, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<Scalar> logits(size);
  for (auto& z : logits) z = Store<Scalar>::from_compute(normal(random));
  return logits;
}

}  // namespace
