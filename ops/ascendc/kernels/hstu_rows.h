// hstu_rows: everything a layer's attention reads, made from the layer's mixed rows and the cached pages.
//
// mixed [rows, U | V | Q | K], each part [heads, dim]. q [requests, heads, row_slots, qk_dim] of the queries, times
// q_scale. k and v [requests, heads, key_slots, dim]: cached tokens from their pages, new rows behind them, zeros from
// the last key to the end, so that no weight of zero meets a NaN and no old rows stay. u [queries, heads, v_dim]
// = SiLU(U). New history rows also go to their pages. SiLU(x) = x / (1 + exp(-x)) in fp32, of U alone or of all parts.
// A request without queries leaves q, k, v and u alone: it only fills its pages.
//
// Cores take units of work in turn: pieces of cached pages, lots of new rows, lots of zeros. No two units overlap.
#pragma once
#include "hstu_batch.h"

namespace npu_gr {

struct HstuRowsShape {
  uint32_t requests, mixed_rows, queries, row_slots, key_slots, heads, qk_dim, v_dim;
  uint32_t page_tokens, pages, page_ids;  // of a page; in a plane; in the list
  uint32_t piece, lot, zeros;             // tokens of a page, rows of `mixed`, tokens of zeros in one step
  uint32_t silu_all, q_scale;             // q_scale: the bits of a float
};

template <typename T>
class HstuRows {
  using Raw = Moved<T>;
  using Tensor = AscendC::LocalTensor<Raw>;
  static constexpr bool kNarrow = sizeof(T) == 2;

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR mixed, GM_ADDR meta, GM_ADDR page_ids, GM_ADDR k_plane,
                              GM_ADDR v_plane, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR u, const HstuRowsShape &shape) {
    s_ = shape;
    qk_ = s_.heads * s_.qk_dim;
    uv_ = s_.heads * s_.v_dim;
    uint64_t slots = uint64_t(s_.requests) * s_.key_slots, tokens = uint64_t(s_.pages) * s_.page_tokens;
    mixed_.SetGlobalBuffer((__gm__ Raw *)mixed, uint64_t(s_.mixed_rows) * 2 * (qk_ + uv_));
    plane_[0].SetGlobalBuffer((__gm__ Raw *)k_plane, tokens * qk_);
    plane_[1].SetGlobalBuffer((__gm__ Raw *)v_plane, tokens * uv_);
    out_[0].SetGlobalBuffer((__gm__ Raw *)k, slots * qk_);
    out_[1].SetGlobalBuffer((__gm__ Raw *)v, slots * uv_);
    q_.SetGlobalBuffer((__gm__ Raw *)q, uint64_t(s_.requests) * s_.row_slots * qk_);
    u_.SetGlobalBuffer((__gm__ Raw *)u, uint64_t(s_.queries) * uv_);
    batch_.init(pipe, meta, s_.requests);
    if (s_.page_ids > 0) ids_.init(pipe, page_ids, s_.page_ids);
    uint32_t widest = qk_ > uv_ ? qk_ : uv_, whole = 2 * (qk_ + uv_);
    pipe->InitBuffer(pages_, 2, s_.piece * widest * sizeof(T));
    pipe->InitBuffer(rows_, 2, s_.lot * whole * sizeof(T));
    pipe->InitBuffer(outs_, 1, s_.lot * whole * sizeof(T));
    pipe->InitBuffer(zeros_, 1, s_.zeros * (widest / s_.heads) * sizeof(T));
    pipe->InitBuffer(wide_, s_.lot * widest * 4);
    pipe->InitBuffer(exp_, s_.lot * widest * 4);
    zero_ = zeros_.template AllocTensor<Raw>();
    AscendC::Duplicate(zero_, Raw(0), int32_t(s_.zeros * (widest / s_.heads)));
    zeros_.EnQue(zero_);
    zero_ = zeros_.template DeQue<Raw>();
  }
  __aicore__ inline void process() {
    uint32_t cores = AscendC::GetBlockNum(), done = 0;
    for (uint32_t request = 0; request < s_.requests; ++request) {
      HstuEntry e = batch_[request];
      bool asks = e.rows > 0;
      uint32_t of_page = (s_.page_tokens + s_.piece - 1) / s_.piece;
      uint32_t pieces = asks ? (e.cached + s_.page_tokens - 1) / s_.page_tokens * of_page * 2 : 0;
      uint32_t lots = (e.new_rows() + s_.lot - 1) / s_.lot;
      uint32_t tails = asks ? (s_.key_slots - e.keys + s_.zeros - 1) / s_.zeros : 0;
      uint32_t units = pieces + lots + tails;
      for (uint32_t unit = (AscendC::GetBlockIdx() + cores - done % cores) % cores; unit < units; unit += cores) {
        if (unit < pieces)
          move_piece(e, request, unit % 2, unit / 2 / of_page, unit / 2 % of_page * s_.piece);
        else if (unit < pieces + lots)
          run_lot(e, request, (unit - pieces) * s_.lot);
        else
          clear_tail(request, e.keys + (unit - pieces - lots) * s_.zeros);
      }
      done += units;
    }
  }

 private:
  __aicore__ inline uint32_t dim(uint32_t plane) const { return plane == 0 ? s_.qk_dim : s_.v_dim; }
  // Where a head's token stands in k (plane 0) or v (1).
  __aicore__ inline uint64_t at(uint32_t plane, uint32_t request, uint32_t head, uint32_t token) const {
    return ((uint64_t(request) * s_.heads + head) * s_.key_slots + token) * dim(plane);
  }
  // Rows [.., heads, dim] of UB to one plane's heads.
  __aicore__ inline void scatter_heads(const Tensor &from, uint32_t plane, uint32_t request, uint32_t token,
                                       uint32_t rows) {
    uint32_t width = dim(plane), gap = (s_.heads - 1) * width;
    for (uint32_t head = 0; head < s_.heads; ++head)
      scatter_rows(out_[plane][at(plane, request, head, token)], from[head * width], rows, width, width, gap);
  }
  __aicore__ inline void move_piece(const HstuEntry &e, uint32_t request, uint32_t plane, uint32_t page,
                                    uint32_t first) {
    uint32_t token = page * s_.page_tokens + first, width = dim(plane) * s_.heads;
    if (token >= e.cached) return;
    uint32_t count = min_of(min_of(s_.piece, s_.page_tokens - first), e.cached - token);
    auto stage = pages_.template AllocTensor<Raw>();
    gather_rows(stage, plane_[plane][slot(e, token) * width], 1, count * width, count * width);
    pages_.EnQue(stage);
    stage = pages_.template DeQue<Raw>();
    scatter_heads(stage, plane, request, token, count);
    pages_.FreeTensor(stage);
  }
  // Where a token stands in its plane, in tokens.
  __aicore__ inline uint64_t slot(const HstuEntry &e, uint32_t token) const {
    return uint64_t(ids_[e.first_page + token / s_.page_tokens]) * s_.page_tokens + token % s_.page_tokens;
  }
  __aicore__ inline void clear_tail(uint32_t request, uint32_t token) {
    uint32_t count = min_of(s_.zeros, s_.key_slots - token);
    for (uint32_t plane = 0; plane < 2; ++plane)
      for (uint32_t head = 0; head < s_.heads; ++head)
        copy_out(out_[plane][at(plane, request, head, token)], zero_, count * dim(plane));
  }
  // New rows first .. of a request.
  __aicore__ inline void run_lot(const HstuEntry &e, uint32_t request, uint32_t first) {
    uint32_t rows = min_of(s_.lot, e.new_rows() - first), whole = 2 * (qk_ + uv_);
    uint64_t top = (uint64_t(e.first_row) + first) * whole;
    auto in = rows_.template AllocTensor<Raw>();
    auto u = in, v = in[s_.lot * uv_], q = in[s_.lot * 2 * uv_], k = in[s_.lot * (2 * uv_ + qk_)];
    gather_rows(u, mixed_[top], rows, uv_, whole);
    gather_rows(v, mixed_[top + uv_], rows, uv_, whole);
    gather_rows(q, mixed_[top + 2 * uv_], rows, qk_, whole);
    gather_rows(k, mixed_[top + 2 * uv_ + qk_], rows, qk_, whole);
    rows_.EnQue(in);
    in = rows_.template DeQue<Raw>();
    auto out = outs_.template AllocTensor<Raw>();
    bool all = s_.silu_all != 0;
    transform(out, u, rows * uv_, true, 1.0f);
    transform(out[s_.lot * uv_], v, rows * uv_, all, 1.0f);
    transform(out[s_.lot * 2 * uv_], q, rows * qk_, all, float_of(s_.q_scale));
    transform(out[s_.lot * (2 * uv_ + qk_)], k, rows * qk_, all, 1.0f);
    rows_.FreeTensor(in);
    outs_.EnQue(out);
    out = outs_.template DeQue<Raw>();
    if (e.rows > 0) {
      scatter_heads(out[s_.lot * (2 * uv_ + qk_)], 0, request, e.cached + first, rows);
      scatter_heads(out[s_.lot * uv_], 1, request, e.cached + first, rows);
      store_queries(e, request, out, first, rows);
    }
    if (e.keeps) keep(e, out, first, rows);
    outs_.FreeTensor(out);
  }
  // to = x, SiLU(x), or either times a scale. Parts begin on a data block, so counts are whole ones.
  __aicore__ inline void transform(const Tensor &to, const Tensor &from, uint32_t count, bool silu, float scale) {
    int32_t n = int32_t(count);
    if (!silu && scale == 1.0f) {
      AscendC::DataCopy(to, from, count);
      return;
    }
    auto x = from.template ReinterpretCast<float>(), y = to.template ReinterpretCast<float>();
    if constexpr (kNarrow) {
      x = wide_.Get<float>();
      y = x;
      vector_done();  // of the part before
      AscendC::Cast(x, from.template ReinterpretCast<T>(), AscendC::RoundMode::CAST_NONE, count);
    }
    if (silu) {
      auto e = exp_.Get<float>();
      vector_done();  // of the cast, or of the part before
      AscendC::Muls(e, x, -1.0f, n);
      vector_done();
      AscendC::Exp(e, e, n);
      vector_done();
      AscendC::Adds(e, e, 1.0f, n);
      vector_done();
      AscendC::Div(y, x, e, n);
      x = y;
    }
    if (scale != 1.0f) {
      vector_done();
      AscendC::Muls(y, x, scale, n);
    }
    if constexpr (kNarrow) {
      vector_done();
      AscendC::Cast(to.template ReinterpretCast<T>(), y, AscendC::RoundMode::CAST_RINT, count);
    }
  }
  __aicore__ inline void store_queries(const HstuEntry &e, uint32_t request, const Tensor &out, uint32_t first,
                                       uint32_t rows) {
    uint32_t silent = e.silent_rows(), skipped = first < silent ? min_of(silent - first, rows) : 0;
    if (skipped == rows) return;
    uint32_t query = first + skipped - silent, count = rows - skipped, gap = (s_.heads - 1) * s_.qk_dim;
    copy_out(u_[(uint64_t(e.first_query) + query) * uv_], out[skipped * uv_], count * uv_);
    auto q = out[s_.lot * 2 * uv_ + skipped * qk_];
    for (uint32_t head = 0; head < s_.heads; ++head) {
      uint64_t to = ((uint64_t(request) * s_.heads + head) * s_.row_slots + query) * s_.qk_dim;
      scatter_rows(q_[to], q[head * s_.qk_dim], count, s_.qk_dim, s_.qk_dim, gap);
    }
  }
  // The history rows among these to their pages, page by page.
  __aicore__ inline void keep(const HstuEntry &e, const Tensor &out, uint32_t first, uint32_t rows) {
    uint32_t history = e.new_rows() - e.targets, end = min_of(first + rows, history);
    for (uint32_t row = first; row < end;) {
      uint32_t token = e.cached + row, count = min_of(end - row, s_.page_tokens - token % s_.page_tokens);
      uint64_t to = slot(e, token);
      copy_out(plane_[0][to * qk_], out[s_.lot * (2 * uv_ + qk_) + (row - first) * qk_], count * qk_);
      copy_out(plane_[1][to * uv_], out[s_.lot * uv_ + (row - first) * uv_], count * uv_);
      row += count;
    }
  }

  HstuRowsShape s_;
  uint32_t qk_, uv_;  // numbers of a row's Q or K, of its U or V
  HstuBatch batch_;
  RowIndex ids_;
  Tensor zero_;
  AscendC::GlobalTensor<Raw> mixed_, plane_[2], out_[2], q_, u_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> pages_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> rows_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_, zeros_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> wide_, exp_;
};

}  // namespace npu_gr
