/* The host path of PowerSGD: any number of matrices in a call.

   A unit of work belongs to one matrix, and what it does depends on that matrix alone: results are the same whatever
   else is in the call and however many threads there are. What every rank computes for itself from the same factors,
   orthonormal bases and products of factors, is made of operations in an order that depends on no vector width, so that
   ranks with different processors get the same bits. (They multiply and add products in one rounding, as any processor
   with AVX2 or later can; one that cannot rounds twice, and does not belong in the same job.) */

typedef struct {
    void *grad;
    float *residual; /* or NULL */
    float *left, *right; /* [rank, rows], [rank, cols]; for orthogonalise and keep: the factor, and NULL or what is kept */
    void *scratch;
    int64_t rows, cols, rank;
    int64_t first; /* its first unit of work */
    int64_t height, parts; /* rows of a unit, or of each of the parts whose sums are added up at the end */
    uint64_t seed;
} matrix_t;

typedef struct {
    matrix_t *matrices;
    int64_t count;
    int32_t dtype, random;
    float scale;
} call_t;

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16 };
#define BLOCK 4
typedef float vec_t __attribute__((vector_size(64), aligned(4), may_alias));
typedef double wide_t __attribute__((vector_size(64), aligned(8), may_alias));
#define FMA(a, b, c) ((vec_t)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define FMA_WIDE(a, b, c) ((wide_t)_mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c)))
#define IN_REGISTER(x) __asm__("" : "+v"(x)) /* gcc would read it from memory for each use */
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { LANES = 8 };
#define BLOCK 2
typedef float vec_t __attribute__((vector_size(32), aligned(4), may_alias));
typedef double wide_t __attribute__((vector_size(32), aligned(8), may_alias));
#define FMA(a, b, c) ((vec_t)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define FMA_WIDE(a, b, c) ((wide_t)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#define IN_REGISTER(x) __asm__("" : "+x"(x)) /* gcc would read it from memory for each use */
#else
enum { LANES = 4 };
#define BLOCK 2
typedef float vec_t __attribute__((vector_size(16), aligned(4), may_alias));
typedef double wide_t __attribute__((vector_size(16), aligned(8), may_alias));
#define FMA(a, b, c) ((a) * (b) + (c))
#define FMA_WIDE(a, b, c) ((a) * (b) + (c))
#define IN_REGISTER(x)
#endif
enum { WIDE = 4 * LANES }; /* WIDTH is a multiple of it */
#define ALIGNED __attribute__((aligned(64))) /* vectors across two cache lines take twice as long */
#define INLINE static inline __attribute__((always_inline))

INLINE vec_t vec_at(const float *from) { return *(const vec_t *)from; }
INLINE vec_t all_of(float x) { return x - (vec_t){0}; }

INLINE float sum_of(vec_t lanes) {
    typedef float quad_t __attribute__((vector_size(16)));
    quad_t parts[LANES / 4];
    memcpy(parts, &lanes, sizeof parts);
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

static matrix_t *matrix_of(const call_t *call, int64_t unit) {
    int64_t low = 0, high = call->count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (call->matrices[middle].first <= unit) low = middle; else high = middle;
    }
    return call->matrices + low;
}

/* WIDTH columns of some rows: what is worked on at once, in the first-level cache. */
typedef struct { int64_t row, first; int rows, here; } window_t;

/* The one after this one, of the rows up to ``end``: the next columns, or the next rows. */
INLINE window_t window_after(const matrix_t *m, window_t t, int group, int64_t end) {
    if (t.first + WIDTH < m->cols) t.first += WIDTH; else t.first = 0, t.row += group;
    t.rows = (int)greater(lesser(group, end - t.row), 0);
    t.here = (int)lesser(WIDTH, m->cols - t.first);
    return t;
}

/* Asks for a window a little at a time, while there is something else to do: memory and processor would otherwise wait for
   each other in turn, and many requests at once fill the processor's queue. */
typedef struct { window_t window; int asked, due, step; } ahead_t;

INLINE ahead_t ahead_of(const matrix_t *m, window_t window, int times) {
    if (m->rows * m->cols <= CACHED) window.rows = 0;
    return (ahead_t){window, 0, 0, (window.rows << 16) / times + 1};
}

INLINE void ask(const call_t *call, const matrix_t *m, ahead_t *a) {
    int size = call->dtype == FP32 ? 4 : 2;
    for (a->due += a->step; a->asked < a->window.rows && a->asked << 16 < a->due; a->asked++) {
        int64_t at = (a->window.row + a->asked) * m->cols + a->window.first;
        prefetch((const char *)m->grad + at * size, a->window.here * size);
        if (m->residual) prefetch(m->residual + at, a->window.here * 4);
    }
}

/* Gradient plus residual of one row's columns from ``first`` on, and zeros up to a multiple of WIDE. */
static void load_row(const call_t *call, const matrix_t *m, int64_t row, int64_t first, int here, float *values) {
    int64_t at = row * m->cols + first;
    const float *restrict r = m->residual + at;
    if (m->residual && call->dtype == FP32) {
        const float *restrict g = (const float *)m->grad + at;
        for (int i = 0; i < here; i++) values[i] = g[i] + r[i];
    } else {
        load(m->grad, call->dtype, at, here, values);
        if (m->residual)
            for (int i = 0; i < here; i++) values[i] += r[i];
    }
    for (int i = here; i % WIDE; i++) values[i] = 0;
}

/* WIDE columns of a few rows of ``out``: the sums of f[a, i] times row i of ``v``, over all i in turn, or what is there
   and these. */
INLINE void multiply(const int few, int count, const float *f, int64_t a_stride, int64_t i_stride, const float *v,
                     float *out, const int add) {
    vec_t t[BLOCK][4];
    for (int a = 0; a < few; a++)
        for (int l = 0; l < 4; l++) t[a][l] = add ? vec_at(out + a * WIDTH + l * LANES) : all_of(0);
    for (int i = 0; i < count; i++) {
        vec_t row[4];
        for (int l = 0; l < 4; l++) {
            row[l] = vec_at(v + i * WIDTH + l * LANES);
            IN_REGISTER(row[l]);
        }
        for (int a = 0; a < few; a++) {
            vec_t factor = all_of(f[a * a_stride + i * i_stride]);
            for (int l = 0; l < 4; l++) t[a][l] = FMA(factor, row[l], t[a][l]);
        }
    }
    for (int a = 0; a < few; a++)
        for (int l = 0; l < 4; l++) *(vec_t *)(out + a * WIDTH + l * LANES) = t[a][l];
}

/* ------------------------------------------------------------------ P = M Q */

INLINE void dots(const int rows, const int ranks, float (*values)[WIDTH], int from, const float *q, int64_t stride,
                 int count, vec_t (*sums)[BLOCK]) {
    vec_t t[BLOCK][BLOCK];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) t[i][j] = sums[i][j];
    for (int k = 0; k < count; k += LANES) {
        vec_t f[BLOCK];
        for (int j = 0; j < ranks; j++) {
            f[j] = vec_at(q + j * stride + k);
            IN_REGISTER(f[j]);
        }
        for (int i = 0; i < rows; i++) {
            vec_t v = vec_at(values[i] + from + k);
            IN_REGISTER(v);
            for (int j = 0; j < ranks; j++) t[i][j] = FMA(v, f[j], t[i][j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) sums[i][j] = t[i][j];
}

void left(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t row = (unit - m->first) * m->height, end = lesser(row + m->height, m->rows);
        int64_t group = m->rank > 8 ? ROWS / 2 : BLOCK; /* few rows at once are read faster, many need Q less often */
        int blocks = (int)((m->rank + BLOCK - 1) / BLOCK);
        window_t t = {row, 0, (int)lesser(group, end - row), (int)lesser(WIDTH, m->cols)};
        ALIGNED vec_t sums[LARGEST_RANK / BLOCK][ROWS / 2 / BLOCK][BLOCK][BLOCK];
        ALIGNED float values[ROWS / 2][WIDTH];
        while (t.row < end) {
            window_t now = t;
            int whole = t.here / LANES * LANES, groups = (t.rows + BLOCK - 1) / BLOCK;
            if (t.first == 0) {
                memset(sums, 0, sizeof sums[0] * (size_t)blocks);
                memset(values + t.rows, 0, sizeof values[0] * (size_t)(groups * BLOCK - t.rows));
            }
            for (int i = 0; i < t.rows; i++) load_row(call, m, t.row + i, t.first, t.here, values[i]);
            t = window_after(m, t, group, end);
            ahead_t next = ahead_of(m, t, blocks * groups);
            for (int b = 0; b < blocks; b++) {
                int ranks = (int)lesser(BLOCK, m->rank - b * BLOCK);
                const float *q = m->right + b * BLOCK * m->cols + now.first;
                float tail[BLOCK][LANES]; /* what is behind the last column is another one's, and may be inf */
                if (whole < now.here) {
                    memset(tail, 0, sizeof tail);
                    for (int j = 0; j < ranks; j++)
                        memcpy(tail[j], q + j * m->cols + whole, sizeof(float) * (size_t)(now.here - whole));
                }
                for (int i = 0; i < groups; i++) {
                    ask(call, m, &next);
                    float(*v)[WIDTH] = values + i * BLOCK;
                    vec_t(*s)[BLOCK] = sums[b][i];
                    if (ranks == 1) dots(BLOCK, 1, v, 0, q, m->cols, whole, s);
                    else if (ranks == 2) dots(BLOCK, 2, v, 0, q, m->cols, whole, s);
#if BLOCK == 4
                    else if (ranks == 3) dots(BLOCK, 3, v, 0, q, m->cols, whole, s);
                    else dots(BLOCK, 4, v, 0, q, m->cols, whole, s);
#endif
                    if (whole < now.here) dots(BLOCK, BLOCK, v, whole, tail[0], LANES, LANES, s);
                }
            }
            if (t.row != now.row)
                for (int64_t j = 0; j < m->rank; j++)
                    for (int i = 0; i < now.rows; i++) {
                        float sum = sum_of(sums[j / BLOCK][i / BLOCK][i % BLOCK][j % BLOCK]);
                        m->left[j * m->rows + now.row + i] = sum * call->scale;
                    }
        }
    }
}

/* ------------------------------------------------------------------ Q = M' P */

/* The sums of one part of the rows: scratch [parts, tiles of WIDTH columns, rank, WIDTH]. */
void right(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t part = unit - m->first, tiles = (m->cols + WIDTH - 1) / WIDTH, numel = tiles * m->rank * WIDTH;
        int64_t row = part * m->height, end = lesser(row + m->height, m->rows);
        int64_t group = m->rank > 8 ? ROWS : ROWS / 2;
        float *all = (float *)m->scratch + part * numel;
        memset(all, 0, sizeof(float) * (size_t)numel);
        window_t t = {row, 0, (int)lesser(group, end - row), (int)lesser(WIDTH, m->cols)};
        ALIGNED float p[LARGEST_RANK][ROWS], values[ROWS][WIDTH];
        while (t.row < end) {
            if (t.first == 0)
                for (int64_t j = 0; j < m->rank; j++)
                    for (int i = 0; i < t.rows; i++) p[j][i] = m->left[j * m->rows + t.row + i];
            for (int i = 0; i < t.rows; i++) load_row(call, m, t.row + i, t.first, t.here, values[i]);
            float *sums = all + t.first * m->rank;
            int rows = t.rows, here = t.here, blocks = (int)((m->rank + BLOCK - 1) / BLOCK);
            t = window_after(m, t, group, end);
            ahead_t next = ahead_of(m, t, blocks * ((here + WIDE - 1) / WIDE));
            for (int b = 0; b < blocks; b++) {
                int j = b * BLOCK, ranks = (int)lesser(BLOCK, m->rank - j);
                for (int k = 0; k < here; k += WIDE) {
                    ask(call, m, &next);
                    float *s = sums + j * WIDTH + k;
                    if (ranks == 1) multiply(1, rows, p[j], ROWS, 1, values[0] + k, s, 1);
                    else if (ranks == 2) multiply(2, rows, p[j], ROWS, 1, values[0] + k, s, 1);
#if BLOCK == 4
                    else if (ranks == 3) multiply(3, rows, p[j], ROWS, 1, values[0] + k, s, 1);
                    else multiply(4, rows, p[j], ROWS, 1, values[0] + k, s, 1);
#endif
                }
            }
        }
    }
}

void right_sum(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t tiles = (m->cols + WIDTH - 1) / WIDTH, numel = tiles * m->rank * WIDTH, tile = unit - m->first;
        int here = (int)lesser(WIDTH, m->cols - tile * WIDTH);
        for (int64_t j = 0; j < m->rank; j++) {
            const float *sums = (const float *)m->scratch + (tile * m->rank + j) * WIDTH;
            float total[WIDTH];
            memcpy(total, sums, sizeof total);
            for (int64_t part = 1; part < m->parts; part++)
                for (int i = 0; i < WIDTH; i++) total[i] += sums[part * numel + i];
            for (int i = 0; i < here; i++) m->right[j * m->cols + tile * WIDTH + i] = total[i] * call->scale;
        }
    }
}

/* ------------------------------------------------------------------ P Q' */

/* A row's columns from ``first`` on become those of the product, what is left those of the residual. */
static void put_row(const call_t *call, const matrix_t *m, int64_t row, int64_t first, int here, float *product) {
    ALIGNED float values[WIDTH];
    int64_t at = row * m->cols + first;
    float *restrict r = m->residual + at, *restrict d = product;
    if (!m->residual) {
        store(m->grad, call->dtype, at, here, d);
    } else if (call->dtype == FP32) {
        float *restrict g = (float *)m->grad + at;
        for (int k = 0; k < here; k++) {
            float rest = (g[k] + r[k]) - d[k];
            r[k] = is_finite(rest) ? rest : r[k];
            g[k] = d[k];
        }
    } else {
        load(m->grad, call->dtype, at, here, values);
        store(m->grad, call->dtype, at, here, d);
        load(m->grad, call->dtype, at, here, d); /* rounded */
        for (int k = 0; k < here; k++) {
            float rest = (values[k] + r[k]) - d[k];
            r[k] = is_finite(rest) ? rest : r[k];
        }
    }
}

/* Every element is added up in the order of the columns of the factors. */
void reconstruct(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t row = (unit - m->first) * m->height, end = lesser(row + m->height, m->rows);
        ALIGNED float p[LARGEST_RANK][ROWS], q[LARGEST_RANK][WIDTH], product[BLOCK][WIDTH];
        memset(p, 0, sizeof p);
        window_t t = {row, 0, (int)lesser(ROWS, end - row), (int)lesser(WIDTH, m->cols)};
        while (t.row < end) {
            if (t.first == 0)
                for (int64_t j = 0; j < m->rank; j++)
                    for (int i = 0; i < t.rows; i++) p[j][i] = m->left[j * m->rows + t.row + i];
            for (int64_t j = 0; j < m->rank; j++) {
                memcpy(q[j], m->right + j * m->cols + t.first, sizeof(float) * (size_t)t.here);
                memset(q[j] + t.here, 0, sizeof(float) * (size_t)(WIDTH - t.here));
            }
            window_t now = t;
            int rank = (int)m->rank;
            t = window_after(m, t, ROWS, end);
            ahead_t next = ahead_of(m, t, (now.rows + BLOCK - 1) / BLOCK * ((now.here + WIDE - 1) / WIDE));
            for (int i = 0; i < now.rows; i += BLOCK) {
                for (int k = 0; k < now.here; k += WIDE) {
                    multiply(BLOCK, rank, p[0] + i, 1, ROWS, q[0] + k, product[0] + k, 0);
                    ask(call, m, &next);
                }
                for (int l = 0; l < BLOCK && i + l < now.rows; l++)
                    put_row(call, m, now.row + i + l, now.first, now.here, product[l]);
            }
        }
    }
}

/* ------------------------------------------------------------------ orthonormal bases */

static uint32_t philox(uint64_t seed, uint64_t counter, int word) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return c[word];
}

/* Columns in fp64, [pieces, rank, PIECE], zeros at the end: all that is needed at once lies together. */
enum { GROUP = 4, SUMS = 16, VECTORS = SUMS / (LANES / 2) }; /* vectors of SUMS elements */
typedef struct { double *values; int64_t rank, pieces; } basis_t;

INLINE double *piece_of(const basis_t *b, int64_t piece, int64_t column) {
    return b->values + (piece * b->rank + column) * PIECE;
}

INLINE wide_t wide_at(const double *from) { return *(const wide_t *)from; }

INLINE void add_products(const int js, const int ks, const double *u, const double *v, double (*sums)[GROUP][SUMS]) {
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

/* Inner products of the columns up to ``to`` with ``some`` from ``column`` on: SUMS sums each, whatever the width of
   vectors, that are added up in a fixed order. */
static void products_of(const basis_t *b, int64_t from, int64_t to, int64_t column, int some, double (*out)[GROUP]) {
    ALIGNED double sums[LARGEST_RANK][GROUP][SUMS];
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

/* Take out of ``some`` columns from ``column`` on, twice, what they share with the orthonormal ones up to ``to``. */
static void project(const basis_t *b, int64_t from, int64_t to, int64_t column, int some) {
    for (int pass = 0; pass < 2 && from < to; pass++) {
        double shares[LARGEST_RANK][GROUP];
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

/* What is left of a column outside of the span of those from ``from`` to it, normalised, or zero; whether it is not. */
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
            project(&b, 0, first, first, some); /* several columns at once need those before them less often */
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
        if (used && m->right) memcpy(m->right, m->left, sizeof(float) * (size_t)numel);
    }
}
