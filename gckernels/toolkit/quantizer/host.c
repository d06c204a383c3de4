/* The host path of one quantiser: the same work as in kernels.py, tile by tile. In front of this text host.py puts
   call_t, made from its class _Call; the constants (BITS, BLOCK, ...); and the quantiser's functions, lowered from
   their torch forms: accumulate, keep, merge, quantize, dequantize, terms, finish. */

/* Calls a function with COUNT elements. The count of a whole row is a constant, which makes loops faster. */
#define INLINE static inline __attribute__((always_inline))
#define WITH_COUNT(count, call_of) \
    do { \
        if ((count) == BLOCK) { enum { COUNT = BLOCK }; call_of; } \
        else { const int COUNT = (count); call_of; } \
    } while (0)

/* ------------------------------------------------------------------ codes and bytes; TILE is a multiple of 8 */

#if BITS == 1
typedef uint64_t group_t; /* as many codes as fill a byte, each in one byte */
#elif BITS == 2
typedef uint32_t group_t;
#elif BITS == 4
typedef uint16_t group_t;
#endif

/* Packs codes of BITS bits. The 8 codes behind the last one must be 0. */
static void pack(const uint8_t *restrict codes, int count, uint8_t *restrict bytes) {
    int nbytes = (count * BITS + 7) / 8;
#if BITS == 8
    memcpy(bytes, codes, (size_t)nbytes);
#elif BITS == 1
    int i = 0;
#if defined(__AVX512BW__)
    for (; i + 8 <= nbytes; i += 8) {
        __m512i w = _mm512_loadu_si512(codes + 8 * i);
        uint64_t bits = _mm512_test_epi8_mask(w, w);
        memcpy(bytes + i, &bits, 8);
    }
#elif defined(__AVX2__)
    for (; i + 4 <= nbytes; i += 4) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(codes + 8 * i));
        int bits = _mm256_movemask_epi8(_mm256_slli_epi16(w, 7));
        memcpy(bytes + i, &bits, 4);
    }
#endif
    for (; i < nbytes; i++) bytes[i] = (uint8_t)((((const group_t *)codes)[i] * 0x0102040810204080u) >> 56);
#elif BITS == 2 || BITS == 4
    const group_t *restrict groups = (const group_t *)codes;
    for (int i = 0; i < nbytes; i++) {
        group_t w = groups[i];
#if BITS == 2
        w |= w >> 12;
        w |= w >> 6;
        bytes[i] = (uint8_t)w;
#else
        bytes[i] = (uint8_t)(w | (group_t)(w >> 4));
#endif
    }
#else
    uint8_t packed[TILE * BITS / 8 + 8];
    for (int i = 0; i < (count + 7) / 8; i++) {
        uint64_t w, bits = 0;
        memcpy(&w, codes + 8 * i, 8);
        for (int j = 0; j < 8; j++) bits |= ((w >> (8 * j)) & 0xFF) << (BITS * j);
        memcpy(packed + BITS * i, &bits, 8);
    }
    memcpy(bytes, packed, (size_t)nbytes);
#endif
}

/* Returns the codes: `codes`, or `bytes` if these need no unpacking. Writes up to 7 codes behind the last one. */
static const uint8_t *unpack(const uint8_t *restrict bytes, int count, uint8_t *restrict codes) {
#if BITS == 8
    (void)codes;
    (void)count;
    return bytes;
#elif BITS == 1 || BITS == 2 || BITS == 4
    group_t *restrict groups = (group_t *)codes;
    const group_t ones = (group_t)-1, mask = ones / 255 * ((1 << BITS) - 1); /* every byte's lowest BITS bits */
    for (int i = 0; i < (count * BITS + 7) / 8; i++) {
        group_t w = bytes[i];
#if BITS == 1
        w = (w | w << 28) & 0x0000000F0000000Fu;
        w = (w | w << 14) & 0x0003000300030003u;
#elif BITS == 2
        w = (w | w << 12) & 0x000F000Fu;
#endif
        groups[i] = (group_t)(w | w << (8 - BITS)) & mask;
    }
    return codes;
#else
    for (int i = 0; i < (count + 7) / 8; i++) { /* a field is padded to whole groups of eight codes */
        uint64_t w = 0;
        memcpy(&w, bytes + BITS * i, (size_t)lesser(BITS, (count * BITS + 7) / 8 - BITS * i));
        for (int j = 0; j < 8; j++) codes[8 * i + j] = (uint8_t)(w >> (BITS * j)) & ((1 << BITS) - 1);
    }
    return codes;
#endif
}

/* ------------------------------------------------------------------ random numbers, see random.py */

#if RANDOM
_Static_assert(TILE % (16 * WORDS) == 0, "groups of numbers must fill a tile");

/* Draws whole groups of 16 * WORDS numbers. Meanwhile it prefetches `soon`, a little in every iteration: a processor
   holds few requests. */
static void draw(uint64_t seed, int64_t first, int count, float *restrict dither, const float *soon) {
    uint64_t block = (uint64_t)(first / 16);
    for (int at = 0; at < count; at += 16 * WORDS, block += WORDS) {
        wide_t c0[AT_ONCE], c1[AT_ONCE], c2[AT_ONCE], c3[AT_ONCE];
        uint64_t low[WORDS], high[WORDS];
        prefetch(soon + at, (int)sizeof(float) * 16 * WORDS);
        for (int v = 0; v < AT_ONCE; v++) c0[v] = counters(block + (uint64_t)(v * WIDE), 1);
        philox_blocks(seed, c0, c1, c2, c3);
        for (int v = 0; v < AT_ONCE; v++) {
            wide_t lower = (c0[v] & 0xFFFFFFFFu) | c1[v] << 32, upper = (c2[v] & 0xFFFFFFFFu) | c3[v] << 32;
            memcpy(low + v * WIDE, &lower, sizeof lower);
            memcpy(high + v * WIDE, &upper, sizeof upper);
        }
        for (int j = 0; j < WORDS; j++) dither_of(low[j], high[j], DITHER_BASE, dither + at + 16 * j);
    }
}
#endif

/* ------------------------------------------------------------------ statistics */

typedef struct { float of[STATS ? STATS : 1]; } stats_t; /* the statistics of one block */

#if STATS
/* Returns an integer, ordered like the numbers, with NaN on either side of the infinities. */
SHARED inline int32_t rank_of(float x) {
    int32_t b = bits_of(x);
    return b ^ ((b >> 31) & 0x7FFFFFFF);
}
SHARED inline float of_rank(int32_t r) { return float_of(r ^ ((r >> 31) & 0x7FFFFFFF)) + 0.0f; }

/* Ranks are turned until all of NaN, which wins, are above those of numbers, or below. */
enum { TURN = 0x007FFFFF }; /* from the highest integer down to the rank of infinity */
#define SUM_START 0.0f
#define MAX_START INT32_MIN
#define MIN_START INT32_MAX
#define LARGEST_START 0
#define SUM_OF(x) (x)
#define MAX_OF(x) (rank_of(x) - TURN)
#define MIN_OF(x) (rank_of(x) + TURN)
#define LARGEST_OF(x) bits_of(x) /* without a sign: numbers are in order, and NaN is above them */
#define SUM_BOTH(a, b) ((a) + (b))
#define MAX_BOTH(a, b) ((a) > (b) ? (a) : (b))
#define MIN_BOTH(a, b) ((a) < (b) ? (a) : (b))
#define LARGEST_BOTH(a, b) ((a) > (b) ? (a) : (b))
#define SUM_RESULT(x) ((x) + 0.0f)
#define MAX_RESULT(x) of_rank((x) + TURN)
#define MIN_RESULT(x) of_rank((x) - TURN)
#define LARGEST_RESULT(x) float_of(x)
typedef float SUM_t;
typedef int32_t MAX_t, MIN_t, LARGEST_t, MAX_total_t, MIN_total_t, LARGEST_total_t;
typedef double SUM_total_t; /* the sum of many tiles */

/* The terms of all rows (blocks) of a tile are reduced in lanes, which the compiler turns into vectors; then the lanes
   of all rows are reduced together. Sums are added up in another order than in the reference, but always in the same
   order. */
enum { LANES = 16, ROWS = TILE / BLOCK };
typedef struct { float of[STATS][ROWS]; } tile_stats_t;
#define IN_LANES(t, kind) kind##_t of_##t[ROWS][LANES];
#define DECLARE(t, kind) kind##_t lanes_##t[LANES];
#define START(t, kind) lanes_##t[j] = kind##_START;
#define KEEP(t, kind) memcpy(kept->of_##t[row], lanes_##t, sizeof lanes_##t);
#define FOLD(t, kind, width) \
    for (int row = 0; row < rows; row++) \
        for (int j = 0; j < width; j++) \
            lanes.of_##t[row][j] = kind##_BOTH(lanes.of_##t[row][j], lanes.of_##t[row][j + width]);
#define RESULT(t, kind) \
    FOLD(t, kind, 8) FOLD(t, kind, 4) FOLD(t, kind, 2) FOLD(t, kind, 1) \
    for (int row = 0; row < rows; row++) result->of[t][row] = kind##_RESULT(lanes.of_##t[row][0]);

/* Defines `terms_t` and `reduce`, which reduces the terms of all rows: those of the statistic, or of its shortcut. gcc
   unrolls the loop over lanes before it looks for vectors, which it then finds for one term, but not for several. */
#define DEFINE_REDUCE(terms_t, lanes_t, reduce_row, reduce, EACH, TAKE, NUMBER) \
    typedef struct { float of[NUMBER][ROWS]; } terms_t; \
    typedef struct { EACH(IN_LANES) } lanes_t; \
    INLINE void reduce_row(const float *restrict values, int count, int row, lanes_t *restrict kept) { \
        enum { UNROLLED = NUMBER > 1 ? 2 : LANES }; \
        EACH(DECLARE) \
        int i = 0; \
        for (int j = 0; j < LANES; j++) { EACH(START) } \
        for (; i + LANES <= count; i += LANES) \
            _Pragma("GCC unroll UNROLLED") for (int j = 0; j < LANES; j++) { EACH(TAKE) } \
        for (int j = 0; i + j < count; j++) { EACH(TAKE) } \
        EACH(KEEP) \
    } \
    INLINE void reduce(const float *restrict values, int here, int rows, terms_t *restrict result) { \
        lanes_t lanes; \
        for (int row = 0; row < rows; row++) { \
            int count = (int)lesser(BLOCK, here - row * BLOCK); \
            WITH_COUNT(count, reduce_row(values + row * BLOCK, COUNT, row, &lanes)); \
        } \
        EACH(RESULT) \
    }

#define TAKE(t, kind) lanes_##t[j] = kind##_BOTH(lanes_##t[j], kind##_OF(term_##t(values[i + j])));
DEFINE_REDUCE(terms_t, lanes_t, reduce_row, reduce, EACH_TERM, TAKE, TERMS)

/* Returns the statistics of a block, rounded as the payload stores them; all are NaN if one is not finite. */
INLINE stats_t as_stored(stats_t s) {
    int good = 1;
    for (int k = 0; k < STATS; k++) good &= is_finite(s.of[k]);
    for (int k = 0; k < STATS; k++) {
        s.of[k] = good ? s.of[k] : NAN;
#if STAT_BF16
        s.of[k] = of_bf16(to_bf16(s.of[k]));
#endif
        s.of[k] = s.of[k] != s.of[k] ? float_of(0x7FC00000) : s.of[k];
    }
    return s;
}

INLINE stats_t finished(const float *terms, int64_t count) {
    stats_t s;
    finish(terms, (float)greater(count, 1), s.of);
    return as_stored(s);
}

INLINE void put_row(stats_t s, int row, tile_stats_t *restrict stats) {
    for (int k = 0; k < STATS; k++) stats->of[k][row] = s.of[k];
}

static void whole_stats(const float *restrict values, int here, int rows, tile_stats_t *restrict stats) {
    terms_t terms = {{{0}}}; /* gcc does not see that only initialised ones are read */
    reduce(values, here, rows, &terms);
    for (int row = 0; row < rows; row++) {
        float each[TERMS];
        for (int t = 0; t < TERMS; t++) each[t] = terms.of[t][row];
        put_row(finished(each, lesser(BLOCK, here - row * BLOCK)), row, stats);
    }
}

#if SHORTCUT
#define QUICK_TAKE(t, kind) lanes_##t[j] = kind##_BOTH(lanes_##t[j], kind##_OF(quick_term_##t(values[i + j])));
DEFINE_REDUCE(quick_terms_t, quick_lanes_t, quick_reduce_row, quick_reduce, EACH_QUICK_TERM, QUICK_TAKE, QUICK_TERMS)

/* As whole_stats, by the shortcut; blocks for which it does not hold are computed again. */
static void quick_stats(const float *restrict values, int here, int rows, tile_stats_t *restrict stats) {
    quick_terms_t terms = {{{0}}};
    int32_t holds[ROWS], hold = 1;
    quick_reduce(values, here, rows, &terms);
    for (int row = 0; row < rows; row++) {
        float each[QUICK_TERMS];
        stats_t s;
        for (int t = 0; t < QUICK_TERMS; t++) each[t] = terms.of[t][row];
        quick_finish(each, (float)lesser(BLOCK, here - row * BLOCK), s.of);
        put_row(as_stored(s), row, stats);
        hold &= holds[row] = quick_holds(each);
    }
    for (int row = 0; !hold && row < rows; row++) {
        if (holds[row]) continue;
        tile_stats_t one;
        whole_stats(values + row * BLOCK, (int)lesser(BLOCK, here - row * BLOCK), 1, &one);
        for (int k = 0; k < STATS; k++) stats->of[k][row] = one.of[k][0];
    }
}
#else
#define quick_stats whole_stats
#endif

/* Computes the statistics of all blocks of a tile; 0 for blocks without elements. */
SHARED void tile_stats(const float *restrict values, int here, tile_stats_t *restrict stats) {
    int rows = (here + BLOCK - 1) / BLOCK;
    quick_stats(values, here, rows, stats);
    for (int k = 0; k < STATS; k++)
        for (int row = rows; row < ROWS; row++) stats->of[k][row] = 0.0f;
}

static void put_stats(const call_t *call, uint8_t *payload, int64_t block, int rows, const tile_stats_t *stats) {
    for (int k = 0; k < STATS; k++) {
        int64_t slot = k * call->blocks + block;
#if STAT_BF16
        for (int row = 0; row < rows; row++) ((uint16_t *)(payload + 16))[slot + row] = to_bf16(stats->of[k][row]);
#else
        memcpy((float *)(payload + 16) + slot, stats->of[k], sizeof(float) * (size_t)rows);
#endif
    }
}

static stats_t get_stats(const call_t *call, const uint8_t *payload, int64_t block) {
    stats_t s;
    for (int k = 0; k < STATS; k++) {
        int64_t slot = k * call->blocks + (WHOLE ? 0 : block);
#if STAT_BF16
        s.of[k] = of_bf16(((const uint16_t *)(payload + 16))[slot]);
#else
        s.of[k] = ((const float *)(payload + 16))[slot];
#endif
    }
    return s;
}
#else
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

/* Computes the merged decodings of all sources, from element `first` of their chunk on. */
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

/* ------------------------------------------------------------------ residuals in 8 bits, see toolkit/residuals.py */

enum { GROUP = 256, CARRY = (1 << 23) - 1 - 0x7E0000 };
typedef struct { uint8_t *exponents; int8_t *codes; } codes_of_t; /* of a tile */

static codes_of_t encoded_residual(const call_t *call, tile_t t) {
    int64_t size = (call->size + 15) / 16 * 16, groups = ((call->size + GROUP - 1) / GROUP + 15) / 16 * 16;
    uint8_t *row = (uint8_t *)call->residual + t.chunk * (groups + size);
    return (codes_of_t){row + t.first / GROUP, (int8_t *)row + groups + t.first};
}

static void decode_residual(codes_of_t from, int here, float *restrict values) {
    for (int at = 0; at < here; at += GROUP) {
        int count = (int)lesser(GROUP, here - at);
        float scale = float_of((int32_t)from.exponents[at / GROUP] << 23);
        for (int i = at; i < at + count; i++) values[i] = (float)from.codes[i] * scale;
    }
}

static void encode_residual(const float *restrict values, int here, codes_of_t to) {
    for (int at = 0; at < here; at += GROUP) {
        int count = (int)lesser(GROUP, here - at);
        int32_t largest = 0;
        for (int i = at; i < at + count; i++) {
            int32_t key = key_of(values[i]);
            largest = largest > key ? largest : key;
        }
        int32_t exponent = (int32_t)greater(((largest + CARRY) >> 23) - 6, 1);
        float power = float_of((254 - exponent) << 23);
        int8_t *restrict codes = to.codes + at;
        for (int i = 0; i < count; i++) codes[i] = (int8_t)bits_of(values[at + i] * power + 12582912.0f);
        to.exponents[at / GROUP] = (uint8_t)exponent;
    }
}

/* Returns the residual of a tile: its own memory, or `scratch` for one in 8 bits. */
INLINE float *residual_of(const call_t *call, tile_t t, float *restrict scratch) {
    if (!call->residual || !call->is_encoded) return AT(call->residual, t.unit_first);
    decode_residual(encoded_residual(call, t), t.here, scratch);
    return scratch;
}

static tile_t locate(const call_t *call, int64_t index) {
    return tile_of(index, call->tiles, TILE, call->size, call->numel);
}

/* Returns the values to encode: `scratch`, or the gradient's own memory if there is no residual `r` to add. */
static const float *load_tile(const call_t *call, tile_t t, const float *restrict r, float *restrict scratch) {
    if (r && !call->is_encoded) prefetch(r + TILE, sizeof(float) * TILE);
#if MERGING
    merged_tile(call, call->source, t.first, t.here, scratch);
#else
    if (call->dtype == FP32) {
        const float *restrict g = AT((const float *)call->source, t.unit_first);
        if (!r) return g;
        prefetch(g + TILE, sizeof(float) * TILE);
        for (int i = 0; i < t.here; i++) scratch[i] = accumulate(g[i], r[i]);
        return scratch;
    }
    load(call->source, call->dtype, t.unit_first, t.here, scratch);
#endif
    if (r)
        for (int i = 0; i < t.here; i++) scratch[i] = accumulate(scratch[i], r[i]);
    return scratch;
}

INLINE void encode_row(const float *restrict values, const float *restrict dither, stats_t s, int count,
                       uint8_t *restrict codes, float *restrict residual) {
    int good = 1;
#if STATS
    for (int k = 0; k < STATS; k++) good &= s.of[k] == s.of[k];
#endif
    (void)dither;
    if (good)
        for (int i = 0; i < count; i++) codes[i] = (uint8_t)quantize(values[i], s.of, RANDOM ? dither[i] : 0.0f);
    else
        memset(codes, 0, (size_t)count);
    if (residual)
        for (int i = 0; i < count; i++) {
            float left = keep(values[i], dequantize(codes[i], s.of));
            residual[i] = is_finite(left) ? left : residual[i];
        }
}

/* ------------------------------------------------------------------ functions for Python */

#if WHOLE
static void partials(const call_t *call, int64_t start, int64_t stop) {
    float scratch[TILE], kept[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        const float *values = load_tile(call, t, residual_of(call, t, kept), scratch);
        terms_t terms;
        reduce(values, t.here, 1, &terms);
        memcpy(call->partials + index * TERMS, terms.of, sizeof terms.of);
    }
}

#define COMBINE(t, kind) \
    kind##_total_t total_##t = kind##_START; \
    for (int64_t i = 0; i < call->tiles; i++) \
        total_##t = kind##_BOTH(total_##t, kind##_OF(of_tile[i * TERMS + t])); \
    terms.of[t][0] = kind##_RESULT((kind##_t)total_##t);

static void finish_chunks(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t chunk = start; chunk < stop; chunk++) {
        terms_t terms;
        const float *of_tile = call->partials + chunk * call->tiles * TERMS;
        EACH_TERM(COMBINE)
        int64_t count = greater(lesser(call->size, call->numel - chunk * call->size), 0);
        tile_stats_t stats = {{{0}}};
        if (count) memcpy(stats.of, finished(terms.of[0], count).of, sizeof stats.of);
        put_stats(call, call->payload + chunk * call->payload_stride, 0, 1, &stats);
    }
}
#endif

static void encode(const call_t *call, int64_t start, int64_t stop) {
    float scratch[TILE], kept[TILE];
    uint8_t codes[TILE + 8];
#if RANDOM
    float dither[TILE];
#else
    const float *dither = scratch;
#endif
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        float *residual = residual_of(call, t, kept);
        const float *values = load_tile(call, t, residual, scratch);
#if RANDOM
        draw(call->seed, t.unit_first, t.here, dither, AT((const float *)call->source, t.unit_first + TILE));
#endif
        int rows = (t.laid_out + BLOCK - 1) / BLOCK;
#if STATS && !WHOLE
        tile_stats_t stats = {{{0}}}; /* gcc does not see that all are computed */
        tile_stats(values, t.here, &stats);
        put_stats(call, payload, t.first / BLOCK, rows, &stats);
#endif
        for (int row = 0; row < rows; row++) {
            int at = row * BLOCK, count = (int)greater(lesser(BLOCK, t.here - at), 0);
#if STATS && !WHOLE
            stats_t s;
            for (int k = 0; k < STATS; k++) s.of[k] = stats.of[k][row];
#else
            stats_t s = get_stats(call, payload, 0);
#endif
            WITH_COUNT(count, encode_row(values + at, dither + at, s, COUNT, codes + at, AT(residual, at)));
        }
        if (residual == kept) encode_residual(kept, t.here, encoded_residual(call, t));
        memset(codes + t.here, 0, (size_t)(t.laid_out - t.here + 8));
        uint8_t *bytes = payload + call->codes_offset + t.first * BITS / 8;
        pack(codes, t.laid_out, bytes);
        if (t.first + TILE >= call->size) { /* the last tile: zeros behind the codes */
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

static void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        merged_tile(call, call->payload + t.chunk * call->payload_stride, t.first, t.here, total);
        store_merged(call->out, call->dtype, t.unit_first, t.here, total, call->accumulate);
    }
}

#if WHOLE
DEFINE_BATCH(partials)
DEFINE_BATCH(finish_chunks)
#endif
DEFINE_BATCH(encode)
DEFINE_BATCH(decode)
