// What a forward pass of the ranker in one call is asked for; npu_gr/backend/cpu/hstu_pass.py mirrors it field by
// field.
#ifndef NPU_GR_HSTU_PASS_CALL_H
#define NPU_GR_HSTU_PASS_CALL_H

#include <stdint.h>

struct PassNorm {  // layer norm
  const float *weight, *bias;
  double eps;
};

struct PassLinear {  // as Affine's
  const void *weight;
  const float *bias;
  int64_t num_in, num_out, tile_dtype;
};

struct PassLayer {
  PassNorm norm_in, norm_attention;
  PassLinear uvqk, v, k, out;  // v and k: these outputs of uvqk alone
  const float *position_bias;  // [H, position_buckets]
  const float *time_bias;      // [H, 64]
};

struct PassHead {  // norm, a layer with SiLU, a layer; without `hidden.weight` the norm and the last alone
  PassNorm norm;
  PassLinear hidden, out;
};

struct PassModel {
  int64_t dim, num_layers, num_heads, qk_dim, v_dim;
  int64_t dtype;       // enum Element: of U, V, Q, K and of embeddings; the residual stream is float32
  int64_t norm_group;  // width that norm_attention is over: Dv, or H Dv
  int64_t is_joined;   // `out` reads [U, attention, U * norm], not the last alone
  int64_t is_silu;     // on U, V, Q and K, not on U alone
  int64_t position_buckets;
  double alpha, scale;    // factors on Q K^T, and on the attention
  int64_t recent, first;  // window, as Hstu's
  const PassLayer *layers;
};

// One request. Behind it stand, in int64: `num_runs` pairs (first page, number of pages) in token order, the times
// [num_cached + num_new], and where the call has embeddings: items [num_new], actions [num_new], items
// [num_candidates].
struct PassSegment {
  int64_t num_cached, num_new, num_candidates;
  int64_t query_time;  // of the candidates
  int64_t keeps;       // the new tokens' keys and values go to the pages
  int64_t num_runs;
  uint64_t k, v;             // addresses of all pages in tiles, [layer, page, tile, H, width * 64]
  int64_t k_layer, v_layer;  // elements from one layer to the next
  int64_t page_tiles, num_pages;
  int64_t gap_at, gap;  // as Hstu's
};

struct HstuPass {
  const PassModel *model;
  const PassHead *head;    // null: the candidates' final rows are wanted
  const int64_t *numbers;  // `num_segments` requests, one behind the other
  int64_t num_numbers, num_segments;
  const void *items, *actions;  // embeddings [num_items, dim] and [num_actions, dim], the last action a candidate's
  int64_t num_items, num_actions;
  const float *x;  // [num_rows, dim] of every request's new tokens, then candidates; null: made of embeddings
  int64_t num_rows;
  int64_t tile_dtype;  // enum Element: `model->dtype`, or kInt8
  float *out;          // [candidates, dim or the head's outputs]
  void *scratch;       // hstu_pass_bytes, aligned to 64
};

enum PassError : int64_t { kBadNumbers = -1, kBadPages = -2, kBadItem = -3, kBadAction = -4 };

#endif
