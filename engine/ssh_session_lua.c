/*
 * ssh_session_lua.c - the methods of a session in Lua. See ssh.h.
 */
#include "ssh.h"

cir_ssh_session *cir_ssh_check_session(lua_State *L, int index) {
  return cir_check_handle(L, index, CIR_SSH_SESSION);
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
  if (!session->buried)
    cir_callback_replace(L, 2, &session->on_close);
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
  cir_ssh_session *session = *(cir_ssh_session **)luaL_checkudata(L, 1, CIR_SSH_SESSION);
  if (session == NULL) /* finalised, and so closed */
    return 0;
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
  cir_ssh_session *session = check_stream(L);
  const char *data = luaL_checklstring(L, 2, &size);
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
  if (luaL_newmetatable(L, CIR_SSH_SESSION)) {
    luaL_setfuncs(L, session_methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}
