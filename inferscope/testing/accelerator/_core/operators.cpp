// Operators: allocation, views and copies are ours; everything else is computed by torch's CPU kernels and charged to the current stream.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "simulator.h"

namespace sim {
int stream_now(int device);
}

namespace {

// Inside the fallback torch moves tensors to the host and back: that is our make-believe, not a copy of the program.
thread_local int quiet = 0;

struct Quiet {
  Quiet() { ++quiet; }
  ~Quiet() { --quiet; }
};

c10::Allocator* allocator() { return c10::GetAllocator(c10::DeviceType::PrivateUse1); }

const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, c10::dtype_or_default(dtype));
}

// The same memory as a host tensor.
at::Tensor host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU));
}

bool pinned(const at::Tensor& tensor) { return sim::pinned(tensor.data_ptr()); }

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  if (quiet > 0) {
    host(to).copy_(host(self));
    return to;
  }
  const int device = to.is_privateuseone() ? to.device().index() : self.device().index();
  const sim::Kind kind = !self.is_privateuseone() ? sim::kH2D : !to.is_privateuseone() ? sim::kD2H : sim::kD2D;
  const bool pageable = (kind == sim::kH2D && !pinned(self)) || (kind == sim::kD2H && !pinned(to));
  const sim::Operation issued =
      sim::copy(device, sim::stream_now(device), kind, static_cast<int64_t>(to.nbytes()), pageable, non_blocking);
  host(to).copy_(host(self));
  sim::finish(issued);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  sim::scalar(self.device().index(), sim::stream_now(self.device().index()), static_cast<int64_t>(self.itemsize()));
  return host(self).item();
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

int device_of(const torch::jit::Stack& stack, size_t arguments) {
  for (size_t index = stack.size() - arguments; index < stack.size(); ++index) {
    const c10::IValue& value = stack[index];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) return value.toTensor().device().index();
  }
  return -1;
}

// Operators whose result has a size, or is a value, that the host waits for; torch takes a mask in `x[mask]` apart with `nonzero`.
bool reads_back(const std::string& name, const torch::jit::Stack& stack) {
  static const auto& names = *new std::unordered_set<std::string>{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
                                                                  "aten::bincount", "aten::repeat_interleave", "aten::equal"};
  if (name == "aten::repeat_interleave" && stack.back().isInt()) return false;  // its `output_size` was given
  return names.count(name) != 0;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const int device = device_of(*stack, op.schema().arguments().size());
  if (device >= 0) {
    sim::launch(device, sim::stream_now(device), op.schema().name());
    if (reads_back(op.schema().name(), *stack)) sim::scalar(device, sim::stream_now(device), 8);
  }
  const Quiet inside;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::cpu::as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}
