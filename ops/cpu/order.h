// order_sums: the fitted sum of a cascade's candidates. npu_gr/model/order.py defines it.
//
// The few candidates stand in a hash table of their rows; the successors and neighbours of the last events are looked
// up in it one after the other. So the work does not grow with the catalogue, and nothing is sorted.
#ifndef NPU_GR_ORDER_H
#define NPU_GR_ORDER_H

#include <math.h>

#include "order_call.h"
#include "vec.h"

namespace {
namespace order {

struct Space {                                     // C candidates
  double *popular, *share, *next, *mixed, *alike;  // [C]
  int64_t *first;                                  // [C] the first candidate of the same row
  int32_t *slots;                                  // [num_slots] candidates by their rows, -1: none
  int64_t num_slots;                               // a power of two

  Space(void *at, int64_t count) : num_slots(16) {
    while (num_slots < 2 * count) num_slots *= 2;
    popular = static_cast<double *>(at);
    share = popular + count;
    next = share + count, mixed = next + count, alike = mixed + count;
    first = reinterpret_cast<int64_t *>(alike + count);
    slots = reinterpret_cast<int32_t *>(first + count);
  }
  int64_t bytes(int64_t count) const { return 48 * count + 4 * num_slots; }

  // The slot of a row: where it stands, or where it may be put.
  int32_t &slot(int64_t row, const int64_t *candidates) {
    uint64_t at = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u >> 32;
    for (;; ++at) {
      int32_t &here = slots[at & (num_slots - 1)];
      if (here < 0 || candidates[here] == row) return here;
    }
  }
};

// The row of an item in a table whose last row is that of new ones.
int64_t known(const OrderTables &of, int64_t row) {
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(of.num_items) ? row : of.num_items;
}

int64_t order_bytes(int64_t num_candidates) { return Space(nullptr, num_candidates).bytes(num_candidates); }

// log of the shares, into `popular`, and of the mixed probabilities, into `mixed`
void mix(const OrderJob &job, Space &to) {
  const OrderTables &of = *job.tables;
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
    for (int64_t s = 0; item < of.num_items && s < of.num_successors; ++s) {
      const int32_t row = of.successors[first + s];
      if (row < 0) continue;
      const int32_t found = to.slot(row, job.candidates);
      if (found >= 0) to.next[found] = exp(static_cast<double>(of.log_prob[first + s]));
    }
    for (int64_t c = 0; c < count; ++c) to.mixed[c] += part * to.next[to.first[c]];
  }
  for (int64_t c = 0; c < count; ++c) to.mixed[c] = log(to.mixed[c]);
}

// log(1 + scale * mean similarity), into `alike`
void compare(const OrderJob &job, Space &to) {
  const OrderTables &of = *job.tables;
  for (int64_t c = 0; c < job.num_candidates; ++c) to.alike[c] = to.next[c] = 0;
  const int64_t *liked = job.recent + job.num_recent - job.num_liked;
  int64_t num_distinct = 0;
  for (int64_t n = 0; n < job.num_liked; ++n) {
    const int64_t item = known(of, liked[n]), first = item * of.num_neighbours;
    bool is_counted = item < of.num_items;
    for (int64_t before = 0; before < n; ++before) is_counted &= liked[before] != liked[n];
    if (!is_counted) continue;
    ++num_distinct;
    for (int64_t k = 0; k < of.num_neighbours; ++k) {
      const int32_t row = of.neighbours[first + k];
      if (row < 0) continue;
      const int32_t found = to.slot(row, job.candidates);
      if (found >= 0) to.next[found] += of.similarity[first + k];
    }
  }
  for (int64_t c = 0; c < job.num_candidates; ++c) {
    const double sum = to.next[to.first[c]];
    if (sum > 0) to.alike[c] = log1p(of.scale * (sum / static_cast<double>(num_distinct)));
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

void order_sums(const OrderJob *at) {
  const OrderJob &job = *at;
  const OrderTables &of = *job.tables;
  Space space(job.workspace, job.num_candidates);
  memset(space.slots, -1, space.num_slots * sizeof *space.slots);
  for (int64_t c = 0; c < job.num_candidates; ++c) {
    int32_t &slot = space.slot(job.candidates[c], job.candidates);
    if (slot < 0) slot = static_cast<int32_t>(c);
    space.first[c] = slot;
  }
  mix(job, space);
  compare(job, space);
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
