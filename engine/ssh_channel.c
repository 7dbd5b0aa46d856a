/*
 * ssh_channel.c - channels: commands, subsystems and tunnels. See ssh.h.
 *
 * A channel reads only while Lua wants it to; what the peer may send meanwhile is bounded by the
 * channel's window. It is closed when the peer has closed it and its output has been read to the
 * end, or when Lua asks.
 */
#include "ssh_channel.h"

enum { STDOUT = 0, STDERR = SSH_EXTENDED_DATA_STDERR };

cir_ssh_channel *cir_ssh_channel_new(cir_ssh_session *session) {
  cir_ssh_channel *channel = calloc(1, sizeof *channel);
  if (channel == NULL)
    return NULL;
  channel->session = session;
  cir_ssh_hold(session);
  channel->holds = 1;
  channel->anchor = LUA_NOREF;
  channel->on_read = channel->on_exit = channel->on_close = CIR_NO_CALLBACK;
  return channel;
}

void cir_ssh_channel_enter(cir_ssh_channel *channel, LIBSSH2_CHANNEL *raw, unsigned window) {
  cir_ssh_session *session = channel->session;
  channel->raw = raw;
  channel->window = window;
  session->windows += window;
  channel->number = session->confirmed_channel;
  channel->next = session->channels;
  session->channels = channel;
  channel->holds++;
}

void cir_ssh_channel_discard(cir_ssh_channel *channel) {
  enum { PATIENCE_MS = 10000 };
  channel->state = CIR_SSH_CLOSING;
  channel->ended = true;
  channel->close_deadline = cir_ssh_now(channel->session) + PATIENCE_MS;
}

void cir_ssh_channel_release(cir_ssh_channel *channel) {
  if (--channel->holds > 0)
    return;
  cir_ssh_release(channel->session);
  free(channel);
}

/* --- callbacks ---------------------------------------------------------------------------------
 */

void cir_ssh_channel_push_exit(lua_State *L, const cir_ssh_channel *channel) {
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
  cir_ssh_channel_push_exit(L, channel);
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
  cir_ssh_outgoing *write = channel->writes;
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
  channel->state = CIR_SSH_CLOSED;
  channel->raw = NULL;
  const cir_ssh_fault *fault = channel->fault.code != NULL ? &channel->fault : NULL;
  cir_ssh_fault closed;
  cir_ssh_fault_set(&closed, "closed", "channel", "the channel is closed");
  drop_writes(channel, fault != NULL ? fault : &closed);
  while (channel->signals != NULL) {
    cir_ssh_signal *next = channel->signals->next;
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
  channel->state = CIR_SSH_CLOSING;
}

static bool step_signals(cir_ssh_channel *channel) {
  bool progress = false;
  while (channel->signals != NULL) {
    cir_ssh_signal *signal = channel->signals;
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
    cir_ssh_outgoing *write = channel->writes;
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
  return channel->state == CIR_SSH_RUNNING && channel->reading && !channel->ended &&
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
  if (channel->ended && !channel->end_told && channel->reading &&
      channel->state == CIR_SSH_RUNNING) {
    channel->end_told = true;
    cir_callback_call(channel->session->rt, channel->on_read, 0);
  }
  return progress;
}

/* The peer has closed the channel and everything has been read: what is left is to answer. */
static bool step_end(cir_ssh_channel *channel) {
  if (channel->state != CIR_SSH_RUNNING || !channel->ended ||
      libssh2_channel_wait_closed(channel->raw) == LIBSSH2_ERROR_EAGAIN)
    return false;
  channel->state = CIR_SSH_CLOSING;
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
  session->windows -= channel->window;
  retire(session, channel->raw, keep);
  return true;
}

/* Returns whether anything was done. *over says that the channel leaves the list. */
static bool step(cir_ssh_channel *channel, bool *over) {
  bool progress = false;
  *over = false;
  if (channel->state == CIR_SSH_RUNNING || channel->state == CIR_SSH_CLOSING)
    progress = step_signals(channel) || progress; /* a last TERM still goes before the close */
  if (channel->state == CIR_SSH_RUNNING)
    progress = step_writes(channel) || progress;
  if (channel->state == CIR_SSH_RUNNING)
    progress = step_reads(channel) || progress;
  if (channel->session->state == CIR_SSH_DEAD)
    return true;
  if ((channel->has_status || channel->has_signal) && channel->state != CIR_SSH_STARTING)
    tell_exit(channel);
  progress = step_end(channel) || progress;
  if (channel->state == CIR_SSH_CLOSING && channel->session->state != CIR_SSH_DEAD)
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
    cir_ssh_channel_release(channel);
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
    cir_ssh_channel_release(channel);
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
  while (channel != NULL &&
         (channel->raw == NULL || channel->state != CIR_SSH_RUNNING || channel->ended))
    channel = channel->next;
  return channel != NULL ? channel->raw : NULL;
}

bool cir_ssh_channels_adopt(cir_ssh_session *session, LIBSSH2_CHANNEL *raw) {
  cir_ssh_channel *channel = cir_ssh_channel_new(session);
  if (channel == NULL)
    return false;
  cir_ssh_channel_enter(channel, raw, LIBSSH2_CHANNEL_WINDOW_DEFAULT);
  cir_ssh_channel_discard(channel);
  cir_ssh_channel_release(channel);
  return true;
}
