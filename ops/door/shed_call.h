// What the shedder is asked. npu_gr/server/entrance/shed_library.py mirrors these structures, field by field.
#ifndef NPU_GR_SHED_CALL_H
#define NPU_GR_SHED_CALL_H

#include <stdint.h>

#define NPU_GR_SHED_ABI 1

extern "C" {

// Requests that the door refuses: those whose key is this one.
struct Pattern {
  const char *key;
  int64_t key_bytes;
  int64_t quota;    // in, out: so many more of them go up to the door
  int64_t refused;  // out: of them were refused here
};

enum { UP_BYTES = 0, UP_CLOSED = 1, UP_UNSENT = 2, UP_RETRIES = 3 };

// A connection that has something for whoever lent it.
struct Up {
  int64_t fd;
  // BYTES were read: it stays lent, and is not read until `resume`. It goes back if its caller has hung up (CLOSED), if
  // these bytes of an answer found no room (UNSENT), or if its caller, who was refused, retries at once (RETRIES).
  int64_t why;
  int64_t pattern;  // of the request that was read; -1: it has none
  int64_t offset;   // of the bytes in `buffer`
  int64_t num_bytes;
};

// What the shedder does until it is asked to end.
struct ShedJob {
  Pattern *patterns;
  int64_t num_patterns;
  int64_t most_at_once;  // a connection with more requests in a row that came at once goes back; below 0: none does
  Up *ups;               // [most_ups]
  int64_t most_ups;
  char *buffer;  // of what goes up; where a round may find no room in it, the job waits for its end
  int64_t buffer_bytes;
  int64_t room_bytes;  // the longest request that is refused here is shorter
  int64_t num_ups;     // out
};
}

#endif
