#include "flight.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace fef {

namespace {

constexpr int64_t kFloatsPerTask = 1 << 16;

// Cuts [0, num_items), of `width` floats each, into tasks.
void ParallelRanges(Executor& executor, int64_t num_items, int64_t width,
                    const std::function<void(int64_t begin, int64_t end)>& work) {
  const int64_t per_task = std::max<int64_t>(1, kFloatsPerTask / std::max<int64_t>(width, 1));
  ParallelFor(executor, (num_items + per_task - 1) / per_task,
              [&](int64_t task) { work(task * per_task, std::min(num_items, (task + 1) * per_task)); });
}

template <typename T>
void Append(std::string& bytes, const T* values, size_t count) {
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

template <typename T>
bool Take(const std::string& bytes, size_t& at, T* values, size_t count) {
  if (count > (bytes.size() - at) / sizeof(T)) return false;
  std::memcpy(values, bytes.data() + at, count * sizeof(T));
  at += count * sizeof(T);
  return true;
}

}  // namespace

// num_rows, number of assignments, number of (expert, count) pairs; the pairs; row_of; weight_of.
std::string Parcel::ToBytes() const {
  std::vector<int32_t> pairs;
  for (int32_t expert = 0; expert < int32_t(counts.size()); ++expert) {
    if (counts[expert] > 0) pairs.insert(pairs.end(), {expert, counts[expert]});
  }
  const int32_t head[] = {int32_t(num_rows), int32_t(row_of.size()), int32_t(pairs.size() / 2)};
  std::string bytes;
  Append(bytes, head, 3);
  Append(bytes, pairs.data(), pairs.size());
  Append(bytes, row_of.data(), row_of.size());
  Append(bytes, weight_of.data(), weight_of.size());
  return bytes;
}

bool Parcel::FromBytes(const std::string& bytes, int num_experts) {
  size_t at = 0;
  int32_t head[3];
  if (!Take(bytes, at, head, 3) || *std::min_element(head, head + 3) < 0) return false;
  const size_t num_assignments = size_t(head[1]), num_pairs = size_t(head[2]);
  if (bytes.size() != at + 8 * (num_pairs + num_assignments)) return false;
  std::vector<int32_t> pairs(2 * num_pairs);
  Take(bytes, at, pairs.data(), pairs.size());
  num_rows = head[0];
  counts.assign(num_experts, 0);
  int64_t total = 0;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    if (pairs[i] < 0 || pairs[i] >= num_experts || pairs[i + 1] < 0) return false;
    counts[pairs[i]] = pairs[i + 1];
    total += pairs[i + 1];
  }
  row_of.resize(num_assignments);
  weight_of.resize(num_assignments);
  Take(bytes, at, row_of.data(), num_assignments);
  Take(bytes, at, weight_of.data(), num_assignments);
  return total == int64_t(num_assignments) && std::accumulate(counts.begin(), counts.end(), int64_t{0}) == total &&
         std::all_of(row_of.begin(), row_of.end(), [&](int32_t row) { return row >= 0 && row < num_rows; });
}

std::vector<Sending> SortByHost(const Assignments& assignments, const std::vector<int>& host_of_expert, int num_hosts,
                                bool is_deduplicated) {
  const int num_experts = int(host_of_expert.size());
  std::vector<Sending> sendings(num_hosts);
  for (Sending& sending : sendings) sending.parcel.counts.assign(num_experts, 0);
  std::vector<std::vector<int32_t>> row_of_token(num_hosts);  // -1: none yet
  int32_t assignment = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    const int32_t end = assignment + assignments.counts[expert];
    if (!assignments.is_visiting[expert]) {
      assignment = end;
      continue;
    }
    const int host = host_of_expert[expert];
    Sending& sending = sendings[host];
    Parcel& parcel = sending.parcel;
    parcel.counts[expert] = assignments.counts[expert];
    for (; assignment < end; ++assignment) {
      const int32_t token = assignments.token[assignment];
      int32_t row = int32_t(parcel.num_rows);
      if (is_deduplicated) {
        std::vector<int32_t>& rows = row_of_token[host];
        if (rows.empty()) rows.assign(assignments.num_tokens, -1);
        if (rows[token] < 0) rows[token] = row;
        row = rows[token];
      }
      if (row == parcel.num_rows) {
        ++parcel.num_rows;
        sending.token_of.push_back(token);
      }
      parcel.row_of.push_back(row);
      parcel.weight_of.push_back(assignments.weight[assignment]);
      sending.assignment_of.push_back(assignment);
    }
  }
  return sendings;
}

std::vector<Visit> VisitsOf(const Flight& flight, const std::vector<int>& experts, int rank, int64_t first_row) {
  const int num_guests = int(flight.guests.size());
  std::vector<std::vector<int64_t>> first(num_guests);  // of each expert's assignments in a guest's parcel
  for (int guest = 0; guest < num_guests; ++guest) {
    const std::vector<int32_t>& counts = flight.guests[guest].parcel.counts;
    if (guest == rank || counts.empty()) continue;
    first[guest].assign(counts.size(), 0);
    std::partial_sum(counts.begin(), counts.end() - 1, first[guest].begin() + 1);
  }
  std::vector<Visit> visits;
  for (int expert : experts) {
    for (int guest = 0; guest < num_guests; ++guest) {
      const int64_t count = first[guest].empty() ? 0 : flight.guests[guest].parcel.counts[expert];
      if (count == 0) continue;
      visits.push_back({expert, guest, first_row, first[guest][expert], count});
      first_row += count;
    }
  }
  return visits;
}

void CopyRows(Executor& executor, const std::vector<RowCopy>& copies, int64_t width) {
  ParallelRanges(executor, int64_t(copies.size()), width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowCopy& copy = copies[i];
      for (int64_t k = 0; k < width; ++k) copy.to[k] = copy.factor * copy.from[k];
    }
  });
}

const float* VisitingRow(const Flight& flight, const Visit& visit, int64_t i) {
  const Flight::Guest& guest = flight.guests[visit.guest];
  const int64_t row = guest.parcel.row_of[visit.first_assignment + i];
  return guest.own_rows != nullptr ? guest.own_rows + guest.token_of[row] * flight.width
                                   : guest.fetched.get() + row * flight.width;
}

void AppendCopies(const Flight& flight, const Visit& visit, float* array, bool is_weighted,
                  std::vector<RowCopy>* copies) {
  const std::vector<float>& weight_of = flight.guests[visit.guest].parcel.weight_of;
  for (int64_t i = 0; i < visit.num_assignments; ++i) {
    copies->push_back({VisitingRow(flight, visit, i), array + (visit.first_row + i) * flight.width,
                       is_weighted ? weight_of[visit.first_assignment + i] : 1.0f});
  }
}

void SumTerms(Executor& executor, const std::vector<Term>& terms, int64_t num_targets, int64_t width, float* to) {
  std::vector<int64_t> end_of(num_targets + 1, 0);  // after the loop below: where each target's terms end
  for (const Term& term : terms) ++end_of[term.target + 1];
  std::partial_sum(end_of.begin(), end_of.end(), end_of.begin());
  std::vector<int64_t> order(terms.size());
  for (size_t i = 0; i < terms.size(); ++i) order[end_of[terms[i].target]++] = int64_t(i);
  ParallelRanges(executor, num_targets, width, [&](int64_t begin, int64_t end) {
    for (int64_t target = begin; target < end; ++target) {
      float* sum = to + target * width;
      std::fill_n(sum, width, 0.0f);
      for (int64_t i = target == 0 ? 0 : end_of[target - 1]; i < end_of[target]; ++i) {
        const Term& term = terms[order[i]];
        for (int64_t k = 0; k < width; ++k) sum[k] += term.factor * term.row[k];
      }
    }
  });
}

void DotProducts(Executor& executor, const std::vector<DotProduct>& products, int64_t width) {
  ParallelRanges(executor, int64_t(products.size()), width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const DotProduct& product = products[i];
      float sum = 0;
      for (int64_t k = 0; k < width; ++k) sum += product.a[k] * product.b[k];
      *product.to = sum;
    }
  });
}

}  // namespace fef
