/* One element type's functions: ELEM, and NAME(x) for x_f32 or x_bf16. Lengths of rows are multiples of LANES. */

/* x += y where there is y; out = x / sqrt(mean(x^2) + eps) * weight, for rows [rows, size]. */
void NAME(add_norm)(ELEM *x, const ELEM *y, const ELEM *weight, ELEM *out, int64_t rows, int64_t size, float eps,
                    int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        ELEM *own = x + r * size, *to = out + r * size;
        vec squares = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            vec value = NAME(load)(own + i);
            if (y) {
                NAME(store)(own + i, value + NAME(load)(y + r * size + i));
                value = NAME(load)(own + i);
            }
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(sum_of(squares) / (float)size + eps);
        for (int64_t i = 0; i < size; i += LANES)
            NAME(store)(to + i, NAME(round)(NAME(load)(own + i) * scale) * NAME(load)(weight + i));
    }
}

/* out = silu(g) * u for rows [g, u] of 2 * size. */
void NAME(silu_mul)(const ELEM *rows_in, ELEM *out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const ELEM *gate = rows_in + 2 * r * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            vec g = NAME(load)(gate + i);
            NAME(store)(out + r * size + i, NAME(round)(g / (1.0f + exp_of(-g))) * NAME(load)(up + i));
        }
    }
}

/* Rotate pairs (i, i + dim / 2) of each head in place; cos and sin [positions, dim], the sign of the first half in
 * sin. */
void NAME(rope)(ELEM *x, const int64_t *positions, const ELEM *cos, const ELEM *sin, int64_t tokens, int64_t heads,
                int64_t dim, int64_t stride, int64_t threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const ELEM *c = cos + positions[t] * dim, *s = sin + positions[t] * dim;
        for (int64_t h = 0; h < heads; h++) {
            ELEM *at = x + t * stride + h * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                vec low = NAME(load)(at + i), high = NAME(load)(at + half + i);
                NAME(store)(at + i, NAME(round)(low * NAME(load)(c + i)) + NAME(round)(high * NAME(load)(s + i)));
                NAME(store)(at + half + i, NAME(round)(high * NAME(load)(c + half + i)) +
                                               NAME(round)(low * NAME(load)(s + half + i)));
            }
        }
    }
}

/* Scores of one K/V head's `group` queries ([group, dim], as they are and as floats) against keys [lo, hi) of a page,
 * LANES keys at a time; up to LANES - 1 scores behind the last are overwritten. */
INLINE void NAME(page_scores)(const ELEM *query, const float *q, const ELEM *keys, int64_t key_stride, int64_t dim,
                              int group, int64_t lo, int64_t hi, float *scores, int64_t score_stride) {
    vec parts[8][LANES];
    for (int64_t from = lo; from < hi; from += LANES) {
        int some = hi - from < LANES ? (int)(hi - from) : LANES;
        for (int at = 0; at < some; at++) {
            const ELEM *key = keys + (from + at) * key_stride;
            vec sums[8];
            for (int g = 0; g < group; g++) sums[g] = (vec){0};
            int64_t i = 0;
#ifdef PAIRS
            for (; i + 2 * LANES <= dim; i += 2 * LANES)
                for (int g = 0; g < group; g++) sums[g] = add_pairs(sums[g], key + i, query + g * dim + i);
#else
            (void)query;
#endif
            for (; i < dim; i += LANES) {
                vec value = NAME(load)(key + i);
                for (int g = 0; g < group; g++) sums[g] += value * load_f32(q + g * dim + i);
            }
            for (int g = 0; g < group; g++) parts[g][at] = sums[g];
        }
        for (int g = 0; g < group; g++) {
            for (int at = some; at < LANES; at++) parts[g][at] = (vec){0};
            store_f32(scores + g * score_stride + from - lo, sums_of(parts[g]));
        }
    }
}

/* acc [group, dim] += weights [group, keys] times values [keys, dim] of a page; `pieces` vectors at a time. */
INLINE void NAME(some_values)(float *acc, const ELEM *values, int64_t value_stride, int64_t dim, int group, int pieces,
                              int64_t keys, const float *weights, int64_t weight_stride) {
    vec sums[8][4];
    for (int g = 0; g < group; g++)
        for (int p = 0; p < pieces; p++) sums[g][p] = load_f32(acc + g * dim + p * LANES);
    for (int64_t key = 0; key < keys; key++)
        for (int p = 0; p < pieces; p++) {
            vec value = NAME(load)(values + key * value_stride + p * LANES);
            for (int g = 0; g < group; g++) sums[g][p] += value * weights[g * weight_stride + key];
        }
    for (int g = 0; g < group; g++)
        for (int p = 0; p < pieces; p++) store_f32(acc + g * dim + p * LANES, sums[g][p]);
}

INLINE void NAME(page_values)(float *acc, const ELEM *values, int64_t value_stride, int64_t dim, int group, int64_t lo,
                              int64_t hi, const float *weights, int64_t weight_stride) {
    int64_t i = 0;
    for (; group <= 4 && i + 4 * LANES <= dim; i += 4 * LANES)
        NAME(some_values)(acc + i, values + lo * value_stride + i, value_stride, dim, group, 4, hi - lo, weights,
                          weight_stride);
    for (; i < dim; i += LANES)
        NAME(some_values)(acc + i, values + lo * value_stride + i, value_stride, dim, group, 1, hi - lo, weights,
                          weight_stride);
}

/* The two above with the size of the group known to the compiler. */
#define FOR_GROUP(call)                                                                                                \
    switch (some) {                                                                                                    \
        case 1: call(1); break;                                                                                        \
        case 2: call(2); break;                                                                                        \
        case 3: call(3); break;                                                                                        \
        case 4: call(4); break;                                                                                        \
        case 5: call(5); break;                                                                                        \
        case 6: call(6); break;                                                                                        \
        case 7: call(7); break;                                                                                        \
        default: call(8);                                                                                              \
    }

/* From products to exponentials of one block of a head: updates its peak and sum, returns what old sums shrink by. */
INLINE float NAME(soften)(float *scores, int64_t count, float scale, float softcap, float *peak, float *sum) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    vec most = fill(-INFINITY);
    for (int64_t i = 0; i < padded; i += LANES) {
        vec value = load_f32(scores + i) * scale;
        if (softcap > 0)
            for (int lane = 0; lane < LANES; lane++) value[lane] = softcap * tanhf(value[lane] / softcap);
        if (i + LANES > count)
            for (int64_t lane = count - i; lane < LANES; lane++) value[lane] = -INFINITY;
        store_f32(scores + i, value);
        most = larger(most, value);
    }
    float top = max_of(most);
    if (top < *peak) top = *peak;
    float shrink = *peak == -INFINITY ? 0.0f : expf(*peak - top);
    vec total = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        vec value = exp_of(load_f32(scores + i) - top);
        store_f32(scores + i, value);
        total += value;
    }
    *sum = *sum * shrink + sum_of(total);
    *peak = top;
    return shrink;
}

/* From products to weights, in place, for [heads, queries, keys]: query t sees keys [end + t - window, end + t), with
 * window 0 all before end + t; what it does not see gets the weight 0. */
void NAME(soften_tile)(ELEM *products, int64_t heads, int64_t queries, int64_t keys, int64_t end, int64_t window,
                       float scale, float softcap, const float *sinks, float *scratch, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < heads * queries; row++) {
        int64_t h = row / queries, to = end + row % queries, from = window && to > window ? to - window : 0;
        int64_t padded = (keys + 2 * LANES) / LANES * LANES, seen = to - from, i = 0;
        ELEM *own = products + row * keys;
        float *scores = scratch + (threads > 1 ? omp_get_thread_num() : 0) * padded;
        for (; i + LANES <= seen; i += LANES) store_f32(scores + i, NAME(load)(own + from + i));
        for (; i < seen; i++) scores[i] = NAME(load_one)(own + from + i);
        float peak = sinks ? sinks[h] : -INFINITY, sum = sinks ? 1.0f : 0.0f;
        NAME(soften)(scores, seen, scale, softcap, &peak, &sum);
        memset(own, 0, from * sizeof(ELEM));
        for (i = 0; i + LANES <= seen; i += LANES) NAME(store)(own + from + i, load_f32(scores + i) / sum);
        for (; i < seen; i++) NAME(store_one)(own + from + i, scores[i] / sum);
        memset(own + to, 0, (keys - to) * sizeof(ELEM));
    }
}

#define K_PAGE(page) ((const ELEM *)a->k_pages + pages[page] * a->k_unit_stride)
#define V_PAGE(page) ((const ELEM *)a->v_pages + pages[page] * a->v_unit_stride)

/* One row: its query over the keys of its pages, block by block, with running peaks and sums. */
static void NAME(attend_row)(const struct attention *a, int64_t row, float *scratch) {
    int64_t heads = a->heads, group = heads / a->kv_heads, size = a->page_size, dim = a->dim, wide = a->value_dim;
    const ELEM *query = (const ELEM *)a->q + a->queries[row] * a->q_stride;
    const int32_t *pages = a->tables + row * a->table_stride;
    int64_t last = (a->ends[row] + size - 1) / size;
    float *q = scratch, *acc = q + heads * dim, *scores = acc + heads * wide;
    float *peaks = scores + heads * (BLOCK + LANES), *sums = peaks + heads;
    for (int64_t i = 0; i < heads * dim; i += LANES) store_f32(q + i, NAME(load)(query + i));
    memset(acc, 0, heads * wide * sizeof(float));
    for (int64_t h = 0; h < heads; h++) {
        peaks[h] = a->sinks ? a->sinks[h] : -INFINITY;
        sums[h] = a->sinks ? 1.0f : 0.0f;
    }
    for (int64_t from = a->begins[row], to; from < a->ends[row]; from = to) {
        to = from + BLOCK < a->ends[row] ? from + BLOCK : a->ends[row];
        for (int64_t at = from, next; at < to; at = next) {
            int64_t page = at / size, first = page * size;
            next = first + size < to ? first + size : to;
            if (at == from) fetch(K_PAGE(page + 1 < last ? page + 1 : page), size * a->kv_heads * dim * sizeof(ELEM));
            fetch(page + 2 < last ? K_PAGE(page + 2) : V_PAGE(from / size), size * a->kv_heads * dim * sizeof(ELEM));
            for (int64_t h = 0; h < heads; h += 8 < group - h % group ? 8 : group - h % group) {
                int some = 8 < group - h % group ? 8 : (int)(group - h % group);
#define SCORES(n, size)                                                                                                \
    NAME(page_scores)(query + h * dim, q + h * dim, K_PAGE(page) + h / group * dim, a->kv_heads * dim, size, n,        \
                      at - first, next - first, scores + h * (BLOCK + LANES) + at - from, BLOCK + LANES)
#define CALL(n)                                                                                                        \
    if (dim == 64)                                                                                                     \
        SCORES(n, 64);                                                                                                 \
    else if (dim == 128)                                                                                               \
        SCORES(n, 128);                                                                                                \
    else                                                                                                               \
        SCORES(n, dim)
                FOR_GROUP(CALL)
#undef CALL
#undef SCORES
            }
        }
        for (int64_t h = 0; h < heads; h++) {
            float *own = acc + h * wide, *products = scores + h * (BLOCK + LANES);
            float shrink = NAME(soften)(products, to - from, a->scale, a->softcap, peaks + h, sums + h);
            if (shrink != 1.0f)
                for (int64_t i = 0; i < wide; i += LANES) store_f32(own + i, load_f32(own + i) * shrink);
        }
        for (int64_t at = from, next; at < to; at = next) {
            int64_t page = at / size, first = page * size;
            next = first + size < to ? first + size : to;
            if (page + 2 < last) fetch(V_PAGE(page + 2), size * a->kv_heads * wide * sizeof(ELEM));
            for (int64_t h = 0; h < heads; h += 8 < group - h % group ? 8 : group - h % group) {
                int some = 8 < group - h % group ? 8 : (int)(group - h % group);
#define CALL(n)                                                                                                        \
    NAME(page_values)(acc + h * wide, V_PAGE(page) + h / group * wide, a->kv_heads * wide, wide, n, at - first,        \
                      next - first, scores + h * (BLOCK + LANES) + at - from, BLOCK + LANES)
                FOR_GROUP(CALL)
#undef CALL
            }
        }
    }
    ELEM *out = (ELEM *)a->out + a->queries[row] * heads * wide;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < wide; i += LANES)
            NAME(store)(out + h * wide + i, load_f32(acc + h * wide + i) / sums[h]);
}
#undef FOR_GROUP
#undef K_PAGE
#undef V_PAGE

/* Store the new rows of K and V, then attend with every row that has one query. */
void NAME(attend)(const struct attention *a) {
    int64_t k_row = a->kv_heads * a->dim, v_row = a->kv_heads * a->value_dim;
    for (int64_t t = 0; t < a->tokens; t++) {
        memcpy((ELEM *)a->k_pages + a->write_pages[t] * a->k_unit_stride + a->write_slots[t] * k_row,
               (const ELEM *)a->k + t * a->k_stride, k_row * sizeof(ELEM));
        memcpy((ELEM *)a->v_pages + a->write_pages[t] * a->v_unit_stride + a->write_slots[t] * v_row,
               (const ELEM *)a->v + t * a->v_stride, v_row * sizeof(ELEM));
    }
    int several = a->threads > 1 && a->rows > 1;
#pragma omp parallel for num_threads(a->threads) schedule(dynamic) if (several)
    for (int64_t row = 0; row < a->rows; row++)
        NAME(attend_row)(a, row, a->scratch + (several ? omp_get_thread_num() : 0) * a->scratch_floats);
}
