/*
 * ssh_open.c - ssh.open: a transport, the server's identification, the key exchange. See ssh.h.
 */
#include "ssh.h"

#include <errno.h>

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
  const char *address = cir_string_option(L, 1, "address");
  const char *bind_address = cir_string_option(L, 1, "bind");
  int port = (int)cir_integer_option(L, 1, "port", 1, 65535, 22);
  int fd = (int)cir_integer_option(L, 1, "descriptor", 0, INT32_MAX, -1);
  bool stream = lua_getfield(L, 1, "write") != LUA_TNIL;
  if ((address != NULL) + (fd >= 0) + stream != 1)
    luaL_error(L, "ssh.open: exactly one of 'address', 'descriptor' and 'write' is needed");
  cir_ssh_transport *transport;
  if (stream) {
    int write_ref = CIR_NO_CALLBACK, drained_ref = CIR_NO_CALLBACK;
    if (lua_getfield(L, 1, "drained") == LUA_TNIL) {
      write_ref = cir_callback_ref(L, -2);
    } else {
      luaL_checktype(L, -1, LUA_TFUNCTION);
      cir_callback_ref_both(L, -2, &write_ref, -1, &drained_ref);
    }
    transport = cir_ssh_stream_new(rt, write_ref, drained_ref, error);
  } else if (address != NULL) {
    transport = cir_ssh_socket_connect(rt, address, port, bind_address, error);
  } else {
    transport = cir_ssh_socket_adopt(rt, fd, error);
  }
  lua_settop(L, top);
  return transport;
}

/*
 * The `methods` option: lists of algorithms, the preferred first. That of key exchanges is needed:
 * libssh2's own cannot be kept from what rule 11 is about. Raises a misuse. [-0, +0, v]
 */
static void set_methods(lua_State *L, LIBSSH2_SESSION *raw) {
  static const struct {
    const char *name;
    int first, second; /* for both directions */
  } kinds[] = {{"kex", LIBSSH2_METHOD_KEX, -1},
               {"hostkey", LIBSSH2_METHOD_HOSTKEY, -1},
               {"cipher", LIBSSH2_METHOD_CRYPT_CS, LIBSSH2_METHOD_CRYPT_SC},
               {"mac", LIBSSH2_METHOD_MAC_CS, LIBSSH2_METHOD_MAC_SC},
               {"sign", LIBSSH2_METHOD_SIGN_ALGO, -1}};
  if (lua_getfield(L, 1, "methods") != LUA_TTABLE)
    luaL_error(L, "ssh.open: option 'methods' must be a table of comma-separated lists");
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    const char *list = cir_string_option(L, lua_gettop(L), kinds[i].name);
    if (list == NULL && i == 0)
      luaL_error(L, "ssh.open: methods.kex is needed");
    if (list != NULL &&
        (libssh2_session_method_pref(raw, kinds[i].first, list) != 0 ||
         (kinds[i].second >= 0 && libssh2_session_method_pref(raw, kinds[i].second, list) != 0)))
      luaL_error(L, "ssh.open: methods.%s: none of '%s' is supported", kinds[i].name, list);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
}

/*
 * A session without a transport, its userdata on the top of the stack. [-0, +1, m]
 */
static cir_ssh_session *new_session(lua_State *L) {
  cir_ssh_session **handle = lua_newuserdatauv(L, sizeof *handle, 0);
  *handle = NULL;
  luaL_setmetatable(L, CIR_SSH_SESSION);
  cir_ssh_session *session = calloc(1, sizeof *session);
  if (session == NULL || !cir_ssh_raw_new(session)) {
    free(session);
    luaL_error(L, "ssh.open: out of memory");
    return NULL;
  }
  cir_ssh_session_begin(session, cir_runtime_of(L));
  *handle = session;
  return session;
}

/*
 * ssh.open(options, function(err, session) end) -> operation, session. The phases are "connect",
 * "banner" and "kex", each with a deadline in milliseconds of its own. The host key is not verified
 * here: the caller looks at session:host_key() before it goes on. The session is returned for those
 * who carry its bytes ('write'); nothing else may be done with it before the callback. [-2, +2, e]
 */
int cir_ssh_l_open(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_settop(L, 2);
  cir_known_options(L, 1, OPEN_OPTIONS);
  const lua_Integer day = 24 * 3600 * 1000;
  lua_Integer connect_ms = cir_integer_option(L, 1, "connect_ms", 1, day, 0);
  lua_Integer banner_ms = cir_integer_option(L, 1, "banner_ms", 1, day, 0);
  lua_Integer kex_ms = cir_integer_option(L, 1, "kex_ms", 1, day, 0);

  cir_runtime *rt = cir_runtime_of(L);
  if (!cir_ssh_module_begin(rt))
    luaL_error(L, "ssh.open: libssh2 cannot be initialised");
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
  /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): luaL_error does not return */
  self->base.kind = &OPENING;
  self->base.timeout = (uint64_t)connect_ms;
  self->banner_ms = (uint64_t)banner_ms;
  self->kex_ms = (uint64_t)kex_ms;
  cir_ssh_submit(L, 3, &self->base, 2);
  if (session->transport == NULL) {
    session->io_error = error;
    cir_ssh_die_of(session, "connect", LIBSSH2_ERROR_SOCKET_NONE);
  }
  lua_pushvalue(L, 3);
  return 2;
}
