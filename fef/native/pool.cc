#include "pool.h"

#include <map>
#include <utility>

namespace fef {

Status Pool::AddTable(const TableShape& shape, int32_t* table) {
  std::vector<std::unique_ptr<Domain>> domains;
  for (int group = 0; group < groups_; ++group) {
    std::optional<uint64_t> seed;
    if (chaos_seed_) seed = *chaos_seed_ + group;
    auto domain = std::make_unique<Domain>(shape, incarnation_, deadline_s_, seed);
    if (Status status = domain->Open(group); !status.ok()) return status;
    domains.push_back(std::move(domain));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  *table = int32_t(tables_.size());
  tables_.push_back(std::move(domains));
  counters_.push_back(0);
  return Status::Ok();
}

void Pool::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& domains : tables_) {
    for (auto& domain : domains) domain->Close();
  }
}

Domain* Pool::domain(int table, int group) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (table < 0 || table >= int(tables_.size()) || group < 0 || group >= int(tables_[table].size())) return nullptr;
  return tables_[table][group].get();
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

std::shared_ptr<Pool> OpenPool(int groups, double deadline_s, std::optional<uint64_t> chaos_seed) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  auto pool = std::make_shared<Pool>(groups, ++last_incarnation, deadline_s, chaos_seed);
  Pools()[last_incarnation] = pool;
  return pool;
}

std::shared_ptr<Pool> FindPool(int32_t incarnation) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  auto it = Pools().find(incarnation);
  return it == Pools().end() ? nullptr : it->second;
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
