// A fake CUDA driver library for tests. Device memory is host memory, streams run their work
// immediately, and kernels are those of `kv.cu`, compiled for the CPU. Every call that needs
// a context checks that one is current, and calls refuse some arguments that a real driver refuses.
//
// `fake_break` breaks a part of the library, such as `NO_PINNING`: functions that use the part then
// fail, or report a driver or a device that cannot be used.

#include <atomic>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "../../kernels/emulated.cpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

static thread_local std::vector<void *> contexts;
static char context;
static int retained = 0;
static int modules = 0;
static int streams = 0;
static int events = 0;
static std::map<u64, size_t> allocations;
static std::map<u64, size_t> pinned;
// Number of further moves that succeed, after which the device fails; -1 for no limit.
static long moves_left = -1;
static int failure = 0;
static int batches = 0;
// The broken part (see `fake_break`). The string is never freed: another thread may read it.
static std::atomic<const char *> broken{""};

static bool is_broken(const char *part) { return !strcmp(broken, part); }

enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, BAD_PTX = 218,
       NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, REGISTERED = 712, REFUSED = 304,
       UNKNOWN = 999 };

static int ready() {
  if (contexts.empty() || contexts.back() != &context) return NO_CONTEXT;
  return failure;
}

#define NEED_CONTEXT if (int code = ready()) return code

static int begin_move() {
  NEED_CONTEXT;
  if (moves_left == 0) failure = ILLEGAL_ADDRESS;
  if (moves_left > 0) moves_left--;
  return failure;
}

EXPORT void fake_fail_after(long moves) { moves_left = moves; }
EXPORT void fake_break(const char *part) { broken = strdup(part); }
EXPORT int fake_count(const char *what) {
  const std::string name = what;
  if (name == "retained") return retained;
  if (name == "modules") return modules;
  if (name == "streams") return streams;
  if (name == "events") return events;
  if (name == "allocations") return static_cast<int>(allocations.size());
  if (name == "pinned") return static_cast<int>(pinned.size());
  if (name == "batches") return batches;
  return -1;
}

EXPORT int cuInit(u32 flags) { return flags ? INVALID : SUCCESS; }
EXPORT int cuDriverGetVersion(int *version) {
  *version = is_broken("OLD") ? 11040 : 12080;
  return SUCCESS;
}
EXPORT int cuGetErrorName(int code, const char **name) {
  if (code == ILLEGAL_ADDRESS) *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
  else if (code == REFUSED) *name = "CUDA_ERROR_OPERATING_SYSTEM";
  else if (code == BAD_PTX) *name = "CUDA_ERROR_INVALID_PTX";
  else return INVALID;
  return SUCCESS;
}
EXPORT int cuDeviceGetCount(int *count) {
  *count = is_broken("NO_DEVICE") ? 0 : 1;
  return SUCCESS;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
  *device = 7;
  return ordinal == 0 ? SUCCESS : INVALID;
}
EXPORT int cuDeviceGetName(char *name, int length, int device) {
  if (device != 7 || length < 8) return INVALID;
  strcpy(name, "Fake");
  return SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int *value, u32 attribute, int device) {
  *value = is_broken("NO_MAPPING") ? 0 : 1;
  return device == 7 && attribute == 19 ? SUCCESS : INVALID;
}
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
  if (device != 7) return INVALID;
  retained++;
  *out = &context;
  return SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  if (device != 7 || retained == 0) return INVALID;
  retained--;
  return SUCCESS;
}
EXPORT int cuCtxPushCurrent_v2(void *pushed) {
  contexts.push_back(pushed);
  return pushed == &context && retained ? SUCCESS : INVALID;
}
EXPORT int cuCtxPopCurrent_v2(void **popped) {
  if (contexts.empty()) return NO_CONTEXT;
  *popped = contexts.back();
  contexts.pop_back();
  return SUCCESS;
}
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  NEED_CONTEXT;
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}
EXPORT int cuModuleLoadDataEx(void **module, const char *image, u32 count, u32 *options,
                              void **values) {
  NEED_CONTEXT;
  if (count != 2 || options[0] != 5 || options[1] != 6) return INVALID;
  char *log = static_cast<char *>(values[0]);
  const size_t length = reinterpret_cast<size_t>(values[1]);
  if (is_broken("NO_MODULE")) {
    strncpy(log, "ptxas fatal: unsupported .version 8.4", length);
    return BAD_PTX;
  }
  // The kernels must be PTX 8.4: drivers of CUDA 12.4 refuse a newer version.
  if (!strstr(image, ".version 8.4") || !log || !length) return BAD_PTX;
  modules++;
  *module = &modules;
  return SUCCESS;
}
EXPORT int cuModuleUnload(void *module) {
  NEED_CONTEXT;
  if (module != &modules) return INVALID;
  modules--;
  return SUCCESS;
}
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
  static const char *const names[] = {
      "kv_scatter_16", "kv_scatter_8", "kv_scatter_4", "kv_scatter_1",
      "kv_gather_16",  "kv_gather_8",  "kv_gather_4",  "kv_gather_1",
  };
  NEED_CONTEXT;
  if (module != &modules) return INVALID;
  for (size_t i = 0; i < 8; i++) {
    if (!strcmp(name, names[i])) {
      *function = reinterpret_cast<void *>(100 + i);
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}
EXPORT int cuMemHostRegister_v2(void *base, size_t bytes, u32 flags) {
  NEED_CONTEXT;
  if (is_broken("NO_PINNING")) return REFUSED;
  if (flags != 3) return INVALID;
  if (!pinned.emplace(reinterpret_cast<u64>(base), bytes).second) return REGISTERED;
  return SUCCESS;
}
EXPORT int cuMemHostUnregister(void *base) {
  NEED_CONTEXT;
  return pinned.erase(reinterpret_cast<u64>(base)) ? SUCCESS : INVALID;
}
EXPORT int cuMemHostGetDevicePointer_v2(u64 *address, void *base, u32 flags) {
  NEED_CONTEXT;
  *address = reinterpret_cast<u64>(base);
  return flags == 0 && pinned.count(*address) ? SUCCESS : INVALID;
}
EXPORT int cuMemAlloc_v2(u64 *address, size_t bytes) {
  NEED_CONTEXT;
  if (bytes > (1ull << 40)) return OUT_OF_MEMORY;
  *address = reinterpret_cast<u64>(aligned_alloc(256, (bytes + 255) / 256 * 256));
  allocations[*address] = bytes;
  return SUCCESS;
}
EXPORT int cuMemFree_v2(u64 address) {
  NEED_CONTEXT;
  if (!allocations.erase(address)) return INVALID;
  free(reinterpret_cast<void *>(address));
  return SUCCESS;
}
EXPORT int cuMemGetAddressRange_v2(u64 *base, size_t *bytes, u64 address) {
  NEED_CONTEXT;
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return NOT_FOUND;
  --found;
  if (address >= found->first + found->second) return NOT_FOUND;
  *base = found->first;
  *bytes = found->second;
  return SUCCESS;
}
EXPORT int cuMemcpyAsync(u64 to, u64 from, size_t bytes, void *stream) {
  if (!stream) return INVALID;
  if (int code = begin_move()) return code;
  memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
  return SUCCESS;
}
struct Location {
  u32 type;
  int id;
};
struct Attributes {
  u32 order;
  Location source, target;
  u32 flags;
};
EXPORT int cuMemcpyBatchAsync(u64 *to, u64 *from, size_t *bytes, size_t count, Attributes *attributes,
                              size_t *firsts, size_t attribute_count, size_t *failed, void *stream) {
  if (!stream || !count || attribute_count != 1 || firsts[0] != 0) return INVALID;
  if (attributes->order != 1 || attributes->flags > 1) return INVALID;
  if (int code = begin_move()) {
    *failed = 0;
    return code;
  }
  for (size_t i = 0; i < count; i++) {
    memcpy(reinterpret_cast<void *>(to[i]), reinterpret_cast<void *>(from[i]), bytes[i]);
  }
  batches++;
  return SUCCESS;
}
EXPORT int cuStreamCreateWithPriority(void **stream, u32 flags, int priority) {
  NEED_CONTEXT;
  if (flags != 1 || (priority != 0 && priority != -5)) return INVALID;
  streams++;
  *stream = malloc(1);
  return SUCCESS;
}
EXPORT int cuStreamDestroy_v2(void *stream) {
  NEED_CONTEXT;
  streams--;
  free(stream);
  return SUCCESS;
}
EXPORT int cuStreamWaitEvent(void *stream, void *event, u32 flags) {
  NEED_CONTEXT;
  return stream && event && flags == 0 ? SUCCESS : INVALID;
}
// An event is one byte. A record sets the byte, and the next query clears it, so that an event is
// complete from the second query on.
EXPORT int cuEventCreate(void **event, u32 flags) {
  NEED_CONTEXT;
  if (flags != 2) return INVALID;
  events++;
  *event = calloc(1, 1);
  return SUCCESS;
}
EXPORT int cuEventDestroy_v2(void *event) {
  NEED_CONTEXT;
  events--;
  free(event);
  return SUCCESS;
}
EXPORT int cuEventRecord(void *event, void *stream) {
  NEED_CONTEXT;
  if (!stream) return INVALID;
  if (is_broken("NO_RECORD")) return OUT_OF_MEMORY;
  if (is_broken("NO_EVENTS")) return UNKNOWN;
  // If the broken part is "RECORD N", `cuEventRecord` fails with code N.
  const char *part = broken;
  if (!strncmp(part, "RECORD ", 7)) return atoi(part + 7);
  *static_cast<char *>(event) = 1;
  return SUCCESS;
}
EXPORT int cuEventQuery(void *event) {
  NEED_CONTEXT;
  if (is_broken("NO_EVENTS")) return UNKNOWN;
  char *pending = static_cast<char *>(event);
  if (!*pending) return SUCCESS;
  *pending = 0;
  return NOT_READY;
}
EXPORT int cuLaunchKernel(void *function, u32 x, u32 y, u32 z, u32 threads, u32 threads_y,
                          u32 threads_z, u32 shared, void *stream, void **arguments, void **extra) {
  if (!stream || !x || y != 1 || z != 1 || threads != 1024 || threads_y != 1 || threads_z != 1)
    return INVALID;
  if (shared || extra) return INVALID;
  if (int code = begin_move()) return code;
  ritornello_emulate_kernel(
      static_cast<u32>(reinterpret_cast<size_t>(function) - 100), x,
      *static_cast<const Span **>(arguments[0]), *static_cast<u32 *>(arguments[1]),
      *static_cast<u32 *>(arguments[2]), *static_cast<const Move **>(arguments[3]),
      *static_cast<u32 *>(arguments[4]), *static_cast<char **>(arguments[5]));
  return SUCCESS;
}
