// beam_topk and gathered_head, against every edge scored in doubles and sorted.
#include <algorithm>

#include "fuzz.h"

namespace {

float logit() {
  const int64_t kind = below(40);
  if (kind == 0) return -INFINITY;
  if (kind == 1) return 1e30f;
  if (kind == 2) return static_cast<float>(below(3)) - 1;
  return static_cast<float>(below(2000)) / 100 - 10;
}

template <typename T>
class Selecting {
 public:
  void run() {
    std::vector<float> score(static_cast<size_t>(width_));
    std::vector<int64_t> parent(score.size()), edge(score.size());
    const Memory workspace(kernels.beam_topk_bytes(rows_, num_columns_, width_));
    std::vector<float> values(static_cast<size_t>(values_count_)), norm(static_cast<size_t>(rows_));
    if (is_gathered_) {
      const HeadJob head = {hidden_.data(), weight_.data(), kElement<T>,  hidden_.stride(), weight_.stride(),
                            rows_,          dim_,           0.5f,         lo_.data(),       degree_.data(),
                            code_.data(),   starts_.data(), values.data()};
      kernels.gathered_head(&head);
      check_head(values);
    }
    TopkJob job = {};
    job.logits = is_gathered_ ? nullptr : logits_.data();
    job.element = kElement<T>;
    job.row_stride = logits_.stride();
    job.num_rows = rows_;
    job.num_columns = num_columns_;
    job.first_column = first_;
    job.num_codes = codes_;
    job.over_valid = over_valid_;
    job.scale = scale_;
    job.values = is_gathered_ ? values.data() : nullptr;
    job.value_start = is_gathered_ ? starts_.data() : nullptr;
    job.acc = acc_.data();
    job.lo = lo_.data();
    job.degree = degree_.data();
    job.code = code_.data();
    job.allowed = is_filtered_ ? allowed_.data() : nullptr;
    job.width = width_;
    job.workspace = workspace.at();
    job.norm = below(2) ? norm.data() : nullptr;
    job.score = score.data();
    job.parent = parent.data();
    job.edge = edge.data();
    score_all(values);  // the kernel writes over the values
    const int64_t found = kernels.beam_topk(&job);
    expect("choices", 0, static_cast<double>(found),
           static_cast<double>(std::min<size_t>(scores_.size(), score.size())), 0);
    std::vector<double> best;
    for (const Scored &one : scores_) best.push_back(one.score);
    std::sort(best.begin(), best.end(), std::greater<double>());
    std::vector<char> is_taken(code_.size());
    for (int64_t i = 0; i < found; ++i) {
      const auto at =
          std::find_if(scores_.begin(), scores_.end(), [&](const Scored &one) { return one.edge == edge[i]; });
      if (at == scores_.end() || at->row != parent[i] || is_taken[static_cast<size_t>(edge[i])]++)
        fail("a choice is no valid edge, or comes twice", i, static_cast<double>(edge[i]), 0, 0);
      expect("score", i, score[i], at->score, at->limit);
      expect("order", i, score[i], best[static_cast<size_t>(i)], at->limit + most_limit_);
    }
  }

 private:
  struct Scored {
    int64_t row, edge;
    double score, limit;
  };

  static Matrix<T> logits(int64_t rows, int64_t columns) {
    Matrix<T> made(rows, columns, stride_of(columns));
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < columns; i++) made.at(r, i) = rounded<T>(logit());
    return made;
  }

  void add_rows() {
    for (int64_t row = 0; row < rows_; ++row) {
      lo_.push_back(static_cast<int64_t>(code_.size()));
      starts_.push_back(values_count_);
      const int64_t keep = below(5);  // in four
      for (int64_t c = 0; c < codes_; ++c)
        if (below(4) < keep) code_.push_back(static_cast<int32_t>(c));
      degree_.push_back(static_cast<int64_t>(code_.size()) - lo_.back());
      values_count_ += degree_.back();
      acc_.push_back(below(8) ? static_cast<float>(-below(30)) : -INFINITY);
    }
    for (size_t i = 0; i < code_.size(); i++) allowed_.push_back(below(3) > 0);
  }

  void check_head(const std::vector<float> &values) const {
    for (int64_t row = 0; row < rows_; ++row)
      for (int64_t j = 0; j < degree_[row]; ++j) {
        double sum = 0, size = 0;
        for (int64_t d = 0; d < dim_; ++d) {
          const double term = hidden_(row, d) * weight_(code_[lo_[row] + j], d);
          sum += term;
          size += fabs(term);
        }
        expect("head", row, values[starts_[row] + j], 0.5 * sum, 1e-5 * size + 1e-7);
      }
  }

  // Every edge that may be chosen; a row's norm is over its columns or its allowed edges.
  void score_all(const std::vector<float> &values) {
    for (int64_t row = 0; row < rows_; ++row) {
      const auto value = [&](int64_t j) {
        return is_gathered_ ? values[starts_[row] + j] : wide(logits_.at(row, first_ + code_[lo_[row] + j])) * scale_;
      };
      const auto is_allowed = [&](int64_t j) { return !is_filtered_ || allowed_[lo_[row] + j]; };
      std::vector<double> all;
      for (int64_t i = 0; !over_valid_ && i < num_columns_; ++i) all.push_back(wide(logits_.at(row, i)) * scale_);
      for (int64_t j = 0; over_valid_ && j < degree_[row]; ++j)
        if (is_allowed(j)) all.push_back(value(j));
      const double peak = all.empty() ? -INFINITY : *std::max_element(all.begin(), all.end());
      if (peak == -INFINITY || acc_[row] == -INFINITY) continue;
      double sum = 0;
      for (double x : all) sum += exp(x - peak);
      const double norm = peak + log(sum);
      for (int64_t j = 0; j < degree_[row]; ++j) {
        if (!is_allowed(j) || value(j) == -INFINITY) continue;
        const double limit = 1e-5 + 5e-7 * (fabs(norm) + fabs(value(j)) + fabs(acc_[row]));
        most_limit_ = std::max(most_limit_, limit);
        scores_.push_back({row, lo_[row] + j, value(j) - norm + acc_[row], limit});
      }
    }
  }

  bool is_gathered_ = below(3) == 0, over_valid_ = is_gathered_ || below(2), is_filtered_ = below(2);
  bool is_huge_ = below(40) == 0;
  int64_t rows_ = below(9), columns_ = is_huge_ ? 20000 : one_of({1, 2, 15, 16, 17, 63, 255, 256, 257, 300, 1031});
  int64_t first_ = is_gathered_ ? 0 : below(columns_), codes_ = 1 + below(columns_ - first_), dim_ = 1 + below(70);
  int64_t width_ = 1 + below(3) * below(600), num_columns_ = is_gathered_ ? codes_ : columns_, values_count_ = 0;
  float scale_ = is_gathered_ || below(2) ? 1.0f : 0.7f;
  Matrix<T> logits_ = logits(rows_, is_gathered_ ? 0 : columns_);
  Matrix<T> hidden_ = Matrix<T>::filled(rows_, dim_, stride_of(dim_));
  Matrix<T> weight_ = Matrix<T>::filled(is_gathered_ ? codes_ : 0, dim_, stride_of(dim_));
  std::vector<int64_t> lo_, degree_, starts_;
  std::vector<int32_t> code_;
  std::vector<uint8_t> allowed_;
  std::vector<float> acc_;
  std::vector<Scored> scores_;
  double most_limit_ = 0;

 public:
  Selecting() { add_rows(); }
};

template <typename T>
void select() {
  Selecting<T>().run();
}

}  // namespace
