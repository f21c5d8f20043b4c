// The thread of the shedder: shedder.h says what it does.
#ifndef NPU_GR_DOOR_SHED_THREAD_H
#define NPU_GR_DOOR_SHED_THREAD_H

#include "shedder.h"

namespace {

Text next_answer(Shedder *shedder) {
  const int64_t n = shedder->next_answer, begin = n ? shedder->answer_ends[n - 1] : 0;
  shedder->next_answer = (n + 1) % shedder->num_answers;
  return {shedder->answers_text + begin, shedder->answer_ends[n] - begin};
}

struct Work {
  Shedder *shedder;
  Refusal refusals[MOST_EVENTS];  // of one round, that are to be written
  int num_refusals = 0;
  int left[MOST_EVENTS];  // newcomers of the round whose callers have hung up
  int num_left = 0;

  // Accept connections of a listener.
  void accept(int64_t number) {
    Listener &listener = shedder->listeners[number - 1];
    {
      Locked locked(shedder);
      forget_unknown(now_s());
      if (!listener.is_open || is_crowded()) return;
      listener.is_in_hand = true;
    }
    bool has_files = true;
    for (int n = 0; n < MOST_ACCEPTED && has_files; ++n) {
      const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) {
        const int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if (!welcome(fd, number)) break;
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        has_files = false;
      } else if (errno == EAGAIN) {
        break;
      }  // else its caller left before it was accepted
    }
    Locked locked(shedder);
    listener.is_in_hand = false;
    if (!has_files)
      rest(now_s() + NO_FILE_S);
    else if (shedder->num_unknown >= MOST_UNKNOWN)
      rest(now_s() + SLOW_S);
    if (shedder->num_waiting) pthread_cond_broadcast(&shedder->let_go);
  }

  // With the mutex held: there is no place for one more, and it may not go up.
  bool is_crowded() const {
    return is_full(shedder) || (shedder->num_newcomers >= shedder->most_newcomers && !may_go_up(shedder));
  }

  // Take a new connection in; false: no other one.
  bool welcome(int fd, int64_t number) {
    if (fd >= MOST_DESCRIPTORS) {
      close(fd);
      return true;
    }
    Locked locked(shedder);
    if (++shedder->num_lent == 0) ++shedder->num_lent;
    const double at_once_since_at = shedder->listeners[number - 1].is_shared ? HUGE_VAL : now_s();
    shedder->places[fd] = {shedder->num_lent, LENT, static_cast<uint8_t>(number), false, false, 0, 0, 0,
                           at_once_since_at};
    add_newcomer(shedder, fd);
    ++shedder->num_unknown;
    // where the owner has no room for more, it decides who makes some
    const bool is_over = shedder->num_newcomers > shedder->most_newcomers && may_go_up(shedder);
    if (is_over || !watch(shedder, fd, EPOLL_CTL_ADD, true)) go_up(shedder, fd, UP_SILENT, 0, nullptr, 0);
    return !is_crowded() && shedder->num_unknown < MOST_UNKNOWN;
  }

  // With the mutex held: newcomers that were accepted long ago count no more.
  void forget_unknown(double now_at) {
    const double fewer = UNKNOWN_PER_S * (now_at - shedder->unknown_at);
    shedder->unknown_at = now_at;
    shedder->num_unknown = shedder->num_unknown > fewer ? shedder->num_unknown - fewer : 0;
  }

  // With the mutex held: accept nothing until then; 0: from now on.
  void rest(double until_at) {
    shedder->accepts_at = until_at;
    for (int64_t number = 1; number <= MOST_LISTENERS; ++number)
      if (shedder->listeners[number - 1].is_open) watch_listener(shedder, number, EPOLL_CTL_MOD, !until_at);
  }

  // With the mutex held: what is to be done from time to time.
  void tend(double now_at) {
    if (shedder->accepts_at && now_at >= shedder->accepts_at) rest(0);
    if (now_at < shedder->silence_at) return;
    shedder->silence_at = now_at + SILENCE_S;
    for (int64_t n = shedder->num_newcomers; n-- && !is_full(shedder);) {
      const int fd = shedder->newcomers[n];
      Place &place = shedder->places[fd];
      if (place.state != LENT || ++place.num_silent <= MOST_SILENT) continue;
      place.num_silent = MOST_SILENT;
      if (may_go_up(shedder)) go_up(shedder, fd, UP_SILENT, 0, nullptr, 0);
    }
    if (shedder->first_up != shedder->end_up) tell(shedder);
  }

  // With the mutex held: a request has not come at once (Pacer.late of pacing.py).
  void be_late(Place &place, double came_at) {
    if (place.at_once_since_at > came_at) return;  // never one that retries
    const double oldest_at = place.answered_at - 2 * shedder->most_at_once_s;
    double since_at = place.at_once_since_at > oldest_at ? place.at_once_since_at : oldest_at;
    since_at += LATE * (came_at - place.answered_at);
    place.at_once_since_at = since_at < came_at ? since_at : came_at;
  }

  // With the mutex held: forget a connection whose caller has hung up. slot: of the request that was read, or null.
  void leave(int fd, Slot *slot) {
    Place &place = shedder->places[fd];
    if (!place.came_to) {
      go_up(shedder, fd, UP_CLOSED, slot ? slot->number : 0, nullptr, 0);
      return;
    }
    if (slot) ++slot->counts.abandoned;
    remove_newcomer(shedder, place);
    place.state = FREE;
    left[num_left++] = fd;  // closed when the mutex is free
  }

  // Let a newcomer wait with a request that is like no pattern; false: it is like one.
  bool waits(int fd, const Key *key) {
    Locked locked(shedder);
    if (key && find(shedder, *key)) return false;
    let_wait(shedder, fd);
    return true;
  }

  // Read a connection, and decide; false: there was nothing to read.
  bool look(const epoll_event &event) {
    const int fd = static_cast<int>(event.data.u64 & 0xffffffff);
    if (!(event.data.u64 >> 32)) {
      accept(fd);
      return true;
    }
    const bool has_hung_up = event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    Place &place = shedder->places[fd];
    bool peeks;  // a newcomer's: it may have to wait with what it has sent
    {
      Locked locked(shedder);
      if (!lent_place(shedder, fd, event.data.u64 >> 32)) return true;  // it went back meanwhile
      if (place.state == UP || place.state == STRANGE) {
        leave(fd, nullptr);
        return true;
      }
      place.state = IN_HAND;
      peeks = place.came_to && !place.is_called && !may_go_up(shedder);
    }
    const ssize_t size = recv(fd, shedder->received, shedder->room_bytes, MSG_DONTWAIT | (peeks ? MSG_PEEK : 0));
    const int error = errno;
    const double now_at = now_s(), came_at = came_since(fd, place.answered_at, now_at);
    Key key;
    const bool has_key =
        size > 0 && size < shedder->room_bytes && make_key(shedder->received, size, shedder->names, key);
    if (size > 0 && peeks) {
      if (waits(fd, has_key ? &key : nullptr)) return true;
      recv(fd, nullptr, size, MSG_DONTWAIT | MSG_TRUNC);
    }
    Locked locked(shedder);
    if (size < 0 && (error == EAGAIN || error == EINTR)) {
      place.state = LENT;
      return false;
    }
    const bool is_late = came_at - place.answered_at > RETRY_S;
    if (is_late) be_late(place, came_at);
    place.num_silent = 0;
    Slot *slot = has_key ? find(shedder, key) : nullptr;
    const int64_t pattern = slot ? slot->number : 0;
    if (slot && place.came_to && !place.is_known) {
      place.is_known = true;
      if (shedder->num_unknown >= 1) --shedder->num_unknown;
    }
    if (size <= 0 || (slot && has_hung_up)) {
      leave(fd, slot);
    } else if (!slot) {
      go_up(shedder, fd, UP_BYTES, 0, shedder->received, size, came_at);
    } else if (slot->quota > 0) {
      --slot->quota;
      ++slot->num_up;
      go_up(shedder, fd, UP_BYTES, pattern, shedder->received, size, came_at);
    } else {
      ++slot->counts.refused;
      shedder->has_refused = true;
      const bool retries = !is_late && now_at - place.at_once_since_at > shedder->most_at_once_s;
      refusals[num_refusals++] = {fd, pattern, retries, next_answer(shedder), 0, 0};
    }
    return true;
  }

  // Write all answers in a row: the first one wakes a caller that sleeps, the others find it awake.
  void answer() {
    for (int n = 0; n < num_refusals; ++n) {
      Refusal &refusal = refusals[n];
      refusal.sent = send(refusal.fd, refusal.answer.data, refusal.answer.size, MSG_DONTWAIT | MSG_NOSIGNAL);
      refusal.error = errno;
    }
    {
      Locked locked(shedder);
      answered(now_s());
    }
    num_refusals = 0;
    for (int n = 0; n < num_left; ++n) close(left[n]);
    num_left = 0;
  }

  // With the mutex held: let go of the connections that were answered.
  void answered(double now_at) {
    for (int n = 0; n < num_refusals; ++n) {
      const Refusal &refusal = refusals[n];
      const int64_t sent = refusal.sent < 0 ? 0 : refusal.sent;
      shedder->places[refusal.fd].answered_at = now_at;
      if (refusal.sent < 0 && refusal.error != EAGAIN && refusal.error != EINTR)
        leave(refusal.fd, nullptr);
      else if (sent < refusal.answer.size)
        go_up(shedder, refusal.fd, UP_UNSENT, 0, refusal.answer.data + sent, refusal.answer.size - sent);
      else if (refusal.retries && (!shedder->places[refusal.fd].came_to || may_go_up(shedder)))
        go_up(shedder, refusal.fd, UP_RETRIES, refusal.pattern, nullptr, 0);
      else
        shedder->places[refusal.fd].state = LENT;
    }
    if (shedder->num_waiting) pthread_cond_broadcast(&shedder->let_go);
    if (shedder->first_up != shedder->end_up) tell(shedder);
  }

  bool may_go_on() const {
    Locked locked(shedder);
    return !is_full(shedder) && !shedder->ends;
  }

  // Look at the connections that have something to read, in rounds; returns how many had.
  int sweep() {
    epoll_event events[MOST_EVENTS];
    int num_seen = 0;
    for (int found = MOST_EVENTS; found == MOST_EVENTS && num_seen < MOST_SEEN && may_go_on();) {
      found = epoll_wait(shedder->lent_fd, events, MOST_EVENTS, 0);
      for (int n = 0; n < found; ++n) num_seen += look(events[n]);
      answer();
    }
    return num_seen;
  }

  // Sleep until the owner wants something, requests have come (`for_requests`), or so many seconds have passed (below
  // 0: for ever).
  void sleep(bool for_requests, double seconds) const {
    pollfd fds[] = {{shedder->wake_fd, POLLIN, 0}, {shedder->lent_fd, POLLIN, 0}};
    timespec patience = {static_cast<time_t>(seconds), static_cast<long>(1e9 * (seconds - floor(seconds)))};
    eventfd_t count;
    ppoll(fds, for_requests ? 2 : 1, seconds < 0 ? nullptr : &patience, nullptr);
    if (fds[0].revents) eventfd_read(shedder->wake_fd, &count);
  }

  void run() {
    while (true) {
      const int num_seen = sweep();
      bool for_requests = false;
      double seconds = SWEEP_S;
      {
        Locked locked(shedder);
        if (shedder->ends) return;
        if (shedder->num_newcomers || shedder->accepts_at) tend(now_s());
        const double tell_in_s = shedder->turned_at + TELL_S - now_s();
        const bool wants_turn = shedder->has_refused || shedder->num_strangers < 1 || has_waiting(shedder);
        if (wants_turn && tell_in_s <= 0) tell(shedder);
        shedder->waits_for_room = is_full(shedder);
        if (shedder->waits_for_room) {
          seconds = -1;
        } else if (!num_seen) {
          for_requests = true;
          seconds = shedder->has_told || !wants_turn ? -1 : tell_in_s;
          const double rests_s = shedder->accepts_at ? fmax(shedder->accepts_at - now_s(), 0) : NO_FILE_S;
          if ((shedder->num_newcomers || shedder->accepts_at) && (seconds < 0 || seconds > rests_s)) seconds = rests_s;
        }
      }
      sleep(for_requests, seconds);
    }
  }
};

void *work(void *argument) {
  Work work;
  work.shedder = static_cast<Shedder *>(argument);
  work.run();
  return nullptr;
}

// Begin the thread; it takes no signals, which are for the owner's threads.
bool start(Shedder *shedder) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  shedder->has_thread = !pthread_create(&shedder->thread, nullptr, work, shedder);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (shedder->has_thread) pthread_setname_np(shedder->thread, "npu-gr-shed");
  return shedder->has_thread;
}

}  // namespace

#endif
