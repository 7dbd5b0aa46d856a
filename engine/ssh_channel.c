/*
 * ssh_channel.c - channels: commands, subsystems and tunnels. See ssh.h.
 *
 * A channel reads only while Lua wants it to; what the peer may send meanwhile is bounded by the
 * channel's window. It is closed when the peer has closed it and its output has been read to the
 * end, or when Lua asks.
 */
#include "ssh.h"

#include <ctype.h>
#include <stdio.h>

enum {
  WINDOW = LIBSSH2_CHANNEL_WINDOW_DEFAULT,
  PACKET = LIBSSH2_CHANNEL_PACKET_DEFAULT,
  MAX_ENVIRONMENT = 256,
  STDOUT = 0,
  STDERR = SSH_EXTENDED_DATA_STDERR
};

/* A string of Lua's on its way out, kept by string_ref. */
typedef struct outgoing {
  struct outgoing *next;
  const char *data;
  size_t size, done;
  int string_ref, on_done;
} outgoing;

typedef struct pending_signal {
  struct pending_signal *next;
  char name[32];
} pending_signal;

struct cir_ssh_channel {
  cir_ssh_session *session;
  cir_ssh_channel *next;
  LIBSSH2_CHANNEL *raw; /* NULL before it is open and after it is closed */
  uint32_t number;      /* ours, of the protocol */
  enum { STARTING, RUNNING, CLOSING, CLOSED } state;
  int holds;  /* the session's list and the userdata */
  int anchor; /* keeps the userdata while a callback waits */
  int on_read, on_exit, on_close;
  outgoing *writes;
  pending_signal *signals;
  int columns, rows; /* a new size to tell, or 0 */
  uint64_t close_deadline;
  bool reading, ended, end_told, shutdown_wanted, end_sent;
  bool has_status, has_signal, core_told;
  uint32_t status;
  char signal[32];
  char message[160];
  cir_ssh_fault fault; /* why it ended, when not in order; its code is NULL else */
};

static void release(cir_ssh_channel *channel) {
  if (--channel->holds > 0)
    return;
  cir_ssh_release(channel->session);
  free(channel);
}

/* --- callbacks ---------------------------------------------------------------------------------
 */

/* Push the end of the command: code, signal, message, of which any may be nil. [-0, +3, m] */
static void push_exit(lua_State *L, const cir_ssh_channel *channel) {
  if (channel->has_status)
    lua_pushinteger(L, channel->status);
  else
    lua_pushnil(L);
  if (channel->has_signal) {
    lua_pushstring(L, channel->signal);
    lua_pushstring(L, channel->message);
  } else {
    lua_pushnil(L);
    lua_pushnil(L);
  }
}

static void tell_exit(cir_ssh_channel *channel) {
  lua_State *L = cir_main_state(channel->session->rt);
  if (channel->on_exit == CIR_NO_CALLBACK)
    return;
  lua_pushnil(L);
  push_exit(L, channel);
  cir_callback_finish(channel->session->rt, &channel->on_exit, 4);
}

/* Call a one-shot callback with the fault, or with nothing. */
static void tell(cir_runtime *rt, int *callback, const cir_ssh_fault *fault) {
  lua_State *L = cir_main_state(rt);
  if (*callback == CIR_NO_CALLBACK)
    return;
  if (fault != NULL)
    cir_ssh_push_fault(L, fault);
  cir_callback_finish(rt, callback, fault != NULL ? 1 : 0);
}

static void finish_write(cir_ssh_channel *channel, const cir_ssh_fault *fault) {
  outgoing *write = channel->writes;
  channel->writes = write->next;
  luaL_unref(cir_main_state(channel->session->rt), LUA_REGISTRYINDEX, write->string_ref);
  tell(channel->session->rt, &write->on_done, fault);
  free(write);
}

static void drop_writes(cir_ssh_channel *channel, const cir_ssh_fault *fault) {
  while (channel->writes != NULL)
    finish_write(channel, fault);
}

/* The channel is over: everyone who waits is told. It has left the session's list. */
static void conclude(cir_ssh_channel *channel) {
  cir_runtime *rt = channel->session->rt;
  lua_State *L = cir_main_state(rt);
  channel->state = CLOSED;
  channel->raw = NULL;
  const cir_ssh_fault *fault = channel->fault.code != NULL ? &channel->fault : NULL;
  cir_ssh_fault closed;
  cir_ssh_fault_set(&closed, "closed", "channel", "the channel is closed");
  drop_writes(channel, fault != NULL ? fault : &closed);
  while (channel->signals != NULL) {
    pending_signal *next = channel->signals->next;
    free(channel->signals);
    channel->signals = next;
  }
  if (!channel->end_told && channel->on_read != CIR_NO_CALLBACK && channel->reading) {
    channel->end_told = true;
    if (fault != NULL)
      cir_ssh_push_fault(L, fault);
    cir_callback_call(rt, channel->on_read, fault != NULL ? 1 : 0);
  }
  if (fault != NULL)
    tell(rt, &channel->on_exit, fault);
  else
    tell_exit(channel);
  tell(rt, &channel->on_close, fault);
  cir_callback_unref(rt, &channel->on_read);
  luaL_unref(L, LUA_REGISTRYINDEX, channel->anchor);
  channel->anchor = LUA_NOREF;
}

/* --- what packets said -------------------------------------------------------------------------
 */

cir_ssh_channel *cir_ssh_channel_find(cir_ssh_session *session, uint32_t number) {
  cir_ssh_channel *channel = session->channels;
  while (channel != NULL && (channel->raw == NULL || channel->number != number))
    channel = channel->next;
  return channel;
}

void cir_ssh_channel_status(cir_ssh_channel *channel, uint32_t status) {
  channel->status = status;
  channel->has_status = true;
}

/* Copy bytes of the peer's as text, without control characters. */
static void copy_text(char *to, size_t room, cir_span from) {
  size_t size = from.size < room ? from.size : room - 1;
  for (size_t i = 0; i < size; i++)
    to[i] = from.data[i] < ' ' || from.data[i] == 0x7f ? '?' : (char)from.data[i];
  to[size] = '\0';
}

void cir_ssh_channel_signalled(cir_ssh_channel *channel, cir_span name, cir_span message) {
  copy_text(channel->signal, sizeof channel->signal, name);
  copy_text(channel->message, sizeof channel->message, message);
  channel->has_signal = true;
}

/* --- stepping ----------------------------------------------------------------------------------
 */

/* After a failure of libssh2: end the session when it is no use, else only the channel's stream. */
static void fail(cir_ssh_channel *channel, int error) {
  if (!cir_ssh_survives(channel->session, error)) {
    cir_ssh_die_of(channel->session, "channel", error);
    return;
  }
  cir_ssh_fault_set(&channel->fault, "protocol", "channel", "the channel has failed (libssh2 %d)",
                    error);
  channel->ended = true;
  channel->state = CLOSING;
}

static bool step_signals(cir_ssh_channel *channel) {
  bool progress = false;
  while (channel->signals != NULL) {
    pending_signal *signal = channel->signals;
    if (libssh2_channel_signal_ex(channel->raw, signal->name, strlen(signal->name)) ==
        LIBSSH2_ERROR_EAGAIN)
      break;
    channel->signals = signal->next;
    free(signal);
    progress = true;
  }
  if (channel->columns > 0 &&
      libssh2_channel_request_pty_size(channel->raw, channel->columns, channel->rows) !=
          LIBSSH2_ERROR_EAGAIN) {
    channel->columns = 0;
    progress = true;
  }
  return progress;
}

static bool step_writes(cir_ssh_channel *channel) {
  cir_ssh_session *session = channel->session;
  bool progress = false;
  while (channel->writes != NULL && cir_buffer_size(&session->out) < CIR_SSH_OUT_FULL) {
    outgoing *write = channel->writes;
    if (write->done == write->size) {
      finish_write(channel, NULL);
      progress = true;
      continue;
    }
    ssize_t count = libssh2_channel_write_ex(channel->raw, STDOUT, write->data + write->done,
                                             write->size - write->done);
    if (count == LIBSSH2_ERROR_EAGAIN || count == 0)
      return progress;
    if (count < 0) {
      fail(channel, (int)count);
      return true;
    }
    write->done += (size_t)count;
    progress = true;
  }
  if (channel->writes == NULL && channel->shutdown_wanted && !channel->end_sent) {
    int error = libssh2_channel_send_eof(channel->raw);
    if (error == LIBSSH2_ERROR_EAGAIN)
      return progress;
    channel->end_sent = true;
    progress = true;
  }
  return progress;
}

/* Read one piece of a stream and give it to Lua. Returns what libssh2 said. */
static ssize_t read_stream(cir_ssh_channel *channel, int stream) {
  char *buffer = cir_ssh_buffer();
  ssize_t count = libssh2_channel_read_ex(channel->raw, stream, buffer, CIR_SSH_READ);
  if (count <= 0)
    return count;
  lua_State *L = cir_main_state(channel->session->rt);
  lua_pushnil(L);
  lua_pushlstring(L, buffer, (size_t)count);
  lua_pushinteger(L, stream == STDOUT ? 1 : 2);
  cir_callback_call(channel->session->rt, channel->on_read, 3);
  return count;
}

static bool wants_data(const cir_ssh_channel *channel) {
  return channel->state == RUNNING && channel->reading && !channel->ended &&
         channel->session->state != CIR_SSH_DEAD;
}

static bool step_reads(cir_ssh_channel *channel) {
  bool progress = false;
  while (wants_data(channel)) {
    ssize_t out = read_stream(channel, STDOUT), err = LIBSSH2_ERROR_EAGAIN;
    if (out > 0)
      progress = true;
    if (!wants_data(channel))
      break;
    err = read_stream(channel, STDERR);
    if (err > 0)
      progress = true;
    ssize_t error = out < 0 && out != LIBSSH2_ERROR_EAGAIN ? out : err;
    if (error < 0 && error != LIBSSH2_ERROR_EAGAIN) {
      fail(channel, (int)error);
      return true;
    }
    if (out == 0 && err == 0) {
      channel->ended = progress = true;
      break;
    }
    if (out <= 0 && err <= 0)
      break;
  }
  if (channel->ended && !channel->end_told && channel->reading && channel->state == RUNNING) {
    channel->end_told = true;
    cir_callback_call(channel->session->rt, channel->on_read, 0);
  }
  return progress;
}

/* The peer has closed the channel and everything has been read: what is left is to answer. */
static bool step_end(cir_ssh_channel *channel) {
  if (channel->state != RUNNING || !channel->ended ||
      libssh2_channel_wait_closed(channel->raw) == LIBSSH2_ERROR_EAGAIN)
    return false;
  channel->state = CLOSING;
  return true;
}

/*
 * libssh2's own record of the end, for a version of it whose packets on_free does not recognise; it
 * cannot tell status 0 from none.
 */
static void recall_exit(cir_ssh_channel *channel) {
  char *name = NULL;
  size_t size = 0;
  if (channel->has_status || channel->has_signal)
    return;
  int status = libssh2_channel_get_exit_status(channel->raw);
  if (status != 0)
    cir_ssh_channel_status(channel, (uint32_t)status);
  if (libssh2_channel_get_exit_signal(channel->raw, &name, &size, NULL, NULL, NULL, NULL) == 0 &&
      name != NULL) {
    cir_ssh_channel_signalled(channel, (cir_span){(const uint8_t *)name, size},
                              (cir_span){(const uint8_t *)"", 0});
    libssh2_free(channel->session->raw, name);
  }
}

/*
 * Give the channel back to libssh2, or keep it as the spare: see drain in ssh_session.c, which can
 * use a channel only when its window is full.
 */
static void retire(cir_ssh_session *session, LIBSSH2_CHANNEL *raw, bool window_is_full) {
  if (session->spare == NULL && window_is_full)
    session->spare = raw;
  else
    libssh2_channel_free(raw);
}

/* Fill the window of a channel that is about to be closed. Returns whether it is full. */
static bool fill_window(LIBSSH2_CHANNEL *raw) {
  unsigned long initial = 0;
  unsigned long window = libssh2_channel_window_read_ex(raw, NULL, &initial);
  if (window > initial / 4 * 3)
    return true;
  return libssh2_channel_receive_window_adjust2(raw, initial - window, 1, NULL) == 0;
}

/* Close our side. Returns whether the channel is over. */
static bool step_close(cir_ssh_channel *channel) {
  cir_ssh_session *session = channel->session;
  bool keep = session->spare == NULL && channel->ended && fill_window(channel->raw);
  int error = libssh2_channel_close(channel->raw);
  if (error == LIBSSH2_ERROR_EAGAIN) {
    if (channel->close_deadline == 0 || channel->close_deadline > cir_ssh_now(session))
      return false;
    /* libssh2 cannot free a channel that the peer holds open: it stays with the session. */
    cir_ssh_fault_set(&channel->fault, "timeout", "channel",
                      "the server has not closed the channel in time");
    return true;
  }
  if (error != 0 && !cir_ssh_survives(session, error)) {
    cir_ssh_die_of(session, "channel", error);
    return false;
  }
  recall_exit(channel);
  retire(session, channel->raw, keep);
  return true;
}

/* Returns whether anything was done. *over says that the channel leaves the list. */
static bool step(cir_ssh_channel *channel, bool *over) {
  bool progress = false;
  *over = false;
  if (channel->state == RUNNING)
    progress = step_signals(channel) || progress;
  if (channel->state == RUNNING)
    progress = step_writes(channel) || progress;
  if (channel->state == RUNNING)
    progress = step_reads(channel) || progress;
  if (channel->session->state == CIR_SSH_DEAD)
    return true;
  if ((channel->has_status || channel->has_signal) && channel->state != STARTING)
    tell_exit(channel);
  progress = step_end(channel) || progress;
  if (channel->state == CLOSING && channel->session->state != CIR_SSH_DEAD)
    *over = step_close(channel);
  return progress || *over;
}

bool cir_ssh_channels_step(cir_ssh_session *session) {
  bool progress = false;
  cir_ssh_channel **link = &session->channels;
  while (*link != NULL && session->state != CIR_SSH_DEAD) {
    cir_ssh_channel *channel = *link;
    bool over = false;
    if (channel->raw != NULL)
      progress = step(channel, &over) || progress;
    if (!over) {
      link = &channel->next;
      continue;
    }
    *link = channel->next;
    conclude(channel);
    release(channel);
  }
  return progress;
}

void cir_ssh_channels_fail(cir_ssh_session *session) {
  while (session->channels != NULL) {
    cir_ssh_channel *channel = session->channels;
    session->channels = channel->next;
    if (channel->fault.code == NULL)
      channel->fault = session->fault;
    conclude(channel);
    release(channel);
  }
}

uint64_t cir_ssh_channels_alarm(const cir_ssh_session *session, uint64_t alarm) {
  for (cir_ssh_channel *channel = session->channels; channel != NULL; channel = channel->next)
    if (channel->close_deadline > 0 && (alarm == 0 || channel->close_deadline < alarm))
      alarm = channel->close_deadline;
  return alarm;
}

LIBSSH2_CHANNEL *cir_ssh_channels_any(const cir_ssh_session *session) {
  cir_ssh_channel *channel = session->channels;
  while (channel != NULL && (channel->raw == NULL || channel->state != RUNNING || channel->ended))
    channel = channel->next;
  return channel != NULL ? channel->raw : NULL;
}

bool cir_ssh_channels_have(const cir_ssh_session *session, const LIBSSH2_CHANNEL *raw) {
  cir_ssh_channel *channel = session->channels;
  while (channel != NULL && channel->raw != raw)
    channel = channel->next;
  return channel != NULL;
}

/* --- opening -----------------------------------------------------------------------------------
 */

typedef struct variable {
  char *name, *value;
  bool refused;
} variable;

typedef struct start {
  cir_ssh_operation base;
  cir_ssh_channel *channel; /* a hold, until it is given to Lua */
  enum { OPEN, ENVIRONMENT, TERMINAL, REQUEST, GIVE_BACK } phase;
  const char *request; /* "exec", "subsystem" or "shell"; NULL for a tunnel */
  char *text;          /* the command, the subsystem's name, or the tunnel's host */
  size_t text_size;
  int port;
  char *terminal; /* its type, or NULL for none */
  int columns, rows;
  unsigned int window;
  variable *variables;
  size_t variable_count, variable;
  bool abandoned;
} start;

/* The request has failed after the channel was opened: close that before the fault is reported. */
static cir_ssh_progress step_start(cir_ssh_operation *operation);

static cir_ssh_progress start_failed(start *self, int error, const char *code, const char *what) {
  if (!cir_ssh_survives(self->base.session, error))
    return cir_ssh_die_of(self->base.session, "exec", error);
  cir_ssh_fault_set(&self->base.fault, code, "exec", "%s", what);
  self->base.deadline = 0;
  self->phase = GIVE_BACK;
  return step_start(&self->base);
}

static cir_ssh_progress step_open(start *self) {
  cir_ssh_session *session = self->base.session;
  cir_ssh_channel *channel = self->channel;
  if (self->request != NULL)
    channel->raw = libssh2_channel_open_ex(session->raw, "session", sizeof "session" - 1,
                                           self->window, PACKET, NULL, 0);
  else
    channel->raw = libssh2_channel_direct_tcpip(session->raw, self->text, self->port);
  if (channel->raw == NULL) {
    int error = libssh2_session_last_errno(session->raw);
    char *why = NULL;
    if (error == LIBSSH2_ERROR_EAGAIN)
      return CIR_SSH_AGAIN;
    if (!cir_ssh_survives(session, error))
      return cir_ssh_die_of(session, "channel", error);
    libssh2_session_last_error(session->raw, &why, NULL, 0);
    cir_ssh_fault_set(&self->base.fault, "refused", "channel", "the server refuses a channel: %s",
                      why != NULL ? why : "no reason given");
    self->base.fault.reason = "channel_refused";
    return CIR_SSH_FAILED;
  }
  channel->number = session->confirmed_channel;
  channel->next = session->channels;
  session->channels = channel;
  channel->holds++;
  self->phase = self->abandoned ? GIVE_BACK : self->request == NULL ? REQUEST : ENVIRONMENT;
  return CIR_SSH_DONE;
}

/* Close the channel that was opened for nothing, and take it off the list. Rule 3 in ssh.h. */
static cir_ssh_progress step_give_back(start *self) {
  cir_ssh_session *session = self->base.session;
  cir_ssh_channel *channel = self->channel;
  int error = libssh2_channel_close(channel->raw);
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  if (error != 0 && !cir_ssh_survives(session, error))
    return cir_ssh_die_of(session, "exec", error);
  libssh2_channel_free(channel->raw);
  channel->raw = NULL;
  cir_ssh_channel **link = &session->channels;
  while (*link != channel)
    link = &(*link)->next;
  *link = channel->next;
  channel->state = CLOSED;
  release(channel);
  return CIR_SSH_FAILED;
}

static cir_ssh_progress step_start(cir_ssh_operation *operation) {
  start *self = CIR_CONTAINER_OF(operation, start, base);
  cir_ssh_channel *channel = self->channel;
  int error = 0;
  if (self->phase == OPEN) {
    operation->fault.phase = "channel";
    cir_ssh_progress progress = step_open(self);
    if (progress != CIR_SSH_DONE)
      return progress;
    operation->fault.phase = "exec";
  }
  while (self->phase == ENVIRONMENT && self->variable < self->variable_count) {
    variable *next = &self->variables[self->variable];
    error = libssh2_channel_setenv_ex(channel->raw, next->name, (unsigned int)strlen(next->name),
                                      next->value, (unsigned int)strlen(next->value));
    if (error == LIBSSH2_ERROR_EAGAIN)
      return CIR_SSH_AGAIN;
    if (error != 0 && error != LIBSSH2_ERROR_CHANNEL_REQUEST_DENIED)
      return start_failed(self, error, "protocol", "setting the environment failed");
    next->refused = error != 0;
    self->variable++;
  }
  if (self->phase == ENVIRONMENT)
    self->phase = self->terminal != NULL ? TERMINAL : REQUEST;
  if (self->phase == TERMINAL) {
    error = libssh2_channel_request_pty_ex(channel->raw, self->terminal,
                                           (unsigned int)strlen(self->terminal), NULL, 0,
                                           self->columns, self->rows, 0, 0);
    if (error == LIBSSH2_ERROR_EAGAIN)
      return CIR_SSH_AGAIN;
    if (error != 0)
      return start_failed(self, error, "refused", "the server refuses a terminal (PermitTTY?)");
    self->phase = REQUEST;
  }
  if (self->phase == REQUEST && self->request != NULL) {
    error = libssh2_channel_process_startup(channel->raw, self->request,
                                            (unsigned int)strlen(self->request), self->text,
                                            self->text != NULL ? (unsigned int)self->text_size : 0);
    if (error == LIBSSH2_ERROR_EAGAIN && libssh2_channel_eof(channel->raw) != 0)
      return start_failed(self, error, "closed", "the server closed the channel without an answer");
    if (error == LIBSSH2_ERROR_EAGAIN)
      return CIR_SSH_AGAIN;
    if (error != 0)
      return start_failed(self, error, "refused",
                          strcmp(self->request, "subsystem") == 0
                              ? "the server does not offer the subsystem"
                              : "the server refuses to run commands for this user or key");
  }
  if (self->phase == GIVE_BACK)
    return step_give_back(self);
  if (self->phase == REQUEST)
    channel->state = RUNNING;
  return CIR_SSH_DONE;
}

static void abandon_start(cir_ssh_operation *operation) {
  start *self = CIR_CONTAINER_OF(operation, start, base);
  self->abandoned = true;
  if (self->phase != OPEN)
    self->phase = GIVE_BACK;
}

/* The channel's userdata, and the names of the variables that the server refused. */
static int push_channel(cir_ssh_operation *operation, lua_State *L) {
  start *self = CIR_CONTAINER_OF(operation, start, base);
  lua_rawgeti(L, LUA_REGISTRYINDEX, operation->anchor);
  lua_getiuservalue(L, -1, 1);
  cir_ssh_channel **handle = lua_newuserdatauv(L, sizeof *handle, 1);
  *handle = self->channel;
  self->channel = NULL; /* its hold goes with it */
  luaL_setmetatable(L, CIR_SSH_CHANNEL);
  lua_insert(L, -2);
  lua_setiuservalue(L, -2, 1); /* the session lives as long as its channels */
  lua_remove(L, -2);
  lua_newtable(L);
  for (size_t i = 0, n = 0; i < self->variable_count; i++)
    if (self->variables[i].refused) {
      lua_pushstring(L, self->variables[i].name);
      lua_rawseti(L, -2, (lua_Integer)++n);
    }
  return 2;
}

static void free_start(start *self) {
  for (size_t i = 0; i < self->variable_count; i++) {
    free(self->variables[i].name);
    free(self->variables[i].value);
  }
  free(self->variables);
  free(self->text);
  free(self->terminal);
  free(self);
}

static void release_start(cir_ssh_operation *operation) {
  start *self = CIR_CONTAINER_OF(operation, start, base);
  if (self->channel != NULL)
    release(self->channel);
  free_start(self);
}

static const cir_ssh_operation_kind START = {.phase = "exec",
                                             .step = step_start,
                                             .push = push_channel,
                                             .abandon = abandon_start,
                                             .release = release_start};

/* Copy the `env` option, {{name, value}, ...}. Returns what is wrong with it, or NULL. */
static const char *copy_environment(lua_State *L, int index, start *self) {
  lua_Integer count = (lua_Integer)lua_rawlen(L, index);
  if (count > MAX_ENVIRONMENT)
    return "option 'env' has too many variables";
  self->variables = calloc((size_t)count + 1, sizeof *self->variables);
  if (self->variables == NULL)
    return "out of memory";
  for (lua_Integer i = 1; i <= count; i++) {
    if (lua_rawgeti(L, index, i) != LUA_TTABLE || lua_rawgeti(L, -1, 1) != LUA_TSTRING ||
        lua_rawgeti(L, -2, 2) != LUA_TSTRING)
      return "option 'env' must be an array of {name, value}";
    variable *to = &self->variables[self->variable_count++];
    to->name = strdup(lua_tostring(L, -2));
    to->value = strdup(lua_tostring(L, -1));
    if (to->name == NULL || to->value == NULL)
      return "out of memory";
    lua_pop(L, 3);
  }
  return NULL;
}

/* A channel that is to be opened, and the operation for it; raises. Nothing leaks. [-0, +0, m] */
static start *new_start(lua_State *L, cir_ssh_session *session, uint64_t timeout) {
  start *self = calloc(1, sizeof *self);
  cir_ssh_channel *channel = calloc(1, sizeof *channel);
  if (self == NULL || channel == NULL) {
    free(self);
    free(channel);
    luaL_error(L, "out of memory");
    return NULL;
  }
  channel->session = session;
  cir_ssh_hold(session);
  channel->holds = 1;
  channel->anchor = LUA_NOREF;
  channel->on_read = channel->on_exit = channel->on_close = CIR_NO_CALLBACK;
  self->channel = channel;
  self->base.kind = &START;
  self->base.session = session;
  self->base.timeout = timeout;
  return self;
}

/* Submit the operation, or raise what is wrong with its options. [-0, +1, v] */
static int submit(lua_State *L, start *self, const char *wrong, int callback) {
  if (wrong != NULL) {
    release_start(&self->base);
    return luaL_error(L, "%s", wrong);
  }
  cir_ssh_submit(L, 1, &self->base, callback);
  return 1;
}

static const char *copy_string(lua_State *L, int index, char **to, size_t *size) {
  const char *text = lua_tolstring(L, index, size);
  *to = malloc(*size + 1);
  if (*to == NULL)
    return "out of memory";
  memcpy(*to, text, *size + 1);
  return NULL;
}

int cir_ssh_l_exec(lua_State *L) {
  static const char *const known[] = {"command", "subsystem", "shell",   "env",    "term",
                                      "columns", "rows",      "timeout", "window", NULL};
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_settop(L, 3);
  cir_ssh_check_usable(L, session, true);
  cir_ssh_known_options(L, 2, known);
  uint64_t timeout = (uint64_t)cir_ssh_integer_option(L, 2, "timeout", 1, 24 * 3600 * 1000, 0);
  int columns = (int)cir_ssh_integer_option(L, 2, "columns", 1, 10000, 80);
  int rows = (int)cir_ssh_integer_option(L, 2, "rows", 1, 10000, 24);
  unsigned window =
      (unsigned)cir_ssh_integer_option(L, 2, "window", PACKET, 64 * 1024 * 1024, WINDOW);
  bool command = lua_getfield(L, 2, "command") == LUA_TSTRING; /* 4 */
  bool subsystem = lua_getfield(L, 2, "subsystem") == LUA_TSTRING;
  lua_getfield(L, 2, "shell");
  bool shell = lua_toboolean(L, -1);
  if (command + subsystem + shell != 1)
    return luaL_error(L,
                      "session:exec: exactly one of 'command', 'subsystem' and 'shell' is needed");
  int environment = lua_getfield(L, 2, "env"); /* 7 */
  const char *terminal = cir_ssh_string_option(L, 2, "term");

  start *self = new_start(L, session, timeout);
  const char *wrong = NULL;
  self->request = command ? "exec" : subsystem ? "subsystem" : "shell";
  self->window = window;
  self->columns = columns;
  self->rows = rows;
  if (!shell)
    wrong = copy_string(L, command ? 4 : 5, &self->text, &self->text_size);
  if (wrong == NULL && terminal != NULL && (self->terminal = strdup(terminal)) == NULL)
    wrong = "out of memory";
  if (wrong == NULL && environment == LUA_TTABLE)
    wrong = copy_environment(L, 7, self);
  else if (wrong == NULL && environment != LUA_TNIL)
    wrong = "option 'env' must be an array of {name, value}";
  return submit(L, self, wrong, 3);
}

/* session:tunnel({host =, port =, timeout =}, function(err, channel) end) -> operation. */
int cir_ssh_l_tunnel(lua_State *L) {
  static const char *const known[] = {"host", "port", "timeout", NULL};
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_settop(L, 3);
  cir_ssh_check_usable(L, session, true);
  cir_ssh_known_options(L, 2, known);
  uint64_t timeout = (uint64_t)cir_ssh_integer_option(L, 2, "timeout", 1, 24 * 3600 * 1000, 0);
  int port = (int)cir_ssh_integer_option(L, 2, "port", 1, 65535, 0);
  const char *host = cir_ssh_string_option(L, 2, "host");
  luaL_argcheck(L, host != NULL && port > 0, 2, "options 'host' and 'port' are needed");
  start *self = new_start(L, session, timeout);
  self->port = port;
  return submit(L, self, copy_string(L, 4, &self->text, &self->text_size), 3);
}

/* --- methods -----------------------------------------------------------------------------------
 */

static cir_ssh_channel *check_channel(lua_State *L) {
  return *(cir_ssh_channel **)luaL_checkudata(L, 1, CIR_SSH_CHANNEL);
}

/* Keep the userdata at 1 until the channel is closed. [-0, +0, m] */
static void keep(lua_State *L, cir_ssh_channel *channel) {
  if (channel->anchor != LUA_NOREF)
    return;
  lua_pushvalue(L, 1);
  channel->anchor = luaL_ref(L, LUA_REGISTRYINDEX);
}

/* Replace a callback by the function at 2. Returns whether the channel is still there to call it.
 */
static bool set_callback(lua_State *L, cir_ssh_channel *channel, int *callback) {
  luaL_checktype(L, 2, LUA_TFUNCTION);
  if (channel->state == CLOSED)
    return false;
  keep(L, channel);
  cir_callback_unref(channel->session->rt, callback);
  *callback = cir_callback_ref(L, 2);
  cir_ssh_schedule(channel->session);
  return true;
}

/*
 * channel:read_start(function(err, data, stream) end) -> true: stream is 1 for standard output, 2
 * for standard error; no data and no error is the end of both. Returns false when the channel is
 * closed, and the function is not called. [-2, +1, e]
 */
static int l_read_start(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  bool open = set_callback(L, channel, &channel->on_read);
  channel->reading = open;
  lua_pushboolean(L, open);
  return 1;
}

/* channel:read_stop(): no more data until read_start. [-1, +0, e] */
static int l_read_stop(lua_State *L) {
  check_channel(L)->reading = false;
  return 0;
}

/* channel:on_exit(function(err, code, signal, message) end) -> whether it will be called, once. */
static int l_on_exit(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  lua_pushboolean(L, set_callback(L, channel, &channel->on_exit));
  return 1;
}

/* channel:on_close(function(err) end) -> whether it will be called, once. */
static int l_on_close(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  lua_pushboolean(L, set_callback(L, channel, &channel->on_close));
  return 1;
}

/* channel:exit() -> code, signal, message: nil for what has not been received. [-1, +3, e] */
static int l_exit(lua_State *L) {
  push_exit(L, check_channel(L));
  return 3;
}

/* channel:status() -> "open" | "ended" | "closed", and the error when it did not end in order. */
static int l_status(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  lua_pushstring(L, channel->state == CLOSED ? "closed" : channel->ended ? "ended" : "open");
  if (channel->fault.code == NULL)
    return 1;
  cir_ssh_push_fault(L, &channel->fault);
  return 2;
}

/*
 * channel:write(data, function(err) end) -> true: called when all of it is on its way, in the order
 * of the calls. Returns false when the channel takes no more, and the function is not called.
 * [-3, +1, e]
 */
static int l_write(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_settop(L, 3);
  if (channel->state != RUNNING || channel->shutdown_wanted ||
      channel->session->state == CIR_SSH_DEAD) {
    lua_pushboolean(L, false);
    return 1;
  }
  keep(L, channel);
  outgoing *write = calloc(1, sizeof *write);
  if (write == NULL)
    return luaL_error(L, "out of memory");
  write->on_done = cir_callback_ref(L, 3);
  lua_pushvalue(L, 2);
  write->string_ref = luaL_ref(L, LUA_REGISTRYINDEX);
  write->data = data;
  write->size = size;
  outgoing **link = &channel->writes;
  while (*link != NULL)
    link = &(*link)->next;
  *link = write;
  cir_ssh_schedule(channel->session);
  lua_pushboolean(L, true);
  return 1;
}

/* channel:shutdown(): after what is being written, the end of the command's standard input. */
static int l_shutdown(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  channel->shutdown_wanted = true;
  cir_ssh_schedule(channel->session);
  return 0;
}

/* channel:signal(name) -> whether it is on its way; name is without SIG. There is no answer. */
static int l_signal(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  size_t size;
  const char *name = luaL_checklstring(L, 2, &size);
  pending_signal *signal;
  luaL_argcheck(L, size > 0 && size < sizeof signal->name, 2, "no name of a signal");
  for (size_t i = 0; i < size; i++)
    luaL_argcheck(L, isalnum((unsigned char)name[i]) || strchr("@.-_", name[i]) != NULL, 2,
                  "no name of a signal");
  bool open = channel->state == RUNNING && channel->session->state != CIR_SSH_DEAD;
  if (open) {
    signal = calloc(1, sizeof *signal);
    if (signal == NULL)
      return luaL_error(L, "out of memory");
    memcpy(signal->name, name, size);
    pending_signal **link = &channel->signals;
    while (*link != NULL)
      link = &(*link)->next;
    *link = signal;
    cir_ssh_schedule(channel->session);
  }
  lua_pushboolean(L, open);
  return 1;
}

/* channel:resize(columns, rows): of its terminal. [-3, +0, e] */
static int l_resize(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  lua_Integer columns = luaL_checkinteger(L, 2), rows = luaL_checkinteger(L, 3);
  luaL_argcheck(L, columns >= 1 && columns <= 10000, 2, "out of range");
  luaL_argcheck(L, rows >= 1 && rows <= 10000, 3, "out of range");
  channel->columns = (int)columns;
  channel->rows = (int)rows;
  cir_ssh_schedule(channel->session);
  return 0;
}

static void close_channel(cir_ssh_channel *channel, uint64_t timeout) {
  if (channel->state == RUNNING)
    channel->state = CLOSING;
  if (channel->state == CLOSING && timeout > 0 && channel->close_deadline == 0)
    channel->close_deadline = cir_ssh_now(channel->session) + timeout;
  cir_ssh_schedule(channel->session);
}

/*
 * channel:close([timeout_ms]): unread output is dropped. on_close follows when the server has
 * closed its side too, or with code "timeout". The remote command is not ended by it. [-2, +0, e]
 */
static int l_close(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  lua_Integer timeout = lua_isinteger(L, 2) ? lua_tointeger(L, 2) : 0;
  luaL_argcheck(L, timeout >= 0 && timeout <= 24 * 3600 * 1000, 2, "out of range");
  close_channel(channel, (uint64_t)timeout);
  return 0;
}

static int l_gc(lua_State *L) {
  cir_ssh_channel **handle = luaL_checkudata(L, 1, CIR_SSH_CHANNEL);
  if (*handle == NULL)
    return 0;
  close_channel(*handle, 0);
  release(*handle);
  *handle = NULL;
  return 0;
}

void cir_ssh_channel_register(lua_State *L) {
  static const luaL_Reg methods[] = {{"read_start", l_read_start},
                                     {"read_stop", l_read_stop},
                                     {"on_exit", l_on_exit},
                                     {"on_close", l_on_close},
                                     {"exit", l_exit},
                                     {"status", l_status},
                                     {"write", l_write},
                                     {"shutdown", l_shutdown},
                                     {"signal", l_signal},
                                     {"resize", l_resize},
                                     {"close", l_close},
                                     {"__gc", l_gc},
                                     {"__close", l_close},
                                     {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_SSH_CHANNEL)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}
