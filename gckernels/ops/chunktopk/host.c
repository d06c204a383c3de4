/* The host path of ChunkTopK: what kernels.py does, group by group. host.py puts in front of this text call_t, made
   from its class _Call, and the constants GROUP, K, CLASSES, BITS (of a value) and STATUS. */
enum { MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, NOT_A_NUMBER = 0x7FC00000 };
enum { LIMIT = (1 << (BITS - 1)) - 1 }; /* of quantised values */
enum { AHEAD = 4096 }; /* elements between those that are worked on and those that are prefetched */
enum { INDICES_NBYTES = K / 2 * 3, VALUES_NBYTES = K * BITS / 8 }; /* of a group */

typedef struct { int64_t chunk, group, first; int here; } place_t;

static place_t locate(const call_t *call, int64_t index) {
    place_t at;
    at.chunk = index / call->tiles;
    at.group = index % call->tiles;
    at.first = at.chunk * call->size + at.group * GROUP;
    int64_t limit = lesser(call->size, call->numel - at.chunk * call->size);
    at.here = (int)greater(lesser(limit - at.group * GROUP, GROUP), 0);
    return at;
}

static inline void prefetch_values(const call_t *call, int64_t first, int count) {
    int width = call->dtype == FP32 ? 4 : 2;
    prefetch(AT((const char *)call->source, first * width), count * width);
    if (call->residual) prefetch(call->residual + first, count * 4);
}

static inline void prefetch_to_write(const call_t *call, int64_t first, int count) {
    int width = call->dtype == FP32 ? 4 : 2;
    const char *to = AT((const char *)call->out, first * width);
    for (int at = 0; at < count * width; at += 64) __builtin_prefetch(to + at, 1, 2);
}

/* ------------------------------------------------------------------ selection */

static inline int reaching(const int32_t *restrict keys, int count, int32_t bound) {
    int total = 0;
    for (int i = 0; i < count; i++) total += keys[i] >= bound;
    return total;
}

/* Returns a bound that at least K of the keys reach and, unless it is the K-th largest key, at most `max_reaching`. At
   least K of them reach `low`, and fewer than K reach `high`. */
static int32_t bound_of(const int32_t *restrict keys, int count, int32_t low, int32_t high, int max_reaching) {
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        int total = reaching(keys, count, middle);
        if (total < K) {
            high = middle;
        } else {
            low = middle;
            if (total <= max_reaching) break;
        }
    }
    return low;
}

/* Writes the indices of the K largest magnitudes of a group, ascending, and returns 1; of equal magnitudes those with
   lower indices. For a group with inf or NaN it writes 0 .. K - 1 and returns 0. The maxima of CLASSES interleaved
   classes bound the K-th largest magnitude from below: few elements reach that bound, and only they are looked at
   again. Meanwhile the values from `soon` on are prefetched, spread over the work: a processor holds few requests. */
static int select_largest(const float *restrict values, int32_t *restrict indices, const call_t *call, int64_t soon) {
    int32_t keys[GROUP + 16], places[GROUP], largest = 0, least = MAGNITUDE;
    for (int i = 0; i < CLASSES; i++) keys[i] = key_of(values[i]);
    for (int at = CLASSES; at < GROUP; at += CLASSES)
        for (int i = 0; i < CLASSES; i++) {
            int32_t key = key_of(values[at + i]);
            keys[i] = keys[i] > key ? keys[i] : key;
        }
    for (int i = 0; i < CLASSES; i++) {
        largest = largest > keys[i] ? largest : keys[i];
        least = least < keys[i] ? least : keys[i];
    }
    for (int i = 0; i <= K; i++) indices[i] = i;
    if (largest >= INFINITE) return 0;
    int32_t bound = bound_of(keys, CLASSES, least, largest + 1, K + K / 8);

    int count = 0;
    for (int at = 0; at < GROUP; at += 64) {
        prefetch_values(call, soon + at, 64);
        for (uint64_t mask = mask_of(values + at, bound); mask; mask &= mask - 1) {
            int place = at + __builtin_ctzll(mask);
            places[count] = place;
            keys[count++] = key_of(values[place]);
        }
    }
    for (int i = count; i < count + 16; i++) keys[i] = -1;
    int padded = (count + 15) & ~15; /* whole vectors */
    bound = bound_of(keys, padded, bound, largest + 1, K);
    int ties = K - reaching(keys, padded, bound + 1), found = 0;
    for (int i = 0; i < count; i++) {
        int equal = keys[i] == bound, taken = (keys[i] > bound) | (equal & (ties > 0));
        ties -= equal;
        indices[found] = places[i];
        found += taken;
    }
    return 1;
}

/* ------------------------------------------------------------------ values and bytes */

static void pack_indices(const int32_t *restrict indices, uint8_t *restrict bytes) {
    for (int i = 0; i < K / 2; i++) {
        uint32_t pair = (uint32_t)indices[2 * i] | (uint32_t)indices[2 * i + 1] << 12;
        bytes[3 * i] = (uint8_t)pair;
        bytes[3 * i + 1] = (uint8_t)(pair >> 8);
        bytes[3 * i + 2] = (uint8_t)(pair >> 16);
    }
}

static void unpack_indices(const uint8_t *restrict bytes, int32_t *restrict indices) {
    for (int i = 0; i < K / 2; i++) {
        int32_t pair = bytes[3 * i] | bytes[3 * i + 1] << 8 | bytes[3 * i + 2] << 16;
        indices[2 * i] = pair & 0xFFF;
        indices[2 * i + 1] = pair >> 12;
    }
}

#if BITS < 16
/* Returns `scale`, or 0 instead of a subnormal number. */
static inline float zero_below_normal(float scale) { return scale < 0x1p-126f ? 0.0f : scale; }

static float scale_of(const float *restrict entries) {
#if BITS == 2
    float sums[K]; /* neighbours first */
    for (int i = 0; i < K; i++) sums[i] = fabsf(entries[i]);
    for (int count = K; count > 1; count -= count / 2) {
        for (int i = 0; i < count / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
        sums[count / 2] = sums[count - 1]; /* the odd one; if the count is even nothing reads it */
    }
    return zero_below_normal(sums[0] / K);
#else
    int32_t largest = 0;
    for (int i = 0; i < K; i++) largest = largest > key_of(entries[i]) ? largest : key_of(entries[i]);
    return zero_below_normal(float_of(largest) / LIMIT);
#endif
}
#endif

/* Writes the values of a group, and into `sent` the numbers that they decode to. Returns 0 if those are NaN. */
static int put_values(uint8_t *payload, const call_t *call, int64_t group, const float *restrict entries, int finite,
                      float *restrict sent) {
    uint8_t *bytes = payload + call->values_offset + group * VALUES_NBYTES;
#if BITS == 16
    uint16_t *values = (uint16_t *)bytes;
    for (int i = 0; i < K; i++) {
        values[i] = finite ? to_bf16(entries[i]) : NOT_A_NUMBER >> 16;
        sent[i] = of_bf16(values[i]);
    }
#else
    float scale = finite ? scale_of(entries) : float_of(NOT_A_NUMBER);
    finite = is_finite(scale);
    scale = finite ? scale : float_of(NOT_A_NUMBER);
    memcpy(payload + 16 + group * 4, &scale, 4);
    if (!finite) {
        memset(bytes, 0, VALUES_NBYTES);
        return 0;
    }
    uint8_t codes[K];
    float inverse = scale == 0 ? 0.0f : 1.0f / scale;
    for (int i = 0; i < K; i++) {
        float level = (entries[i] * inverse + 0x1.8p23f) - 0x1.8p23f; /* to the nearest integer, ties to even */
        level = level > LIMIT ? LIMIT : level < -LIMIT ? -LIMIT : level;
        int32_t integer = (int32_t)level;
        codes[i] = (uint8_t)(integer + LIMIT + 1);
        sent[i] = (float)integer * scale;
    }
    for (int i = 0; i < VALUES_NBYTES; i++) {
        uint32_t byte = 0;
        for (int j = 0; j < 8 / BITS; j++) byte |= (uint32_t)codes[8 / BITS * i + j] << (j * BITS);
        bytes[i] = (uint8_t)byte;
    }
#endif
    return finite;
}

static void get_values(const uint8_t *payload, const call_t *call, int64_t group, float *restrict values) {
    const uint8_t *bytes = payload + call->values_offset + group * VALUES_NBYTES;
#if BITS == 16
    load(bytes, BF16, 0, K, values);
#else
    float scale;
    memcpy(&scale, payload + 16 + group * 4, 4);
    for (int i = 0; i < VALUES_NBYTES; i++)
        for (int j = 0; j < 8 / BITS; j++) {
            int32_t code = bytes[i] >> (j * BITS) & ((1 << BITS) - 1);
            values[8 / BITS * i + j] = (float)(code - LIMIT - 1) * scale;
        }
#endif
}

/* ------------------------------------------------------------------ functions for Python */

static void encode(const call_t *call, int64_t start, int64_t stop) {
    float values[GROUP], entries[K], sent[K];
    int32_t indices[K + 1];
    for (int64_t index = start; index < stop; index++) {
        place_t at = locate(call, index);
        uint8_t *payload = call->payload + at.chunk * call->payload_stride;
        if (at.group == 0) {
            const int32_t header[4] = {STATUS, 0, 0, 0};
            memcpy(payload, header, sizeof header);
        }
        if (at.group == call->groups) continue; /* a payload of no elements */
        float *restrict r = AT(call->residual, at.first);
        load(call->source, call->dtype, at.first, at.here, values);
        if (call->residual)
            for (int i = 0; i < at.here; i++) values[i] += r[i];
        memset(values + at.here, 0, sizeof(float) * (size_t)(GROUP - at.here));
        int finite = select_largest(values, indices, call, at.first + AHEAD);
        for (int i = 0; i < K; i++) entries[i] = values[indices[i]];
        finite = put_values(payload, call, at.group, entries, finite, sent);
        if (!finite)
            for (int i = 0; i < K; i++) indices[i] = i;
        pack_indices(indices, payload + call->indices_offset + at.group * INDICES_NBYTES);
        if (call->residual && finite) {
            for (int i = 0; i < K; i++) {
                float left = entries[i] - sent[i];
                if (indices[i] < at.here) values[indices[i]] = is_finite(left) ? left : r[indices[i]];
            }
            memcpy(r, values, sizeof(float) * (size_t)at.here);
        }
        if (at.group == call->groups - 1) { /* zeros behind the fields */
            int64_t scales = 16 + call->groups * 4 * (BITS < 16), packed = call->groups * INDICES_NBYTES;
            int64_t coded = call->groups * VALUES_NBYTES;
            memset(payload + scales, 0, (size_t)(call->indices_offset - scales));
            memset(payload + call->indices_offset + packed, 0,
                   (size_t)(call->values_offset - call->indices_offset - packed));
            memset(payload + call->values_offset + coded, 0,
                   (size_t)(call->payload_nbytes - call->values_offset - coded));
        }
    }
}

static void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[GROUP], values[GROUP];
    int32_t indices[K];
    for (int64_t index = start; index < stop; index++) {
        place_t at = locate(call, index);
        const uint8_t *payload = call->payload + at.chunk * call->payload_stride;
        int good = 1;
        prefetch_to_write(call, at.first + AHEAD, GROUP);
        memset(total, 0, sizeof total);
        for (int64_t source = 0; source < call->sources && at.here; source++, payload += call->source_stride) {
            int32_t status;
            memcpy(&status, payload, 4);
            unpack_indices(payload + call->indices_offset + at.group * INDICES_NBYTES, indices);
            get_values(payload, call, at.group, values);
            good &= status == STATUS;
            for (int i = 0; i < K; i++) {
                good &= values[i] == values[i];
                good &= i == 0 || indices[i] > indices[i - 1]; /* one that repeats would count once or twice */
                if (indices[i] < GROUP) total[indices[i]] += values[i]; /* a damaged payload can hold any index */
            }
        }
        for (int i = 0; i < at.here; i++) total[i] = (good ? total[i] : NAN) * call->scale;
        store_merged(call->out, call->dtype, at.first, at.here, total, call->accumulate);
    }
}

DEFINE_BATCH(encode)
DEFINE_BATCH(decode)
