/* Entries on the wire, see entries.py: written from where host.c has put them, and decoded. */

enum { NOT_A_NUMBER = 0x7FC00000 };

/* ------------------------------------------------------------------ writing */

/* The string's ones. Words at the ends belong to other threads, too. */
static void put_highs(uint8_t *highs, const int32_t *restrict indices, int64_t first, int64_t stop, int low) {
    uint64_t *words = (uint64_t *)highs, bits = 0;
    int64_t word = -1;
    for (int64_t entry = first; entry < stop; entry++) {
        int64_t place = entry + (indices[entry] >> low);
        if (place / 64 != word) {
            if (bits) __atomic_fetch_or(words + word, bits, __ATOMIC_RELAXED);
            word = place / 64;
            bits = 0;
        }
        bits |= 1ull << (place % 64);
    }
    if (bits) __atomic_fetch_or(words + word, bits, __ATOMIC_RELAXED);
}

/* Of a block, which begins with a whole byte, like all codes. */
static void put_lows(uint8_t *lows, const int32_t *restrict indices, int64_t first, int count, int low) {
    uint64_t bits = 0;
    int waiting = 0;
    lows += first * low / 8;
    for (int i = 0; i < count; i++) {
        bits |= ((uint64_t)indices[first + i] & ((1u << low) - 1)) << waiting;
        waiting += low;
        if (waiting < 32) continue;
        memcpy(lows, &bits, 4);
        lows += 4;
        bits >>= 32;
        waiting -= 32;
    }
    memcpy(lows, &bits, (size_t)(waiting + 7) / 8);
}

/* 0 for one below the smallest normal number, NaN for one that is not finite. */
static float scale_of(const float *restrict values, int count, int value_bits) {
    float scale;
    if (value_bits == 2) {
        float sums[BLOCK] = {0}; /* neighbours first */
        for (int i = 0; i < count; i++) sums[i] = fabsf(values[i]);
        for (int width = BLOCK / 2; width; width /= 2)
            for (int i = 0; i < width; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
        scale = sums[0] / (float)count;
    } else {
        int32_t largest = 0;
        for (int i = 0; i < count; i++) largest = largest > key_of(values[i]) ? largest : key_of(values[i]);
        scale = float_of(largest) / (float)((1 << (value_bits - 1)) - 1);
    }
    return scale < 0x1p-126f ? 0.0f : is_finite(scale) ? scale : float_of(NOT_A_NUMBER);
}

/* The codes of a block, and into `decoded` what they decode to. */
static void put_codes(uint8_t *payload, const call_t *call, int64_t first, const float *restrict values, int count,
                      float *restrict decoded) {
    int value_bits = call->value_bits, limit = (1 << (value_bits - 1)) - 1;
    float scale = scale_of(values, count, value_bits), inverse = scale == 0 ? 0.0f : 1.0f / scale;
    uint8_t codes[BLOCK] = {0};
    memcpy(payload + call->scales_offset + first / BLOCK * 4, &scale, 4);
    int finite = is_finite(scale);
    for (int i = 0; i < count; i++) {
        float level = (values[i] * inverse + 0x1.8p23f) - 0x1.8p23f; /* to the nearest integer, ties to even */
        level = level > limit ? limit : level < -limit ? -limit : level;
        int32_t integer = finite ? (int32_t)level : 0;
        codes[i] = (uint8_t)(finite ? integer + limit + 1 : 0);
        decoded[i] = (float)integer * scale;
    }
    uint8_t *bytes = payload + call->values_offset + first * value_bits / 8;
    int each = 8 / value_bits;
    for (int i = 0; i < count; i += each) {
        uint32_t byte = 0;
        for (int j = 0; j < each; j++) byte |= (uint32_t)codes[i + j] << (j * value_bits);
        *bytes++ = (uint8_t)byte;
    }
}

static void put_values(uint8_t *payload, const call_t *call, int64_t first, const float *restrict values, int count,
                       float *restrict decoded) {
    if (call->value_bits == 32) {
        float *to = (float *)(payload + call->values_offset) + first;
        for (int i = 0; i < count; i++) to[i] = values[i] != values[i] ? float_of(NOT_A_NUMBER) : values[i];
    } else if (call->value_bits == 16) {
        uint16_t *to = (uint16_t *)(payload + call->values_offset) + first;
        for (int i = 0; i < count; i++) {
            to[i] = to_bf16(values[i]);
            decoded[i] = of_bf16(to[i]);
        }
    } else {
        put_codes(payload, call, first, values, count, decoded);
    }
}

/* Blocks of entries, chunk by chunk: into the payload, and what their values lose into what is remembered. */
void write_entries(const call_t *call, int64_t start, int64_t stop) {
    float decoded[BLOCK];
    int64_t blocks = (call->k + BLOCK - 1) / BLOCK;
    for (int64_t index = start; index < stop; index++) {
        int64_t chunk = index / blocks, first = index % blocks * BLOCK;
        int count = (int)lesser(call->bounds[chunk * 4 + 3] - first, BLOCK);
        if (count <= 0) continue;
        uint8_t *payload = call->payload + chunk * call->payload_stride;
        const int32_t *indices = call->indices + chunk * call->k;
        const float *values = call->values + chunk * call->k + first;
        put_highs(payload + call->highs_offset, indices, first, first + count, call->low);
        put_lows(payload + call->lows_offset, indices, first, count, call->low);
        put_values(payload, call, first, values, count, decoded);
        if (!call->residual || call->value_bits == 32) continue;
        float *residual = AT(call->residual, chunk * call->size);
        float *velocity = AT(call->velocity, chunk * call->size);
        const float *velocities = call->velocities + chunk * call->k;
        for (int i = 0; i < count; i++) {
            float left = values[i] - decoded[i];
            if (!is_finite(left)) continue;
            residual[indices[first + i]] = left;
            if (velocity) velocity[indices[first + i]] = decoded[i] == 0.0f ? velocities[first + i] : 0.0f;
        }
    }
}

/* ------------------------------------------------------------------ reading */

/* The string's bits from 64 * word on; behind its end they are neither ones nor zeros that count. */
static inline uint64_t word_of(const uint8_t *highs, int64_t word) {
    uint64_t bits;
    memcpy(&bits, highs + word * 8, 8);
    return bits;
}

/* Where in its string every tile begins, payload by payload: behind as many zeros as there are groups before it. */
void find_starts(const call_t *call, int64_t start, int64_t stop) {
    int64_t groups = TILE >> call->low, end = call->highs_words * 32;
    for (int64_t index = start; index < stop; index++) {
        const uint8_t *highs = call->payload + index / call->chunks * call->source_stride +
                               index % call->chunks * call->payload_stride + call->highs_offset;
        int64_t *starts = call->starts + index * (call->tiles + 1), zeros = 0, tile = 1;
        starts[0] = 0;
        for (int64_t at = 0; at < end && tile <= call->tiles; at += 64) {
            uint64_t empty = ~word_of(highs, at / 64);
            if (end - at < 64) empty &= 0xFFFFFFFF;
            int here = __builtin_popcountll(empty);
            for (; tile <= call->tiles && tile * groups <= zeros + here; tile++) {
                uint64_t rest = empty;
                for (int64_t skipped = tile * groups - zeros - 1; skipped; skipped--) rest &= rest - 1;
                starts[tile] = at + __builtin_ctzll(rest) + 1;
            }
            zeros += here;
        }
        for (; tile <= call->tiles; tile++) starts[tile] = end;
    }
}

static inline int low_of(const uint8_t *lows, int64_t entry, int low) {
    uint32_t bits; /* behind the last one there are values */
    memcpy(&bits, lows + entry * low / 8, 4);
    return (int)(bits >> (entry * low % 8) & ((1u << low) - 1));
}

static inline float value_of(const call_t *call, const uint8_t *payload, int64_t entry) {
    const uint8_t *values = payload + call->values_offset;
    int value_bits = call->value_bits;
    if (value_bits == 32) return ((const float *)values)[entry];
    if (value_bits == 16) return of_bf16(((const uint16_t *)values)[entry]);
    float scale = ((const float *)(payload + call->scales_offset))[entry / BLOCK];
    int code = values[entry * value_bits / 8] >> (entry * value_bits % 8) & ((1 << value_bits) - 1);
    return (float)(code - (1 << (value_bits - 1))) * scale;
}

/* Add a tile's entries, bits `at` to `stop` of the string. False if there are any that no encoder writes. */
static int add_entries(const call_t *call, const uint8_t *payload, int64_t tile, int64_t at, int64_t stop,
                       float *restrict total) {
    int low = call->low;
    int64_t first_group = tile * (TILE >> low), entry = at - first_group, last = -1;
    if (stop - at > TILE + (TILE >> low)) return 0; /* more entries than elements */
    for (int64_t word = at / 64; word * 64 < stop; word++) {
        uint64_t bits = word_of(payload + call->highs_offset, word);
        if (word == at / 64) bits &= ~0ull << (at % 64);
        if (stop - word * 64 < 64) bits &= (1ull << (stop - word * 64)) - 1;
        for (; bits; bits &= bits - 1, entry++) {
            if (entry >= call->k) return 0;
            int64_t group = word * 64 + __builtin_ctzll(bits) - entry - first_group;
            int64_t place = (group << low) + low_of(payload + call->lows_offset, entry, low);
            if (place <= last) return 0;
            last = place;
            total[place] += value_of(call, payload, entry);
        }
    }
    return 1;
}

void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        int64_t tile = index % call->tiles;
        const uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        int good = 1;
        memset(total, 0, sizeof total);
        for (int64_t source = 0; source < call->sources; source++, payload += call->source_stride) {
            const int64_t *starts = call->starts + (source * call->chunks + t.chunk) * (call->tiles + 1) + tile;
            int32_t status;
            memcpy(&status, payload, 4);
            good &= status == STATUS;
            if (t.here) good &= add_entries(call, payload, tile, starts[0], starts[1], total);
        }
        for (int i = 0; i < t.here; i++) total[i] = good ? total[i] * call->scale : NAN;
        store_merged(call->out, call->dtype, t.unit_first, t.here, total, call->accumulate);
    }
}
