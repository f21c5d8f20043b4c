// blend_sums: the fitted sum of a cascade's candidates. npu_gr/model/blend.py defines it.
//
// The few candidates stand in a hash table of their rows; the successors and neighbours of the last events are looked
// up in it, so the work does not grow with the catalogue, and nothing is sorted. Of tens of thousands of neighbours
// some are candidates, in an order that no processor guesses: a list of those that may be is made without a branch, and
// the next items' neighbours are fetched meanwhile. Where they outnumber the catalogue, sums of all items take half as
// long as finding the candidates among them.
#ifndef NPU_GR_ORDER_H
#define NPU_GR_ORDER_H

#include <math.h>

#include "order_call.h"
#include "vec.h"

namespace {
namespace order {

constexpr int64_t kSparse = 16, kDense = 2;  // slots of a table, at least, for each row that it may hold
constexpr int64_t kAhead = 2;                // items whose neighbours are being fetched

// Rows by their places in a list: a hash table.
struct Places {
  const int64_t *rows;  // the list
  int32_t *slots;       // [1 << bits] places, -1: none
  int bits;

  static int bits_of(int64_t num_slots) {
    int bits = 4;
    while (int64_t{1} << bits < num_slots) ++bits;
    return bits;
  }
  static int64_t bytes(int64_t num_slots) { return int64_t{4} << bits_of(num_slots); }

  Places(const int64_t *rows, int32_t *at, int64_t num_slots) : rows(rows), slots(at), bits(bits_of(num_slots)) {
    memset(slots, -1, sizeof *slots << bits);
  }

  // Rows that follow one another are far apart, and rows of a small catalogue each have a slot of their own.
  uint32_t home(int64_t row) const { return static_cast<uint32_t>(row) * 0x9e3779b9u >> (32 - bits); }

  // The slot of a row: where it stands, or where it may be put.
  int32_t &slot(int64_t row) const {
    for (uint32_t at = home(row);; ++at) {
      int32_t &here = slots[at & ((1u << bits) - 1)];
      if (here < 0 || rows[here] == row) return here;
    }
  }

  // Call back for each of some rows that is in the list, with its index and its place.
  template <typename Visit>
  NPU_GR_INLINE void meet(const int32_t *others, int64_t count, int32_t *likely, const Visit &visit) const {
    int64_t num_likely = 0;
    for (int64_t n = 0; n < count; ++n) {
      likely[num_likely] = static_cast<int32_t>(n);
      num_likely += slots[home(others[n])] >= 0;
    }
    for (int64_t i = 0; i < num_likely; ++i) {
      const int32_t row = others[likely[i]];
      if (row < 0) continue;
      const int32_t place = slot(row);
      if (place >= 0) visit(likely[i], place);
    }
  }
};

struct Space {  // I items, C candidates, N liked events
  const int64_t num_candidates, num_liked, num_others, num_sums;
  double *popular, *share, *next, *mixed, *alike;  // [C]
  int64_t *first;                                  // [C] the first candidate of the same row
  int64_t *distinct;                               // [N] rows of the items among the liked events, each once
  double *sums;                                    // [1 + I] of similarities, the first of padding; or [0]
  int32_t *likely;                                 // [of an item's successors or neighbours]
  int32_t *candidate_slots, *distinct_slots;

  Space(const OrderJob &job, void *at)
      : num_candidates(job.num_candidates),
        num_liked(job.num_liked),
        num_others(job.tables->num_successors > job.tables->num_neighbours ? job.tables->num_successors
                                                                           : job.tables->num_neighbours),
        num_sums(job.tables->num_items <= job.num_liked * job.tables->num_neighbours ? 1 + job.tables->num_items : 0) {
    popular = static_cast<double *>(at);
    share = popular + num_candidates;
    next = share + num_candidates, mixed = next + num_candidates, alike = mixed + num_candidates;
    first = reinterpret_cast<int64_t *>(alike + num_candidates);
    distinct = first + num_candidates;
    sums = reinterpret_cast<double *>(distinct + num_liked);
    likely = reinterpret_cast<int32_t *>(sums + num_sums);
    candidate_slots = likely + num_others;
    distinct_slots = candidate_slots + Places::bytes(kSparse * num_candidates) / 4;
  }
  int64_t bytes() const {
    return 48 * num_candidates + 8 * (num_liked + num_sums) + 4 * num_others + Places::bytes(kSparse * num_candidates) +
           Places::bytes(kDense * num_liked);
  }
};

// The row of an item in a table whose last row is that of new ones.
int64_t known(const BlendTables &of, int64_t row) {
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(of.num_items) ? row : of.num_items;
}

int64_t order_bytes(const OrderJob *job) { return Space(*job, nullptr).bytes(); }

// log of the shares, into `popular`, and of the mixed probabilities, into `mixed`
void mix(const OrderJob &job, const Places &places, Space &to) {
  const BlendTables &of = *job.tables;
  const int64_t count = job.num_candidates;
  for (int64_t c = 0; c < count; ++c) to.popular[c] = of.shares[known(of, job.candidates[c])];
  if (!job.num_followed) return void(memcpy(to.mixed, to.popular, count * sizeof(double)));
  for (int64_t c = 0; c < count; ++c) {
    to.share[c] = exp(to.popular[c]);
    to.mixed[c] = 0;
  }
  double total = 0, weight = 1;
  for (int64_t n = 0; n < job.num_followed; ++n, weight *= of.decay) total += weight;
  weight = 1;
  for (int64_t n = 0; n < job.num_followed; ++n, weight *= of.decay) {
    const int64_t item = known(of, job.recent[job.num_recent - 1 - n]);
    const double rest = of.rest[item], part = weight / total;
    for (int64_t c = 0; c < count; ++c) to.next[c] = rest * to.share[c];
    const int64_t first = item * of.num_successors;
    if (item < of.num_items)
      places.meet(of.successors + first, of.num_successors, to.likely,
                  [&](int32_t s, int32_t place) { to.next[place] = exp(static_cast<double>(of.log_prob[first + s])); });
    for (int64_t c = 0; c < count; ++c) to.mixed[c] += part * to.next[to.first[c]];
  }
  for (int64_t c = 0; c < count; ++c) to.mixed[c] = log(to.mixed[c]);
}

// The known items of the liked events, each once, into `distinct`; how many
int64_t separate(const OrderJob &job, Space &to) {
  const Places found(to.distinct, to.distinct_slots, kDense * job.num_liked);
  const int64_t *liked = job.recent + job.num_recent - job.num_liked;
  int64_t num_distinct = 0;
  for (int64_t n = 0; n < job.num_liked; ++n) {
    if (known(*job.tables, liked[n]) == job.tables->num_items) continue;
    int32_t &slot = found.slot(liked[n]);
    if (slot >= 0) continue;
    slot = static_cast<int32_t>(num_distinct);
    to.distinct[num_distinct++] = liked[n];
  }
  return num_distinct;
}

// Have a row of a table read into the caches.
template <typename T>
void fetch(const T *row, int64_t count) {
  const char *at = reinterpret_cast<const char *>(row);
  for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(at + byte);
}

// Go through the neighbours of some items: add(neighbours, similarities), each [K], of one item after the other.
template <typename Add>
NPU_GR_INLINE void each_liked(const BlendTables &of, const int64_t *items, int64_t num_items, const Add &add) {
  const int64_t width = of.num_neighbours;
  for (int64_t n = 0; n < num_items; ++n) {
    if (n + kAhead < num_items) {
      const int64_t later = items[n + kAhead] * width;
      fetch(of.neighbours + later, width), fetch(of.similarity + later, width);
    }
    add(of.neighbours + items[n] * width, of.similarity + items[n] * width);
  }
}

// Sum up the similarities of all items to some distinct ones: sums[1 + row], after those of padding.
void sum_up(const BlendTables &of, const int64_t *distinct, int64_t num_distinct, double *sums) {
  memset(sums, 0, (1 + of.num_items) * sizeof *sums);
  each_liked(of, distinct, num_distinct, [&](const int32_t *neighbours, const float *similarity) {
    for (int64_t k = 0; k < of.num_neighbours; ++k) sums[1 + neighbours[k]] += similarity[k];
  });
}

void neighbour_sums(const OrderJob *at, double *sums) {
  Space space(*at, at->workspace);
  const int64_t num_distinct = separate(*at, space);
  sum_up(*at->tables, space.distinct, num_distinct, sums);
}

// log(1 + scale * mean similarity), or of the sum of the similarities, or this sum itself, into `alike`
void compare(const OrderJob &job, const Places &places, Space &to) {
  const BlendTables &of = *job.tables;
  const int64_t num_distinct = separate(job, to);
  for (int64_t c = 0; c < job.num_candidates; ++c) to.alike[c] = to.next[c] = 0;
  if (to.num_sums)
    sum_up(of, to.distinct, num_distinct, to.sums);
  else
    each_liked(of, to.distinct, num_distinct, [&](const int32_t *neighbours, const float *similarity) {
      places.meet(neighbours, of.num_neighbours, to.likely,
                  [&](int32_t k, int32_t place) { to.next[place] += similarity[k]; });
    });
  for (int64_t c = 0; c < job.num_candidates; ++c) {
    const int64_t row = known(of, job.candidates[c]);
    if (row == of.num_items) continue;
    const double sum = to.num_sums ? to.sums[1 + row] : to.next[to.first[c]];
    if (sum <= 0 && of.scale > 0) continue;
    const double similarity = of.is_summed ? sum : sum / static_cast<double>(num_distinct);
    to.alike[c] = of.scale > 0 ? log1p(of.scale * similarity) : similarity;
  }
}

// Give the candidates of new items the mean of the others, if there are both.
void neutralise(const OrderJob &job, double *term) {
  double sum = 0;
  int64_t num_known = 0;
  for (int64_t c = 0; c < job.num_candidates; ++c)
    if (known(*job.tables, job.candidates[c]) < job.tables->num_items) sum += term[c], ++num_known;
  if (!num_known || num_known == job.num_candidates) return;
  for (int64_t c = 0; c < job.num_candidates; ++c)
    if (known(*job.tables, job.candidates[c]) == job.tables->num_items) term[c] = sum / static_cast<double>(num_known);
}

void blend_sums(const OrderJob *at) {
  const OrderJob &job = *at;
  const BlendTables &of = *job.tables;
  Space space(job, job.workspace);
  const Places places(job.candidates, space.candidate_slots, kSparse * job.num_candidates);
  for (int64_t c = 0; c < job.num_candidates; ++c) {
    int32_t &slot = places.slot(job.candidates[c]);
    if (slot < 0) slot = static_cast<int32_t>(c);
    space.first[c] = slot;
  }
  mix(job, places, space);
  compare(job, places, space);
  neutralise(job, space.mixed);
  neutralise(job, space.alike);
  neutralise(job, space.popular);
  for (int64_t c = 0; c < job.num_candidates; ++c) {
    float sum = of.transitions * static_cast<float>(space.mixed[c]) + of.alike * static_cast<float>(space.alike[c]) +
                of.popularity * static_cast<float>(space.popular[c]);
    if (job.retrieval) sum += of.retrieval * job.retrieval[c];
    if (job.click) sum += of.click * job.click[c];
    if (job.seen) sum += of.seen * job.seen[c];
    job.sums[c] = sum;
  }
}

}  // namespace order
}  // namespace

#endif
