// Whether an eager entry may call a kernel without torch's dispatcher.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace focalkern::bindings {

// Whether the dispatcher would only choose the kernel of a device for tensors with these keys: one device, no tensor
// subclass, no mode, no profiler. The caller handles autograd and autocast.
inline bool only_chooses_a_kernel(c10::DispatchKeySet keys) {
  using c10::DispatchKeySet;
  constexpr auto passed = c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                          DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  keys = ((keys | local.included_) - local.excluded_) - passed;
  bool has_kernel = keys == DispatchKeySet(c10::DispatchKey::CPU);
#ifdef FOCALKERN_WITH_CUDA
  has_kernel = has_kernel || keys == DispatchKeySet(c10::DispatchKey::CUDA);
#endif
  return has_kernel && !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

}  // namespace focalkern::bindings
