// A flight: token rows that visit the homes of their experts in one pass through a layer, and what comes back of them.
//
// Each member sends each host one parcel: the rows that experts there are to see, and which expert sees which row with
// which weight. A parcel may be empty; when all have come, a home knows its visitors. A member's rows for experts of
// other members of its own host are a parcel like any other, but stay where they are.
//
// Here is what a flight knows and computes; the way of its messages is in domain_tokens.cc.
#ifndef FEF_FLIGHT_H_
#define FEF_FLIGHT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "floats.h"
#include "parallel.h"
#include "status.h"

namespace fef {

// A member's assignments, sorted by expert, from the front.
struct Assignments {
  const int32_t* token = nullptr;        // (N,)
  const float* weight = nullptr;         // (N,)
  const int32_t* counts = nullptr;       // (E,)
  const int32_t* is_visiting = nullptr;  // (E,), whether the rows go to the expert
  int64_t num_tokens = 0;                // T
};

struct Parcel {
  int64_t num_rows = 0;
  std::vector<int32_t> counts;   // (E,), assignments
  std::vector<int32_t> row_of;   // of each assignment, sorted by expert: which of the rows
  std::vector<float> weight_of;  // likewise

  std::string ToBytes() const;
  // False if the bytes are no parcel of a table with so many experts.
  bool FromBytes(const std::string& bytes, int num_experts);
};

// What a member sends to one host.
struct Sending {
  Parcel parcel;
  std::vector<int32_t> token_of;       // of each row
  std::vector<int32_t> assignment_of;  // of each of the parcel's assignments: its number among the member's
};

// Of each host, from the assignments whose experts are visited. With is_deduplicated a token's row goes to a host once,
// however many of its experts live there; rows lie in the order in which the sorted assignments name them first.
std::vector<Sending> SortByHost(const Assignments& assignments, const std::vector<int>& host_of_expert, int num_hosts,
                                bool is_deduplicated);

struct FlightKey {
  uint64_t version = 0;
  int microbatch = 0, layer = 0;
  bool is_backward = false;
  int use = 0;  // when a layer is used several times, the members' n-th times meet

  auto tie() const { return std::tie(version, microbatch, layer, is_backward, use); }
  bool operator<(const FlightKey& other) const { return tie() < other.tie(); }
};

// Assignments that one expert of a member sees of one guest.
struct Visit {
  int expert = 0;
  int guest = 0;              // rank
  int64_t first_row = 0;      // in the member's array
  int64_t first_assignment = 0, num_assignments = 0;  // in the guest's parcel
};

struct Flight {
  // A member with what it sends to this host, and what comes back.
  struct Guest {
    bool is_told = false, is_here = false;  // the parcel; its rows
    Parcel parcel;
    FloatArray fetched;  // the rows of another host's member, one after the other
    const float* own_rows = nullptr;   // those of one of this host lie in its own array, at token_of
    std::vector<int32_t> token_of;
    uint64_t served_by = 0;  // bit per rank of this host whose experts see them
    bool is_summing = false, is_summed = false;
    FloatArray results;  // a row for each of its rows
    std::vector<float> dots;           // of each assignment, in a backward pass
  };
  // What a member of this host has made of its visitors' rows.
  struct Service {
    bool is_done = false;
    std::vector<Visit> visits;
    const float* rows = nullptr;  // (M, D)
    const float* dots = nullptr;  // (M,), in a backward pass
    bool is_weighted = false;     // whether the sum takes the assignments' weights
  };
  // Rows of a member of this host that went to another one.
  struct Trip {
    Sending sending;
    FloatArray outbox;
    bool is_back = false;
    FloatArray results;
    std::vector<float> dots;
  };

  FlightKey key;
  int64_t width = 0;                           // D
  std::vector<Guest> guests;                   // by rank
  std::vector<Service> services;               // by rank
  std::map<std::pair<int, int>, Trip> trips;   // by rank and host
  uint64_t left = 0;                           // bit per rank of this host
  uint64_t done_with = 0;                      // bit per rank of another host: it has its results
  Status failure;
};

// Of a member's experts, by expert, then guest; its array holds visitors from first_row on.
std::vector<Visit> VisitsOf(const Flight& flight, const std::vector<int>& experts, int rank, int64_t first_row);

struct RowCopy {
  const float* from;
  float* to;
  float factor;
};
void CopyRows(Executor& executor, const std::vector<RowCopy>& copies, int64_t width);

// The row that a visit's i-th assignment has brought.
const float* VisitingRow(const Flight& flight, const Visit& visit, int64_t i);

// Where a visit's rows come from and go to; is_weighted: times the assignments' weights.
void AppendCopies(const Flight& flight, const Visit& visit, float* array, bool is_weighted, std::vector<RowCopy>* copies);

struct Term {
  int32_t target;
  float factor;
  const float* row;
};
// to[target] = the sum of factor * row over its terms, in their order; 0 without any.
void SumTerms(Executor& executor, const std::vector<Term>& terms, int64_t num_targets, int64_t width, float* to);

struct DotProduct {
  const float *a, *b;
  float* to;
};
void DotProducts(Executor& executor, const std::vector<DotProduct>& products, int64_t width);

}  // namespace fef

#endif  // FEF_FLIGHT_H_
