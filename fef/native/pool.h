// The pools of this process and their tables.
#ifndef FEF_POOL_H_
#define FEF_POOL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "domain.h"
#include "status.h"

namespace fef {

// All domains of one `fef.Pool`: a domain per (table, data-parallel group).
class Pool {
 public:
  Pool(int groups, int32_t incarnation, double deadline_s, std::optional<uint64_t> chaos_seed)
      : groups_(groups), incarnation_(incarnation), deadline_s_(deadline_s), chaos_seed_(chaos_seed) {}

  Status AddTable(const TableShape& shape, int32_t* table);
  void Close();
  Domain* domain(int table, int group);
  int32_t NextVersion(int table);
  int32_t incarnation() const { return incarnation_; }

 private:
  const int groups_;
  const int32_t incarnation_;
  const double deadline_s_;
  const std::optional<uint64_t> chaos_seed_;
  std::mutex mutex_;
  std::vector<std::vector<std::unique_ptr<Domain>>> tables_;
  std::vector<int32_t> counters_;
};

// Open pools by incarnation; a handler finds its pool by the incarnation in the version bits.
std::shared_ptr<Pool> FindPool(int32_t incarnation);
std::shared_ptr<Pool> OpenPool(int groups, double deadline_s, std::optional<uint64_t> chaos_seed);
void ClosePool(int32_t incarnation);

}  // namespace fef

#endif  // FEF_POOL_H_
