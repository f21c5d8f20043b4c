// What the shedder is told, and what it tells. npu_gr/server/entrance/shed_library.py mirrors this, field by field.
#ifndef NPU_GR_SHED_CALL_H
#define NPU_GR_SHED_CALL_H

#include <stdint.h>

#define NPU_GR_SHED_ABI 3

extern "C" {

enum { MOST_PATTERNS = 16, MOST_LISTENERS = 8 };

// Requests that the door refuses: those whose key is this one.
struct Pattern {
  int64_t number;  // from 1 on, of no other pattern; 0: there is none
  const char *key;
  int64_t key_bytes;
  int64_t quota;  // so many more of them go up to the door
};

// What became of requests of a pattern.
struct PatternCounts {
  int64_t refused;
  int64_t abandoned;  // of newcomers, whose callers had hung up
};

enum { UP_BYTES = 0, UP_CLOSED = 1, UP_UNSENT = 2, UP_RETRIES = 3, UP_SILENT = 4 };

// A connection that has something for the owner.
struct Up {
  int64_t fd;
  int64_t lent_as;  // what `lend` returned
  int64_t came_to;  // the number of the listener: it was accepted here, and is the owner's from now on. 0: it was lent
  // BYTES were read: what was lent stays lent, and is not read until `resume`. It goes back if its caller has hung up
  // (CLOSED), if these bytes of an answer found no room (UNSENT), or if its caller, who was refused, retries at once
  // (RETRIES). A newcomer is never CLOSED, and goes up if it is SILENT, or if there is no room for it.
  int64_t why;
  int64_t pattern;  // the number of that of the request that was read; 0: it has none
  int64_t offset;   // of the bytes in the buffer; they stay there until the next `take`
  int64_t num_bytes;
  double came_at;  // of BYTES: when, on the monotonic clock
};
}

#endif
