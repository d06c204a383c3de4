/* The host path of RandomK. host.py puts in front of it call_t, made from its class _Call, TILE and the constants of
   header.py. */

/* Returns the shift of all groups' beginnings, in k-ths of an element. */
static int64_t shift_of(const call_t *call, uint64_t seed) {
    if (call->k == 0 || call->size % call->k == 0) return 0;
    return (int64_t)((uint64_t)philox_word(seed, (uint64_t)call->k, 0) * (uint64_t)call->size >> 32);
}

/* Returns the position of a group's entry. That of the last group may be past the end, which means that much past the
   beginning. */
static int64_t place_of(const call_t *call, uint64_t seed, int64_t shift, int64_t group) {
    int64_t begin = (group * call->size + shift) / call->k, end = ((group + 1) * call->size + shift) / call->k;
    return begin + (int64_t)((uint64_t)philox_word(seed, (uint64_t)group, 0) * (uint64_t)(end - begin) >> 32);
}

/* The entries in a tile: the number of the first one, and their positions, counted from the tile's beginning. */
typedef struct { int64_t number; int count; int32_t places[TILE + 2 + WORDS]; } entries_t;

/* Returns the number in the payload of entry `n` of a tile. */
static inline int64_t number_of(const call_t *call, const entries_t *entries, int n) {
    int64_t number = entries->number + n;
    return number < 0 ? call->k - 1 : number; /* the last group reaches around the end */
}

/* Finds the entries of a tile. The number of the first one may be -1, which stands for the last group. */
static void find_entries(const call_t *call, uint64_t seed, int64_t first, entries_t *entries) {
    int64_t end = lesser(first + TILE, call->size), size = greater(call->size, 1), k = call->k;
    int64_t shift = shift_of(call, seed), group = (k * (first + 1) - 1 - shift + size) / size - 1; /* the first element's */
    uint64_t words[TILE + 2 + WORDS];
    int32_t *places = entries->places;
    int number = 0;
    entries->number = group;
    entries->count = 0;
    if (k == 0) return;
    if (group < 0) {
        places[number++] = (int32_t)(place_of(call, seed, shift, k - 1) - size - first);
        group = 0;
    }
    int count = (int)greater(lesser(k, (greater(end * k - shift, 0) + size - 1) / size) - group, 0);
    philox_words(seed, (uint64_t)group, 1, count, words);
    int64_t each = size / k, more = size % k, begin = (group * size + shift) / k, rest = (group * size + shift) % k;
    if (more == 0) /* groups of one length, and no shift */
        for (int i = 0; i < count; i++)
            places[number + i] = (int32_t)(begin - first + i * each + (int64_t)(words[i] * (uint64_t)each >> 32));
    for (int i = 0; more && i < count; i++) {
        int longer = rest + more >= k;
        places[number + i] = (int32_t)(begin - first + (int64_t)(words[i] * (uint64_t)(each + longer) >> 32));
        begin += each + longer;
        rest += longer ? more - k : more;
    }
    number += count;
    /* the entries of the first group and of the last one may lie outside */
    int before = number > 0 && places[0] < 0;
    entries->number += before;
    number -= before;
    if (before) memmove(places, places + 1, sizeof *places * (size_t)number);
    if (number > 0 && places[number - 1] >= end - first) number--;
    entries->count = number;
}

/* Writes what is not an entry into the payload of a chunk. */
static void put_header(const call_t *call, float *numbers) {
    for (int64_t slot = 0; slot < HEADER_NUMEL; slot++) {
        uint64_t part = call->seed >> PART_BITS * greater(slot - 1, 0) % 64 & ((1 << PART_BITS) - 1);
        numbers[slot] = slot == 0 ? 1.0f : slot < HEADER_NUMEL - 1 ? (float)part : 0.0f;
    }
    for (int64_t slot = HEADER_NUMEL + call->k; slot < call->payload_nbytes / 4; slot++) numbers[slot] = 0.0f;
}

/* Adds the gradient to the residual, and moves the entries into the payload. Notes the chunks with elements that are not
   finite, and the residuals that entries had before. */
static void encode(const call_t *call, int64_t start, int64_t stop) {
    float values[TILE], kept[TILE];
    entries_t entries;
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        float *numbers = (float *)(call->payload + t.chunk * call->payload_stride);
        float *restrict r = AT(call->residual, t.unit_first), *restrict old = AT(call->old, t.chunk * call->k);
        int32_t largest = 0;
        if (r) prefetch(r + TILE, sizeof(float) * TILE);
        if (call->dtype == FP32) prefetch(AT((const float *)call->source, t.unit_first + TILE), sizeof(float) * TILE);
        load(call->source, call->dtype, t.unit_first, t.here, values);
        if (r)
            for (int i = 0; i < t.here; i++) values[i] += r[i];
        for (int i = t.here; i < t.laid_out; i++) values[i] = 0.0f;
        find_entries(call, call->seed, t.first, &entries);
        if (t.first == 0) put_header(call, numbers);
        numbers += HEADER_NUMEL;
        for (int n = 0; n < entries.count; n++) {
            int place = entries.places[n];
            float value = values[place], sent = value * call->scale, left = value - sent / call->scale;
            numbers[number_of(call, &entries, n)] = sent;
            if (!r || place >= t.here) continue;
            old[number_of(call, &entries, n)] = r[place];
            kept[n] = is_finite(left) ? left : r[place];
        }
        for (int i = 0; i < t.here; i++) {
            int32_t key = key_of(values[i] * call->scale);
            largest = key > largest ? key : largest;
        }
        if (largest >= 0x7F800000) __atomic_store_n(call->nonfinite + t.chunk, 1, __ATOMIC_RELAXED);
        if (!r) continue;
        for (int i = 0; i < t.here; i++) r[i] = is_finite(values[i]) ? values[i] : r[i];
        for (int n = 0; n < entries.count && entries.places[n] < t.here; n++) r[entries.places[n]] = kept[n];
    }
}

/* Makes NaN of all values of chunks that have an element that is not finite, and gives their entries their residuals
   back. */
static void take_back(const call_t *call, int64_t start, int64_t stop) {
    entries_t entries;
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        if (!call->nonfinite[t.chunk]) continue;
        float *numbers = (float *)(call->payload + t.chunk * call->payload_stride) + HEADER_NUMEL;
        find_entries(call, call->seed, t.first, &entries);
        for (int n = 0; n < entries.count; n++) {
            int64_t number = number_of(call, &entries, n);
            numbers[number] = float_of(0x7FC00000);
            if (call->residual && entries.places[n] < t.here)
                call->residual[t.unit_first + entries.places[n]] = call->old[t.chunk * call->k + number];
        }
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

static void decode(const call_t *call, int64_t start, int64_t stop) {
    float total[TILE];
    entries_t entries;
    for (int64_t index = start; index < stop; index++) {
        tile_t t = tile_of(index, call->tiles, TILE, call->size, call->numel);
        const uint8_t *payload = call->payload + t.chunk * call->payload_stride;
        int damaged = 0;
        memset(total, 0, sizeof total);
        for (int64_t source = 0; source < call->sources; source++, payload += call->source_stride) {
            const float *numbers = (const float *)payload;
            uint64_t seed;
            if (!read_seed(numbers, &seed)) {
                damaged = 1;
                continue;
            }
            find_entries(call, seed, t.first, &entries);
            for (int n = 0; n < entries.count; n++)
                total[entries.places[n]] += numbers[HEADER_NUMEL + number_of(call, &entries, n)];
        }
        for (int i = 0; i < t.here; i++) total[i] = damaged ? NAN : total[i] * call->scale;
        store_merged(call->out, call->dtype, t.unit_first, t.here, total, call->accumulate);
    }
}

DEFINE_BATCH(encode)
DEFINE_BATCH(take_back)
DEFINE_BATCH(decode)
