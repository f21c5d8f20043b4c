// What `best_items` is asked: the best of all items for a few queries, by inner product; and `item_products`: the
// scores of some items for one query.
#ifndef NPU_GR_ITEMS_CALL_H
#define NPU_GR_ITEMS_CALL_H

#include <stdint.h>

extern "C" {

struct ItemsJob {
  const float *queries;  // [num_queries, dim]
  const float *items;    // [num_items, dim]
  int64_t num_queries;
  int64_t num_items;  // below 2**32
  int64_t dim;
  int64_t k;                    // at least 1
  const int64_t *hidden_start;  // [num_queries + 1] where each query's rows begin in:
  const int64_t *hidden;        // item rows that are not to be found, rising for each query; null: none
  uint64_t *workspace;          // best_items_bytes of it
  float *score;   // [num_queries, k] out: best first, of equals the lower row; -inf where there is no more
  int64_t *item;  // [num_queries, k] out: rows; -1 where there is no more
};

struct ProductsJob {
  const float *query;  // [dim]
  const float *items;  // [num_items, dim]
  int64_t num_items;
  int64_t dim;
  const int64_t *rows;  // [num_rows]
  int64_t num_rows;
  float *score;  // [num_rows] out
};
}

#endif
