// What `hstu_find` is asked: the items that NEXT finds, and the scores of the best of them.
// npu_gr/backend/cpu/hstu_pass.py mirrors it field by field.
#ifndef NPU_GR_HSTU_FIND_CALL_H
#define NPU_GR_HSTU_FIND_CALL_H

#include "hstu_pass_call.h"
#include "items_call.h"

struct HstuFind {
  HstuPass next;          // one candidate a request, NEXT, whose head makes u; of embeddings
  ItemsJob items;         // its queries are next.out
  const PassHead *head;   // of what is scored
  const int64_t *wanted;  // [requests] how many of the found items are scored, at most items.k
  const int64_t *least;   // [requests] if fewer were found, none is scored
  int64_t *numbers;       // room for next.num_numbers, and the sum of `wanted`
  int64_t num_bytes;      // of next.scratch
  int64_t *num_scored;    // [requests] out
  float *logits;          // [the sum of num_scored, the head's outputs] out, request after request
  float *products;        // [the sum of num_scored] out: u with each
};

enum FindError : int64_t { kBadFind = -5 };  // in addition to PassError

#endif
