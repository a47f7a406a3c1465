// Runs machine code (of sm_90 or sm_100) where ptxrun runs PTX, with the same checks of every access; counts how often
// each instruction is executed, and can record what warps issue. Link it together with ptx/runtime.cpp.
#include "sass/launch.h"
#include "sass/load.h"

using namespace ptxrun;

namespace {

std::unique_ptr<Launch> make_sass_launch(Kernel& k, const u32 (&grid)[3], const u32 (&block)[3]) {
  auto it = sass_kernels().find(k.name);
  if (it == sass_kernels().end()) bad_sass("no code of " + k.name);
  SassKernel& s = *it->second;
  s.carrier.params = k.params;
  s.carrier.file_size = 256 * 32;
  s.carrier.shared_end = std::max(s.shared, kSharedBase);
  if (s.carrier.shared.empty() && s.shared > kSharedBase)
    s.carrier.shared.push_back({"shared", kSharedBase, s.shared - kSharedBase});
  if (trace_blocks > 0) {
    trace.kernel = &s;
    trace.warps = static_cast<int>((block[0] + 31) / 32);
    trace.of.assign(
        static_cast<size_t>(std::min<u64>(grid[0], static_cast<u64>(trace_blocks))) * static_cast<size_t>(trace.warps),
        {});
    trace.seen.assign(static_cast<size_t>(trace_blocks), {});
  }
  return std::make_unique<SassLaunch>(s, grid, block);
}

}  // namespace

extern "C" int sassrun_load(const char* path) {
  try {
    load_sass(path);
  } catch (Stop) {
    return -1;
  }
  make_launch = make_sass_launch;
  return static_cast<int>(sass_kernels().size());
}
extern "C" void sassrun_off() { make_launch = make_ptx_launch; }
extern "C" void sassrun_clear_counts() {
  for (auto& [name, s] : sass_kernels()) {
    s->carrier.launches = s->carrier.blocks = 0;
    std::fill(s->carrier.warp_count.begin(), s->carrier.warp_count.end(), 0);
    std::fill(s->carrier.lane_count.begin(), s->carrier.lane_count.end(), 0);
  }
}
extern "C" void sassrun_write_counts(const char* path) {
  FILE* file = fopen(path, "a");
  for (auto& [name, s] : sass_kernels()) {
    const Kernel& k = s->carrier;
    if (k.launches == 0) continue;
    fprintf(file, "K\t%s\t%llu\t%llu\t0\t0\t%zu\n", name.c_str(), static_cast<unsigned long long>(k.launches),
            static_cast<unsigned long long>(k.blocks), k.code.size());
    for (size_t i = 0; i < k.code.size(); ++i) {
      fprintf(file, "I\t%d\t%llu\t%llu\t%u\t%s\n", k.code[i].line, static_cast<unsigned long long>(k.warp_count[i]),
              static_cast<unsigned long long>(k.lane_count[i]), s->code[i].stall, k.code[i].text.c_str());
    }
  }
  fclose(file);
}
extern "C" void sassrun_totals(int64_t* totals) {
  for (auto& [name, s] : sass_kernels()) add_totals(s->carrier, totals);
}
extern "C" void sassrun_trace(int64_t blocks) { trace_blocks = blocks; }
