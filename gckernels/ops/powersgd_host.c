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
#define FMA(a, b, c) ((vec_t)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { LANES = 8 };
#define BLOCK 2
typedef float vec_t __attribute__((vector_size(32), aligned(4), may_alias));
#define FMA(a, b, c) ((vec_t)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#else
enum { LANES = 4 };
#define BLOCK 4
typedef float vec_t __attribute__((vector_size(16), aligned(4), may_alias));
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
enum { WIDE = 4 * LANES, ROWS = 16 }; /* WIDTH is a multiple of the former; rows at once */
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

/* ------------------------------------------------------------------ P = M Q */

INLINE void dots(const int rows, const int ranks, float (*values)[WIDTH], int from, const float *q, int64_t stride,
                 int count, vec_t (*sums)[BLOCK]) {
    vec_t t[BLOCK][BLOCK];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) t[i][j] = sums[i][j];
    for (int k = 0; k < count; k += LANES) {
        vec_t f[BLOCK];
        for (int j = 0; j < ranks; j++) f[j] = vec_at(q + j * stride + k);
        for (int i = 0; i < rows; i++) {
            vec_t v = vec_at(values[i] + from + k);
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
        int64_t group = m->rank > 8 ? ROWS : BLOCK; /* few rows at once are read faster, many need Q less often */
        for (; row < end; row += group) {
            int rows = (int)lesser(group, end - row), blocks = (rows + BLOCK - 1) / BLOCK;
            ALIGNED vec_t sums[ROWS / BLOCK][LARGEST_RANK / BLOCK][BLOCK][BLOCK];
            memset(sums, 0, sizeof sums[0] * (size_t)blocks);
            ALIGNED float values[ROWS][WIDTH];
            memset(values + rows, 0, sizeof values[0] * (size_t)(blocks * BLOCK - rows));
            for (int64_t first = 0; first < m->cols; first += WIDTH) {
                int here = (int)lesser(WIDTH, m->cols - first), whole = here / LANES * LANES;
                for (int i = 0; i < rows; i++) load_row(call, m, row + i, first, here, values[i]);
                for (int64_t j = 0; j < m->rank; j += BLOCK) {
                    int ranks = (int)lesser(BLOCK, m->rank - j);
                    const float *q = m->right + j * m->cols + first;
                    float tail[BLOCK][LANES]; /* what is behind the last column is another one's, and may be inf */
                    if (whole < here) {
                        memset(tail, 0, sizeof tail);
                        for (int each = 0; each < ranks; each++)
                            memcpy(tail[each], q + each * m->cols + whole, sizeof(float) * (size_t)(here - whole));
                    }
                    for (int i = 0; i < blocks; i++) {
                        float(*v)[WIDTH] = values + i * BLOCK;
                        vec_t(*t)[BLOCK] = sums[i][j / BLOCK];
                        if (ranks == 1) dots(BLOCK, 1, v, 0, q, m->cols, whole, t);
                        else if (ranks == 2) dots(BLOCK, 2, v, 0, q, m->cols, whole, t);
#if BLOCK == 4
                        else if (ranks == 3) dots(BLOCK, 3, v, 0, q, m->cols, whole, t);
                        else dots(BLOCK, 4, v, 0, q, m->cols, whole, t);
#endif
                        if (whole < here) dots(BLOCK, BLOCK, v, whole, tail[0], LANES, LANES, t);
                    }
                }
            }
            for (int64_t j = 0; j < m->rank; j++)
                for (int i = 0; i < rows; i++) {
                    float sum = sum_of(sums[i / BLOCK][j / BLOCK][i % BLOCK][j % BLOCK]);
                    m->left[j * m->rows + row + i] = sum * call->scale;
                }
        }
    }
}

/* ------------------------------------------------------------------ Q = M' P */

INLINE void add_outer(const int ranks, const int rows, float (*values)[WIDTH], const float *p, int64_t stride, int count,
                      float *sums) {
    for (int k = 0; k < count; k += WIDE) {
        vec_t t[BLOCK][4];
        for (int j = 0; j < ranks; j++)
            for (int l = 0; l < 4; l++) t[j][l] = vec_at(sums + j * WIDTH + k + l * LANES);
        for (int i = 0; i < rows; i++) {
            vec_t v[4];
            for (int l = 0; l < 4; l++) v[l] = vec_at(values[i] + k + l * LANES);
            for (int j = 0; j < ranks; j++) {
                vec_t f = all_of(p[j * stride + i]);
                for (int l = 0; l < 4; l++) t[j][l] = FMA(v[l], f, t[j][l]);
            }
        }
        for (int j = 0; j < ranks; j++)
            for (int l = 0; l < 4; l++) *(vec_t *)(sums + j * WIDTH + k + l * LANES) = t[j][l];
    }
}

/* The sums of one part of the rows: scratch [parts, tiles of WIDTH columns, rank, WIDTH]. */
void right(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t part = unit - m->first, tiles = (m->cols + WIDTH - 1) / WIDTH, numel = tiles * m->rank * WIDTH;
        int64_t row = part * m->height, end = lesser(row + m->height, m->rows);
        int64_t group = m->rank > 8 ? ROWS : ROWS / 2;
        float *all = (float *)m->scratch + part * numel;
        memset(all, 0, sizeof(float) * (size_t)numel);
        for (; row < end; row += group) {
            int rows = (int)lesser(group, end - row);
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t first = tile * WIDTH;
                int here = (int)lesser(WIDTH, m->cols - first);
                float *sums = all + tile * m->rank * WIDTH;
                ALIGNED float values[ROWS][WIDTH];
                for (int i = 0; i < rows; i++) load_row(call, m, row + i, first, here, values[i]);
                for (int64_t j = 0; j < m->rank; j += BLOCK) {
                    int ranks = (int)lesser(BLOCK, m->rank - j);
                    const float *p = m->left + j * m->rows + row;
                    float *s = sums + j * WIDTH;
                    if (ranks == 1) add_outer(1, rows, values, p, m->rows, here, s);
                    else if (ranks == 2) add_outer(2, rows, values, p, m->rows, here, s);
#if BLOCK == 4
                    else if (ranks == 3) add_outer(3, rows, values, p, m->rows, here, s);
                    else add_outer(4, rows, values, p, m->rows, here, s);
#endif
                }
            }
        }
    }
}

void right_sum(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t index = start; index < stop; index++) {
        const matrix_t *m = call->matrices + index;
        int64_t tiles = (m->cols + WIDTH - 1) / WIDTH, numel = tiles * m->rank * WIDTH;
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t j = 0; j < m->rank; j++) {
                int64_t first = tile * WIDTH;
                int here = (int)lesser(WIDTH, m->cols - first);
                const float *sums = (const float *)m->scratch + (tile * m->rank + j) * WIDTH;
                float total[WIDTH];
                memcpy(total, sums, sizeof total);
                for (int64_t part = 1; part < m->parts; part++)
                    for (int i = 0; i < WIDTH; i++) total[i] += sums[part * numel + i];
                for (int i = 0; i < here; i++) m->right[j * m->cols + first + i] = total[i] * call->scale;
            }
    }
}

/* ------------------------------------------------------------------ P Q' */

/* WIDTH columns of some rows of the product; every element is added up in the order of the columns of the factors. */
INLINE void products(const int rows, const matrix_t *m, int64_t row, int64_t first, int here, float (*out)[WIDTH]) {
    const float *p = m->left + row, *q = m->right + first;
    int k = 0;
    for (; k + 2 * LANES <= here; k += 2 * LANES) {
        vec_t t[4][2];
        for (int i = 0; i < rows; i++) t[i][0] = t[i][1] = all_of(0);
        for (int64_t j = 0; j < m->rank; j++) {
            vec_t a = vec_at(q + j * m->cols + k), b = vec_at(q + j * m->cols + k + LANES);
            for (int i = 0; i < rows; i++) {
                vec_t f = all_of(p[j * m->rows + i]);
                t[i][0] = FMA(f, a, t[i][0]);
                t[i][1] = FMA(f, b, t[i][1]);
            }
        }
        for (int i = 0; i < rows; i++) {
            *(vec_t *)(out[i] + k) = t[i][0];
            *(vec_t *)(out[i] + k + LANES) = t[i][1];
        }
    }
    for (; k < here; k += LANES) {
        int rest = (int)lesser(LANES, here - k);
        vec_t t[4];
        for (int i = 0; i < rows; i++) t[i] = all_of(0);
        for (int64_t j = 0; j < m->rank; j++) {
            vec_t a = all_of(0);
            memcpy(&a, q + j * m->cols + k, sizeof(float) * (size_t)rest);
            for (int i = 0; i < rows; i++) t[i] = FMA(all_of(p[j * m->rows + i]), a, t[i]);
        }
        for (int i = 0; i < rows; i++) *(vec_t *)(out[i] + k) = t[i]; /* WIDTH is a multiple of LANES */
    }
}

void reconstruct(const call_t *call, int64_t start, int64_t stop) {
    for (int64_t unit = start; unit < stop; unit++) {
        const matrix_t *m = matrix_of(call, unit);
        int64_t begin = (unit - m->first) * m->height, end = lesser(begin + m->height, m->rows);
        for (int64_t row = begin; row < end; row += 4)
            for (int64_t first = 0; first < m->cols; first += WIDTH) {
                int here = (int)lesser(WIDTH, m->cols - first), rows = (int)lesser(4, end - row);
                ALIGNED float product[4][WIDTH], values[WIDTH];
                if (rows == 4) products(4, m, row, first, here, product);
                else for (int i = 0; i < rows; i++) products(1, m, row + i, first, here, product + i);
                for (int i = 0; i < rows; i++) {
                    int64_t at = (row + i) * m->cols + first;
                    float *restrict r = m->residual + at, *restrict d = product[i];
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

/* In lanes that are added up in a fixed order. */
static double dot(const double *restrict a, const double *restrict b, int64_t count) {
    double lanes[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int l = 0; l < 16; l++) lanes[l] += a[i + l] * b[i + l];
    for (int l = 0; l < 16; l++) total += lanes[l];
    for (; i < count; i++) total += a[i] * b[i];
    return total;
}

/* What is left of a vector outside of the span of the columns before it, normalised, or zero; whether it is not. */
static int remainder_of(double *vectors, int64_t column, int64_t count) {
    double *restrict v = vectors + column * count;
    double before = sqrt(dot(v, v, count));
    for (int pass = 0; pass < 2; pass++) {
        double shares[LARGEST_RANK];
        for (int64_t j = 0; j < column; j++) shares[j] = dot(vectors + j * count, v, count);
        for (int64_t j = 0; j < column; j++) {
            const double *restrict u = vectors + j * count;
            for (int64_t i = 0; i < count; i++) v[i] -= shares[j] * u[i];
        }
    }
    double after = sqrt(dot(v, v, count));
    int independent = after > DEPENDENT * before; /* false for NaN */
    for (int64_t i = 0; i < count; i++) v[i] = independent ? v[i] / after : 0;
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
        double *vectors = m->scratch;
        int64_t count = m->rows, numel = m->rank * count;
        if (!call->random && !all_finite(factor, numel)) {
            for (int64_t i = 0; i < numel; i++) factor[i] = NAN;
            continue;
        }
        for (int64_t j = 0; j < m->rank; j++) {
            double *v = vectors + j * count;
            for (int64_t i = 0; i < count; i++) v[i] = (double)factor[j * count + i];
            if (!remainder_of(vectors, j, count) && call->random) {
                for (int64_t i = 0; i < count; i++) {
                    uint64_t at = (uint64_t)(j * count + i);
                    uint32_t draw = philox(m->seed, at / 8, (int)(at / 2 % 4)) >> (16 * (at % 2)) & 0xFFFF;
                    v[i] = ((double)draw + 0.5) / 65536 - 0.5;
                }
                remainder_of(vectors, j, count);
            }
        }
        for (int64_t i = 0; i < numel; i++) factor[i] = (float)vectors[i];
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
