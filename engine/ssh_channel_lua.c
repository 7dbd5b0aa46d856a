/*
 * ssh_channel_lua.c - the methods of a channel in Lua. They write down what is wanted; the pump
 * does it. See ssh.h.
 */
#include "ssh_channel.h"

#include <ctype.h>

static cir_ssh_channel *check_channel(lua_State *L) {
  return cir_check_handle(L, 1, CIR_SSH_CHANNEL);
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
  if (channel->state == CIR_SSH_CLOSED)
    return false;
  keep(L, channel);
  cir_callback_replace(L, 2, callback);
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
  cir_ssh_channel_push_exit(L, check_channel(L));
  return 3;
}

/* channel:status() -> "open" | "ended" | "closed", and the error when it did not end in order. */
static int l_status(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  lua_pushstring(L, channel->state == CIR_SSH_CLOSED ? "closed"
                    : channel->ended                 ? "ended"
                                                     : "open");
  if (channel->fault.code == NULL)
    return 1;
  cir_ssh_push_fault(L, &channel->fault);
  return 2;
}

/*
 * channel:write(data, function(err) end) -> true: called when all of it is on its way, in the order
 * of the calls, or with what has ended the session meanwhile. Returns false when the channel takes
 * no more, and the function is not called. [-3, +1, e]
 */
static int l_write(lua_State *L) {
  cir_ssh_channel *channel = check_channel(L);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_settop(L, 3);
  if (channel->state != CIR_SSH_RUNNING || channel->shutdown_wanted) {
    lua_pushboolean(L, false);
    return 1;
  }
  int on_done, string_ref;
  keep(L, channel);
  cir_callback_ref_both(L, 3, &on_done, 2, &string_ref);
  cir_ssh_outgoing *write = calloc(1, sizeof *write);
  if (write == NULL) {
    cir_callback_unref(channel->session->rt, &on_done);
    luaL_unref(L, LUA_REGISTRYINDEX, string_ref);
    return luaL_error(L, "out of memory");
  }
  write->on_done = on_done;
  write->string_ref = string_ref;
  write->data = data;
  write->size = size;
  cir_ssh_outgoing **link = &channel->writes;
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
  cir_ssh_signal *signal;
  luaL_argcheck(L, size > 0 && size < sizeof signal->name, 2, "no name of a signal");
  for (size_t i = 0; i < size; i++)
    luaL_argcheck(L, isalnum((unsigned char)name[i]) || strchr("@.-_", name[i]) != NULL, 2,
                  "no name of a signal");
  bool open = channel->state == CIR_SSH_RUNNING && channel->session->state != CIR_SSH_DEAD;
  if (open) {
    signal = calloc(1, sizeof *signal);
    if (signal == NULL)
      return luaL_error(L, "out of memory");
    memcpy(signal->name, name, size);
    cir_ssh_signal **link = &channel->signals;
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
  if (channel->state == CIR_SSH_RUNNING)
    channel->state = CIR_SSH_CLOSING;
  if (channel->state == CIR_SSH_CLOSING && timeout > 0 && channel->close_deadline == 0)
    channel->close_deadline = cir_ssh_now(channel->session) + timeout;
  cir_ssh_schedule(channel->session);
}

/*
 * channel:close([timeout_ms]): unread output is dropped. on_close follows when the server has
 * closed its side too, or with code "timeout". The remote command is not ended by it. [-2, +0, e]
 */
static int l_close(lua_State *L) {
  cir_ssh_channel *channel = *(cir_ssh_channel **)luaL_checkudata(L, 1, CIR_SSH_CHANNEL);
  lua_Integer timeout = lua_isinteger(L, 2) ? lua_tointeger(L, 2) : 0;
  luaL_argcheck(L, timeout >= 0 && timeout <= 24 * 3600 * 1000, 2, "out of range");
  if (channel != NULL) /* else finalised, and so closed */
    close_channel(channel, (uint64_t)timeout);
  return 0;
}

static int l_gc(lua_State *L) {
  cir_ssh_channel **handle = luaL_checkudata(L, 1, CIR_SSH_CHANNEL);
  if (*handle == NULL)
    return 0;
  close_channel(*handle, 0);
  cir_ssh_channel_release(*handle);
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
