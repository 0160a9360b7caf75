// The C functions that Python calls by ctypes (fef/pool/pool.py). What can fail returns its Code, 0 when it did not,
// with the text in `error`.
#include <algorithm>
#include <cstring>
#include <string>

#include "pool.h"

namespace {

int ToCode(const fef::Status& status, char* error, int error_bytes) {
  std::strncpy(error, status.message.c_str(), error_bytes - 1);
  error[error_bytes - 1] = 0;
  return int(status.code);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t fef_pool_next_incarnation() { return fef::NextIncarnation(); }

// host_of_member: [groups][members]; not read when there is one host. leaf_of_host: null when nothing is relayed.
// folder: of the segments; empty: memory alone.
// one_sided: of fef_ucx_open, the pool's from now on; null: blocks of hosts that are not mapped come by TCP.
int32_t fef_pool_open(int groups, double deadline_s, int64_t chaos_seed, int32_t incarnation, int me, int num_hosts,
                      const char* token, const int32_t* host_of_member, int num_members, const int32_t* leaf_of_host,
                      int64_t window_bytes, int64_t total_window_bytes, const char* folder, void* one_sided) {
  fef::PoolOptions options;
  options.groups = groups;
  options.deadline_s = deadline_s;
  if (chaos_seed >= 0) options.chaos_seed = uint64_t(chaos_seed);
  options.membership = {me, num_hosts, incarnation, token};
  if (num_hosts > 1) options.host_of_member.assign(host_of_member, host_of_member + groups * num_members);
  if (leaf_of_host != nullptr) options.leaf_of_host.assign(leaf_of_host, leaf_of_host + num_hosts);
  options.window = {uint64_t(window_bytes), uint64_t(total_window_bytes)};
  options.folder = folder;
  options.one_sided.reset(static_cast<fef::OneSided*>(one_sided));
  return fef::OpenPool(std::move(options))->incarnation();
}

// *port and unix_name (name_bytes long) say where this host listens.
int fef_pool_listen(int32_t incarnation, const char* address, int32_t* port, char* unix_name, int name_bytes,
                    char* error, int error_bytes) {
  fef::Endpoint endpoint;
  const fef::Status status = fef::FindPool(incarnation)->Listen(address, &endpoint);
  *port = endpoint.port;
  std::strncpy(unix_name, endpoint.unix_name.c_str(), name_bytes - 1);
  return ToCode(status, error, error_bytes);
}

// One entry per host.
int fef_pool_connect(int32_t incarnation, const char** addresses, const int32_t* ports, const char** unix_names,
                     const int32_t* is_mapped, int num_hosts, char* error, int error_bytes) {
  std::vector<fef::Endpoint> endpoints;
  std::vector<bool> mapped;
  for (int host = 0; host < num_hosts; ++host) {
    endpoints.push_back({addresses[host], ports[host], unix_names[host]});
    mapped.push_back(is_mapped[host] != 0);
  }
  return ToCode(fef::FindPool(incarnation)->Connect(endpoints, mapped), error, error_bytes);
}

// The host that died first and why, or nothing.
void fef_pool_dead(int32_t incarnation, char* text, int text_bytes) {
  const auto pool = fef::FindPool(incarnation);
  std::strncpy(text, pool == nullptr ? "" : pool->dead().c_str(), text_bytes - 1);
  text[text_bytes - 1] = 0;
}

// Reads and connections that this host has refused so far; -1 when the pool is closed.
int64_t fef_pool_refused(int32_t incarnation) {
  const auto pool = fef::FindPool(incarnation);
  return pool == nullptr ? -1 : pool->num_refused();
}

// The error that leaves the pool is in hand: the process is not to be ended for it.
void fef_pool_disarm(int32_t incarnation) {
  if (const auto pool = fef::FindPool(incarnation)) pool->liveness().Disarm();
}

void fef_pool_close(int32_t incarnation) { fef::ClosePool(incarnation); }

// home, local: one entry per expert. *table receives the table's number.
int fef_pool_add_table(int32_t incarnation, const char* name, int layers, int experts, int members,
                       const int32_t* home, const int32_t* local, int blocks_per_member, int64_t block_elems,
                       int elem_bytes, int slots, int stages, int64_t cache_bytes, int is_fetched_ahead,
                       int is_resident, int64_t own_elems, int32_t* table, char* error, int error_bytes) {
  const auto pool = fef::FindPool(incarnation);
  if (pool == nullptr) {
    const auto status = fef::Status::Error(fef::Code::kPoolClosed, "table ", name, ": the pool was closed");
    return ToCode(status, error, error_bytes);
  }
  fef::TableShape shape;
  shape.name = name;
  shape.layers = layers;
  shape.experts = experts;
  shape.members = members;
  shape.home.assign(home, home + experts);
  shape.local.assign(local, local + experts);
  shape.blocks_per_member = blocks_per_member;
  shape.block_elems = block_elems;
  shape.elem_bytes = elem_bytes;
  shape.slots = is_resident ? fef::kResidentSlots : slots;
  shape.stages = stages;
  shape.cache_bytes = cache_bytes;
  shape.is_fetched_ahead = is_fetched_ahead != 0;
  shape.is_resident = is_resident != 0;
  shape.own_elems = own_elems;
  return ToCode(pool->AddTable(shape, table), error, error_bytes);
}

// Where the contents of a resident table's member lie, [layer][local] blocks, and the floats kept beside them. They move
// with each update.
int fef_pool_contents(int32_t incarnation, int table, int group, int rank, char** blocks, float** own, char* error,
                      int error_bytes) {
  const auto pool = fef::FindPool(incarnation);
  fef::Domain* domain = pool == nullptr ? nullptr : pool->domain(table, group);
  if (domain == nullptr) {
    return ToCode(fef::Status::Error(fef::Code::kPoolClosed, "table ", table, ": the pool was closed"), error, error_bytes);
  }
  return ToCode(domain->Contents(rank, blocks, own), error, error_bytes);
}

}  // extern "C"
#pragma GCC visibility pop
