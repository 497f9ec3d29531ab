// Moves pages between blocks of an engine's KV memory (the pool) and contiguous pages in pinned
// host memory (the slots).
//
// `compile.py` compiles this file to `kv.ptx`, which is committed. `emulated.cpp` compiles it with
// a C++ compiler, so that tests run the same code without a GPU.
//
// A span is one tensor of the pool, such as the K and V of one layer: block `b` has its bytes at
// `base + b * stride`. In a slot the bytes of all spans follow each other. The bytes of each span
// are split into units of at most 2 KiB. One warp moves a unit: each lane loads 64 bytes before it
// stores them, so 1,024 threads have 64 KiB in flight if their units are full. Warp `w` of `n`
// moves units `w`, `w + n`, `w + 2n` and so on. The kernels have no barrier and no shared memory.

#ifndef LANES
#define LANES(lane) if (const unsigned lane = threadIdx.x % 32; true)
#define AHEAD(words) words
#define RESTRICT
#define WARP ((blockIdx.x * blockDim.x + threadIdx.x) / 32)
#define WARPS (gridDim.x * blockDim.x / 32)
#endif

typedef unsigned long long u64;
typedef unsigned int u32;

constexpr u32 UNIT = 2048;
constexpr u32 LANE_BYTES = UNIT / 32;

// The layouts of `Span` and `Move` are repeated in `src/layout.rs` as `SpanEntry` and `MoveEntry`.
struct Span {
  u64 base;
  u64 stride;
  // Offset of the span's bytes in a slot.
  u64 offset;
  u32 bytes;
  // Number of units of all spans before this one.
  u32 first_unit;
};

struct Move {
  u32 block;
  // Offset of the slot in the arena, in units of 4 KiB.
  u32 slot;
};

// Moves a unit. `Word` has 16, 8, 4 or 1 bytes; `bytes` and both addresses are multiples of its
// length. A lane loads `AHEAD` words before it stores them: on a GPU all its words, so that its loads
// are in flight together. On a CPU one thread is all lanes of a warp, and a lane moves one word at a
// time, so that the compiler moves the lanes' words, which are adjacent, together.
template <typename Word>
__device__ __forceinline__ void move_unit(char *to, const char *from, u32 bytes) {
  constexpr u32 WORDS = LANE_BYTES / sizeof(Word);
  Word *RESTRICT target = reinterpret_cast<Word *>(to);
  const Word *RESTRICT source = reinterpret_cast<const Word *>(from);
  if (bytes == UNIT) {
#pragma unroll
    for (u32 i = 0; i < WORDS; i += AHEAD(WORDS)) {
      LANES(lane) {
        Word words[AHEAD(WORDS)];
#pragma unroll
        for (u32 j = 0; j < AHEAD(WORDS); j++) words[j] = source[(i + j) * 32 + lane];
#pragma unroll
        for (u32 j = 0; j < AHEAD(WORDS); j++) target[(i + j) * 32 + lane] = words[j];
      }
    }
  } else {
    const u32 count = bytes / sizeof(Word);
    LANES(lane) for (u32 i = lane; i < count; i += 32) target[i] = source[i];
  }
}

// Moves the `count` spans of the table `spans` of `pages` pages. These spans together have `units`
// units in each page. Each entry of `moves` names the block and the slot of one page. `arena` is
// the address of the arena of the slots.
template <typename Word, bool TO_POOL>
__device__ __forceinline__ void move_pages(const Span *spans, u32 count, u32 units,
                                           const Move *moves, u32 pages, char *arena) {
  const u32 total = units * pages;
  for (u32 at = WARP; at < total; at += WARPS) {
    const Move move = moves[at / units];
    const u32 unit = spans[0].first_unit + at % units;
    u32 low = 0;
    for (u32 high = count; high - low > 1;) {
      const u32 middle = (low + high) / 2;
      if (spans[middle].first_unit <= unit) low = middle;
      else high = middle;
    }
    const Span span = spans[low];
    const u32 skip = (unit - span.first_unit) * UNIT;
    const u32 bytes = span.bytes - skip < UNIT ? span.bytes - skip : UNIT;
    char *pool = reinterpret_cast<char *>(span.base + move.block * span.stride + skip);
    char *slot = arena + static_cast<u64>(move.slot) * 4096 + span.offset + skip;
    move_unit<Word>(TO_POOL ? pool : slot, TO_POOL ? slot : pool, bytes);
  }
}

#define KERNEL(NAME, WORD, TO_POOL)                                                         \
  extern "C" __global__ void __launch_bounds__(1024, 1)                                     \
      NAME(const Span *spans, u32 count, u32 units, const Move *moves, u32 pages, char *arena) { \
    move_pages<WORD, TO_POOL>(spans, count, units, moves, pages, arena);                    \
  }

KERNEL(kv_scatter_16, uint4, true)
KERNEL(kv_scatter_8, uint2, true)
KERNEL(kv_scatter_4, u32, true)
KERNEL(kv_scatter_1, unsigned char, true)
KERNEL(kv_gather_16, uint4, false)
KERNEL(kv_gather_8, uint2, false)
KERNEL(kv_gather_4, u32, false)
KERNEL(kv_gather_1, unsigned char, false)
