// libascendcl, as much of it as our library links with: memory, and what a kernel got wrong.
//
// What is freed stays allocated to the process for a while and is poisoned, so that a kernel which still reads it is
// found by the table, whatever stands there. A tensor that is larger takes no memory where nothing touches it.
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "pretended.h"

namespace {
std::mutex lock;
std::map<uintptr_t, size_t> live;
std::deque<std::pair<void *, size_t>> freed;
size_t freed_bytes = 0;
thread_local void *expected = nullptr;
std::string fault;
constexpr size_t kKept = size_t(512) << 20;
std::atomic<int> fails{-1};  // launches until one fails; under 0 = none does
}  // namespace

extern "C" {

void *pretended_allocate(size_t bytes) {
  void *at = nullptr;
  if (bytes > kKept) {
    at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
  } else if (posix_memalign(&at, 512, bytes ? bytes : 1) != 0) {
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(lock);
  live[uintptr_t(at)] = bytes;
  return at;
}
void pretended_free(void *at) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = live.find(uintptr_t(at));
  if (found == live.end()) return;
  size_t bytes = found->second;
  if (bytes > kKept) {
    live.erase(found);
    munmap(at, bytes);
    return;
  }
  std::memset(at, 0x7F, bytes);
  freed.push_back({at, bytes});
  freed_bytes += bytes;
  live.erase(found);
  while (freed_bytes > kKept) {
    freed_bytes -= freed.front().second;
    std::free(freed.front().first);
    freed.pop_front();
  }
}
bool pretended_is_live(const void *at, uint64_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = live.upper_bound(uintptr_t(at));
  if (found == live.begin()) return false;
  --found;
  return uintptr_t(at) + bytes <= found->first + found->second;
}
void pretended_expect(void *stream) { expected = stream; }
void *pretended_expected() { return expected; }
void pretended_fail(int launches) { fails = launches; }
int pretended_armed() { return fails >= 0; }
bool pretended_fails() { return fails >= 0 && fails-- == 0; }
void pretended_fault(const char *kernel, const char *why) {
  std::lock_guard<std::mutex> guard(lock);
  if (fault.empty()) fault = std::string(kernel) + ": " + why;
}
const char *pretended_last_fault() {
  static thread_local std::string told;
  std::lock_guard<std::mutex> guard(lock);
  told.swap(fault);
  fault.clear();
  return told.c_str();
}
int aclrtSynchronizeStream(void *) { return 0; }  // the emulator's launches are done when they return
}
