// Runs compiled CUDA kernels on the CPU: an interpreter for the PTX that nvcc embeds in an object, behind the few
// functions of the CUDA runtime that a launch needs. Link it instead of libcudart (tools/cuda/build.py does):
//
//   nvcc -O3 -std=c++17 -Xcompiler=-fPIC --no-compress -gencode=arch=compute_90,code=compute_90 -c kernels.cu
//   g++ -shared -O3 -march=native -std=c++17 -fno-strict-aliasing -ffp-contract=off runtime.cpp kernels.o -o kernels.so
//
// Host code, argument marshalling, launch configuration and device code are then those that nvcc compiled; only ptxas
// and the chip are not involved. Source: "Parallel Thread Execution ISA", NVIDIA.
//
// Every thread has a program counter; lanes at the same one run together, 32 wide. Warps and blocks are interleaved at
// random. The following are errors, and the launch fails:
//   - a global access outside memory registered by ptxrun_register, or off its natural alignment
//   - a shared access outside the variables, or off its alignment (red zones lie between variables)
//   - two threads access one byte of shared or global memory, one of them writes, and no barrier is between them (for
//     shared memory within a warp, bar.warp.sync suffices; between blocks, fence then atomic in one and atomic then
//     fence in the other)
//   - a branch, an address or a global store that depends on a register or memory never written
//   - shfl.sync from a lane that does not take part, a barrier that not all threads reach, an endless wait
//   - an instruction that this interpreter does not know

#include "ptx/launch.h"
#include "ptx/parser.h"

using namespace ptxrun;

namespace {

struct Module {
  std::map<std::string, std::vector<std::string>> shared;
  std::map<std::string, Kernel> kernels;
};
std::vector<std::unique_ptr<Module>>& modules() {  // fat binaries are registered by constructors
  static auto* list = new std::vector<std::unique_ptr<Module>>;
  return *list;
}
std::unordered_map<const void*, Kernel*>& functions() {
  static auto* table = new std::unordered_map<const void*, Kernel*>;
  return *table;
}

void add_module_text(Module& module, const std::string& text) {
  // Shared variables of the module, in lines of their own before the kernels.
  int depth = 0;
  for (size_t begin = 0; begin < text.size();) {
    size_t stop = text.find('\n', begin);
    if (stop == std::string::npos) stop = text.size();
    const std::string line_text = text.substr(begin, stop - begin);
    begin = stop + 1;
    if (depth == 0 && line_text.compare(0, 2, "//") != 0 && line_text.find(".shared") != std::string::npos &&
        line_text.back() == ';') {
      std::vector<std::string> words;
      std::string word;
      for (char c : line_text) {
        if (isspace(static_cast<unsigned char>(c)) || c == ';') {
          if (!word.empty()) words.push_back(word);
          word.clear();
        } else {
          word += c;
        }
      }
      module.shared[words.back().substr(0, words.back().find('['))] = words;
    }
    for (char c : line_text) depth += c == '{' ? 1 : c == '}' ? -1 : 0;
  }
  size_t at = 0;
  int line = 1;
  size_t counted = 0;
  while ((at = text.find(".entry ", at)) != std::string::npos) {
    size_t name_begin = at + 7;
    size_t name_end = text.find_first_of("( \t\r\n", name_begin);
    const std::string name = text.substr(name_begin, name_end - name_begin);
    size_t end = text.find('{', name_end);
    for (int depth = 0; end < text.size(); ++end) {
      depth += text[end] == '{' ? 1 : text[end] == '}' ? -1 : 0;
      if (depth == 0) break;
    }
    end = std::min(end + 1, text.size());
    for (; counted < name_end; ++counted) line += text[counted] == '\n';
    Kernel& k = module.kernels[name];
    k.name = name;
    k.text = text.substr(name_end, end - name_end);
    k.first_line = line;
    k.module_shared = &module.shared;
    at = end;
  }
}

Module* load_fatbin(const void* data) {
  modules().push_back(std::make_unique<Module>());
  Module& module = *modules().back();
  const u8* base = static_cast<const u8*>(data);
  struct Header {
    u32 magic;
    u16 version, header_size;
    u64 size;
  } header;
  memcpy(&header, base, sizeof(header));
  if (header.magic != 0xba55ed50u) {
    fprintf(stderr, "ptxrun: not a fat binary\n");
    return &module;
  }
  u64 at = header.header_size;
  bool found = false;
  while (at < header.header_size + header.size) {
    u16 kind;
    u32 entry_header;
    u64 entry_size;
    memcpy(&kind, base + at, 2);
    memcpy(&entry_header, base + at + 4, 4);
    memcpy(&entry_size, base + at + 8, 8);
    if (kind == 1) {
      const char* text = reinterpret_cast<const char*>(base + at + entry_header);
      const std::string ptx(text, strnlen(text, entry_size));
      if (ptx.find(".version") == std::string::npos) {
        fprintf(stderr, "ptxrun: compressed PTX; build with nvcc --no-compress\n");
      } else if (!found) {
        add_module_text(module, ptx);
        found = true;
      }
    }
    at += entry_header + entry_size;
  }
  if (!found) fprintf(stderr, "ptxrun: no PTX in the fat binary\n");
  return &module;
}

struct Dim3 {
  u32 x, y, z;
};
constexpr int kLaunchFailure = 719;
constexpr int kInvalidConfiguration = 9;

int launch(const void* function, Dim3 grid, Dim3 block, void** args, size_t dynamic_shared) {
  auto it = functions().find(function);
  if (it == functions().end()) return 98;  // invalid device function
  Kernel& k = *it->second;
  try {
    if (!k.parsed) Parser(k).run();
    const u64 threads = static_cast<u64>(block.x) * block.y * block.z;
    if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX ||
        grid.y > 65535 || grid.z > 65535 || (k.max_threads != 0 && threads > static_cast<u64>(k.max_threads)) ||
        dynamic_shared != 0 || k.shared_end - kSharedBase > 49152) {
      return kInvalidConfiguration;
    }
    static u32 id = 0;
    const u32 g[3] = {grid.x, grid.y, grid.z}, c[3] = {block.x, block.y, block.z};
    const std::unique_ptr<Launch> run = make_launch(k, g, c);
    run->id = ++id;
    run->params.resize(k.param_bytes);
    for (size_t i = 0; i < k.params.size(); ++i)
      memcpy(run->params.data() + k.params[i].offset, args[i], k.params[i].size);
    const size_t before = errors.size();
    run->run_all();
    return errors.size() == before ? 0 : kLaunchFailure;
  } catch (Stop) {
    return kLaunchFailure;
  }
}

Dim3 pushed_grid, pushed_block;
size_t pushed_shared;
void* pushed_stream;

}  // namespace

extern "C" {

// ---- for tests -----------------------------------------------------------------------------------------------------

void ptxrun_register(void* memory, int64_t size) {
  last_found = nullptr;
  allocations.erase(reinterpret_cast<u64>(memory));
  Allocation a;
  a.base = reinterpret_cast<u64>(memory);
  a.size = static_cast<u64>(size);
  if (size > 0) allocations[a.base] = std::move(a);
}
void ptxrun_unregister(void* memory) {
  last_found = nullptr;
  auto it = allocations.find(reinterpret_cast<u64>(memory));
  if (it == allocations.end()) return;
  if (it->second.cells != nullptr) munmap(it->second.cells, it->second.size * sizeof(Cell));
  allocations.erase(it);
}
void ptxrun_mark_undefined(void* memory, int64_t size) {
  Allocation* a = find_allocation(reinterpret_cast<u64>(memory));
  if (a == nullptr) return;
  if (a->undefined.empty()) a->undefined.assign(a->size, 0);
  memset(a->undefined.data() + (reinterpret_cast<u64>(memory) - a->base), 1, static_cast<size_t>(size));
}
int ptxrun_is_undefined(void* memory, int64_t size) {  // bytes never written by a kernel
  Allocation* a = find_allocation(reinterpret_cast<u64>(memory));
  if (a == nullptr || a->undefined.empty()) return 0;
  int count = 0;
  for (int64_t i = 0; i < size; ++i)
    count += a->undefined[reinterpret_cast<u64>(memory) - a->base + static_cast<u64>(i)];
  return count;
}
void ptxrun_set(const char* name, int64_t value) {
  if (!strcmp(name, "seed")) rng.state = static_cast<u64>(value) * 0x9e3779b97f4a7c15ull + 88172645463325252ull;
  if (!strcmp(name, "random_lanes")) settings.random_lanes = value;
  if (!strcmp(name, "resident")) settings.resident = value;
  if (!strcmp(name, "global_races")) settings.global_races = value;
  if (!strcmp(name, "approx_error")) settings.approx_error = value;
  if (!strcmp(name, "max_errors")) settings.max_errors = value;
  if (!strcmp(name, "only_blocks")) settings.only_blocks = value;
}
int64_t ptxrun_error_count() { return static_cast<int64_t>(errors.size()); }
const char* ptxrun_error(int64_t i) {
  return i < static_cast<int64_t>(errors.size()) ? errors[static_cast<size_t>(i)].c_str() : nullptr;
}
void ptxrun_clear_errors() { errors.clear(); }
void ptxrun_clear_counts() {
  for (auto& module : modules()) {
    for (auto& [name, k] : module->kernels) {
      k.launches = k.blocks = k.mixed_barriers = k.mixed_shuffles = 0;
      std::fill(k.warp_count.begin(), k.warp_count.end(), 0);
      std::fill(k.lane_count.begin(), k.lane_count.end(), 0);
    }
  }
}
// One line for each instruction of each kernel that ran: kernel, launches, blocks, PTX line, warps, lanes, text.
void ptxrun_write_counts(const char* path) {
  FILE* file = fopen(path, "a");
  if (file == nullptr) return;
  for (auto& module : modules()) {
    for (auto& [name, k] : module->kernels) {
      if (!k.parsed || k.launches == 0) continue;
      fprintf(file, "K\t%s\t%llu\t%llu\t%llu\t%llu\t%zu\n", name.c_str(), static_cast<unsigned long long>(k.launches),
              static_cast<unsigned long long>(k.blocks), static_cast<unsigned long long>(k.mixed_barriers),
              static_cast<unsigned long long>(k.mixed_shuffles), k.code.size());
      for (size_t i = 0; i < k.code.size(); ++i) {
        std::string text = k.code[i].text;
        for (char& c : text)
          if (c == '\n' || c == '\t') c = ' ';
        fprintf(file, "I\t%d\t%llu\t%llu\t%s\n", k.code[i].line, static_cast<unsigned long long>(k.warp_count[i]),
                static_cast<unsigned long long>(k.lane_count[i]), text.c_str());
      }
    }
  }
  fclose(file);
}
// Launches, blocks, and instructions of warps and of threads, of all kernels.
void ptxrun_totals(int64_t* totals) {
  for (auto& module : modules()) {
    for (auto& [name, k] : module->kernels) add_totals(k, totals);
  }
}
// Decodes every kernel of every module; returns the number of kernels with an unknown part.
int ptxrun_parse_all() {
  int bad = 0;
  for (auto& module : modules()) {
    for (auto& [name, k] : module->kernels) {
      try {
        if (!k.parsed) Parser(k).run();
      } catch (Stop) {
        ++bad;
      }
    }
  }
  return bad;
}
int ptxrun_kernel_count() {
  int count = 0;
  for (auto& module : modules()) count += static_cast<int>(module->kernels.size());
  return count;
}

// ---- the runtime ---------------------------------------------------------------------------------------------------

struct FatbinWrapper {
  int magic, version;
  const void* data;
  void* filename_or_fatbins;
};
void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(load_fatbin(static_cast<FatbinWrapper*>(wrapper)->data));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  auto* module = reinterpret_cast<Module*>(handle);
  auto it = module->kernels.find(name);
  if (it == module->kernels.end()) {
    fprintf(stderr, "ptxrun: no kernel %s\n", name);
    return;
  }
  functions()[host] = &it->second;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
int __cudaGetKernel(const void** kernel, const void* host) {
  *kernel = host;
  return 0;
}
int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared, void*) {
  return launch(kernel, grid, block, args, shared);
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  pushed_grid = grid;
  pushed_block = block;
  pushed_shared = shared;
  pushed_stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = pushed_grid;
  *block = pushed_block;
  *shared = pushed_shared;
  *stream = pushed_stream;
  return 0;
}
int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void*) {
  return launch(function, grid, block, args, shared);
}
struct LaunchConfig {
  Dim3 grid, block;
  size_t shared;
  void* stream;
  void* attributes;
  unsigned count;
};
int cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** args) {
  if (config->count != 0) return kInvalidConfiguration;
  return launch(function, config->grid, config->block, args, config->shared);
}
int cudaMemsetAsync(void* memory, int value, size_t count, void*) {
  Allocation* a = find_allocation(reinterpret_cast<u64>(memory));
  if (a == nullptr || reinterpret_cast<u64>(memory) - a->base + count > a->size) {
    errors.push_back("ptxrun: cudaMemsetAsync outside known memory");
    fprintf(stderr, "%s\n", errors.back().c_str());
    return 1;
  }
  memset(memory, value, count);
  if (!a->undefined.empty()) memset(a->undefined.data() + (reinterpret_cast<u64>(memory) - a->base), 0, count);
  return 0;
}
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
const char* cudaGetErrorString(int) { return "ptxrun"; }

}  // extern "C"