/* Many units in one call: the tiles of all units have consecutive numbers. calls.py puts in front of this text batch_t,
   made from its class _Batch. */

SHARED inline int64_t unit_of(const batch_t *batch, int64_t tile) {
    int64_t first = 0, last = batch->count - 1;
    while (first < last) {
        int64_t middle = (first + last) / 2;
        if (batch->ends[middle] > tile) last = middle;
        else first = middle + 1;
    }
    return first;
}

/* Defines `name`_batch, which calls `name` for tiles `start` to `stop` of all units. */
#define DEFINE_BATCH(name) \
    void name##_batch(const batch_t *batch, int64_t start, int64_t stop) { \
        for (int64_t unit = unit_of(batch, start); start < stop; unit++) { \
            int64_t first = unit ? batch->ends[unit - 1] : 0, end = lesser(batch->ends[unit], stop); \
            call_t call = ((const call_t *)batch->calls)[unit]; \
            call.seed = (call.seed + batch->added) & batch->seed_mask; \
            name(&call, start - first, end - first); \
            start = end; \
        } \
    }
