// The fibers of the shim, and their annotations for ThreadSanitizer. No sanitizer instruments these functions.
#include <dlfcn.h>

#include <set>

#include <cuda_runtime.h>

#define FK_UNSEEN __attribute__((no_sanitize_thread, no_sanitize_address, noinline))

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

// Saves the callee-saved registers on the stack and continues on another stack.
extern "C" void shim_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.globl shim_switch
shim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace shim {

Machine machine = {};

namespace {

constexpr size_t kStackBytes = 256 << 10;

// Annotations for ThreadSanitizer: addresses to release and to acquire.
char block_sync[2], warp_sync[2][kMaxThreads / kWarpSize], fence_sync, start_sync, end_sync;
void* scheduler_fiber;

FK_UNSEEN void yield(Wait wait) {
  Machine& m = machine;
  Fiber& fiber = m.fibers[m.current];
  fiber.wait = wait;
  __tsan_switch_to_fiber(scheduler_fiber, 1);
  shim_switch(&fiber.stack_pointer, m.scheduler);
}

FK_UNSEEN void fiber_main() {
  __tsan_acquire(&start_sync);
  machine.body(machine.context);
  __tsan_release(&end_sync);
  yield(Wait::kDone);
  fail("a finished thread was resumed");
}

FK_UNSEEN void release(int begin, int end, Wait wait) {
  for (int i = begin; i < end; ++i) {
    if (machine.fibers[i].wait != wait) return;
  }
  for (int i = begin; i < end; ++i) machine.fibers[i].wait = Wait::kNone;
}

FK_UNSEEN void start_fibers() {
  Machine& m = machine;
  static void* known[kMaxThreads];
  scheduler_fiber = __tsan_get_current_fiber();
  for (int i = 0; i < m.threads; ++i) {
    if (m.stacks[i] == nullptr) m.stacks[i] = static_cast<char*>(aligned_alloc(16, kStackBytes));
    if (known[i] == nullptr) known[i] = __tsan_create_fiber(0);
    void** top = reinterpret_cast<void**>(m.stacks[i] + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);  // the address that shim_switch returns to
    m.fibers[i] = Fiber{};
    m.fibers[i].stack_pointer = top - 6;
    m.fibers[i].sanitizer = known[i];
    m.fibers[i].wait = Wait::kNone;
  }
}

}  // namespace

FK_UNSEEN void fail(const char* what) {
  fprintf(stderr, "cuda shim: %s\n", what);
  abort();
}

FK_UNSEEN uint64_t random() {
  machine.seed = machine.seed * 6364136223846793005u + 1442695040888963407u;
  return machine.seed >> 33;
}
FK_UNSEEN unsigned thread_index() { return static_cast<unsigned>(machine.current); }
FK_UNSEEN unsigned block_index() { return machine.index.x; }
FK_UNSEEN int lane() { return machine.current % kWarpSize; }

FK_UNSEEN void sync_threads() {
  char* sync = &block_sync[machine.fibers[machine.current].barriers++ % 2];
  __tsan_release(sync);
  yield(Wait::kBlock);
  __tsan_acquire(sync);
}
FK_UNSEEN void sync_warp() {
  const int self = machine.current;
  char* sync = &warp_sync[machine.fibers[self].warp_barriers++ % 2][self / kWarpSize];
  __tsan_release(sync);
  yield(Wait::kWarp);
  __tsan_acquire(sync);
}
FK_UNSEEN void fence() {
  __tsan_acquire(&fence_sync);
  __tsan_release(&fence_sync);
}

FK_UNSEEN uint64_t shuffle_bits(unsigned mask, uint64_t value, int source_lane) {
  if (mask != 0xffffffffu) fail("only full-warp shuffles are known");
  Machine& m = machine;
  const int self = m.current;
  // Two sets of slots in turn: a fast lane may offer its next value before a slow one has read the previous one.
  uint64_t* slots = m.slots + (m.fibers[self].shuffles++ % 2) * static_cast<unsigned>(m.threads);
  slots[self] = value;
  yield(Wait::kShuffle);
  return slots[self / kWarpSize * kWarpSize + source_lane];
}

FK_UNSEEN void run_block() {
  Machine& m = machine;
  m.threads = static_cast<int>(m.block.x);
  for (char* at = __start_shim_shared; at != __stop_shim_shared; ++at) *at = static_cast<char>(m.poison);
  start_fibers();
  __tsan_acquire(&end_sync);  // blocks run one after the other: ptxrun checks races between them
  __tsan_release(&start_sync);
  static int order[kMaxThreads];
  for (int i = 0; i < m.threads; ++i) order[i] = i;
  int done = 0;
  while (done < m.threads) {
    for (int i = m.threads - 1; i > 0; --i) {
      const int j = static_cast<int>(random() % static_cast<uint64_t>(i + 1));
      const int other = order[j];
      order[j] = order[i];
      order[i] = other;
    }
    int ran = 0;
    for (int k = 0; k < m.threads; ++k) {
      Fiber& fiber = m.fibers[order[k]];
      if (fiber.wait != Wait::kNone) continue;
      ++ran;
      m.current = order[k];
      __tsan_switch_to_fiber(fiber.sanitizer, 1);
      shim_switch(&m.scheduler, fiber.stack_pointer);
      done += fiber.wait == Wait::kDone;
    }
    if (ran == 0) fail("deadlock: threads wait at different barriers, or some have left");
    for (int first = 0; first < m.threads; first += kWarpSize) {
      const int last = first + kWarpSize < m.threads ? first + kWarpSize : m.threads;
      release(first, last, Wait::kWarp);
      release(first, last, Wait::kShuffle);
    }
    release(0, m.threads, Wait::kBlock);
  }
}

FK_UNSEEN void launch_done() { __tsan_acquire(&end_sync); }

namespace {
std::set<const void*>& launched_kernels() {
  static std::set<const void*> kernels;
  return kernels;
}
}  // namespace
FK_UNSEEN void launched(const void* kernel) { launched_kernels().insert(kernel); }

}  // namespace shim

// For cases that set the emulator.
extern "C" void ptxrun_set(const char*, int64_t) {}

// Appends a line to a file: a name, and the kernels launched since the last call, as addresses in the library.
extern "C" void shim_write_launched(const char* path, const char* name) {
  FILE* file = fopen(path, "a");
  if (file == nullptr) return;
  Dl_info library;
  fprintf(file, "%s", name);
  for (const void* kernel : shim::launched_kernels()) {
    if (dladdr(kernel, &library) == 0) continue;
    const auto at = static_cast<const char*>(kernel) - static_cast<const char*>(library.dli_fbase);
    fprintf(file, "\t%tx", at);
  }
  fprintf(file, "\n");
  fclose(file);
  shim::launched_kernels().clear();
}
