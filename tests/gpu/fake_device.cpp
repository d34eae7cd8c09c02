// A device "fake" for torch, with memory, streams and events that follow CUDA's rules on the host.
//
// Work on a stream is done as late as these rules permit: when the host waits for it, or when other work that is done
// waits for it. So a result that is read without a wait is wrong each time. Memory of the device cannot be read or
// written by the host, and has NaN in it as soon as it is freed.
// The headers of the operators that are used: all of them take twice as long to compile.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

using Key = std::pair<DeviceIndex, StreamId>;
Key key(const Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Work {
    std::function<void()> run;
    std::shared_ptr<void> held;
};

struct Mark {
    Key stream;
    bool reached = false;
};

struct Block {
    size_t bytes;
    Key stream;
    std::set<Key> users;
};

// All that the device has. Its lock may be taken again by the same thread.
struct Machine {
    std::recursive_mutex lock;
    std::map<Key, std::deque<Work>> streams;
    std::map<char*, Block> blocks;                      // in use
    std::multimap<std::pair<Key, size_t>, char*> free;  // for the stream that had them
    std::map<const void*, size_t> pinned;
    std::string failure;
    StreamId next = 1;
    int64_t stream_syncs = 0, device_syncs = 0, pageable = 0;
};
Machine& machine() {
    static Machine* all = new Machine;  // never destroyed: other threads may outlive main
    return *all;
}
using Lock = std::unique_lock<std::recursive_mutex>;

thread_local DeviceIndex current = 0;
thread_local std::map<DeviceIndex, StreamId> current_stream;
thread_local bool as_kernel = false;

Key here(DeviceIndex index) { return {index, current_stream[index]}; }

void put(Key stream, std::function<void()> run, std::shared_ptr<void> held = nullptr) {
    Lock lock(machine().lock);
    machine().streams[stream].push_back({std::move(run), std::move(held)});
}

// Do the work of a stream: until a mark is reached, or all of it.
void drain(Key stream, const Mark* until = nullptr) {
    std::vector<Work> done;  // outlives the lock: what it holds may need Python's lock to be destroyed
    Lock lock(machine().lock);
    auto& queue = machine().streams[stream];
    while (!queue.empty() && !(until && until->reached)) {
        done.push_back(std::move(queue.front()));
        queue.pop_front();
        if (machine().failure.empty()) done.back().run();
    }
    TORCH_CHECK(machine().failure.empty(), "fake device: ", machine().failure);
}

std::shared_ptr<Mark> record(Key stream) {
    auto mark = std::make_shared<Mark>(Mark{stream});
    put(stream, [mark] { mark->reached = true; });
    return mark;
}

void wait_for(Key stream, std::shared_ptr<Mark> mark) {
    if (mark->stream != stream)
        put(stream, [mark] { drain(mark->stream, mark.get()); });
}

void synchronize(Key stream) {
    ++machine().stream_syncs;
    drain(stream);
}

// -- memory -----------------------------------------------------------------------------------
size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096; }

char* block_of(const void* data) {
    auto& blocks = machine().blocks;
    auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    return found == blocks.begin() ? nullptr : std::prev(found)->first;
}

// Opens the memory of a page range for the time of a copy.
struct Opened {
    char* data;
    size_t bytes;
    Opened(void* begin, size_t length) {
        auto start = reinterpret_cast<size_t>(begin) / 4096 * 4096;
        data = reinterpret_cast<char*>(start);
        bytes = rounded(reinterpret_cast<size_t>(begin) + length - start);
        mprotect(data, bytes, PROT_READ | PROT_WRITE);
    }
    ~Opened() { mprotect(data, bytes, PROT_NONE); }
};

void poison(char* data, size_t bytes) {
    Opened opened(data, bytes);
    std::memset(data, 0xff, bytes);
}

void give_back(void* data) {
    if (data == nullptr) return;
    Lock lock(machine().lock);
    auto found = machine().blocks.find(static_cast<char*>(data));
    auto [start, block] = *found;
    machine().blocks.erase(found);
    for (const Key& user : block.users) wait_for(block.stream, record(user));
    auto bytes = block.bytes;
    if (machine().streams[block.stream].empty()) poison(start, bytes);
    else put(block.stream, [start = start, bytes] { poison(start, bytes); });
    machine().free.emplace(std::pair{block.stream, bytes}, start);
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        Lock lock(machine().lock);
        const Key stream = here(current);
        const size_t size = rounded(bytes);
        char* data;
        // What was freed last: earlier work may use it still.
        auto [first, end] = machine().free.equal_range({stream, size});
        if (first != end) {
            data = (--end)->second;
            machine().free.erase(end);
        } else {
            data = static_cast<char*>(mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            TORCH_CHECK(data != MAP_FAILED, "fake device: out of memory");
        }
        machine().blocks[data] = {size, stream, {}};
        return {data, data, &give_back, Device(kFake, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "fake device: no copy_data"); }
};
Memory memory;
REGISTER_ALLOCATOR(kFake, &memory)

struct Pinned final : c10::Allocator {
    static void release(void* data) {
        Lock lock(machine().lock);
        // In a destructor, so it ends the process, as torch's does on a GPU.
        TORCH_CHECK(machine().failure.empty(), "fake device: ", machine().failure);
        machine().pinned.erase(data);
        std::free(data);
    }
    c10::DataPtr allocate(size_t bytes) override {
        Lock lock(machine().lock);
        void* data = std::malloc(std::max<size_t>(bytes, 1));
        machine().pinned[data] = std::max<size_t>(bytes, 1);
        return {data, data, &release, c10::DeviceType::CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
Pinned pinned;

bool is_pinned(const void* data) {
    Lock lock(machine().lock);
    auto found = machine().pinned.upper_bound(data);
    if (found == machine().pinned.begin()) return false;
    --found;
    return static_cast<const char*>(data) < static_cast<const char*>(found->first) + found->second;
}

// -- torch's interfaces -------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
    using Event = std::shared_ptr<Mark>;
    c10::DeviceType type() const override { return kFake; }
    Device exchangeDevice(Device device) const override {
        Device old(kFake, current);
        if (device.index() >= 0) current = device.index();
        return old;
    }
    Device getDevice() const override { return {kFake, current}; }
    void setDevice(Device device) const override { exchangeDevice(device); }
    void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
    Stream made(DeviceIndex index, StreamId id) const { return Stream(Stream::UNSAFE, Device(kFake, index), id); }
    Stream getStream(Device device) const override {
        DeviceIndex index = device.index() < 0 ? current : device.index();
        return made(index, current_stream[index]);
    }
    Stream getDefaultStream(Device device) const override { return made(std::max<int>(device.index(), 0), 0); }
    Stream getNewStream(Device device, int) const override {
        Lock lock(machine().lock);
        return made(device.index() < 0 ? current : device.index(), machine().next++);
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
    Stream exchangeStream(Stream stream) const override {
        Stream old = getStream(stream.device());
        current_stream[stream.device_index()] = stream.id();
        return old;
    }
    void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event;
        *static_cast<Event*>(*event) = ::record(key(stream));
    }
    void block(void* event, const Stream& stream) const override {
        if (event) wait_for(key(stream), *static_cast<Event*>(event));
    }
    bool queryEvent(void* event) const override { return !event || (*static_cast<Event*>(event))->reached; }
    void synchronizeEvent(void* event) const override {
        ++machine().stream_syncs;
        auto mark = *static_cast<Event*>(event);
        drain(mark->stream, mark.get());
    }
    void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    bool queryStream(const Stream& stream) const override {
        Lock lock(machine().lock);
        return machine().streams[key(stream)].empty();
    }
    void synchronizeStream(const Stream& stream) const override { synchronize(key(stream)); }
    void synchronizeDevice(DeviceIndex index) const override {
        ++machine().device_syncs;
        std::vector<Key> all;
        {
            Lock lock(machine().lock);
            for (auto& [stream, work] : machine().streams)
                if (stream.first == index) all.push_back(stream);
        }
        for (auto& stream : all) drain(stream);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
        Lock lock(machine().lock);
        auto start = block_of(data.get());
        if (start && machine().blocks[start].stream != key(stream)) machine().blocks[start].users.insert(key(stream));
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex device) const override { current = device; }
    DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    Device getDeviceFromPtr(void*) const override { return {kFake, current}; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        auto* impl = storage.unsafeGetStorageImpl();
        TORCH_CHECK(impl->nbytes() == 0 || bytes == 0, "fake device: only from or to no bytes");
        c10::DeviceGuard guard(impl->device());
        auto old = impl->set_data_ptr(memory.allocate(bytes));
        impl->set_nbytes(bytes);
    }
};

// -- operators ----------------------------------------------------------------------------------
at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device && device->has_index() ? *device : Device(kFake, current));
    return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device && device->has_index() ? *device : Device(kFake, current));
    return at::detail::empty_strided_generic(sizes, strides, &memory,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// A tensor as it is when it is used: its memory, but not its hold on that memory.
struct View {
    void* data;
    size_t bytes;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    bool conj, neg, device;
    explicit View(const at::Tensor& t)
        : data(t.data_ptr()), bytes(0), sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()),
          conj(t.is_conj()), neg(t.is_neg()), device(!t.is_cpu()) {
        size_t last = t.numel() ? 1 : 0;
        for (int64_t i = 0; t.numel() && i < t.dim(); ++i) last += (sizes[i] - 1) * strides[i];
        bytes = last * t.element_size();
    }
    at::Tensor tensor() const {
        auto made = at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
        made._set_conj(conj);
        made._set_neg(neg);
        return made;
    }
};

void move(const View& from, const View& to) {
    std::optional<Opened> source, target;
    if (from.device && from.bytes) source.emplace(from.data, from.bytes);
    if (to.device && to.bytes) target.emplace(to.data, to.bytes);
    c10::InferenceMode inference(false);
    at::NoGradGuard no_grad;
    to.tensor().copy_(from.tensor());
}

// As torch does for GPUs, what comes to the host is conjugated and negated there: at once, also if it comes later.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    const Device device = source.is_cpu() ? target.device() : source.device();
    const Key stream = here(device.index());
    if (!source.is_cpu() && !target.is_cpu() && source.device() != target.device()) {
        const Key other = here(target.device().index());
        wait_for(stream, record(other));  // both streams, as for copies between GPUs
        put(stream, [from = View(source), to = View(target)] { move(from, to); });
        wait_for(other, record(stream));
        return target;
    }
    if (source.is_cpu()) {
        const bool paged = !is_pinned(source.data_ptr());
        auto held = std::make_shared<at::Tensor>(paged ? source.clone() : source.detach());
        if (paged && !as_kernel) ++machine().pageable;
        put(stream, [from = View(*held), to = View(target)] { move(from, to); }, held);
    } else {
        std::shared_ptr<void> held;
        if (target.is_cpu()) held = std::make_shared<c10::Storage>(target.storage());
        if (target.is_cpu() && !as_kernel && !is_pinned(target.data_ptr())) ++machine().pageable;
        View from(source), to(target);
        if (target.is_cpu()) to.conj = from.conj, to.neg = from.neg;
        put(stream, [from, to] { move(from, to); }, held);
        if (target.is_cpu() && as_kernel) drain(stream);
    }
    const bool crosses = source.is_cpu() || target.is_cpu();
    if (crosses && !non_blocking && !as_kernel) synchronize(stream);
    if (target.is_cpu() && source.is_conj() != target.is_conj()) target.conj_physical_();
    if (target.is_cpu() && source.is_neg() != target.is_neg()) target.neg_();
    return target;
}

// Torch's `resize_` takes memory from the allocator, which serves the current device: that of the tensor, so that the
// memory is freed, poisoned and reused in the order of the stream that has the tensor's work.
const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(tensor.device());
    return at::native::resize_(tensor, sizes, format);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    if (source.sizes() != target.sizes()) resize(target, source.sizes(), std::nullopt);
    return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
    auto here = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    copy_from(tensor, here, false);
    return here.item();
}

void record_stream(at::Tensor& tensor, Stream stream) {
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

bool pins(const at::Tensor& tensor, std::optional<Device>) { return is_pinned(tensor.data_ptr()); }

// Every other operator computes on copies in the host's memory, and writes its results on the current stream: late.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto outer = std::exchange(as_kernel, true);
    try {
        at::native::cpu_fallback(op, stack);
    } catch (...) {
        as_kernel = outer;
        throw;
    }
    as_kernel = outer;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Mixed precision changes no dtype here.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides,
                            std::optional<int64_t> offset) {
        return at::native::as_strided_tensorimpl(t, sizes, strides, offset);
    });
    m.impl("view", [](const at::Tensor& t, at::IntArrayRef sizes) { return at::native::view(t, sizes); });
    m.impl("_reshape_alias", [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
        return at::native::_reshape_alias(t, sizes, strides);
    });
    m.impl("resize_", &resize);
    m.impl("set_.source_Storage", [](at::Tensor& t, at::Storage source) -> at::Tensor& {
        return at::native::set_(t, source);
    });
    m.impl("set_.source_Storage_storage_offset",
           [](at::Tensor& t, at::Storage source, int64_t offset, at::IntArrayRef sizes,
              at::IntArrayRef strides) -> at::Tensor& {
               t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
               // Torch leaves the strides out where elements lie in order.
               const auto in_order = c10::contiguous_strides(sizes);
               t.unsafeGetTensorImpl()->set_sizes_and_strides(
                   sizes, strides.empty() ? at::IntArrayRef(in_order) : strides, offset);
               return t;
           });
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar);
    m.impl("record_stream", &record_stream);
    m.impl("is_pinned", &pins);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
}

// Copies read and write the bits of conjugated and negated views themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY(fake_device, m) {
    m.def("device_count", [] { return static_cast<int64_t>(kDevices); });
    // Waits for a stream, waits for the whole device, and copies from or to memory that is not pinned, until now.
    m.def("counts", [] {
        return std::vector<int64_t>{machine().stream_syncs, machine().device_syncs, machine().pageable};
    });
    // Work that fails, as a kernel whose assertion does; each later wait raises its error.
    m.def("fail", [](const at::Tensor& tensor, std::string why) {
        put(here(tensor.device().index()), [why] { machine().failure = why; });
    });
}

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

}  // namespace
