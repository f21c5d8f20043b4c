// Random jobs for beam_topk, gathered_head and best_items on exactly allocated buffers: built by test_sanitizers.py for each
// instruction set, with sanitizers.
#include "head.h"
#include "topk.h"

#include "items.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <vector>

namespace {

std::mt19937 random_bits;

int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

float logit() {
  const int64_t kind = below(40);
  if (kind == 0) return -INFINITY;
  if (kind == 1) return 1e30f;
  if (kind == 2) return static_cast<float>(below(3)) - 1;
  return static_cast<float>(below(2000)) / 100 - 10;
}

uint16_t upper_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

template <typename T>
std::vector<T> random_numbers(int64_t count) {
  std::vector<T> made(static_cast<size_t>(count));
  for (T &x : made) {
    if constexpr (sizeof(T) == 2)
      x = upper_half(logit());
    else
      x = logit();
  }
  return made;
}

template <typename T>
int64_t one() {
  const int64_t sizes[] = {1, 2, 15, 16, 17, 63, 255, 256, 257, 300, 1031};
  const int64_t rows = below(9), columns = sizes[below(11)], first = below(columns), codes = 1 + below(columns - first);
  const int64_t width = 1 + below(3) * below(600), dim = 1 + below(70);
  const bool is_gathered = below(3) == 0;
  std::vector<int64_t> lo, degree, starts;
  std::vector<int32_t> code;
  int64_t values_count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    lo.push_back(static_cast<int64_t>(code.size()));
    starts.push_back(values_count);
    const int64_t keep = below(5);  // in four
    for (int64_t c = 0; c < codes; ++c)
      if (below(4) < keep) code.push_back(static_cast<int32_t>(c));
    degree.push_back(static_cast<int64_t>(code.size()) - lo.back());
    values_count += degree.back();
  }
  std::vector<uint8_t> allowed(code.size());
  for (uint8_t &flag : allowed) flag = below(3) > 0;
  std::vector<float> acc(static_cast<size_t>(rows)), values(static_cast<size_t>(values_count)), norm(acc.size());
  for (float &x : acc) x = below(8) ? static_cast<float>(-below(30)) : -INFINITY;
  const auto logits = random_numbers<T>(rows * columns), hidden = random_numbers<T>(rows * dim);
  const auto weight = random_numbers<T>(codes * dim);
  std::vector<float> score(static_cast<size_t>(width));
  std::vector<int64_t> parent(score.size()), edge(score.size());
  const int64_t num_columns = is_gathered ? codes : columns;
  const int64_t bytes = beam_topk_bytes(rows, num_columns, width);
  void *workspace = aligned_alloc(64, static_cast<size_t>(bytes + 63) / 64 * 64);
  const int64_t element = sizeof(T) == 2 ? kBFloat16 : kFloat32;
  if (is_gathered) {
    const HeadJob head = {hidden.data(), weight.data(), element,       dim,         dim,           rows,         dim,
                          0.5f,          lo.data(),     degree.data(), code.data(), starts.data(), values.data()};
    gathered_head(&head);
  }
  TopkJob job = {};
  job.logits = is_gathered ? nullptr : logits.data();
  job.element = element;
  job.row_stride = columns;
  job.num_rows = rows;
  job.num_columns = num_columns;
  job.first_column = is_gathered ? 0 : first;
  job.num_codes = codes;
  job.over_valid = is_gathered || below(2);
  job.scale = below(2) ? 1.0f : 0.7f;
  job.values = is_gathered ? values.data() : nullptr;
  job.value_start = is_gathered ? starts.data() : nullptr;
  job.acc = acc.data();
  job.lo = lo.data();
  job.degree = degree.data();
  job.code = code.data();
  job.allowed = below(2) ? allowed.data() : nullptr;
  job.width = width;
  job.workspace = workspace;
  job.norm = below(2) ? norm.data() : nullptr;
  job.score = score.data();
  job.parent = parent.data();
  job.edge = edge.data();
  const int64_t found = beam_topk(&job);
  for (int64_t i = 0; i < found; ++i) {
    const int64_t row = parent[i], place = edge[i] - lo[row];
    if (row < 0 || row >= rows || place < 0 || place >= degree[row] || (i && score[i] > score[i - 1])) {
      fprintf(stderr, "choice %ld of %ld is no edge or out of order\n", static_cast<long>(i), static_cast<long>(found));
      exit(1);
    }
  }
  free(workspace);
  return found;
}

int64_t best_of_items() {
  const int64_t queries = 1 + below(4), num = 1 + below(200), dim = below(3) ? 1 + below(70) : 64, k = 1 + below(300);
  std::vector<float> wanted = random_numbers<float>(queries * dim), all = random_numbers<float>(num * dim);
  std::vector<int64_t> starts{0}, hidden;
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t row = 0; row < num; ++row)
      if (below(9) == 0) hidden.push_back(row);
    starts.push_back(static_cast<int64_t>(hidden.size()));
  }
  ItemsJob job{wanted.data(), all.data(), queries, num, dim, k, starts.data(), hidden.data(), nullptr, nullptr, nullptr};
  std::vector<uint64_t> workspace(static_cast<size_t>(items::best_items_bytes(&job) / 8));
  std::vector<float> score(static_cast<size_t>(queries * k));
  std::vector<int64_t> item(static_cast<size_t>(queries * k));
  job.workspace = workspace.data();
  job.score = score.data();
  job.item = item.data();
  items::best_items(&job);
  return item[0] >= 0;
}

}  // namespace

int main(int, char **argv) {
  const int rounds = atoi(argv[1]);
  int64_t total = 0;
  for (int i = 0; i < rounds; ++i) {
    random_bits.seed(static_cast<unsigned>(i));
    total += i % 2 ? one<float>() : one<uint16_t>();
    best_of_items();
  }
  printf("%ld choices\n", static_cast<long>(total));
}
