// A rough model of one multiprocessor of an H100: when each instruction issues and when memory answers. It has no
// caches beyond the first access to a sector, and its latencies are guesses: use it to compare two versions of a
// kernel, not to predict times.
#include "sass/operands.h"

using namespace ptxrun;

// Cycles of one multiprocessor for the recorded blocks, `resident` at a time; memory delivers `bytes_per_cycle` after
// `memory_latency` cycles. Also the number of issued instructions and of moved bytes.
extern "C" double sassrun_simulate(int resident, double bytes_per_cycle, int memory_latency, double* issued,
                                   double* bytes, double* idle_memory) {
  struct Sim {
    const std::vector<Event>* events;
    size_t at = 0;
    u64 ready = 0;
    u64 bar[6] = {};
    bool at_barrier = false;
    int block = 0;
  };
  const int blocks = static_cast<int>(trace.of.size()) / trace.warps;
  std::vector<Sim> warps;  // resident
  std::vector<std::vector<int>> quarter(4);
  int next_block = 0, finished = 0;
  u64 now = 0;
  double memory_free = 0;
  u64 pipe_free[4][8] = {};
  u64 lsu_free = 0;
  *issued = *bytes = *idle_memory = 0;
  std::vector<int> slot_block(static_cast<size_t>(resident), -1);
  warps.resize(static_cast<size_t>(resident * trace.warps));
  for (size_t i = 0; i < warps.size(); ++i) quarter[i % 4].push_back(static_cast<int>(i));
  const auto start = [&](int slot) {
    slot_block[static_cast<size_t>(slot)] = next_block < blocks ? next_block++ : -2;
    for (int i = 0; i < trace.warps; ++i) {
      Sim& s = warps[static_cast<size_t>(slot * trace.warps + i)];
      s = Sim{};
      s.events = slot_block[static_cast<size_t>(slot)] >= 0
                     ? &trace.of[static_cast<size_t>(slot_block[static_cast<size_t>(slot)] * trace.warps + i)]
                     : nullptr;
      s.ready = now + 200;
      s.block = slot;
    }
  };
  for (int i = 0; i < resident; ++i) start(i);
  int last[4] = {-1, -1, -1, -1};
  while (finished < blocks && now < 2000000000ull) {
    for (int q = 0; q < 4; ++q) {
      // The warp that issued last if it can, else the next ready warp in round-robin order.
      const int n = static_cast<int>(quarter[static_cast<size_t>(q)].size());
      for (int k = 0; k < n; ++k) {
        const int index = last[q] < 0 ? k : (last[q] + k) % n;
        Sim& s = warps[static_cast<size_t>(quarter[static_cast<size_t>(q)][static_cast<size_t>(index)])];
        if (s.events == nullptr || s.at >= s.events->size() || s.at_barrier || s.ready > now) continue;
        const Event& e = (*s.events)[s.at];
        const SInstr& in = trace.kernel->code[e.pc];
        bool blocked = false;
        for (int i = 0; i < 6; ++i)
          if ((in.wait >> i & 1) && s.bar[i] > now) blocked = true;
        if (blocked) continue;
        if (in.pipe != 0) {
          if (in.pipe == 6 ? lsu_free > now + 8 : pipe_free[q][in.pipe] > now) continue;
          if ((in.pipe == 1 || in.pipe == 2) && pipe_free[q][7] > now) continue;
        }
        // Issue.
        last[q] = index;
        *issued += 1;
        ++s.at;
        u64 done = now + in.latency;
        if (in.pipe == 6) {
          lsu_free = std::max(lsu_free, now) + in.busy;
          done = lsu_free + in.latency;
          if (e.miss > 0) {
            const double size = 32.0 * e.miss;
            if (memory_free < static_cast<double>(now)) {
              *idle_memory += static_cast<double>(now) - memory_free;
              memory_free = static_cast<double>(now);
            }
            memory_free += size / bytes_per_cycle;
            *bytes += size;
            if (in.op == s_LDG) done = std::max(done, static_cast<u64>(memory_free) + static_cast<u64>(memory_latency));
          }
        } else if (in.pipe != 0) {
          pipe_free[q][in.pipe] = now + in.busy;
          if (in.pipe == 1 || in.pipe == 2) pipe_free[q][7] = now + 1;
        }
        if (in.write_bar < 6) s.bar[in.write_bar] = std::max(s.bar[in.write_bar], done);
        if (in.read_bar < 6) s.bar[in.read_bar] = std::max(s.bar[in.read_bar], now + (in.pipe == 6 ? 12 : 6));
        s.ready = now + std::max<u32>(1, in.stall);
        if (in.op == s_BRA || in.op == s_CALL || in.op == s_RET || in.op == s_BSYNC)
          s.ready = std::max(s.ready, now + (s.at < s.events->size() && (*s.events)[s.at].pc != e.pc + 1 ? 10u : 2u));
        if (in.op == s_BAR) {
          s.at_barrier = true;
          bool all = true;
          for (int i = 0; i < trace.warps; ++i) {
            const Sim& o = warps[static_cast<size_t>(s.block * trace.warps + i)];
            all &= o.at_barrier || o.at >= o.events->size();
          }
          if (all)
            for (int i = 0; i < trace.warps; ++i) {
              Sim& o = warps[static_cast<size_t>(s.block * trace.warps + i)];
              o.at_barrier = false;
              o.ready = now + 20;
            }
        }
        if (s.at == s.events->size()) {
          bool all = true;
          for (int i = 0; i < trace.warps; ++i)
            all &= warps[static_cast<size_t>(s.block * trace.warps + i)].at ==
                   warps[static_cast<size_t>(s.block * trace.warps + i)].events->size();
          if (all) {
            ++finished;
            start(s.block);
          }
        }
        break;
      }
    }
    ++now;
  }
  // Loads that memory has not answered yet.
  return std::max(static_cast<double>(now), memory_free);
}
