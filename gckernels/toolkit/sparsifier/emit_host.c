/* Putting the selected entries side by side, and everything else back into the states. */

/* ------------------------------------------------------------------ placing */

/* Counts the elements of every tile that are above the bounds and between them. */
void count_entries(const encode_t *call, int64_t start, int64_t stop) {
    const select_t *select = &call->select;
    float loaded[TILE], velocity[TILE];
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        tile_entries_t *entries = select->entries + index;
        int missing = select->states[t.chunk].missing;
        const float *values = loaded;
        if (missing) load_again(call, index, t, loaded, velocity);
        else values = AT(select->values, entries->first);
        int64_t number = missing ? t.here : entries->candidates;
        int32_t lower = (int32_t)select->bounds[t.chunk * 4], upper = (int32_t)select->bounds[t.chunk * 4 + 1];
        int32_t above = 0, both = 0;
        for (int64_t i = 0; i < number; i++) {
            int32_t key = order_of(values[i]);
            above += key > upper;
            both += (key >= lower) | (key > upper);
        }
        entries->above = above;
        entries->between = both - above;
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
        tile_entries_t *entries = call->select.entries + chunk * to->tiles;
        for (int64_t tile = 0; tile < to->tiles; tile++, entries++) {
            int64_t of_above = entries->above, of_between = entries->between;
            entries->above = above, entries->between = between;
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

/* ------------------------------------------------------------------ emitting */

/* Which of a tile's candidates, by their numbers, are sent and which are not. */
typedef struct { int32_t sent[TILE + 1], kept[TILE + 1]; int sent_number, kept_number; } choice_t;

/* Chooses among the candidates of a tile in the order of their indices. */
static void choose(const encode_t *call, tile_t t, const tile_entries_t *entries, const float *values, int number,
                   choice_t *choice) {
    const int64_t *bounds = call->select.bounds + t.chunk * 4, k = call->payloads.k, room = bounds[2];
    int32_t lower = (int32_t)bounds[0], upper = (int32_t)bounds[1];
    int64_t above = entries->above, between = entries->between;
    int sent = 0, kept = 0;
    for (int n = 0; n < number; n++) {
        int32_t key = order_of(values[n]);
        int is_above = key > upper, is_between = (key <= upper) & (key >= lower);
        int is_sent = (is_above & (above < k)) | (is_between & (between < room));
        above += is_above, between += is_between;
        choice->sent[sent] = choice->kept[kept] = n;
        sent += is_sent, kept += !is_sent;
    }
    choice->sent_number = sent, choice->kept_number = kept;
}

/* Puts the entries side by side, and leaves everything else in the residual and the velocity. */
void emit_entries(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    const select_t *select = &call->select;
    const write_t *write = &call->write;
    const int64_t k = call->payloads.k;
    const int exactly = call->payloads.value_bits == 32;
    float values[TILE], velocity[TILE], candidates[TILE];
    int32_t places[TILE + 16];
    choice_t choice;
    for (int64_t index = start; index < stop; index++) {
        tile_t t = locate(&call->payloads, index);
        const int64_t *bounds = select->bounds + t.chunk * 4;
        const tile_entries_t *entries = select->entries + index;
        int64_t begin = t.chunk * k + lesser(entries->above, k) + lesser(entries->between, bounds[2]);
        int32_t *restrict indices = write->indices + begin;
        float *restrict sent_values = write->values + begin;
        float *restrict r = AT(source->residual, t.unit_first), *restrict u = AT(source->velocity, t.unit_first);
        int missing = select->states[t.chunk].missing;
        if (!missing && (leaves(call) || !r)) {
            const int32_t *found = select->indices + entries->first;
            const float *found_values = select->values + entries->first;
            choose(call, t, entries, found_values, (int)entries->candidates, &choice);
            for (int n = 0; n < choice.sent_number; n++) {
                indices[n] = found[choice.sent[n]];
                sent_values[n] = found_values[choice.sent[n]];
            }
            for (int n = 0; r && n < choice.kept_number; n++) {
                int candidate = choice.kept[n], place = found[candidate] - (int32_t)t.first;
                if (!is_finite(found_values[candidate])) continue;
                r[place] = found_values[candidate];
                if (u) u[place] = select->velocities[entries->first + candidate];
            }
            continue;
        }
        load_again(call, index, t, values, velocity);
        int64_t lower = entries->between < bounds[2] ? lesser(bounds[0], bounds[1] + 1) : bounds[1] + 1;
        int number = find(source, t, values, (int32_t)lower, places);
        for (int n = 0; n < number; n++) candidates[n] = values[places[n]];
        choose(call, t, entries, candidates, number, &choice);
        float old[TILE], old_velocity[TILE];
        for (int n = 0; n < choice.sent_number; n++) {
            int place = places[choice.sent[n]];
            indices[n] = (int32_t)t.first + place;
            sent_values[n] = values[place];
            if (r) old[n] = r[place];
            if (u) old_velocity[n] = u[place];
        }
        keep_tile(source, t, values, velocity);
        for (int n = 0; r && n < choice.sent_number; n++) {
            int place = places[choice.sent[n]];
            int done = exactly && is_finite(values[place]); /* else write_entries needs the old states */
            r[place] = done ? 0.0f : old[n];
            if (!u) continue;
            if (write->velocities) write->velocities[begin + n] = velocity[place];
            u[place] = done ? 0.0f : old_velocity[n];
        }
    }
}
