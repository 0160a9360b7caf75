// The way of token rows through a domain: sent in parcels, read by the homes, and their results read back.
#include <algorithm>
#include <cstring>
#include <utility>

#include "domain.h"
#include "floats.h"

namespace fef {

namespace {

constexpr uint64_t kMaxWidth = 1 << 24;

FlightKey KeyOf(const Message& message) {
  const Version version{message.incarnation, message.counter, message.microbatch};
  return {version.key(), message.microbatch, message.layer, message.is_backward != 0, message.use};
}

}  // namespace

Message Domain::About(Kind kind, const FlightKey& key) const {
  Message message = About(kind, Version{incarnation_, int32_t(uint32_t(key.version)), key.microbatch});
  message.layer = key.layer;
  message.is_backward = key.is_backward;
  message.use = key.use;
  return message;
}

std::string Domain::WhereOf(const FlightKey& key) const {
  return "tokens: " + Where({incarnation_, int32_t(uint32_t(key.version)), key.microbatch}) + ", layer " +
         std::to_string(key.layer) + (key.is_backward ? ", backward" : "");
}

std::shared_ptr<Flight> Domain::FlightOf(const FlightKey& key) {
  std::shared_ptr<Flight>& flight = flights_[key];
  if (flight == nullptr) {
    flight = std::make_shared<Flight>();
    flight->key = key;
    flight->guests.resize(shape_.members);
    flight->services.resize(shape_.members);
  }
  return flight;
}

Status Domain::Depart(const Version& version, int rank, int layer, bool is_backward, const Assignments& assignments,
                      bool is_deduplicated, const float* rows, int64_t width, Executor& executor,
                      std::shared_ptr<Flight>* flight) {
  std::vector<int> host_of_expert(shape_.experts);
  for (int expert = 0; expert < shape_.experts; ++expert) host_of_expert[expert] = this->host_of_expert(expert);
  std::vector<Sending> sendings = SortByHost(assignments, host_of_expert, num_hosts_, is_deduplicated);
  std::vector<FloatArray> outboxes(num_hosts_);
  std::vector<std::string> parcels(num_hosts_);
  std::vector<RowCopy> copies;
  for (int host : hosts_) {
    if (host == me_) continue;
    parcels[host] = sendings[host].parcel.ToBytes();
    const std::vector<int32_t>& tokens = sendings[host].token_of;
    if (tokens.empty()) continue;
    outboxes[host] = Allocate(tokens.size() * width);
    if (outboxes[host] == nullptr) return NoMemory("tokens: table " + shape_.name, tokens.size() * width);
    for (size_t i = 0; i < tokens.size(); ++i) {
      copies.push_back({rows + tokens[i] * width, outboxes[host].get() + int64_t(i) * width, 1.0f});
    }
  }
  CopyRows(executor, copies, width);

  std::lock_guard<std::mutex> lock(mutex_);
  VersionState* state;
  if (Status status = FindVersion(version, "tokens", &state); !status.ok()) return status;
  if (layer < 0 || layer >= shape_.layers) {
    return Status::Error(Code::kInvalidArgument, "tokens: ", Where(version), ", layer ", layer,
                         " is out of range: the table has ", shape_.layers);
  }
  const FlightKey key{version.key(), version.microbatch, layer, is_backward,
                      state->flights[{layer, version.microbatch, is_backward, rank}]++};
  *flight = FlightOf(key);
  Flight& joined = **flight;
  if (joined.width != 0 && joined.width != width) {
    return Status::Error(Code::kInvalidArgument, WhereOf(key), ": rows of ", width, " floats, another member's have ",
                         joined.width);
  }
  joined.width = width;
  for (int host : hosts_) {
    CountSending(*state, rank, key, host, sendings[host].parcel, parcels[host].size());
    if (host == me_) {
      Flight::Guest& guest = joined.guests[rank];
      guest.own_rows = rows;
      guest.token_of = sendings[host].token_of;
      Welcome(guest, rank, sendings[host].parcel);
      guest.is_here = true;
    } else {
      Message message = About(Kind::kTokens, key);
      message.rank = rank;
      message.offset = uint64_t(width);
      neighbourhood_.fabric->Send(host, message, parcels[host]);
    }
    Flight::Trip& trip = joined.trips[{rank, host}];
    trip.is_back = sendings[host].parcel.num_rows == 0;
    trip.sending = std::move(sendings[host]);
    trip.outbox = std::move(outboxes[host]);
  }
  changed_.notify_all();
  return Status::Ok();
}

// A row counts when it goes and when its result comes back, at the first expert that it goes to; what is said of the rows
// at the first expert of all.
void Domain::CountSending(VersionState& state, int rank, const FlightKey& key, int host, const Parcel& parcel,
                          size_t parcel_bytes) const {
  size_t assignment = 0;
  int32_t next_row = 0;
  int first_expert = -1;
  for (int expert = 0; expert < shape_.experts; ++expert) {
    int num_rows = 0;
    for (const size_t end = assignment + parcel.counts[expert]; assignment < end; ++assignment) {
      if (parcel.row_of[assignment] != next_row) continue;
      ++next_row;
      ++num_rows;
    }
    if (num_rows > 0) Count(state, rank, key.layer, kTokens, expert, 2 * num_rows);
    if (first_expert < 0 && host_of_expert(expert) == host) first_expert = expert;
  }
  if (host == me_ || first_expert < 0) return;
  const size_t num_dots = key.is_backward ? parcel.row_of.size() : 0;
  Count(state, rank, key.layer, kMetadata, first_expert, int(parcel_bytes + num_dots * sizeof(float)));
}

// Notes whose experts the guest's rows are to see.
void Domain::Welcome(Flight::Guest& guest, int rank, const Parcel& parcel) const {
  guest.parcel = parcel;
  guest.served_by = 0;
  for (int expert = 0; expert < shape_.experts; ++expert) {
    const int home = shape_.home[expert];
    if (parcel.counts[expert] > 0 && is_here(home) && home != rank) guest.served_by |= 1ull << home;
  }
  guest.is_told = true;
}

std::optional<Status> Domain::FlightFailure(const Flight& flight) const {
  if (!is_open_) return Status::Error(Code::kPoolClosed, WhereOf(flight.key), ": the pool was closed");
  if (!flight.failure.ok()) return flight.failure;
  return std::nullopt;
}

Status Domain::Absent(const Flight& flight, int host) const {
  return Status::Error(Code::kPeerLost, WhereOf(flight.key), ": ", Gone(host));
}

std::optional<Status> Domain::Arrived(const Flight& flight, int rank) const {
  if (const auto failure = FlightFailure(flight)) return failure;
  for (int other = 0; other < shape_.members; ++other) {
    const Flight::Guest& guest = flight.guests[other];
    if (other == rank || (guest.is_told && (guest.is_here || !(guest.served_by >> rank & 1)))) continue;
    if (const int host = host_of_rank_[other]; !lost_[host].empty()) return Absent(flight, host);
    return std::nullopt;
  }
  return Status::Ok();
}

std::optional<Status> Domain::Returned(const Flight& flight, int rank) const {
  if (const auto failure = FlightFailure(flight)) return failure;
  for (int host : hosts_) {
    const Flight::Trip& trip = flight.trips.at({rank, host});
    if (host == me_ ? trip.is_back || flight.guests[rank].is_summed : trip.is_back) continue;
    if (!lost_[host].empty()) return Absent(flight, host);
    return std::nullopt;
  }
  const bool is_served = std::all_of(flight.guests.begin(), flight.guests.end(), [&](const Flight::Guest& guest) {
    return !(guest.served_by >> rank & 1) || guest.is_summed;
  });
  if (is_served) return Status::Ok();
  return std::nullopt;
}

std::string Domain::DescribeFlight(const Flight& flight, int rank) const {
  for (int other = 0; other < shape_.members; ++other) {
    const Flight::Guest& guest = flight.guests[other];
    if (other == rank) continue;
    if (!guest.is_told) return WhereOf(flight.key) + ": rank " + std::to_string(other) + " has not sent its rows";
    if (guest.served_by >> rank & 1 && !guest.is_here) {
      return WhereOf(flight.key) + ": " + Place(host_of_rank_[other]) + " has not sent the " +
             std::to_string(guest.parcel.num_rows * flight.width * int64_t(sizeof(float))) + " bytes of rank " +
             std::to_string(other) + "'s rows";
    }
  }
  for (int host : hosts_) {
    const Flight::Trip& trip = flight.trips.at({rank, host});
    if (trip.is_back || (host == me_ && flight.guests[rank].is_summed)) continue;
    return WhereOf(flight.key) + ": " + Place(host) + " has not sent back " +
           std::to_string(trip.sending.parcel.num_rows) + " rows";
  }
  return WhereOf(flight.key) + ": other members of this host have not computed their visitors' rows";
}

std::vector<int> Domain::ExpertsOf(int rank) const {
  std::vector<int> experts;
  for (int expert = 0; expert < shape_.experts; ++expert) {
    if (shape_.home[expert] == rank) experts.push_back(expert);
  }
  return experts;
}

void Domain::Serve(const std::shared_ptr<Flight>& flight, int rank, Flight::Service service, Executor& executor) {
  std::vector<int> to_sum;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    flight->services[rank] = std::move(service);
    flight->services[rank].is_done = true;
    for (int other = 0; other < shape_.members; ++other) {
      Flight::Guest& guest = flight->guests[other];
      bool is_complete = guest.served_by != 0;
      for (int server : local_ranks_) is_complete &= !(guest.served_by >> server & 1) || flight->services[server].is_done;
      if (!is_complete || std::exchange(guest.is_summing, true)) continue;
      to_sum.push_back(other);
    }
  }
  for (int other : to_sum) {
    const Status status = SumResults(*flight, other, executor);
    std::lock_guard<std::mutex> lock(mutex_);
    Flight::Guest& guest = flight->guests[other];
    guest.is_summed = status.ok();
    if (!status.ok()) flight->failure = status;
    if (status.ok() && !is_here(other)) {
      Message message = About(Kind::kServed, flight->key);
      message.rank = other;
      const char* dots = reinterpret_cast<const char*>(guest.dots.data());
      neighbourhood_.fabric->Send(host_of_rank_[other], message, {dots, guest.dots.size() * sizeof(float)});
    }
    changed_.notify_all();
  }
}

// Adds up what this host's members have made of a guest's rows, member by member.
Status Domain::SumResults(Flight& flight, int rank, Executor& executor) const {
  Flight::Guest& guest = flight.guests[rank];
  guest.results = Allocate(guest.parcel.num_rows * flight.width);
  if (guest.results == nullptr) return NoMemory(WhereOf(flight.key), guest.parcel.num_rows * flight.width);
  std::vector<Term> terms;
  for (int server : local_ranks_) {
    if (!(guest.served_by >> server & 1)) continue;
    const Flight::Service& service = flight.services[server];
    if (service.dots != nullptr) guest.dots.resize(guest.parcel.row_of.size());
    for (const Visit& visit : service.visits) {
      if (visit.guest != rank) continue;
      for (int64_t i = 0; i < visit.num_assignments; ++i) {
        const int64_t assignment = visit.first_assignment + i, row = visit.first_row + i;
        const float factor = service.is_weighted ? guest.parcel.weight_of[assignment] : 1.0f;
        terms.push_back({guest.parcel.row_of[assignment], factor, service.rows + row * flight.width});
        if (service.dots != nullptr) guest.dots[assignment] = service.dots[row];
      }
    }
  }
  SumTerms(executor, terms, guest.parcel.num_rows, flight.width, guest.results.get());
  return Status::Ok();
}

void Domain::LeaveFlight(const std::shared_ptr<Flight>& flight, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  flight->left |= 1ull << rank;
  EraseIfOver(flight);
}

void Domain::EraseIfOver(const std::shared_ptr<Flight>& flight) {
  if (flight->left != all_local_) return;
  for (int rank = 0; rank < shape_.members; ++rank) {
    const Flight::Guest& guest = flight->guests[rank];
    if (!is_here(rank) && guest.served_by != 0 && !(flight->done_with >> rank & 1)) return;
  }
  flights_.erase(flight->key);
}

void Domain::ForgetFlights(uint64_t version_key) {
  for (auto it = flights_.begin(); it != flights_.end();) it = it->first.version == version_key ? flights_.erase(it) : ++it;
}

void Domain::OnFlight(const Message& message, const std::string& payload) {
  const bool is_own = message.kind == Kind::kServed;  // about a row of one of this host's members
  const bool is_valid = is_member(message.rank, is_own ? me_ : message.host) && message.layer >= 0 &&
                        message.layer < shape_.layers;
  if (!is_valid) {
    failure_ = Status::Error(Code::kInvalidArgument, "tokens: table ", shape_.name, ": ", Place(message.host),
                             " speaks of layer ", message.layer, ", rank ", message.rank);
    return;
  }
  const FlightKey key = KeyOf(message);
  if (message.kind == Kind::kTokens) return TakeParcel(FlightOf(key), message, payload);
  const auto found = flights_.find(key);
  if (found == flights_.end()) return;
  const std::shared_ptr<Flight> flight = found->second;
  if (message.kind == Kind::kServed) return TakeServed(flight, message, payload);
  flight->done_with |= 1ull << message.rank;
  flight->guests[message.rank].results.reset();
  EraseIfOver(flight);
}

void Domain::TakeParcel(const std::shared_ptr<Flight>& flight, const Message& message, const std::string& payload) {
  Flight::Guest& guest = flight->guests[message.rank];
  Parcel parcel;
  bool is_valid = !guest.is_told && message.offset > 0 && message.offset < kMaxWidth &&
                  (flight->width == 0 || flight->width == int64_t(message.offset)) &&
                  parcel.FromBytes(payload, shape_.experts);
  for (int expert = 0; is_valid && expert < shape_.experts; ++expert) {
    is_valid = parcel.counts[expert] == 0 || is_here(shape_.home[expert]);
  }
  if (!is_valid) {
    flight->failure = Status::Error(Code::kInvalidArgument, WhereOf(flight->key), ": the parcel of rank ", message.rank,
                                    " makes no sense: ", payload.size(), " bytes, rows of ", message.offset, " floats");
    return;
  }
  flight->width = int64_t(message.offset);
  Welcome(guest, message.rank, parcel);
  guest.is_here = parcel.num_rows == 0;
  if (guest.is_here) return;
  guest.fetched = Allocate(parcel.num_rows * flight->width);
  if (guest.fetched == nullptr) {
    flight->failure = NoMemory(WhereOf(flight->key), parcel.num_rows * flight->width);
    return;
  }
  ReadRows(flight, message.host, message.rank, Region::kRows, parcel.num_rows, guest.fetched.get(),
           [&guest] { guest.is_here = true; });
}

void Domain::TakeServed(const std::shared_ptr<Flight>& flight, const Message& message, const std::string& payload) {
  const auto found = flight->trips.find({message.rank, message.host});
  const bool is_valid = found != flight->trips.end() && found->second.results == nullptr &&
                        payload.size() == (flight->key.is_backward ? sizeof(float) : 0) *
                                              found->second.sending.parcel.row_of.size();
  if (!is_valid) {
    flight->failure = Status::Error(Code::kInvalidArgument, WhereOf(flight->key), ": what ", Place(message.host),
                                    " has served to rank ", message.rank, " makes no sense");
    return;
  }
  Flight::Trip& trip = found->second;
  const int64_t num_rows = trip.sending.parcel.num_rows;
  trip.outbox.reset();  // they have been read
  trip.dots.resize(payload.size() / sizeof(float));
  std::memcpy(trip.dots.data(), payload.data(), payload.size());
  trip.results = Allocate(num_rows * flight->width);
  if (trip.results == nullptr) {
    flight->failure = NoMemory(WhereOf(flight->key), num_rows * flight->width);
    return;
  }
  const int host = message.host;
  Message received = About(Kind::kReceived, flight->key);
  received.rank = message.rank;
  ReadRows(flight, host, message.rank, Region::kResults, num_rows, trip.results.get(), [this, &trip, host, received] {
    trip.is_back = true;
    neighbourhood_.fabric->Send(host, received);
  });
}

// Somebody waits for them already: they go before all blocks and gradients.
void Domain::ReadRows(const std::shared_ptr<Flight>& flight, int host, int rank, Region region, int64_t num_rows,
                      float* to, std::function<void()> done) {
  ReadRequest request;
  request.what = About(Kind::kRead, flight->key);
  request.what.rank = rank;
  request.what.region = region;
  request.is_requested = true;
  request.destination = reinterpret_cast<char*>(to);
  request.num_bytes = uint64_t(num_rows * flight->width) * sizeof(float);
  request.urgency = -1;
  request.done = [this, flight, done = std::move(done), num_bytes = request.num_bytes](const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status.ok()) {
      done();
    } else {
      flight->failure = Status::Error(status.code, WhereOf(flight->key), ": ", status.message, "; ", num_bytes,
                                      " bytes are missing");
    }
    changed_.notify_all();
  };
  neighbourhood_.fabric->Read(host, std::move(request));
}

// What another host asks for: rows that were sent to it, or the results of its own.
Status Domain::ReadFlight(const Message& read, std::string* bytes) const {
  const FlightKey key = KeyOf(read);
  const auto found = flights_.find(key);
  const float* rows = nullptr;
  int64_t num_rows = 0;
  if (found != flights_.end() && read.region == Region::kRows) {
    const auto trip = found->second->trips.find({read.rank, read.host});
    if (trip != found->second->trips.end()) {
      rows = trip->second.outbox.get();
      num_rows = trip->second.sending.parcel.num_rows;
    }
  } else if (found != flights_.end() && is_member(read.rank, read.host)) {
    const Flight::Guest& guest = found->second->guests[read.rank];
    if (guest.is_summed) rows = guest.results.get();
    num_rows = guest.parcel.num_rows;
  }
  if (rows == nullptr) {
    return Status::Error(Code::kStaleVersion, WhereOf(key), ": ", Place(me_), " has no rows of rank ", read.rank,
                         " for ", Place(read.host));
  }
  const uint64_t num_bytes = uint64_t(num_rows * found->second->width) * sizeof(float);
  if (read.length == 0 || read.length > kChunkBytes || read.offset > num_bytes || read.length > num_bytes - read.offset) {
    return Status::Error(Code::kInvalidArgument, WhereOf(key), ": ", read.length, " bytes at ", read.offset,
                         " are not in ", num_bytes, " bytes of rows at ", Place(me_));
  }
  bytes->assign(reinterpret_cast<const char*>(rows) + read.offset, read.length);
  return Status::Ok();
}

}  // namespace fef
