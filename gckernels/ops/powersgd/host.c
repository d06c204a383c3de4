/* The host path of PowerSGD, for any number of matrices in a call.

   A unit of work belongs to one matrix and depends on that matrix alone: results do not depend on the other matrices of
   the call or on the number of threads. Every rank computes orthonormal bases and products of factors from the same
   factors. The order of these operations does not depend on the width of vectors, so that ranks with different
   processors get the same bits. A product is always added with one rounding. Most processors have an instruction for
   that; the C library does the same for the others, slowly.

   In front of this text host.py puts matrix_t and call_t, made from its classes _Matrix and _Call, and the constants
   that program() there defines. bases_host.c follows behind it. */

#define INLINE static inline __attribute__((always_inline))
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
INLINE vec_t fma_of(vec_t a, vec_t b, vec_t c) {
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
INLINE wide_t fma_wide_of(wide_t a, wide_t b, wide_t c) {
    for (int i = 0; i < LANES / 2; i++) c[i] = fma(a[i], b[i], c[i]);
    return c;
}
#define FMA fma_of
#define FMA_WIDE fma_wide_of
#define IN_REGISTER(x)
#endif
enum { WIDE = 4 * LANES }; /* WIDTH and the width of a matrix are multiples of it */
#define ALIGNED __attribute__((aligned(64))) /* vectors across two cache lines take twice as long */

INLINE char *scratch_of(const call_t *call, const matrix_t *m) { return (char *)call->scratch + m->scratch; }
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

/* Some columns of some rows, which are worked on at a time and fit the nearest caches. They are all columns if
   the matrix has few enough: memory is read faster in its own order. */
typedef struct { int64_t row, first; int rows, here; } window_t;

/* Returns the next window of the rows up to `end`: the next columns, or the first columns of the next rows. */
INLINE window_t window_after(const matrix_t *m, window_t t, int group, int64_t end) {
    if (t.first + m->width < m->cols) t.first += m->width; else t.first = 0, t.row += group;
    t.rows = (int)greater(lesser(group, end - t.row), 0);
    t.here = (int)lesser(m->width, m->cols - t.first);
    return t;
}

/* The rows of a window that are prefetched during other work, a few at a time: memory and processor would otherwise
   wait for each other in turn, and many requests in a burst fill the processor's queue. `asked` counts rows, `due` and
   `step` units of 2**-16 rows. */
typedef struct { window_t window; int asked, due, step; } ahead_t;

INLINE ahead_t ahead_of(const matrix_t *m, window_t window, int times) {
    if (m->rows * m->cols <= CACHED) window.rows = 0;
    return (ahead_t){window, 0, 0, (window.rows << 16) / (int)greater(times, 1) + 1};
}

INLINE void ask(const call_t *call, const matrix_t *m, ahead_t *a) {
    int size = call->dtype == FP32 ? 4 : 2;
    for (a->due += a->step; a->asked < a->window.rows && a->asked << 16 < a->due; a->asked++) {
        int64_t at = (a->window.row + a->asked) * m->cols + a->window.first;
        prefetch((const char *)m->grad + at * size, a->window.here * size);
        if (m->residual) prefetch(m->residual + at, a->window.here * 4);
    }
}

/* Loads gradient plus residual of a row's columns from `first` on, and zeros up to a multiple of WIDE. */
static void load_row(const call_t *call, const matrix_t *m, int64_t row, int64_t first, int here, float *values) {
    int64_t at = row * m->cols + first;
    const float *restrict r = AT(m->residual, at);
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

/* Copies the rows of P that belong to a window. Their own addresses may be a power of two apart, so that all of them
   share a few lines of the first-level cache. */
INLINE void copy_rows(const matrix_t *m, window_t t, float (*p)[ROWS]) {
    for (int64_t j = 0; j < m->rank; j++)
        for (int i = 0; i < t.rows; i++) p[j][i] = m->left[j * m->rows + t.row + i];
}

/* Computes WIDE columns of a few rows of `out`, which are `stride` elements apart: the sums of f[a, i] times row i of
   `v`, over all i in turn, added to the old values if `add`. */
INLINE void multiply(const int few, int count, const float *f, int64_t a_stride, int64_t i_stride, const float *v,
                     float *out, int64_t stride, const int add) {
    vec_t t[BLOCK][4];
    for (int a = 0; a < few; a++)
        for (int l = 0; l < 4; l++) t[a][l] = add ? vec_at(out + a * stride + l * LANES) : all_of(0);
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
        for (int l = 0; l < 4; l++) *(vec_t *)(out + a * stride + l * LANES) = t[a][l];
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
        int64_t group = m->rank > 8 ? ROWS / 2 : BLOCK; /* few rows are read faster, many read Q less often */
        int blocks = (int)((m->rank + BLOCK - 1) / BLOCK);
        window_t t = {row, 0, (int)lesser(group, end - row), (int)lesser(m->width, m->cols)};
        ALIGNED vec_t sums[MAX_RANK / BLOCK][ROWS / 2 / BLOCK][BLOCK][BLOCK];
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
                float tail[BLOCK][LANES]; /* the next row begins behind the last column, and may hold inf */
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

INLINE int64_t tiles_of(const matrix_t *m) { return (m->cols + m->width - 1) / m->width; }

/* Computes the sums of one part of the rows: scratch [parts, tiles, rank, columns of a tile]. */
void right(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t part = unit - m->first, width = m->width, numel = tiles_of(m) * m->rank * width;
        int64_t row = part * m->height, end = lesser(row + m->height, m->rows);
        int64_t group = m->rank > 8 ? ROWS : ROWS / 2;
        float *all = (float *)scratch_of(call, m) + part * numel;
        memset(all, 0, sizeof(float) * (size_t)numel);
        window_t t = {row, 0, (int)lesser(group, end - row), (int)lesser(m->width, m->cols)};
        ALIGNED float p[MAX_RANK][ROWS], values[ROWS][WIDTH];
        while (t.row < end) {
            if (t.first == 0) copy_rows(m, t, p);
            for (int i = 0; i < t.rows; i++) load_row(call, m, t.row + i, t.first, t.here, values[i]);
            float *sums = all + t.first * m->rank;
            int rows = t.rows, here = t.here, blocks = (int)((m->rank + BLOCK - 1) / BLOCK);
            t = window_after(m, t, group, end);
            ahead_t next = ahead_of(m, t, blocks * ((here + WIDE - 1) / WIDE));
            for (int b = 0; b < blocks; b++) {
                int j = b * BLOCK, ranks = (int)lesser(BLOCK, m->rank - j);
                for (int k = 0; k < here; k += WIDE) {
                    ask(call, m, &next);
                    float *s = sums + j * width + k;
                    if (ranks == 1) multiply(1, rows, p[j], ROWS, 1, values[0] + k, s, width, 1);
                    else if (ranks == 2) multiply(2, rows, p[j], ROWS, 1, values[0] + k, s, width, 1);
#if BLOCK == 4
                    else if (ranks == 3) multiply(3, rows, p[j], ROWS, 1, values[0] + k, s, width, 1);
                    else multiply(4, rows, p[j], ROWS, 1, values[0] + k, s, width, 1);
#endif
                }
            }
        }
    }
}

/* Adds up the sums of all parts in one tile. */
void right_sum(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t width = m->width, numel = tiles_of(m) * m->rank * width, tile = unit - m->first;
        int here = (int)lesser(width, m->cols - tile * width);
        for (int64_t j = 0; j < m->rank; j++) {
            const float *sums = (const float *)scratch_of(call, m) + (tile * m->rank + j) * width;
            float total[WIDTH];
            memcpy(total, sums, sizeof(float) * (size_t)width);
            for (int64_t part = 1; part < m->parts; part++)
                for (int i = 0; i < width; i++) total[i] += sums[part * numel + i];
            for (int i = 0; i < here; i++) m->right[j * m->cols + tile * width + i] = total[i] * call->scale;
        }
    }
}

/* ------------------------------------------------------------------ P Q' */

/* Stores the product in a row's columns from `first` on, and the remainder in the residual. */
static void put_row(const call_t *call, const matrix_t *m, int64_t row, int64_t first, int here, float *product) {
    ALIGNED float values[WIDTH];
    int64_t at = row * m->cols + first;
    float *restrict r = AT(m->residual, at), *restrict d = product;
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

/* Computes P Q'. Every element is added up in the order of the columns of the factors. */
void reconstruct(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t row = (unit - m->first) * m->height, end = lesser(row + m->height, m->rows);
        ALIGNED float p[MAX_RANK][ROWS], q[MAX_RANK][WIDTH], product[BLOCK][WIDTH];
        memset(p, 0, sizeof p);
        window_t t = {row, 0, (int)lesser(ROWS, end - row), (int)lesser(m->width, m->cols)};
        while (t.row < end) {
            if (t.first == 0) copy_rows(m, t, p);
            for (int64_t j = 0; j < m->rank; j++) {
                memcpy(q[j], m->right + j * m->cols + t.first, sizeof(float) * (size_t)t.here);
                for (int k = t.here; k % WIDE; k++) q[j][k] = 0;
            }
            window_t now = t;
            int rank = (int)m->rank;
            t = window_after(m, t, ROWS, end);
            ahead_t next = ahead_of(m, t, (now.rows + BLOCK - 1) / BLOCK * ((now.here + WIDE - 1) / WIDE));
            for (int i = 0; i < now.rows; i += BLOCK) {
                for (int k = 0; k < now.here; k += WIDE) {
                    multiply(BLOCK, rank, p[0] + i, 1, ROWS, q[0] + k, product[0] + k, WIDTH, 0);
                    ask(call, m, &next);
                }
                for (int l = 0; l < BLOCK && i + l < now.rows; l++)
                    put_row(call, m, now.row + i + l, now.first, now.here, product[l]);
            }
        }
    }
}
