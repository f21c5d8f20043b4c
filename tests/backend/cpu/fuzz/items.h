// best_items, against every item scored in doubles and sorted.
#include <algorithm>

#include "fuzz.h"

namespace {

void best_items() {
  const int64_t queries = 1 + below(4), items = 1 + below(200), k = 1 + below(120),
                dim = one_of({1, 16, 32, 37, 64, 128});
  const auto wanted = Matrix<float>::filled(queries, dim, dim), all = Matrix<float>::filled(items, dim, dim);
  std::vector<int64_t> starts{0}, hidden, item(static_cast<size_t>(queries * k));
  std::vector<std::vector<double>> scores(static_cast<size_t>(queries));
  std::vector<float> score(item.size());
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t row = 0; row < items; ++row) {
      double sum = -INFINITY;
      if (below(9) == 0) {
        hidden.push_back(row);
      } else {
        sum = 0;
        for (int64_t d = 0; d < dim; ++d)
          sum += static_cast<double>(wanted.data()[q * dim + d]) * all.data()[row * dim + d];
      }
      scores[static_cast<size_t>(q)].push_back(sum);
    }
    starts.push_back(static_cast<int64_t>(hidden.size()));
  }
  ItemsJob job = {wanted.data(), all.data(),    queries, items,        dim,        k,
                  starts.data(), hidden.data(), nullptr, score.data(), item.data()};
  const Memory workspace(kernels.best_items_bytes(&job));
  job.workspace = static_cast<uint64_t *>(workspace.at());
  kernels.best_items(&job);
  for (int64_t q = 0; q < queries; ++q) {
    std::vector<double> best = scores[static_cast<size_t>(q)];
    std::sort(best.begin(), best.end(), std::greater<double>());
    for (int64_t i = 0; i < k; ++i) {
      const int64_t place = q * k + i, row = item[static_cast<size_t>(place)];
      const bool is_there = i < items && best[static_cast<size_t>(i)] > -INFINITY;
      if (!is_there) {
        expect("no item", place, static_cast<double>(row), -1, 0);
        continue;
      }
      expect("score", place, score[static_cast<size_t>(place)], best[static_cast<size_t>(i)], 1e-3);
      expect("item", place, scores[static_cast<size_t>(q)].at(static_cast<size_t>(row)), best[static_cast<size_t>(i)],
             1e-3);
    }
  }
}

}  // namespace
