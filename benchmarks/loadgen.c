// A load generator for one HTTP/1.1 server on loopback, in one thread: epoll, kept-alive connections, one POST at a
// time on each. Latency counts from the instant at which a request was due, also while it waits for a free connection.
// Each request ends as exactly one of: in time, late (504 too), refused (429), other (another status), timed out, failed.
// A request with X-Request-Timeout-Ms is given up after that time, any other after --deadline-ms.
//
//   loadgen --port N --path /v1/rank --goal-ms 50 --deadline-ms 1000 --stream SPEC [--stream SPEC ...]
//           [--seed N] [--watch PID,PID] [--pause PID,AT_S,FOR_S] [--respect-retry-after]
//
// A closed client sends again at once, also after a 429. A stream is read in loadgen_stream.h. The result is one JSON
// object on standard output. --watch reads the processes' CPU time at both ends of every stream; --pause stops a
// process for a time. Timeouts are noticed within a tick of 10 ms. Linux only.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "loadgen_answer.h"
#include "loadgen_stream.h"

enum { MOST_STREAMS = 8, MOST_WATCHED = 64, MOST_EVENTS = 512 };
static const int64_t TICK_NS = 10000000;
static const int64_t BACKOFF_NS = 10000000;  // of a closed client whose connection failed
static const int64_t SETTLE_NS = 50000000;   // from the last connect to the beginning

static Stream streams[MOST_STREAMS];
static int num_streams;
static int port;
static char path[256] = "/";
static int64_t goal_ns = 50000000;
static int64_t deadline_ns = NS;
static bool respects_retry_after;
static pid_t watched[MOST_WATCHED];
static int num_watched;
static pid_t paused_pid;
static double pause_from_s;
static double pause_for_s;
static int epoll_fd;
static Histogram late_ticks;

static int64_t now_ns(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * NS + at.tv_nsec;
}

static int64_t cpu_ns(void) {
  int64_t total = 0;
  for (int n = 0; n < num_watched; n++) {
    clockid_t clock;
    struct timespec at;
    if (!clock_getcpuclockid(watched[n], &clock) && !clock_gettime(clock, &at)) total += at.tv_sec * NS + at.tv_nsec;
  }
  return total;
}

// What the first watched process's main thread ran, and waited for a core.
static MainThread main_thread(void) {
  MainThread found = {0, 0};
  if (!num_watched) return found;
  char name[64];
  snprintf(name, sizeof name, "/proc/%d/task/%d/schedstat", (int)watched[0], (int)watched[0]);
  FILE *file = fopen(name, "r");
  long long ran = 0;
  long long waited = 0;
  if (file && fscanf(file, "%lld %lld", &ran, &waited) == 2) found = (MainThread){ran, waited};
  if (file) fclose(file);
  return found;
}

// ---- one request on one connection

static void disconnect(Connection *connection) {
  if (connection->fd >= 0) close(connection->fd);
  connection->fd = -1;
}

static bool connect_to_server(Connection *connection, bool waits) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (waits ? 0 : SOCK_NONBLOCK), 0);
  if (fd < 0) return false;
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) {
    close(fd);
    return false;
  }
  if (waits) fcntl(fd, F_SETFL, O_NONBLOCK);
  connection->fd = fd;
  struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = connection};
  if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl", strerror(errno));
  return true;
}

static void begin(Connection *connection, int64_t due_at);

// The connection's request is over: count it, and let the connection rest, wait or send again.
static void finish(Connection *connection, Fate fate, int64_t now) {
  Stream *stream = connection->stream;
  count(&stream->stats, fate, connection->due_at - stream->begins_at, now - connection->due_at);
  connection->is_busy = false;
  stream->num_busy--;
  if (fate == TIMED_OUT || fate == FAILED || connection->closes) disconnect(connection);
  if (!stream->is_closed) {
    rest(connection);
    return;
  }
  if (now >= stream->ends_at) return;
  if (fate == FAILED)
    connection->wakes_at = now + BACKOFF_NS;
  else if (fate == REFUSED && respects_retry_after)
    connection->wakes_at = now + connection->retry_after + 1;
  else
    connection->wakes_at = now;  // at once, see `wake`: never from within itself
}

static void send_more(Connection *connection, int64_t now) {
  const Request *request = connection->request;
  while (connection->sent < request->size) {
    ssize_t size =
        send(connection->fd, request->data + connection->sent, request->size - connection->sent, MSG_NOSIGNAL);
    if (size >= 0)
      connection->sent += (size_t)size;
    else if (errno == EAGAIN)
      return;  // the rest when the socket has room
    else if (errno != EINTR) {
      finish(connection, FAILED, now);
      return;
    }
  }
}

static void begin(Connection *connection, int64_t due_at) {
  Stream *stream = connection->stream;
  connection->request = &stream->requests[draw(&stream->random) % (uint64_t)stream->num_requests];
  connection->sent = 0;
  connection->have = 0;
  connection->left = -1;
  connection->closes = false;
  connection->retry_after = 0;
  connection->due_at = due_at;
  connection->is_busy = true;
  stream->num_busy++;
  if (stream->is_closed) stream->stats.due++;
  if (connection->fd < 0 && !connect_to_server(connection, false))
    finish(connection, FAILED, now_ns());
  else
    send_more(connection, now_ns());
}

static int64_t patience(const Connection *connection) {
  return connection->request->deadline ? connection->request->deadline : deadline_ns;
}

static Fate fate_of(const Connection *connection, int64_t now) {
  int64_t took = now - connection->due_at;
  if (took > patience(connection)) return TIMED_OUT;
  if (connection->status == 200) return took <= goal_ns ? IN_TIME : LATE;
  if (connection->status == 504) return LATE;
  return connection->status == 429 ? REFUSED : OTHER;
}

// Read what came. A server that closes a connection on which nothing is asked does no harm.
static void receive(Connection *connection) {
  static char body[65536];
  while (connection->fd >= 0) {
    bool in_head = connection->is_busy && connection->left < 0;
    char *to = in_head ? connection->head + connection->have : body;
    size_t room = in_head ? sizeof connection->head - 1 - connection->have : sizeof body;
    ssize_t size = recv(connection->fd, to, room, 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    int64_t now = now_ns();
    bool is_wrong = size <= 0 || !connection->is_busy;  // closed, or an answer that nobody asked for
    if (!is_wrong && in_head) {
      connection->have += (size_t)size;
      is_wrong = !read_head(connection);
    } else if (!is_wrong) {
      connection->left -= size;
      is_wrong = connection->left < 0;
    }
    if (is_wrong) {
      if (connection->is_busy)
        finish(connection, FAILED, now);
      else
        disconnect(connection);
      return;
    }
    if (connection->left == 0) finish(connection, fate_of(connection, now), now);
  }
}

// ---- what is due

static void wake(Connection *connection, int64_t now) {
  if (!connection->wakes_at || now < connection->wakes_at) return;
  connection->wakes_at = 0;
  if (now < connection->stream->ends_at) begin(connection, now);
}

static void open_loop(Stream *stream, int64_t now) {
  while (stream->num_released < stream->num_due && stream->due_at[stream->num_released] <= now) {
    record(&stream->stats.late_start, now - stream->due_at[stream->num_released++]);
    stream->stats.due++;
  }
  while (stream->num_taken < stream->num_released) {
    int64_t due_at = stream->due_at[stream->num_taken];
    if (now - due_at > deadline_ns) {
      count(&stream->stats, TIMED_OUT, due_at - stream->begins_at, now - due_at);
      stream->stats.unsent++;
    } else if (stream->num_idle) {
      begin(next_idle(stream), due_at);
    } else {
      break;
    }
    stream->num_taken++;
  }
}

static void advance(Stream *stream, int64_t now) {
  if (!stream->has_begun && now >= stream->begins_at) {
    stream->has_begun = true;
    stream->cpu_ns[0] = cpu_ns();
    stream->main[0] = main_thread();
    for (int n = 0; stream->is_closed && n < stream->num_connections; n++) begin(&stream->connections[n], now);
  }
  if (!stream->has_ended && now >= stream->ends_at) {
    stream->has_ended = true;
    stream->cpu_ns[1] = cpu_ns();
    stream->main[1] = main_thread();
  }
  if (!stream->is_closed) open_loop(stream, now);
}

static void tick(Stream *stream, int64_t now) {
  for (int n = 0; n < stream->num_connections; n++) {
    Connection *connection = &stream->connections[n];
    if (connection->is_busy && now - connection->due_at > patience(connection)) finish(connection, TIMED_OUT, now);
    wake(connection, now);
  }
}

static bool is_over(const Stream *stream) {
  return stream->has_ended && stream->num_taken == stream->num_due && !stream->num_busy;
}

static int64_t sooner(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t next_at(const Stream *stream, int64_t soonest) {
  if (!stream->has_begun) return sooner(soonest, stream->begins_at);
  if (!stream->has_ended) soonest = sooner(soonest, stream->ends_at);
  if (stream->num_released < stream->num_due) soonest = sooner(soonest, stream->due_at[stream->num_released]);
  return soonest;
}

static void run(int64_t begins_at) {
  static struct epoll_event events[MOST_EVENTS];
  int64_t ticks_at = begins_at + TICK_NS;
  int64_t stops_at = paused_pid ? begins_at + (int64_t)(pause_from_s * 1e9) : INT64_MAX;
  int64_t goes_on_at = INT64_MAX;
  while (true) {
    int64_t now = now_ns();
    if (now >= stops_at) {
      kill(paused_pid, SIGSTOP);
      goes_on_at = stops_at + (int64_t)(pause_for_s * 1e9);
      stops_at = INT64_MAX;
    }
    if (now >= goes_on_at) {
      kill(paused_pid, SIGCONT);
      goes_on_at = INT64_MAX;
    }
    bool ticks = now >= ticks_at;
    if (ticks) {
      record(&late_ticks, now - ticks_at);
      ticks_at = now + TICK_NS;
    }
    int64_t soonest = sooner(ticks_at, sooner(stops_at, goes_on_at));
    bool goes_on = goes_on_at != INT64_MAX;
    for (int n = 0; n < num_streams; n++) {
      advance(&streams[n], now);
      if (ticks) tick(&streams[n], now);
      goes_on |= !is_over(&streams[n]);
      soonest = next_at(&streams[n], soonest);
    }
    if (!goes_on) return;
    int64_t wait = soonest - now_ns();
    if (wait < 0) wait = 0;
    struct timespec patience = {.tv_sec = wait / NS, .tv_nsec = wait % NS};
    int found = (int)syscall(SYS_epoll_pwait2, epoll_fd, events, MOST_EVENTS, &patience, NULL, 0);
    if (found < 0 && errno != EINTR) fail("epoll_pwait2 (Linux 5.11 or later)", strerror(errno));
    for (int n = 0; n < found; n++) {
      Connection *connection = events[n].data.ptr;
      if (connection->is_busy && connection->fd >= 0) send_more(connection, now_ns());
      receive(connection);
      wake(connection, now_ns());
    }
  }
}

// ---- options and result

static void parse_options(int argc, char **argv, uint64_t *seed) {
  for (int n = 1; n < argc; n++) {
    if (!strcmp(argv[n], "--respect-retry-after")) {
      respects_retry_after = true;
      continue;
    }
    if (n + 1 == argc) fail("needs a value", argv[n]);
    const char *name = argv[n];
    char *value = argv[++n];
    if (!strcmp(name, "--port"))
      port = atoi(value);
    else if (!strcmp(name, "--path"))
      snprintf(path, sizeof path, "%s", value);
    else if (!strcmp(name, "--goal-ms"))
      goal_ns = (int64_t)(atof(value) * 1e6);
    else if (!strcmp(name, "--deadline-ms"))
      deadline_ns = (int64_t)(atof(value) * 1e6);
    else if (!strcmp(name, "--seed"))
      *seed = strtoull(value, NULL, 10);
    else if (!strcmp(name, "--watch")) {
      for (char *pid = strtok(value, ","); pid && num_watched < MOST_WATCHED; pid = strtok(NULL, ","))
        watched[num_watched++] = atoi(pid);
    } else if (!strcmp(name, "--pause")) {
      if (sscanf(value, "%d,%lf,%lf", &paused_pid, &pause_from_s, &pause_for_s) != 3)
        fail("--pause PID,AT_S,FOR_S", value);
    } else if (!strcmp(name, "--stream") && num_streams < MOST_STREAMS)
      parse_stream(&streams[num_streams++], value);
    else
      fail("unknown option, or too many of it", name);
  }
  if (port < 1 || !num_streams) fail("needs", "--port and at least one --stream");
}

static void make_connections(Stream *stream) {
  stream->connections = zeros((size_t)stream->num_connections, sizeof(Connection));
  stream->idle = zeros((size_t)stream->num_connections, sizeof(Connection *));
  for (int n = 0; n < stream->num_connections; n++) {
    Connection *connection = &stream->connections[n];
    connection->stream = stream;
    connection->fd = -1;
    if (!connect_to_server(connection, true)) fail("cannot connect", strerror(errno));
    if (!stream->is_closed) rest(connection);
  }
}

int main(int argc, char **argv) {
  uint64_t seed = 0;
  parse_options(argc, argv, &seed);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  for (int n = 0; n < num_streams; n++) {
    read_requests(&streams[n], path);
    make_connections(&streams[n]);
  }
  int64_t begins_at = now_ns() + SETTLE_NS;
  for (int n = 0; n < num_streams; n++) {
    Stream *stream = &streams[n];
    stream->random = seed * 1000003ULL + (uint64_t)n;
    stream->begins_at = begins_at + (int64_t)(stream->from_s * 1e9);
    stream->ends_at = begins_at + (int64_t)(stream->to_s * 1e9);
    make_bins(&stream->stats, stream->ends_at - stream->begins_at);
    if (!stream->is_closed) draw_due(stream);
  }
  struct rusage before;
  getrusage(RUSAGE_SELF, &before);
  run(begins_at);
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  double cpu_s =
      (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec - before.ru_utime.tv_sec - before.ru_stime.tv_sec) +
      1e-6 *
          (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec - before.ru_utime.tv_usec - before.ru_stime.tv_usec);
  printf("{\"cpu_s\":%.4f,\"ran_s\":%.4f,", cpu_s, (double)(now_ns() - begins_at) * 1e-9);
  write_histogram(stdout, "late_tick_ms", &late_ticks);
  printf(",\"streams\":[");
  for (int n = 0; n < num_streams; n++) {
    Stream *stream = &streams[n];
    printf(
        "%s{\"name\":\"%s\",\"span_s\":%.4f,\"server_cpu_s\":%.6f,\"main_thread_cpu_s\":%.6f,"
        "\"main_thread_wait_s\":%.6f,",
        n ? "," : "", stream->name, stream->to_s - stream->from_s,
        (double)(stream->cpu_ns[1] - stream->cpu_ns[0]) * 1e-9,
        (double)(stream->main[1].ran_ns - stream->main[0].ran_ns) * 1e-9,
        (double)(stream->main[1].waited_ns - stream->main[0].waited_ns) * 1e-9);
    write_stats(stdout, &stream->stats);
    putchar('}');
  }
  printf("]}\n");
  return 0;
}
