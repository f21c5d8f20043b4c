// `main SEED COUNT`: keys of requests that were cut, doubled and overwritten at random, each in memory of its own size,
// under the sanitizers.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../../../ops/door/request_key.h"

static uint64_t state;

// splitmix64
static uint64_t draw(uint64_t below) {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % below;
}

static const char *const PIECES[] = {
    "POST /v1/rank HTTP/1.1\r\n",
    "Content-Length: 16\r\n",
    "content-length:0\r\n",
    "Authorization: Bearer k\r\n",
    "grpc-timeout: 5m\r\n",
    "Connection: close\r\n",
    "\r\n",
    "{\"tenant\": \"a\"}",
    "{\"tenant\" : \"",
    "\xa6tenant\xd9\xff",
    "\xa6tenant\xbf",
    "Content-Length: 999999999999999\r\n",
    " : \r\n",
    "\r",
    "\n",
    ":",
};
static const char *const NAMES[] = {"authorization", "grpc-timeout", nullptr};

int main(int, char **arguments) {
  state = strtoull(arguments[1], nullptr, 10);
  const long count = strtol(arguments[2], nullptr, 10);
  long num_keys = 0;
  static char text[16384];
  for (long n = 0; n < count; ++n) {
    int64_t size = 0;
    if (draw(2)) {  // nearly a plain request
      const int64_t body_bytes = static_cast<int64_t>(draw(3) ? draw(40) : 4000 + draw(4000));
      size = sprintf(text, "POST /v1/rank HTTP/1.1\r\nContent-Length: %d\r\n\r\n", static_cast<int>(body_bytes));
      for (int64_t b = 0; b < body_bytes; ++b) text[size + b] = "{\"tenan:a }"[draw(11)];
      const char *tenant = PIECES[7 + draw(4)];
      if (static_cast<int64_t>(strlen(tenant)) < body_bytes)
        memcpy(text + size + draw(body_bytes - strlen(tenant)), tenant, strlen(tenant));
      if (body_bytes && draw(2)) text[size] = '{';
      size += body_bytes;
    } else {
      for (uint64_t piece = draw(9); piece--;) {
        const char *from = PIECES[draw(sizeof PIECES / sizeof *PIECES)];
        memcpy(text + size, from, strlen(from));
        size += static_cast<int64_t>(strlen(from));
      }
    }
    for (uint64_t change = draw(3); size && change--;) text[draw(size)] = static_cast<char>(draw(256));
    if (size && !draw(4)) size = static_cast<int64_t>(draw(size));
    char *data = static_cast<char *>(malloc(size ? size : 1));
    memcpy(data, text, size);
    Key key;
    num_keys += make_key(data, size, NAMES, key);
    free(data);
  }
  printf("%ld keys\n", num_keys);
  return num_keys ? 0 : 1;
}
