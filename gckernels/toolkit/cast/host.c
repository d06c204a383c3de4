/* The host path of the casts. host.py puts in front of it call_t, made from the class HostCall, DTYPE, the payload's
   type, and TILE. */

enum { NUMBER_NBYTES = DTYPE == 0 ? 4 : 2 };

/* Stores numbers in a payload. Every NaN becomes the quiet one without a sign, so that equal values have equal bytes.
   */
static void put(void *to, int64_t first, int count, const float *values) {
#if DTYPE == 0
    float *x = (float *)to + first;
    for (int i = 0; i < count; i++) x[i] = values[i] != values[i] ? float_of(0x7FC00000) : values[i];
#elif DTYPE == 1
    store(to, BF16, first, count, values);
#else
    store(to, FP16, first, count, values);
    uint16_t *x = (uint16_t *)to + first;
    for (int i = 0; i < count; i++) x[i] = values[i] != values[i] ? 0x7E00 : x[i];
#endif
}

/* Computes the scaled sum of a tile of all sources, whose chunk is at `payload` in the first one. */
static void merged_tile(const call_t *call, const uint8_t *payload, tile_t t, float *restrict total) {
    float values[TILE];
    memset(total, 0, sizeof(float) * (size_t)t.here);
    for (int64_t source = 0; source < call->sources; source++, payload += call->source_stride) {
        load(payload, DTYPE, t.first, t.here, values);
        for (int i = 0; i < t.here; i++) total[i] += values[i];
    }
    for (int i = 0; i < t.here; i++) total[i] *= call->scale;
}

static inline __attribute__((always_inline)) void encode_tiles(const call_t *call, int64_t start, int64_t stop,
                                                               int merging) {
    float values[TILE], sent[TILE];
    const float scale = merging ? 1.0f : call->scale; /* of the numbers that are sent */
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        float *restrict r = AT(call->residual, t.unit_first);
        if (!merging && call->residual && call->dtype == FP32) {
            const float *restrict g = AT((const float *)call->source, t.unit_first);
            for (int i = 0; i < t.here; i++) values[i] = g[i] + r[i];
        } else {
            if (merging)
                merged_tile(call, call->source, t, values);
            else
                load(call->source, call->dtype, t.unit_first, t.here, values);
            if (call->residual)
                for (int i = 0; i < t.here; i++) values[i] += r[i];
        }
        uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        for (int i = 0; i < t.here; i++) sent[i] = values[i] * scale;
        put(payload, t.first, t.here, sent);
        if (call->residual) {
            load(payload, DTYPE, t.first, t.here, sent);
            for (int i = 0; i < t.here; i++) {
                float left = values[i] - sent[i] / scale;
                r[i] = is_finite(left) ? left : r[i];
            }
        }
        int64_t used = (t.first + t.here) * NUMBER_NBYTES, end = (t.first + TILE) * NUMBER_NBYTES;
        if (t.first + TILE >= call->size) end = call->payload_nbytes; /* padding included */
        memset(payload + used, 0, (size_t)(end - used));
    }
}

static void encode(const call_t *call, int64_t start, int64_t stop) { encode_tiles(call, start, stop, 0); }
static void recode(const call_t *call, int64_t start, int64_t stop) { encode_tiles(call, start, stop, 1); }

static void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        merged_tile(call, call->payload + t.chunk * call->payload_stride, t, total);
        store_merged(call->out, call->dtype, t.unit_first, t.here, total, call->accumulate);
    }
}

DEFINE_BATCH(encode)
DEFINE_BATCH(decode)
DEFINE_BATCH(recode)
