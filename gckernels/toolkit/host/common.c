/* The beginning of every host program: the types of tensors, loading and storing them as fp32. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Results are those of the reference, or the program does not compile: no option may rearrange operations, keep numbers
   wider than their type, or lay out structures in another way than ctypes does. */
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "fast mathematics would change results"
#endif
/* 16 is that of processors that compute in fp16: float and double keep their types as with 0. */
_Static_assert(__FLT_EVAL_METHOD__ == 0 || __FLT_EVAL_METHOD__ == 16, "numbers must be rounded to their own type");
_Static_assert(sizeof(1.0) == sizeof(double), "constants must be of their own type");
_Static_assert(sizeof(struct { int8_t a; int64_t b; }) == 16, "structures must have their usual layout");

/* Marks a definition that some programs do not use. */
#define OPTIONAL __attribute__((unused))
#define SHARED static OPTIONAL

SHARED inline int32_t bits_of(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
SHARED inline float float_of(int32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* Returns the bits of a magnitude, ordered like magnitudes; inf and NaN are above all numbers. */
SHARED inline int32_t key_of(float x) { return bits_of(x) & 0x7FFFFFFF; }

enum { FP32, BF16, FP16 };

/* The address of element `index` of `array`; NULL if that is NULL, as a missing residual or an empty tensor is. */
#define AT(array, index) ((array) ? (array) + (index) : (array))

SHARED inline void copy(void *to, const void *from, size_t nbytes) { if (nbytes) memcpy(to, from, nbytes); }

SHARED inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
SHARED inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
SHARED inline int is_finite(float x) { return fabsf(x) <= 0x1.fffffep127f; }

/* Prefetches memory that will be needed soon. Tiles are often as large as pages, at whose ends the processor's own
   prefetching stops, and the memory would be idle while a tile is worked on. */
SHARED inline void prefetch(const void *from, int nbytes) {
    for (int at = 0; at < nbytes; at += 64) __builtin_prefetch((const char *)from + at, 0, 2);
}

enum { PHILOX_ROUNDS = 7 };

/* Returns one of the four words of a Philox block, see random.py. */
SHARED inline uint32_t philox_word(uint64_t seed, uint64_t counter, int word) {
    uint32_t c0 = (uint32_t)counter, c1 = 0, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
    }
    return word & 2 ? word & 1 ? c3 : c2 : word & 1 ? c1 : c0;
}

SHARED inline float of_bf16(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

SHARED inline uint16_t to_bf16(float x) {
    uint32_t b = (uint32_t)bits_of(x);
    return x != x ? 0x7FC0 : (uint16_t)((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}

#ifdef __FLT16_MAX__
typedef _Float16 half_t;
SHARED inline float of_half(half_t x) { return (float)x; }
SHARED inline half_t to_half(float x) { return (_Float16)x; }
#else /* gcc before 12 on x86: the same conversions in integers */
typedef uint16_t half_t;
SHARED inline float of_half(half_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7FFF) << 13;
    uint32_t scaled = (uint32_t)bits_of(float_of((int32_t)rest) * 0x1p112f); /* exact, subnormals too */
    return float_of((int32_t)(sign | (rest < 0x0F800000 ? scaled : rest | 0x7F800000)));
}
SHARED inline half_t to_half(float x) {
    uint32_t b = (uint32_t)bits_of(x), sign = b >> 16 & 0x8000, rest = b & 0x7FFFFFFF;
    uint32_t small = (uint32_t)bits_of(float_of((int32_t)rest) + 0.5f) - 0x3F000000; /* the sum rounds to 2**-24 */
    uint32_t large = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
    uint32_t number = rest < 0x38800000 ? small : large;
    return (half_t)(sign | (rest > 0x7F800000 ? 0x7E00 : rest >= 0x477FF000 ? 0x7C00 : number));
}
#endif

SHARED void load(const void *from, int32_t dtype, int64_t first, int count, float *restrict values) {
    if (dtype == FP32) {
        copy(values, AT((const float *)from, first), sizeof(float) * (size_t)count);
    } else if (dtype == BF16) {
        const uint16_t *x = AT((const uint16_t *)from, first);
        for (int i = 0; i < count; i++) values[i] = of_bf16(x[i]);
    } else {
        const half_t *x = AT((const half_t *)from, first);
        for (int i = 0; i < count; i++) values[i] = of_half(x[i]);
    }
}

SHARED void store(void *to, int32_t dtype, int64_t first, int count, const float *restrict values) {
    if (dtype == FP32) {
        copy(AT((float *)to, first), values, sizeof(float) * (size_t)count);
    } else if (dtype == BF16) {
        uint16_t *x = AT((uint16_t *)to, first);
        for (int i = 0; i < count; i++) x[i] = to_bf16(values[i]);
    } else {
        half_t *x = AT((half_t *)to, first);
        for (int i = 0; i < count; i++) x[i] = to_half(values[i]);
    }
}

/* A tile of a unit that is cut into chunks of `size` elements: its position in the chunk and in the unit, the number of
   its elements that exist, and the number that its payload has room for. */
typedef struct { int64_t chunk, first, unit_first; int here, laid_out; } tile_t;

SHARED inline tile_t tile_of(int64_t index, int64_t tiles, int tile_numel, int64_t size, int64_t numel) {
    tile_t t;
    t.chunk = index / tiles;
    t.first = index % tiles * tile_numel;
    t.unit_first = t.chunk * size + t.first;
    t.here = (int)greater(lesser(lesser(size, numel - t.chunk * size) - t.first, tile_numel), 0);
    t.laid_out = (int)greater(lesser(size - t.first, tile_numel), 0);
    return t;
}

/* Stores a merged tile, or adds it to the output. */
SHARED inline void store_merged(void *to, int32_t dtype, int64_t first, int count, float *restrict merged,
                                int32_t add) {
    float old[256];
    for (int done = 0, some; add && done < count; done += some) {
        some = (int)lesser(count - done, 256);
        load(to, dtype, first + done, some, old);
        for (int i = 0; i < some; i++) merged[done + i] += old[i];
    }
    store(to, dtype, first, count, merged);
}
