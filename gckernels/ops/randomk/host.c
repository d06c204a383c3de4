/* The host path of RandomK. host.py puts in front of it call_t, made from its class _Call, TILE and the constants of
   header.py. */

/* Returns the shift of all groups' beginnings, in k-ths of an element. */
static int64_t shift_of(const call_t *call, uint64_t seed) {
    if (call->k == 0 || call->size % call->k == 0) return 0;
    return (int64_t)((uint64_t)philox_word(seed, (uint64_t)call->k) * (uint64_t)call->size >> 32);
}

/* Returns the position of a group's entry. That of the last group may be past the end, which means that much past the
   beginning. */
static int64_t place_of(const call_t *call, uint64_t seed, int64_t shift, int64_t group) {
    int64_t begin = (group * call->size + shift) / call->k, end = ((group + 1) * call->size + shift) / call->k;
    return begin + (int64_t)((uint64_t)philox_word(seed, (uint64_t)group) * (uint64_t)(end - begin) >> 32);
}

/* Writes the positions of a tile's entries, counted from the tile's beginning, and returns their number. `*number`
   becomes the group of the first one; -1 stands for the last group, which reaches around the end. */
static int find_entries(const call_t *call, uint64_t seed, int64_t first, int64_t *number, int32_t *places) {
    int64_t end = lesser(first + TILE, call->size), size = greater(call->size, 1), shift = shift_of(call, seed);
    int64_t group = (call->k * (first + 1) - 1 - shift + size) / size - 1; /* the first element's */
    int found = 0;
    for (*number = group; group < call->k; group++) { /* its entry may lie before the tile */
        int64_t around = group < 0; /* the end */
        int64_t place = place_of(call, seed, shift, around ? call->k - 1 : group) - (around ? size : 0);
        if (place >= end) break;
        if (place < first)
            ++*number;
        else
            places[found++] = (int32_t)(place - first);
    }
    return found;
}

/* Adds the gradient to the residual, except at the entries, and notes the chunks with elements that are not finite. */
void accumulate(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE], kept[TILE];
    int32_t places[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        int64_t number;
        int32_t largest = 0;
        load(call->source, call->dtype, t.unit_first, t.here, values);
        if (call->residual) {
            float *restrict r = AT(call->residual, t.unit_first);
            prefetch(r + TILE, sizeof(float) * TILE);
            int found = find_entries(call, call->seed, t.first, &number, places);
            while (found && places[found - 1] >= t.here) found--;
            for (int n = 0; n < found; n++) kept[n] = r[places[n]];
            for (int i = 0; i < t.here; i++) {
                values[i] += r[i];
                r[i] = is_finite(values[i]) ? values[i] : r[i];
            }
            for (int n = 0; n < found; n++) r[places[n]] = kept[n];
        }
        for (int i = 0; i < t.here; i++) {
            int32_t key = key_of(values[i] * call->scale);
            largest = key > largest ? key : largest;
        }
        if (largest >= 0x7F800000) __atomic_store_n(call->nonfinite + t.chunk, 1, __ATOMIC_RELAXED);
    }
}

/* Writes the payloads, and the residuals of their entries. */
void emit(const call_t *call, int64_t start, int64_t stop) {
    int64_t shift = shift_of(call, call->seed);
    for (int64_t index = start; index < stop; index++) {
        int64_t chunk = index / call->payload_count, slot = index % call->payload_count, group = slot - HEADER_NUMEL;
        float *number = (float *)call->target + chunk * call->chunk_stride + slot;
        if (group < 0 || group >= call->k) {
            uint64_t part = call->seed >> PART_BITS * greater(slot - 1, 0) % 64 & ((1 << PART_BITS) - 1);
            *number = slot == 0 ? 1.0f : slot < HEADER_NUMEL - 1 ? (float)part : 0.0f;
            continue;
        }
        int64_t place = place_of(call, call->seed, shift, group);
        place += (chunk - (place >= call->size)) * call->size;
        int inside = place < lesser((chunk + 1) * call->size, call->numel);
        float value = 0.0f;
        if (inside) load(call->source, call->dtype, place, 1, &value);
        if (inside && call->residual) value += call->residual[place];
        float sent = call->nonfinite[chunk] ? float_of(0x7FC00000) : value * call->scale;
        *number = sent;
        float left = value - sent / call->scale;
        if (inside && call->residual && is_finite(left)) call->residual[place] = left;
    }
}

/* Reads the seed of a payload or of a sum of payloads. Returns 0 if there is none. */
static int read_seed(const float *numbers, uint64_t *seed) {
    float count = numbers[0];
    *seed = 0;
    if (!(count >= 1.0f && count <= MAX_WORLD && count == floorf(count) && numbers[HEADER_NUMEL - 1] == 0.0f))
        return 0;
    for (int part = 0; part < HEADER_NUMEL - 2; part++) {
        float total = numbers[1 + part];
        if (!(total >= 0.0f && total < count * (1 << PART_BITS) && total == floorf(total))) return 0;
        if ((int32_t)total % (int32_t)count) return 0;
        *seed += (uint64_t)((int32_t)total / (int32_t)count) << PART_BITS * part;
    }
    return 1;
}

void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE];
    int32_t places[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        int64_t number;
        const float *numbers = (const float *)call->source + t.chunk * call->chunk_stride;
        int damaged = 0;
        memset(total, 0, sizeof total);
        for (int64_t source = 0; source < call->sources; source++, numbers += call->source_stride) {
            uint64_t seed;
            if (!read_seed(numbers, &seed)) {
                damaged = 1;
                continue;
            }
            int found = find_entries(call, seed, t.first, &number, places);
            for (int n = 0; n < found; n++) {
                int64_t entry = number + n < 0 ? call->k - 1 : number + n;
                total[places[n]] += numbers[HEADER_NUMEL + entry];
            }
        }
        for (int i = 0; i < t.here; i++) total[i] = damaged ? NAN : total[i] * call->scale;
        store_merged(call->target, call->dtype, t.unit_first, t.here, total, call->accumulate);
    }
}
