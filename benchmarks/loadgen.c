// A load generator for one HTTP/1.1 server on loopback, in one thread: epoll, keep-alive connections, one POST at a
// time on each. Latency counts from the instant at which a request was due, including the wait for a free connection.
// Each request ends as exactly one of: in time, late (or 504), rejected (429), other (a status), timed out, failed.
// A request with X-Request-Timeout-Ms times out after that time, any other after --deadline-ms.
//
//   loadgen --port N --path /v1/rank --goal-ms 50 --deadline-ms 1000 --stream SPEC [--stream SPEC ...]
//           [--seed N] [--watch PID,PID] [--pause PID,AT_S,FOR_S]
//
// A closed client sends again immediately, also after a 429. `parse_stream` describes SPEC. The result is one JSON
// object on standard output. --watch reads the processes' CPU time at both ends of every stream; --pause stops a
// process for a time. Timeouts are detected within a tick of 10 ms. Linux only.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// ---- counts, in nanoseconds; written in milliseconds

#define BIN_NS 50000000LL  // requests are also counted by when they were due, in bins of 50 ms

enum { STEP_BITS = 5, STEPS = 1 << STEP_BITS, OCTAVES = 38 };  // 3 % a step, to 2^38 us

// A histogram of times: 32 steps an octave of microseconds, like HdrHistogram.
typedef struct {
  uint64_t counts[OCTAVES * STEPS];
  uint64_t total;
  int64_t most_ns;
} Histogram;

static int step_of(uint64_t us) {
  if (us < 2 * STEPS) return (int)us;
  int shift = 63 - __builtin_clzll(us) - STEP_BITS;
  return (shift + 1) * STEPS + (int)((us >> shift) - STEPS);
}

// The middle of a step, in microseconds.
static double middle_of(int step) {
  if (step < 2 * STEPS) return step + 0.5;
  int shift = step / STEPS - 1;
  return ((double)(step % STEPS + STEPS) + 0.5) * (double)(1ULL << shift);
}

static void record(Histogram *histogram, int64_t ns) {
  int step = step_of(ns > 0 ? (uint64_t)ns / 1000 : 0);
  histogram->counts[step < OCTAVES * STEPS ? step : OCTAVES * STEPS - 1]++;
  histogram->total++;
  if (ns > histogram->most_ns) histogram->most_ns = ns;
}

// The quantile `share`.
static double quantile_ms(const Histogram *histogram, double share) {
  double wanted = share * (double)histogram->total;
  uint64_t seen = 0;
  for (int step = 0; step < OCTAVES * STEPS; step++) {
    seen += histogram->counts[step];
    if (seen && (double)seen >= wanted) {
      double ms = middle_of(step) * 1e-3;
      double most_ms = (double)histogram->most_ns * 1e-6;
      return ms < most_ms ? ms : most_ms;
    }
  }
  return 0;
}

static void write_histogram(FILE *out, const char *name, const Histogram *histogram) {
  fprintf(out, "\"%s\":{\"count\":%llu,\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f,\"max\":%.3f}", name,
          (unsigned long long)histogram->total, quantile_ms(histogram, 0.5), quantile_ms(histogram, 0.9),
          quantile_ms(histogram, 0.99), (double)histogram->most_ns * 1e-6);
}

// The outcome of a request: each is counted under exactly one.
typedef enum { IN_TIME, LATE, REJECTED, OTHER, TIMED_OUT, FAILED, NUM_FATES } Fate;
static const char *const FATES[NUM_FATES] = {"in_time", "late", "rejected", "other", "timeouts", "errors"};

typedef struct {
  uint64_t due;  // requests that there should be
  uint64_t fates[NUM_FATES];
  uint64_t unsent;     // timeouts for which no connection was free until the deadline
  Histogram answered;  // in time or late, from the instant the request was due
  uint64_t (*bins)[NUM_FATES];
  int num_bins;
} Stats;

static void make_bins(Stats *stats, int64_t span_ns) {
  stats->num_bins = (int)(span_ns / BIN_NS) + 2;
  stats->bins = calloc((size_t)stats->num_bins, sizeof *stats->bins);
  if (!stats->bins) abort();
}

// since_ns: due instant, from the start of the stream. took_ns: from the due instant until now.
static void count(Stats *stats, Fate fate, int64_t since_ns, int64_t took_ns) {
  stats->fates[fate]++;
  int64_t bin = since_ns / BIN_NS;
  if (bin >= stats->num_bins) bin = stats->num_bins - 1;
  stats->bins[bin][fate]++;
  if (fate == IN_TIME || fate == LATE) record(&stats->answered, took_ns);
}

static void write_stats(FILE *out, const Stats *stats) {
  fprintf(out, "\"due\":%llu,\"unsent\":%llu", (unsigned long long)stats->due, (unsigned long long)stats->unsent);
  for (int fate = 0; fate < NUM_FATES; fate++)
    fprintf(out, ",\"%s\":%llu", FATES[fate], (unsigned long long)stats->fates[fate]);
  fputc(',', out);
  write_histogram(out, "answered_ms", &stats->answered);
  fputs(",\"bins\":[", out);
  for (int bin = 0; bin < stats->num_bins; bin++) {
    fputs(bin ? ",[" : "[", out);
    for (int fate = 0; fate < NUM_FATES; fate++)
      fprintf(out, fate ? ",%llu" : "%llu", (unsigned long long)stats->bins[bin][fate]);
    fputc(']', out);
  }
  fputc(']', out);
}

// ---- streams: requests, connections, and due instants

#define NS 1000000000LL

typedef struct {
  char *data;
  size_t size;
  int64_t deadline;  // nanoseconds from due to timeout; 0 = --deadline-ms
} Request;           // head and body

struct Stream;

typedef struct {
  struct Stream *stream;
  int fd;        // -1 = not connected
  bool is_busy;  // a request is being sent or its answer is not complete
  const Request *request;
  size_t sent;
  char head[4096];  // head of the answer
  size_t have;
  int64_t left;  // remaining bytes of the answer's body; -1 = the head is not complete
  int status;
  bool closes;       // the server closes the connection after this answer
  int64_t due_at;    // due instant of the request
  int64_t wakes_at;  // end of a closed client's wait; 0 = not waiting
} Connection;

typedef struct Stream {
  char name[32];
  char bodies[512];
  bool is_closed;  // closed loop: every connection sends again after its answer
  int num_connections;
  double from_s;
  double to_s;
  double rate;     // Poisson: requests a second
  int burst_size;  // otherwise: requests at once ...
  double every_s;  // ... and their interval
  Request *requests;
  int num_requests;
  Connection *connections;
  Connection **idle;  // ring, longest idle first
  int first_idle;
  int num_idle;
  int64_t *due_at;  // open loop: drawn before the run
  long num_due;
  long num_released;  // due by now
  long num_taken;     // given to a connection, or timed out without one
  int64_t begins_at;
  int64_t ends_at;
  int num_busy;  // connections with a request in flight
  bool has_begun;
  bool has_ended;
  int64_t cpu_ns[2];  // CPU time of the watched processes at both ends
  uint64_t random;
  Stats stats;
} Stream;

static void fail(const char *what, const char *about) {
  fprintf(stderr, "loadgen: %s: %s\n", what, about);
  exit(2);
}

static void *zeros(size_t count, size_t size) {
  void *found = calloc(count ? count : 1, size);
  if (!found) fail("no memory", "");
  return found;
}

// splitmix64
static uint64_t draw(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// "name=hot,mode=closed,conns=16,from=0.5,to=4.5,bodies=FILE"; mode=poisson has rate, mode=bursts has size and every.
static void parse_stream(Stream *stream, char *text) {
  char mode[16] = "";
  char *rest = NULL;
  stream->num_connections = 1;
  for (char *part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
    char *value = strchr(part, '=');
    if (!value) fail("a part of --stream needs KEY=VALUE", part);
    *value++ = 0;
    if (!strcmp(part, "name"))
      snprintf(stream->name, sizeof stream->name, "%s", value);
    else if (!strcmp(part, "mode"))
      snprintf(mode, sizeof mode, "%s", value);
    else if (!strcmp(part, "bodies"))
      snprintf(stream->bodies, sizeof stream->bodies, "%s", value);
    else if (!strcmp(part, "conns"))
      stream->num_connections = atoi(value);
    else if (!strcmp(part, "from"))
      stream->from_s = atof(value);
    else if (!strcmp(part, "to"))
      stream->to_s = atof(value);
    else if (!strcmp(part, "rate"))
      stream->rate = atof(value);
    else if (!strcmp(part, "size"))
      stream->burst_size = atoi(value);
    else if (!strcmp(part, "every"))
      stream->every_s = atof(value);
    else
      fail("unknown key in --stream", part);
  }
  stream->is_closed = !strcmp(mode, "closed");
  if (!stream->is_closed && strcmp(mode, "poisson") && strcmp(mode, "bursts")) fail("unknown mode", mode);
  if (!strcmp(mode, "poisson") && stream->rate <= 0) fail("mode=poisson needs rate", stream->name);
  if (!strcmp(mode, "bursts") && (stream->burst_size < 1 || stream->every_s <= 0))
    fail("mode=bursts needs size and every", stream->name);
  if (stream->num_connections < 1 || stream->to_s <= stream->from_s) fail("needs conns, from < to", stream->name);
}

// One request a line: headers, each followed by a tab, then the body.
static void read_requests(Stream *stream, const char *path) {
  FILE *file = fopen(stream->bodies, "r");
  if (!file) fail("cannot read bodies", stream->bodies);
  char *line = NULL;
  size_t room = 0;
  ssize_t size;
  while ((size = getline(&line, &room, file)) > 0) {
    if (line[size - 1] == '\n') line[--size] = 0;
    if (!size) continue;
    stream->requests = realloc(stream->requests, sizeof(Request) * (size_t)(stream->num_requests + 1));
    Request *request = &stream->requests[stream->num_requests++];
    char *body = strrchr(line, '\t') ? strrchr(line, '\t') + 1 : line;
    size_t body_size = (size_t)(line + size - body);
    char *to = request->data = zeros(1, strlen(path) + 2 * (size_t)size + 128);
    to += sprintf(to, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n", path);
    for (const char *from = line; from < body; from++) to += sprintf(to, *from == '\t' ? "\r\n" : "%c", *from);
    const char *budget = strcasestr(request->data, "\r\nx-request-timeout-ms:");
    request->deadline = budget ? (int64_t)(atof(budget + 23) * 1e6) : 0;
    to += sprintf(to, "Content-Length: %zu\r\n\r\n", body_size);
    memcpy(to, body, body_size);
    request->size = (size_t)(to - request->data) + body_size;
  }
  free(line);
  fclose(file);
  if (!stream->num_requests) fail("no bodies in", stream->bodies);
}

// Draw all due instants of an open loop.
static void draw_due(Stream *stream) {
  double span_s = stream->to_s - stream->from_s;
  double rate = stream->rate > 0 ? stream->rate : stream->burst_size / stream->every_s;
  size_t room = (size_t)(span_s * rate + 10 * sqrt(span_s * rate) + 64 + stream->burst_size);
  stream->due_at = zeros(room, sizeof(int64_t));
  double at_s = 0;
  while (true) {
    if (stream->rate > 0) at_s += -log1p(-(double)(draw(&stream->random) >> 11) * 0x1p-53) / rate;
    if (at_s >= span_s - 1e-9) break;
    for (int n = 0; n < (stream->rate > 0 ? 1 : stream->burst_size); n++)
      if ((size_t)stream->num_due < room) stream->due_at[stream->num_due++] = stream->begins_at + (int64_t)(at_s * 1e9);
    if (stream->rate <= 0) at_s += stream->every_s;
  }
}

static void rest(Connection *connection) {
  Stream *stream = connection->stream;
  stream->idle[(stream->first_idle + stream->num_idle++) % stream->num_connections] = connection;
}

static Connection *next_idle(Stream *stream) {
  Connection *found = stream->idle[stream->first_idle];
  stream->first_idle = (stream->first_idle + 1) % stream->num_connections;
  stream->num_idle--;
  return found;
}

// ---- the head of an answer

static const char *header(const char *head, const char *name) {
  const char *found = strcasestr(head, name);
  return found ? found + strlen(name) : NULL;
}

// Parse the head of an answer, once it is complete. Returns false if it is not supported.
static bool read_head(Connection *connection) {
  connection->head[connection->have] = 0;
  char *end = strstr(connection->head, "\r\n\r\n");
  if (!end) return connection->have + 1 < sizeof connection->head;
  end[2] = 0;
  const char *value = header(connection->head, "\r\ncontent-length:");
  if (sscanf(connection->head, "HTTP/1.%*d %d", &connection->status) != 1 || !value) return false;
  connection->left = atoll(value) - (int64_t)(connection->have - (size_t)(end + 4 - connection->head));
  connection->closes = header(connection->head, "\r\nconnection: close") != NULL;
  return connection->left >= 0;
}

// ---- the run

enum { MOST_STREAMS = 8, MOST_WATCHED = 64, MOST_EVENTS = 512 };
static const int64_t TICK_NS = 10000000;
static const int64_t BACKOFF_NS = 10000000;  // wait of a closed client whose connection failed
static const int64_t SETTLE_NS = 50000000;   // from the last connect to the start

static Stream streams[MOST_STREAMS];
static int num_streams;
static int port;
static char path[256] = "/";
static int64_t goal_ns = 50000000;
static int64_t deadline_ns = NS;
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

// Count the connection's finished request, and let the connection rest, wait or send again.
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
  else
    connection->wakes_at = now;  // sent by `wake`, to avoid recursion
}

static void send_more(Connection *connection, int64_t now) {
  const Request *request = connection->request;
  while (connection->sent < request->size) {
    ssize_t size =
        send(connection->fd, request->data + connection->sent, request->size - connection->sent, MSG_NOSIGNAL);
    if (size >= 0)
      connection->sent += (size_t)size;
    else if (errno == EAGAIN)
      return;  // continues when the socket is writable
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
  return connection->status == 429 ? REJECTED : OTHER;
}

// Read all available bytes. A server may close an idle connection.
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
    bool is_wrong = size <= 0 || !connection->is_busy;  // closed, or an answer without a request
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
    stream->num_released++;
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
    for (int n = 0; stream->is_closed && n < stream->num_connections; n++) begin(&stream->connections[n], now);
  }
  if (!stream->has_ended && now >= stream->ends_at) {
    stream->has_ended = true;
    stream->cpu_ns[1] = cpu_ns();
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
    printf("%s{\"name\":\"%s\",\"span_s\":%.4f,\"server_cpu_s\":%.6f,", n ? "," : "", stream->name,
           stream->to_s - stream->from_s, (double)(stream->cpu_ns[1] - stream->cpu_ns[0]) * 1e-9);
    write_stats(stdout, &stream->stats);
    putchar('}');
  }
  printf("]}\n");
  return 0;
}
