/* Loops for which compilers do not find the instructions, behind common.c. */
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

/* Returns a mask of 64 values: bit i is set if the magnitude of values[i] reaches the bound. */
SHARED inline uint64_t mask_of(const float *restrict values, int32_t bound) {
    uint64_t mask = 0;
#if defined(__AVX512F__)
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), least = _mm512_set1_epi32(bound);
    for (int i = 0; i < 64; i += 16) {
        __m512i keys = _mm512_and_epi32(_mm512_loadu_si512(values + i), magnitude);
        mask |= (uint64_t)_mm512_cmpge_epi32_mask(keys, least) << i;
    }
#elif defined(__AVX2__)
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF), below = _mm256_set1_epi32(bound - 1);
    for (int i = 0; i < 64; i += 8) {
        __m256i keys = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(values + i)), magnitude);
        int hits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, below)));
        mask |= (uint64_t)hits << i;
    }
#else
    uint8_t hits[64];
    for (int i = 0; i < 64; i++) hits[i] = key_of(values[i]) >= bound;
    for (int i = 0; i < 64; i += 8) { /* the multiplication moves bit 0 of all bytes into the top byte */
        uint64_t bytes;
        memcpy(&bytes, hits + i, 8);
        mask |= (bytes * 0x0102040810204080u >> 56) << i;
    }
#endif
    return mask;
}

/* Multiplies 32-bit numbers in lanes of 64 bits. Compilers would use a slow 64-bit multiplication. */
#if defined(__AVX512F__)
enum { WIDE = 8 };
typedef uint64_t wide_t __attribute__((vector_size(64)));
#define WIDE_PRODUCT(x, y) ((wide_t)_mm512_mul_epu32((__m512i)(x), (__m512i)(y)))
#elif defined(__AVX2__)
enum { WIDE = 4 };
typedef uint64_t wide_t __attribute__((vector_size(32)));
#define WIDE_PRODUCT(x, y) ((wide_t)_mm256_mul_epu32((__m256i)(x), (__m256i)(y)))
#else
enum { WIDE = 2 };
typedef uint64_t wide_t __attribute__((vector_size(16)));
#define WIDE_PRODUCT(x, y) (((x) & 0xFFFFFFFFu) * (y))
#endif
enum { AT_ONCE = 4, WORDS = AT_ONCE * WIDE }; /* vectors, and their lanes */

/* Turns counters, the lower halves of the lanes of c0, into the words of their Philox blocks, see random.py. The upper
   halves of all lanes have no meaning afterwards. */
SHARED inline __attribute__((always_inline)) void philox_blocks(uint64_t seed, wide_t c0[AT_ONCE], wide_t c1[AT_ONCE],
                                                                wide_t c2[AT_ONCE], wide_t c3[AT_ONCE]) {
    const wide_t zero = {0}, by_a = zero + 0xD2511F53u, by_b = zero + 0xCD9E8D57u;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint64_t of_key = k0 * (uint64_t)0xD2511F53u;
    /* three words of the counter are 0: the first round has one product, and in the second one of two is that of a key */
    for (int v = 0; v < AT_ONCE; v++) {
        c3[v] = WIDE_PRODUCT(c0[v], by_a);
        c2[v] = c3[v] >> 32 ^ k1;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    for (int v = 0; v < AT_ONCE; v++) {
        c1[v] = WIDE_PRODUCT(c2[v], by_b);
        c0[v] = c1[v] >> 32 ^ k0;
        c2[v] = c3[v] ^ (of_key >> 32 ^ k1);
        c3[v] = zero + of_key;
    }
    for (int round = 2; round < PHILOX_ROUNDS; round++) {
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        for (int v = 0; v < AT_ONCE; v++) {
            wide_t a = WIDE_PRODUCT(c0[v], by_a), b = WIDE_PRODUCT(c2[v], by_b);
            c0[v] = b >> 32 ^ c1[v] ^ k0;
            c1[v] = b;
            c2[v] = a >> 32 ^ c3[v] ^ k1;
            c3[v] = a;
        }
    }
}

/* Writes the dither of the 16 elements that draw from a block: two neighbouring bytes of a word in the place of the
   lowest bits of the base, see random.py. */
SHARED inline void dither_of(uint64_t low, uint64_t high, float base, float *restrict dither) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_set_epi64x((int64_t)high, (int64_t)low), bits = _mm_set1_epi32(bits_of(base));
    for (int word = 0; word < 4; word++) {
        const int at = 0x0404 * word - 0x7F800000; /* the two highest bytes become 0 */
        __m128i draws = _mm_shuffle_epi8(bytes, _mm_set_epi32(at + 0x0003, at + 0x0302, at + 0x0201, at + 0x0100));
        _mm_storeu_si128((__m128i *)(dither + 4 * word), _mm_or_si128(draws, bits));
    }
#else
    uint32_t words[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
    for (int i = 0; i < 16; i++) {
        uint32_t word = words[i / 4];
        dither[i] = float_of(bits_of(base) | (int32_t)((word >> 8 * (i % 4) | word << (32 - 8 * (i % 4)) % 32) & 0xFFFF));
    }
#endif
}

/* Returns the counters `first`, `first + step` and so on, one in each lane. */
SHARED inline wide_t counters(uint64_t first, uint64_t step) {
    const wide_t zero = {0};
    uint64_t numbers[WIDE];
    wide_t lane;
    for (int j = 0; j < WIDE; j++) numbers[j] = (uint64_t)j * step;
    memcpy(&lane, numbers, sizeof lane);
    return lane + (zero + first);
}

/* Computes the first words of WORDS Philox blocks at a time, as many as `count` takes: those of the counters `first`,
   `first + step` and so on. */
SHARED void philox_words(uint64_t seed, uint64_t first, uint64_t step, int count, uint64_t *restrict words) {
    for (int at = 0; at < count; at += WORDS) {
        wide_t c0[AT_ONCE], c1[AT_ONCE], c2[AT_ONCE], c3[AT_ONCE];
        for (int v = 0; v < AT_ONCE; v++) c0[v] = counters(first + (uint64_t)(at + v * WIDE) * step, step);
        philox_blocks(seed, c0, c1, c2, c3);
        for (int v = 0; v < AT_ONCE; v++) {
            wide_t word = c0[v] & 0xFFFFFFFFu;
            memcpy(words + at + v * WIDE, &word, sizeof word);
        }
    }
}
