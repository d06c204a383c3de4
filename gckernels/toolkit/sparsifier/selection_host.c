/* Selecting entries. A sample gives a bound that few elements reach, the candidates. One pass over the gradient finds
   them. It also leaves all values in the states, where entries are sent exactly; the others are left there by
   emit_entries, which needs the old ones. Which candidates are sent is found among them alone. Where they turn out to be
   too few, or more than there is room for, the whole chunk is searched. */

/* ------------------------------------------------------------------ bounds */

/* Returns how many of the magnitudes reach a key. */
static int64_t reaching(const float *restrict values, int64_t count, int32_t key) {
    int64_t total = 0;
    for (int64_t at = 0; at < count;) {
        int32_t some = 0;
        for (int64_t stop = lesser(at + (1 << 20), count); at < stop; at++) some += key_of(values[at]) >= key;
        total += some;
    }
    return total;
}

/* Returns the k-th largest key, without its lowest `dropped` bits; 0 if there are fewer. Bisection counts and does not
   branch: at least k keys reach `low`, fewer than k reach `high`. If `any` key will do that is reached by the same keys
   it ends early. */
static int32_t kth_largest(const float *values, int64_t count, int64_t k, int dropped, int any) {
    if (k < 1 || k > count) return 0;
    int32_t low = 0, high = (NAN_KEY >> dropped) + 1;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        int64_t total = reaching(values, count, middle << dropped);
        if (total >= k) low = middle;
        else high = middle;
        if (any && total == k) break;
    }
    return low << dropped;
}

/* The number of elements of a chunk. */
static int64_t numel_of(const payloads_t *p, int64_t chunk) {
    return greater(lesser(p->size, p->numel - chunk * p->size), 0);
}

/* The number of elements of which one is sampled: see keys.py, or the root of the third degree up to a power of two,
   where nearly as much time goes into the sample as into the candidates that a larger one would spare. */
static int64_t stride_of(const select_t *select, int64_t numel) {
    if (select->by_sample) return greater(lesser(MAX_SAMPLE_STRIDE, numel / MIN_SAMPLE), 1);
    int64_t stride = 1;
    while (stride * stride * stride < numel) stride *= 2;
    return stride;
}

/* Returns an address behind those that were given out before, and counts the bytes. */
static void *given_out(uint8_t *buffers, int64_t *given, int64_t nbytes) {
    void *address = (void *)((uintptr_t)buffers + (uintptr_t)*given);
    *given += (nbytes + 63) / 64 * 64;
    return address;
}

/* Gives a call its buffers, from the address `buffers` on, and returns the number of their bytes. Pages that are not
   touched are not taken. */
int64_t lay_out(encode_t *call, uint8_t *buffers) {
    const payloads_t *p = &call->payloads;
    source_t *source = &call->source;
    select_t *select = &call->select;
    write_t *write = &call->write;
    int64_t given = 0, stride = stride_of(select, p->size), tiles = p->chunks * p->tiles;
    int64_t samples = select->by_sample ? greater(lesser(p->size, 2 * MIN_SAMPLE), p->size / MAX_SAMPLE_STRIDE)
                                        : greater(p->size / stride, stride * stride / 4); /* of shorter chunks, too */
    int exactly = p->value_bits == 32;
    select->sample_blocks = select->key ? 0 : (samples + SAMPLED - 1) / SAMPLED;
    select->room = lesser(p->size, ROOM * p->k + TILE);
    int64_t candidates = p->chunks * select->room * 4, entries = p->chunks * p->k * 4;
    select->bounds = given_out(buffers, &given, p->chunks * 4 * 8);
    select->states = given_out(buffers, &given, p->chunks * (int64_t)sizeof(chunk_state_t));
    select->entries = given_out(buffers, &given, tiles * (int64_t)sizeof(tile_entries_t));
    select->samples = given_out(buffers, &given, p->chunks * select->sample_blocks * SAMPLED * 4);
    select->indices = given_out(buffers, &given, candidates);
    select->values = given_out(buffers, &given, candidates);
    select->velocities = given_out(buffers, &given, source->velocity ? candidates : 0);
    write->indices = given_out(buffers, &given, entries);
    write->values = given_out(buffers, &given, entries);
    write->velocities = source->velocity && !exactly ? given_out(buffers, &given, entries) : NULL;
    source->squares = source->max_norm > 0 ? given_out(buffers, &given, tiles * 8) : NULL;
    return given;
}

/* Reads the samples of all chunks, `sample_blocks` blocks of SAMPLED for each. */
void take_samples(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    const select_t *select = &call->select;
    uint64_t words[SAMPLED];
    int64_t places[SAMPLED];
    for (int64_t index = start; index < stop; index++) {
        int64_t chunk = index / select->sample_blocks, first = index % select->sample_blocks * SAMPLED;
        int64_t numel = numel_of(&call->payloads, chunk), stride = stride_of(select, numel);
        int64_t chunk_first = chunk * call->payloads.size, begin = chunk_first + first * stride;
        int count = (int)lesser(numel / stride - first, SAMPLED);
        if (count <= 0) continue;
        if (select->by_sample)
            philox_words((select->seed + select->added) & select->seed_mask, (uint64_t)begin, (uint64_t)stride, count, words);
        else /* the golden ratio spreads evenly */
            for (int i = 0; i < count; i++) words[i] = (uint32_t)(first + i) * 0x9E3779B9u;
        for (int i = 0; i < count; i++) {
            places[i] = begin + i * stride + (int64_t)(words[i] * (uint64_t)stride >> 32);
            __builtin_prefetch((const char *)source->grad + places[i] * (source->dtype == FP32 ? 4 : 2));
            if (source->residual) __builtin_prefetch(source->residual + places[i]);
            if (source->velocity) __builtin_prefetch(source->velocity + places[i]);
        }
        float *samples = select->samples + index * SAMPLED, g[SAMPLED], r[SAMPLED], u[SAMPLED], velocity[SAMPLED];
        if (source->dtype == FP32)
            for (int i = 0; i < count; i++) g[i] = ((const float *)source->grad)[places[i]];
        else
            for (int i = 0; i < count; i++) load(source->grad, source->dtype, places[i], 1, g + i);
        if (source->residual)
            for (int i = 0; i < count; i++) r[i] = source->residual[places[i]];
        if (source->velocity)
            for (int i = 0; i < count; i++) u[i] = source->velocity[places[i]];
        accumulate(source, g, r, u, count, samples, velocity);
    }
}

/* Bounds the candidates of every chunk from below. Four standard deviations of the rank in the sample make it unlikely
   that they are fewer than k. */
void bound_keys(const encode_t *call, int64_t start, int64_t stop) {
    const payloads_t *p = &call->payloads;
    const select_t *select = &call->select;
    for (int64_t chunk = start; chunk < stop; chunk++) {
        int64_t numel = numel_of(p, chunk), samples = numel / stride_of(select, numel), *bounds = select->bounds + chunk * 4;
        int64_t rank = (samples * lesser(p->k, numel) + greater(numel, 1) - 1) / greater(numel, 1);
        int32_t lower = select->key;
        if (!lower) {
            if (!select->by_sample) rank += (int64_t)(4.0 * sqrt((double)rank * (1.0 - (double)rank / (double)(samples + 1)))) + 2;
            const float *values = select->samples + chunk * select->sample_blocks * SAMPLED;
            lower = kth_largest(values, samples, rank, select->narrowing == LEADING ? LEADING_SHIFT : 0, !select->by_sample);
        }
        bounds[0] = greater(lower, 1); /* zeros are not sent */
        bounds[1] = MAX_FINITE_KEY;
        select->states[chunk].candidates = select->states[chunk].missing = 0;
    }
}

/* ------------------------------------------------------------------ candidates */

/* Finds the elements of a tile whose keys reach the lower bound, and returns their number. Writes up to 15 places behind
   the last one. Meanwhile the next tile is fetched, a little at a time: a processor holds few requests. */
static int find(const source_t *source, tile_t t, const float *restrict values, int32_t lower, int32_t *restrict places) {
    int number = 0;
    for (int at = 0; at < t.here; at += WORD) {
        prefetch_word(source, t.unit_first + at + AHEAD);
        uint64_t mask = mask_of(values + at, lower);
#if defined(__AVX512F__)
        if (__builtin_popcountll(mask) > 12) {
            const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            for (int i = 0; i < WORD; i += 16, mask >>= 16) {
                __m512i all = _mm512_add_epi32(lanes, _mm512_set1_epi32(at + i));
                _mm512_storeu_si512(places + number, _mm512_maskz_compress_epi32((__mmask16)mask, all));
                number += __builtin_popcountll(mask & 0xFFFF);
            }
            continue;
        }
#endif
        for (; mask; mask &= mask - 1) places[number++] = at + __builtin_ctzll(mask);
    }
    return number;
}

/* Whether the pass over the gradient leaves values in the states. */
static int leaves(const encode_t *call) { return call->source.residual && call->payloads.value_bits == 32; }

/* Finds the candidates, and keeps those of a tile together. Where they are sent exactly the states become what they are
   without the tile's candidates: most of these will be sent. */
void collect(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    const select_t *select = &call->select;
    float values[TILE], velocity[TILE];
    int32_t places[TILE + 16];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        tile_entries_t *entries = select->entries + index;
        entries->first = -1;
        int64_t *candidates = &select->states[t.chunk].candidates;
        if (__atomic_load_n(candidates, __ATOMIC_RELAXED) > select->room) continue; /* they will not do anyway */
        load_tile(source, t, values, velocity);
        /* what is not finite is always a candidate, as the states keep nothing of it */
        int32_t lower = (int32_t)lesser(select->bounds[t.chunk * 4], MAX_FINITE_KEY + 1);
        int number = find(source, t, values, lower, places);
        int64_t first = __atomic_fetch_add(candidates, number, __ATOMIC_RELAXED);
        if (first + number > select->room) continue;
        entries->first = t.chunk * select->room + first;
        entries->candidates = number;
        int32_t *restrict indices = select->indices + entries->first;
        float *restrict found = select->values + entries->first;
        for (int n = 0; n < number; n++) {
            indices[n] = (int32_t)t.first + places[n];
            found[n] = values[places[n]];
        }
        if (source->velocity)
            for (int n = 0; n < number; n++) select->velocities[entries->first + n] = velocity[places[n]];
        if (!leaves(call)) continue;
        keep_tile(source, t, values, velocity);
        float *restrict r = AT(source->residual, t.unit_first), *restrict u = AT(source->velocity, t.unit_first);
        for (int n = 0; n < number; n++) r[places[n]] = is_finite(found[n]) ? 0.0f : r[places[n]];
        if (u)
            for (int n = 0; n < number; n++) u[places[n]] = is_finite(found[n]) ? 0.0f : u[places[n]];
    }
}

/* The same as load_tile, after collect. */
static void load_again(const encode_t *call, int64_t index, tile_t t, float *restrict values, float *restrict velocity) {
    const source_t *source = &call->source;
    const select_t *select = &call->select;
    const tile_entries_t *entries = select->entries + index;
    if (!leaves(call) || entries->first < 0) {
        load_tile(source, t, values, velocity);
        return;
    }
    copy(values, AT(source->residual, t.unit_first), sizeof(float) * (size_t)t.here);
    if (source->velocity) copy(velocity, AT(source->velocity, t.unit_first), sizeof(float) * (size_t)t.here);
    for (int64_t n = entries->first; n < entries->first + entries->candidates; n++) {
        values[select->indices[n] - t.first] = select->values[n];
        if (source->velocity) velocity[select->indices[n] - t.first] = select->velocities[n];
    }
    for (int i = t.here; i % WORD; i++) values[i] = 0.0f;
}

/* ------------------------------------------------------------------ narrowing */

/* Narrows the bounds of a chunk to what is sent, given all values that may be sent. */
static void narrow_to(const encode_t *call, int64_t chunk, const float *values, int64_t count) {
    const select_t *select = &call->select;
    int64_t k = call->payloads.k, *bounds = select->bounds + chunk * 4;
    if (select->narrowing == EXACT) { /* fewer than k are all sent */
        bounds[0] = bounds[1] = greater(bounds[0], kth_largest(values, count, k, 0, 1));
    } else if (select->narrowing == LEADING) {
        int64_t key = kth_largest(values, count, k, LEADING_SHIFT, 0);
        bounds[0] = greater(key, 1);
        bounds[1] = key + (1 << LEADING_SHIFT) - 1;
    }
}

/* Narrows the bounds of every chunk whose candidates suffice, and notes the others. */
void narrow(const encode_t *call, int64_t start, int64_t stop) {
    const select_t *select = &call->select;
    for (int64_t chunk = start; chunk < stop; chunk++) {
        chunk_state_t *state = select->states + chunk;
        int few = !select->by_sample && select->narrowing && state->candidates < call->payloads.k;
        state->missing = state->candidates > select->room || (few && select->bounds[chunk * 4] > 1);
        if (!state->missing) narrow_to(call, chunk, select->values + chunk * select->room, state->candidates);
    }
}

/* Puts all values of a chunk side by side into `all`, counted in tiles. */
void load_all(const encode_t *call, int64_t start, int64_t stop) {
    const select_t *select = &call->select;
    float values[TILE], velocity[TILE];
    for (int64_t tile = start; tile < stop; tile++) {
        int64_t index = select->searched * call->payloads.tiles + tile;
        tile_t t = locate(&call->payloads, index);
        load_again(call, index, t, values, velocity);
        copy(select->all + t.first, values, sizeof(float) * (size_t)t.here);
    }
}

/* Narrows the bounds of the chunk that load_all has loaded. */
void narrow_all(const encode_t *call) {
    const select_t *select = &call->select;
    if (!select->by_sample) select->bounds[select->searched * 4] = 1;
    narrow_to(call, select->searched, select->all, numel_of(&call->payloads, select->searched));
}

/* Returns the first chunk from `chunk` on whose bounds are to be narrowed by all of its values; -1 if there is none. */
int64_t missing_from(const encode_t *call, int64_t chunk) {
    for (; chunk < call->payloads.chunks && call->select.narrowing; chunk++)
        if (call->select.states[chunk].missing) return chunk;
    return -1;
}
