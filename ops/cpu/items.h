// best_items: inner products and the selection of the best in one pass over the items; the C side of
// Backend.best_items. No score is written to memory but those that may be among the best. item_products: the same
// scores, to the last bit, of the items that are named.
//
// As many items as a register has lanes are taken at once, each with a sum of its own; a tree of shuffles then makes
// one register of their scores. The first query reads them in the order in which they lie, and fetches ahead: so one
// core reads about as fast as it can, which is what a lone query costs. The other queries find them in the L1 cache.
#ifndef NPU_GR_ITEMS_H
#define NPU_GR_ITEMS_H

#include <algorithm>

#include "items_call.h"
#include "vec.h"

namespace {
namespace items {

constexpr int64_t kAhead = 512;  // floats

// The best so far of one query, in no order, and room for as many more.
struct Kept {
  uint64_t *ranks;  // descending_key(score), then the row
  int64_t count;
  float worst;                         // rows rise, so a score must be above it to be among the best
  const int64_t *hidden, *hidden_end;  // of the rows that may still come

  NPU_GR_INLINE void offer(float score, int64_t row, int64_t k) {
    while (hidden != hidden_end && *hidden < row) ++hidden;
    if (hidden != hidden_end && *hidden == row) return;
    ranks[count++] = static_cast<uint64_t>(descending_key(score)) << 32 | static_cast<uint32_t>(row);
    if (count == 2 * k) shrink(k);
  }

  __attribute__((noinline)) void shrink(int64_t k) {
    std::nth_element(ranks, ranks + k - 1, ranks + count);
    count = k;
    worst = from_key(static_cast<uint32_t>(ranks[k - 1] >> 32));
  }
};

// Lanes whose index has bit W come from b, the others from a; each is the sum of a pair of lanes that differ in it.
template <int W>
NPU_GR_INLINE F32 add_pairs(F32 a, F32 b) {
  I32 own{}, other{};
  for (int lane = 0; lane < kLanes; ++lane) {
    const int from = lane & W ? kLanes : 0;
    own[lane] = from + lane;
    other[lane] = from + (lane ^ W);
  }
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// Lane i: the sum of the lanes of products(i), for N of them.
template <int N = kLanes, typename Products>
NPU_GR_INLINE F32 sums(const Products &products, int first = 0) {
  if constexpr (N == 1) {
    return products(first);
  } else {
    const F32 low = sums<N / 2>(products, first);
    return add_pairs<N / 2>(low, sums<N / 2>(products, first + N / 2));
  }
}

NPU_GR_INLINE float plus_product(float sum, float a, float b) {  // rounded the same way wherever it is used
#if NPU_GR_FMA
  return __builtin_fmaf(a, b, sum);
#else
  return sum + a * b;
#endif
}

NPU_GR_INLINE F32 with_rests(F32 found, const float *query, const float *first, int64_t d, int64_t dim) {
  for (; d < dim; ++d)
    for (int i = 0; i < kLanes; ++i) found[i] = plus_product(found[i], query[d], first[i * dim + d]);
  return found;
}

// Scores of kLanes items that stream from memory.
NPU_GR_INLINE F32 streamed_scores(const float *query, const float *first, int64_t dim) {
  const int64_t whole = dim / kLanes * kLanes;
  const auto products = [&](int i) {
    F32 x{};
    for (int64_t d = 0; d < whole; d += kLanes) {
      const float *here = first + i * dim + d;
      __builtin_prefetch(here + kAhead);
      x += load(query + d) * load(here);
    }
    return x;
  };
  return with_rests(sums(products), query, first, whole, dim);
}

// The same scores, to the last bit, of items that a cache has.
NPU_GR_INLINE F32 cached_scores(const float *query, const float *first, int64_t dim) {
  F32 x[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const F32 q = load(query + d);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] += q * load(first + i * dim + d);
  }
  return with_rests(sums([&](int i) { return x[i]; }), query, first, d, dim);
}

// The same score, to the last bit, of one item: the lanes are added in the order of the tree.
NPU_GR_INLINE float score_of(const float *query, const float *item, int64_t dim) {
  F32 x{};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) x += load(query + d) * load(item + d);
  float part[kLanes];
  store(part, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = part[2 * i] + part[2 * i + 1];
  float found = part[0];
  for (; d < dim; ++d) found = plus_product(found, query[d], item[d]);
  return found;
}

NPU_GR_INLINE void offer_all(Kept &kept, F32 found, int64_t first, int64_t k) {
  for (uint32_t bits = mask_bits(found > splat(kept.worst)); bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    if (found[lane] > kept.worst) kept.offer(found[lane], first + lane, k);
  }
}

int64_t best_items_bytes(const ItemsJob *job) {
  return job->num_queries * (static_cast<int64_t>(sizeof(Kept)) + 2 * job->k * 8);
}

// kDim: the dimension, where the compiler is to know it; 0: any.
template <int64_t kDim>
void find_best(const ItemsJob *job) {
  const int64_t num = job->num_items, dim = kDim ? kDim : job->dim, k = job->k;
  uint64_t *ranks = job->workspace;
  Kept *kept = reinterpret_cast<Kept *>(ranks + job->num_queries * 2 * k);
  for (int64_t q = 0; q < job->num_queries; ++q) {
    const int64_t *low = job->hidden ? job->hidden + job->hidden_start[q] : nullptr;
    const int64_t *high = job->hidden ? job->hidden + job->hidden_start[q + 1] : nullptr;
    kept[q] = {ranks + q * 2 * k, 0, -kInfinity, low, high};
  }
  int64_t row = 0;
  for (; row + kLanes <= num; row += kLanes) {
    const float *first = job->items + row * dim;
    offer_all(kept[0], streamed_scores(job->queries, first, dim), row, k);
    for (int64_t q = 1; q < job->num_queries; ++q)
      offer_all(kept[q], cached_scores(job->queries + q * dim, first, dim), row, k);
  }
  for (; row < num; ++row) {
    for (int64_t q = 0; q < job->num_queries; ++q) {
      const float score = score_of(job->queries + q * dim, job->items + row * dim, dim);
      if (score > kept[q].worst) kept[q].offer(score, row, k);
    }
  }
  for (int64_t q = 0; q < job->num_queries; ++q) {
    Kept &of = kept[q];
    if (of.count > k) of.shrink(k);
    const int64_t count = of.count;
    std::sort(of.ranks, of.ranks + count);
    for (int64_t i = 0; i < k; ++i) {
      job->score[q * k + i] = i < count ? from_key(static_cast<uint32_t>(of.ranks[i] >> 32)) : -kInfinity;
      job->item[q * k + i] = i < count ? static_cast<int64_t>(static_cast<uint32_t>(of.ranks[i])) : -1;
    }
  }
}

void best_items(const ItemsJob *job) {
  switch (job->dim) {
    case 32: return find_best<32>(job);
    case 64: return find_best<64>(job);
    case 128: return find_best<128>(job);
    default: return find_best<0>(job);
  }
}

int64_t item_products(const ProductsJob *job) {
  for (int64_t i = 0; i < job->num_rows; ++i) {
    const int64_t row = job->rows[i];
    if (row < 0 || row >= job->num_items) return -1;
    job->score[i] = score_of(job->query, job->items + row * job->dim, job->dim);
  }
  return 0;
}

}  // namespace items
}  // namespace

#endif
