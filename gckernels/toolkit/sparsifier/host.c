/* The host path of the sparsifiers: the values that entries are selected from. host.py puts in front of this text the
   structures payloads_t, source_t, select_t, write_t, encode_t and decode_t, made from the classes in host_calls.py,
   and the constants TILE, BLOCK, STATUS, NAN_KEY and so on. Behind it come selection_host.c, emit_host.c and
   entries_host.c. */

enum { LANES = 16, WORD = 64 };
enum { AHEAD = TILE }; /* elements between those that are worked on and those that are fetched */

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

/* Fetches WORD elements of the gradient and the states from `first` on. */
static inline void prefetch_word(const source_t *source, int64_t first) {
    int width = source->dtype == FP32 ? 4 : 2;
    prefetch(AT((const char *)source->grad, first * width), WORD * width);
    if (source->residual) prefetch(source->residual + first, WORD * 4);
    if (source->velocity) prefetch(source->velocity + first, WORD * 4);
}

/* Accumulates a tile, and puts zeros behind its elements up to a multiple of WORD. */
static void load_tile(const source_t *source, tile_t t, float *restrict values, float *restrict velocity) {
    float loaded[TILE];
    const float *r = AT(source->residual, t.unit_first), *u = AT(source->velocity, t.unit_first), *g = loaded;
    if (source->dtype == FP32) g = AT((const float *)source->grad, t.unit_first);
    else load(source->grad, source->dtype, t.unit_first, t.here, loaded);
    accumulate(source, g, r, u, t.here, values, velocity);
    for (int i = t.here; i % WORD; i++) values[i] = 0.0f;
}

/* Leaves a tile in the states, unless it is not finite. */
static void keep_tile(const source_t *source, tile_t t, const float *restrict values, const float *restrict velocity) {
    float *restrict r = AT(source->residual, t.unit_first), *restrict u = AT(source->velocity, t.unit_first);
    if (r)
        for (int i = 0; i < t.here; i++) r[i] = is_finite(values[i]) ? values[i] : r[i];
    if (u)
        for (int i = 0; i < t.here; i++) u[i] = is_finite(values[i]) ? velocity[i] : u[i];
}

/* Adds up the squares of every tile of the gradient, if its norm is limited. */
void add_squares(const encode_t *call, int64_t start, int64_t stop) {
    const source_t *source = &call->source;
    if (!source->squares) return;
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

/* Finds the factor of the gradient. The squares are added one after the other, whatever the number of threads is. */
void limit_norm(encode_t *call) {
    source_t *source = &call->source;
    double total = 0, limit = source->max_norm;
    source->factor = 1.0f;
    if (!source->squares) return;
    for (int64_t i = 0; i < call->payloads.chunks * call->payloads.tiles; i++) total += source->squares[i];
    double norm = sqrt(total);
    if (norm > limit && norm <= 0x1.fffffffffffffp1023) source->factor = (float)(limit / norm);
}
