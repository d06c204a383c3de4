/* The host path of PowerSGD, continued: orthonormal bases of factors. */

/* Columns are worked on in pieces of PIECE elements, in fp64, [rank, PIECE], with zeros at the end. */
enum { SUMS = 16, VECTORS = SUMS / (LANES / 2) }; /* vectors of SUMS elements */

/* What a round has found out about a factor, at the beginning of its scratch. Behind it are the inner products of all
   parts, [parts, rank, rank], and the columns after a round that is not the last, [pieces, rank, PIECE]. */
typedef struct {
    double taken[MAX_RANK][MAX_RANK]; /* coefficients of the new columns: taken[l][j] of column l in column j */
    double before[MAX_RANK];          /* squares of the lengths of the given columns; 0: not known yet */
    int32_t usable[MAX_RANK], finished, spoiled;
} found_t;
_Static_assert(sizeof(found_t) <= FOUND_NBYTES && FOUND_NBYTES % 64 == 0, "found_t");

INLINE found_t *found_of(const call_t *call, const matrix_t *m) { return (found_t *)scratch_of(call, m); }
INLINE double *products_of(const call_t *call, const matrix_t *m, int64_t part) {
    return (double *)(scratch_of(call, m) + FOUND_NBYTES) + part * m->rank * m->rank;
}
INLINE double *columns_of(const call_t *call, const matrix_t *m, int64_t piece) {
    return products_of(call, m, m->parts) + piece * m->rank * PIECE;
}

/* Copies a piece: of the factor in the first round, of the columns that the round before has left in others. */
static void take_piece(const call_t *call, const matrix_t *m, int64_t piece, int round, double *out) {
    if (round) {
        memcpy(out, columns_of(call, m, piece), sizeof(double) * (size_t)(m->rank * PIECE));
        return;
    }
    int here = (int)lesser(PIECE, m->rows - piece * PIECE);
    for (int64_t j = 0; j < m->rank; j++) {
        const float *restrict from = m->left + j * m->rows + piece * PIECE;
        double *restrict to = out + j * PIECE;
        for (int i = 0; i < here; i++) to[i] = (double)from[i];
        for (int i = here; i < PIECE; i++) to[i] = 0;
    }
}

INLINE wide_t wide_at(const double *from) { return *(const wide_t *)from; }

INLINE void add_products(const int js, const int ks, const double *u, const double *v,
                         double (*sums)[MAX_RANK][SUMS]) {
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

/* Computes the inner products of all columns in one part. Each consists of SUMS partial sums, whatever the width of
   vectors, which are added up in a fixed order. */
static void multiply_part(const call_t *call, const matrix_t *m, int64_t part, int round) {
    ALIGNED double sums[MAX_RANK][MAX_RANK][SUMS], v[MAX_RANK * PIECE];
    int rank = (int)m->rank;
    int64_t end = lesser((part + 1) * m->height, (m->rows + PIECE - 1) / PIECE);
    for (int j = 0; j < rank; j++) memset(sums[j], 0, sizeof sums[j][0] * (size_t)rank);
    for (int64_t piece = part * m->height; piece < end; piece++) {
        take_piece(call, m, piece, round, v);
        for (int k = 0, ks; k < rank; k += ks) {
            ks = rank - k < BLOCK / 2 ? 1 : BLOCK / 2;
            for (int j = 0, js; j < k + ks; j += js) {
                js = (int)lesser(BLOCK, k + ks - j);
                const double *u = v + j * PIECE, *w = v + k * PIECE;
                double(*s)[MAX_RANK][SUMS] = (double(*)[MAX_RANK][SUMS])sums[j][k];
                if (js == 1) ks == 1 ? add_products(1, 1, u, w, s) : add_products(1, BLOCK / 2, u, w, s);
                else if (js == 2) ks == 1 ? add_products(2, 1, u, w, s) : add_products(2, BLOCK / 2, u, w, s);
#if BLOCK == 4
                else if (js == 3) ks == 1 ? add_products(3, 1, u, w, s) : add_products(3, BLOCK / 2, u, w, s);
                else ks == 1 ? add_products(4, 1, u, w, s) : add_products(4, BLOCK / 2, u, w, s);
#endif
            }
        }
    }
    double *out = products_of(call, m, part);
    for (int k = 0; k < rank; k++)
        for (int j = 0; j <= k; j++) {
            double sum = 0;
            for (int l = 0; l < SUMS; l++) sum += sums[j][k][l];
            out[j * rank + k] = out[k * rank + j] = sum;
        }
}

/* Computes the coefficients of the next columns (reference.coefficients) from the inner products of all parts. */
static void solve(const call_t *call, const matrix_t *m, int round) {
    found_t *f = found_of(call, m);
    int rank = (int)m->rank, clear[MAX_RANK], last = round == ROUNDS - 1;
    double left[MAX_RANK][MAX_RANK], squares[MAX_RANK];
    for (int j = 0; j < rank; j++)
        for (int k = 0; k < rank; k++) {
            left[j][k] = 0;
            for (int64_t part = 0; part < m->parts; part++) left[j][k] += products_of(call, m, part)[j * rank + k];
            f->taken[j][k] = j == k;
        }
    f->finished = 1;
    f->spoiled = 0;
    for (int j = 0; j < rank; j++) {
        squares[j] = left[j][j];
        if (!round || f->before[j] == 0) f->before[j] = squares[j];
        f->usable[j] = squares[j] > DEPENDENT * DEPENDENT * f->before[j]; /* false for NaN and inf */
        if (!call->random && !isfinite(squares[j])) f->spoiled = 1;
    }
    for (int j = 0; j < rank; j++) {
        double square = left[j][j], used = 0, share[MAX_RANK];
        for (int l = 0; l <= j; l++)
            if (f->taken[l][j] != 0) used += f->taken[l][j] * f->taken[l][j] * squares[l];
        clear[j] = f->usable[j] && square > 0 && used <= CLEAR * square;
        if (!clear[j]) continue;
        for (int k = j + 1; k < rank; k++) share[k] = f->usable[k] ? left[j][k] / square : 0;
        for (int i = j + 1; i < rank; i++)
            for (int k = j + 1; k < rank; k++) left[i][k] -= left[i][j] * share[k];
        for (int l = 0; l <= j; l++) {
            double own = f->taken[l][j];
            for (int k = j + 1; k < rank; k++) f->taken[l][k] -= own * share[k];
            f->taken[l][j] = own / sqrt(square);
        }
    }
    for (int j = 0; j < rank; j++) {
        if (!f->usable[j] || (last && !clear[j]))
            for (int l = 0; l < rank; l++) f->taken[l][j] = 0;
        if (clear[j] || (!f->usable[j] && call->random)) f->before[j] = 0; /* its length is 1, or it is random */
        if (!clear[j] && (f->usable[j] || call->random) && !last) f->finished = 0;
    }
}

/* Computes some columns of a piece: sums of taken[l][k] times column l of `u`, over all l in turn. */
INLINE void combine(const int ks, int count, const double *u, const double (*taken)[MAX_RANK], double *v) {
    for (int i = 0; i < PIECE; i += 2 * LANES) {
        wide_t t[BLOCK][4];
        for (int k = 0; k < ks; k++)
            for (int l = 0; l < 4; l++) t[k][l] = (wide_t){0};
        for (int j = 0; j < count; j++) {
            wide_t a[4];
            for (int l = 0; l < 4; l++) {
                a[l] = wide_at(u + j * PIECE + i + l * (LANES / 2));
                IN_REGISTER(a[l]);
            }
            for (int k = 0; k < ks; k++) {
                wide_t share = taken[j][k] - (wide_t){0};
                for (int l = 0; l < 4; l++) t[k][l] = FMA_WIDE(share, a[l], t[k][l]);
            }
        }
        for (int k = 0; k < ks; k++)
            for (int l = 0; l < 4; l++) *(wide_t *)(v + k * PIECE + i + l * (LANES / 2)) = t[k][l];
    }
}

/* Replaces the columns of one part: those of the factor by the basis if this round is the last one. */
static void replace_part(const call_t *call, const matrix_t *m, int64_t part, int round) {
    const found_t *f = found_of(call, m);
    ALIGNED double given[MAX_RANK * PIECE], result[MAX_RANK * PIECE];
    int rank = (int)m->rank;
    int64_t end = lesser((part + 1) * m->height, (m->rows + PIECE - 1) / PIECE);
    for (int64_t piece = part * m->height; piece < end; piece++) {
        int here = (int)lesser(PIECE, m->rows - piece * PIECE);
        float *factor = m->left + piece * PIECE;
        if (f->spoiled) {
            for (int64_t j = 0; j < rank; j++)
                for (int i = 0; i < here; i++) factor[j * m->rows + i] = NAN;
            continue;
        }
        double *out = f->finished ? result : columns_of(call, m, piece);
        take_piece(call, m, piece, round, given);
        for (int j = 0; j < rank; j++)
            if (!f->usable[j]) memset(given + j * PIECE, 0, sizeof(double) * PIECE); /* it may not be finite */
        for (int k = 0, ks; k < rank; k += ks) {
            ks = rank - k < BLOCK ? 1 : BLOCK;
            const double(*taken)[MAX_RANK] = (const double(*)[MAX_RANK])(f->taken[0] + k);
            if (ks == 1) combine(1, k + 1, given, taken, out + k * PIECE);
            else combine(BLOCK, k + BLOCK, given, taken, out + k * PIECE);
        }
        if (f->finished) {
            for (int64_t j = 0; j < rank; j++)
                for (int i = 0; i < here; i++) factor[j * m->rows + i] = (float)out[j * PIECE + i];
            continue;
        }
        for (int j = 0; j < rank; j++)
            if (!f->usable[j] && call->random)
                for (int i = 0; i < here; i++) {
                    uint64_t at = (uint64_t)(j * m->rows + piece * PIECE + i);
                    uint64_t word = philox_word(m->seed, at / 16, (int)(at / 4 % 4));
                    uint32_t draw = (uint32_t)((word << 32 | word) >> 8 * (at % 4)) & 0xFFFF;
                    out[j * PIECE + i] = (double)draw / 65536 - 0.5;
                }
    }
}

/* The first round in three calls, whose parts several threads can share. */
void multiply_parts(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        multiply_part(call, m, unit - m->first, 0);
    }
}

void solve_all(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) solve(call, call->matrices + index, 0);
}

void replace_parts(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        replace_part(call, m, unit - m->first, 0);
    }
}

/* The other rounds of the matrices that need them. */
void finish(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) {
        const matrix_t *m = call->matrices + index;
        for (int round = 1; round < ROUNDS && !found_of(call, m)->finished; round++) {
            for (int64_t part = 0; part < m->parts; part++) multiply_part(call, m, part, round);
            solve(call, m, round);
            for (int64_t part = 0; part < m->parts; part++) replace_part(call, m, part, round);
        }
    }
}

/* All rounds. */
void orthogonalise(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) {
        const matrix_t *m = call->matrices + index;
        for (int64_t part = 0; part < m->parts; part++) multiply_part(call, m, part, 0);
        solve(call, m, 0);
        for (int64_t part = 0; part < m->parts; part++) replace_part(call, m, part, 0);
        finish(call, index, index + 1);
    }
}

static int all_finite(const float *values, int64_t count) {
    int finite = 1;
    for (int64_t i = 0; i < count; i++) finite &= is_finite(values[i]);
    return finite;
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
