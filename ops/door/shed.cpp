// The shedder: it refuses requests that the door has just refused, without Python.
//
// The event loop lends it idle connections of callers who were refused. A thread reads them every SWEEP_S. A request
// whose key (request_key.h) is that of one of the patterns is answered here, once the pattern's quota has gone up;
// everything else goes up, and its connection is read no more until the owner says so.
//
//     FREE --lend--> LENT --> IN_HAND --> LENT      refused
//                     ^          |
//                     |          +------> FREE      it went back
//                     |          +------> UP        its bytes went up
//                     '------resume-------'|
//                                          '--> FREE: its caller has hung up meanwhile
//
// Invariants:
//   S1  the thread reads and writes a descriptor only while it has it IN_HAND, and `stop` waits for the end of that, so
//       the owner closes no descriptor beside a read
//   S2  between two calls of `take` no more requests of a pattern go up than the larger of its last two quotas
//   S3  no call waits for more than one round: MOST_EVENTS requests
//
// While the mutex is held, a request that goes up is copied, and the epoll set is changed; nothing is read or sent.
#include "shed_call.h"

#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <initializer_list>

#include "request_key.h"

namespace {

enum { MOST_EVENTS = 16, MOST_SEEN = 256 };  // connections of one round, and of one sweep
enum { MOST_DESCRIPTORS = 1 << 20 };         // of the process; what has a higher number is not lent
const double SWEEP_S = 0.001;                // between two sweeps: each takes all that came, and a refusal is no later
const double TELL_S = 0.002;   // from `turn` to the owner's next look, while requests are refused: quotas grow old
const double RETRY_S = 0.01;   // as RETRY_S of npu_gr/server/entrance/pacing.py
const double JIFFY_S = 0.004;  // the step of the kernel's clock

enum State : uint8_t { FREE = 0, LENT, IN_HAND, UP };

struct Place {       // of a descriptor
  uint32_t lent_as;  // the number of its connection: a descriptor that was closed is soon another one's
  State state;
  double answered_at;
  double at_once_since_at;  // each request since then has come within RETRY_S of the answer before
};

struct Slot {  // of a pattern
  int64_t number;
  int64_t quota;
  int64_t num_up;   // of them that were not taken yet
  int64_t refused;  // of them that were not told yet
  int64_t key_bytes;
  char key[MAX_KEY_BYTES];
};

struct Shedder {
  int lent_fd;  // epoll
  int wake_fd;  // the thread should look
  int done_fd;  // the owner should look
  char *names_text;
  const char *names[MAX_NAMES + 1];
  char *answers_text;
  int64_t *answer_ends;
  int64_t num_answers;
  int64_t next_answer;  // the thread's
  char *received;       // [room_bytes], the thread's
  int64_t room_bytes;
  pthread_t thread;
  bool has_thread;

  pthread_mutex_t mutex;  // of all that follows
  pthread_cond_t let_go;  // something is IN_HAND no more
  int num_waiting;        // for that
  Place *places;          // [MOST_DESCRIPTORS]
  uint32_t num_lent;      // ever
  Slot slots[MOST_PATTERNS];
  double most_at_once_s;
  double turned_at;
  bool has_refused;  // since then
  Up *ups;           // a ring of most_ups
  int64_t most_ups, first_up, end_up;
  char *buffer;  // a ring, too; what goes up lies in one piece
  int64_t buffer_bytes, first_byte, taken_byte, end_byte;
  bool has_told;  // the owner, who has not looked since
  bool waits_for_room;
  bool ends;
};

struct Locked {
  explicit Locked(Shedder *shedder) : mutex(&shedder->mutex) { pthread_mutex_lock(mutex); }
  ~Locked() { pthread_mutex_unlock(mutex); }
  pthread_mutex_t *mutex;
};

struct Refusal {
  int fd;
  int64_t pattern;
  bool retries;
  Text answer;
  ssize_t sent;
  int error;
};

double now_s() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

// When the newest bytes of a socket came, which were read just now: exactly only where that decides whether they came
// at once, since the kernel's word takes a call.
double came_since(int fd, double answered_at, double now_at) {
  if (now_at - answered_at <= RETRY_S) return now_at;
  tcp_info info;
  socklen_t size = offsetof(tcp_info, tcpi_last_data_recv) + sizeof info.tcpi_last_data_recv;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size)) return now_at;
  const double ago_s = 1e-3 * info.tcpi_last_data_recv - JIFFY_S;
  return ago_s > 0 ? now_at - ago_s : now_at;
}

// ---- with the mutex held

// Wait for a connection's requests, or only for its caller to hang up.
bool watch(const Shedder *shedder, int fd, int how, bool is_read) {
  epoll_event event = {};
  event.events = is_read ? EPOLLIN | EPOLLRDHUP : EPOLLRDHUP;
  event.data.u64 = static_cast<uint64_t>(shedder->places[fd].lent_as) << 32 | static_cast<uint32_t>(fd);
  return epoll_ctl(shedder->lent_fd, how, fd, &event) == 0;
}

Place *lent_place(Shedder *shedder, int64_t fd, int64_t lent_as) {
  if (fd < 0 || fd >= MOST_DESCRIPTORS) return nullptr;
  Place &place = shedder->places[fd];
  return place.lent_as == lent_as && place.state != FREE ? &place : nullptr;
}

// Whether the next round might find no room for what goes up.
bool is_full(const Shedder *shedder) {
  return shedder->end_up - shedder->first_up + MOST_EVENTS > shedder->most_ups ||
         shedder->end_byte - shedder->first_byte + (MOST_EVENTS + 1) * shedder->room_bytes > shedder->buffer_bytes;
}

void go_up(Shedder *shedder, int fd, int64_t why, int64_t pattern, const char *data, int64_t num_bytes,
           double came_at = 0) {
  Place &place = shedder->places[fd];
  place.state = why == UP_BYTES ? UP : FREE;
  if (place.state == UP)
    watch(shedder, fd, EPOLL_CTL_MOD, false);
  else
    epoll_ctl(shedder->lent_fd, EPOLL_CTL_DEL, fd, nullptr);
  int64_t offset = shedder->end_byte % shedder->buffer_bytes;
  if (offset + num_bytes > shedder->buffer_bytes) {
    shedder->end_byte += shedder->buffer_bytes - offset;
    offset = 0;
  }
  if (num_bytes) memcpy(shedder->buffer + offset, data, num_bytes);
  shedder->end_byte += num_bytes;
  shedder->ups[shedder->end_up++ % shedder->most_ups] = {fd, place.lent_as, why, pattern, offset, num_bytes, came_at};
}

void tell(Shedder *shedder) {
  if (shedder->has_told) return;
  shedder->has_told = true;
  eventfd_write(shedder->done_fd, 1);
}

Slot *find(Shedder *shedder, const Key &key) {
  for (Slot &slot : shedder->slots)
    if (slot.number && slot.key_bytes == key.size && !memcmp(slot.key, key.data, key.size)) return &slot;
  return nullptr;
}

// Say how many requests of each pattern were refused since the last time.
void count_refused(Shedder *shedder, int64_t *refused) {
  for (Slot &slot : shedder->slots) {
    *refused++ = slot.refused;
    slot.refused = 0;
  }
}

// ---- the thread

Text next_answer(Shedder *shedder) {
  const int64_t n = shedder->next_answer, begin = n ? shedder->answer_ends[n - 1] : 0;
  shedder->next_answer = (n + 1) % shedder->num_answers;
  return {shedder->answers_text + begin, shedder->answer_ends[n] - begin};
}

struct Work {
  Shedder *shedder;
  Refusal refusals[MOST_EVENTS];  // of one round, that are to be written
  int num_refusals = 0;

  // Read a connection, and decide; false: there was nothing to read.
  bool look(const epoll_event &event) {
    const int fd = static_cast<int>(event.data.u64 & 0xffffffff);
    const bool has_hung_up = event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    Place &place = shedder->places[fd];
    {
      Locked locked(shedder);
      if (!lent_place(shedder, fd, event.data.u64 >> 32)) return true;  // it went back meanwhile
      if (place.state == UP) {
        go_up(shedder, fd, UP_CLOSED, 0, nullptr, 0);
        return true;
      }
      place.state = IN_HAND;
    }
    const ssize_t size = recv(fd, shedder->received, shedder->room_bytes, MSG_DONTWAIT);
    const int error = errno;
    const double now_at = now_s(), came_at = came_since(fd, place.answered_at, now_at);
    Key key;
    const bool has_key =
        size > 0 && size < shedder->room_bytes && make_key(shedder->received, size, shedder->names, key);
    Locked locked(shedder);
    if (size < 0 && (error == EAGAIN || error == EINTR)) {
      place.state = LENT;
      return false;
    }
    if (came_at - place.answered_at > RETRY_S && place.at_once_since_at < came_at) place.at_once_since_at = came_at;
    Slot *slot = has_key ? find(shedder, key) : nullptr;
    const int64_t pattern = slot ? slot->number : 0;
    if (size <= 0 || (slot && has_hung_up)) {
      go_up(shedder, fd, UP_CLOSED, pattern, nullptr, 0);
    } else if (!slot) {
      go_up(shedder, fd, UP_BYTES, 0, shedder->received, size, came_at);
    } else if (slot->quota > 0) {
      --slot->quota;
      ++slot->num_up;
      go_up(shedder, fd, UP_BYTES, pattern, shedder->received, size, came_at);
    } else {
      ++slot->refused;
      shedder->has_refused = true;
      const bool retries = now_at - place.at_once_since_at > shedder->most_at_once_s;
      refusals[num_refusals++] = {fd, pattern, retries, next_answer(shedder), 0, 0};
    }
    return true;
  }

  // Write all answers in a row: the first one wakes a caller that sleeps, the others find it awake.
  void answer() {
    for (int n = 0; n < num_refusals; ++n) {
      Refusal &refusal = refusals[n];
      refusal.sent = send(refusal.fd, refusal.answer.data, refusal.answer.size, MSG_DONTWAIT | MSG_NOSIGNAL);
      refusal.error = errno;
    }
    const double now_at = now_s();
    Locked locked(shedder);
    for (int n = 0; n < num_refusals; ++n) {
      const Refusal &refusal = refusals[n];
      const int64_t sent = refusal.sent < 0 ? 0 : refusal.sent;
      shedder->places[refusal.fd].answered_at = now_at;
      if (refusal.sent < 0 && refusal.error != EAGAIN && refusal.error != EINTR)
        go_up(shedder, refusal.fd, UP_CLOSED, 0, nullptr, 0);
      else if (sent < refusal.answer.size)
        go_up(shedder, refusal.fd, UP_UNSENT, 0, refusal.answer.data + sent, refusal.answer.size - sent);
      else if (refusal.retries)
        go_up(shedder, refusal.fd, UP_RETRIES, refusal.pattern, nullptr, 0);
      else
        shedder->places[refusal.fd].state = LENT;
    }
    num_refusals = 0;
    if (shedder->num_waiting) pthread_cond_broadcast(&shedder->let_go);
    if (shedder->first_up != shedder->end_up) tell(shedder);
  }

  bool may_go_on() const {
    Locked locked(shedder);
    return !is_full(shedder) && !shedder->ends;
  }

  // Look at the connections that have something to read, in rounds; returns how many had.
  int sweep() {
    epoll_event events[MOST_EVENTS];
    int num_seen = 0;
    for (int found = MOST_EVENTS; found == MOST_EVENTS && num_seen < MOST_SEEN && may_go_on();) {
      found = epoll_wait(shedder->lent_fd, events, MOST_EVENTS, 0);
      for (int n = 0; n < found; ++n) num_seen += look(events[n]);
      answer();
    }
    return num_seen;
  }

  // Sleep until the owner wants something, requests have come (`for_requests`), or so many seconds have passed (below
  // 0: for ever).
  void sleep(bool for_requests, double seconds) const {
    pollfd fds[] = {{shedder->wake_fd, POLLIN, 0}, {shedder->lent_fd, POLLIN, 0}};
    timespec patience = {static_cast<time_t>(seconds), static_cast<long>(1e9 * (seconds - floor(seconds)))};
    eventfd_t count;
    ppoll(fds, for_requests ? 2 : 1, seconds < 0 ? nullptr : &patience, nullptr);
    if (fds[0].revents) eventfd_read(shedder->wake_fd, &count);
  }

  void run() {
    while (true) {
      const int num_seen = sweep();
      bool for_requests = false;
      double seconds = SWEEP_S;
      {
        Locked locked(shedder);
        if (shedder->ends) return;
        const double tell_in_s = shedder->turned_at + TELL_S - now_s();
        if (shedder->has_refused && tell_in_s <= 0) tell(shedder);
        shedder->waits_for_room = is_full(shedder);
        if (shedder->waits_for_room) {
          seconds = -1;
        } else if (!num_seen) {
          for_requests = true;
          seconds = shedder->has_told || !shedder->has_refused ? -1 : tell_in_s;
        }
      }
      sleep(for_requests, seconds);
    }
  }
};

void *work(void *argument) {
  Work work;
  work.shedder = static_cast<Shedder *>(argument);
  work.run();
  return nullptr;
}

// Begin the thread; it takes no signals, which are for the owner's threads.
bool start(Shedder *shedder) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  shedder->has_thread = !pthread_create(&shedder->thread, nullptr, work, shedder);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (shedder->has_thread) pthread_setname_np(shedder->thread, "npu-gr-shed");
  return shedder->has_thread;
}

}  // namespace

extern "C" {
#define NPU_GR_API __attribute__((visibility("default")))

NPU_GR_API int64_t npu_gr_shed_abi() { return NPU_GR_SHED_ABI; }

NPU_GR_API void npu_gr_shed_free(Shedder *shedder) {
  if (!shedder) return;
  if (shedder->has_thread) {
    {
      Locked locked(shedder);
      shedder->ends = true;
    }
    eventfd_write(shedder->wake_fd, 1);
    pthread_join(shedder->thread, nullptr);
  }
  for (int fd : {shedder->lent_fd, shedder->wake_fd, shedder->done_fd})
    if (fd >= 0) close(fd);
  for (void *at :
       {static_cast<void *>(shedder->names_text), static_cast<void *>(shedder->answers_text),
        static_cast<void *>(shedder->answer_ends), static_cast<void *>(shedder->received),
        static_cast<void *>(shedder->places), static_cast<void *>(shedder->ups), static_cast<void *>(shedder->buffer)})
    free(at);
  free(shedder);
}

// Make one. names: of the headers that the door reads, in lower case, each ended by a line feed. answers: the refusals,
// one after the other, and where each ends. most_ups and buffer_bytes: of what goes up and was not taken; where a round
// may find no room there, nothing is read. room_bytes: the longest request that is refused here is shorter; the buffer
// has room for 17. null: there is no memory, no descriptor, or no thread.
NPU_GR_API Shedder *npu_gr_shed_new(const char *names, const char *answers, const int64_t *answer_ends,
                                    int64_t num_answers, int64_t most_ups, int64_t buffer_bytes, int64_t room_bytes) {
  Shedder *made = static_cast<Shedder *>(calloc(1, sizeof(Shedder)));
  if (!made) return nullptr;
  made->lent_fd = epoll_create1(EPOLL_CLOEXEC);
  made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  made->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  pthread_mutex_init(&made->mutex, nullptr);
  pthread_cond_init(&made->let_go, nullptr);
  const int64_t answers_bytes = answer_ends[num_answers - 1];
  made->names_text = strdup(names);
  made->answers_text = static_cast<char *>(malloc(answers_bytes));
  made->answer_ends = static_cast<int64_t *>(malloc(num_answers * sizeof(int64_t)));
  made->num_answers = num_answers;
  made->received = static_cast<char *>(malloc(room_bytes));
  made->room_bytes = room_bytes;
  made->places = static_cast<Place *>(calloc(MOST_DESCRIPTORS, sizeof(Place)));  // untouched pages take no memory
  made->ups = static_cast<Up *>(malloc(most_ups * sizeof(Up)));
  made->most_ups = most_ups;
  made->buffer = static_cast<char *>(malloc(buffer_bytes));
  made->buffer_bytes = buffer_bytes;
  made->most_at_once_s = HUGE_VAL;
  if (made->lent_fd < 0 || made->wake_fd < 0 || made->done_fd < 0 || !made->names_text || !made->answers_text ||
      !made->answer_ends || !made->received || !made->places || !made->ups || !made->buffer) {
    npu_gr_shed_free(made);
    return nullptr;
  }
  memcpy(made->answer_ends, answer_ends, num_answers * sizeof(int64_t));
  memcpy(made->answers_text, answers, answers_bytes);
  int num_names = 0;
  for (char *at = made->names_text, *end; num_names < MAX_NAMES && (end = strchr(at, '\n')); at = end + 1) {
    *end = 0;
    made->names[num_names++] = at;
  }
  if (!start(made)) {
    npu_gr_shed_free(made);
    return nullptr;
  }
  return made;
}

// What is readable when the owner should look, until it takes.
NPU_GR_API int npu_gr_shed_done(const Shedder *shedder) { return shedder->done_fd; }

// Where the bytes are that go up.
NPU_GR_API void *npu_gr_shed_buffer(const Shedder *shedder) { return shedder->buffer; }

// Read a connection from now on; returns its number, which no other one has, or 0: it stays its owner's.
// at_once_since_at: since when each of its requests has come at once; infinite: it carries several callers' requests,
// and never goes back for that.
NPU_GR_API int64_t npu_gr_shed_lend(Shedder *shedder, int64_t fd, double at_once_since_at) {
  if (fd < 0 || fd >= MOST_DESCRIPTORS) return 0;
  Locked locked(shedder);
  Place &place = shedder->places[fd];
  if (place.state == IN_HAND) return 0;  // of a connection before, whose owner did not stop it
  if (++shedder->num_lent == 0) ++shedder->num_lent;
  place = {shedder->num_lent, LENT, now_s(), at_once_since_at};
  if (watch(shedder, static_cast<int>(fd), EPOLL_CTL_ADD, true)) return place.lent_as;
  place.state = FREE;
  return 0;
}

// Read a lent connection again: the request that went up was answered.
NPU_GR_API void npu_gr_shed_resume(Shedder *shedder, int64_t fd, int64_t lent_as) {
  Locked locked(shedder);
  Place *place = lent_place(shedder, fd, lent_as);
  if (!place || place->state != UP) return;  // its caller has hung up, which goes up
  place->state = LENT;
  place->answered_at = now_s();
  watch(shedder, static_cast<int>(fd), EPOLL_CTL_MOD, true);
}

// Read a connection no more; what was read of it before is to be taken.
NPU_GR_API void npu_gr_shed_stop(Shedder *shedder, int64_t fd, int64_t lent_as) {
  Locked locked(shedder);
  Place *place;
  while ((place = lent_place(shedder, fd, lent_as)) && place->state == IN_HAND) {
    ++shedder->num_waiting;
    pthread_cond_wait(&shedder->let_go, &shedder->mutex);
    --shedder->num_waiting;
  }
  if (!place) return;
  place->state = FREE;
  epoll_ctl(shedder->lent_fd, EPOLL_CTL_DEL, static_cast<int>(fd), nullptr);
}

// Say when a connection was answered last while it was lent, and since when each of its requests has come at once, on
// the monotonic clock. 0: the descriptor was never lent.
NPU_GR_API void npu_gr_shed_times(Shedder *shedder, int64_t fd, double *answered_at, double *at_once_since_at) {
  *answered_at = *at_once_since_at = 0;
  if (fd < 0 || fd >= MOST_DESCRIPTORS) return;
  Locked locked(shedder);
  *answered_at = shedder->places[fd].answered_at;
  *at_once_since_at = shedder->places[fd].at_once_since_at;
}

// Write the key of a request; returns its bytes, -1: it has none.
NPU_GR_API int64_t npu_gr_shed_key(const Shedder *shedder, const char *data, int64_t size, char *key) {
  Key made;
  if (!make_key(data, size, shedder->names, made)) return -1;
  memcpy(key, made.data, made.size);
  return made.size;
}

// Take all that goes up: `ups` has room for most_ups. Returns how many, and in `refused` [MOST_PATTERNS] how many
// requests of each pattern were refused here since the last time. What the last call returned leaves the buffer.
NPU_GR_API int64_t npu_gr_shed_take(Shedder *shedder, Up *ups, int64_t *refused) {
  Locked locked(shedder);
  shedder->first_byte = shedder->taken_byte;
  shedder->taken_byte = shedder->end_byte;
  int64_t count = 0;
  while (shedder->first_up != shedder->end_up) ups[count++] = shedder->ups[shedder->first_up++ % shedder->most_ups];
  for (Slot &slot : shedder->slots) slot.num_up = 0;
  count_refused(shedder, refused);
  eventfd_t times;
  if (shedder->has_told) eventfd_read(shedder->done_fd, &times);
  shedder->has_told = false;
  if (shedder->waits_for_room && !is_full(shedder)) {
    shedder->waits_for_room = false;
    eventfd_write(shedder->wake_fd, 1);
  }
  return count;
}

// Say which requests are refused from now on, and how many of them go up. patterns: [MOST_PATTERNS].
// most_at_once_s: a connection whose requests have come at once for longer goes back. refused: of the patterns
// until now, as `take` says it.
NPU_GR_API void npu_gr_shed_turn(Shedder *shedder, const Pattern *patterns, double most_at_once_s, int64_t *refused) {
  Locked locked(shedder);
  count_refused(shedder, refused);
  for (int n = 0; n < MOST_PATTERNS; ++n) {
    Slot &slot = shedder->slots[n];
    const Pattern &pattern = patterns[n];
    if (slot.number != pattern.number) {
      slot.number = pattern.number;
      slot.num_up = 0;
      slot.key_bytes = pattern.key_bytes;
      if (pattern.number) memcpy(slot.key, pattern.key, pattern.key_bytes);
    }
    slot.quota = pattern.quota > slot.num_up ? pattern.quota - slot.num_up : 0;
  }
  shedder->most_at_once_s = most_at_once_s;
  shedder->turned_at = now_s();
  shedder->has_refused = false;
}
}
