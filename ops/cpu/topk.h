// beam_topk: normalise, constrain and select in one pass over the logits; the C side of Backend.beam_topk.
//
// Rows are visited by their accumulated score, best first. A log-probability is not positive, so no score of a row is
// above its `acc`: the visit ends at the first row whose acc is below the worst that is kept. A row that is visited is
// read once from memory: its log-sum-exp block by block, then, from the cache, the blocks whose maximum reaches the
// worst that is kept. Kept are at most 4 * width candidates in no order; when they are full, the best `width` stay.
#include <algorithm>

#include "kernels.h"
#include "vec.h"

namespace {

constexpr int64_t kBlock = 256;     // columns whose maximum is kept
constexpr int64_t kAhead = 8192;    // columns that are fetched ahead into the second cache: rows come in no order
constexpr int64_t kFewEdges = 128;  // a row with fewer is looked at edge by edge
constexpr float kInfinity = __builtin_inff();

NPU_GR_INLINE int64_t align64(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

// Ascends as the float descends.
NPU_GR_INLINE uint32_t descending_key(float x) {
  uint32_t bits;
  x += 0.0f;  // -0 is 0
  memcpy(&bits, &x, 4);
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

NPU_GR_INLINE float from_key(uint32_t key) {
  uint32_t bits = key >> 31 ? key : ~key & 0x7fffffffu;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct Choice {
  uint64_t rank;  // descending_key(score), then the row
  int64_t edge;
};

NPU_GR_INLINE bool before(const Choice &a, const Choice &b) {
  return a.rank != b.rank ? a.rank < b.rank : a.edge < b.edge;
}

struct Best {
  Choice *kept;
  int64_t width, room, count = 0;
  float worst = -kInfinity;  // a score below it cannot be among the best

  NPU_GR_INLINE void offer(float score, int64_t row, int64_t edge) {
    if (!(score >= worst) || score == -kInfinity) return;
    kept[count++] = {static_cast<uint64_t>(descending_key(score)) << 32 | static_cast<uint32_t>(row), edge};
    if (count == room) shrink();
  }

  __attribute__((noinline)) void shrink() {
    std::nth_element(kept, kept + width - 1, kept + count, before);
    count = width;
    worst = from_key(static_cast<uint32_t>(kept[width - 1].rank >> 32));
  }
};

struct Norm {
  float value;  // -inf: the row has no finite logit; NaN: it has one that is not a number, or +inf
  float peak;
};

constexpr float kLog2E = 1.44269504f;
constexpr float kMagic = 12583039.0f;  // 1.5 * 2**23 + 127: adding it rounds to an integer and biases the exponent

// 2**(x * log2(e) - k), relative error < 3e-6; `floor` is the least x whose power is normal; k an integer. NaN passes.
NPU_GR_INLINE F32 rough_power(F32 x, F32 floor, F32 magic_minus_k) {
  x = max(floor, x);
  F32 shifted = x * kLog2E + magic_minus_k;
  F32 n = shifted - magic_minus_k;
  F32 r = x - n * 0.693147182f;
  F32 p = splat(4.151368356e-2f);
  p = p * r + 1.678759204e-1f;
  p = p * r + 5.000301979e-1f;
  p = p * r + 9.999667725e-1f;
  p = p * r + 1.0f;
  return p * as_float(as_bits(shifted) << 23);
}

// 2**x for integers x <= 0.
NPU_GR_INLINE F32 integer_power(F32 x) { return as_float(as_bits(max(splat(-126.0f), x) + kMagic) << 23); }

// The same in doubles, for logits whose exponents leave the integers that fp32 counts.
template <typename T>
__attribute__((noinline)) float slow_log_sum_exp(const T *x, int64_t count, float scale, float peak) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += ::exp(static_cast<double>(widen(x[i]) * scale) - peak);
  return static_cast<float>(peak + log(sum));
}

// Log-sum-exp of x[0..count) * scale; the maximum of every kBlock into `block_peaks`; `next`, as long, is next.
//
// Each lane sums powers of two less its own integer k, which rises with the lane's maximum: no second pass over memory.
template <bool kIsScaled, typename T>
NPU_GR_INLINE Norm sum_exponentials(const T *x, int64_t count, float scale, F32 *block_peaks, const T *next) {
  constexpr float kLowest = -4.0e6f;  // integers down to here are counted by fp32 less kMagic
  F32 k = splat(kLowest), total{};
  const auto scaled = [&](const T *from) { return kIsScaled ? load(from) * splat(scale) : load(from); };
  const auto end_of = [&](int64_t at) { return at + kBlock < count ? at + kBlock : count; };
  const auto whole_of = [&](int64_t at) { return at + (end_of(at) - at) / kLanes * kLanes; };
  const auto rest_of = [&](int64_t at) {  // the columns behind the last whole vector
    F32 rest = splat(-kInfinity);
    for (int64_t i = whole_of(at); i < end_of(at); ++i) rest[i - whole_of(at)] = widen(x[i]) * scale;
    return rest;
  };
  const auto peak_of = [&](int64_t at) {
    const int64_t whole = whole_of(at);
    F32 most = splat(-kInfinity), other = most;
    int64_t i = at;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
      most = max(scaled(x + i), most);
      other = max(scaled(x + i + kLanes), other);
    }
    most = max(most, other);
    if (i < whole) most = max(scaled(x + i), most);
    if (whole < end_of(at)) most = max(rest_of(at), most);
    return block_peaks[at / kBlock] = most;
  };
  F32 peaks = count ? peak_of(0) : splat(-kInfinity);
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t whole = whole_of(at);
    const T *ahead = at + kAhead < count ? x + at + kAhead : next + at - std::max<int64_t>(count - kAhead, 0);
    for (int64_t j = 0; j < kBlock; j += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(ahead + j, 0, 2);
    // The integer above the peak; of a peak beyond the range the result is replaced in the end.
    F32 higher = max(k, min(max(splat(kLowest), peaks * kLog2E + 1.0f), splat(-kLowest)));
    higher = (higher + 12582912.0f) - 12582912.0f;
    total *= integer_power(k - higher);
    k = higher;
    const F32 magic_minus_k = kMagic - k, floor = (k - 125.0f) * 0.693147182f;
    if (at + kBlock < count) peaks = peak_of(at + kBlock);  // before these powers, which hide what follows from it
    F32 sums[2] = {};
    int64_t i = at;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
      sums[0] += rough_power(scaled(x + i), floor, magic_minus_k);
      sums[1] += rough_power(scaled(x + i + kLanes), floor, magic_minus_k);
    }
    if (i < whole) sums[0] += rough_power(scaled(x + i), floor, magic_minus_k);
    if (whole < end_of(at)) sums[1] += rough_power(rest_of(at), floor, magic_minus_k);
    total += sums[0] + sums[1];
  }
  F32 most = splat(-kInfinity);
  for (int64_t b = 0; b * kBlock < count; ++b) most = max(block_peaks[b], most);
  const float peak = max_lanes(most), top = max_lanes(k);
  const float sum = sum_lanes(total * integer_power(k - top));
  if (peak == kInfinity) return {__builtin_nanf(""), peak};
  if (!(peak < 2.0e6f && peak > -2.0e6f) && peak != -kInfinity) return {slow_log_sum_exp(x, count, scale, peak), peak};
  if (sum != sum) return {sum, peak};
  if (peak == -kInfinity) return {peak, peak};
  const float norm = static_cast<float>(top * 0.6931471805599453 + log(static_cast<double>(sum)));
  return {norm > peak ? norm : peak, peak};  // so that no log-probability rounds to more than 0
}

template <typename T>
NPU_GR_INLINE Norm log_sum_exp(const T *x, int64_t count, float scale, F32 *block_peaks, const T *next) {
  return scale == 1.0f ? sum_exponentials<false>(x, count, scale, block_peaks, next)
                       : sum_exponentials<true>(x, count, scale, block_peaks, next);
}

// Whether any of x[0..count) is NaN or +inf.
template <typename T>
bool has_bad(const T *x, int64_t count) {
  I32 bad{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) bad |= ~(load(x + i) < splat(kInfinity));
  bool found = any(bad);
  for (; i < count; ++i) found |= !(widen(x[i]) < kInfinity);
  return found;
}

// The first place from which ascending codes are not below `code`; `guess` in [0, degree) is where the search begins.
NPU_GR_INLINE int64_t find_code(const int32_t *codes, int64_t degree, int32_t code, int64_t guess) {
  int64_t low = 0, high = degree, step = 8;  // the place is in [low, high]
  if (codes[guess] < code) {
    low = guess + 1;
    for (; guess + step < degree && codes[guess + step] < code; step *= 2) low = guess + step + 1;
    high = std::min(high, guess + step);
  } else {
    high = guess;
    for (; guess - step >= 0 && codes[guess - step] >= code; step *= 2) high = guess - step;
    low = std::max(low, guess - step);
  }
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (codes[middle] < code)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

struct Hit {
  int32_t code;
  float score;
};

struct Selection {
  const TopkJob &job;
  Best best;
  F32 *block_peaks;
  float *values;  // of a row's edges
  Hit *hits;      // of row `pending`
  int64_t num_hits = 0, pending = 0;
  bool were_many = true;  // of the row before: it was looked at edge by edge

  explicit Selection(const TopkJob &given) : job(given) {}

  // Every edge of a row by itself; the first value belongs to the first edge.
  void offer_values(int64_t row, const float *x, float norm) {
    const int64_t lo = job.lo[row], degree = job.degree[row];
    const float acc = job.acc[row];
    for (int64_t j = 0; j < degree; ++j) best.offer((x[j] - norm) + acc, row, lo + j);
  }

  NPU_GR_INLINE void offer_edge(int64_t row, int64_t edge, float score) {
    if (score >= best.worst && (!job.allowed || job.allowed[edge])) best.offer(score, row, edge);
  }

  template <typename T>
  void offer_edges(int64_t row, const T *x, float norm) {
    const int64_t lo = job.lo[row], degree = job.degree[row];
    const float acc = job.acc[row];
    const int32_t *codes = job.code + lo;
    int64_t j = 0;
#if defined(__x86_64__) && NPU_GR_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) {
      for (; j + kLanes <= degree; j += kLanes) {
        const __m512i at = _mm512_loadu_si512(codes + j);
        const F32 value = reinterpret_cast<F32>(_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, at, x, 4));
        const F32 score = (value * job.scale - norm) + acc;
        for (uint32_t bits = mask_bits(score >= splat(best.worst)); bits; bits &= bits - 1) {
          const int lane = __builtin_ctz(bits);
          offer_edge(row, lo + j + lane, score[lane]);
        }
      }
    }
#endif
    for (; j < degree; ++j) offer_edge(row, lo + j, (widen(x[codes[j]]) * job.scale - norm) + acc);
  }

  // The columns that reach the worst that is kept, of the blocks whose maximum does; false if they are many.
  template <typename T>
  bool collect_hits(int64_t row, const T *all, float norm) {
    const int64_t degree = job.degree[row], first = job.first_column, many = 16 + degree / 32;
    const float acc = job.acc[row], per_code = static_cast<float>(degree) / static_cast<float>(job.num_codes);
    const int32_t *codes = job.code + job.lo[row];
    pending = row;
    const auto hit = [&](int64_t column, float score) {
      const int32_t code = static_cast<int32_t>(column - first);
      hits[num_hits++] = {code, score};
      __builtin_prefetch(codes + guess(code, per_code, degree));
    };
    for (int64_t b = first / kBlock; b * kBlock < first + job.num_codes; ++b) {
      if (!any(((block_peaks[b] - norm) + acc) >= splat(best.worst))) continue;
      int64_t column = std::max(first, b * kBlock);
      const int64_t stop = std::min(first + job.num_codes, (b + 1) * kBlock);
      for (; column + kLanes <= stop && num_hits < many; column += kLanes) {
        const F32 score = (load(all + column) * splat(job.scale) - norm) + acc;
        for (uint32_t bits = mask_bits(score >= splat(best.worst)); bits; bits &= bits - 1) {
          const int lane = __builtin_ctz(bits);
          hit(column + lane, score[lane]);
        }
      }
      for (; column < stop && num_hits < many; ++column) {
        const float score = (widen(all[column]) * job.scale - norm) + acc;
        if (score >= best.worst) hit(column, score);
      }
      if (num_hits >= many) {
        num_hits = 0;
        return false;
      }
    }
    return true;
  }

  // The hits that are edges. It waits for the next row's sums, until the codes are in the cache.
  void resolve_hits() {
    if (!num_hits) return;
    const int64_t lo = job.lo[pending], degree = job.degree[pending];
    const float per_code = static_cast<float>(degree) / static_cast<float>(job.num_codes);
    const int32_t *codes = job.code + lo;
    for (int64_t i = 0; i < num_hits; ++i) {
      const int64_t place = find_code(codes, degree, hits[i].code, guess(hits[i].code, per_code, degree));
      if (place < degree && codes[place] == hits[i].code) offer_edge(pending, lo + place, hits[i].score);
    }
    num_hits = 0;
  }

  static NPU_GR_INLINE int64_t guess(int32_t code, float per_code, int64_t degree) {
    return std::min(static_cast<int64_t>(static_cast<float>(code) * per_code), degree - 1);
  }

  // Normalised over the whole row. False: a logit is NaN or +inf.
  template <typename T>
  bool visit_row(int64_t row, int64_t next_row) {
    const T *logits = static_cast<const T *>(job.logits), *all = logits + row * job.row_stride;
    const T *next = logits + next_row * job.row_stride;
    if (were_many)  // so they will be again
      for (int64_t j = 0; j < job.degree[row]; j += 16) __builtin_prefetch(job.code + job.lo[row] + j);
    const Norm norm = log_sum_exp(all, job.num_columns, job.scale, block_peaks, next);
    resolve_hits();
    if (norm.value != norm.value) return false;
    if (job.norm) job.norm[row] = norm.value;
    if (norm.value == -kInfinity || !((norm.peak - norm.value) + job.acc[row] >= best.worst)) return true;
    were_many = best.worst == -kInfinity || job.degree[row] < kFewEdges || !collect_hits(row, all, norm.value);
    if (were_many) offer_edges(row, all + job.first_column, norm.value);
    return true;
  }

  // Normalised over the row's valid edges, which `x` has or which are gathered into it.
  bool visit_valid(int64_t row, float *x) {
    const int64_t lo = job.lo[row], degree = job.degree[row];
    if (job.allowed)
      for (int64_t j = 0; j < degree; ++j) x[j] = job.allowed[lo + j] ? x[j] : -kInfinity;
    const Norm norm = log_sum_exp(x, degree, 1.0f, block_peaks, x);
    if (norm.value != norm.value) return false;
    if (job.norm) job.norm[row] = norm.value;
    if (norm.value != -kInfinity) offer_values(row, x, norm.value);
    return true;
  }

  template <typename T>
  void gather(int64_t row) {
    const T *x = static_cast<const T *>(job.logits) + row * job.row_stride + job.first_column;
    const int32_t *codes = job.code + job.lo[row];
    for (int64_t j = 0; j < job.degree[row]; ++j) values[j] = widen(x[codes[j]]) * job.scale;
  }

  template <typename T>
  int64_t run(uint64_t *order) {
    int64_t alive = 0;
    for (int64_t row = 0; row < job.num_rows; ++row) {
      if (job.acc[row] != job.acc[row]) return -1;
      order[alive++] = static_cast<uint64_t>(descending_key(job.acc[row])) << 32 | static_cast<uint32_t>(row);
    }
    std::sort(order, order + alive);
    for (int64_t i = 0; i < alive; ++i) {
      const int64_t row = static_cast<uint32_t>(order[i]);
      if (i + 4 < alive) __builtin_prefetch(job.code + job.lo[static_cast<uint32_t>(order[i + 4])]);
      const bool is_out = job.degree[row] <= 0 || job.acc[row] == -kInfinity || job.acc[row] < best.worst;
      bool is_good = true;
      if (job.value_start) {
        float *x = job.values + job.value_start[row];
        is_good = is_out ? !has_bad(x, job.degree[row]) : visit_valid(row, x);
      } else if (is_out) {
        is_good = !has_bad(static_cast<const T *>(job.logits) + row * job.row_stride, job.num_columns);
      } else if (job.over_valid) {
        gather<T>(row);
        is_good = visit_valid(row, values);
      } else {
        is_good = visit_row<T>(row, static_cast<uint32_t>(order[i + 1 < alive ? i + 1 : i]));
      }
      if (!is_good) return -1;
    }
    resolve_hits();
    if (best.count > job.width) best.shrink();
    std::sort(best.kept, best.kept + best.count, before);
    for (int64_t i = 0; i < best.count; ++i) {
      job.score[i] = from_key(static_cast<uint32_t>(best.kept[i].rank >> 32));
      job.parent[i] = static_cast<uint32_t>(best.kept[i].rank);
      job.edge[i] = best.kept[i].edge;
    }
    return best.count;
  }
};

NPU_GR_INLINE int64_t topk_room(int64_t width) { return std::max<int64_t>(4 * width, 1024); }

int64_t beam_topk_bytes(int64_t num_rows, int64_t num_columns, int64_t width) {
  return align64(num_rows * 8) + align64(topk_room(width) * static_cast<int64_t>(sizeof(Choice))) +
         align64((num_columns / kBlock + 1) * kVectorBytes) + align64(num_columns * 4) +
         align64((num_columns / 32 + 64) * static_cast<int64_t>(sizeof(Hit)));
}

int64_t beam_topk(const TopkJob *job) {
  Selection made(*job);
  char *at = static_cast<char *>(job->workspace);
  uint64_t *order = reinterpret_cast<uint64_t *>(at);
  at += align64(job->num_rows * 8);
  made.best.kept = reinterpret_cast<Choice *>(at);
  made.best.width = job->width;
  made.best.room = topk_room(job->width);
  at += align64(made.best.room * static_cast<int64_t>(sizeof(Choice)));
  made.block_peaks = reinterpret_cast<F32 *>(at);
  at += align64((job->num_columns / kBlock + 1) * kVectorBytes);
  made.values = reinterpret_cast<float *>(at);
  at += align64(job->num_columns * 4);
  made.hits = reinterpret_cast<Hit *>(at);
  return job->element == kBFloat16 ? made.run<uint16_t>(order) : made.run<float>(order);
}

}  // namespace
