// The calls of the shedder: shedder.h says what it is.
#include "shed_thread.h"

extern "C" {
#define NPU_GR_API __attribute__((visibility("default")))

NPU_GR_API int64_t npu_gr_shed_abi() { return NPU_GR_SHED_ABI; }

NPU_GR_API void npu_gr_shed_free(Shedder *shedder) {
  if (!shedder) return;
  if (shedder->has_thread) {
    {
      Locked locked(shedder);
      shedder->ends = true;
    }
    eventfd_write(shedder->wake_fd, 1);
    pthread_join(shedder->thread, nullptr);
  }
  for (int fd : {shedder->lent_fd, shedder->wake_fd, shedder->done_fd})
    if (fd >= 0) close(fd);
  for (int64_t n = 0; n < shedder->num_newcomers; ++n) close(shedder->newcomers[n]);
  for (int64_t n = shedder->first_up; n != shedder->end_up; ++n)
    if (shedder->ups[n % shedder->most_ups].came_to) close(static_cast<int>(shedder->ups[n % shedder->most_ups].fd));
  for (void *at :
       {static_cast<void *>(shedder->names_text), static_cast<void *>(shedder->answers_text),
        static_cast<void *>(shedder->answer_ends), static_cast<void *>(shedder->received),
        static_cast<void *>(shedder->places), static_cast<void *>(shedder->newcomers),
        static_cast<void *>(shedder->waiting), static_cast<void *>(shedder->ups), static_cast<void *>(shedder->buffer)})
    free(at);
  free(shedder);
}

// Make one. names: of the headers that the door reads, in lower case, each ended by a line feed. answers: the refusals,
// one after the other, and where each ends. most_ups and buffer_bytes: of what goes up and was not taken; where a round
// may find no room there, nothing is read. room_bytes: the longest request that is refused here is shorter; the buffer
// has room for 17. null: there is no memory, no descriptor, or no thread.
NPU_GR_API Shedder *npu_gr_shed_new(const char *names, const char *answers, const int64_t *answer_ends,
                                    int64_t num_answers, int64_t most_ups, int64_t buffer_bytes, int64_t room_bytes) {
  Shedder *made = static_cast<Shedder *>(calloc(1, sizeof(Shedder)));
  if (!made) return nullptr;
  made->lent_fd = epoll_create1(EPOLL_CLOEXEC);
  made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  made->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  pthread_mutex_init(&made->mutex, nullptr);
  pthread_cond_init(&made->let_go, nullptr);
  const int64_t answers_bytes = answer_ends[num_answers - 1];
  made->names_text = strdup(names);
  made->answers_text = static_cast<char *>(malloc(answers_bytes));
  made->answer_ends = static_cast<int64_t *>(malloc(num_answers * sizeof(int64_t)));
  made->num_answers = num_answers;
  made->received = static_cast<char *>(malloc(room_bytes));
  made->room_bytes = room_bytes;
  made->places = static_cast<Place *>(calloc(MOST_DESCRIPTORS, sizeof(Place)));  // untouched pages take no memory
  made->waiting = static_cast<Waiting *>(malloc(MOST_DESCRIPTORS * sizeof(Waiting)));
  made->num_strangers = MOST_STRANGERS;
  made->newcomers = static_cast<int32_t *>(malloc(MOST_DESCRIPTORS * sizeof(int32_t)));  // likewise
  made->ups = static_cast<Up *>(malloc(most_ups * sizeof(Up)));
  made->most_ups = most_ups;
  made->buffer = static_cast<char *>(malloc(buffer_bytes));
  made->buffer_bytes = buffer_bytes;
  made->most_at_once_s = HUGE_VAL;
  if (made->lent_fd < 0 || made->wake_fd < 0 || made->done_fd < 0 || !made->names_text || !made->answers_text ||
      !made->answer_ends || !made->received || !made->places || !made->newcomers || !made->waiting || !made->ups ||
      !made->buffer) {
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

// What is readable when the owner should look, until it takes.
NPU_GR_API int npu_gr_shed_done(const Shedder *shedder) { return shedder->done_fd; }

// Where the bytes are that go up.
NPU_GR_API void *npu_gr_shed_buffer(const Shedder *shedder) { return shedder->buffer; }

// Read a connection from now on; returns its number, which no other one has, or 0: it stays its owner's.
// at_once_since_at: since when each of its requests has come at once; infinite: it carries several callers' requests,
// and never goes back for that.
NPU_GR_API int64_t npu_gr_shed_lend(Shedder *shedder, int64_t fd, double at_once_since_at) {
  if (fd < 0 || fd >= MOST_DESCRIPTORS) return 0;
  Locked locked(shedder);
  Place &place = shedder->places[fd];
  if (place.state == IN_HAND) return 0;  // of a connection before, whose owner did not stop it
  if (++shedder->num_lent == 0) ++shedder->num_lent;
  place = {shedder->num_lent, LENT, 0, false, false, 0, 0, now_s(), at_once_since_at};
  if (watch(shedder, static_cast<int>(fd), EPOLL_CTL_ADD, true)) return place.lent_as;
  place.state = FREE;
  return 0;
}

// Read a lent connection again: the request that went up was answered.
NPU_GR_API void npu_gr_shed_resume(Shedder *shedder, int64_t fd, int64_t lent_as) {
  Locked locked(shedder);
  Place *place = lent_place(shedder, fd, lent_as);
  if (!place || place->state != UP) return;  // its caller has hung up, which goes up
  place->state = LENT;
  place->answered_at = now_s();
  watch(shedder, static_cast<int>(fd), EPOLL_CTL_MOD, true);
}

// Read a connection no more; what was read of it before is to be taken.
NPU_GR_API void npu_gr_shed_stop(Shedder *shedder, int64_t fd, int64_t lent_as) {
  Locked locked(shedder);
  Place *place;
  while ((place = lent_place(shedder, fd, lent_as)) && place->state == IN_HAND) {
    ++shedder->num_waiting;
    pthread_cond_wait(&shedder->let_go, &shedder->mutex);
    --shedder->num_waiting;
  }
  if (!place) return;
  place->state = FREE;
  epoll_ctl(shedder->lent_fd, EPOLL_CTL_DEL, static_cast<int>(fd), nullptr);
}

// Say when a connection was answered last while it was lent, and since when each of its requests has come at once, on
// the monotonic clock. 0: the descriptor was never lent.
NPU_GR_API void npu_gr_shed_times(Shedder *shedder, int64_t fd, double *answered_at, double *at_once_since_at) {
  *answered_at = *at_once_since_at = 0;
  if (fd < 0 || fd >= MOST_DESCRIPTORS) return;
  Locked locked(shedder);
  *answered_at = shedder->places[fd].answered_at;
  *at_once_since_at = shedder->places[fd].at_once_since_at;
}

// Write the key of a request; returns its bytes, -1: it has none.
NPU_GR_API int64_t npu_gr_shed_key(const Shedder *shedder, const char *data, int64_t size, char *key) {
  Key made;
  if (!make_key(data, size, shedder->names, made)) return -1;
  memcpy(key, made.data, made.size);
  return made.size;
}

// Accept connections of a listening socket, which does not block, from now on; returns the listener's number from 1 on,
// or 0: they stay its owner's. is_shared: its connections carry several callers' requests, as `lend` has it.
NPU_GR_API int64_t npu_gr_shed_accept(Shedder *shedder, int64_t fd, int64_t is_shared) {
  Locked locked(shedder);
  for (int64_t number = 1; number <= MOST_LISTENERS; ++number) {
    Listener &listener = shedder->listeners[number - 1];
    if (listener.is_open) continue;
    listener = {static_cast<int>(fd), true, false, is_shared != 0};
    if (watch_listener(shedder, number, EPOLL_CTL_ADD, !shedder->accepts_at)) return number;
    listener.is_open = false;
    return 0;
  }
  return 0;
}

// Accept no more of a listener's connections; those that were accepted stay.
NPU_GR_API void npu_gr_shed_accept_no_more(Shedder *shedder, int64_t number) {
  Locked locked(shedder);
  Listener &listener = shedder->listeners[number - 1];
  while (listener.is_in_hand) {
    ++shedder->num_waiting;
    pthread_cond_wait(&shedder->let_go, &shedder->mutex);
    --shedder->num_waiting;
  }
  if (!listener.is_open) return;
  listener.is_open = false;
  epoll_ctl(shedder->lent_fd, EPOLL_CTL_DEL, listener.fd, nullptr);
}

// How many connections were accepted here, and did not go up yet.
NPU_GR_API int64_t npu_gr_shed_newcomers(Shedder *shedder) {
  Locked locked(shedder);
  return shedder->num_newcomers;
}

// Take all that goes up: `ups` has room for most_ups. Returns how many, and in `counts` [MOST_PATTERNS] what became
// here of the requests of each pattern since the last time. What the last call returned leaves the buffer.
NPU_GR_API int64_t npu_gr_shed_take(Shedder *shedder, Up *ups, PatternCounts *counts) {
  Locked locked(shedder);
  shedder->first_byte = shedder->taken_byte;
  shedder->taken_byte = shedder->end_byte;
  int64_t num_ups = 0;
  while (shedder->first_up != shedder->end_up) ups[num_ups++] = shedder->ups[shedder->first_up++ % shedder->most_ups];
  for (Slot &slot : shedder->slots) slot.num_up = 0;
  count(shedder, counts);
  admit_strangers(shedder);
  eventfd_t times;
  if (shedder->has_told) eventfd_read(shedder->done_fd, &times);
  shedder->has_told = false;
  if (shedder->waits_for_room && !is_full(shedder)) {
    shedder->waits_for_room = false;
    eventfd_write(shedder->wake_fd, 1);
  }
  return num_ups;
}

// Say which requests are refused from now on, and how many of them go up. patterns: [MOST_PATTERNS].
// most_at_once_s: a connection whose requests have come at once for longer goes back. most_newcomers: further
// connections go up as soon as they are accepted. counts: of the patterns until now, as `take` says it.
NPU_GR_API void npu_gr_shed_turn(Shedder *shedder, const Pattern *patterns, double most_at_once_s,
                                 int64_t most_newcomers, PatternCounts *counts) {
  Locked locked(shedder);
  count(shedder, counts);
  for (int n = 0; n < MOST_PATTERNS; ++n) {
    Slot &slot = shedder->slots[n];
    const Pattern &pattern = patterns[n];
    if (slot.number != pattern.number) {
      slot.number = pattern.number;
      slot.num_up = 0;
      slot.key_bytes = pattern.key_bytes;
      if (pattern.number) memcpy(slot.key, pattern.key, pattern.key_bytes);
    }
    slot.quota = pattern.quota > slot.num_up ? pattern.quota - slot.num_up : 0;
  }
  shedder->most_at_once_s = most_at_once_s;
  shedder->most_newcomers = most_newcomers;
  shedder->turned_at = now_s();
  shedder->has_refused = false;
}
}
