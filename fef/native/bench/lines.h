// What the programs of this folder share: they take commands as lines on their standard input and answer with lines on
// their standard output, they know one clock, and they fill blocks with bytes that show where they come from.
#ifndef FEF_BENCH_LINES_H_
#define FEF_BENCH_LINES_H_

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace fef_bench {

constexpr int kHearMs = 300'000;

[[noreturn]] inline void Fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::_Exit(1);  // threads may be in the middle of something
}

template <typename... Parts>
void Say(const Parts&... parts) {
  std::ostringstream line;
  line.precision(12);
  ((line << parts << ' '), ...);
  std::printf("%s\n", line.str().c_str());
  std::fflush(stdout);
}

// The lines of standard input, for who waits for nothing else, or polls it among other things.
class Lines {
 public:
  // False while no whole line is there. The program ends when its input does.
  bool Poll(std::vector<std::string>* words) {
    pollfd ready{STDIN_FILENO, POLLIN, 0};
    while (text_.find('\n') == std::string::npos) {
      if (poll(&ready, 1, 0) != 1) return false;
      char buffer[4096];
      const ssize_t got = read(STDIN_FILENO, buffer, sizeof(buffer));
      if (got <= 0) std::_Exit(0);
      text_.append(buffer, size_t(got));
    }
    std::istringstream line(text_.substr(0, text_.find('\n')));
    text_.erase(0, text_.find('\n') + 1);
    words->clear();
    for (std::string word; line >> word;) words->push_back(word);
    return !words->empty();
  }

  std::vector<std::string> Hear() {
    std::vector<std::string> words;
    pollfd ready{STDIN_FILENO, POLLIN, 0};
    while (!Poll(&words)) {
      if (poll(&ready, 1, kHearMs) == 0) Fail("no command within " + std::to_string(kHearMs / 1000) + " s");
    }
    return words;
  }

 private:
  std::string text_;
};

// Seconds of CLOCK_MONOTONIC: the same in all processes of a machine, as Python's time.monotonic().
inline double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

inline void SleepUntil(double when) {
  const double left_s = when - Now();
  if (left_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left_s));
}

// Seconds of one `read_once`: the median of `repeats`, after one more for connections that have slept. Batched: of the
// means over batches.
template <typename Read>
double Median(int repeats, bool is_batched, const Read& read_once) {
  const int batch = is_batched ? 100 : 1;
  std::vector<double> took;
  read_once();
  for (int i = 0; i < repeats; ++i) {
    const double begin = Now();
    for (int j = 0; j < batch; ++j) read_once();
    took.push_back((Now() - begin) / batch);
  }
  std::nth_element(took.begin(), took.begin() + repeats / 2, took.end());
  return took[size_t(repeats) / 2];
}

inline uint64_t Word(uint64_t key, uint64_t index) { return (key + index) * 0x9e3779b97f4a7c15ull; }

inline uint64_t Key(int owner, int reader, int round) {
  return (uint64_t(round) << 40) + (uint64_t(owner) << 32) + (uint64_t(reader) << 24);
}

inline void Fill(std::vector<uint64_t>* block, uint64_t key) {
  for (size_t i = 0; i < block->size(); ++i) (*block)[i] = Word(key, i);
}

inline int64_t CountWrong(const std::vector<uint64_t>& block, uint64_t key) {
  int64_t wrong = 0;
  for (size_t i = 0; i < block.size(); ++i) wrong += block[i] != Word(key, i);
  return wrong;
}

// What a host of an exchange holds for each other one, and has from it; both by the other's number.
struct Blocks {
  Blocks(int me, int num_hosts, size_t block_bytes)
      : me(me),
        num_hosts(num_hosts),
        block_bytes(block_bytes),
        mine(size_t(num_hosts), std::vector<uint64_t>(block_bytes / 8)),
        theirs(mine) {}

  void Prepare(int new_round) {
    round = new_round;
    for (int other = 0; other < num_hosts; ++other) Fill(&mine[other], Key(me, other, round));
  }

  int64_t CountAllWrong() const {
    int64_t wrong = 0;
    for (int other = 0; other < num_hosts; ++other) {
      if (other != me) wrong += CountWrong(theirs[other], Key(other, me, round));
    }
    return wrong;
  }

  const int me, num_hosts;
  const size_t block_bytes;
  int round = 0;
  std::vector<std::vector<uint64_t>> mine, theirs;
};

// Bytes that are no text, as a word of a line.
inline std::string ToHex(const std::string& bytes) {
  std::string text;
  for (unsigned char byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

inline std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) bytes += char(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

}  // namespace fef_bench

#endif  // FEF_BENCH_LINES_H_
