// Reading the head of an answer.
#ifndef NPU_GR_BENCH_LOADGEN_ANSWER_H_
#define NPU_GR_BENCH_LOADGEN_ANSWER_H_

#include "loadgen_stream.h"

static const char *header(const char *head, const char *name) {
  const char *found = strcasestr(head, name);
  return found ? found + strlen(name) : NULL;
}

// Read the head of an answer, once it is whole. Returns false if it is none that we know.
static bool read_head(Connection *connection) {
  connection->head[connection->have] = 0;
  char *end = strstr(connection->head, "\r\n\r\n");
  if (!end) return connection->have + 1 < sizeof connection->head;
  end[2] = 0;
  const char *value = header(connection->head, "\r\ncontent-length:");
  if (sscanf(connection->head, "HTTP/1.%*d %d", &connection->status) != 1 || !value) return false;
  connection->left = atoll(value) - (int64_t)(connection->have - (size_t)(end + 4 - connection->head));
  connection->closes = header(connection->head, "\r\nconnection: close") != NULL;
  if ((value = header(connection->head, "\r\nretry-after-ms:")))
    connection->retry_after = (int64_t)(atof(value) * 1e6);
  else if ((value = header(connection->head, "\r\nretry-after:")))
    connection->retry_after = atoll(value) * NS;
  return connection->left >= 0;
}

#endif  // NPU_GR_BENCH_LOADGEN_ANSWER_H_
