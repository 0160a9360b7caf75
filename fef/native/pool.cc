#include "pool.h"

#include <algorithm>
#include <map>
#include <utility>

namespace fef {

Pool::Pool(PoolOptions options) : options_(std::move(options)) {
  if (options_.membership.num_hosts == 1) return;
  Liveness::HoldAborts();
  fabric_ = std::make_unique<Fabric>(
      options_.membership, options_.window,
      Fabric::Receiver{[this](const Message& message, const std::string& payload, Descriptor fd) {
                         OnMessage(message, payload, std::move(fd));
                       },
                       [this](const Message& read, std::string* bytes) { return OnRead(read, bytes); },
                       [this](int host, const std::string& why, bool is_orderly) { OnLost(host, why, is_orderly); }},
      options_.one_sided);
}

Status Pool::Listen(const std::string& address, Endpoint* endpoint) { return fabric_->Listen(address, endpoint); }

Status Pool::Connect(const std::vector<Endpoint>& endpoints, const std::vector<bool>& is_mapped) {
  return fabric_->Connect(endpoints, is_mapped, options_.deadline_s);
}

Status Pool::AddTable(const TableShape& shape, int32_t* table) {
  std::vector<std::unique_ptr<Domain>> domains;
  for (int group = 0; group < options_.groups; ++group) {
    std::optional<uint64_t> seed;
    if (options_.chaos_seed) seed = *options_.chaos_seed + group;
    Neighbourhood neighbourhood{fabric_.get(), &worker_, int(tables_.size()), group, {}, options_.leaf_of_host,
                                options_.folder};
    const auto first = options_.host_of_member.begin() + ptrdiff_t(group) * shape.members;
    if (fabric_ != nullptr) neighbourhood.host_of_rank.assign(first, first + shape.members);
    auto domain = std::make_unique<Domain>(shape, incarnation(), options_.deadline_s, seed, std::move(neighbourhood));
    if (Status status = domain->Open(); !status.ok()) return status;
    domains.push_back(std::move(domain));
  }
  std::lock_guard<std::mutex> messages_lock(messages_mutex_);
  for (const auto& [host, why] : lost_) {
    for (auto& domain : domains) domain->OnLost(host, why);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    *table = int32_t(tables_.size());
    tables_.push_back(std::move(domains));
    counters_.push_back(0);
  }
  for (Waiting& waiting : early_) {
    if (waiting.message.table != *table) continue;
    if (Domain* to = domain(*table, waiting.message.group)) {
      to->OnMessage(waiting.message, waiting.payload, std::move(waiting.fd));
    }
  }
  early_.erase(std::remove_if(early_.begin(), early_.end(), [&](const Waiting& w) { return w.message.table <= *table; }),
               early_.end());
  return Status::Ok();
}

void Pool::Close() {
  liveness_.Disarm();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& domains : tables_) {
      for (auto& domain : domains) domain->Close();
    }
  }
  if (fabric_ != nullptr) fabric_->Close();
  worker_.Stop();
}

void Pool::OnMessage(const Message& message, const std::string& payload, Descriptor fd) {
  std::lock_guard<std::mutex> lock(messages_mutex_);
  size_t num_tables;
  {
    std::lock_guard<std::mutex> tables_lock(mutex_);
    num_tables = tables_.size();
  }
  if (message.table >= int(num_tables)) {
    early_.push_back({message, payload, std::move(fd)});
  } else if (Domain* to = domain(message.table, message.group)) {
    to->OnMessage(message, payload, std::move(fd));
  }
}

Status Pool::OnRead(const Message& read, std::string* bytes) {
  if (Domain* from = domain(read.table, read.group)) return from->OnRead(read, bytes);
  return Status::Error(Code::kInvalidArgument, "get: host ", options_.membership.me, " has no table ", read.table,
                       " in group ", read.group);
}

void Pool::OnLost(int host, const std::string& why, bool is_orderly) {
  std::lock_guard<std::mutex> lock(messages_mutex_);
  lost_[host] = why;
  std::lock_guard<std::mutex> tables_lock(mutex_);
  for (auto& domains : tables_) {
    for (auto& domain : domains) domain->OnLost(host, why);
  }
  if (is_orderly) return;
  std::string ranks;
  const std::vector<int>& hosts = options_.host_of_member;
  const int members = int(hosts.size()) / options_.groups;
  for (int i = 0; i < int(hosts.size()); ++i) {
    if (hosts[i] != host) continue;
    ranks += (ranks.empty() ? "" : ",") + std::to_string(i % members);
    if (options_.groups > 1) ranks += " of group " + std::to_string(i / members);
  }
  const std::string who = "host " + std::to_string(host) + " (rank " + ranks + ") is gone: " + why;
  if (dead_.empty()) dead_ = who;
  liveness_.OnDeath(who);
}

Domain* Pool::domain(int table, int group) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (table < 0 || table >= int(tables_.size()) || group < 0 || group >= int(tables_[table].size())) return nullptr;
  return tables_[table][group].get();
}

int64_t Pool::num_refused() {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t number = fabric_ == nullptr ? 0 : fabric_->num_refused();
  for (const auto& domains : tables_) {
    for (const auto& domain : domains) number += domain->num_refused();
  }
  return number;
}

int32_t Pool::NextVersion(int table) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ++counters_.at(table);
}

namespace {

std::mutex pools_mutex;
std::map<int32_t, std::shared_ptr<Pool>>& Pools() {
  static auto* pools = new std::map<int32_t, std::shared_ptr<Pool>>();  // never destroyed: waits may outlive main()
  return *pools;
}
int32_t last_incarnation = 0;

}  // namespace

int32_t NextIncarnation() {
  std::lock_guard<std::mutex> lock(pools_mutex);
  return last_incarnation + 1;
}

std::shared_ptr<Pool> OpenPool(PoolOptions options) {
  auto pool = std::make_shared<Pool>(std::move(options));
  std::lock_guard<std::mutex> lock(pools_mutex);
  last_incarnation = std::max(last_incarnation, pool->incarnation());
  Pools()[pool->incarnation()] = pool;
  return pool;
}

std::shared_ptr<Pool> FindPool(int32_t incarnation) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  auto it = Pools().find(incarnation);
  return it == Pools().end() ? nullptr : it->second;
}

void ReportPeerLoss() {
  std::lock_guard<std::mutex> lock(pools_mutex);
  for (auto& [incarnation, pool] : Pools()) pool->liveness().OnReport();
}

void ClosePool(int32_t incarnation) {
  std::shared_ptr<Pool> pool;
  {
    std::lock_guard<std::mutex> lock(pools_mutex);
    auto it = Pools().find(incarnation);
    if (it == Pools().end()) return;
    pool = std::move(it->second);
    Pools().erase(it);
  }
  pool->Close();
}

}  // namespace fef
