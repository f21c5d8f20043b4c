// What HSTU's attention is asked for; npu_gr/backend/cpu/hstu.py mirrors it field by field.
//
// A tile holds the keys and values of 64 consecutive tokens of every head, heads outermost. Widths are padded with
// zeros: Dq to a multiple of 2, Dv to a multiple of 16.
//   float32   K [H][Dq][64]            V [H][64][Dv]
//   bfloat16  K [H][Dq / 2][64][2]     V [H][32][Dv][2]     pairs, as VDPBF16PS reads them
//   int8      as bfloat16, and behind each head's numbers the 64 tokens' scales in bfloat16
// Tile t of a call holds the tokens 64 t .. 64 t + 63; rows of V behind the last token are zero.
#ifndef NPU_GR_HSTU_CALL_H
#define NPU_GR_HSTU_CALL_H

#include <stdint.h>

struct TileRun {  // consecutive tiles
  void *k, *v;
  int64_t num_tiles;
};

struct Rows {  // natural rows [n, H, D]; the last stride is 1
  void *data;
  int64_t row_stride, head_stride;  // in elements
};

struct Hstu {
  int64_t num_rows, num_heads, qk_dim, v_dim;
  int64_t row_dtype, tile_dtype;  // enum Element: of q, own_k, own_v and out; of the tiles
  Rows q, own_k, own_v, out;      // own_k and own_v: the candidates' own rows, unused by the causal op
  const TileRun *runs;
  int64_t num_runs, num_tokens;  // tokens in the runs; the last num_rows of them are the causal op's rows
  const int64_t *times;          // [num_tokens] unix seconds
  int64_t query_time;            // of the candidates
  const float *position_bias;    // [H, position_buckets]
  int64_t position_buckets;
  const float *time_bias;  // [H, 64]
  double alpha;            // > 0
  int64_t recent, first;   // window: the row at position t sees positions [0, first) and (t - recent, t]; recent 0: all
  int64_t gap_at, gap;     // behind the first gap_at tokens `gap` positions are missing; multiples of a tile
  void *scratch;           // hstu_scratch_bytes, aligned to 64
};

struct Pack {  // natural rows of one layer into tiles
  int64_t num_rows, num_heads, qk_dim, v_dim;
  int64_t row_dtype, tile_dtype;
  Rows k, v;
  int64_t first_token;  // place of row 0, counted from the start of the run
  TileRun into;
};

struct Affine {
  int64_t num_rows, num_in, num_out;
  int64_t x_dtype, tile_dtype, y_dtype;  // enum Element; bf16 tiles only where has_bf16_dot
  const void *x;                         // [num_rows, num_in], last stride 1
  int64_t x_stride;                      // in elements
  const void *weight;                    // rows of W as the keys of one head, in tiles
  const float *bias;                     // [num_out, padded to 64]
  int64_t is_silu;
  void *y;        // [num_rows, num_out]
  void *scratch;  // affine_scratch_bytes, aligned to 64
};

#endif
