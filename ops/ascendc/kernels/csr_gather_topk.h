// csr_gather_topk: the k best continuations of a request's beams in a trie, constrained before they are selected.
//
// logits [rows, codes]; beam i has the edges lo[i] .. lo[i] + degree[i] - 1 of the level, edge e reads logits[i,
// code[e]] and counts (logits - norm[i]) + acc[i]. Order: score descending, beam ascending, edge ascending. Three
// launches: the norm over the valid children (where no norm is given), the best pairs of groups of rows, their merge.
// `parent` and `edge` are -1 where nothing is left.
#pragma once
#include "children.h"
#include "merge_pairs.h"

namespace npu_gr {

// norm[i] = log-sum-exp over row i's allowed children; -inf for a row without any.
template <typename T>
class CsrNorm {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR logits, GM_ADDR lo, GM_ADDR degree, GM_ADDR code,
                              GM_ADDR allowed, GM_ADDR norm, const CsrShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    uint32_t cores = AscendC::GetBlockNum();
    begin_ = uint32_t(uint64_t(s_.rows) * AscendC::GetBlockIdx() / cores);
    end_ = uint32_t(uint64_t(s_.rows) * (AscendC::GetBlockIdx() + 1) / cores);
    uint32_t held = (s_.rows + cores - 1) / cores;
    norm_.SetGlobalBuffer((__gm__ float *)norm, s_.rows);
    children_.init(pipe, logits, code, allowed, shape);
    columns_.init(pipe, {lo, degree}, s_.rows, held);
    pipe_->InitBuffer(x_, s_.tile * 4);
    pipe_->InitBuffer(work_, 1024);
    pipe_->InitBuffer(one_, 64);
    pipe_->InitBuffer(peaks_, held * 4);
    pipe_->InitBuffer(outs_, 1, held * 4);
  }
  __aicore__ inline void process() {
    using namespace AscendC;
    if (begin_ == end_) return;
    uint32_t count = end_ - begin_;
    columns_.load(begin_, count);
    auto total = outs_.AllocTensor<float>();
    auto peaks = peaks_.Get<float>();
    for (uint32_t i = 0; i < count; ++i) {
      float peak = kNegInf, sum = 0.0f;
      uint32_t degree = uint32_t(columns_.integer(kDegree, i));
      if (degree > 0) {
        uint64_t lo = uint64_t(columns_.integer(kLo, i));
        children_.open(begin_ + i);
        peak = find_peak(lo, degree);
        if (peak > kNegInf) sum = sum_exp(lo, degree, peak);
        children_.close();
      }
      peaks.SetValue(i, peak);
      total.SetValue(i, sum);
    }
    sync<HardEvent::S_V>(*pipe_);
    Ln(total, total, int32_t(count));
    vector_done();
    Add(total, total, peaks, int32_t(count));
    outs_.EnQue(total);
    total = outs_.DeQue<float>();
    copy_out(norm_[uint64_t(begin_)], total, count);
    outs_.FreeTensor(total);
    columns_.free();
  }

 private:
  __aicore__ inline float find_peak(uint64_t lo, uint32_t degree) {
    float peak = kNegInf;
    for (uint32_t at = 0; at < degree; at += s_.tile) {
      uint32_t count = min_of(s_.tile, degree - at);
      auto x = x_.Get<float>();
      children_.pick(x, lo + at, count);
      AscendC::ReduceMax(one_.Get<float>(), x, work_.Get<float>(), int32_t(count));
      float here = read_one();
      if (here > peak) peak = here;
    }
    return peak;
  }
  __aicore__ inline float sum_exp(uint64_t lo, uint32_t degree, float peak) {
    float total = 0.0f;
    for (uint32_t at = 0; at < degree; at += s_.tile) {
      uint32_t count = min_of(s_.tile, degree - at);
      auto x = x_.Get<float>();
      children_.pick(x, lo + at, count);
      AscendC::Adds(x, x, -peak, int32_t(count));
      vector_done();
      AscendC::Exp(x, x, int32_t(count));
      vector_done();
      AscendC::ReduceSum(one_.Get<float>(), x, work_.Get<float>(), int32_t(count));
      total += read_one();
    }
    return total;
  }
  __aicore__ inline float read_one() {
    sync<AscendC::HardEvent::V_S>(*pipe_);
    float value = one_.Get<float>().GetValue(0);
    sync<AscendC::HardEvent::S_V>(*pipe_);
    return value;
  }

  AscendC::TPipe *pipe_;
  CsrShape s_;
  uint32_t begin_, end_;
  Children<T> children_;
  enum { kLo, kDegree };
  RowColumns<2> columns_;
  AscendC::GlobalTensor<float> norm_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_, work_, one_, peaks_;
};

// The best pairs of one group of rows and one piece of each row's children. Small rows share a tile.
template <typename T>
class CsrSelect {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR logits, GM_ADDR norm, GM_ADDR acc, GM_ADDR lo,
                              GM_ADDR degree, GM_ADDR code, GM_ADDR allowed, GM_ADDR workspace, const CsrShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    uint32_t words = round_up(s_.k, 32) * 2, held = (s_.rows + s_.groups - 1) / s_.groups;
    pairs_.SetGlobalBuffer((__gm__ float *)workspace, uint64_t(words) * s_.groups * s_.pieces);
    best_.init(pipe, s_.tile, s_.k);
    children_.init(pipe, logits, code, allowed, shape);
    columns_.init(pipe, {norm, acc, lo, degree}, s_.rows, held);
    pipe_->InitBuffer(x_, s_.tile * 4);
    pipe_->InitBuffer(index_, s_.tile * 4);
    pipe_->InitBuffer(iota_, s_.tile * 4);
    pipe_->InitBuffer(outs_, 1, words * 4);
    AscendC::CreateVecIndex(iota_.Get<int32_t>(), int32_t(0), s_.tile);
  }
  __aicore__ inline void process() {
    uint32_t items = s_.groups * s_.pieces;
    for (uint32_t item = AscendC::GetBlockIdx(); item < items; item += AscendC::GetBlockNum())
      run_item(item / s_.pieces, item % s_.pieces);
  }

 private:
  __aicore__ inline void run_item(uint32_t group, uint32_t piece) {
    uint32_t begin = uint32_t(uint64_t(s_.rows) * group / s_.groups);
    uint32_t end = uint32_t(uint64_t(s_.rows) * (group + 1) / s_.groups);
    columns_.load(begin, end - begin);
    best_.reset();
    clear();
    for (uint32_t i = 0; i < end - begin; ++i) {
      uint64_t degree = uint64_t(columns_.integer(kDegree, i));
      float norm = columns_.number(kNorm, i), acc = columns_.number(kAcc, i);
      uint32_t from = uint32_t(degree * piece / s_.pieces), to = uint32_t(degree * (piece + 1) / s_.pieces);
      if (from < to && norm > kNegInf && acc > kNegInf)
        add_row(begin + i, uint64_t(columns_.integer(kLo, i)), norm, acc, from, to);
    }
    flush();
    columns_.free();
    store(group * s_.pieces + piece);
  }
  // Children from .. to - 1 of a row into the tile, each lot on a border of 32 elements.
  __aicore__ inline void add_row(uint32_t row, uint64_t lo, float norm, float acc, uint32_t from, uint32_t to) {
    children_.open(row);
    while (from < to) {
      uint32_t count = min_of(to - from, s_.tile - filled_);
      auto x = x_.Get<float>()[filled_];
      children_.pick(x, lo + from, count);
      AscendC::Adds(x, x, -norm, int32_t(count));
      vector_done();
      AscendC::Adds(x, x, acc, int32_t(count));
      AscendC::Adds(index_.Get<int32_t>()[filled_], iota_.Get<int32_t>(), int32_t((row << s_.shift) | from),
                    int32_t(count));
      from += count;
      filled_ = round_up(filled_ + count, 32);
      if (filled_ == s_.tile) flush();
    }
    children_.close();
  }
  __aicore__ inline void flush() {
    if (filled_ == 0) return;
    vector_done();
    best_.offer(x_.Get<float>(), index_.Get<int32_t>(), 0, filled_);
    vector_done();
    clear();
  }
  __aicore__ inline void clear() {
    AscendC::Duplicate(x_.Get<float>(), kNegInf, int32_t(s_.tile));
    filled_ = 0;
  }
  __aicore__ inline void store(uint32_t list) {
    uint32_t words = best_.padded_k() * 2;
    auto out = outs_.AllocTensor<float>();
    AscendC::DataCopy(out, best_.best(), words);
    outs_.EnQue(out);
    out = outs_.DeQue<float>();
    copy_out(pairs_[uint64_t(list) * words], out, words);
    outs_.FreeTensor(out);
  }

  AscendC::TPipe *pipe_;
  CsrShape s_;
  uint32_t filled_ = 0;
  Children<T> children_;
  enum { kNorm, kAcc, kLo, kDegree };
  RowColumns<4> columns_;
  BestPairs best_;
  AscendC::GlobalTensor<float> pairs_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_, index_, iota_;
};

// Merges the lists of the groups, and derives parent and edge from the index of a pair.
class CsrMerge {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR workspace, GM_ADDR lo, GM_ADDR score, GM_ADDR parent,
                              GM_ADDR edge, const CsrShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    score_.SetGlobalBuffer((__gm__ float *)score, s_.k);
    parent_.SetGlobalBuffer((__gm__ int32_t *)parent, s_.k);
    edge_.SetGlobalBuffer((__gm__ int32_t *)edge, s_.k);
    merge_.init(pipe, workspace, uint64_t(s_.groups) * s_.pieces, s_.k);
    columns_.init(pipe, {lo}, s_.rows, s_.rows);
    pipe_->InitBuffer(outs_, 1, round_up(s_.k, 32) * 12);
    pipe_->InitBuffer(row_, round_up(s_.k, 32) * 4);
    pipe_->InitBuffer(none_, round_up(s_.k, 32) * 4);
    pipe_->InitBuffer(first_, round_up(s_.k, 32) * 4);
  }
  __aicore__ inline void process() {
    using namespace AscendC;
    if (GetBlockIdx() != 0) return;
    columns_.load(0, s_.rows);
    auto &best = merge_.merge(0, s_.groups * s_.pieces);
    uint32_t padded = best.padded_k();
    int32_t count = int32_t(padded), shift = int32_t(s_.shift);
    auto score = outs_.AllocTensor<float>();
    auto parent = score[padded].ReinterpretCast<int32_t>(), edge = score[padded * 2].ReinterpretCast<int32_t>();
    auto row = row_.Get<int32_t>(), lo = first_.Get<int32_t>(), none = none_.Get<int32_t>();
    best.split_columns(score, edge);
    vector_done();
    ShiftRight(parent, edge, shift, count);  // arithmetic: the -1 of an unfilled place stays -1
    ShiftRight(none, edge, int32_t(31), count);
    vector_done();
    Maxs(row, parent, int32_t(0), count);
    vector_done();
    ShiftLeft(lo, row, shift, count);
    ShiftLeft(row, row, int32_t(2), count);  // bytes in the table of first edges
    vector_done();
    Sub(edge, edge, lo, count);  // the child's number
    vector_done();
    Gather(lo, columns_.column(0), row.ReinterpretCast<uint32_t>(), 0, padded);
    vector_done();
    Add(edge, edge, lo, count);
    vector_done();
    Or(edge.ReinterpretCast<int16_t>(), edge.ReinterpretCast<int16_t>(), none.ReinterpretCast<int16_t>(), count * 2);
    outs_.EnQue(score);
    score = outs_.DeQue<float>();
    copy_out(score_, score, s_.k);
    copy_out(parent_, parent, s_.k);
    copy_out(edge_, edge, s_.k);
    outs_.FreeTensor(score);
    columns_.free();
  }

 private:
  AscendC::TPipe *pipe_;
  CsrShape s_;
  MergePairs merge_;
  RowColumns<1> columns_;
  AscendC::GlobalTensor<float> score_;
  AscendC::GlobalTensor<int32_t> parent_, edge_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> row_, none_, first_;
};

}  // namespace npu_gr
