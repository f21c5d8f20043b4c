// What `blend_sums` is asked: what candidates are ordered by. npu_gr/backend/cpu/items.py mirrors it field by field.
#ifndef NPU_GR_ORDER_CALL_H
#define NPU_GR_ORDER_CALL_H

#include <stdint.h>

extern "C" {

// I = items, S = successors kept of an item, K = neighbours. A row of -1 is padding; all others are below I.
struct BlendTables {
  const int32_t *successors;   // [I, S]
  const float *log_prob;       // [I, S]
  const int32_t *neighbours;   // [I, K]
  const float *similarity;     // [I, K]
  const float *rest, *shares;  // [I + 1], the last of a new item
  int64_t num_items, num_successors, num_neighbours;
  int64_t is_summed;    // similarities: 1: their sum counts, 0: their mean
  double decay, scale;  // of an event with each newer one; of a mean similarity, or of a sum, 0: it counts itself
  float retrieval, click, transitions, alike, popularity, seen;  // weights
};

struct OrderJob {
  const BlendTables *tables;
  const int64_t *recent;                  // [num_recent] rows of the last events, oldest first
  const int64_t *candidates;              // [num_candidates] rows
  const float *retrieval, *click, *seen;  // [num_candidates]; null: 0
  int64_t num_recent, num_candidates;
  int64_t num_followed, num_liked;  // of the last events: whose successors count, whose neighbours; at most num_recent
  void *workspace;                  // order_bytes of it, aligned to 8
  float *sums;                      // [num_candidates] out
};
}

#endif
