// A forward pass of the ranker in one call: rows, every layer, the head. Contract: Ops.fused_forward of
// npu_gr/backend/base.py.
//
// Linear layers and norms run over the rows of all requests at once, attention per request. No number of a row depends
// on another row of the batch: a product is a chain over its inputs in order, and a norm is over one row.
#ifndef NPU_GR_HSTU_PASS_H
#define NPU_GR_HSTU_PASS_H

#include "affine.h"
#include "hstu.h"
#include "hstu_pass_call.h"
#include "pack_kv.h"

namespace {
namespace hstu {

constexpr float kSiluSlope = -1.44269504f;  // of SiLU itself: -log2(e)

struct Request {  // a PassSegment and what stands behind it
  PassSegment is;
  const int64_t *runs, *times, *items, *actions, *candidates;

  int64_t tokens() const { return is.num_cached + is.num_new; }
  int64_t rows() const { return is.num_new + is.num_candidates; }
  bool is_packed_apart() const { return is.num_new && !is.keeps; }  // in temporary tiles
};

class Requests {  // in order
 public:
  explicit Requests(const HstuPass &pass) : at_(pass.numbers), has_ids_(!pass.x) {}

  Request next() {
    Request r;
    memcpy(&r.is, at_, sizeof r.is);
    r.runs = at_ + sizeof r.is / sizeof *at_;
    r.times = r.runs + 2 * r.is.num_runs;
    r.items = r.times + r.tokens();
    r.actions = r.items + (has_ids_ ? r.is.num_new : 0);
    r.candidates = r.actions + (has_ids_ ? r.is.num_new : 0);
    at_ = r.candidates + (has_ids_ ? r.is.num_candidates : 0);
    return r;
  }

 private:
  const int64_t *at_;
  bool has_ids_;
};

NPU_GR_INLINE bool is_within(const int64_t *values, int64_t n, int64_t first, int64_t end) {
  bool good = true;
  for (int64_t i = 0; i < n; i++) good &= values[i] >= first && values[i] < end;
  return good;
}

// 0, or a PassError: whatever a pass reads and writes by these numbers lies within its buffers.
int64_t check(const HstuPass &pass) {
  if (pass.tile_dtype != pass.model->dtype && pass.tile_dtype != kInt8) return kBadNumbers;
  int64_t left = pass.num_numbers, rows = 0;
  const int64_t most_numbers = left, header = sizeof(PassSegment) / sizeof(int64_t);
  Requests requests(pass);
  for (int64_t i = 0; i < pass.num_segments; i++) {
    if (left < header) return kBadNumbers;
    PassSegment is;
    memcpy(&is, pass.numbers + pass.num_numbers - left, sizeof is);
    left -= header;
    const int64_t counts[] = {is.num_cached, is.num_new, is.num_runs};
    if (!is_within(counts, 3, 0, most_numbers + 1) || is.num_candidates < 0) return kBadNumbers;
    const int64_t gap[] = {is.gap_at, is.gap};
    if (!is_within(gap, 2, 0, int64_t{1} << 40)) return kBadNumbers;
    if (!pass.x && is.num_candidates > most_numbers) return kBadNumbers;
    const int64_t ids = pass.x ? 0 : 2 * is.num_new + is.num_candidates;
    if (left < 2 * is.num_runs + is.num_cached + is.num_new + ids) return kBadNumbers;
    left -= 2 * is.num_runs + is.num_cached + is.num_new + ids;
    if (pass.x && is.num_new + is.num_candidates > pass.num_rows - rows) return kBadNumbers;
    rows += is.num_new + is.num_candidates;
    const Request r = requests.next();
    int64_t room = 0;
    for (int64_t n = 0; n < is.num_runs; n++) {
      const int64_t first = r.runs[2 * n], count = r.runs[2 * n + 1];
      if (first < 0 || count < 0 || first > is.num_pages || count > is.num_pages - first) return kBadPages;
      room += count * is.page_tiles * kTile;
    }
    if (room < is.num_cached + (is.keeps ? is.num_new : 0)) return kBadPages;
    if (pass.x) continue;
    if (!is_within(r.items, is.num_new, 0, pass.num_items)) return kBadItem;
    if (!is_within(r.candidates, is.num_candidates, 0, pass.num_items)) return kBadItem;
    if (!is_within(r.actions, is.num_new, INT64_MIN, pass.num_actions)) return kBadAction;
  }
  if (left || (pass.x && rows != pass.num_rows)) return kBadNumbers;
  return 0;
}

NPU_GR_INLINE float total_of(F32 x) {  // pairwise
  float part[kLanes];
  store(part, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

// to = norm(factor * x) over n numbers; the mean first, then the variance about it
template <class T>
NPU_GR_INLINE void normalise(const T *x, float factor, const PassNorm &norm, int64_t n, float *to) {
  convert(x, to, n, factor);
  const int64_t whole = n / kLanes * kLanes;
  F32 sums{};
  float rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) sums += load(to + i);
  for (int64_t i = whole; i < n; i++) rest += to[i];
  const float mean = (total_of(sums) + rest) / (float)n;
  F32 squares{};
  rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 from_mean = load(to + i) - mean;
    squares += from_mean * from_mean;
  }
  for (int64_t i = whole; i < n; i++) rest += (to[i] - mean) * (to[i] - mean);
  const float inverse = 1.0f / sqrtf((total_of(squares) + rest) / (float)n + (float)norm.eps);
  for (int64_t i = 0; i < whole; i += kLanes)
    store(to + i, (load(to + i) - mean) * inverse * load(norm.weight + i) + load(norm.bias + i));
  for (int64_t i = whole; i < n; i++) to[i] = (to[i] - mean) * inverse * norm.weight[i] + norm.bias[i];
}

class Space {  // hands out a scratch, or only adds up its size
 public:
  explicit Space(void *at) : at_((char *)at) {}
  template <class T>
  T *take(int64_t count) {
    T *here = at_ ? (T *)(at_ + used_) : nullptr;
    used_ += padded(count * (int64_t)sizeof(T), 64);
    return here;
  }
  void *rest() const { return at_ + used_; }
  int64_t used() const { return used_; }

 private:
  char *at_;
  int64_t used_ = 0;
};

template <class T>  // what embeddings, U, V, Q and K are made of, and tiles if not of int8
class Pass {
 public:
  explicit Pass(const HstuPass &pass)
      : pass_(pass),
        model_(*pass.model),
        uv_(model_.num_heads * model_.v_dim),
        qk_(model_.num_heads * model_.qk_dim),
        mixed_width_(2 * (uv_ + qk_)),
        is_int8_(pass.tile_dtype == kInt8),
        tile_k_(tile_bytes(padded(model_.qk_dim, 2))),
        tile_v_(tile_bytes(padded(model_.v_dim, 16))),
        space_(pass.scratch) {
    int64_t runs = 0, apart = 0;
    Requests requests(pass);
    for (int64_t i = 0; i < pass.num_segments; i++) {
      const Request r = requests.next();
      num_new_ += r.is.num_new;
      num_candidates_ += r.is.num_candidates;
      runs = most(runs, r.is.num_runs);
      if (r.is_packed_apart()) apart = most(apart, (r.is.num_cached % kTile + r.is.num_new + kTile - 1) / kTile);
    }
    num_rows_ = num_new_ + num_candidates_;
    const int64_t gated = (model_.is_joined ? 3 : 1) * uv_, hidden = pass.head ? pass.head->hidden.num_out : 0;
    x_ = space_.take<float>(num_rows_ * model_.dim);
    normed_ = space_.take<float>(num_rows_ * most(model_.dim, gated));
    y_ = space_.take<float>(num_rows_ * most(model_.dim, hidden));
    mixed_ = space_.take<T>(num_rows_ * mixed_width_);
    attention_ = space_.take<T>(num_rows_ * uv_);
    apart_k_ = space_.take<char>(apart * tile_k_);
    apart_v_ = space_.take<char>(apart * tile_v_);
    runs_ = space_.take<TileRun>(runs + 1);
  }

  int64_t scratch_bytes() {
    int64_t ops = 0;
    Affine affine = {};
    affine.num_in = 1;
    const auto widest = [&](const PassLinear &linear) { affine.num_in = most(affine.num_in, linear.num_in); };
    for (int64_t l = 0; l < model_.num_layers; l++) widest(model_.layers[l].uvqk), widest(model_.layers[l].out);
    if (pass_.head) widest(pass_.head->hidden), widest(pass_.head->out);
    ops = affine_scratch_bytes(&affine);  // in float32, which needs most
    Requests requests(pass_);
    for (int64_t i = 0; i < pass_.num_segments; i++) {
      const Request r = requests.next();
      for (int64_t is_causal = 0; is_causal < 2; is_causal++) {
        const Hstu call = attention_of(r, model_.layers[0], is_causal);
        ops = most(ops, hstu::scratch_bytes(&call, is_causal));
      }
    }
    return space_.used() + ops + 64;
  }

  void run() {
    if (pass_.x)
      memcpy(x_, pass_.x, num_rows_ * model_.dim * sizeof(float));
    else
      embed();
    for (int64_t l = 0; l + 1 < model_.num_layers; l++) middle_layer(l);
    last_layer(model_.num_layers - 1);
    if (num_candidates_) answer();
  }

 private:
  int64_t tile_bytes(int64_t width) const {  // of all heads
    return model_.num_heads * kTile * (is_int8_ ? width + (int64_t)sizeof(bf16) : width * (int64_t)sizeof(T));
  }

  void embed() {
    const int64_t dim = model_.dim, shown = pass_.num_actions - 1;
    float *to = x_;
    const auto row = [&](int64_t item, int64_t action) {
      const T *a = (const T *)pass_.items + item * dim, *b = (const T *)pass_.actions + most(action, 0) * dim;
      for (int64_t d = 0; d < dim; d++, to++) {
        T sum;  // rounded as the embeddings are
        put(&sum, widen(a[d]) + widen(b[d]));
        *to = widen(sum);
      }
    };
    Requests requests(pass_);
    for (int64_t i = 0; i < pass_.num_segments; i++) {
      const Request r = requests.next();
      for (int64_t n = 0; n < r.is.num_new; n++) row(r.items[n], r.actions[n]);
      for (int64_t c = 0; c < r.is.num_candidates; c++) row(r.candidates[c], shown);
    }
  }

  void middle_layer(int64_t number) {
    const PassLayer &layer = model_.layers[number];
    for (int64_t r = 0; r < num_rows_; r++) normalise_row(layer.norm_in, r, r);
    linear<T>(layer.uvqk, normed_, num_rows_, model_.is_silu, mixed_);
    int64_t first = 0;
    Requests requests(pass_);
    for (int64_t i = 0; i < pass_.num_segments; i++) {
      const Request r = requests.next();
      const T *history = mixed_ + first * mixed_width_, *own = history + r.is.num_new * mixed_width_;
      find_tiles(r, number, history + 2 * uv_ + qk_, history + uv_, mixed_width_, mixed_width_);
      if (r.is.num_new) {
        Hstu call = attention_of(r, layer, true);
        call.q = rows_of(history + 2 * uv_, mixed_width_, model_.qk_dim);
        call.own_k = call.own_v = call.q;
        call.out = rows_of(attention_ + first * uv_, uv_, model_.v_dim);
        causal(&call);
      }
      if (r.is.num_candidates) attend(r, layer, own, attention_ + (first + r.is.num_new) * uv_);
      first += r.rows();
    }
    finish(layer, num_rows_);
  }

  void last_layer(int64_t number) {  // of new tokens the keys and values alone; then only candidates' rows are left
    const PassLayer &layer = model_.layers[number];
    Requests requests(pass_);
    int64_t from = 0, history = 0, own = 0;
    for (int64_t i = 0; i < pass_.num_segments; i++) {
      const Request r = requests.next();
      for (int64_t n = 0; n < r.is.num_new; n++) normalise_row(layer.norm_in, from++, history++);
      for (int64_t c = 0; c < r.is.num_candidates; c++, own++, from++) {
        normalise_row(layer.norm_in, from, num_new_ + own);
        memmove(x_ + own * model_.dim, x_ + from * model_.dim, model_.dim * sizeof(float));
      }
    }
    T *mixed = mixed_, *v = mixed_ + num_candidates_ * mixed_width_, *k = v + num_new_ * uv_;
    linear<T>(layer.v, normed_, num_new_, model_.is_silu, v);
    linear<T>(layer.k, normed_, num_new_, model_.is_silu, k);
    linear<T>(layer.uvqk, normed_ + num_new_ * model_.dim, num_candidates_, model_.is_silu, mixed);
    history = own = 0;
    requests = Requests(pass_);
    for (int64_t i = 0; i < pass_.num_segments; i++) {
      const Request r = requests.next();
      find_tiles(r, number, k + history * qk_, v + history * uv_, qk_, uv_);
      if (r.is.num_candidates) attend(r, layer, mixed + own * mixed_width_, attention_ + own * uv_);
      history += r.is.num_new;
      own += r.is.num_candidates;
    }
    finish(layer, num_candidates_);
  }

  void answer() {
    const int64_t dim = model_.dim;
    if (!pass_.head) return (void)memcpy(pass_.out, x_, num_candidates_ * dim * sizeof(float));
    const PassHead &head = *pass_.head;
    for (int64_t r = 0; r < num_candidates_; r++) normalise_row(head.norm, r, r);
    if (!head.hidden.weight) return linear<float>(head.out, normed_, num_candidates_, false, pass_.out);
    linear<float>(head.hidden, normed_, num_candidates_, true, y_);
    linear<float>(head.out, y_, num_candidates_, false, pass_.out);
  }

  void normalise_row(const PassNorm &norm, int64_t from, int64_t to) {
    normalise(x_ + from * model_.dim, 1.0f, norm, model_.dim, normed_ + to * model_.dim);
  }

  template <class Y>
  void linear(const PassLinear &layer, const float *x, int64_t rows, bool is_silu, Y *y) {
    if (!rows) return;
    const Affine call = {rows,
                         layer.num_in,
                         layer.num_out,
                         kFloat32,
                         layer.tile_dtype,
                         sizeof(Y) == sizeof(float) ? kFloat32 : kBFloat16,
                         x,
                         layer.num_in,
                         layer.weight,
                         layer.bias,
                         is_silu,
                         y,
                         space_.rest()};
    affine(&call);
  }

  // x += out(gate(attention)) for the first `rows` rows of x, U and attention
  void finish(const PassLayer &layer, int64_t rows) {
    const int64_t width = (model_.is_joined ? 3 : 1) * uv_;
    for (int64_t r = 0; r < rows; r++) {
      const T *u = mixed_ + r * mixed_width_, *attention = attention_ + r * uv_;
      float *to = normed_ + r * width, *gated = to + width - uv_;
      for (int64_t at = 0; at < uv_; at += model_.norm_group)
        normalise(attention + at, (float)model_.scale, layer.norm_attention, model_.norm_group, gated + at);
      int64_t i = 0;
      for (; i + kLanes <= uv_; i += kLanes) {
        const F32 gate = model_.is_silu ? load(u + i) : silu(load(u + i), kSiluSlope);
        store(gated + i, load(gated + i) * gate);
        if (model_.is_joined) store(to + i, gate);
      }
      for (; i < uv_; i++) {
        const float gate = model_.is_silu ? widen(u[i]) : silu(splat(widen(u[i])), kSiluSlope)[0];
        gated[i] *= gate;
        if (model_.is_joined) to[i] = gate;
      }
      if (model_.is_joined) convert(attention, to + uv_, uv_, (float)model_.scale);
    }
    linear<float>(layer.out, normed_, rows, false, y_);
    for (int64_t i = 0; i < rows * model_.dim; i++) x_[i] += y_[i];
  }

  static Rows rows_of(const T *data, int64_t row_stride, int64_t head_stride) {
    return {const_cast<T *>(data), row_stride, head_stride};
  }

  Hstu attention_of(const Request &r, const PassLayer &layer, bool is_causal) const {
    Hstu call = {};
    call.num_rows = is_causal ? r.is.num_new : r.is.num_candidates;
    call.num_heads = model_.num_heads, call.qk_dim = model_.qk_dim, call.v_dim = model_.v_dim;
    call.row_dtype = model_.dtype, call.tile_dtype = pass_.tile_dtype;
    call.runs = runs_, call.num_runs = num_runs_;
    call.num_tokens = r.tokens();
    call.times = r.times;
    call.query_time = r.is.query_time;
    call.position_bias = layer.position_bias, call.position_buckets = model_.position_buckets;
    call.time_bias = layer.time_bias;
    call.alpha = model_.alpha;
    call.recent = model_.recent, call.first = model_.first;
    call.gap_at = r.is.gap_at, call.gap = r.is.gap;
    call.scratch = space_.rest();
    return call;
  }

  void attend(const Request &r, const PassLayer &layer, const T *own, T *out) {  // own: U | V | Q | K of candidates
    Hstu call = attention_of(r, layer, false);
    call.q = rows_of(own + 2 * uv_, mixed_width_, model_.qk_dim);
    call.own_k = rows_of(own + 2 * uv_ + qk_, mixed_width_, model_.qk_dim);
    call.own_v = rows_of(own + uv_, mixed_width_, model_.v_dim);
    call.out = rows_of(out, uv_, model_.v_dim);
    targets(&call);
  }

  // Pack the new tokens' rows, and set runs_ to the tiles of all tokens of a layer.
  void find_tiles(const Request &r, int64_t layer, const T *k, const T *v, int64_t k_step, int64_t v_step) {
    Pack call = {r.is.num_new,
                 model_.num_heads,
                 model_.qk_dim,
                 model_.v_dim,
                 model_.dtype,
                 pass_.tile_dtype,
                 rows_of(k, k_step, model_.qk_dim),
                 rows_of(v, v_step, model_.v_dim),
                 0,
                 {}};
    const int64_t size = is_int8_ ? 1 : sizeof(T);
    char *keys = (char *)r.is.k + layer * r.is.k_layer * size, *values = (char *)r.is.v + layer * r.is.v_layer * size;
    const bool is_apart = r.is_packed_apart();
    const int64_t held = is_apart ? r.is.num_cached / kTile * kTile : r.tokens();  // tokens in the pages' whole tiles
    num_runs_ = 0;
    int64_t token = 0, written = r.is.num_cached;  // what the runs so far hold; the next new token
    for (int64_t i = 0; i < r.is.num_runs; i++) {
      const int64_t page = r.runs[2 * i], room = r.runs[2 * i + 1] * r.is.page_tiles * kTile;
      const TileRun run = {keys + page * r.is.page_tiles * tile_k_, values + page * r.is.page_tiles * tile_v_,
                           room / kTile};
      const int64_t until = least(token + room, r.tokens());
      if (r.is.keeps && until > written) {
        Pack part = call;
        part.num_rows = until - written;
        part.first_token = written - token;
        part.into = run;
        const int64_t done = written - r.is.num_cached;
        part.k.data = (T *)call.k.data + done * k_step, part.v.data = (T *)call.v.data + done * v_step;
        pack_kv(&part);
        written = until;
      }
      if (is_apart && r.is.num_cached % kTile && held >= token && held < token + room) {  // a tile that is begun
        memcpy(apart_k_, (char *)run.k + (held - token) / kTile * tile_k_, tile_k_);
        memcpy(apart_v_, (char *)run.v + (held - token) / kTile * tile_v_, tile_v_);
      }
      const int64_t tiles = (least(token + room, held) - token + kTile - 1) / kTile;
      if (tiles > 0) runs_[num_runs_++] = {run.k, run.v, tiles};
      token += room;
    }
    if (is_apart) {
      call.first_token = r.is.num_cached % kTile;
      call.into = {apart_k_, apart_v_, (call.first_token + r.is.num_new + kTile - 1) / kTile};
      pack_kv(&call);
      runs_[num_runs_++] = call.into;
    }
  }

  const HstuPass &pass_;
  const PassModel &model_;
  const int64_t uv_, qk_, mixed_width_;  // widths of rows, all heads
  const bool is_int8_;
  const int64_t tile_k_, tile_v_;  // bytes of tiles, all heads
  int64_t num_rows_ = 0, num_new_ = 0, num_candidates_ = 0, num_runs_ = 0;
  Space space_;
  float *x_, *normed_, *y_;
  T *mixed_, *attention_;     // [rows, U | V | Q | K] and [rows, H Dv]
  char *apart_k_, *apart_v_;  // temporary tiles of one request's rows
  TileRun *runs_;
};

int64_t hstu_pass_bytes(const HstuPass *at) {
  HstuPass sized = *at;
  sized.scratch = nullptr;
  if (const int64_t error = check(sized)) return error;
  return sized.model->dtype == kBFloat16 ? Pass<bf16>(sized).scratch_bytes() : Pass<float>(sized).scratch_bytes();
}

void hstu_pass(const HstuPass *at) {
  if (at->model->dtype == kBFloat16)
    Pass<bf16>(*at).run();
  else
    Pass<float>(*at).run();
}

}  // namespace hstu
}  // namespace

#endif
