/* The host path of the sparsifiers: selecting entries. host.py puts in front of this text the structures payloads_t,
   source_t, select_t, write_t, encode_t and decode_t, made from the classes in calls.py, and the constants TILE, BLOCK,
   STATUS and NAN_KEY; and entries_host.c, which writes and reads entries, behind it. */

enum { BINS = 2048, COPIES = 4, LANES = 16 };

/* Returns the key of an element, one for every NaN: the bits that an addition gives to a NaN are not the same
   everywhere. */
static inline int32_t order_of(float x) { return key_of(x) < NAN_KEY ? key_of(x) : NAN_KEY; }

static tile_t locate(const payloads_t *p, int64_t index) { return tile_of(index, p->tiles, TILE, p->size, p->numel); }

/* Computes the values that entries are selected from, and the new velocity if there is one: see states.py. */
static void accumulate(const source_t *source, const float *g, const float *r, const float *u, int count,
                       float *restrict values, float *restrict velocity) {
    const float m = source->momentum, f = source->factor;
    if (!source->residual)
        copy(values, g, sizeof(float) * (size_t)count);
    else if (!source->velocity)
        for (int i = 0; i < count; i++) values[i] = r[i] + g[i] * f;
    else if (source->nesterov)
        for (int i = 0; i < count; i++) {
            float scaled = g[i] * f;
            velocity[i] = (u[i] + scaled) * m;
            values[i] = r[i] + velocity[i] + scaled;
        }
    else
        for (int i = 0; i < count; i++) {
            velocity[i] = u[i] * m + g[i] * f;
            values[i] = r[i] + velocity[i];
        }
}

/* The same for a tile, and zeros behind its elements up to a multiple of LANES. */
static void load_tile(const source_t *source, tile_t t, float *restrict values, float *restrict velocity) {
    float loaded[TILE];
    const float *r = AT(source->residual, t.unit_first), *u = AT(source->velocity, t.unit_first), *g = loaded;
    if (source->residual) prefetch(r + TILE, sizeof(float) * TILE);
    if (source->velocity) prefetch(u + TILE, sizeof(float) * TILE);
    if (source->dtype == FP32) {
        g = AT((const float *)source->grad, t.unit_first);
        prefetch(g + TILE, sizeof(float) * TILE);
    } else {
        load(source->grad, source->dtype, t.unit_first, t.here, loaded);
    }
    accumulate(source, g, r, u, t.here, values, velocity);
    for (int i = t.here; i % LANES; i++) values[i] = 0.0f;
}

/* Adds up the squares of every tile of the gradient. */
void add_squares(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    float values[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        double sums[LANES] = {0}, total = 0;
        load(source->grad, source->dtype, t.unit_first, t.here, values);
        for (int i = t.here; i % LANES; i++) values[i] = 0.0f;
        for (int i = 0; i < t.here; i += LANES)
            for (int j = 0; j < LANES; j++) sums[j] += (double)values[i + j] * (double)values[i + j];
        for (int j = 0; j < LANES; j++) total += sums[j];
        source->squares[index] = total;
    }
}

/* ------------------------------------------------------------------ keys */

static void add_counts(const select_t *select, int64_t chunk, uint32_t counts[COPIES][BINS]) {
    for (int bin = 0; bin < BINS; bin++) {
        int64_t total = 0;
        for (int copy = 0; copy < COPIES; copy++) total += counts[copy][bin];
        if (total) __atomic_fetch_add(select->counts + chunk * BINS + bin, total, __ATOMIC_RELAXED);
    }
    memset(counts, 0, sizeof(uint32_t) * COPIES * BINS);
}

/* Counts the keys of every chunk by their leading 11 bits. */
void count_keys(const encode_t *call, int64_t start, int64_t stop) {
    float values[TILE], velocity[TILE];
    int32_t bins[TILE];
    uint32_t counts[COPIES][BINS]; /* several, because additions to equal bins would wait for each other */
    memset(counts, 0, sizeof counts);
    int64_t chunk = start / call->payloads.tiles;
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        if (t.chunk != chunk) {
            add_counts(&call->select, chunk, counts);
            chunk = t.chunk;
        }
        load_tile(&call->source, t, values, velocity);
        for (int i = 0; i < t.here; i++) bins[i] = order_of(values[i]) >> 20;
        int i = 0;
        for (; i + COPIES <= t.here; i += COPIES)
            for (int copy = 0; copy < COPIES; copy++) counts[copy][bins[i + copy]]++;
        for (; i < t.here; i++) counts[0][bins[i]]++;
    }
    add_counts(&call->select, chunk, counts);
}

/* Computes the keys of one chunk's sample, see sample_positions in keys.py. */
void take_sample(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    const select_t *select = &call->select;
    for (int64_t i = start; i < stop; i++) {
        uint64_t at = (uint64_t)(select->sample_first + i * select->sample_stride);
        uint64_t drawn = (uint64_t)philox_word(select->seed, at) * (uint64_t)select->sample_stride >> 32;
        int64_t place = (int64_t)(at + drawn);
        float gradient, value, velocity;
        load(source->grad, source->dtype, place, 1, &gradient);
        accumulate(source, &gradient, AT(source->residual, place), AT(source->velocity, place), 1, &value, &velocity);
        select->keys[i] = order_of(value);
    }
}

/* Returns the k-th largest key, or 0 if there are fewer. Bisection counts and does not branch: at least k keys reach
   `low`, fewer than k reach `high`. */
int32_t kth_largest(const int32_t *keys, int32_t count, int32_t k) {
    if (k < 1 || k > count) return 0;
    int64_t low = 0, high = (int64_t)INT32_MAX + 1;
    while (high - low > 1) {
        int32_t middle = (int32_t)((low + high) / 2), reaching = 0;
        for (int32_t i = 0; i < count; i++) reaching += keys[i] >= middle;
        if (reaching >= k) low = middle;
        else high = middle;
    }
    return (int32_t)low;
}

/* ------------------------------------------------------------------ entries */

/* Counts the elements of every tile that are above the bounds and between them. Where there are cursors, keeps the keys
   between the bounds: chunk by chunk, those of a tile together. */
void count_entries(const encode_t *call, int64_t start, int64_t stop) {
    const select_t *select = &call->select;
    float values[TILE], velocity[TILE];
    int32_t between[TILE + LANES];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        load_tile(&call->source, t, values, velocity);
        int32_t lower = (int32_t)select->bounds[t.chunk * 4], upper = (int32_t)select->bounds[t.chunk * 4 + 1];
        int32_t above = 0, reaching = 0;
        for (int i = 0; i < t.here; i++) {
            int32_t key = order_of(values[i]);
            above += key > upper;
            reaching += (key >= lower) | (key > upper);
        }
        int64_t *entry = select->entries + index * 3;
        entry[0] = above;
        entry[1] = reaching - above;
        if (!select->cursors || reaching == above) continue;
        int number = 0;
        for (int i = 0; i < t.here; i += LANES) {
            int any = 0;
            for (int j = 0; j < LANES; j++) any |= order_of(values[i + j]) >= lower;
            if (!any) continue;
            for (int j = 0; j < LANES; j++) {
                int32_t key = order_of(values[i + j]);
                between[number] = key;
                number += (key >= lower) & (key <= upper);
            }
        }
        entry[2] = __atomic_fetch_add(select->cursors + t.chunk, number, __ATOMIC_RELAXED);
        copy(AT(select->keys, entry[2]), between, sizeof(int32_t) * (size_t)number);
    }
}

/* Counts again, for bounds that were narrowed to one of the keys that were kept. */
void count_again(const encode_t *call, int64_t start, int64_t stop) {
    const select_t *select = &call->select;
    for (int64_t index = start; index < stop; index++) {
        int64_t *entry = select->entries + index * 3, above = 0, equal = 0;
        int32_t key = (int32_t)select->bounds[index / call->payloads.tiles * 4];
        const int32_t *keys = select->keys + (entry[1] ? entry[2] : 0);
        for (int64_t i = 0; i < entry[1]; i++) {
            above += keys[i] > key;
            equal += keys[i] == key;
        }
        entry[0] += above;
        entry[1] = equal;
    }
}

static void zero_from(uint8_t *payload, int64_t first, int64_t stop) {
    memset(payload + first, 0, (size_t)(stop - first));
}

/* Computes where the entries of every tile go, and writes all of the payloads that is not entries. */
void place_entries(const encode_t *call, int64_t start, int64_t stop) {
    const payloads_t *to = &call->payloads;
    for (int64_t chunk = start; chunk < stop; chunk++) {
        int64_t above = 0, between = 0, *bounds = call->select.bounds + chunk * 4;
        int64_t *entries = call->select.entries + chunk * to->tiles * 3;
        for (int64_t tile = 0; tile < to->tiles; tile++, entries += 3) {
            int64_t of_above = entries[0], of_between = entries[1];
            entries[0] = above, entries[1] = between;
            above += of_above, between += of_between;
        }
        int64_t room = greater(to->k - above, 0), count = lesser(above, to->k) + lesser(between, room);
        bounds[2] = room;
        bounds[3] = count;
        uint8_t *payload = to->payload + chunk * to->payload_stride;
        int32_t header[4] = {STATUS, 0, 0, 0};
        memcpy(payload, header, sizeof header);
        memset(payload + to->highs_offset, 0, (size_t)(to->lows_offset - to->highs_offset));
        int exact = to->value_bits >= 16; /* without scales */
        int64_t after_lows = exact ? to->values_offset : to->scales_offset;
        zero_from(payload, to->lows_offset + (count * to->low + 7) / 8, after_lows);
        if (!exact) zero_from(payload, to->scales_offset + (count + BLOCK - 1) / BLOCK * 4, to->values_offset);
        zero_from(payload, to->values_offset + (count * to->value_bits + 7) / 8, to->nbytes);
    }
}

/* Puts the entries side by side, and leaves everything else in the residual and the velocity. */
void emit_entries(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    const write_t *write = &call->write;
    const int64_t k = call->payloads.k;
    float values[TILE], velocity[TILE], old[TILE], old_velocity[TILE];
    int sent[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        load_tile(&call->source, t, values, velocity);
        const int64_t *bounds = call->select.bounds + t.chunk * 4;
        int32_t lower = (int32_t)bounds[0], upper = (int32_t)bounds[1];
        const int64_t *entry = call->select.entries + index * 3;
        int64_t above = entry[0], between = entry[1], room = bounds[2];
        int64_t place = above + lesser(between, room);
        float *restrict r = AT(source->residual, t.unit_first);
        float *restrict u = AT(source->velocity, t.unit_first);
        int number = 0;
        for (int i = 0; i < t.here; i += LANES) { /* the zeros behind the last element are never sent */
            int any = 0;
            for (int j = 0; j < LANES; j++) any |= order_of(values[i + j]) >= lower || order_of(values[i + j]) > upper;
            if (!any) continue;
            for (int j = i; j < i + LANES; j++) {
                int32_t key = order_of(values[j]);
                if (key > upper ? above++ < k : key >= lower && between++ < room) {
                    if (r) old[number] = r[j];
                    if (u) old_velocity[number] = u[j];
                    sent[number++] = j;
                }
            }
        }
        if (r)
            for (int i = 0; i < t.here; i++) r[i] = is_finite(values[i]) ? values[i] : r[i];
        if (u)
            for (int i = 0; i < t.here; i++) u[i] = is_finite(values[i]) ? velocity[i] : u[i];
        int32_t *restrict indices = write->indices + t.chunk * k + place;
        float *restrict entries = write->values + t.chunk * k + place;
        for (int n = 0; n < number; n++) {
            float value = values[sent[n]];
            indices[n] = (int32_t)(t.first + sent[n]);
            entries[n] = value;
            /* unless nothing is left, write_entries needs the old states */
            int done = call->payloads.value_bits == 32 && is_finite(value);
            if (r) r[sent[n]] = done ? 0.0f : old[n];
            if (!u) continue;
            if (write->velocities) write->velocities[t.chunk * k + place + n] = velocity[sent[n]];
            u[sent[n]] = done ? 0.0f : old_velocity[n];
        }
    }
}
