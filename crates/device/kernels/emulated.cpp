// Compiles `kv.cu` for the CPU, for the emulated device and tests. One call of a kernel runs one
// warp, whose lanes are loops.

#include <cstring>

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads, blocks)
#define LANES(lane) for (unsigned lane = 0; lane < 32; lane++)
#define AHEAD(words) 1
#define RESTRICT __restrict
#define WARP warp
#define WARPS warps

static thread_local unsigned warp;
static thread_local unsigned warps;

#include "kv.cu"

using Kernel = void (*)(const Span *, u32, u32, const Move *, u32, char *);

// Runs kernel `number` with `grid` blocks of 1,024 threads, warp by warp. `number` is the position
// of the kernel's name in `Kernel::NAMES` (`src/layout.rs`).
extern "C" void ritornello_emulate_kernel(u32 number, u32 grid, const Span *spans, u32 count,
                                          u32 units, const Move *moves, u32 pages, char *arena) {
  static constexpr Kernel kernels[] = {
      kv_scatter_16, kv_scatter_8, kv_scatter_4, kv_scatter_1,
      kv_gather_16,  kv_gather_8,  kv_gather_4,  kv_gather_1,
  };
  warps = grid * 32;
  for (warp = 0; warp < warps; warp++) {
    kernels[number](spans, count, units, moves, pages, arena);
  }
}
