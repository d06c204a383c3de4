// A simulated accelerator: torch's device PrivateUse1 in memory of the host. See docs/design/simulated_device.md.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "order.h"
#include "pinned.h"
#include "queues.h"

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue;
using simulated::Clock, simulated::Order, simulated::Queues;

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;  // their default streams have the numbers 0 and 1
constexpr int FRESH = 0xff;

Order& order = *new Order;  // never destroyed: threads of streams may outlive everything
Queues& queues = *new Queues;
simulated::PinnedCopies& pinned_copies = *new simulated::PinnedCopies(order);
std::vector<DeviceIndex>& device_of_stream = *new std::vector<DeviceIndex>;
thread_local DeviceIndex current_device = 0;
thread_local int current_streams[DEVICES] = {0, 1};

int new_stream(DeviceIndex device) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  queues.add_stream();
  device_of_stream.push_back(device);
  return order.new_stream();
}
const bool HAS_DEFAULT_STREAMS = [] { return new_stream(0) == 0 && new_stream(1) == 1; }();

int here() { return current_streams[current_device]; }

// The host has waited for what a clock knows.
void host_follows(const Clock& clock) {
  order.host_follows(clock);
  pinned_copies.end(clock);
}
void synchronize(int stream) {
  queues.wait(stream);
  host_follows(order.clock_of(stream));
}

// ------------------------------------------------------------------ memory

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(SIM, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &release, device};
    void* data = order.allocate(nbytes, here());
    queues.put(here(), [=] { memset(data, FRESH, nbytes); });
    return {data, data, &release, device};
  }
  static void release(void* data) { order.release(data); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
Memory memory;
REGISTER_ALLOCATOR(SIM, &memory);

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = order.pin(nbytes);
    return {data, data, &release, Device(at::kCPU)};
  }
  static void release(void* data) { order.unpin(data); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
PinnedMemory pinned_memory;

// ------------------------------------------------------------------ streams and events

struct Event {
  Clock clock;
  int stream = 0;
  uint64_t count = 0;
  std::shared_ptr<double> ms = std::make_shared<double>();
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device getDevice() const override { return Device(SIM, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    return Device(SIM, std::exchange(current_device, device.index()));
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, Device(SIM, device_of_stream[id]), id); }
  static DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_device; }
  c10::Stream getStream(Device device) const noexcept override { return stream(current_streams[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(index(device)); }
  c10::Stream getNewStream(Device device, int) const override { return stream(new_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return stream(std::exchange(current_streams[index(to.device())], (int)to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return (void*)stream.id(); }
  bool queryStream(const c10::Stream& stream) const override {
    return queues.is_done((int)stream.id(), queues.count((int)stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize((int)stream.id()); }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (size_t id = 0; id < device_of_stream.size(); id++)
      if (device_of_stream[id] == device) queues.wait((int)id);
    order.host_follows_all();
    pinned_copies.end_all();
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    int stream = (int)on.id();
    if (*event == nullptr) *event = new Event;
    auto& made = *(Event*)*event;
    auto ms = std::make_shared<double>();
    queues.put(stream, [ms] { *ms = now_ms(); });
    made = {order.clock_of(stream), stream, queues.count(stream), ms};
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event == nullptr) return;
    auto& [clock, stream, count, ms] = *(Event*)event;
    order.follow((int)on.id(), clock);
    queues.put((int)on.id(), [stream = stream, count = count] { queues.wait(stream, count); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || queues.is_done(((Event*)event)->stream, ((Event*)event)->count);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    queues.wait(((Event*)event)->stream, ((Event*)event)->count);
    host_follows(((Event*)event)->clock);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return *((Event*)second)->ms - *((Event*)first)->ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    order.record_stream(data.get(), (int)stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void copy_bytes(void* to, const void* from, size_t nbytes) {
  order.access(from, nbytes, false, "copy of a storage", here());
  order.access(to, nbytes, true, "copy of a storage", here());
  queues.put(here(), [=] { memcpy(to, from, nbytes); });
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void*) const override { return Device(SIM, current_device); }
  bool isPinnedPtr(const void* data) const override { return order.is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto data = memory.allocate(nbytes);
    if (storage.nbytes() && nbytes) copy_bytes(data.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(data));
    const_cast<c10::Storage&>(storage).set_nbytes(nbytes);
  }
};
Hooks hooks;

// ------------------------------------------------------------------ tensors

bool is_simulated(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

size_t extent_nbytes(const Tensor& tensor) {
  int64_t last = tensor.numel() ? 1 : 0;
  for (int64_t i = 0; i < tensor.dim() && last; i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last * tensor.element_size();
}

// The functions of Python that this thread is in, if the environment asks for them.
std::string callers() {
  static const bool is_asked = getenv("SIMULATED_DEVICE_CALLERS") != nullptr;
  if (!is_asked) return "";
  py::gil_scoped_acquire with;
  auto stack = py::module_::import("traceback").attr("extract_stack")();
  std::string text;
  for (auto frame : stack)
    if (auto file = py::str(frame.attr("filename")).cast<std::string>(); file.find("site-packages") == std::string::npos)
      text += " < " + file.substr(file.rfind('/') + 1) + ":" + py::str(frame.attr("lineno")).cast<std::string>();
  return text;
}

void note(const Tensor& tensor, bool writes, const std::string& what, int stream) {
  if (tensor.defined() && tensor.layout() == at::kStrided) order.access(tensor.unsafeGetTensorImpl()->data(), extent_nbytes(tensor), writes, what + callers(), stream);
}

// The same memory as a tensor of the CPU, for whoever does the work of a stream. It does not keep the memory.
Tensor on_host(const Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  void* data = tensor.numel() ? tensor.unsafeGetTensorImpl()->mutable_data() : nullptr;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  Tensor alias = at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

// A result that the host has computed with work that is already done.
Tensor from_host(const Tensor& result, const std::string& what) {
  auto made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
  queues.wait(here());
  on_host(made).copy_(result);
  note(made, true, what, here());
  return made;
}

// As CUDA does: the host does not wait if the other memory is pinned, or is read and staged at once.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::DeviceGuard guard(is_simulated(to) ? to.device() : from.device());
  const Tensor& outside = is_simulated(to) ? from : to;
  bool is_inside = is_simulated(outside), is_pinned = !is_inside && order.is_pinned(outside.unsafeGetTensorImpl()->data());
  bool waits = !is_inside && (!non_blocking || (!is_pinned && is_simulated(from)));
  if (is_pinned) pinned_copies.end(outside);
  note(from, false, "copy", here());
  note(to, true, "copy", here());
  if (is_pinned && !waits && !queues.is_late()) {
    uint64_t time = order.time_of(here());
    if (is_simulated(from)) return pinned_copies.bring(on_host(from), to, here(), time), to;
    pinned_copies.take(from, here(), time);
  }
  Tensor source = is_inside || is_pinned || !is_simulated(to) || !queues.is_late() ? from : from.clone();
  queues.put(here(), [source = on_host(source), target = on_host(to)] { target.copy_(source); });
  if (waits) synchronize(here());
  return to;
}

at::Scalar item(const Tensor& tensor) {
  note(tensor, false, "item", here());
  synchronize(here());
  return on_host(tensor).item();
}

const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t nbytes = (implementation->numel() + implementation->storage_offset()) * implementation->itemsize();
  if (nbytes > implementation->storage().nbytes()) hooks.resizePrivateUse1Bytes(implementation->unsafe_storage(), nbytes);
  return tensor;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  const_cast<Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  order.record_stream(tensor.storage().data_ptr().get(), (int)stream.id());
}

Tensor view(const Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor as_strided(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Convolutions, which torch leaves to each device of somebody's own.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  for (auto& each : {input, weight, bias.value_or(Tensor())}) note(each, false, "convolution", here());
  queues.wait(here());
  auto on_host_bias = bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  auto result = at::convolution_symint(on_host(input), on_host(weight), on_host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return from_host(result, "convolution");
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  for (auto& each : {grad, input, weight}) note(each, false, "convolution_backward", here());
  queues.wait(here());
  c10::SymInt channels = grad.sym_size(1);
  auto results = at::convolution_backward_symint(on_host(grad), on_host(input), on_host(weight), c10::SymIntArrayRef(&channels, 1),
                                                 stride, padding, dilation, transposed, output_padding, groups, mask);
  auto back = [](const Tensor& result) { return result.defined() ? from_host(result, "convolution_backward") : result; };
  return {back(std::get<0>(results)), back(std::get<1>(results)), back(std::get<2>(results))};
}

Tensor& set_storage_at(Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) implementation->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else implementation->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}
Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  c10::SymInt numel = (int64_t)storage.nbytes() / tensor.element_size();
  return set_storage_at(tensor, std::move(storage), 0, {&numel, 1}, {});
}
Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_storage_at(tensor, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}

// ------------------------------------------------------------------ all other ops

// One call of an op whose tensors are on the device: the CPU's op on the same memory.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), name_(op.schema().name()), can_be_late_(queues.is_late()) {
    size_t count = op.schema().arguments().size();
    given_.assign(stack->end() - count, stack->end());
    torch::jit::drop(*stack, count);
    for (size_t i = 0; i < count; i++) inner_.push_back(argument(given_[i], op.schema().arguments()[i]));
    for (auto& result : op.schema().returns()) can_be_late_ &= result.alias_info() && result.alias_info()->isWrite();
  }

  void run() {
    if (can_be_late_) {
      queues.put(here(), [op = op_, inner = inner_]() mutable {
        at::AutoDispatchBelowADInplaceOrView below;
        op.callBoxed(&inner);
      });
      for (auto& result : op_.schema().returns()) stack_->push_back(argument_of(*result.alias_info()));
      return;
    }
    queues.wait(here());
    op_.callBoxed(&inner_);
    for (auto& [tensor, alias] : pairs_)
      if (!tensor.numel() && alias.sizes() != tensor.sizes()) fill(tensor, alias);
    bool has_value = false;
    size_t count = op_.schema().returns().size();
    for (size_t i = inner_.size() - count; i < inner_.size(); i++) {
      auto& value = inner_[i];
      if (value.isTensor()) {
        stack_->push_back(is_inside_ ? IValue(back(value.toTensor())) : value);
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) list.push_back(back(each));
        stack_->push_back(IValue(list));
      } else {
        has_value = true;  // a number for the host
        stack_->push_back(value);
      }
    }
    if (has_value) synchronize(here());
  }

 private:
  IValue argument(const IValue& value, const c10::Argument& schema) {
    bool writes = schema.alias_info() && schema.alias_info()->isWrite();
    if (value.isTensor()) return value.toTensor().defined() ? IValue(alias(value.toTensor(), writes)) : value;
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(alias(each, writes));
      return IValue(list);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector())
        list.push_back(each && each->defined() ? std::optional<Tensor>(alias(*each, writes)) : each);
      return IValue(list);
    }
    if (value.isDevice() && value.toDevice().type() == SIM) {
      is_inside_ = true;
      return IValue(Device(at::kCPU));
    }
    if (schema.type()->str().find("Generator") != std::string::npos) can_be_late_ = false;  // the host's, in its order
    return value;
  }

  Tensor alias(const Tensor& tensor, bool writes) {
    if (!is_simulated(tensor)) {
      can_be_late_ &= !writes;
      return tensor;
    }
    is_inside_ = true;
    if (writes && !tensor.numel()) {  // an output that the op gives its size
      can_be_late_ = false;
      pairs_.emplace_back(tensor, at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype())));
    } else {
      note(tensor, false, name_, here());
      if (writes) note(tensor, true, name_, here());
      pairs_.emplace_back(tensor, on_host(tensor));
    }
    return pairs_.back().second;
  }

  IValue argument_of(const c10::AliasInfo& result) {
    for (size_t i = 0; i < given_.size(); i++) {
      auto* info = op_.schema().arguments()[i].alias_info();
      if (info != nullptr && info->beforeSets() == result.beforeSets()) return given_[i];
    }
    throw std::logic_error(name_ + " returns none of its arguments");
  }

  void fill(const Tensor& tensor, const Tensor& with) {
    resize_(tensor, c10::fromIntArrayRefSlow(with.sizes()), {});
    queues.wait(here());
    on_host(tensor).copy_(with);
    note(tensor, true, name_, here());
  }

  // The tensor of the device for a result: an argument, a view of one, or a new one.
  Tensor back(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [tensor, alias] : pairs_)
      if (alias.is_same(result)) return tensor;
    for (auto& [tensor, alias] : pairs_) {
      const void* data = alias.storage().data();
      if (!result.numel() || data == nullptr || data != result.storage().data()) continue;
      TORCH_CHECK(alias.dtype() == result.dtype(), name_, " views another dtype, which the simulated device must be taught");
      return at::native::as_strided_tensorimpl(tensor, result.sizes(), result.strides(), tensor.storage_offset() + result.storage_offset());
    }
    return from_host(result, name_);
  }

  const c10::OperatorHandle op_;
  torch::jit::Stack* stack_;
  const std::string name_;
  bool can_be_late_, is_inside_ = false;
  std::vector<IValue> given_;
  torch::jit::Stack inner_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

void on_the_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::OptionalDeviceGuard guard;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    if (auto& value = (*stack)[i]; value.isTensor() && is_simulated(value.toTensor())) {
      guard.reset_device(value.toTensor().device());
      break;
    }
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize_);
  library.impl("record_stream", &record_stream);
  library.impl("view", &view);
  library.impl("view.dtype", &at::native::view_dtype);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &set_storage_at);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}
// a copy itself makes the conjugate or negative of what it reads
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

// Work of Python on a stream.
void launch(int stream, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes, const std::string& what, py::function work) {
  for (auto& tensor : reads) note(tensor, false, what, stream);
  for (auto& tensor : writes) note(tensor, true, what, stream);
  if (!queues.is_late()) {
    work();
    return;
  }
  std::shared_ptr<py::function> held(new py::function(std::move(work)), [](py::function* last) {
    py::gil_scoped_acquire with;
    delete last;
  });
  queues.put(stream, [held] {
    py::gil_scoped_acquire with;
    (*held)();
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.attr("DEVICES") = DEVICES;
  module.attr("DEVICE_TYPE") = (int)SIM;
  module.def("on_host", &on_host);
  module.def("launch", &launch);
  module.def("here", &here);
  module.def("set_here", [](int stream) { current_streams[device_of_stream[stream]] = stream; });
  module.def("host_access", [](const Tensor& tensor, bool writes, const std::string& what) { note(tensor, writes, what, -1); });
  module.def("current_device", [] { return (int)current_device; });
  module.def("set_device", [](int device) { current_device = (DeviceIndex)device; });
  module.def("synchronize", [](int device) { Guard().synchronizeDevice((DeviceIndex)device); });
  module.def("taken_nbytes", [] { return order.taken_nbytes(); });
  module.def("be_late", [](uint32_t seed, int delay_us) { queues.be_late(seed, delay_us); });
  module.def("races", [] { return order.races; });
  module.def("forget_races", [] { order.races.clear(); });
  module.def("counts", [] { return std::make_tuple(order.accesses, order.reused, device_of_stream.size()); });
}
