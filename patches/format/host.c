/* The host path of patches: the same bytes as reference.py, which says what they mean. host.py puts in front of it call_t
   and the constants: NBYTES, SHIFT and EXPONENT_BITS are the kind of elements. */

#if NBYTES == 2
typedef uint16_t bits_t;
#else
typedef uint8_t bits_t;
#endif
#define OLD ((const bits_t *)call->old)
#define NEW ((bits_t *)call->new)

enum { BLOCK = 64, TILE = 256, CLASSES = 256, MOST_ROWS = CLASSES * 17, PADDING = 16 };

/* The classes of a block, of which `equal` makes a bit for each. */
#if defined(__AVX512BW__)
typedef __m512i block_t;
static inline block_t block_of(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }
static inline uint64_t equal(block_t block, int byte) {
    return _mm512_cmpeq_epi8_mask(block, _mm512_set1_epi8((char)byte));
}
#elif defined(__AVX2__)
typedef struct { __m256i low, high; } block_t;
static inline block_t block_of(const uint8_t *bytes) {
    return (block_t){_mm256_loadu_si256((const __m256i *)bytes), _mm256_loadu_si256((const __m256i *)(bytes + 32))};
}
static inline uint64_t equal(block_t block, int byte) {
    const __m256i all = _mm256_set1_epi8((char)byte);
    uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(block.low, all));
    uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(block.high, all));
    return low | (uint64_t)high << 32;
}
#else
typedef struct { uint8_t bytes[BLOCK]; } block_t;
static inline block_t block_of(const uint8_t *bytes) {
    block_t block;
    memcpy(block.bytes, bytes, BLOCK);
    return block;
}
static inline uint64_t equal(block_t block, int byte) {
    uint64_t mask = 0;
    for (int i = 0; i < BLOCK; i++) mask |= (uint64_t)(block.bytes[i] == byte) << i;
    return mask;
}
#endif

/* Returns the place of one number `rank` among the ones of a mask; 63 if there are fewer, because another thread has
   changed the weights meanwhile. */
static inline int place_of(uint64_t mask, int rank) {
#if defined(__BMI2__)
    mask = _pdep_u64(1ull << rank, mask);
#else
    while (rank--) mask &= mask - 1;
#endif
    return __builtin_ctzll(mask | 1ull << 63);
}

/* ------------------------------------------------------------------ patterns */

enum { PATTERNS = 1 << 8 * NBYTES, SIGN = PATTERNS / 2, MANTISSA = (1 << SHIFT) - 1 };

static inline uint32_t class_of(bits_t bits) { return bits >> SHIFT & ((1u << EXPONENT_BITS) - 1); }

/* Returns the place of a pattern in the order, modulo the number of patterns; and the pattern of a place. */
static inline uint32_t order_of(uint32_t bits) { return EXPONENT_BITS && bits & SIGN ? SIGN - 1 - bits : bits; }
/* Returns the code of a step. Bits that another thread changes meanwhile make it a wrong one, which the digest shows, and
   never a longer one. */
static inline uint32_t code_of(bits_t old, bits_t new) {
    const int unused = 32 - 8 * NBYTES;
    int32_t step = (int32_t)((order_of(new) - order_of(old)) << unused) >> unused;
    return (uint32_t)(step > 0 ? 2 * step - 2 : -2 * step - 1) % PATTERNS;
}
static inline bits_t moved(bits_t old, uint32_t code) {
    uint32_t place = (order_of(old) + (code & 1 ? -(code + 1) / 2 : code / 2 + 1)) % PATTERNS;
    return (bits_t)(EXPONENT_BITS && place & SIGN ? SIGN - 1 - place : place);
}

/* The classes of the elements of a tile, in whole blocks. */
typedef struct { uint8_t classes[TILE]; int numel; } tile_classes_t;

static inline void classes_of(const call_t *call, int64_t first, tile_classes_t *tile) {
    const bits_t *bits = OLD + first;
    tile->numel = (int)lesser(TILE, call->numel - first);
    if (tile->numel == TILE) {
        for (int i = 0; i < TILE; i++) tile->classes[i] = (uint8_t)class_of(bits[i]);
    } else {
        memset(tile->classes, 0, TILE);
        for (int i = 0; i < tile->numel; i++) tile->classes[i] = (uint8_t)class_of(bits[i]);
    }
}

/* Returns a mask of those among the first `numel` elements of a tile that are in a block and have a class. */
static inline uint64_t mask_in(const tile_classes_t *tile, int block, int numel, int class) {
    const int here = numel - block * BLOCK;
    const uint64_t mask = equal(block_of(tile->classes + block * BLOCK), class);
    return here >= BLOCK ? mask : here <= 0 ? 0 : mask & ((1ull << here) - 1);
}

/* Returns the number of elements of a class among the first `numel` of a tile. */
static inline int count_before(const tile_classes_t *tile, int numel, int class) {
    int count = 0;
    for (int block = 0; block < TILE / BLOCK; block++)
        count += __builtin_popcountll(mask_in(tile, block, numel, class));
    return count;
}

/* Returns the number of elements of a class in a tile. */
static inline int count_in(const tile_classes_t *tile, int class) {
    return tile->numel == TILE ? count_before(tile, TILE, class) : count_before(tile, tile->numel, class);
}

/* Returns a mask of the elements of a block that have changed. */
static inline uint64_t changed_in(const call_t *call, int64_t first) {
    const bits_t *a = OLD + first, *b = NEW + first;
    uint8_t differs[BLOCK] = {0};
    if (first + BLOCK <= call->numel)
        for (int i = 0; i < BLOCK; i++) differs[i] = a[i] != b[i];
    else
        for (int i = 0; first + i < call->numel; i++) differs[i] = a[i] != b[i];
    return ~equal(block_of(differs), 0);
}

/* ------------------------------------------------------------------ strings of bits */

typedef struct { uint8_t *to; uint64_t bits; int waiting; } writer_t;

static inline void put(writer_t *writer, uint64_t bits, int count) { /* at most 32 */
    writer->bits |= bits << writer->waiting;
    writer->waiting += count;
    if (writer->waiting < 32) return;
    memcpy(writer->to, &writer->bits, 4);
    writer->to += 4;
    writer->bits >>= 32;
    writer->waiting -= 32;
}
static inline uint8_t *finish(writer_t *writer) {
    size_t nbytes = (size_t)(writer->waiting + 7) / 8;
    memcpy(writer->to, &writer->bits, nbytes);
    return writer->to + nbytes;
}

/* Returns the 8 bytes that begin at `from`: decoders work on copies with PADDING zeros behind them. */
static inline uint64_t word_at(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}
static inline uint32_t code_at(const uint8_t *from, int64_t index, int width) {
    int64_t at = index * width;
    return (uint32_t)(word_at(from + at / 8) >> at % 8) & ((1u << width) - 1);
}
static inline int64_t packed(int64_t count, int width) { return (count * width + 7) / 8; }

static int low_bits(int64_t count, int64_t numel) {
    int64_t least = (48 * numel - 24 * count + 100 * count - 1) / (100 * count);
    return (int)lesser(least > 1 ? 64 - __builtin_clzll((uint64_t)(least - 1)) : 0, MAX_LOW);
}

/* Writes the numbers below `numel` that are not among the members. */
static void others(const uint32_t *members, int64_t count, int64_t numel, uint32_t *restrict left) {
    uint32_t number = 0;
    for (int64_t i = 0; i < count; i++, number++)
        while (number < members[i]) *left++ = number++;
    while (number < numel) *left++ = number++;
}

static uint8_t *write_subset(uint8_t *to, const uint32_t *members, int64_t count, int64_t numel, uint32_t *spare) {
    if (2 * count > numel) {
        others(members, count, numel, spare);
        members = spare;
        count = numel - count;
    }
    if (!count) return to;
    const int low = low_bits(count, numel);
    const uint32_t mask = (1u << low) - 1;
    uint32_t next = 0;
    writer_t writer = {to, 0, 0};
    for (int64_t i = 0; i < count; next = members[i++] + 1) put(&writer, (members[i] - next) & mask, low);
    writer = (writer_t){finish(&writer), 0, 0};
    next = 0;
    for (int64_t i = 0; i < count; next = members[i++] + 1) {
        uint32_t zeros = (members[i] - next) >> low;
        for (; zeros > 31; zeros -= 32) put(&writer, 0, 32);
        put(&writer, 1ull << zeros, (int)zeros + 1);
    }
    return finish(&writer);
}

/* Reads a subset. Returns the end of its bytes, or NULL if these are none. */
static const uint8_t *read_subset(const uint8_t *from, const uint8_t *end, int64_t numel, int64_t count,
                                  uint32_t *members, uint32_t *spare) {
    if (count > numel) return NULL;
    const int inverted = 2 * count > numel;
    const int64_t fewer = inverted ? numel - count : count;
    uint32_t *found = inverted ? spare : members;
    if (fewer) {
        const int low = low_bits(fewer, numel);
        const uint8_t *lows = from, *string = from + packed(fewer, low);
        int64_t number = 0, i = 0;
        if (string >= end) return NULL;
        uint64_t zeros = 0;
        for (const uint8_t *at = string; i < fewer; at += 8) {
            if (at >= end) return NULL;
            int used = 0; /* bits of the word */
            for (uint64_t word = word_at(at); word && i < fewer; word &= word - 1) {
                int place = __builtin_ctzll(word);
                number += (int64_t)((zeros + (uint64_t)(place - used)) << low | code_at(lows, i, low));
                if (number >= numel) return NULL;
                found[i++] = (uint32_t)number++;
                zeros = 0;
                used = place + 1;
            }
            from = at + (used + 7) / 8;
            zeros += (uint64_t)(64 - used);
        }
    }
    if (inverted) others(spare, fewer, numel, members);
    return from;
}

/* ------------------------------------------------------------------ changes */

static int64_t escapes_nbits(int64_t escapes, int64_t count, int width) {
    int64_t fewer = lesser(escapes, count - escapes);
    if (!escapes) return 0;
    return ROW_BITS + 8 + escapes * width + (fewer ? fewer * (2 + low_bits(fewer, count)) : 0);
}

static int width_of(const uint32_t *codes, int64_t count, int is_first) {
    int64_t best = INT64_MAX;
    uint32_t all = 0;
    for (int64_t i = 0; i < count; i++) all |= codes[i];
    const int longest = all ? 32 - __builtin_clz(all) : 0;
    int chosen = 0;
    for (int width = longest > MAX_WIDTH * (is_first || !longest); width <= lesser(longest, MAX_WIDTH); width++) {
        int32_t longer = 0;
        for (int64_t i = 0; i < count; i++) longer += codes[i] >> width != 0;
        int64_t cost = count * width + escapes_nbits(longer, count, longest - width);
        if (cost < best) best = cost, chosen = width;
    }
    return chosen;
}

/* Writes the rows of a class, whose members and codes are given and are not kept. Returns the end of the bytes. */
static uint8_t *write_class(uint8_t *to, uint32_t each, uint32_t *members, uint32_t *codes, int64_t count,
                            int64_t numel, uint32_t *spare, uint32_t *rows, int *num_rows) {
    for (int is_first = 1; count; is_first = 0) {
        const int width = width_of(codes, count, is_first);
        int64_t escapes = 0;
        rows[(*num_rows)++] = each << 24 | (uint32_t)width << 20 | (uint32_t)(count - 1);
        to = write_subset(to, members, count, numel, spare);
        writer_t writer = {to, 0, 0};
        for (int64_t i = 0; i < count; i++) {
            put(&writer, codes[i] & ((1u << width) - 1), width);
            if (!(codes[i] >> width)) continue;
            members[escapes] = (uint32_t)i;
            codes[escapes++] = (codes[i] >> width) - 1;
        }
        to = finish(&writer);
        numel = count;
        count = escapes;
    }
    return to;
}

/* Encodes the changes, whose positions are left in call->positions and their number in call->changed. Returns the number
   of bytes, or -1 if more than 60 % of the elements have changed. */
int64_t encode_changes(call_t *call) {
    int64_t counts[CLASSES] = {0}, at[CLASSES], seen[CLASSES] = {0}, k = 0, offset = 0;
    int32_t *positions = call->positions;
    for (int64_t first = 0; first < call->numel; first += BLOCK)
        for (uint64_t left = changed_in(call, first); left; left &= left - 1) {
            int64_t place = first + __builtin_ctzll(left);
            counts[class_of(OLD[place])]++;
            positions[k++] = (int32_t)place;
        }
    call->changed = k;
    if (k * DENSE_OF > call->numel * DENSE) return -1;
    if (!k) return 0;

    uint8_t listed[CLASSES], number_of[CLASSES];
    int num_classes = 0;
    for (int each = 0; each < CLASSES; each++)
        if (counts[each]) {
            at[num_classes] = offset;
            offset += counts[each];
            number_of[each] = (uint8_t)num_classes;
            listed[num_classes++] = (uint8_t)each;
        }
    uint32_t *ranks = call->room, *codes = ranks + k, *spare = codes + k;
    const int32_t *next = positions, *end = positions + k;
    for (int64_t first = 0; first < call->numel; first += TILE) {
        tile_classes_t tile;
        classes_of(call, first, &tile);
        for (; next < end && *next < first + TILE; next++) {
            const uint32_t each = class_of(OLD[*next]);
            const int q = number_of[each];
            ranks[at[q]] = (uint32_t)(seen[q] + count_before(&tile, (int)(*next - first), (int)each));
            codes[at[q]++] = code_of(OLD[*next], NEW[*next]);
        }
        for (int q = 0; q < num_classes; q++) seen[q] += count_in(&tile, listed[q]);
    }

    uint32_t rows[MOST_ROWS];
    int num_rows = 0;
    uint8_t *body = call->coded + 2 + 4 * MOST_ROWS, *to = body;
    for (int q = 0; q < num_classes; q++) {
        int64_t count = counts[listed[q]], begin = at[q] - count;
        to = write_class(to, listed[q], ranks + begin, codes + begin, count, seen[q], spare, rows, &num_rows);
    }
    uint16_t number = (uint16_t)num_rows;
    memcpy(call->coded, &number, 2);
    memcpy(call->coded + 2, rows, 4 * (size_t)num_rows);
    memmove(call->coded + 2 + 4 * num_rows, body, (size_t)(to - body));
    return 2 + 4 * num_rows + (to - body);
}

/* Decodes changes into call->positions and the bits call->new. Returns their number, or less than 0 where the bytes are
   no changes of these elements. */
int64_t decode_changes(call_t *call) {
    uint32_t *ranks = call->room, *codes = ranks + call->numel, *which = codes + call->numel;
    uint32_t *members = which + call->numel, *spare = members + call->numel;
    uint8_t *copied = (uint8_t *)(spare + call->numel);
    const int64_t nbytes = call->coded_nbytes;
    if (!nbytes) return 0;
    if (nbytes > 8 * call->numel + 2 + 4 * MOST_ROWS) return -5;
    memcpy(copied, call->coded, (size_t)nbytes);
    memset(copied + nbytes, 0, PADDING);
    const uint8_t *from = copied, *end = copied + nbytes;
    const int64_t num_rows = nbytes < 2 ? 0 : from[0] | from[1] << 8;
    if (!num_rows || num_rows > MOST_ROWS || nbytes < 2 + 4 * num_rows) return -1;
    uint32_t rows[MOST_ROWS];
    memcpy(rows, from + 2, 4 * (size_t)num_rows);
    from += 2 + 4 * num_rows;

    int64_t totals[CLASSES] = {0}, at[CLASSES], stop[CLASSES], k = 0;
    uint8_t listed[CLASSES];
    int num_classes = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        int each = (int)(rows[i] >> 24), last = num_classes ? listed[num_classes - 1] : -1;
        if (each < last) return -2;
        if (each > last) listed[num_classes++] = (uint8_t)each;
    }
    uint16_t *counts = call->counts; /* of each class in each tile */
    for (int64_t first = 0; first < call->numel; first += TILE) {
        tile_classes_t tile;
        classes_of(call, first, &tile);
        for (int q = 0; q < num_classes; q++) totals[q] += *counts++ = (uint16_t)count_in(&tile, listed[q]);
    }

    int q = -1, used = 0;
    int64_t entries = 0; /* of the row before */
    for (int64_t i = 0; i < num_rows; i++) {
        const int width = rows[i] >> 20 & 15;
        const int64_t count = (rows[i] & 0xFFFFF) + 1;
        const int is_first = q < 0 || rows[i] >> 24 != listed[q];
        if (is_first) {
            if (k + count > call->numel) return -3;
            from = read_subset(from, end, totals[++q], count, ranks + k, spare);
            for (int64_t j = 0; j < count; j++) which[j] = (uint32_t)(k + j);
            at[q] = k;
            stop[q] = k += count;
            used = 0;
        } else {
            from = read_subset(from, end, entries, count, members, spare);
            for (int64_t j = 0; from && j < count; j++) which[j] = which[members[j]];
        }
        if (!from || end - from < packed(count, width) || used + width > 8 * NBYTES) return -4;
        if (is_first)
            for (int64_t j = 0; j < count; j++) codes[at[q] + j] = code_at(from, j, width);
        else
            for (int64_t j = 0; j < count; j++) codes[which[j]] += (code_at(from, j, width) + 1) << used;
        from += packed(count, width);
        used += width;
        entries = count;
    }
    if (from != end) return -5;
    for (int64_t i = 0; i < k; i++)
        if (codes[i] >= PATTERNS) return -6;

    int64_t left[CLASSES], found = 0; /* elements of the class before its next entry */
    for (q = 0; q < num_classes; q++) left[q] = ranks[at[q]];
    counts = call->counts;
    for (int64_t first = 0; first < call->numel; first += TILE) {
        tile_classes_t tile = {.numel = 0};
        uint64_t hits[TILE / BLOCK] = {0};
        uint32_t hit_codes[TILE];
        for (q = 0; q < num_classes; q++) {
            const int64_t in_tile = *counts++;
            if (left[q] >= in_tile) {
                left[q] -= in_tile;
                continue;
            }
            if (!tile.numel) classes_of(call, first, &tile);
            uint64_t masks[TILE / BLOCK];
            int upto[TILE / BLOCK + 1] = {0};
            for (int block = 0; block < TILE / BLOCK; block++) {
                masks[block] = mask_in(&tile, block, tile.numel, listed[q]);
                upto[block + 1] = upto[block] + __builtin_popcountll(masks[block]);
            }
            int64_t here = left[q]; /* counts from the beginning of the tile, like `upto` */
            do {
                int block = 0;
                for (int each = 1; each < TILE / BLOCK; each++) block += here >= upto[each];
                const int place = place_of(masks[block], (int)here - upto[block]);
                hits[block] |= 1ull << place;
                hit_codes[block * BLOCK + place] = codes[at[q]++];
                here = at[q] < stop[q] ? here + (int64_t)(ranks[at[q]] - ranks[at[q] - 1]) : INT32_MAX;
            } while (here < in_tile);
            left[q] = here - in_tile;
        }
        for (int block = 0; tile.numel && block < TILE / BLOCK; block++)
            for (uint64_t some = hits[block]; some; some &= some - 1, found++) {
                const int place = block * BLOCK + __builtin_ctzll(some);
                call->positions[found] = (int32_t)(first + place);
                NEW[found] = moved(OLD[first + place], hit_codes[place]);
            }
    }
    return found;
}

/* ------------------------------------------------------------------ all of a chunk */

/* Adds the number of elements of call->old in each class. */
void count_classes(const call_t *call, int64_t *counts) {
    int64_t parts[4][CLASSES] = {{0}}; /* four, so that neighbours of one class do not wait for each other */
    for (int64_t i = 0; i < call->numel; i++) parts[i % 4][class_of(OLD[i])]++;
    for (int each = 0; each < CLASSES; each++)
        counts[each] += parts[0][each] + parts[1][each] + parts[2][each] + parts[3][each];
}

/* Encodes all of call->old behind the table that call->coded has. Returns the number of bytes. */
int64_t encode_dense(const call_t *call) {
    const int width = call->coded[0], rest_width = SHIFT + 1, last = (1 << width) - 1;
    uint8_t codes[CLASSES], *rest = call->coded + 1 + last + packed(call->numel, width);
    uint8_t *escapes = rest + packed(call->numel, rest_width);
    memset(codes, last, sizeof codes);
    for (int code = last - 1; code >= 0; code--) codes[call->coded[1 + code]] = (uint8_t)code;
    writer_t first = {call->coded + 1 + last, 0, 0}, second = {rest, 0, 0};
    for (int64_t i = 0; i < call->numel; i++) {
        uint32_t bits = OLD[i], each = class_of(OLD[i]);
        put(&first, codes[each], width);
        put(&second, (bits >> EXPONENT_BITS & ~MANTISSA) | (bits & MANTISSA), rest_width);
        if (codes[each] == last) *escapes++ = (uint8_t)each;
    }
    finish(&first);
    finish(&second);
    return escapes - call->coded;
}

/* Decodes a chunk that was sent as a whole, in codes, into the bits call->new. Returns 0, or less where it is none. */
int64_t decode_dense(call_t *call) {
    uint8_t *copied = call->room;
    const int64_t nbytes = call->coded_nbytes;
    if (nbytes < 1 || nbytes > 4 * call->numel + 2 * CLASSES) return -1;
    memcpy(copied, call->coded, (size_t)nbytes);
    memset(copied + nbytes, 0, PADDING);
    const int width = copied[0], rest_width = SHIFT + 1, last = (1 << width % 16) - 1;
    if (width < 1 || width >= EXPONENT_BITS) return -1;
    const uint8_t *table = copied + 1, *codes = table + last, *rest = codes + packed(call->numel, width);
    const uint8_t *escapes = rest + packed(call->numel, rest_width), *end = copied + nbytes;
    if (end < escapes) return -2;
    int wrong = 0;
    for (int code = 0; code < last; code++) wrong |= table[code] >> EXPONENT_BITS;
    for (int64_t i = 0; i < call->numel; i++) {
        uint32_t code = code_at(codes, i, width), bits = code_at(rest, i, rest_width), each;
        if (code == (uint32_t)last) {
            if (escapes == end) return -3;
            each = *escapes++;
            wrong |= (int)(each >> EXPONENT_BITS);
        } else {
            each = table[code];
        }
        NEW[i] = (bits_t)((bits & ~(uint32_t)MANTISSA) << EXPONENT_BITS | each << SHIFT | (bits & MANTISSA));
    }
    return wrong || escapes != end ? -4 : 0;
}

/* ------------------------------------------------------------------ digests */

static inline uint64_t mix(uint64_t index, uint64_t bits) {
    uint64_t z = (index << 16 | bits) + 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Returns the digest of call->old, whose first element has the number `first`. */
uint64_t digest_of(const call_t *call, uint64_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < call->numel; i++) sum += mix(first + (uint64_t)i, OLD[i]);
    return sum;
}

/* Returns the digest of the elements call->old, which are at call->positions behind element `first`. */
uint64_t digest_at(const call_t *call, uint64_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < call->numel; i++) sum += mix(first + (uint64_t)call->positions[i], OLD[i]);
    return sum;
}
