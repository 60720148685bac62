/* Rows and attention on a CPU, for float32 and bfloat16: each function is the twin of one in kernels/host_attention.py
 * or daemon/rank/row_ops.py, which say what it computes. Sums are in float32; a value is rounded to the element type
 * where the torch twin rounds it. Must never write a page but for the rows that it is given to store. */
#include "vectors.h"

/* Attention of one layer: decode rows over pages, after all new rows were stored. Strides are in elements. */
struct attention {
    int64_t tokens, heads, kv_heads, dim, value_dim, page_size;
    const void *q, *k, *v;                  /* [tokens, heads, dim], [tokens, kv_heads, dim or value_dim] */
    int64_t q_stride, k_stride, v_stride;   /* from one token to the next */
    void *k_pages, *v_pages;                /* unit u starts at u * unit_stride */
    int64_t k_unit_stride, v_unit_stride;
    const int64_t *write_pages, *write_slots;
    int64_t rows;                           /* with one query each */
    const int64_t *queries, *begins, *ends; /* token of each row; keys [begin, end) from its first listed page on */
    const int32_t *tables;                  /* [rows, table_stride]: physical pages */
    int64_t table_stride;
    float scale, softcap;
    const float *sinks;                     /* [heads], or null */
    void *out;                              /* [tokens, heads, value_dim]; rows of single queries are written */
    float *scratch;                         /* [threads, scratch_floats] */
    int64_t scratch_floats, threads;
};

#define BLOCK 256 /* keys whose scores are held at once */

#define ELEM float
#define NAME(x) x##_f32
#include "rows.h"
#undef ELEM
#undef NAME

#define ELEM bf16
#define NAME(x) x##_bf16
#ifdef __AVX512BF16__
#define PAIRS
#endif
#include "rows.h"
