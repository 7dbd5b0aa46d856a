/*
 * ssh_session.c - sessions: the pump, deadlines, keepalive and death. See ssh.h for the rules.
 */
#include "ssh.h"

#include <errno.h>
#include <time.h>

/* One runtime a process, so one of these. */
static struct {
  bool ready;
  cir_ssh_session *sessions;
  uint64_t turn, turn_started;   /* the loop's time that names a turn, and when it began (hrtime) */
  uint64_t cpu;                  /* what this thread had used when a turn was spent last */
  bool spent;                    /* this turn */
  cir_ssh_session *first, *last; /* those that are to be pumped, the longest waiting first */
  size_t waiting;                /* their number */
  bool deferred;                 /* pump_waiting is due */
  bool behind;                   /* a turn was spent before all of them were served */
  char buffer[CIR_SSH_READ];
} module;

char *cir_ssh_buffer(void) {
  return module.buffer;
}

uint64_t cir_ssh_now(const cir_ssh_session *session) {
  return uv_now(cir_loop(session->rt));
}

/* --- life and death ----------------------------------------------------------------------------
 */

void cir_ssh_hold(cir_ssh_session *session) {
  session->holds++;
}

void cir_ssh_release(cir_ssh_session *session) {
  if (--session->holds > 0)
    return;
  if (session->previous != NULL)
    session->previous->next = session->next;
  else
    module.sessions = session->next;
  if (session->next != NULL)
    session->next->previous = session->previous;
  cir_buffer_free(&session->out);
  free(session);
}

cir_ssh_progress cir_ssh_die(cir_ssh_session *session, const cir_ssh_fault *fault) {
  if (session->state == CIR_SSH_DEAD)
    return CIR_SSH_FAILED;
  session->state = CIR_SSH_DEAD;
  session->fault = *fault;
  cir_ssh_schedule(session); /* the pump buries it, once nothing of it is on the C stack */
  return CIR_SSH_FAILED;
}

static void on_timer_closed(uv_handle_t *handle) {
  cir_ssh_release(CIR_CONTAINER_OF(handle, cir_ssh_session, timer));
}

void cir_ssh_transport_closed(cir_ssh_session *session) {
  cir_ssh_release(session);
}

/* --- the pump ----------------------------------------------------------------------------------
 */

/*
 * Write what the transport takes. When that fails the rest is dropped, and the pump goes on to
 * read: the peer's reason may still be there, and the end of its stream surely is.
 */
static void flush(cir_ssh_session *session) {
  while (cir_buffer_size(&session->out) > 0) {
    ssize_t count = session->transport->kind->send(
        session->transport, cir_buffer_bytes(&session->out), cir_buffer_size(&session->out));
    if (count == -EAGAIN)
      return;
    if (count < 0) {
      session->unread = session->hangup = session->again = true;
      break;
    }
    session->out.start += (size_t)count;
    session->sent += (uint64_t)count;
  }
  cir_buffer_free(&session->out); /* 4,096 idle sessions should not keep the room of a burst */
}

/*
 * Read the socket when nobody has a use for what comes: window adjustments, the server's own
 * requests, data for channels that Lua has paused (which their windows bound). libssh2 has no call
 * for that; reading a stream that no peer sends does it. A channel that is closed on both sides
 * serves too, provided its window is full: a smaller one would be adjusted, on a closed channel.
 * Where there is neither, on_alarm opens one after a while.
 */
static void drain(cir_ssh_session *session) {
  enum { NO_STREAM = 77 };
  char byte;
  LIBSSH2_CHANNEL *channel = cir_ssh_channels_any(session);
  if (channel == NULL)
    channel = session->spare;
  if (channel == NULL)
    return;
  ssize_t count = libssh2_channel_read_ex(channel, NO_STREAM, &byte, 1);
  if (count < 0 && count != LIBSSH2_ERROR_EAGAIN && !cir_ssh_survives(session, (int)count))
    cir_ssh_die_of(session, "session", (int)count);
}

/* Everything that is under way fails. Nothing of the session is on the C stack but the pump. */
static void bury(cir_ssh_session *session) {
  session->buried = true;
  if (session->transport != NULL) {
    if (session->raw != NULL && session->authenticated && session->io_error == 0) {
      libssh2_session_disconnect(session->raw, "closed by user"); /* a courtesy: once, no waiting */
      flush(session);
    }
    cir_ssh_transport *transport = session->transport;
    session->transport = NULL;
    transport->kind->close(transport);
  }
  uv_close((uv_handle_t *)&session->timer, on_timer_closed);
  cir_ssh_raw_free(session); /* before the reports: memory of 4,096 sessions that end at once */
  cir_buffer_free(&session->out);
  cir_ssh_operations_fail(session);
  cir_ssh_channels_fail(session);
  lua_State *L = cir_main_state(session->rt);
  if (session->on_close != CIR_NO_CALLBACK) {
    cir_ssh_push_fault(L, &session->fault);
    cir_callback_finish(session->rt, &session->on_close, 1);
  }
}

static void on_alarm(uv_timer_t *timer);

/*
 * See to it that the timer fires at whatever comes first. It may fire earlier: most deadlines are
 * met, and a timer that is left as it was costs less than one that is set for each phase.
 */
static void set_alarm(cir_ssh_session *session) {
  uint64_t alarm = session->next_tick;
  if (session->listen_at > 0 && (alarm == 0 || session->listen_at < alarm))
    alarm = session->listen_at;
  for (cir_ssh_operation *operation = session->operations; operation != NULL;
       operation = operation->next)
    if (operation->deadline > 0 && (alarm == 0 || operation->deadline < alarm))
      alarm = operation->deadline;
  alarm = cir_ssh_channels_alarm(session, alarm);
  if (alarm == 0 || (session->alarm != 0 && session->alarm <= alarm))
    return;
  session->alarm = alarm;
  uint64_t now = cir_ssh_now(session);
  uv_timer_start(&session->timer, on_alarm, alarm > now ? alarm - now : 0, 0);
}

/* Nanoseconds of the processor that this thread has used: a system call, unlike uv_hrtime. */
static uint64_t used_cpu(void) {
  struct timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

/*
 * Rule 8. Turns are told apart by the loop's cached time, which is renewed once or twice a turn.
 * Only our own time counts: on a busy machine little of what has passed may be ours.
 */
static bool turn_is_spent(cir_runtime *rt) {
  uint64_t now = uv_now(cir_loop(rt));
  if (module.turn != now) {
    module.turn = now;
    module.turn_started = uv_hrtime();
    module.spent = false;
  }
  if (!module.spent && uv_hrtime() - module.turn_started > CIR_SSH_TURN_NS) {
    uint64_t cpu = used_cpu();
    module.spent = cpu - module.cpu > CIR_SSH_TURN_NS;
    if (module.spent)
      module.cpu = cpu;
  }
  return module.spent;
}

static void pump(cir_ssh_session *session) {
  if (session->pumping) {
    session->again = true;
    return;
  }
  if (session->buried) {
    cir_ssh_operations_fail(session);
    return;
  }
  cir_ssh_hold(session);
  session->pumping = true;
  session->starved = session->deaf = false;
  session->allowance = CIR_SSH_ALLOWANCE;
  bool again = true;
  while (again && session->state != CIR_SSH_DEAD) { /* rule 2 */
    uint64_t received = session->received;
    session->again = false;
    again = cir_ssh_operations_step(session);
    if (session->state != CIR_SSH_DEAD && session->raw != NULL && session->authenticated)
      again = cir_ssh_channels_step(session) || again;
    if (session->state != CIR_SSH_DEAD && (session->unread || !session->dry) &&
        session->authenticated)
      drain(session);
    if (session->state != CIR_SSH_DEAD)
      flush(session);
    again = again || session->again || session->received != received;
    if (session->starved)
      break;
  }
  if (session->state != CIR_SSH_DEAD && session->unread && session->hangup) {
    session->io_error = 1;
    cir_ssh_die_of(session, "session", LIBSSH2_ERROR_SOCKET_DISCONNECT);
  }
  if (session->state == CIR_SSH_DEAD) {
    bury(session);
  } else {
    session->deaf = session->unread;
    if (!session->deaf || !session->authenticated)
      session->listen_at = 0;
    else if (session->listen_at == 0)
      session->listen_at = cir_ssh_now(session) + CIR_SSH_DEAF_MS;
    session->transport->kind->watch(session->transport, !session->deaf,
                                    cir_buffer_size(&session->out) > 0);
    set_alarm(session);
    if (session->starved || session->again)
      cir_ssh_schedule(session);
  }
  session->pumping = false;
  cir_ssh_release(session);
}

/*
 * Serve those that wait, each once; who is not served before the turn is spent is first on the
 * next. The one queue of all is what keeps sessions that send without end from holding up others:
 * the order in which epoll tells of sockets is always the same.
 */
static void pump_waiting(void *arg) {
  cir_runtime *rt = arg;
  size_t count = module.waiting;
  module.deferred = false;
  for (; count > 0 && !turn_is_spent(rt); count--) {
    cir_ssh_session *session = module.first;
    module.first = session->next_waiting;
    module.waiting--;
    session->scheduled = false;
    pump(session);
    cir_ssh_release(session);
  }
  module.behind = count > 0;
  if (module.waiting > 0 && !module.deferred) {
    module.deferred = true;
    cir_defer(rt, pump_waiting, rt);
  }
}

void cir_ssh_schedule(cir_ssh_session *session) {
  session->again = true; /* for a pump that is running */
  if (session->pumping || session->scheduled)
    return;
  session->scheduled = true;
  cir_ssh_hold(session);
  session->next_waiting = NULL;
  if (module.waiting++ > 0)
    module.last->next_waiting = session;
  else
    module.first = session;
  module.last = session;
  if (!module.deferred) {
    module.deferred = true;
    cir_defer(session->rt, pump_waiting, session->rt);
  }
}

void cir_ssh_transport_event(cir_ssh_session *session, bool hangup) {
  if (session->state == CIR_SSH_DEAD)
    return;
  session->unread = true;
  session->hangup = session->hangup || hangup;
  module.behind = module.behind || turn_is_spent(session->rt);
  if (module.behind)
    cir_ssh_schedule(session);
  else
    pump(session);
}

/* --- keepalive ---------------------------------------------------------------------------------
 */

/*
 * A question that every server answers, if only by a refusal: a channel is opened. It is closed
 * again in the background, and may become the spare.
 */
static cir_ssh_progress step_ping(cir_ssh_operation *operation) {
  cir_ssh_session *session = operation->session;
  LIBSSH2_CHANNEL *channel = libssh2_channel_open_session(session->raw);
  if (channel != NULL)
    return cir_ssh_channels_adopt(session, channel) ? CIR_SSH_DONE : CIR_SSH_FAILED;
  int error = libssh2_session_last_errno(session->raw);
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  return cir_ssh_survives(session, error) ? CIR_SSH_DONE
                                          : cir_ssh_die_of(session, "session", error);
}

static int push_nothing(cir_ssh_operation *operation, lua_State *L) {
  (void)operation;
  (void)L;
  return 0;
}

static const cir_ssh_operation_kind PING = {
    .phase = "session", .step = step_ping, .push = push_nothing};

/* Ask it, unless it is being asked something already. */
static void ask(cir_ssh_session *session) {
  cir_ssh_operation *ping = session->operations == NULL ? calloc(1, sizeof *ping) : NULL;
  if (ping == NULL)
    return;
  ping->kind = &PING;
  ping->session = session;
  ping->on_done = CIR_NO_CALLBACK;
  ping->anchor = LUA_NOREF;
  ping->reported = true;
  session->operations = ping;
}

/* Once an interval: silence is counted, and asked about. */
static void tick(cir_ssh_session *session) {
  session->next_tick = cir_ssh_now(session) + session->keepalive;
  if (session->received != session->heard) {
    session->heard = session->received;
    session->missed = 0;
    return;
  }
  if (session->missed++ >= session->most_missed) {
    cir_ssh_fault fault;
    cir_ssh_fault_set(&fault, "lost", "session", "nothing was heard from the server for %.3g s",
                      (double)session->keepalive * session->missed / 1000);
    cir_ssh_die(session, &fault);
    return;
  }
  ask(session);
}

static void on_alarm(uv_timer_t *timer) {
  cir_ssh_session *session = CIR_CONTAINER_OF(timer, cir_ssh_session, timer);
  session->alarm = 0;
  if (session->next_tick > 0 && session->next_tick <= cir_ssh_now(session))
    tick(session);
  if (session->listen_at > 0 && session->listen_at <= cir_ssh_now(session)) {
    session->listen_at = 0;
    ask(session); /* who waits for the answer reads what came before it, and leaves a spare */
  }
  pump(session);
}

/* --- beginning and end --------------------------------------------------------------------------
 */

static void shut_down(void *arg) {
  (void)arg;
  cir_ssh_fault fault;
  cir_ssh_fault_set(&fault, "closed", "session", "the program ends");
  for (cir_ssh_session *session = module.sessions; session != NULL; session = session->next)
    cir_ssh_die(session, &fault);
}

bool cir_ssh_module_begin(cir_runtime *rt) {
  if (module.ready)
    return true;
  if (libssh2_init(0) != 0)
    return false;
  module.ready = true;
  cir_on_shutdown(rt, shut_down, NULL);
  return true;
}

void cir_ssh_session_begin(cir_ssh_session *session, cir_runtime *rt) {
  session->rt = rt;
  session->on_close = CIR_NO_CALLBACK;
  session->holds = 2; /* the userdata and the timer */
  session->next = module.sessions;
  if (module.sessions != NULL)
    module.sessions->previous = session;
  module.sessions = session;
  uv_timer_init(cir_loop(rt), &session->timer);
  session->timer.data = NULL;
}
