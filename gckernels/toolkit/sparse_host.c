/* The host path of the sparsifiers; sparse_host.py puts TILE and STATUS in front of it. */

enum { BINS = 2048, COPIES = 4, LANES = 16, LARGEST_FINITE = 0x7F7FFFFF };

typedef struct {
    const void *source; /* the gradient */
    float *residual;    /* or NULL */
    uint8_t *payload;   /* where to; or, when decoding, where from */
    void *out;          /* when decoding */
    int64_t *counts;    /* [chunks, BINS] */
    int64_t *bounds;    /* [chunks, 4]: lower, upper, room between them, entries */
    int64_t *entries;   /* [chunks * tiles, 3]: above the bounds and between them; then, before the tile; where in keys */
    int64_t *cursors;   /* [chunks], into keys; or NULL */
    int32_t *keys;      /* between the bounds, or of one chunk's sample */
    int64_t numel, size, tiles; /* of the unit; of a payload; per chunk */
    int64_t k, indices_offset, values_offset, nbytes; /* of a payload */
    int64_t payload_stride, sources, source_stride;
    int64_t sample_stride, first; /* of one chunk, which begins at `first` */
    uint64_t seed;
    float scale;
    int32_t dtype, accumulate, bf16;
} call_t;

typedef struct { int64_t chunk, first, unit_first; int here; } tile_t;

static tile_t locate(const call_t *call, int64_t index) {
    tile_t t;
    t.chunk = index / call->tiles;
    t.first = index % call->tiles * TILE;
    t.unit_first = t.chunk * call->size + t.first;
    int64_t limit = lesser(call->size, call->numel - t.chunk * call->size);
    t.here = (int)greater(lesser(limit - t.first, TILE), 0);
    return t;
}

/* Gradient and residual, zeros behind them up to a multiple of LANES. */
static void load_tile(const call_t *call, tile_t t, float *restrict values) {
    const float *restrict r = call->residual + t.unit_first;
    if (call->residual) prefetch(r + TILE, sizeof(float) * TILE);
    if (call->dtype == FP32) {
        const float *restrict g = (const float *)call->source + t.unit_first;
        prefetch(g + TILE, sizeof(float) * TILE);
        if (call->residual)
            for (int i = 0; i < t.here; i++) values[i] = g[i] + r[i];
        else
            memcpy(values, g, sizeof(float) * (size_t)t.here);
    } else {
        load(call->source, call->dtype, t.unit_first, t.here, values);
        if (call->residual)
            for (int i = 0; i < t.here; i++) values[i] += r[i];
    }
    for (int i = t.here; i % LANES; i++) values[i] = 0.0f;
}

/* ------------------------------------------------------------------ keys */

static void add_counts(const call_t *call, int64_t chunk, uint32_t counts[COPIES][BINS]) {
    for (int bin = 0; bin < BINS; bin++) {
        int64_t total = 0;
        for (int copy = 0; copy < COPIES; copy++) total += counts[copy][bin];
        if (total) __atomic_fetch_add(call->counts + chunk * BINS + bin, total, __ATOMIC_RELAXED);
    }
    memset(counts, 0, sizeof(uint32_t) * COPIES * BINS);
}

/* How many keys begin with which 11 bits. */
void count_keys(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE];
    int32_t bins[TILE];
    uint32_t counts[COPIES][BINS]; /* several, because equal bins in a row would wait for each other */
    memset(counts, 0, sizeof counts);
    int64_t chunk = start / call->tiles;
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        if (t.chunk != chunk) {
            add_counts(call, chunk, counts);
            chunk = t.chunk;
        }
        load_tile(call, t, values);
        for (int i = 0; i < t.here; i++) bins[i] = key_of(values[i]) >> 20;
        int i = 0;
        for (; i + COPIES <= t.here; i += COPIES)
            for (int copy = 0; copy < COPIES; copy++) counts[copy][bins[i + copy]]++;
        for (; i < t.here; i++) counts[0][bins[i]]++;
    }
    add_counts(call, chunk, counts);
}

/* Keys of one chunk's sample, see sample_positions in sparse_keys.py. */
void take_sample(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++) {
        uint64_t at = (uint64_t)(call->first + i * call->sample_stride);
        uint32_t c0 = (uint32_t)at, c1 = (uint32_t)(at >> 32), c2 = 0, c3 = 0;
        uint32_t k0 = (uint32_t)call->seed, k1 = (uint32_t)(call->seed >> 32);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)b;
            c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)a;
        }
        int64_t place = (int64_t)at + (int64_t)((uint64_t)c0 * (uint64_t)call->sample_stride >> 32);
        float value;
        load(call->source, call->dtype, place, 1, &value);
        if (call->residual) value += call->residual[place];
        call->keys[i] = key_of(value);
    }
}

/* ------------------------------------------------------------------ entries */

/* And, where there are cursors, keep the keys between the bounds: chunk by chunk, those of a tile together. */
void count_entries(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE];
    int32_t between[TILE + LANES];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        load_tile(call, t, values);
        int32_t lower = (int32_t)call->bounds[t.chunk * 4], upper = (int32_t)call->bounds[t.chunk * 4 + 1];
        int32_t above = 0, reaching = 0;
        for (int i = 0; i < t.here; i++) {
            int32_t key = key_of(values[i]);
            above += key > upper;
            reaching += (key >= lower) | (key > upper);
        }
        int64_t *entry = call->entries + index * 3;
        entry[0] = above;
        entry[1] = reaching - above;
        if (!call->cursors || reaching == above) continue;
        int number = 0;
        for (int i = 0; i < t.here; i += LANES) {
            int any = 0;
            for (int j = 0; j < LANES; j++) any |= key_of(values[i + j]) >= lower;
            if (!any) continue;
            for (int j = 0; j < LANES; j++) {
                int32_t key = key_of(values[i + j]);
                between[number] = key;
                number += (key >= lower) & (key <= upper);
            }
        }
        entry[2] = __atomic_fetch_add(call->cursors + t.chunk, number, __ATOMIC_RELAXED);
        memcpy(call->keys + entry[2], between, sizeof(int32_t) * (size_t)number);
    }
}

/* Count again, for bounds that were narrowed to one of the keys that were kept. */
void count_again(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) {
        int64_t *entry = call->entries + index * 3, above = 0, equal = 0;
        int32_t key = (int32_t)call->bounds[index / call->tiles * 4];
        const int32_t *keys = call->keys + (entry[1] ? entry[2] : 0);
        for (int64_t i = 0; i < entry[1]; i++) {
            above += keys[i] > key;
            equal += keys[i] == key;
        }
        entry[0] += above;
        entry[1] = equal;
    }
}

/* Where every tile's entries go; and whatever of the payloads is no entry. */
void place_entries(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t chunk = start; chunk < stop; chunk++) {
        int64_t above = 0, between = 0, *bounds = call->bounds + chunk * 4;
        int64_t *entries = call->entries + chunk * call->tiles * 3;
        for (int64_t tile = 0; tile < call->tiles; tile++, entries += 3) {
            int64_t of_above = entries[0], of_between = entries[1];
            entries[0] = above, entries[1] = between;
            above += of_above, between += of_between;
        }
        int64_t room = greater(call->k - above, 0), count = lesser(above, call->k) + lesser(between, room);
        bounds[2] = room;
        bounds[3] = count;
        uint8_t *payload = call->payload + chunk * call->payload_stride;
        int32_t words[8] = {STATUS, 0, 0, 0, (int32_t)count, 0, 0, 0};
        memcpy(payload, words, sizeof words);
        int64_t used = call->indices_offset + 4 * count;
        memset(payload + used, 0, (size_t)(call->values_offset - used));
        used = call->values_offset + (call->bf16 ? 2 : 4) * count;
        memset(payload + used, 0, (size_t)(call->nbytes - used));
    }
}

void emit_entries(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE], old[TILE];
    int sent[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        load_tile(call, t, values);
        const int64_t *bounds = call->bounds + t.chunk * 4;
        int32_t lower = (int32_t)bounds[0], upper = (int32_t)bounds[1];
        int64_t above = call->entries[index * 3], between = call->entries[index * 3 + 1], room = bounds[2];
        int64_t place = above + lesser(between, room);
        float *restrict r = call->residual ? call->residual + t.unit_first : NULL;
        int number = 0;
        for (int i = 0; i < t.here; i += LANES) { /* zeros behind the last element are never sent */
            int any = 0;
            for (int j = 0; j < LANES; j++) any |= key_of(values[i + j]) >= lower || key_of(values[i + j]) > upper;
            if (!any) continue;
            for (int j = i; j < i + LANES; j++) {
                int32_t key = key_of(values[j]);
                if (key > upper ? above++ < call->k : key >= lower && between++ < room) {
                    if (r) old[number] = r[j];
                    sent[number++] = j;
                }
            }
        }
        if (r)
            for (int i = 0; i < t.here; i++) r[i] = is_finite(values[i]) ? values[i] : r[i];
        uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        int32_t *restrict indices = (int32_t *)(payload + call->indices_offset) + place;
        for (int n = 0; n < number; n++) {
            float value = values[sent[n]], decoded = value;
            indices[n] = (int32_t)(t.first + sent[n]);
            if (call->bf16) {
                uint16_t bits = to_bf16(value);
                ((uint16_t *)(payload + call->values_offset))[place + n] = bits;
                decoded = float_of((int32_t)((uint32_t)bits << 16));
            } else {
                ((float *)(payload + call->values_offset))[place + n] = value != value ? float_of(0x7FC00000) : value;
            }
            if (r) {
                float left = value - decoded;
                r[sent[n]] = is_finite(left) ? left : old[n];
            }
        }
    }
}

/* ------------------------------------------------------------------ decoding */

static int64_t first_from(const int32_t *indices, int64_t count, int64_t index) {
    int64_t first = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (indices[first + half] < index) {
            first += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return first;
}

void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE], old[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(call, index);
        const uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        int damaged = 0;
        memset(total, 0, sizeof total);
        for (int64_t source = 0; source < call->sources; source++, payload += call->source_stride) {
            int32_t words[5];
            memcpy(words, payload, sizeof words);
            damaged |= words[0] != STATUS;
            int64_t count = greater(lesser(words[4], call->k), 0);
            const int32_t *indices = (const int32_t *)(payload + call->indices_offset);
            for (int64_t e = first_from(indices, count, t.first); e < count && indices[e] < t.first + t.here; e++) {
                if (indices[e] < t.first) continue; /* no encoder writes this */
                total[indices[e] - t.first] +=
                    call->bf16 ? float_of((int32_t)((uint32_t)((const uint16_t *)(payload + call->values_offset))[e] << 16))
                               : ((const float *)(payload + call->values_offset))[e];
            }
        }
        for (int i = 0; i < t.here; i++) total[i] = damaged ? NAN : total[i] * call->scale;
        if (call->accumulate) {
            load(call->out, call->dtype, t.unit_first, t.here, old);
            for (int i = 0; i < t.here; i++) total[i] += old[i];
        }
        store(call->out, call->dtype, t.unit_first, t.here, total);
    }
}
