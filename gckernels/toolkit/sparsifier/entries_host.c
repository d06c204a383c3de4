/* Entries as the wire format has them, see entries.py: writing those that emit_host.c has put side by side, and
   decoding. */

enum { NOT_A_NUMBER = 0x7FC00000 };

/* ------------------------------------------------------------------ writing */

/* Sets the string's ones. Other threads write to the first and the last word, too. */
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

/* Packs the low bits of a block. It begins at a whole byte, as its codes do. */
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

/* Returns the scale of a block: 0 instead of a subnormal number, NaN instead of any number that is not finite. */
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

/* Writes the scale and the codes of a block, and into `decoded` what they decode to. */
static void put_codes(uint8_t *payload, const payloads_t *to, int64_t first, const float *restrict values, int count,
                      float *restrict decoded) {
    int value_bits = to->value_bits, limit = (1 << (value_bits - 1)) - 1;
    float scale = scale_of(values, count, value_bits), inverse = scale == 0 ? 0.0f : 1.0f / scale;
    uint8_t codes[BLOCK] = {0};
    memcpy(payload + to->scales_offset + first / BLOCK * 4, &scale, 4);
    int finite = is_finite(scale);
    for (int i = 0; i < count; i++) {
        float level = (values[i] * inverse + 0x1.8p23f) - 0x1.8p23f; /* to the nearest integer, ties to even */
        level = level > limit ? limit : level < -limit ? -limit : level;
        int32_t integer = finite ? (int32_t)level : 0;
        codes[i] = (uint8_t)(finite ? integer + limit + 1 : 0);
        decoded[i] = (float)integer * scale;
    }
    uint8_t *bytes = payload + to->values_offset + first * value_bits / 8;
    int each = 8 / value_bits;
    for (int i = 0; i < count; i += each) {
        uint32_t byte = 0;
        for (int j = 0; j < each; j++) byte |= (uint32_t)codes[i + j] << (j * value_bits);
        *bytes++ = (uint8_t)byte;
    }
}

static void put_values(uint8_t *payload, const payloads_t *to, int64_t first, const float *restrict values, int count,
                       float *restrict decoded) {
    if (to->value_bits == 32) {
        float *at = (float *)(payload + to->values_offset) + first;
        for (int i = 0; i < count; i++) at[i] = values[i] != values[i] ? float_of(NOT_A_NUMBER) : values[i];
    } else if (to->value_bits == 16) {
        uint16_t *at = (uint16_t *)(payload + to->values_offset) + first;
        for (int i = 0; i < count; i++) {
            at[i] = to_bf16(values[i]);
            decoded[i] = of_bf16(at[i]);
        }
    } else {
        put_codes(payload, to, first, values, count, decoded);
    }
}

/* Writes blocks of entries, chunk by chunk, into the payload, and what their values lose into residual and velocity. */
void write_entries(const encode_t *call, int64_t start, int64_t stop) {
    const payloads_t *to = &call->payloads;
    const write_t *write = &call->write;
    float decoded[BLOCK];
    int64_t blocks = (to->k + BLOCK - 1) / BLOCK;
    for (int64_t index = start; index < stop; index++) {
        int64_t chunk = index / blocks, first = index % blocks * BLOCK;
        int count = (int)lesser(call->select.bounds[chunk * 4 + 3] - first, BLOCK);
        if (count <= 0) continue;
        uint8_t *payload = to->payload + chunk * to->payload_stride;
        const int32_t *indices = write->indices + chunk * to->k;
        const float *values = write->values + chunk * to->k + first;
        put_highs(payload + to->highs_offset, indices, first, first + count, to->low);
        put_lows(payload + to->lows_offset, indices, first, count, to->low);
        put_values(payload, to, first, values, count, decoded);
        if (!call->source.residual || to->value_bits == 32) continue;
        float *residual = AT(call->source.residual, chunk * to->size);
        float *velocity = AT(call->source.velocity, chunk * to->size);
        const float *velocities = write->velocities + chunk * to->k;
        for (int i = 0; i < count; i++) {
            float left = values[i] - decoded[i];
            if (!is_finite(left)) continue;
            residual[indices[first + i]] = left;
            if (velocity) velocity[indices[first + i]] = decoded[i] == 0.0f ? velocities[first + i] : 0.0f;
        }
    }
}

/* ------------------------------------------------------------------ reading */

/* Returns the string's bits from 64 * word on. Those behind its end are not looked at. */
static inline uint64_t word_of(const uint8_t *highs, int64_t word) {
    uint64_t bits;
    memcpy(&bits, highs + word * 8, 8);
    return bits;
}

/* Finds the bit of the string at which every tile begins, payload by payload: behind as many zeros as there are groups
   before the tile. */
void find_starts(const decode_t *call, int64_t start, int64_t stop) {
    const payloads_t *from = &call->payloads;
    int64_t groups = TILE >> from->low, end = from->highs_words * 32;
    for (int64_t index = start; index < stop; index++) {
        const uint8_t *highs = from->payload + index / from->chunks * call->source_stride +
                               index % from->chunks * from->payload_stride + from->highs_offset;
        int64_t *starts = call->starts + index * (from->tiles + 1), zeros = 0, tile = 1;
        starts[0] = 0;
        for (int64_t at = 0; at < end && tile <= from->tiles; at += 64) {
            uint64_t empty = ~word_of(highs, at / 64);
            if (end - at < 64) empty &= 0xFFFFFFFF;
            int here = __builtin_popcountll(empty);
            for (; tile <= from->tiles && tile * groups <= zeros + here; tile++) {
                uint64_t rest = empty;
                for (int64_t skipped = tile * groups - zeros - 1; skipped; skipped--) rest &= rest - 1;
                starts[tile] = at + __builtin_ctzll(rest) + 1;
            }
            zeros += here;
        }
        for (; tile <= from->tiles; tile++) starts[tile] = end;
    }
}

static inline int low_of(const uint8_t *lows, int64_t entry, int low) {
    uint32_t bits; /* behind the last one there are values */
    memcpy(&bits, lows + entry * low / 8, 4);
    return (int)(bits >> (entry * low % 8) & ((1u << low) - 1));
}

static inline float value_of(const payloads_t *from, const uint8_t *payload, int64_t entry) {
    const uint8_t *values = payload + from->values_offset;
    int value_bits = from->value_bits;
    if (value_bits == 32) return ((const float *)values)[entry];
    if (value_bits == 16) return of_bf16(((const uint16_t *)values)[entry]);
    float scale = ((const float *)(payload + from->scales_offset))[entry / BLOCK];
    int code = values[entry * value_bits / 8] >> (entry * value_bits % 8) & ((1 << value_bits) - 1);
    return (float)(code - (1 << (value_bits - 1))) * scale;
}

/* Adds the entries of a tile, bits `at` to `stop` of the string. Returns 0 if there is one that no encoder writes. */
static int add_entries(const payloads_t *from, const uint8_t *payload, int64_t tile, int64_t at, int64_t stop,
                       float *restrict total) {
    int low = from->low;
    int64_t first_group = tile * (TILE >> low), entry = at - first_group, last = -1;
    if (stop - at > TILE + (TILE >> low)) return 0; /* more entries than elements */
    for (int64_t word = at / 64; word * 64 < stop; word++) {
        uint64_t bits = word_of(payload + from->highs_offset, word);
        if (word == at / 64) bits &= ~0ull << (at % 64);
        if (stop - word * 64 < 64) bits &= (1ull << (stop - word * 64)) - 1;
        for (; bits; bits &= bits - 1, entry++) {
            if (entry >= from->k) return 0;
            int64_t group = word * 64 + __builtin_ctzll(bits) - entry - first_group;
            int64_t place = (group << low) + low_of(payload + from->lows_offset, entry, low);
            if (place <= last) return 0;
            last = place;
            total[place] += value_of(from, payload, entry);
        }
    }
    return 1;
}

void decode(const decode_t *call, int64_t start, int64_t stop) {
    const payloads_t *from = &call->payloads;
    float total[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(from, index);
        int64_t tile = index % from->tiles;
        const uint8_t *payload = from->payload + t.chunk * from->payload_stride;
        int good = 1;
        memset(total, 0, sizeof total);
        for (int64_t source = 0; source < call->sources; source++, payload += call->source_stride) {
            const int64_t *starts = call->starts + (source * from->chunks + t.chunk) * (from->tiles + 1) + tile;
            int32_t status;
            memcpy(&status, payload, 4);
            good &= status == STATUS;
            if (t.here) good &= add_entries(from, payload, tile, starts[0], starts[1], total);
        }
        for (int i = 0; i < t.here; i++) total[i] = good ? total[i] * call->scale : NAN;
        store_merged(call->out, call->dtype, t.unit_first, t.here, total, call->accumulate);
    }
}

/* ------------------------------------------------------------------ many units on one thread */

/* Writes the selected entries of a unit. */
void emit_alone(const encode_t *call) {
    int64_t chunks = call->payloads.chunks, tiles = chunks * call->payloads.tiles;
    count_entries(call, 0, tiles);
    place_entries(call, 0, chunks);
    emit_entries(call, 0, tiles);
    write_entries(call, 0, chunks * ((call->payloads.k + BLOCK - 1) / BLOCK));
}

/* Encodes units, from `unit` on, all with the same buffers. Returns the number of a unit with a chunk that must be
   searched as a whole: it has been selected from and not been written. Returns `stop` when all are done. */
int64_t encode_units(encode_t *calls, int64_t unit, int64_t stop, uint64_t added, uint8_t *buffers) {
    for (; unit < stop; unit++) {
        encode_t *call = calls + unit;
        int64_t chunks = call->payloads.chunks, tiles = chunks * call->payloads.tiles;
        lay_out(call, buffers);
        call->select.added = added;
        add_squares(call, 0, tiles);
        limit_norm(call);
        take_samples(call, 0, chunks * call->select.sample_blocks);
        bound_keys(call, 0, chunks);
        collect(call, 0, tiles);
        narrow(call, 0, chunks);
        if (missing_from(call, 0) >= 0) return unit;
        emit_alone(call);
    }
    return stop;
}

/* Decodes units `start` to `stop`, all with the same buffer. */
void decode_units(decode_t *calls, int64_t start, int64_t stop, int64_t *starts) {
    for (int64_t unit = start; unit < stop; unit++) {
        decode_t *call = calls + unit;
        int64_t chunks = call->payloads.chunks;
        call->starts = starts;
        find_starts(call, 0, call->sources * chunks);
        decode(call, 0, chunks * call->payloads.tiles);
    }
}
