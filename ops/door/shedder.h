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
//     FREE --accepted--> LENT --> IN_HAND --> LENT      refused
//                         ^          +------> FREE      it went up, or its caller has hung up
//                         |          +------> STRANGE   it waits to go up
//                         '------its turn-------'
//
// While requests are refused, the thread accepts connections, too: a caller who hangs up and connects anew costs Python
// nothing. Such a newcomer is the thread's alone until it goes up, and then the owner's alone; if its caller hangs up
// before, the thread closes it. One that is silent goes up, so the limits of silence are the owner's. A stranger is a
// newcomer that goes up although the door would not take a request of it now. Each costs the owner as much as a quarter
// of a rank, so while requests are refused few of them go up a second, and the others wait, unread, in their order.
//
// Invariants:
//   S1  the thread reads and writes a descriptor of the owner's only while it has it IN_HAND, and `stop` and
//       `accept_no_more` wait for the end of that, so the owner closes no descriptor beside a read
//   S2  between two calls of `take` no more requests of a pattern go up than the larger of its last two quotas
//   S3  while requests are refused, no more strangers go up than MOST_STRANGERS and STRANGERS_PER_S a second
//   S4  the thread accepts no more connections than MOST_UNKNOWN and UNKNOWN_PER_S a second, beside those that have
//       brought a request like one of the patterns
//   S5  no call waits for more than one round: MOST_EVENTS requests, or MOST_ACCEPTED connections
//
// While the mutex is held, a request that goes up is copied, and the epoll set is changed; nothing is read or sent.
#ifndef NPU_GR_DOOR_SHEDDER_H
#define NPU_GR_DOOR_SHEDDER_H

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
enum { MOST_ACCEPTED = 64 };                 // of one listener in one round
enum { MOST_DESCRIPTORS = 1 << 20 };         // of the process; what has a higher number is not lent
const double SWEEP_S = 0.001;                // between two sweeps: each takes all that came, and a refusal is no later
const double TELL_S = 0.002;       // from `turn` to the owner's next look, while requests are refused: quotas grow old
const double LATE = 2.0;           // as LATE of npu_gr/server/entrance/pacing.py
const double RETRY_S = 0.01;       // as RETRY_S of npu_gr/server/entrance/pacing.py
const double JIFFY_S = 0.004;      // the step of the kernel's clock
const double SILENCE_S = 0.25;     // between two looks for newcomers that are silent
enum { MOST_SILENT = 4 };          // such looks that find nothing of a newcomer; then it goes up
const double MOST_STRANGERS = 16;  // go up between two calls of `take`
const double STRANGERS_PER_S = 400;  // while requests are refused: a tenth of the owner's core
const double MOST_UNKNOWN = 512;     // newcomers at once of which nothing is known
const double UNKNOWN_PER_S = 4000;   // such newcomers: who connects faster, and asks nothing, waits in the kernel
const double SLOW_S = 0.005;         // until the next one is accepted, when there are too many
const double NO_FILE_S = 0.1;        // until the next connection is accepted, when there is no descriptor for it

enum State : uint8_t { FREE = 0, LENT, IN_HAND, UP, STRANGE };

struct Place {       // of a descriptor
  uint32_t lent_as;  // the number of its connection: a descriptor that was closed is soon another one's
  State state;
  uint8_t came_to;          // the number of the listener, of a newcomer; 0: it is its owner's
  bool is_called;           // it was STRANGE, and its turn has come
  bool is_known;            // a request of it was like a pattern
  uint8_t num_silent;       // looks since it was read
  int32_t newcomer;         // its place among the newcomers
  double answered_at;       // 0: nothing was yet
  double at_once_since_at;  // as in pacing.py
};

struct Slot {  // of a pattern
  int64_t number;
  int64_t quota;
  int64_t num_up;        // of them that were not taken yet
  PatternCounts counts;  // that were not told yet
  int64_t key_bytes;
  char key[MAX_KEY_BYTES];
};

struct Waiting {
  int32_t fd;
  uint32_t lent_as;
};

struct Listener {
  int fd;
  bool is_open;  // connections are accepted
  bool is_in_hand;
  bool is_shared;
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
  Listener listeners[MOST_LISTENERS];
  int32_t *newcomers;  // [MOST_DESCRIPTORS]: their descriptors
  int64_t num_newcomers, most_newcomers;
  double num_strangers;  // that may go up now
  double strangers_at;   // when that was said
  double num_unknown;    // newcomers of which nothing is known, fewer with time
  double unknown_at;     // when that was said
  Waiting *waiting;      // a ring of MOST_DESCRIPTORS: those that are STRANGE, or were
  uint32_t first_waiting, end_waiting;
  double silence_at;  // of the next look
  double accepts_at;  // there is no descriptor until then; 0: there are some
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
  epoll_event event = {};  // no connection has the number 0: see `watch_listener`
  event.events = is_read ? EPOLLIN | EPOLLRDHUP : EPOLLRDHUP;
  event.data.u64 = static_cast<uint64_t>(shedder->places[fd].lent_as) << 32 | static_cast<uint32_t>(fd);
  return epoll_ctl(shedder->lent_fd, how, fd, &event) == 0;
}

// Wait for a listener's connections, or not.
bool watch_listener(const Shedder *shedder, int64_t number, int how, bool is_read) {
  epoll_event event = {};
  if (is_read) event.events = EPOLLIN;
  event.data.u64 = static_cast<uint64_t>(number);
  return epoll_ctl(shedder->lent_fd, how, shedder->listeners[number - 1].fd, &event) == 0;
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

void add_newcomer(Shedder *shedder, int fd) {
  shedder->places[fd].newcomer = static_cast<int32_t>(shedder->num_newcomers);
  shedder->newcomers[shedder->num_newcomers++] = fd;
}

void remove_newcomer(Shedder *shedder, const Place &place) {
  const int32_t last = shedder->newcomers[--shedder->num_newcomers];
  shedder->newcomers[place.newcomer] = last;
  shedder->places[last].newcomer = place.newcomer;
}

bool has_waiting(const Shedder *shedder) { return shedder->first_waiting != shedder->end_waiting; }

// Whether one more stranger may go up now.
bool may_go_up(const Shedder *shedder) { return shedder->num_strangers >= 1 && !has_waiting(shedder); }

// Let a newcomer wait to go up; it is read when its turn comes.
void let_wait(Shedder *shedder, int fd) {
  shedder->places[fd].state = STRANGE;
  watch(shedder, fd, EPOLL_CTL_MOD, false);
  shedder->waiting[shedder->end_waiting++ % MOST_DESCRIPTORS] = {fd, shedder->places[fd].lent_as};
}

// Say how many strangers may go up from now on, and read those whose turn it is.
void admit_strangers(Shedder *shedder) {
  bool is_refusing = false;
  for (const Slot &slot : shedder->slots) is_refusing |= slot.number != 0;
  const double now_at = now_s(), more = is_refusing ? STRANGERS_PER_S * (now_at - shedder->strangers_at) : HUGE_VAL;
  shedder->strangers_at = now_at;
  const double num = shedder->num_strangers + more;
  shedder->num_strangers = num < MOST_STRANGERS ? num : MOST_STRANGERS;
  while (has_waiting(shedder) && shedder->num_strangers >= 1) {
    const Waiting &next = shedder->waiting[shedder->first_waiting++ % MOST_DESCRIPTORS];
    Place *place = lent_place(shedder, next.fd, next.lent_as);
    if (!place || place->state != STRANGE) continue;  // its caller has hung up
    --shedder->num_strangers;
    place->state = LENT;
    place->is_called = true;
    watch(shedder, next.fd, EPOLL_CTL_MOD, true);
  }
}

void go_up(Shedder *shedder, int fd, int64_t why, int64_t pattern, const char *data, int64_t num_bytes,
           double came_at = 0) {
  Place &place = shedder->places[fd];
  place.state = FREE;
  if (why == UP_BYTES && !place.came_to) place.state = UP;
  if (place.came_to) {
    remove_newcomer(shedder, place);
    const bool is_stranger = why != UP_BYTES || !pattern;
    shedder->num_strangers -= is_stranger && !place.is_called;
  }
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
  shedder->ups[shedder->end_up++ % shedder->most_ups] = {fd,      place.lent_as, place.came_to, why,
                                                         pattern, offset,        num_bytes,     came_at};
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

// Say what became of the requests of each pattern since the last time.
void count(Shedder *shedder, PatternCounts *counts) {
  for (Slot &slot : shedder->slots) {
    *counts++ = slot.counts;
    slot.counts = {};
  }
}

}  // namespace

#endif
