// The shedder: it refuses requests that the door has just refused, without Python.
//
// The event loop lends it idle connections of callers who were refused. It reads them every SWEEP_S. A request whose
// key (request_key.h) is that of one of the patterns is answered here, once the pattern's quota has gone up; everything
// else goes up, and its connection is read no more until the owner says so.
//
// It has a thread of its own, which is at work between `post` and `wait`. No other call may come meanwhile, and no lent
// descriptor that is read may be closed. A descriptor that its owner closes leaves the epoll set by itself.
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

enum { MOST_EVENTS = 16, NONE = -1 };  // of one round: the owner waits for its end

const int MOST_SEEN = 256;     // connections of one sweep
const double SWEEP_S = 0.001;  // between two sweeps: each takes all that came, and a refusal is no later
const double TELL_S = 0.002;   // from `post` to the owner's next look, while requests are refused: quotas grow old
const double RETRY_S = 0.01;   // as RETRY_S of npu_gr/server/entrance/pacing.py
const double JIFFY_S = 0.004;  // the step of the kernel's clock

struct Place {      // of a descriptor
  bool is_read;     // false: a request of it went up, and is not answered yet
  bool may_retry;   // false: it carries several callers' requests, and never goes back for coming at once
  int num_at_once;  // requests in a row that came within RETRY_S of the answer before
  double answered_at;
};

struct Shedder {
  int lent_fd;  // epoll
  int wake_fd;  // the owner wants the end of the job
  int done_fd;  // the owner should want it
  Place *places;
  int64_t num_places;
  char *names_text;
  const char *names[MAX_NAMES + 1];
  char *answers_text;
  int64_t *answer_ends;
  int64_t num_answers;
  int64_t next_answer;
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  ShedJob *job;    // that is to be done; null: none
  bool wants_end;  // of the job
  bool has_thread;
  bool ends;
};

struct Refusal {
  int fd;
  int64_t pattern;
  bool retries;
  Text answer;
};

double now_s() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

// The owner may ask for it while the thread is at work.
void set_answered(Place &place) {
  const double at = now_s();
  __atomic_store(&place.answered_at, &at, __ATOMIC_RELAXED);
}

// Wait for a connection's requests, or only for its caller to hang up.
bool watch(const Shedder *shedder, int fd, int how, bool is_read) {
  epoll_event event = {};
  event.events = is_read ? EPOLLIN | EPOLLRDHUP : EPOLLRDHUP;
  event.data.fd = fd;
  return epoll_ctl(shedder->lent_fd, how, fd, &event) == 0;
}

void give_back(const Shedder *shedder, int fd) { epoll_ctl(shedder->lent_fd, EPOLL_CTL_DEL, fd, nullptr); }

// Seconds that the newest bytes of a socket have lain in the kernel.
double received_ago_s(int fd) {
  tcp_info info;
  socklen_t size = offsetof(tcp_info, tcpi_last_data_recv) + sizeof info.tcpi_last_data_recv;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size)) return 0;
  const double ago_s = 1e-3 * info.tcpi_last_data_recv - JIFFY_S;
  return ago_s > 0 ? ago_s : 0;
}

// Note that a request was read.
void count_at_once(Place &place, int fd) {
  double ago_s = now_s() - place.answered_at;
  if (ago_s > RETRY_S) ago_s -= received_ago_s(fd);
  place.num_at_once = ago_s <= RETRY_S ? place.num_at_once + 1 : 0;
}

Text next_answer(Shedder *shedder) {
  const int64_t n = shedder->next_answer, begin = n ? shedder->answer_ends[n - 1] : 0;
  shedder->next_answer = (n + 1) % shedder->num_answers;
  return {shedder->answers_text + begin, shedder->answer_ends[n] - begin};
}

struct Work {
  Shedder *shedder;
  ShedJob *job;
  int64_t used_bytes;  // of the buffer
  int64_t num_refused;
  Refusal refusals[MOST_EVENTS];  // of one sweep, that are to be written
  int64_t num_refusals;

  bool is_full() const {
    return job->num_ups + MOST_EVENTS > job->most_ups ||
           used_bytes + (MOST_EVENTS + 1) * job->room_bytes > job->buffer_bytes;
  }

  void up(int fd, int64_t why, int64_t pattern, int64_t num_bytes) {
    if (why == UP_BYTES) {
      shedder->places[fd].is_read = false;
      watch(shedder, fd, EPOLL_CTL_MOD, false);
    } else {
      give_back(shedder, fd);
    }
    job->ups[job->num_ups++] = {fd, why, pattern, used_bytes, num_bytes};
    used_bytes += num_bytes;
  }

  int64_t find(const char *data, int64_t size) const {
    Key key;
    if (!make_key(data, size, shedder->names, key)) return NONE;
    for (int64_t n = 0; n < job->num_patterns; ++n) {
      const Pattern &pattern = job->patterns[n];
      if (pattern.key_bytes == key.size && !memcmp(pattern.key, key.data, key.size)) return n;
    }
    return NONE;
  }

  // Read a connection, and decide; true: there was something to read.
  bool look(int fd, bool has_hung_up) {
    Place &place = shedder->places[fd];
    if (!place.is_read) return up(fd, UP_CLOSED, NONE, 0), true;
    char *data = job->buffer + used_bytes;
    const ssize_t size = recv(fd, data, job->room_bytes, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (size <= 0) return up(fd, UP_CLOSED, NONE, 0), true;
    count_at_once(place, fd);
    const int64_t found = size == job->room_bytes ? static_cast<int64_t>(NONE) : find(data, size);
    if (found == NONE) return up(fd, UP_BYTES, NONE, size), true;
    Pattern &pattern = job->patterns[found];
    if (has_hung_up) return up(fd, UP_CLOSED, found, 0), true;
    if (pattern.quota > 0) {
      --pattern.quota;
      return up(fd, UP_BYTES, found, size), true;
    }
    ++pattern.refused;
    ++num_refused;
    const bool retries = place.may_retry && job->most_at_once >= 0 && place.num_at_once > job->most_at_once;
    refusals[num_refusals++] = {fd, found, retries, next_answer(shedder)};
    return true;
  }

  // All answers in a row: the first one wakes a caller that sleeps, the others find it awake.
  void answer() {
    for (int64_t n = 0; n < num_refusals; ++n) {
      const Refusal &refusal = refusals[n];
      ssize_t sent = send(refusal.fd, refusal.answer.data, refusal.answer.size, MSG_DONTWAIT | MSG_NOSIGNAL);
      set_answered(shedder->places[refusal.fd]);
      if (sent == refusal.answer.size) {
        if (refusal.retries) up(refusal.fd, UP_RETRIES, refusal.pattern, 0);
        continue;
      }
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

  // Look at the connections that have something to read, in rounds; true: some had.
  bool sweep() {
    epoll_event events[MOST_EVENTS];
    bool has_seen = false;
    int found = MOST_EVENTS;
    for (int most = MOST_SEEN; found == MOST_EVENTS && most > 0 && !is_full() && !is_wanted(); most -= found) {
      found = epoll_wait(shedder->lent_fd, events, MOST_EVENTS, 0);
      for (int n = 0; n < found; ++n)
        has_seen |= look(events[n].data.fd, events[n].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
      answer();
    }
    return has_seen;
  }

  bool is_wanted() const { return __atomic_load_n(&shedder->wants_end, __ATOMIC_RELAXED); }

  // Sleep until the owner wants the end, something has come (`for_requests`), or so many seconds have passed (below 0:
  // for ever); true: it wants the end.
  bool sleep(bool for_requests, double seconds) const {
    pollfd fds[] = {{shedder->wake_fd, POLLIN, 0}, {shedder->lent_fd, POLLIN, 0}};
    timespec patience = {static_cast<time_t>(seconds), static_cast<long>(1e9 * (seconds - floor(seconds)))};
    ppoll(fds, for_requests ? 2 : 1, seconds < 0 ? nullptr : &patience, nullptr);
    return fds[0].revents != 0;
  }

  void run() {
    const double tell_at = now_s() + TELL_S;
    bool has_told = false, is_over = false;
    while (!is_over) {
      const bool has_seen = sweep();
      const double now_at = now_s();
      if (!has_told && (job->num_ups || (num_refused && now_at >= tell_at))) {
        has_told = true;
        eventfd_write(shedder->done_fd, 1);
      }
      if (is_full())
        is_over = sleep(false, -1);
      else if (has_seen)
        is_over = sleep(false, SWEEP_S);
      else
        is_over = sleep(true, has_told || !num_refused ? -1 : fmax(tell_at - now_at, 0));
    }
  }
};

void *work_as_asked(void *argument) {
  static thread_local Work work;
  Shedder *shedder = static_cast<Shedder *>(argument);
  pthread_mutex_lock(&shedder->mutex);
  while (!shedder->ends) {
    if (!shedder->job) {
      pthread_cond_wait(&shedder->changed, &shedder->mutex);
      continue;
    }
    pthread_mutex_unlock(&shedder->mutex);
    shedder->job->num_ups = 0;
    work.shedder = shedder, work.job = shedder->job;
    work.used_bytes = work.num_refused = work.num_refusals = 0;
    work.run();
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
  for (int fd : {shedder->lent_fd, shedder->wake_fd, shedder->done_fd})
    if (fd >= 0) close(fd);
  free(shedder->places);
  free(shedder->names_text);
  free(shedder->answers_text);
  free(shedder->answer_ends);
  free(shedder);
}

// Make one. names: of the headers that the door reads, in lower case, each ended by a line feed. answers: the refusals,
// one after the other, and where each ends. null: there is no memory, no descriptor, or no thread.
NPU_GR_API Shedder *npu_gr_shed_new(const char *names, const char *answers, const int64_t *answer_ends,
                                    int64_t num_answers) {
  Shedder *made = static_cast<Shedder *>(calloc(1, sizeof(Shedder)));
  if (!made) return nullptr;
  made->lent_fd = epoll_create1(EPOLL_CLOEXEC);
  made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  made->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  pthread_mutex_init(&made->mutex, nullptr);
  pthread_cond_init(&made->changed, nullptr);
  const int64_t answers_bytes = answer_ends[num_answers - 1];
  made->names_text = strdup(names);
  made->answers_text = static_cast<char *>(malloc(answers_bytes));
  made->answer_ends = static_cast<int64_t *>(malloc(num_answers * sizeof(int64_t)));
  made->num_answers = num_answers;
  if (made->lent_fd < 0 || made->wake_fd < 0 || made->done_fd < 0 || !made->names_text || !made->answers_text ||
      !made->answer_ends) {
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

// What is readable when the owner should look, until `wait`.
NPU_GR_API int npu_gr_shed_done(const Shedder *shedder) { return shedder->done_fd; }

// Read a connection from now on; false: it stays its owner's. num_at_once: requests in a row that came at once; below
// 0: it carries several callers' requests, which are not counted.
NPU_GR_API int npu_gr_shed_lend(Shedder *shedder, int64_t fd, int num_at_once) {
  if (fd >= shedder->num_places) {
    int64_t count = shedder->num_places ? shedder->num_places : 256;
    while (count <= fd) count *= 2;
    Place *more = static_cast<Place *>(realloc(shedder->places, count * sizeof(Place)));
    if (!more) return 0;
    for (int64_t n = shedder->num_places; n < count; ++n) more[n] = {false, false, 0, 0};
    shedder->places = more;
    shedder->num_places = count;
  }
  if (!watch(shedder, static_cast<int>(fd), EPOLL_CTL_ADD, true)) return 0;
  shedder->places[fd] = {true, num_at_once >= 0, num_at_once, now_s()};
  return 1;
}

// Read a lent connection again: the request that went up was answered.
NPU_GR_API void npu_gr_shed_resume(Shedder *shedder, int64_t fd) {
  set_answered(shedder->places[fd]);
  shedder->places[fd].is_read = true;
  watch(shedder, static_cast<int>(fd), EPOLL_CTL_MOD, true);
}

// Read a connection no more; one that was closed needs no such call.
NPU_GR_API void npu_gr_shed_take_back(Shedder *shedder, int64_t fd) { give_back(shedder, static_cast<int>(fd)); }

// When a lent connection was answered last, on the monotonic clock; also while it is at work. 0: it never was.
NPU_GR_API double npu_gr_shed_answered_at(const Shedder *shedder, int64_t fd) {
  if (fd < 0 || fd >= shedder->num_places) return 0;
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
NPU_GR_API void npu_gr_shed_post(Shedder *shedder, ShedJob *job) {
  pthread_mutex_lock(&shedder->mutex);
  __atomic_store_n(&shedder->wants_end, false, __ATOMIC_RELAXED);
  shedder->job = job;
  pthread_cond_broadcast(&shedder->changed);
  pthread_mutex_unlock(&shedder->mutex);
}

// End it, and take what it has brought.
NPU_GR_API void npu_gr_shed_wait(Shedder *shedder) {
  __atomic_store_n(&shedder->wants_end, true, __ATOMIC_RELAXED);
  eventfd_write(shedder->wake_fd, 1);
  pthread_mutex_lock(&shedder->mutex);
  while (shedder->job) pthread_cond_wait(&shedder->changed, &shedder->mutex);
  pthread_mutex_unlock(&shedder->mutex);
  eventfd_t count;
  eventfd_read(shedder->wake_fd, &count);
  eventfd_read(shedder->done_fd, &count);
}
}
