// NEXT, the search and a rank of what is found in one call: hstu_pass, best_items, hstu_pass and item_products, one
// after the other. Contract: Ops.hstu_find of npu_gr/backend/base.py.
#ifndef NPU_GR_HSTU_FIND_H
#define NPU_GR_HSTU_FIND_H

#include "hstu_find_call.h"
#include "hstu_pass.h"
#include "items.h"

namespace {
namespace hstu {

// The pass over `counts` of each request's found items, behind what NEXT read and wrote; `found`: null: some items.
HstuPass ranking(const HstuFind &find, const int64_t *counts, const int64_t *found) {
  HstuPass pass = find.next;
  pass.head = find.head, pass.out = find.logits, pass.numbers = find.numbers, pass.num_segments = 0;
  int64_t *to = find.numbers;
  const auto put = [&](const int64_t *from, int64_t count) {
    memcpy(to, from, count * sizeof *to);
    to += count;
  };
  Requests requests(find.next);
  for (int64_t i = 0; i < find.next.num_segments; i++) {
    const Request r = requests.next();
    if (!counts[i]) continue;
    PassSegment is = r.is;
    is.num_candidates = counts[i];
    if (r.is.keeps) is.num_cached = r.tokens(), is.num_new = is.keeps = 0;
    memcpy(to, &is, sizeof is);
    to += sizeof is / sizeof *to;
    put(r.runs, 2 * is.num_runs);
    put(r.times, r.tokens());
    put(r.items, is.num_new);
    put(r.actions, is.num_new);
    if (found)
      put(found + i * find.items.k, counts[i]);
    else
      memset(to, 0, counts[i] * sizeof *to), to += counts[i];
    pass.num_segments++;
  }
  pass.num_numbers = to - find.numbers;
  return pass;
}

// Bytes of scratch, or a PassError, or kBadFind.
int64_t hstu_find_bytes(const HstuFind *at) {
  const HstuFind &find = *at;
  const int64_t first = hstu_pass_bytes(&find.next);
  if (first < 0) return first;
  if (find.next.x || !find.next.head || !find.head) return kBadFind;
  Requests requests(find.next);
  for (int64_t i = 0; i < find.next.num_segments; i++) {
    if (requests.next().is.num_candidates != 1) return kBadFind;
    if (find.wanted[i] < 0 || find.wanted[i] > find.items.k) return kBadFind;
  }
  const HstuPass second = ranking(find, find.wanted, nullptr);
  return second.num_segments ? most(first, hstu_pass_bytes(&second)) : first;
}

int64_t hstu_find(const HstuFind *at) {
  const HstuFind &find = *at;
  hstu_pass(&find.next);
  items::best_items(&find.items);
  const int64_t k = find.items.k, dim = find.items.dim;
  int64_t total = 0;
  for (int64_t i = 0; i < find.next.num_segments; i++) {
    const int64_t *found = find.items.item + i * k;
    int64_t count = 0;
    while (count < find.wanted[i] && found[count] >= 0) count++;
    find.num_scored[i] = count < find.least[i] ? 0 : count;
    const ProductsJob job = {find.items.queries + i * dim, find.items.items,     find.items.num_items, dim, found,
                             find.num_scored[i],           find.products + total};
    items::item_products(&job);
    total += find.num_scored[i];
  }
  if (!total) return 0;
  const HstuPass second = ranking(find, find.num_scored, find.items.item);
  const int64_t needed = hstu_pass_bytes(&second);
  if (needed < 0 || needed > find.num_bytes) return needed < 0 ? needed : kBadFind;
  hstu_pass(&second);
  return 0;
}

}  // namespace hstu
}  // namespace

#endif
