// What HSTU's attention is asked for: plain C, mirrored by npu_gr/backend/native_hstu.py.
//
// A tile holds the keys and values of 64 consecutive tokens of every head, heads outermost. Widths are padded with
// zeros: Dq to a multiple of 2, Dv to a multiple of 16.
//   float32   K [H][Dq][64]            V [H][64][Dv]
//   bfloat16  K [H][Dq / 2][64][2]     V [H][32][Dv][2]     pairs, as VDPBF16PS reads them
// Tile t of a call holds the tokens 64 t .. 64 t + 63; rows of V behind the last token are zero.
#ifndef NPU_GR_HSTU_H
#define NPU_GR_HSTU_H

#include <stdint.h>

enum { NPU_GR_FLOAT32 = 0, NPU_GR_BFLOAT16 = 1 };
enum { NPU_GR_TILE = 64 };

typedef struct {  // consecutive tiles
  const void *k, *v;
  int64_t num_tiles;
} NpuGrTiles;

typedef struct {  // natural rows [n, H, D]; the last stride is 1
  void *data;
  int64_t row_stride, head_stride;  // in elements
} NpuGrRows;

typedef struct {
  int64_t num_rows, num_heads, qk_dim, v_dim;
  int64_t row_dtype, tile_dtype;  // of q, own_k, own_v and out; of the tiles
  NpuGrRows q, own_k, own_v, out; // own_k and own_v: the candidates' own rows, unused by the causal op
  const NpuGrTiles *runs;
  int64_t num_runs, num_tokens;   // tokens in the runs; the last num_rows of them are the causal op's rows
  const int64_t *times;           // [num_tokens] unix seconds
  int64_t query_time;             // of the candidates
  const float *position_bias;     // [H, position_buckets]
  int64_t position_buckets;
  const float *time_bias;         // [H, 64]
  double alpha;                   // > 0
  void *scratch;                  // hstu_scratch_bytes, aligned to 64
} NpuGrHstu;

typedef struct {  // natural rows of one layer into tiles
  int64_t num_rows, num_heads, qk_dim, v_dim;
  int64_t row_dtype, tile_dtype;
  NpuGrRows k, v;
  int64_t first_token;            // place of row 0, counted from the start of the run
  NpuGrTiles into;
} NpuGrPack;

#endif
