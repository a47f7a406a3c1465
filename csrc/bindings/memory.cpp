// Memory for large results on the CPU: gradients of the logits, and mapped probabilities.
//
// The system finds and clears a page when it is first written. For a gradient of tens of megabytes that takes longer
// than computing it, and in a training loop it would happen in every step: the step frees the gradient, the C library
// gives the pages back, and the next step asks for as many again.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/common.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace focalkern::bindings {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSmallestKept = kMiB / 4;  // the C library keeps anything smaller by itself
constexpr size_t kMostBlocks = 4;           // a model with several heads has as many gradients at a time
constexpr size_t kDefaultLimit = 256 * kMiB;

struct Block {
  std::unique_ptr<void, decltype(&c10::free_cpu)> memory{nullptr, &c10::free_cpu};
  size_t bytes = 0;
};

// Call it before the block is first written.
void prefer_huge_pages(const Block& block) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  // Blocks of this size never come from malloc's heap, where pages are often present already and the hint would split
  // it.
  constexpr size_t kOwnMapping = 32 * kMiB;
  if (block.bytes < kOwnMapping) return;
  const auto begin = reinterpret_cast<uintptr_t>(block.memory.get());
  const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (begin + block.bytes) & ~(kHugePage - 1);
  // A hint: if the system refuses it, nothing changes.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

size_t limit_from_environment() {
  const char* value = std::getenv("FOCALKERN_CACHE_MIB");
  if (value == nullptr || value[0] == '\0') return kDefaultLimit;
  char* end = nullptr;
  const long long mib = std::strtoll(value, &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && mib >= 0 && mib <= (int64_t{1} << 32),
                    "FOCALKERN_CACHE_MIB must be a whole number of MiB, 0 to 4294967296, got ", value);
  return static_cast<size_t>(mib) * kMiB;
}

// Keeps the blocks of freed results for reuse, up to a limit. A profiler sees every result as a new allocation.
class ResultAllocator final : public c10::Allocator {
 public:
  static ResultAllocator& instance() {
    static auto& allocator = *new ResultAllocator;  // never destroyed: tensors may outlive any order of destruction
    return allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallestKept) return c10::GetCPUAllocator()->allocate(bytes);
    auto block = std::make_unique<Block>(take(bytes));
    if (!block->memory) {
      block->memory.reset(c10::alloc_cpu(bytes));
      block->bytes = bytes;
      prefer_huge_pages(*block);
    }
    void* data = block->memory.get();
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, block.release(), &release, c10::Device(c10::kCPU)};
  }

  void empty() {
    Blocks freed;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < kept_.size(); ++i) freed[i] = std::move(kept_[i]);
    kept_.clear();
    kept_bytes_ = 0;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  // Freed after the lock is released.
  using Blocks = std::array<Block, kMostBlocks>;

  ResultAllocator() : limit_(limit_from_environment()) {
    kept_.reserve(kMostBlocks + 1);  // no allocation happens while a block is freed
#if defined(__unix__) || defined(__APPLE__)
    // A forked process must not inherit a lock held by a thread that it does not have.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
#endif
  }

  // The newest block that is large enough and not much too large.
  Block take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto block = kept_.rbegin(); block != kept_.rend(); ++block) {
      if (block->bytes < bytes || block->bytes - bytes > bytes / 4) continue;
      Block found = std::move(*block);
      kept_bytes_ -= found.bytes;
      kept_.erase(std::next(block).base());
      return found;
    }
    return {};
  }

  void keep(Block block) {
    if (block.bytes > limit_) return;
    Blocks freed;
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_bytes_ += block.bytes;
    kept_.push_back(std::move(block));
    for (size_t i = 0; kept_bytes_ > limit_ || kept_.size() > kMostBlocks; ++i) {
      freed[i] = std::move(kept_.front());
      kept_bytes_ -= freed[i].bytes;
      kept_.erase(kept_.begin());
    }
  }

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    c10::profiledCPUMemoryReporter().Delete(block->memory.get());
    instance().keep(std::move(*block));
  }

  const size_t limit_;
  std::mutex mutex_;
  std::vector<Block> kept_;  // the newest last
  size_t kept_bytes_ = 0;
};

}  // namespace

Tensor empty_result_like(const Tensor& tensor, at::ScalarType dtype) {
  const auto options = tensor.options().dtype(dtype);
  const size_t bytes = tensor.numel() * c10::elementSize(dtype);
  if (!tensor.is_cpu() || bytes < kSmallestKept) return at::empty_like(tensor, options);
  const Tensor layout = at::empty_like(tensor, options.device(at::kMeta));
  return Tensor(at::detail::empty_strided_generic(layout.sizes(), layout.strides(), &ResultAllocator::instance(),
                                                  c10::DispatchKeySet(c10::DispatchKey::CPU), dtype));
}

void register_memory(pybind11::module_& module) {
  module.def(
      "empty_cache", [] { ResultAllocator::instance().empty(); }, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
