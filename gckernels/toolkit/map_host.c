/* The host path of one quantiser: what map_kernels.py does, tile by tile. map_host.py puts in front of this text the
   constants (BITS, BLOCK, ...) and the quantiser's functions, lowered from their torch forms:
   accumulate, keep, merge, quantize, dequantize, terms, finish. */

typedef struct {
    const void *source;       /* the gradient, or payloads */
    float *residual;          /* or NULL */
    uint8_t *payload;         /* where to; or, when decoding, where from */
    void *out;                /* when decoding */
    float *partials;          /* [chunks * tiles, TERMS], for the statistic of a whole chunk */
    int64_t numel, size;      /* of the unit; that a payload is laid out for, and from chunk to chunk */
    int64_t tiles;            /* per chunk */
    int64_t payload_stride, sources, source_stride;
    int64_t blocks, stats_nbytes, codes_offset, codes_nbytes;
    uint64_t seed;
    float scale;
    int32_t dtype, accumulate;
} call_t;

/* Call a function with a whole row's count as a constant, which makes better loops, and with any other one. */
#define INLINE static inline __attribute__((always_inline))
#define WITH_COUNT(count, call_of) \
    do { \
        if ((count) == BLOCK) { enum { COUNT = BLOCK }; call_of; } \
        else { const int COUNT = (count); call_of; } \
    } while (0)

/* ------------------------------------------------------------------ codes and bytes; TILE is a multiple of 8 */

static void pack(const uint8_t *codes, int count, uint8_t *bytes) { /* codes behind the last are 0, up to 8 of them */
    int nbytes = (count * BITS + 7) / 8;
#if BITS == 8
    memcpy(bytes, codes, (size_t)nbytes);
#else
    uint8_t packed[TILE * BITS / 8 + 8];
    for (int i = 0; i < (count + 7) / 8; i++) {
        uint64_t w;
        memcpy(&w, codes + 8 * i, 8);
#if BITS == 1
        packed[i] = (uint8_t)((w * 0x0102040810204080u) >> 56);
#elif BITS == 2
        w = (w | w >> 6) & 0x000F000F000F000Fu;
        w = (w | w >> 12) & 0x000000FF000000FFu;
        uint16_t two = (uint16_t)(w | w >> 24);
        memcpy(packed + 2 * i, &two, 2);
#elif BITS == 4
        w = (w | w >> 4) & 0x00FF00FF00FF00FFu;
        w = (w | w >> 8) & 0x0000FFFF0000FFFFu;
        uint32_t four = (uint32_t)(w | w >> 16);
        memcpy(packed + 4 * i, &four, 4);
#else
        uint64_t bits = 0;
        for (int j = 0; j < 8; j++) bits |= ((w >> (8 * j)) & 0xFF) << (BITS * j);
        memcpy(packed + BITS * i, &bits, 8);
#endif
    }
    memcpy(bytes, packed, (size_t)nbytes);
#endif
}

static const uint8_t *unpack(const uint8_t *bytes, int count, uint8_t *codes) { /* may write 7 codes more */
#if BITS == 8
    (void)codes;
    (void)count;
    return bytes;
#elif BITS == 1 || BITS == 2 || BITS == 4
    for (int i = 0; i < (count + 7) / 8; i++) { /* a field is padded to whole groups of eight codes */
#if BITS == 1
        uint64_t w = (bytes[i] * 0x0101010101010101u) & 0x8040201008040201u; /* bit j in byte j, then down to bit 0 */
        w = ((w + 0x7F7F7F7F7F7F7F7Fu) >> 7) & 0x0101010101010101u;
#elif BITS == 2
        uint16_t two;
        memcpy(&two, bytes + 2 * i, 2);
        uint64_t w = (two | (uint64_t)two << 24) & 0x000000FF000000FFu;
        w = (w | w << 12) & 0x000F000F000F000Fu;
        w = (w | w << 6) & 0x0303030303030303u;
#else
        uint32_t four;
        memcpy(&four, bytes + 4 * i, 4);
        uint64_t w = (four | (uint64_t)four << 16) & 0x0000FFFF0000FFFFu;
        w = (w | w << 8) & 0x00FF00FF00FF00FFu;
        w = (w | w << 4) & 0x0F0F0F0F0F0F0F0Fu;
#endif
        memcpy(codes + 8 * i, &w, 8);
    }
    return codes;
#else
    for (int i = 0; i < (count + 7) / 8; i++) {
        uint64_t w = 0;
        memcpy(&w, bytes + BITS * i, (size_t)lesser(BITS, (count * BITS + 7) / 8 - BITS * i));
        for (int j = 0; j < 8; j++) codes[8 * i + j] = (uint8_t)(w >> (BITS * j)) & ((1 << BITS) - 1);
    }
    return codes;
#endif
}

/* ------------------------------------------------------------------ random numbers: Philox4x32-10, see random.py */

#if RANDOM_BITS
/* 32 bits by 32 bits, in lanes of 64: compilers make a slow multiplication of 64 bits of it, hence the intrinsics. */
#if defined(__AVX512F__)
enum { WIDTH = 8 };
typedef uint64_t wide_t __attribute__((vector_size(64)));
#define PRODUCT(x, y) ((wide_t)_mm512_mul_epu32((__m512i)(x), (__m512i)(y)))
#elif defined(__AVX2__)
enum { WIDTH = 4 };
typedef uint64_t wide_t __attribute__((vector_size(32)));
#define PRODUCT(x, y) ((wide_t)_mm256_mul_epu32((__m256i)(x), (__m256i)(y)))
#else
enum { WIDTH = 2 };
typedef uint64_t wide_t __attribute__((vector_size(16)));
#define PRODUCT(x, y) (((x) & 0xFFFFFFFFu) * (y))
#endif
enum { VECTORS = 4, BLOCKS = VECTORS * WIDTH, DRAWS = BLOCKS * 128 / RANDOM_BITS }; /* at once */

static void uniform(uint64_t seed, int64_t first, int count, float *restrict u) { /* fills whole groups of DRAWS */
    const wide_t zero = {0}, by_a = zero + 0xD2511F53u, by_b = zero + 0xCD9E8D57u;
    uint64_t block = (uint64_t)(first * RANDOM_BITS / 128);
    for (int at = 0; at < count; at += DRAWS, block += BLOCKS) {
        wide_t c0[VECTORS], c1[VECTORS], c2[VECTORS], c3[VECTORS]; /* the upper halves of the lanes hold anything */
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int v = 0; v < VECTORS; v++) {
            for (int j = 0; j < WIDTH; j++) c0[v][j] = block + (uint64_t)(v * WIDTH + j);
            c1[v] = c0[v] >> 32;
            c2[v] = c3[v] = zero;
        }
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            for (int v = 0; v < VECTORS; v++) {
                wide_t a = PRODUCT(c0[v], by_a), b = PRODUCT(c2[v], by_b);
                c0[v] = b >> 32 ^ c1[v] ^ k0;
                c1[v] = b;
                c2[v] = a >> 32 ^ c3[v] ^ k1;
                c3[v] = a;
            }
        }
        uint64_t low[BLOCKS], high[BLOCKS], words[2 * BLOCKS];
        for (int v = 0; v < VECTORS; v++) {
            wide_t lower = (c0[v] & 0xFFFFFFFFu) | c1[v] << 32, upper = (c2[v] & 0xFFFFFFFFu) | c3[v] << 32;
            memcpy(low + v * WIDTH, &lower, sizeof lower);
            memcpy(high + v * WIDTH, &upper, sizeof upper);
        }
        for (int j = 0; j < BLOCKS; j++) {
            words[2 * j] = low[j];
            words[2 * j + 1] = high[j];
        }
#if RANDOM_BITS == 16
        const uint16_t *draws = (const uint16_t *)words; /* lowest bits first */
#else
        const uint8_t *draws = (const uint8_t *)words;
#endif
        for (int i = 0; i < DRAWS; i++) u[at + i] = ((float)draws[i] + 0.5f) * (1.0f / (float)(1 << RANDOM_BITS));
    }
}
#endif

/* ------------------------------------------------------------------ statistics */

#if STATS
typedef struct { float of[TERMS]; } partial_t;
typedef struct { float of[STATS]; } stats_t;

/* Integers in the order of the numbers; not-a-number where it wins. */
static inline int32_t rank_of(float x, int32_t nan) {
    int32_t b = bits_of(x);
    int32_t is_nan = -(x != x); /* a mask, where a branch would keep the loop from being vectorised */
    return ((b ^ ((b >> 31) & 0x7FFFFFFF)) & ~is_nan) | (nan & is_nan);
}
static inline float of_rank(int32_t r) { return float_of(r ^ ((r >> 31) & 0x7FFFFFFF)) + 0.0f; }

/* In lanes, which the compiler makes vectors of: an order of its own for sums, but always the same. */
enum { LANES = 32 };
#define REDUCE(type, start, term, combine) \
    type lanes[LANES]; \
    int i = 0; \
    for (int j = 0; j < LANES; j++) lanes[j] = start; \
    for (; i + LANES <= count; i += LANES) \
        for (int j = 0; j < LANES; j++) lanes[j] = combine(lanes[j], term(values[i + j])); \
    for (; i < count; i++) lanes[i % LANES] = combine(lanes[i % LANES], term(values[i])); \
    for (int width = LANES / 2; width; width /= 2) \
        for (int j = 0; j < width; j++) lanes[j] = combine(lanes[j], lanes[j + width]);

static inline float plus(float a, float b) { return a + b; }
static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

#define REDUCER_SUM(t) \
    INLINE float reduce_##t(const float *restrict values, int count) { \
        REDUCE(float, 0.0f, term_##t, plus) \
        return lanes[0] + 0.0f; \
    }
#define REDUCER_MAX(t) \
    static inline int32_t rank_##t(float x) { return rank_of(term_##t(x), INT32_MAX); } \
    INLINE float reduce_##t(const float *restrict values, int count) { \
        REDUCE(int32_t, -0x7F800001, rank_##t, larger) \
        return of_rank(lanes[0]); \
    }
#define REDUCER_MIN(t) \
    static inline int32_t rank_##t(float x) { return rank_of(term_##t(x), INT32_MIN); } \
    INLINE float reduce_##t(const float *restrict values, int count) { \
        REDUCE(int32_t, 0x7F800000, rank_##t, smaller) \
        return of_rank(lanes[0]); \
    }
REDUCERS

INLINE partial_t reduce(const float *values, int count) { return (partial_t){{REDUCED}}; }

/* The statistics as the payload holds them; all NaN when one is not finite. */
static stats_t finished(partial_t p, int64_t count) {
    stats_t s;
    finish(p.of, (float)greater(count, 1), s.of);
    int good = 1;
    for (int k = 0; k < STATS; k++) good &= is_finite(s.of[k]);
    for (int k = 0; k < STATS; k++) {
        s.of[k] = good ? s.of[k] : NAN;
#if STAT_BF16
        s.of[k] = float_of((int32_t)((uint32_t)to_bf16(s.of[k]) << 16));
#endif
        if (s.of[k] != s.of[k]) s.of[k] = float_of(0x7FC00000);
    }
    return s;
}

static void put_stats(const call_t *call, uint8_t *payload, int64_t block, stats_t s) {
    for (int k = 0; k < STATS; k++) {
        int64_t slot = k * call->blocks + block;
#if STAT_BF16
        ((uint16_t *)(payload + 16))[slot] = to_bf16(s.of[k]);
#else
        ((float *)(payload + 16))[slot] = s.of[k];
#endif
    }
}

static stats_t get_stats(const call_t *call, const uint8_t *payload, int64_t block) {
    stats_t s;
    for (int k = 0; k < STATS; k++) {
        int64_t slot = k * call->blocks + (WHOLE ? 0 : block);
#if STAT_BF16
        s.of[k] = float_of((int32_t)((uint32_t)((const uint16_t *)(payload + 16))[slot] << 16));
#else
        s.of[k] = ((const float *)(payload + 16))[slot];
#endif
    }
    return s;
}
#else
typedef struct { float of[1]; } stats_t;
static stats_t get_stats(const call_t *call, const uint8_t *payload, int64_t block) {
    (void)call, (void)payload, (void)block;
    return (stats_t){{0}};
}
#endif

/* ------------------------------------------------------------------ tiles */

INLINE void add_row(const uint8_t *restrict codes, stats_t s, int count, int is_first, float *restrict sum) {
    if (is_first)
        for (int i = 0; i < count; i++) sum[i] = 0.0f + dequantize(codes[i], s.of);
    else
        for (int i = 0; i < count; i++) sum[i] += dequantize(codes[i], s.of);
}

/* The merged decodings of all sources, from element `first` of their chunk on. */
static void merged_tile(const call_t *call, const uint8_t *payload, int64_t first, int here,
                        float *restrict total) {
    uint8_t unpacked[TILE + 8];
    if (call->sources == 0) memset(total, 0, sizeof(float) * (size_t)here);
    for (int64_t source = 0; source < call->sources; source++, payload += call->source_stride) {
        int32_t status;
        memcpy(&status, payload, 4);
        const uint8_t *codes = unpack(payload + call->codes_offset + first * BITS / 8, here, unpacked);
        for (int row = 0; row * BLOCK < here; row++) {
            stats_t s = get_stats(call, payload, first / BLOCK + row);
            const uint8_t *c = codes + row * BLOCK;
            float *sum = total + row * BLOCK;
            int count = (int)lesser(BLOCK, here - row * BLOCK);
            if (status != STATUS)
                for (int i = 0; i < count; i++) sum[i] = NAN;
            else
                WITH_COUNT(count, add_row(c, s, COUNT, source == 0, sum));
        }
    }
    for (int i = 0; i < here; i++) total[i] = merge(total[i], call->scale);
}

typedef struct { int64_t chunk, first, unit_first; int here, laid_out; } tile_t;

static tile_t locate(const call_t *call, int64_t index) {
    tile_t t;
    t.chunk = index / call->tiles;
    t.first = index % call->tiles * TILE;
    t.unit_first = t.chunk * call->size + t.first;
    int64_t limit = lesser(call->size, call->numel - t.chunk * call->size);
    t.here = (int)greater(lesser(limit - t.first, TILE), 0);
    t.laid_out = (int)greater(lesser(call->size - t.first, TILE), 0);
    return t;
}

static void load_tile(const call_t *call, tile_t t, float *restrict values) {
    const float *restrict r = call->residual + t.unit_first;
#if MERGING
    merged_tile(call, call->source, t.first, t.here, values);
#else
    if (call->residual && call->dtype == FP32) {
        const float *restrict g = (const float *)call->source + t.unit_first;
        for (int i = 0; i < t.here; i++) values[i] = accumulate(g[i], r[i]);
        return;
    }
    load(call->source, call->dtype, t.unit_first, t.here, values);
#endif
    if (call->residual)
        for (int i = 0; i < t.here; i++) values[i] = accumulate(values[i], r[i]);
}

INLINE void encode_row(const float *restrict values, const float *restrict u, stats_t s, int count,
                       uint8_t *restrict codes, float *restrict residual) {
    int good = 1;
#if STATS
    for (int k = 0; k < STATS; k++) good &= s.of[k] == s.of[k];
#endif
    (void)u;
    if (good)
        for (int i = 0; i < count; i++) codes[i] = (uint8_t)(int32_t)quantize(values[i], s.of, RANDOM_BITS ? u[i] : 0.0f);
    else
        memset(codes, 0, (size_t)count);
    if (residual)
        for (int i = 0; i < count; i++) {
            float left = keep(values[i], dequantize(codes[i], s.of));
            residual[i] = is_finite(left) ? left : residual[i];
        }
}

/* ------------------------------------------------------------------ what is called */

#if WHOLE
void partials(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        load_tile(call, t, values);
        partial_t p;
        WITH_COUNT(t.here, p = reduce(values, COUNT));
        memcpy(call->partials + index * TERMS, p.of, sizeof p.of);
    }
}

void finish_chunks(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t chunk = start; chunk < stop; chunk++) {
        partial_t p;
        for (int t = 0; t < TERMS; t++) {
            const float *each = call->partials + chunk * call->tiles * TERMS + t;
            double sum = 0;
            int32_t r = KIND(t) == MAX ? -0x7F800001 : 0x7F800000;
            for (int64_t i = 0; i < call->tiles; i++) {
                float x = each[i * TERMS];
                int32_t o = rank_of(x, KIND(t) == MAX ? INT32_MAX : INT32_MIN);
                sum += x;
                if (KIND(t) == MAX) r = o > r ? o : r;
                else r = o < r ? o : r;
            }
            p.of[t] = KIND(t) == SUM ? (float)sum : of_rank(r);
        }
        int64_t count = greater(lesser(call->size, call->numel - chunk * call->size), 0);
        stats_t s = finished(p, count);
        if (!count) memset(&s, 0, sizeof s);
        put_stats(call, call->payload + chunk * call->payload_stride, 0, s);
    }
}
#endif

void encode(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE];
    uint8_t codes[TILE + 8];
#if RANDOM_BITS
    float u[TILE];
#else
    const float *u = values;
#endif
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        float *residual = call->residual ? call->residual + t.unit_first : NULL;
        load_tile(call, t, values);
#if RANDOM_BITS
        uniform(call->seed, t.unit_first, t.here, u);
#endif
        for (int row = 0; row * BLOCK < t.laid_out; row++) {
            int at = row * BLOCK, count = (int)greater(lesser(BLOCK, t.here - at), 0);
#if STATS && !WHOLE
            stats_t s = {{0}};
            if (count) {
                partial_t p;
                WITH_COUNT(count, p = reduce(values + at, COUNT));
                s = finished(p, count);
            }
            put_stats(call, payload, t.first / BLOCK + row, s);
#else
            stats_t s = get_stats(call, payload, 0);
#endif
            WITH_COUNT(count, encode_row(values + at, u + at, s, COUNT, codes + at, residual ? residual + at : NULL));
        }
        memset(codes + t.here, 0, (size_t)(t.laid_out - t.here + 8));
        uint8_t *bytes = payload + call->codes_offset + t.first * BITS / 8;
        pack(codes, t.laid_out, bytes);
        if (t.first + TILE >= call->size) { /* the last tile: what is behind the codes */
            int64_t used = t.first * BITS / 8 + (t.laid_out * BITS + 7) / 8;
            memset(payload + call->codes_offset + used, 0, (size_t)(call->codes_nbytes - used));
        }
        if (t.first == 0) {
            int32_t header[4] = {STATUS, 0, 0, 0};
            int64_t used = STATS * call->blocks * (STAT_BF16 ? 2 : 4);
            memcpy(payload, header, sizeof header);
            memset(payload + 16 + used, 0, (size_t)(call->stats_nbytes - used));
        }
    }
}

void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE], old[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        merged_tile(call, call->payload + t.chunk * call->payload_stride, t.first, t.here, total);
        if (call->accumulate) {
            load(call->out, call->dtype, t.unit_first, t.here, old);
            for (int i = 0; i < t.here; i++) total[i] += old[i];
        }
        store(call->out, call->dtype, t.unit_first, t.here, total);
    }
}
