/*
 * ssh_session.c - sessions: the pump, operations, deadlines, keepalive and death. See ssh.h for the
 * rules.
 */
#include "ssh.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

/* One runtime a process, so one of these. */
static struct {
  bool ready;
  cir_ssh_session *sessions;
  uint64_t turn, turn_started; /* the loop's time that names a turn, and when it began (hrtime) */
  char buffer[CIR_SSH_READ];
} module;

char *cir_ssh_buffer(void) {
  return module.buffer;
}

uint64_t cir_ssh_now(const cir_ssh_session *session) {
  return uv_now(cir_loop(session->rt));
}

/* --- faults ------------------------------------------------------------------------------------
 */

void cir_ssh_fault_set(cir_ssh_fault *fault, const char *code, const char *phase,
                       const char *format, ...) {
  fault->code = code;
  fault->phase = phase;
  fault->reason = NULL;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault->message, sizeof fault->message, format, arguments);
  va_end(arguments);
}

void cir_ssh_push_fault(lua_State *L, const cir_ssh_fault *fault) {
  cir_push_error(L, fault->code, "%s", fault->message);
  cir_error_field(L, "phase", fault->phase);
  if (fault->reason != NULL)
    cir_error_field(L, "reason", fault->reason);
}

/* --- what libssh2 calls ------------------------------------------------------------------------
 */

/* Sizes are kept in front of the bytes, so that on_free knows how many it may look at. */
typedef union header {
  size_t size;
  max_align_t align;
} header;

void *cir_ssh_allocate(size_t size) {
  header *block = malloc(sizeof *block + size);
  if (block == NULL)
    return NULL;
  block->size = size;
  return block + 1;
}

static LIBSSH2_ALLOC_FUNC(on_alloc) {
  (void)abstract;
  return cir_ssh_allocate(count);
}

static LIBSSH2_REALLOC_FUNC(on_realloc) {
  (void)abstract;
  header *block = realloc(ptr == NULL ? NULL : (header *)ptr - 1, sizeof *block + count);
  if (block == NULL)
    return NULL;
  block->size = count;
  return block + 1;
}

/* A channel request of the peer: "exit-status" and "exit-signal" are noted. */
static void note_request(cir_ssh_session *session, cir_wire packet) {
  cir_ssh_channel *channel = cir_ssh_channel_find(session, cir_wire_u32(&packet));
  cir_span name = cir_wire_string(&packet);
  cir_wire_bytes(&packet, 1); /* whether an answer is wanted */
  if (channel == NULL || packet.bad)
    return;
  if (cir_span_is(name, "exit-status")) {
    uint32_t status = cir_wire_u32(&packet);
    if (!packet.bad)
      cir_ssh_channel_status(channel, status);
  } else if (cir_span_is(name, "exit-signal")) {
    cir_span signal = cir_wire_string(&packet);
    cir_wire_bytes(&packet, 1); /* whether it dumped core */
    cir_span message = cir_wire_string(&packet);
    if (!packet.bad)
      cir_ssh_channel_signalled(channel, signal, message);
  }
}

/*
 * Packets that libssh2 has dealt with are freed here, payload first. Two kinds say what libssh2
 * does not tell: the number of a channel that is being opened (so that packets can be matched), and
 * that an exit status or signal has come at all. A peer gains nothing by making other memory look
 * like these: it may send them as packets.
 */
static LIBSSH2_FREE_FUNC(on_free) {
  enum { CHANNEL_OPEN_CONFIRMATION = 91, CHANNEL_REQUEST = 98 };
  if (ptr == NULL)
    return;
  header *block = (header *)ptr - 1;
  cir_wire packet = cir_wire_of(ptr, block->size);
  cir_ssh_session *session = *abstract;
  uint8_t type = block->size > 0 ? *cir_wire_bytes(&packet, 1).data : 0;
  if (type == CHANNEL_OPEN_CONFIRMATION)
    session->confirmed_channel = cir_wire_u32(&packet);
  else if (type == CHANNEL_REQUEST)
    note_request(session, packet);
  free(block);
}

/* Rule 1: everything is taken, into `out`. */
static LIBSSH2_SEND_FUNC(on_send) {
  cir_ssh_session *session = *abstract;
  (void)socket;
  (void)flags;
  if (session->transport == NULL)
    return -EPIPE;
  if (cir_buffer_size(&session->out) + length > CIR_SSH_OUT_MAX ||
      !cir_buffer_add(&session->out, buffer, length)) {
    session->io_error = -ENOBUFS;
    return -ENOBUFS;
  }
  return (ssize_t)length;
}

static LIBSSH2_RECV_FUNC(on_receive) {
  cir_ssh_session *session = *abstract;
  (void)socket;
  (void)flags;
  session->unread = false;
  if (session->transport == NULL)
    return -ECONNRESET;
  if (session->allowance == 0) {
    session->starved = true;
    return -EAGAIN;
  }
  ssize_t count = session->transport->kind->receive(session->transport, buffer, length);
  if (count > 0) {
    session->received += (uint64_t)count;
    session->allowance -= (size_t)count < session->allowance ? (size_t)count : session->allowance;
  } else if (count != -EAGAIN) {
    session->io_error = count == 0 ? 1 : (int)count;
  }
  return count;
}

static LIBSSH2_DISCONNECT_FUNC(on_disconnect) {
  cir_ssh_session *ours = *abstract;
  (void)session;
  (void)reason;
  (void)language;
  (void)language_len;
  int size =
      message_len < (int)sizeof ours->disconnect ? message_len : (int)sizeof ours->disconnect;
  snprintf(ours->disconnect, sizeof ours->disconnect, "%.*s", size > 0 ? size : 0, message);
  for (char *c = ours->disconnect; *c != '\0'; c++)
    if ((unsigned char)*c < ' ' || *c == 0x7f)
      *c = ' ';
  if (ours->disconnect[0] == '\0')
    snprintf(ours->disconnect, sizeof ours->disconnect, "(no reason)");
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

/* Rule 6: the transport is closed, so nothing is waited for; the bound is for what is not foreseen.
 */
static void free_raw(cir_ssh_session *session) {
  enum { ATTEMPTS = 64 };
  for (int i = 0; i < ATTEMPTS && session->raw != NULL; i++)
    if (libssh2_session_free(session->raw) != LIBSSH2_ERROR_EAGAIN)
      session->raw = NULL;
  session->raw = NULL;
  session->spare = NULL;
}

cir_ssh_progress cir_ssh_die(cir_ssh_session *session, const cir_ssh_fault *fault) {
  if (session->state == CIR_SSH_DEAD)
    return CIR_SSH_FAILED;
  session->state = CIR_SSH_DEAD;
  session->fault = *fault;
  cir_ssh_schedule(session); /* the pump buries it, once nothing of it is on the C stack */
  return CIR_SSH_FAILED;
}

cir_ssh_progress cir_ssh_die_of(cir_ssh_session *session, const char *phase, int error) {
  cir_ssh_fault fault;
  char *text = NULL;
  if (session->raw != NULL)
    libssh2_session_last_error(session->raw, &text, NULL, 0);
  if (text == NULL || text[0] == '\0')
    text = "no reason given";
  if (session->disconnect[0] != '\0')
    cir_ssh_fault_set(&fault, strcmp(phase, "auth") == 0 ? "auth" : "closed", phase,
                      "the server ended the connection: %s", session->disconnect);
  else if (session->io_error == 1)
    cir_ssh_fault_set(&fault, "closed", phase, "the server closed the connection");
  else if (session->io_error == -ENOBUFS)
    cir_ssh_fault_set(&fault, "protocol", phase,
                      "the peer asks for answers and does not read them");
  else if (session->io_error < 0)
    cir_ssh_fault_set(&fault, cir_code_of_uv(session->io_error), phase, "the connection failed: %s",
                      uv_strerror(session->io_error));
  else if (error == LIBSSH2_ERROR_KEX_FAILURE || error == LIBSSH2_ERROR_METHOD_NONE)
    cir_ssh_fault_set(&fault, "unsupported", phase,
                      "no common algorithm, or a key exchange that failed: %s (libssh2 %d)", text,
                      error);
  else if (error == LIBSSH2_ERROR_HOSTKEY_INIT || error == LIBSSH2_ERROR_HOSTKEY_SIGN)
    cir_ssh_fault_set(
        &fault, "hostkey", phase,
        "the server does not prove that it has the host key it shows: %s (libssh2 %d)", text,
        error);
  else
    cir_ssh_fault_set(&fault, "protocol", phase, "%s (libssh2 %d)", text, error);
  return cir_ssh_die(session, &fault);
}

bool cir_ssh_survives(const cir_ssh_session *session, int error) {
  switch (error) {
  case LIBSSH2_ERROR_SOCKET_SEND:
  case LIBSSH2_ERROR_SOCKET_RECV:
  case LIBSSH2_ERROR_SOCKET_DISCONNECT:
  case LIBSSH2_ERROR_SOCKET_NONE:
  case LIBSSH2_ERROR_BAD_SOCKET:
  case LIBSSH2_ERROR_PROTO:
  case LIBSSH2_ERROR_DECRYPT:
  case LIBSSH2_ERROR_INVALID_MAC:
  case LIBSSH2_ERROR_OUT_OF_BOUNDARY:
  case LIBSSH2_ERROR_KEX_FAILURE:
  case LIBSSH2_ERROR_KEY_EXCHANGE_FAILURE:
    return false;
  default:
    return session->io_error == 0 && session->disconnect[0] == '\0';
  }
}

static void on_timer_closed(uv_handle_t *handle) {
  cir_ssh_release(CIR_CONTAINER_OF(handle, cir_ssh_session, timer));
}

void cir_ssh_transport_closed(cir_ssh_session *session) {
  cir_ssh_release(session);
}

/* --- operations --------------------------------------------------------------------------------
 */

void cir_ssh_deadline(cir_ssh_operation *operation, uint64_t timeout) {
  operation->deadline = timeout > 0 ? cir_ssh_now(operation->session) + timeout : 0;
}

/* Tell Lua, once: the fault when it is not NULL, else the results. */
static void report(cir_ssh_operation *operation, const cir_ssh_fault *fault) {
  cir_ssh_session *session = operation->session;
  if (operation->reported)
    return;
  operation->reported = true;
  lua_State *L = cir_main_state(session->rt);
  int count = 1;
  if (fault != NULL) {
    cir_ssh_push_fault(L, fault);
  } else {
    lua_pushnil(L);
    count += operation->kind->push(operation, L);
  }
  cir_callback_finish(session->rt, &operation->on_done, count);
  luaL_unref(L, LUA_REGISTRYINDEX, operation->anchor);
  operation->anchor = LUA_NOREF;
}

static void dispose(cir_ssh_operation *operation) {
  if (operation->handle != NULL)
    *operation->handle = NULL;
  cir_callback_unref(operation->session->rt, &operation->on_done);
  if (operation->kind->release != NULL)
    operation->kind->release(operation);
  else
    free(operation);
}

/* Fill in why an operation is given up; false when there is no reason to. */
static bool given_up(const cir_ssh_operation *operation, cir_ssh_fault *fault) {
  if (operation->cancelled)
    cir_ssh_fault_set(fault, "cancelled", operation->kind->phase, "cancelled");
  else if (operation->deadline > 0 && operation->deadline <= cir_ssh_now(operation->session))
    cir_ssh_fault_set(fault, "timeout", operation->kind->phase, "no answer within %.3g s",
                      (double)operation->timeout / 1000);
  else
    return false;
  if (operation->fault.phase != NULL) /* the step knows better where it is */
    fault->phase = operation->fault.phase;
  return true;
}

/* Report what is cancelled or too late. Those that have not begun go; the first, which has, goes
 * on. */
static void give_up(cir_ssh_session *session) {
  cir_ssh_fault fault;
  cir_ssh_operation **link = &session->operations;
  while (*link != NULL) {
    cir_ssh_operation *operation = *link;
    if (operation->reported || !given_up(operation, &fault)) {
      link = &operation->next;
      continue;
    }
    operation->deadline = 0;
    if (!operation->started) {
      *link = operation->next;
      report(operation, &fault);
      dispose(operation);
      continue;
    }
    if (operation->kind->fatal) {
      cir_ssh_die(session, &fault);
      return;
    }
    report(operation, &fault);
    if (operation->kind->abandon != NULL)
      operation->kind->abandon(operation);
    link = &operation->next;
  }
}

/* Step the first operation; when it ends, the next. Returns whether any ended. */
static bool step_operations(cir_ssh_session *session) {
  bool progress = false;
  give_up(session);
  while (session->operations != NULL && session->state != CIR_SSH_DEAD) {
    cir_ssh_operation *operation = session->operations;
    if (!operation->started) {
      operation->started = true;
      cir_ssh_deadline(operation, operation->timeout);
    }
    cir_ssh_progress result = operation->kind->step(operation);
    if (result == CIR_SSH_AGAIN || session->state == CIR_SSH_DEAD)
      break;
    session->operations = operation->next;
    report(operation, result == CIR_SSH_FAILED ? &operation->fault : NULL);
    dispose(operation);
    progress = true;
    give_up(session);
  }
  return progress;
}

/* handle:cancel(): the callback is told "cancelled". Does nothing when it has been called. */
static int l_cancel(lua_State *L) {
  cir_ssh_operation **handle = luaL_checkudata(L, 1, CIR_SSH_OPERATION);
  if (*handle != NULL && !(*handle)->reported) {
    (*handle)->cancelled = true;
    cir_ssh_schedule((*handle)->session);
  }
  return 0;
}

static int l_operation_gc(lua_State *L) {
  cir_ssh_operation **handle = luaL_checkudata(L, 1, CIR_SSH_OPERATION);
  if (*handle != NULL)
    (*handle)->handle = NULL;
  return 0;
}

void cir_ssh_submit(lua_State *L, int index, cir_ssh_operation *operation, int callback) {
  cir_ssh_session *session = cir_ssh_check_session(L, index);
  operation->session = session;
  operation->on_done = cir_callback_ref(L, callback);
  cir_ssh_operation **handle = lua_newuserdatauv(L, sizeof *handle, 1);
  *handle = operation;
  operation->handle = handle;
  luaL_setmetatable(L, CIR_SSH_OPERATION);
  lua_pushvalue(L, index);
  lua_setiuservalue(L, -2, 1);
  lua_pushvalue(L, -1);
  operation->anchor = luaL_ref(L, LUA_REGISTRYINDEX);

  cir_ssh_operation **link = &session->operations;
  while (*link != NULL)
    link = &(*link)->next;
  *link = operation;
  cir_ssh_schedule(session);
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

/* Report the session's fault to all operations, those queued by the reports included. */
static void fail_operations(cir_ssh_session *session) {
  while (session->operations != NULL) {
    cir_ssh_operation *operation = session->operations;
    session->operations = operation->next;
    report(operation, &session->fault);
    dispose(operation);
  }
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
  free_raw(session); /* before the reports: memory of 4,096 sessions that end at once */
  cir_buffer_free(&session->out);
  fail_operations(session);
  cir_ssh_channels_fail(session);
  lua_State *L = cir_main_state(session->rt);
  if (session->on_close != CIR_NO_CALLBACK) {
    cir_ssh_push_fault(L, &session->fault);
    cir_callback_finish(session->rt, &session->on_close, 1);
  }
}

static void on_alarm(uv_timer_t *timer);

/* Set the timer to whatever comes first. */
static void set_alarm(cir_ssh_session *session) {
  uint64_t alarm = session->next_tick;
  for (cir_ssh_operation *operation = session->operations; operation != NULL;
       operation = operation->next)
    if (operation->deadline > 0 && (alarm == 0 || operation->deadline < alarm))
      alarm = operation->deadline;
  alarm = cir_ssh_channels_alarm(session, alarm);
  if (alarm == session->alarm)
    return;
  session->alarm = alarm;
  if (alarm == 0) {
    uv_timer_stop(&session->timer);
    return;
  }
  uint64_t now = cir_ssh_now(session);
  uv_timer_start(&session->timer, on_alarm, alarm > now ? alarm - now : 0, 0);
}

/* Rule 8. Turns are told apart by the loop's cached time, which is renewed once or twice a turn. */
static bool turn_is_spent(cir_ssh_session *session) {
  uint64_t now = cir_ssh_now(session);
  if (module.turn != now) {
    module.turn = now;
    module.turn_started = uv_hrtime();
  }
  return uv_hrtime() - module.turn_started > CIR_SSH_TURN_NS;
}

static void pump(cir_ssh_session *session) {
  if (session->pumping) {
    session->again = true;
    return;
  }
  if (session->buried) {
    fail_operations(session);
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
    again = step_operations(session);
    if (session->state != CIR_SSH_DEAD && session->raw != NULL && session->authenticated)
      again = cir_ssh_channels_step(session) || again;
    if (session->state != CIR_SSH_DEAD && session->unread && session->authenticated)
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
    session->transport->kind->watch(session->transport, !session->deaf,
                                    cir_buffer_size(&session->out) > 0);
    set_alarm(session);
    if (session->starved || session->again)
      cir_ssh_schedule(session);
  }
  session->pumping = false;
  cir_ssh_release(session);
}

static void scheduled_pump(void *arg) {
  cir_ssh_session *session = arg;
  session->scheduled = false;
  if (turn_is_spent(session))
    cir_ssh_schedule(session);
  else
    pump(session);
  cir_ssh_release(session);
}

void cir_ssh_schedule(cir_ssh_session *session) {
  session->again = true; /* for a pump that is running */
  if (session->pumping || session->scheduled)
    return;
  session->scheduled = true;
  cir_ssh_hold(session);
  cir_defer(session->rt, scheduled_pump, session);
}

void cir_ssh_transport_event(cir_ssh_session *session, bool hangup) {
  if (session->state == CIR_SSH_DEAD || turn_is_spent(session)) /* it will be told again */
    return;
  session->unread = true;
  session->hangup = session->hangup || hangup;
  pump(session);
}

/* --- keepalive ---------------------------------------------------------------------------------
 */

typedef struct ping {
  cir_ssh_operation base;
  LIBSSH2_CHANNEL *opened; /* one of its own, while no other is there */
  LIBSSH2_CHANNEL *asked;
} ping;

/*
 * A question that every server answers: on a channel that is there, an environment variable, which
 * a running command refuses; else a channel is opened and closed again, and kept as the spare.
 */
static cir_ssh_progress step_ping(cir_ssh_operation *operation) {
  ping *self = CIR_CONTAINER_OF(operation, ping, base);
  cir_ssh_session *session = operation->session;
  int error;
  LIBSSH2_CHANNEL *channel = cir_ssh_channels_any(session);
  if (self->asked == NULL && self->opened == NULL)
    self->asked = channel;
  if (self->asked != NULL) {
    if (!cir_ssh_channels_have(session, self->asked)) /* closed meanwhile: an answer too */
      return CIR_SSH_DONE;
    error = libssh2_channel_setenv_ex(self->asked, "CIRANDA_PING", 12, "", 0);
    if (error == LIBSSH2_ERROR_EAGAIN)
      return CIR_SSH_AGAIN;
    if (error != 0 && !cir_ssh_survives(session, error))
      return cir_ssh_die_of(session, "session", error);
    return CIR_SSH_DONE;
  }
  if (self->opened == NULL) {
    self->opened = libssh2_channel_open_session(session->raw);
    if (self->opened == NULL) {
      error = libssh2_session_last_errno(session->raw);
      if (error == LIBSSH2_ERROR_EAGAIN)
        return CIR_SSH_AGAIN;
      return cir_ssh_survives(session, error) ? CIR_SSH_DONE
                                              : cir_ssh_die_of(session, "session", error);
    }
  }
  error = libssh2_channel_close(self->opened);
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  if (error != 0 && !cir_ssh_survives(session, error))
    return cir_ssh_die_of(session, "session", error);
  if (session->spare == NULL)
    session->spare = self->opened;
  else
    libssh2_channel_free(self->opened);
  return CIR_SSH_DONE;
}

static int push_nothing(cir_ssh_operation *operation, lua_State *L) {
  (void)operation;
  (void)L;
  return 0;
}

static const cir_ssh_operation_kind PING = {
    .phase = "session", .step = step_ping, .push = push_nothing};

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
  if (session->operations != NULL) /* it asks already, or waits for an answer */
    return;
  ping *self = calloc(1, sizeof *self);
  if (self == NULL)
    return;
  self->base.kind = &PING;
  self->base.session = session;
  self->base.on_done = CIR_NO_CALLBACK;
  self->base.anchor = LUA_NOREF;
  self->base.reported = true;
  session->operations = &self->base;
}

static void on_alarm(uv_timer_t *timer) {
  cir_ssh_session *session = CIR_CONTAINER_OF(timer, cir_ssh_session, timer);
  session->alarm = 0;
  if (session->next_tick > 0 && session->next_tick <= cir_ssh_now(session))
    tick(session);
  pump(session);
}

/* --- opening -----------------------------------------------------------------------------------
 */

typedef struct opening {
  cir_ssh_operation base;
  enum { CONNECTING, BANNER, KEX } phase;
  uint64_t banner_ms, kex_ms;
} opening;

static void enter_phase(opening *self, int phase, const char *name, uint64_t timeout) {
  self->phase = phase;
  self->base.fault.phase = name;
  self->base.timeout = timeout;
  cir_ssh_deadline(&self->base, timeout);
}

static cir_ssh_progress step_opening(cir_ssh_operation *operation) {
  opening *self = CIR_CONTAINER_OF(operation, opening, base);
  cir_ssh_session *session = operation->session;
  cir_ssh_transport *transport = session->transport;
  if (self->phase == CONNECTING) {
    int error = transport->kind->connected(transport);
    session->unread = false;
    if (error == -EAGAIN)
      return CIR_SSH_AGAIN;
    if (error < 0) {
      session->io_error = error;
      return cir_ssh_die_of(session, "connect", LIBSSH2_ERROR_SOCKET_NONE);
    }
    enter_phase(self, BANNER, "banner", self->banner_ms);
  }
  int error = libssh2_session_handshake(session->raw, transport->kind->descriptor(transport));
  const char *banner = libssh2_session_banner_get(session->raw);
  if (self->phase == BANNER && banner != NULL && strncmp(banner, "SSH-", 4) == 0)
    enter_phase(self, KEX, "kex", self->kex_ms);
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  if (error != 0)
    return cir_ssh_die_of(session, self->phase == BANNER ? "banner" : "kex", error);
  session->state = CIR_SSH_UP;
  return CIR_SSH_DONE;
}

/* The session's own userdata, which the operation's handle keeps. */
static int push_session(cir_ssh_operation *operation, lua_State *L) {
  lua_rawgeti(L, LUA_REGISTRYINDEX, operation->anchor);
  lua_getiuservalue(L, -1, 1);
  lua_remove(L, -2);
  return 1;
}

static const cir_ssh_operation_kind OPENING = {
    .phase = "connect", .fatal = true, .step = step_opening, .push = push_session};

static const char *const OPEN_OPTIONS[] = {"address", "port",    "bind",       "descriptor",
                                           "write",   "drained", "connect_ms", "banner_ms",
                                           "kex_ms",  "methods", NULL};

/* Choose the transport that the options ask for; raises, or leaves a negative errno. [-0, +0, v] */
static cir_ssh_transport *open_transport(lua_State *L, cir_runtime *rt, int *error) {
  int top = lua_gettop(L);
  const char *address = cir_ssh_string_option(L, 1, "address");
  const char *bind_address = cir_ssh_string_option(L, 1, "bind");
  int port = (int)cir_ssh_integer_option(L, 1, "port", 1, 65535, 22);
  int fd = (int)cir_ssh_integer_option(L, 1, "descriptor", 0, INT32_MAX, -1);
  bool stream = lua_getfield(L, 1, "write") != LUA_TNIL;
  if ((address != NULL) + (fd >= 0) + stream != 1)
    luaL_error(L, "ssh.open: exactly one of 'address', 'descriptor' and 'write' is needed");
  cir_ssh_transport *transport;
  if (stream) {
    int drained = CIR_NO_CALLBACK;
    if (lua_getfield(L, 1, "drained") != LUA_TNIL)
      drained = cir_callback_ref(L, -1);
    transport = cir_ssh_stream_new(rt, cir_callback_ref(L, -2), drained);
  } else if (address != NULL) {
    transport = cir_ssh_socket_connect(rt, address, port, bind_address, error);
  } else {
    transport = cir_ssh_socket_adopt(rt, fd, error);
  }
  lua_settop(L, top);
  return transport;
}

/* The `methods` option: lists of algorithms, the preferred first. Raises a misuse. [-0, +0, v] */
static void set_methods(lua_State *L, LIBSSH2_SESSION *raw) {
  static const struct {
    const char *name;
    int first, second; /* for both directions */
  } kinds[] = {{"kex", LIBSSH2_METHOD_KEX, -1},
               {"hostkey", LIBSSH2_METHOD_HOSTKEY, -1},
               {"cipher", LIBSSH2_METHOD_CRYPT_CS, LIBSSH2_METHOD_CRYPT_SC},
               {"mac", LIBSSH2_METHOD_MAC_CS, LIBSSH2_METHOD_MAC_SC},
               {"sign", LIBSSH2_METHOD_SIGN_ALGO, -1}};
  int type = lua_getfield(L, 1, "methods");
  if (type != LUA_TNIL && type != LUA_TTABLE)
    luaL_error(L, "ssh.open: option 'methods' must be a table of comma-separated lists");
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0] && type == LUA_TTABLE; i++) {
    const char *list = cir_ssh_string_option(L, lua_gettop(L), kinds[i].name);
    if (list != NULL &&
        (libssh2_session_method_pref(raw, kinds[i].first, list) != 0 ||
         (kinds[i].second >= 0 && libssh2_session_method_pref(raw, kinds[i].second, list) != 0)))
      luaL_error(L, "ssh.open: methods.%s: none of '%s' is supported", kinds[i].name, list);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
}

static void shut_down(void *arg) {
  (void)arg;
  cir_ssh_fault fault;
  cir_ssh_fault_set(&fault, "cancelled", "session", "the program ends");
  for (cir_ssh_session *session = module.sessions; session != NULL; session = session->next)
    cir_ssh_die(session, &fault);
}

/*
 * A session without a transport, its userdata on the top of the stack. [-0, +1, m]
 */
static cir_ssh_session *new_session(lua_State *L) {
  cir_ssh_session **handle = lua_newuserdatauv(L, sizeof *handle, 0);
  *handle = NULL;
  luaL_setmetatable(L, CIR_SSH_SESSION);
  cir_ssh_session *session = calloc(1, sizeof *session);
  if (session != NULL)
    session->raw = libssh2_session_init_ex(on_alloc, on_free, on_realloc, session);
  if (session == NULL || session->raw == NULL) {
    free(session);
    luaL_error(L, "ssh.open: out of memory");
    return NULL;
  }
  session->rt = cir_runtime_of(L);
  session->on_close = CIR_NO_CALLBACK;
  session->holds = 2; /* the userdata and the timer */
  session->next = module.sessions;
  if (module.sessions != NULL)
    module.sessions->previous = session;
  module.sessions = session;
  uv_timer_init(cir_loop(session->rt), &session->timer);
  session->timer.data = NULL;
  *handle = session;

  libssh2_session_set_blocking(session->raw, 0);
  libssh2_session_set_read_timeout(session->raw, 10L * 365 * 24 * 3600); /* rule 5 */
  libssh2_session_callback_set2(session->raw, LIBSSH2_CALLBACK_SEND, (libssh2_cb_generic *)on_send);
  libssh2_session_callback_set2(session->raw, LIBSSH2_CALLBACK_RECV,
                                (libssh2_cb_generic *)on_receive);
  libssh2_session_callback_set2(session->raw, LIBSSH2_CALLBACK_DISCONNECT,
                                (libssh2_cb_generic *)on_disconnect);
  return session;
}

/*
 * ssh.open(options, function(err, session) end) -> operation. The phases are "connect", "banner"
 * and "kex", each with a deadline in milliseconds of its own. The host key is not verified here:
 * the caller looks at session:host_key() before it goes on. [-2, +1, e]
 */
int cir_ssh_l_open(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_settop(L, 2);
  cir_ssh_known_options(L, 1, OPEN_OPTIONS);
  const lua_Integer day = 24 * 3600 * 1000;
  lua_Integer connect_ms = cir_ssh_integer_option(L, 1, "connect_ms", 1, day, 0);
  lua_Integer banner_ms = cir_ssh_integer_option(L, 1, "banner_ms", 1, day, 0);
  lua_Integer kex_ms = cir_ssh_integer_option(L, 1, "kex_ms", 1, day, 0);

  cir_runtime *rt = cir_runtime_of(L);
  if (!module.ready) {
    if (libssh2_init(0) != 0)
      luaL_error(L, "ssh.open: libssh2 cannot be initialised");
    module.ready = true;
    cir_on_shutdown(rt, shut_down, NULL);
  }
  cir_ssh_session *session = new_session(L);
  set_methods(L, session->raw);
  int error = 0;
  session->transport = open_transport(L, rt, &error);
  if (session->transport != NULL) {
    session->transport->session = session;
    cir_ssh_hold(session);
  }

  opening *self = calloc(1, sizeof *self);
  if (self == NULL)
    luaL_error(L, "ssh.open: out of memory");
  self->base.kind = &OPENING;
  self->base.timeout = (uint64_t)connect_ms;
  self->banner_ms = (uint64_t)banner_ms;
  self->kex_ms = (uint64_t)kex_ms;
  cir_ssh_submit(L, 3, &self->base, 2);
  if (session->transport == NULL) {
    session->io_error = error;
    cir_ssh_die_of(session, "connect", LIBSSH2_ERROR_SOCKET_NONE);
  }
  return 1;
}

/* --- methods of a session ----------------------------------------------------------------------
 */

cir_ssh_session *cir_ssh_check_session(lua_State *L, int index) {
  return *(cir_ssh_session **)luaL_checkudata(L, index, CIR_SSH_SESSION);
}

void cir_ssh_check_usable(lua_State *L, cir_ssh_session *session, bool authenticated) {
  if (session->state == CIR_SSH_OPENING)
    luaL_error(L, "the session is still being opened: use it in the callback of ssh.open");
  if (authenticated && !session->authenticated && session->state != CIR_SSH_DEAD)
    luaL_error(L, "the session's user is not authenticated yet");
}

/* session:host_key() -> type, blob; nil when the session is dead. [-1, +2, e] */
static int l_host_key(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  size_t size = 0;
  int type;
  const char *blob = NULL;
  if (session->raw != NULL && session->state == CIR_SSH_UP)
    blob = libssh2_session_hostkey(session->raw, &size, &type);
  if (blob == NULL) {
    lua_pushnil(L);
    return 1;
  }
  cir_wire wire = cir_wire_of(blob, size);
  cir_span name = cir_wire_string(&wire);
  lua_pushlstring(L, (const char *)name.data, name.size);
  lua_pushlstring(L, blob, size);
  return 2;
}

/* session:methods() -> {kex =, hostkey =, cipher =, mac =}, what was agreed; nil when dead. */
static int l_methods(lua_State *L) {
  static const struct {
    const char *name;
    int method;
  } kinds[] = {{"kex", LIBSSH2_METHOD_KEX},
               {"hostkey", LIBSSH2_METHOD_HOSTKEY},
               {"cipher", LIBSSH2_METHOD_CRYPT_CS},
               {"mac", LIBSSH2_METHOD_MAC_CS}};
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  if (session->raw == NULL || session->state != CIR_SSH_UP) {
    lua_pushnil(L);
    return 1;
  }
  lua_createtable(L, 0, 4);
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    lua_pushstring(L, libssh2_session_methods(session->raw, kinds[i].method));
    lua_setfield(L, -2, kinds[i].name);
  }
  return 1;
}

/* session:banner() -> the server's identification string, or nil. [-1, +1, e] */
static int l_banner(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  lua_pushstring(L, session->raw != NULL ? libssh2_session_banner_get(session->raw) : NULL);
  return 1;
}

/*
 * session:keepalive(interval_ms, most): every interval without a byte from the server is asked
 * about, and after `most` unanswered ones the session ends with code "lost". 0 turns it off. Takes
 * effect once the user is authenticated. [-3, +0, e]
 */
static int l_keepalive(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  lua_Integer interval = luaL_checkinteger(L, 2), most = luaL_optinteger(L, 3, 3);
  luaL_argcheck(L, interval >= 0 && interval <= 24 * 3600 * 1000, 2, "out of range");
  luaL_argcheck(L, most >= 1 && most <= 1000, 3, "out of range");
  cir_ssh_check_usable(L, session, true);
  session->keepalive = (uint64_t)interval;
  session->most_missed = (unsigned)most;
  session->missed = 0;
  session->next_tick = interval > 0 ? cir_ssh_now(session) + (uint64_t)interval : 0;
  if (session->state != CIR_SSH_DEAD)
    cir_ssh_schedule(session);
  return 0;
}

/*
 * session:on_close(function(err) end) -> true: called once, when the session ends. Returns false
 * when it has ended. [-2, +1, e]
 */
static int l_on_close(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  if (!session->buried) {
    cir_callback_unref(session->rt, &session->on_close);
    session->on_close = cir_callback_ref(L, 2);
  }
  lua_pushboolean(L, !session->buried);
  return 1;
}

/* session:status() -> "opening" | "up" | "dead", and the error it died of. [-1, +2, e] */
static int l_status(lua_State *L) {
  static const char *const names[] = {"opening", "up", "dead"};
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  lua_pushstring(L, names[session->state]);
  if (session->state != CIR_SSH_DEAD)
    return 1;
  cir_ssh_push_fault(L, &session->fault);
  return 2;
}

/* session:bytes() -> received, sent. [-1, +2, e] */
static int l_bytes(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  lua_pushinteger(L, (lua_Integer)session->received);
  lua_pushinteger(L, (lua_Integer)session->sent);
  return 2;
}

/* session:close([reason]): what is under way fails with "closed". [-n, +0, e] */
static int l_close(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  const char *reason = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : NULL;
  cir_ssh_fault fault;
  cir_ssh_fault_set(&fault, "closed", "session", "%s",
                    reason != NULL ? reason : "the session has been closed");
  cir_ssh_die(session, &fault);
  return 0;
}

static int l_session_gc(lua_State *L) {
  cir_ssh_session **handle = luaL_checkudata(L, 1, CIR_SSH_SESSION);
  if (*handle == NULL)
    return 0;
  cir_ssh_fault fault;
  cir_ssh_fault_set(&fault, "closed", "session", "nobody uses the session any more");
  cir_ssh_die(*handle, &fault);
  cir_ssh_release(*handle);
  *handle = NULL;
  return 0;
}

/* The session at 1 with a stream as its transport; NULL when it is dead; raises otherwise. */
static cir_ssh_session *check_stream(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  if (session->state == CIR_SSH_DEAD || session->transport == NULL)
    return NULL;
  if (!cir_ssh_is_stream(session->transport))
    luaL_error(L, "the session was not opened with the option 'write'");
  return session;
}

/* session:feed(data) -> whether there is room for more. [-2, +1, e] */
static int l_feed(lua_State *L) {
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  cir_ssh_session *session = check_stream(L);
  lua_pushboolean(L, session != NULL && cir_ssh_stream_feed(session->transport, data, size));
  if (session != NULL) {
    session->unread = true;
    cir_ssh_schedule(session);
  }
  return 1;
}

/* session:feed_end(): nothing more will come. [-1, +0, e] */
static int l_feed_end(lua_State *L) {
  cir_ssh_session *session = check_stream(L);
  if (session != NULL) {
    cir_ssh_stream_end(session->transport);
    session->unread = session->hangup = true;
    cir_ssh_schedule(session);
  }
  return 0;
}

/* session:written(): the piece given to `write` has gone; the next may come. [-1, +0, e] */
static int l_written(lua_State *L) {
  cir_ssh_session *session = check_stream(L);
  if (session != NULL) {
    cir_ssh_stream_written(session->transport);
    cir_ssh_schedule(session);
  }
  return 0;
}

void cir_ssh_session_register(lua_State *L) {
  static const luaL_Reg session_methods[] = {{"host_key", l_host_key},
                                             {"methods", l_methods},
                                             {"banner", l_banner},
                                             {"authenticate", cir_ssh_l_authenticate},
                                             {"auth_methods", cir_ssh_l_auth_methods},
                                             {"exec", cir_ssh_l_exec},
                                             {"tunnel", cir_ssh_l_tunnel},
                                             {"keepalive", l_keepalive},
                                             {"on_close", l_on_close},
                                             {"status", l_status},
                                             {"bytes", l_bytes},
                                             {"close", l_close},
                                             {"feed", l_feed},
                                             {"feed_end", l_feed_end},
                                             {"written", l_written},
                                             {"__gc", l_session_gc},
                                             {"__close", l_close},
                                             {NULL, NULL}};
  static const luaL_Reg operation_methods[] = {
      {"cancel", l_cancel}, {"__gc", l_operation_gc}, {"__close", l_cancel}, {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_SSH_SESSION)) {
    luaL_setfuncs(L, session_methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
  if (luaL_newmetatable(L, CIR_SSH_OPERATION)) {
    luaL_setfuncs(L, operation_methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}
