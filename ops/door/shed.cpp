// The shedder: it refuses requests that the door has just refused, without Python.
//
// The event loop lends it idle connections of callers who were refused. It waits for them in two epoll sets: one of
// connections that are read every SWEEP_S, one of those whose callers retry at once, which are read so seldom that to
// refuse them takes SHARE of a core. A request whose key (head.h) is that of one of the patterns is answered here, once
// the pattern's quota has gone up; everything else goes up, and its connection is read no more until the owner says so.
//
// It has a thread of its own, which is at work between `post` and `wait`. No other call may come meanwhile, and no lent
// descriptor that is read may be closed. A descriptor that its owner closes leaves its set by itself.
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

#include "head.h"

namespace {

enum { NOW = 0, RETRYING = 1, NUM_SETS = 2, MOST_EVENTS = 256, NONE = -1 };

const double SWEEP_S = 0.001;  // between two sweeps: each takes all that came, and a refusal is no later
const double TELL_S = 0.002;   // from `post` to the owner's next look, while requests are refused: quotas grow old
const double JIFFY_S = 0.004;  // the step of the kernel's clock

// npu_gr/server/entrance/pacing.py says why.
const double SHARE = 0.05;
const double RETRY_S = 0.01;
const int FREE = 4;
const double MOST_S = 0.5;
const double LEAST_S = 0.001;
const double IMPATIENT = 1.0 / 8;
const double OVER = 1.0 / 64;

struct Place {      // of a descriptor
  int set;          // NONE: it is not lent
  bool is_read;     // false: a request of it went up, and is not answered yet
  bool may_retry;   // it may be paced: it carries one caller's requests
  int num_at_once;  // requests in a row that came within RETRY_S of the answer before
  double answered_at;
};

struct Shedder {
  int sets[NUM_SETS];
  int64_t num_retrying;
  Place *places;
  int64_t num_places;
  char *names_text;
  const char *names[MAX_NAMES + 1];
  char *answers_text;
  const int64_t *answer_ends;
  int64_t num_answers;
  int64_t next_answer;
  double retrying_at;   // when those that retry are read next
  double hung_up;       // share of those that retry
  double impatient_at;  // when it was too large last
  uint64_t random;
  int wake_fd;  // the owner wants the end of the job
  int done_fd;  // the owner should want it
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  SweepJob *job;  // that is to be done; null: none
  bool has_thread;
  bool ends;
};

struct Refusal {
  int fd;
  Text answer;
};

double now_s(clockid_t clock = CLOCK_MONOTONIC) {
  timespec at;
  clock_gettime(clock, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

// The owner may ask for it beside a sweep.
void set_answered(Place &place) {
  const double at = now_s();
  __atomic_store(&place.answered_at, &at, __ATOMIC_RELAXED);
}

// Wait for a connection's requests, or only for its caller to hang up.
bool watch(Shedder *shedder, int fd, int set, int how, bool is_read) {
  epoll_event event = {};
  event.events = is_read ? EPOLLIN | EPOLLRDHUP : EPOLLRDHUP;
  event.data.fd = fd;
  return epoll_ctl(shedder->sets[set], how, fd, &event) == 0;
}

void forget(Shedder *shedder, int64_t fd) {
  Place &place = shedder->places[fd];
  if (place.set == RETRYING) __atomic_sub_fetch(&shedder->num_retrying, 1, __ATOMIC_RELAXED);
  place.set = NONE;
}

void give_back(Shedder *shedder, int fd) {
  epoll_ctl(shedder->sets[shedder->places[fd].set], EPOLL_CTL_DEL, fd, nullptr);
  forget(shedder, fd);
}

// Seconds that the newest bytes of a socket have lain in the kernel.
double received_ago_s(int fd) {
  tcp_info info;
  socklen_t size = offsetof(tcp_info, tcpi_last_data_recv) + sizeof info.tcpi_last_data_recv;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size)) return 0;
  const double ago_s = 1e-3 * info.tcpi_last_data_recv - JIFFY_S;
  return ago_s > 0 ? ago_s : 0;
}

// Note that a request was read that will be refused; true: its caller retries.
bool retries(Place &place, int fd, double read_at) {
  double ago_s = read_at - place.answered_at;
  if (ago_s > RETRY_S) ago_s -= received_ago_s(fd);
  place.num_at_once = ago_s <= RETRY_S ? place.num_at_once + 1 : 0;
  return place.may_retry && place.num_at_once > FREE;
}

void move(Shedder *shedder, int fd, int set) {
  Place &place = shedder->places[fd];
  if (place.set == set) return;
  epoll_ctl(shedder->sets[place.set], EPOLL_CTL_DEL, fd, nullptr);
  __atomic_add_fetch(&shedder->num_retrying, set == RETRYING ? 1 : -1, __ATOMIC_RELAXED);
  place.set = set;
  watch(shedder, fd, set, EPOLL_CTL_ADD, true);
}

Text next_answer(Shedder *shedder) {
  const int64_t n = shedder->next_answer, begin = n ? shedder->answer_ends[n - 1] : 0;
  shedder->next_answer = (n + 1) % shedder->num_answers;
  return {shedder->answers_text + begin, shedder->answer_ends[n] - begin};
}

struct Sweep {
  Shedder *shedder;
  SweepJob *job;
  int64_t used_bytes;  // of the buffer
  int64_t num_refused;
  int64_t num_seen;     // of one sweep: connections that had something to read
  int64_t num_hung_up;  // of one sweep: of them, those whose callers had hung up
  Refusal refusals[MOST_EVENTS];
  int64_t num_refusals;

  void up(int fd, int64_t why, int64_t pattern, int64_t num_bytes) {
    if (why == UP_BYTES) {
      shedder->places[fd].is_read = false;
      watch(shedder, fd, shedder->places[fd].set, EPOLL_CTL_MOD, false);
    } else {
      give_back(shedder, fd);
    }
    job->ups[job->num_ups++] = {fd, why, pattern, used_bytes, num_bytes};
    used_bytes += num_bytes;
  }

  int64_t find(const char *data, int64_t size) {
    Key key;
    if (!make_key(data, size, shedder->names, key)) return NONE;
    for (int64_t n = 0; n < job->num_patterns; ++n) {
      const Pattern &pattern = job->patterns[n];
      if (pattern.key_bytes == key.size && !memcmp(pattern.key, key.data, key.size)) return n;
    }
    return NONE;
  }

  void look(int fd, bool has_hung_up) {
    if (!shedder->places[fd].is_read) {
      ++num_hung_up;
      return up(fd, UP_CLOSED, NONE, 0);
    }
    char *data = job->buffer + used_bytes;
    const ssize_t size = recv(fd, data, job->room_bytes, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    ++num_seen;
    num_hung_up += has_hung_up;
    if (size <= 0) return up(fd, UP_CLOSED, NONE, 0);
    const int64_t found = size == job->room_bytes ? static_cast<int64_t>(NONE) : find(data, size);
    if (found == NONE) return up(fd, UP_BYTES, NONE, size);
    Pattern &pattern = job->patterns[found];
    if (has_hung_up) return up(fd, UP_CLOSED, found, 0);
    if (pattern.quota > 0) {
      --pattern.quota;
      return up(fd, UP_BYTES, found, size);
    }
    ++pattern.refused;
    ++num_refused;
    move(shedder, fd, retries(shedder->places[fd], fd, now_s()) ? RETRYING : NOW);
    refusals[num_refusals++] = {fd, next_answer(shedder)};
  }

  // All answers in a row: the first one wakes a caller that sleeps, the others find it awake.
  void answer() {
    for (int64_t n = 0; n < num_refusals; ++n) {
      const Refusal &refusal = refusals[n];
      ssize_t sent = send(refusal.fd, refusal.answer.data, refusal.answer.size, MSG_DONTWAIT | MSG_NOSIGNAL);
      set_answered(shedder->places[refusal.fd]);
      if (sent == refusal.answer.size) continue;
      if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        up(refusal.fd, UP_CLOSED, NONE, 0);
        continue;
      }
      if (sent < 0) sent = 0;
      memcpy(job->buffer + used_bytes, refusal.answer.data + sent, refusal.answer.size - sent);
      up(refusal.fd, UP_UNSENT, NONE, refusal.answer.size - sent);
    }
    num_refusals = 0;
  }

  bool is_full() const {
    return job->num_ups + MOST_EVENTS > job->most_ups || used_bytes + 2 * job->room_bytes > job->buffer_bytes;
  }

  // Look at so many connections of a set that have something to read.
  void look_at(int set, int64_t most) {
    epoll_event events[MOST_EVENTS];
    num_seen = num_hung_up = 0;
    if (most > MOST_EVENTS) most = MOST_EVENTS;
    const int found = is_full() || most < 1 ? 0 : epoll_wait(shedder->sets[set], events, static_cast<int>(most), 0);
    for (int n = 0; n < found && !is_full(); ++n)
      look(events[n].data.fd, events[n].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
    answer();
  }

  // Look at those that retry, and say when to look again.
  void look_at_retrying() {
    const double began_s = now_s(CLOCK_THREAD_CPUTIME_ID);
    look_at(RETRYING, MOST_EVENTS);
    const double took_s = now_s(CLOCK_THREAD_CPUTIME_ID) - began_s, now_at = now_s();
    for (int64_t n = 0; n < num_seen; ++n) shedder->hung_up += OVER * ((n < num_hung_up) - shedder->hung_up);
    if (shedder->hung_up > IMPATIENT) shedder->impatient_at = now_at;
    const double since_s = now_at - shedder->impatient_at;
    const double most_s = since_s < 9 ? LEAST_S * exp2(since_s) : MOST_S;
    shedder->random = shedder->random * 6364136223846793005u + 1442695040888963407u;
    const double spread = 0.5 + static_cast<double>(shedder->random >> 11) * 0x1p-53;
    const double pause_s = spread * (took_s / SHARE < most_s ? took_s / SHARE : most_s);
    shedder->retrying_at = now_at + (pause_s > SWEEP_S ? pause_s : SWEEP_S);
  }

  // Those that retry and may go up at once.
  void bring_up(int64_t places) {
    for (int64_t n = 0; n < job->num_patterns; ++n)
      if (job->patterns[n].quota < places) places = job->patterns[n].quota;
    if (job->num_patterns && shedder->num_retrying) look_at(RETRYING, places);
  }
};

// Sleep until the owner wants the end, or something has come (`for_requests`), or so many seconds have passed (below 0:
// for ever); true: it wants the end.
bool sleep(const Shedder *shedder, bool for_requests, double seconds) {
  pollfd fds[] = {{shedder->wake_fd, POLLIN, 0}, {shedder->sets[NOW], POLLIN, 0}};
  timespec patience = {static_cast<time_t>(seconds), static_cast<long>(1e9 * (seconds - floor(seconds)))};
  ppoll(fds, for_requests ? 2 : 1, seconds < 0 ? nullptr : &patience, nullptr);
  return fds[0].revents != 0;
}

void work(Shedder *shedder, SweepJob *job) {
  static thread_local Sweep sweep;
  sweep = {shedder, job, 0, 0, 0, 0, {}, 0};
  job->num_ups = 0;
  const double tell_at = now_s() + TELL_S;
  sweep.bring_up(job->places);
  for (bool has_told = false;;) {
    double now_at = now_s();
    if (shedder->num_retrying && now_at >= shedder->retrying_at) sweep.look_at_retrying();
    sweep.look_at(NOW, MOST_EVENTS);
    const bool has_seen = sweep.num_seen > 0;
    now_at = now_s();
    if (!has_told && (job->num_ups || (sweep.num_refused && now_at >= tell_at))) {
      has_told = true;
      eventfd_write(shedder->done_fd, 1);
    }
    double rest_s = -1;
    if (shedder->num_retrying) rest_s = shedder->retrying_at > now_at ? shedder->retrying_at - now_at : 0;
    if (!has_told && sweep.num_refused && (rest_s < 0 || rest_s > tell_at - now_at)) rest_s = tell_at - now_at;
    if (has_seen && (rest_s < 0 || rest_s > SWEEP_S)) rest_s = SWEEP_S;
    if (sweep.is_full()) rest_s = -1;
    if (sleep(shedder, !has_seen && !sweep.is_full(), rest_s)) break;
  }
}

void *work_as_asked(void *argument) {
  Shedder *shedder = static_cast<Shedder *>(argument);
  pthread_mutex_lock(&shedder->mutex);
  while (!shedder->ends) {
    if (!shedder->job) {
      pthread_cond_wait(&shedder->changed, &shedder->mutex);
      continue;
    }
    pthread_mutex_unlock(&shedder->mutex);
    work(shedder, shedder->job);
    pthread_mutex_lock(&shedder->mutex);
    shedder->job = nullptr;
    pthread_cond_broadcast(&shedder->changed);
  }
  pthread_mutex_unlock(&shedder->mutex);
  return nullptr;
}

// Begin the thread; it takes no signals, which are for the owner's threads.
bool start(Shedder *shedder) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  shedder->has_thread = !pthread_create(&shedder->thread, nullptr, work_as_asked, shedder);
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
    pthread_mutex_lock(&shedder->mutex);
    shedder->ends = true;
    pthread_cond_broadcast(&shedder->changed);
    pthread_mutex_unlock(&shedder->mutex);
    pthread_join(shedder->thread, nullptr);
  }
  for (int fd : {shedder->sets[NOW], shedder->sets[RETRYING], shedder->wake_fd, shedder->done_fd})
    if (fd >= 0) close(fd);
  free(shedder->places);
  free(shedder->names_text);
  free(shedder->answers_text);
  free(const_cast<int64_t *>(shedder->answer_ends));
  free(shedder);
}

// Make one. names: of the headers that the door reads, in lower case, each ended by a line feed. answers: the refusals,
// one after the other, and where each ends. null: there is no memory, or no descriptor.
NPU_GR_API Shedder *npu_gr_shed_new(const char *names, const char *answers, const int64_t *answer_ends,
                                    int64_t num_answers) {
  Shedder *made = static_cast<Shedder *>(calloc(1, sizeof(Shedder)));
  if (!made) return nullptr;
  for (int &set : made->sets) set = epoll_create1(EPOLL_CLOEXEC);
  made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  made->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  made->impatient_at = -INFINITY;
  pthread_mutex_init(&made->mutex, nullptr);
  pthread_cond_init(&made->changed, nullptr);
  const int64_t answers_bytes = answer_ends[num_answers - 1];
  int64_t *ends = static_cast<int64_t *>(malloc(num_answers * sizeof(int64_t)));
  made->names_text = strdup(names);
  made->answers_text = static_cast<char *>(malloc(answers_bytes));
  made->answer_ends = ends;
  made->num_answers = num_answers;
  if (made->sets[NOW] < 0 || made->sets[RETRYING] < 0 || made->wake_fd < 0 || made->done_fd < 0 || !ends ||
      !made->names_text || !made->answers_text) {
    npu_gr_shed_free(made);
    return nullptr;
  }
  memcpy(ends, answer_ends, num_answers * sizeof(int64_t));
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

// What is readable when the owner should look, until `wait`.
NPU_GR_API int npu_gr_shed_done(const Shedder *shedder) { return shedder->done_fd; }

// Read a connection from now on; false: it stays its owner's.
NPU_GR_API int npu_gr_shed_lend(Shedder *shedder, int64_t fd, int may_retry) {
  if (fd >= shedder->num_places) {
    int64_t count = shedder->num_places ? shedder->num_places : 256;
    while (count <= fd) count *= 2;
    Place *more = static_cast<Place *>(realloc(shedder->places, count * sizeof(Place)));
    if (!more) return 0;
    for (int64_t n = shedder->num_places; n < count; ++n) more[n] = {NONE, false, false, 0, 0};
    shedder->places = more;
    shedder->num_places = count;
  }
  forget(shedder, fd);  // of a connection before it with the same number
  if (!watch(shedder, static_cast<int>(fd), NOW, EPOLL_CTL_ADD, true)) return 0;
  shedder->places[fd] = {NOW, true, may_retry != 0, 0, now_s()};
  return 1;
}

// Read a lent connection again: the request that went up was answered.
NPU_GR_API void npu_gr_shed_resume(Shedder *shedder, int64_t fd) {
  Place &place = shedder->places[fd];
  set_answered(place);
  place.is_read = true;
  if (place.set == RETRYING)
    move(shedder, static_cast<int>(fd), NOW);
  else
    watch(shedder, static_cast<int>(fd), NOW, EPOLL_CTL_MOD, true);
}

// Read a connection no more. `is_closed`: its descriptor is not open any more.
NPU_GR_API void npu_gr_shed_take_back(Shedder *shedder, int64_t fd, int is_closed) {
  if (is_closed)
    forget(shedder, fd);
  else
    give_back(shedder, static_cast<int>(fd));
}

// Connections that are read less often; also while it is at work.
NPU_GR_API int64_t npu_gr_shed_num_retrying(const Shedder *shedder) {
  return __atomic_load_n(&shedder->num_retrying, __ATOMIC_RELAXED);
}

// When a lent connection was answered last, on the monotonic clock; also while it is at work.
NPU_GR_API double npu_gr_shed_answered_at(const Shedder *shedder, int64_t fd) {
  double at;
  __atomic_load(&shedder->places[fd].answered_at, &at, __ATOMIC_RELAXED);
  return at;
}

// Write the key of a request; returns its bytes, -1: it has none.
NPU_GR_API int64_t npu_gr_shed_key(const Shedder *shedder, const char *data, int64_t size, char *key) {
  Key made;
  if (!make_key(data, size, shedder->names, made)) return NONE;
  memcpy(key, made.data, made.size);
  return made.size;
}

// Begin to read and to refuse. `job` stays where it is until `wait`.
NPU_GR_API void npu_gr_shed_post(Shedder *shedder, SweepJob *job) {
  pthread_mutex_lock(&shedder->mutex);
  shedder->job = job;
  pthread_cond_broadcast(&shedder->changed);
  pthread_mutex_unlock(&shedder->mutex);
}

// End it, and take what it has brought.
NPU_GR_API void npu_gr_shed_wait(Shedder *shedder) {
  eventfd_write(shedder->wake_fd, 1);
  pthread_mutex_lock(&shedder->mutex);
  while (shedder->job) pthread_cond_wait(&shedder->changed, &shedder->mutex);
  pthread_mutex_unlock(&shedder->mutex);
  eventfd_t count;
  eventfd_read(shedder->wake_fd, &count);
  eventfd_read(shedder->done_fd, &count);
}
}
