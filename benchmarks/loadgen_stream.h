// One stream of requests: what it sends, over how many connections, and when each request is due.
#ifndef NPU_GR_BENCH_LOADGEN_STREAM_H_
#define NPU_GR_BENCH_LOADGEN_STREAM_H_

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "loadgen_stats.h"

#define NS 1000000000LL

typedef struct {
  char *data;
  size_t size;
  int64_t deadline;  // nanoseconds from due, after which the client gives up; 0 = the run's
} Request;           // head and body, as they are sent

struct Stream;

typedef struct {
  int64_t ran_ns;
  int64_t waited_ns;  // for a core
} MainThread;

typedef struct {
  struct Stream *stream;
  int fd;        // -1 = not connected
  bool is_busy;  // a request is being sent or its answer is not whole
  const Request *request;
  size_t sent;
  char head[4096];  // of the answer, until it is whole
  size_t have;
  int64_t left;  // of the answer's body; -1 = the head is not whole
  int status;
  bool closes;          // the server said that it closes after this answer
  int64_t retry_after;  // nanoseconds that the answer asked to wait
  int64_t due_at;       // of its request
  int64_t wakes_at;     // a closed client that waits; 0 = none
} Connection;

typedef struct Stream {
  char name[32];
  char bodies[512];
  bool is_closed;  // closed loop: every connection sends again once its answer is there
  int num_connections;
  double from_s;
  double to_s;
  double rate;     // Poisson: requests a second
  int burst_size;  // else: so many at once ...
  double every_s;  // ... every so often
  Request *requests;
  int num_requests;
  Connection *connections;
  Connection **idle;  // ring: the connection that rested longest is the next one
  int first_idle;
  int num_idle;
  int64_t *due_at;  // open loop: drawn before anything is sent
  long num_due;
  long num_released;  // of them are due by now
  long num_taken;     // of them were given to a connection, or timed out without one
  int64_t begins_at;
  int64_t ends_at;
  int num_busy;  // connections with a request under way
  bool has_begun;
  bool has_ended;
  int64_t cpu_ns[2];   // of the watched processes, at the beginning and the end
  MainThread main[2];  // of the first one
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
  if (!stream->is_closed && strcmp(mode, "poisson") && strcmp(mode, "bursts")) fail("mode is none of ours", mode);
  if (!strcmp(mode, "poisson") && stream->rate <= 0) fail("mode=poisson needs rate", stream->name);
  if (!strcmp(mode, "bursts") && (stream->burst_size < 1 || stream->every_s <= 0))
    fail("mode=bursts needs size and every", stream->name);
  if (stream->num_connections < 1 || stream->to_s <= stream->from_s) fail("needs conns, from < to", stream->name);
}

// One request a line: headers, each with a tab behind it, then the body.
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

// Draw every instant at which a request of an open loop is due.
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

#endif  // NPU_GR_BENCH_LOADGEN_STREAM_H_
