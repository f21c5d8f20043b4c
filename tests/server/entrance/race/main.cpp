// An owner of the shedder that lends, stops, closes and turns at any time, and lets it accept or not, while callers
// send and hang up, and others connect anew for each request. Built with ThreadSanitizer. Usage: race SEED REQUESTS.
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
std::atomic<int64_t> num_fresh{0}, num_fresh_refused{0}, num_fresh_up{0}, num_fresh_lost{0};
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

// Connect anew for each request; hang up at times, before it or before the answer.
void call_fresh(int port, int seed) {
  std::mt19937 random(seed);
  while (!is_over) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = static_cast<in_port_t>(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr *>(&to), sizeof to)) fail("no connection");
    const std::string text = request(static_cast<int>(random() % 1000));
    if (random() % 8 && send(fd, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size())) {
      ++num_fresh;
      char answer[512];
      pollfd waiting = {fd, POLLIN, 0};
      const bool is_patient = random() % 8;
      ssize_t size = is_patient && poll(&waiting, 1, 10000) == 1 ? recv(fd, answer, sizeof answer, 0) : -1;
      if (!is_patient)
        ++num_fresh_lost;
      else if (size == sizeof ANSWER - 1 && !memcmp(answer, ANSWER, size))
        ++num_fresh_refused;
      else if (size == static_cast<ssize_t>(UP_ANSWER.size()))
        ++num_fresh_up;
      else
        fail("a newcomer got no answer");
    }
    close(fd);
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
  int listening = -1;
  int64_t listener = 0;  // 0: the owner accepts itself

  // Answer a newcomer that went up, and close it. What it sent came whole: it is one segment on loopback.
  static void serve(const Up &up, const char *bytes) {
    const int fd = static_cast<int>(up.fd);
    if (up.why == UP_BYTES && std::string(bytes, up.num_bytes).compare(0, 9, "POST /v1/")) fail("not a newcomer's");
    if (up.why == UP_CLOSED) fail("a newcomer that hung up went up");
    if (up.why == UP_BYTES) send(fd, UP_ANSWER.data(), UP_ANSWER.size(), MSG_NOSIGNAL);
    if (up.why == UP_SILENT) answer_next(fd);
    close(fd);
  }

  static void answer_next(int fd) {
    char text[512];
    pollfd waiting = {fd, POLLIN, 0};
    if (poll(&waiting, 1, 10000) == 1 && recv(fd, text, sizeof text, 0) > 0)
      send(fd, UP_ANSWER.data(), UP_ANSWER.size(), MSG_NOSIGNAL);
  }

  // Accept, or let the shedder.
  void change() {
    if (listener) {
      npu_gr_shed_accept_no_more(shedder, listener);
      listener = 0;
    } else {
      listener = npu_gr_shed_accept(shedder, listening, false);
      if (!listener) fail("it does not accept");
    }
  }

  void accept_one() {
    const int fd = accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    answer_next(fd);
    close(fd);
  }

  void take() {
    static Up ups[64];
    PatternCounts counts[MOST_PATTERNS];
    const int64_t count = npu_gr_shed_take(shedder, ups, counts);
    counted += counts[0].refused;
    const char *buffer = static_cast<const char *>(npu_gr_shed_buffer(shedder));
    for (int64_t n = 0; n < count; ++n) {
      const Up &up = ups[n];
      if (up.came_to) {
        ups_of_pattern += up.why == UP_BYTES && up.pattern == 1;
        serve(up, buffer + up.offset);
        continue;
      }
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
    PatternCounts counts[MOST_PATTERNS];
    npu_gr_shed_turn(shedder, patterns, random() % 2 ? 0.001 : HUGE_VAL, random() % 4, counts);
    counted += counts[0].refused;
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
      if (random() % (listener ? 4096 : 64) == 0) change();
      if (!listener && random() % 4 == 0) accept_one();
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
  owner.listening = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  if (bind(owner.listening, reinterpret_cast<sockaddr *>(&at), size) || listen(owner.listening, 64) ||
      getsockname(owner.listening, reinterpret_cast<sockaddr *>(&at), &size))
    fail("no listening socket");
  std::vector<std::thread> callers;
  for (int n = 0; n < CALLERS; ++n) callers.emplace_back(call, n, seed, requests);
  std::thread waits([&] {
    for (std::thread &one : callers) one.join();
    is_over = true;
  });
  std::vector<std::thread> fresh;
  for (int n = 0; n < CALLERS; ++n) fresh.emplace_back(call_fresh, at.sin_port, seed + CALLERS + n);
  owner.work();
  waits.join();
  if (owner.listener) owner.change();
  std::atomic<bool> is_answered{false};
  std::thread last([&] {
    for (std::thread &one : fresh) one.join();
    is_answered = true;
  });
  while (!is_answered) {  // its last request
    owner.turn();
    owner.accept_one();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  last.join();
  owner.take();
  printf("%ld up, %ld lost by who hung up, %ld refused\n", num_up.load(), num_lost.load(), num_refused.load());
  printf("newcomers: %ld up, %ld refused, %ld lost\n", num_fresh_up.load(), num_fresh_refused.load(),
         num_fresh_lost.load());
  if (num_refused + num_fresh_refused > owner.counted) fail("refusals were not counted");
  if (num_refused < requests / 10 || num_up < requests / 10) fail("one of the two ways was hardly taken");
  if (num_refused + num_up + num_lost != num_sent) fail("requests were lost");
  if (num_fresh_up + num_fresh_refused + num_fresh_lost != num_fresh) fail("requests of newcomers were lost");
  if (num_fresh_refused < requests / 100 || num_fresh_up < requests / 100)
    fail("newcomers hardly went one of the two ways");
  npu_gr_shed_free(shedder);
}
