/* The host path of PowerSGD, continued: orthonormal bases of factors. */

static uint32_t philox(uint64_t seed, uint64_t counter, int word) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        uint32_t high[2] = {(uint32_t)(a >> 32), (uint32_t)(b >> 32)};
        uint32_t next[4] = {high[1] ^ c[1] ^ key[0], (uint32_t)b, high[0] ^ c[3] ^ key[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return c[word];
}

/* Columns in fp64, [pieces, rank, PIECE], with zeros at the end: numbers that are used together are adjacent. */
enum { GROUP = 4, SUMS = 16, VECTORS = SUMS / (LANES / 2) }; /* vectors of SUMS elements */
typedef struct { double *values; int64_t rank, pieces; } basis_t;

INLINE double *piece_of(const basis_t *b, int64_t piece, int64_t column) {
    return b->values + (piece * b->rank + column) * PIECE;
}

INLINE wide_t wide_at(const double *from) { return *(const wide_t *)from; }

INLINE void add_products(const int js, const int ks, const double *u, const double *v,
                         double (*sums)[GROUP][SUMS]) {
    wide_t t[BLOCK][BLOCK / 2][VECTORS];
    for (int j = 0; j < js; j++)
        for (int k = 0; k < ks; k++)
            for (int l = 0; l < VECTORS; l++) t[j][k][l] = wide_at(sums[j][k] + l * (LANES / 2));
    for (int i = 0; i < PIECE; i += SUMS)
        for (int l = 0; l < VECTORS; l++) {
            wide_t a[BLOCK];
            for (int j = 0; j < js; j++) {
                a[j] = wide_at(u + j * PIECE + i + l * (LANES / 2));
                IN_REGISTER(a[j]);
            }
            for (int k = 0; k < ks; k++) {
                wide_t b = wide_at(v + k * PIECE + i + l * (LANES / 2));
                IN_REGISTER(b);
                for (int j = 0; j < js; j++) t[j][k][l] = FMA_WIDE(a[j], b, t[j][k][l]);
            }
        }
    for (int j = 0; j < js; j++)
        for (int k = 0; k < ks; k++)
            for (int l = 0; l < VECTORS; l++) *(wide_t *)(sums[j][k] + l * (LANES / 2)) = t[j][k][l];
}

/* Computes the inner products of the columns `from` to `to` with `some` columns from `column` on. Each consists of
   SUMS partial sums, whatever the width of vectors, which are added up in a fixed order. */
static void products_of(const basis_t *b, int64_t from, int64_t to, int64_t column, int some, double (*out)[GROUP]) {
    ALIGNED double sums[MAX_RANK][GROUP][SUMS];
    memset(sums, 0, sizeof sums[0] * (size_t)(to - from));
    for (int64_t piece = 0; piece < b->pieces; piece++)
        for (int64_t j = 0, js; j < to - from; j += js) {
            js = lesser(BLOCK, to - from - j);
            const double *u = piece_of(b, piece, from + j);
            for (int k = 0, ks; k < some; k += ks) {
                ks = some - k < BLOCK / 2 ? 1 : BLOCK / 2;
                const double *v = piece_of(b, piece, column + k);
                double(*s)[GROUP][SUMS] = (double(*)[GROUP][SUMS])sums[j][k];
                if (js == 1) ks == 1 ? add_products(1, 1, u, v, s) : add_products(1, BLOCK / 2, u, v, s);
                else if (js == 2) ks == 1 ? add_products(2, 1, u, v, s) : add_products(2, BLOCK / 2, u, v, s);
#if BLOCK == 4
                else if (js == 3) ks == 1 ? add_products(3, 1, u, v, s) : add_products(3, BLOCK / 2, u, v, s);
                else ks == 1 ? add_products(4, 1, u, v, s) : add_products(4, BLOCK / 2, u, v, s);
#endif
            }
        }
    for (int64_t j = 0; j < to - from; j++)
        for (int k = 0; k < some; k++) {
            out[j][k] = 0;
            for (int l = 0; l < SUMS; l++) out[j][k] += sums[j][k][l];
        }
}

INLINE void take_out(const int ks, int64_t count, const double *u, double (*shares)[GROUP], double *v) {
    for (int i = 0; i < PIECE; i += 2 * LANES) {
        wide_t t[BLOCK][4];
        for (int k = 0; k < ks; k++)
            for (int l = 0; l < 4; l++) t[k][l] = wide_at(v + k * PIECE + i + l * (LANES / 2));
        for (int64_t j = 0; j < count; j++) {
            wide_t a[4];
            for (int l = 0; l < 4; l++) {
                a[l] = wide_at(u + j * PIECE + i + l * (LANES / 2));
                IN_REGISTER(a[l]);
            }
            for (int k = 0; k < ks; k++) {
                wide_t share = -shares[j][k] - (wide_t){0};
                for (int l = 0; l < 4; l++) t[k][l] = FMA_WIDE(share, a[l], t[k][l]);
            }
        }
        for (int k = 0; k < ks; k++)
            for (int l = 0; l < 4; l++) *(wide_t *)(v + k * PIECE + i + l * (LANES / 2)) = t[k][l];
    }
}

/* Subtracts from `some` columns, from `column` on, their projections on the orthonormal columns `from` to `to`. Does so
   twice. */
static void project(const basis_t *b, int64_t from, int64_t to, int64_t column, int some) {
    for (int pass = 0; pass < 2 && from < to; pass++) {
        double shares[MAX_RANK][GROUP];
        products_of(b, from, to, column, some, shares);
        for (int64_t piece = 0; piece < b->pieces; piece++)
            for (int k = 0, ks; k < some; k += ks) {
                ks = some - k < BLOCK ? 1 : BLOCK;
                double(*s)[GROUP] = (double(*)[GROUP])(shares[0] + k);
                const double *u = piece_of(b, piece, from);
                if (ks == 1) take_out(1, to - from, u, s, piece_of(b, piece, column + k));
                else take_out(BLOCK, to - from, u, s, piece_of(b, piece, column + k));
            }
    }
}

static double norm_of(const basis_t *b, int64_t column) {
    double square[1][GROUP];
    products_of(b, column, column + 1, column, 1, square);
    return sqrt(square[0][0]);
}

/* Reduces a column to its normalised part outside the span of the columns from `from` to it, and returns 1. A column
   that depends on these columns becomes zero, and 0 is returned. */
static int remainder_of(const basis_t *b, int64_t from, int64_t column, double before) {
    project(b, from, column, column, 1);
    double after = norm_of(b, column);
    double scale = 1 / after;
    int independent = after > DEPENDENT * before; /* false for NaN */
    for (int64_t piece = 0; piece < b->pieces; piece++) {
        double *v = piece_of(b, piece, column);
        for (int i = 0; i < PIECE; i++) v[i] = independent ? v[i] * scale : 0;
    }
    return independent;
}

static int all_finite(const float *values, int64_t count) {
    int finite = 1;
    for (int64_t i = 0; i < count; i++) finite &= is_finite(values[i]);
    return finite;
}

void orthogonalise(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) {
        const matrix_t *m = call->matrices + index;
        float *factor = m->left;
        int64_t count = m->rows, numel = m->rank * count;
        basis_t b = {m->scratch, m->rank, (count + PIECE - 1) / PIECE};
        if (!call->random && !all_finite(factor, numel)) {
            for (int64_t i = 0; i < numel; i++) factor[i] = NAN;
            continue;
        }
        for (int64_t piece = 0; piece < b.pieces; piece++)
            for (int64_t j = 0; j < m->rank; j++) {
                double *v = piece_of(&b, piece, j);
                int here = (int)lesser(PIECE, count - piece * PIECE);
                for (int i = 0; i < here; i++) v[i] = (double)factor[j * count + piece * PIECE + i];
                for (int i = here; i < PIECE; i++) v[i] = 0;
            }
        for (int64_t first = 0; first < m->rank; first += GROUP) {
            int some = (int)lesser(GROUP, m->rank - first);
            double before[GROUP];
            for (int k = 0; k < some; k++) before[k] = norm_of(&b, first + k);
            project(&b, 0, first, first, some); /* earlier columns are read less often for several at a time */
            for (int64_t j = first; j < first + some; j++)
                if (!remainder_of(&b, first, j, before[j - first]) && call->random) {
                    for (int64_t i = 0; i < count; i++) {
                        uint64_t at = (uint64_t)(j * count + i);
                        uint32_t draw = philox(m->seed, at / 8, (int)(at / 2 % 4)) >> (16 * (at % 2)) & 0xFFFF;
                        piece_of(&b, i / PIECE, j)[i % PIECE] = ((double)draw + 0.5) / 65536 - 0.5;
                    }
                    remainder_of(&b, 0, j, norm_of(&b, j));
                }
        }
        for (int64_t piece = 0; piece < b.pieces; piece++)
            for (int64_t j = 0; j < m->rank; j++) {
                const double *v = piece_of(&b, piece, j);
                int here = (int)lesser(PIECE, count - piece * PIECE);
                for (int i = 0; i < here; i++) factor[j * count + piece * PIECE + i] = (float)v[i];
            }
    }
}

void keep(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) {
        const matrix_t *m = call->matrices + index;
        int64_t numel = m->rank * m->rows;
        int used = 0;
        if (!all_finite(m->left, numel)) {
            for (int64_t i = 0; i < numel; i++) m->left[i] = NAN;
            continue;
        }
        for (int64_t i = 0; i < numel; i++) used |= m->left[i] != 0;
        if (used && m->right) copy(m->right, m->left, sizeof(float) * (size_t)numel);
    }
}
