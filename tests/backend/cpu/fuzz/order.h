// blend_sums and neighbour_sums, against their terms in doubles; and item_products, against sums in doubles.
#include "fuzz.h"

namespace {

struct Counted {  // [I, width] rows, ascending behind padding, and a number of each
  Counted(int64_t items, int64_t width, float lowest, float highest)
      : rows(items * width * 4), values(Matrix<float>::contiguous(items, width)), width(width) {
    for (int64_t i = 0; i < items; i++) {
      int64_t row = items;
      for (int64_t s = width; s-- > 0;) {
        row = row > 0 ? row - 1 - below(3) : -1;
        const bool is_there = row >= 0 && below(8);
        at(i, s) = is_there ? static_cast<int32_t>(row) : -1;
        values.at(i, s) = is_there ? lowest + (highest - lowest) * static_cast<float>(below(1000)) / 1000 : 0;
        if (!is_there) row = -1;
      }
    }
  }
  int32_t &at(int64_t item, int64_t s) const { return static_cast<int32_t *>(rows.at())[item * width + s]; }
  double of(int64_t item, int64_t row, double other) const {
    for (int64_t s = 0; s < width; s++)
      if (at(item, s) == row) return values(item, s);
    return other;
  }

  Memory rows;
  Matrix<float> values;
  int64_t width;
};

void blend_sums() {
  const int64_t items = 1 + below(30), count = below(40), num_recent = below(7);
  const int64_t num_followed = below(num_recent + 1), num_liked = below(num_recent + 1);
  const bool is_linear = below(2);
  const int64_t is_summed = is_linear || below(2);
  const Counted follows(items, below(9), -6, -2), alike(items, below(9), is_linear ? -2 : 0.01f, 2);
  const auto rest = Matrix<float>::contiguous(1, items + 1), shares = Matrix<float>::contiguous(1, items + 1);
  for (int64_t i = 0; i <= items; i++) rest.at(0, i) = fabsf(rest.at(0, i)) + 0.01f;
  const BlendTables tables = {static_cast<int32_t *>(follows.rows.at()),
                              follows.values.data(),
                              static_cast<int32_t *>(alike.rows.at()),
                              alike.values.data(),
                              rest.data(),
                              shares.data(),
                              items,
                              follows.width,
                              alike.width,
                              is_summed,
                              0.6,
                              is_linear ? 0. : 100.,
                              0.7f,
                              -0.3f,
                              0.5f,
                              0.9f,
                              -0.2f,
                              -6};
  const auto drawn = [&](int64_t n) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < n; i++) rows.push_back(below(20) ? below(items + 2) : one_of({-1, INT64_MAX, INT64_MIN}));
    return rows;
  };
  const auto held = [](const std::vector<int64_t> &rows) {
    Memory made(static_cast<int64_t>(rows.size()) * 8);
    if (!rows.empty()) memcpy(made.at(), rows.data(), rows.size() * 8);
    return made;
  };
  const std::vector<int64_t> recent = drawn(num_recent), candidates = drawn(count);
  const Memory recent_at = held(recent), candidates_at = held(candidates);
  const auto given = Matrix<float>::contiguous(3, count);
  const bool is_there = below(4);
  const Memory sums(count * 4);
  OrderJob job = {&tables,
                  static_cast<int64_t *>(recent_at.at()),
                  static_cast<int64_t *>(candidates_at.at()),
                  is_there ? &given.at(0, 0) : nullptr,
                  &given.at(1, 0),
                  is_there ? &given.at(2, 0) : nullptr,
                  num_recent,
                  count,
                  num_followed,
                  num_liked,
                  nullptr,
                  static_cast<float *>(sums.at())};
  const Memory workspace(kernels.order_bytes(&job));
  job.workspace = workspace.at();
  kernels.blend_sums(&job);
  const Memory of_all(8 * (1 + items));
  auto *of_row = static_cast<double *>(of_all.at()) + 1;
  kernels.neighbour_sums(&job, of_row - 1);

  const auto known = [&](int64_t row) { return row >= 0 && row < items ? row : items; };
  std::vector<double> m, n;
  double mean_m = 0, mean_n = 0, mean_p = 0, num_known = 0;
  for (int64_t c = 0; c < count; c++) {
    const int64_t row = candidates[static_cast<size_t>(c)];
    const double share = shares(0, known(row));
    double mixed = 0, weights = 0, similarity = 0, distinct = 0;
    for (int64_t e = 0; e < num_followed; e++) {
      const int64_t item = known(recent[static_cast<size_t>(num_recent - 1 - e)]);
      double next = rest(0, item) * exp(share);
      if (item < items) {
        const double kept = follows.of(item, row, 1);
        if (kept < 1) next = exp(kept);
      }
      mixed += pow(0.6, static_cast<double>(e)) * next;
      weights += pow(0.6, static_cast<double>(e));
    }
    for (int64_t e = num_recent - num_liked; e < num_recent; e++) {
      const int64_t item = known(recent[static_cast<size_t>(e)]);
      bool is_first = item < items;
      for (int64_t b = num_recent - num_liked; b < e; b++)
        is_first &= recent[static_cast<size_t>(b)] != recent[static_cast<size_t>(e)];
      if (!is_first) continue;
      distinct++;
      similarity += alike.of(item, row, 0);
    }
    m.push_back(num_followed ? log(mixed / weights) : share);
    if (known(row) < items) expect("sum of similarities", c, of_row[row], similarity, 1e-6);
    if (is_linear)
      n.push_back(similarity);
    else
      n.push_back(similarity > 0 ? log1p(100 * similarity / (is_summed ? 1 : distinct)) : 0);
    if (known(row) < items) mean_m += m.back(), mean_n += n.back(), mean_p += share, num_known++;
  }
  for (int64_t c = 0; c < count; c++) {
    const bool is_new = known(candidates[static_cast<size_t>(c)]) == items && num_known > 0;
    const double of_m = is_new ? mean_m / num_known : m[static_cast<size_t>(c)];
    const double of_n = is_new ? mean_n / num_known : n[static_cast<size_t>(c)];
    const double of_p = is_new ? mean_p / num_known : shares(0, known(candidates[static_cast<size_t>(c)]));
    const double others = is_there ? 0.7 * given(0, c) - 6 * given(2, c) : 0;
    expect("sum", c, static_cast<float *>(sums.at())[c],
           others - 0.3 * given(1, c) + 0.5 * of_m + 0.9 * of_n - 0.2 * of_p, 1e-4);
  }
}

void item_products() {
  const int64_t items = 1 + below(40), count = below(30), dim = one_of({1, 16, 32, 37, 64, 128});
  const auto query = Matrix<float>::contiguous(1, dim), table = Matrix<float>::contiguous(items, dim);
  const Memory rows(count * 8), score(count * 4);
  auto *row = static_cast<int64_t *>(rows.at());
  for (int64_t i = 0; i < count; i++) row[i] = below(items);
  const ProductsJob job = {query.data(), table.data(), items, dim, row, count, static_cast<float *>(score.at())};
  if (kernels.item_products(&job)) fail("products", 0, -1, 0, 0);
  for (int64_t i = 0; i < count; i++) {
    double sum = 0;
    for (int64_t d = 0; d < dim; d++) sum += query(0, d) * table(row[i], d);
    expect("product", i, job.score[i], sum, 1e-3);
  }
  if (!count) return;
  row[below(count)] = one_of({-1, items, INT64_MAX, INT64_MIN});
  if (kernels.item_products(&job) != -1) fail("a row that is none is rejected", 0, 0, -1, 0);
}

}  // namespace
