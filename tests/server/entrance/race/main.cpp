// An owner of the shedder that lends, stops, closes and turns at any time, while callers send and hang up. Built with
// ThreadSanitizer. Usage: race SEED REQUESTS.
//
// Checked: each request is refused once, or goes up once with its own bytes to its own connection; of a pattern no more
// go up between two turns than its quota; what is stopped is read no more.
#include "../../../../ops/door/shed.cpp"

#include <poll.h>
#include <stdio.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

const int PAIRS = 48, CALLERS = 3;
const char ANSWER[] = "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n";
const std::string UP_ANSWER = "up";

struct Pair {
  std::atomic<int> caller{-1};  // -1: the owner has not connected it yet, or it has hung up
  int ours = -1;
  int64_t lent_as = 0;
  bool is_served = false;  // a request of it went up, and is not answered
};

Pair pairs[PAIRS];
std::atomic<int64_t> num_refused{0}, num_up{0}, num_lost{0}, num_sent{0};
std::atomic<bool> is_over{false};

std::string request(int n) {
  const std::string path = n % 3 ? "/v1/rank" : "/v1/other";
  const std::string body(n % 50, 'x');
  return "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

[[noreturn]] void fail(const char *why) {
  fprintf(stderr, "%s\n", why);
  _exit(1);
}

// Send one request at a time on each of the connections that are this caller's; hang up at times, before the answer.
void call(int caller, int seed, int requests) {
  std::mt19937 random(seed + caller);
  while (num_sent < requests) {
    const int n = caller + CALLERS * static_cast<int>(random() % (PAIRS / CALLERS));
    const int fd = pairs[n].caller;
    if (fd < 0) continue;
    const std::string text = request(static_cast<int>(random() % 1000));
    ++num_sent;
    if (send(fd, text.data(), text.size(), MSG_NOSIGNAL) < 0) {
      ++num_lost;
      pairs[n].caller = -1;
      close(fd);
      continue;
    }
    if (random() % 50 == 0) {
      ++num_lost;
      pairs[n].caller = -1;
      close(fd);
      continue;
    }
    char answer[512];
    pollfd waiting = {fd, POLLIN, 0};
    ssize_t size = poll(&waiting, 1, 10000) == 1 ? recv(fd, answer, sizeof answer, 0) : -1;
    if (size == sizeof ANSWER - 1 && !memcmp(answer, ANSWER, size)) {
      ++num_refused;
    } else if (size == static_cast<ssize_t>(UP_ANSWER.size())) {
      ++num_up;
    } else if (size == 0 || (size < 0 && errno == ECONNRESET)) {  // the owner has closed it
      ++num_lost;
      pairs[n].caller = -1;
      close(fd);
    } else {
      fail(size < 0 ? "a request got no answer" : "an answer that is neither");
    }
  }
}

void connect(Pair &pair) {
  int both[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, both)) fail("no sockets");
  pair.ours = both[0];
  pair.lent_as = 0;
  pair.is_served = false;
  pair.caller = both[1];
}

void answer_up(Pair &pair) {
  send(pair.ours, UP_ANSWER.data(), UP_ANSWER.size(), MSG_NOSIGNAL);
  pair.is_served = false;
}

struct Owner {
  Shedder *shedder;
  std::mt19937 random;
  int64_t ups_of_pattern = 0;  // since the turn before
  int64_t quota = 0, most_ups = 0;
  int64_t counted = 0;

  void take() {
    static Up ups[64];
    int64_t refused[MOST_PATTERNS];
    const int64_t count = npu_gr_shed_take(shedder, ups, refused);
    counted += refused[0];
    const char *buffer = static_cast<const char *>(npu_gr_shed_buffer(shedder));
    for (int64_t n = 0; n < count; ++n) {
      const Up &up = ups[n];
      Pair *pair = nullptr;
      for (Pair &one : pairs)
        if (one.ours == up.fd && one.lent_as == up.lent_as) pair = &one;
      if (!pair) fail("it went up as nobody's");
      if (up.why == UP_BYTES) {
        const std::string text(buffer + up.offset, up.num_bytes);
        if (text.compare(0, 9, "POST /v1/") || text.find("\r\n\r\n") == std::string::npos) fail("not its bytes");
        if (pair->is_served) fail("it was read while a request of it was up");
        pair->is_served = true;
        ups_of_pattern += up.pattern == 1;
      } else {
        pair->lent_as = 0;
        if (up.why == UP_CLOSED) {
          close(pair->ours);
          pair->ours = -1;
        } else if (up.why == UP_UNSENT) {
          fail("no room in an empty socket");
        }
      }
    }
  }

  void turn() {
    take();
    if (ups_of_pattern > most_ups) fail("more went up than the quota");
    const int64_t left = quota - ups_of_pattern;  // of which some may go up before the library hears of the next quota
    quota = random() % 4;
    most_ups = left > quota ? left : quota;
    ups_of_pattern = 0;
    const char *first = "POST /v1/rank HTTP/1.1";
    static const std::string key(first, strlen(first) + 1);
    Pattern patterns[MOST_PATTERNS] = {{1, key.data(), static_cast<int64_t>(key.size()), quota}};
    int64_t refused[MOST_PATTERNS];
    npu_gr_shed_turn(shedder, patterns, random() % 2 ? 0.001 : HUGE_VAL, refused);
    counted += refused[0];
  }

  void stop(Pair &pair) {
    if (!pair.lent_as) return;
    npu_gr_shed_stop(shedder, pair.ours, pair.lent_as);
    take();
    pair.lent_as = 0;
  }

  void work() {
    while (!is_over) {
      Pair &pair = pairs[random() % PAIRS];
      const unsigned what = random() % 4096;
      if (pair.ours < 0) {
        if (pair.caller < 0) connect(pair);
        continue;
      }
      if (what == 0) {
        stop(pair);
        if (pair.ours >= 0) close(pair.ours);
        pair.ours = -1;
        pair.lent_as = 0;
      } else if (what < 40) {
        stop(pair);
      } else if (what < 500) {
        turn();
      } else if (what < 1000) {
        take();
      } else if (pair.is_served) {
        answer_up(pair);
        if (pair.lent_as) npu_gr_shed_resume(shedder, pair.ours, pair.lent_as);
      } else if (!pair.lent_as) {
        pair.lent_as = npu_gr_shed_lend(shedder, pair.ours, what % 2 ? 0 : HUGE_VAL);
        if (!pair.lent_as) fail("it was not lent");
      }
      if (what % 2 == 0) std::this_thread::yield();
    }
  }
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  const int seed = atoi(argv[1]), requests = atoi(argv[2]);
  const int64_t ends[] = {sizeof ANSWER - 1};
  Shedder *shedder = npu_gr_shed_new("authorization\n", ANSWER, ends, 1, 64, 32 * 1024, 1024);
  if (!shedder) fail("no shedder");
  Owner owner{shedder, std::mt19937(seed)};
  std::vector<std::thread> callers;
  for (int n = 0; n < CALLERS; ++n) callers.emplace_back(call, n, seed, requests);
  std::thread waits([&] {
    for (std::thread &one : callers) one.join();
    is_over = true;
  });
  owner.work();
  waits.join();
  owner.take();
  printf("%ld up, %ld lost by who hung up, %ld refused\n", num_up.load(), num_lost.load(), num_refused.load());
  if (num_refused > owner.counted) fail("refusals were not counted");
  if (num_refused < requests / 10 || num_up < requests / 10) fail("one of the two ways was hardly taken");
  if (num_refused + num_up + num_lost != num_sent) fail("requests were lost");
  npu_gr_shed_free(shedder);
}
