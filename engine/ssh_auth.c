/*
 * ssh_auth.c - public key authentication. See ssh.h.
 *
 * The key is ours and was parsed once, or the signature comes from a function in Lua (an agent).
 * libssh2 asks for the signature from inside its own call, where Lua must not be called: it is told
 * to come again, and the step asks Lua when libssh2 has returned.
 */
#include "ssh.h"

#include <stdio.h>

typedef struct auth {
  cir_ssh_operation base;
  char *user;
  uint8_t *blob; /* the public key */
  size_t blob_size;
  const cir_ssh_key *key; /* NULL for a signer in Lua */
  int signs_ref;          /* keeps the key or the signer */
  enum { NOT_ASKED, WANTED, ASKED, ANSWERED } state;
  uint8_t *data; /* what is to be signed */
  size_t data_size;
  uint8_t *signature; /* NULL when it was refused */
  size_t signature_size;
  const char *trouble; /* why there was no signature */
  char trouble_text[160];
} auth;

/*
 * The algorithm that the data to be signed names (RFC 4252, section 7). Empty when it does not
 * parse. A certificate's is the one of its key: only the name in the request tells them apart.
 */
static cir_span algorithm_of(const uint8_t *data, size_t size) {
  static const char suffix[] = "-cert-v01@openssh.com";
  const size_t length = sizeof suffix - 1;
  cir_wire wire = cir_wire_of(data, size);
  cir_wire_string(&wire);   /* the session's identifier */
  cir_wire_bytes(&wire, 1); /* SSH_MSG_USERAUTH_REQUEST */
  cir_wire_string(&wire);   /* the user */
  cir_wire_string(&wire);   /* "ssh-connection" */
  cir_wire_string(&wire);   /* "publickey" */
  cir_wire_bytes(&wire, 1); /* TRUE */
  cir_span name = cir_wire_string(&wire);
  if (name.size > length && memcmp(name.data + name.size - length, suffix, length) == 0)
    name.size -= length;
  return name;
}

static void no_signature(auth *self, const char *reason, const char *text) {
  self->trouble = reason;
  snprintf(self->trouble_text, sizeof self->trouble_text, "%s", text);
}

/* Called by libssh2, which frees the signature with our on_free: so it is made by its allocator. */
static LIBSSH2_USERAUTH_PUBLICKEY_SIGN_FUNC(on_sign) {
  auth *self = *abstract;
  (void)session;
  uint8_t *signature = NULL;
  size_t size = 0;
  cir_span algorithm = algorithm_of(data, data_len);
  if (cir_span_is(algorithm, "ssh-rsa")) {
    no_signature(
        self, "no_algorithm",
        "the server does not announce SHA-2 signatures for RSA keys, and SHA-1 is refused");
    return LIBSSH2_ERROR_PUBLICKEY_UNVERIFIED;
  }
  if (self->key != NULL) {
    signature = cir_ssh_key_sign(self->key, algorithm, data, data_len, &size);
    if (signature == NULL)
      no_signature(self, "sign_failed", "the key cannot make the signature that the server wants");
  } else if (self->state == NOT_ASKED) {
    self->data = malloc(data_len);
    if (self->data == NULL)
      return LIBSSH2_ERROR_ALLOC;
    memcpy(self->data, data, data_len);
    self->data_size = data_len;
    self->state = WANTED;
    return LIBSSH2_ERROR_EAGAIN;
  } else if (self->state != ANSWERED) {
    return LIBSSH2_ERROR_EAGAIN;
  } else {
    signature = self->signature;
    size = self->signature_size;
    self->signature = NULL;
  }
  if (signature == NULL)
    return LIBSSH2_ERROR_PUBLICKEY_UNVERIFIED;
  *sig = cir_ssh_allocate(self->base.session, size);
  if (*sig != NULL) {
    memcpy(*sig, signature, size);
    *sig_len = size;
  }
  free(signature);
  return *sig != NULL ? 0 : LIBSSH2_ERROR_ALLOC;
}

/*
 * reply(signature) or reply(nil, why): the answer of the signer, of which only the first counts.
 * Upvalue 1 is the operation's handle. [-2, +0, e]
 */
static int l_reply(lua_State *L) {
  cir_ssh_operation **handle = luaL_checkudata(L, lua_upvalueindex(1), CIR_SSH_OPERATION);
  if (*handle == NULL)
    return 0;
  auth *self = CIR_CONTAINER_OF(*handle, auth, base);
  if (self->state != ASKED)
    return 0;
  size_t size = 0;
  const char *signature = lua_isnil(L, 1) ? NULL : luaL_checklstring(L, 1, &size);
  if (signature != NULL) {
    self->signature = malloc(size + 1);
    if (self->signature == NULL)
      return luaL_error(L, "out of memory");
    memcpy(self->signature, signature, size);
    self->signature_size = size;
  } else {
    no_signature(self, "sign_failed", luaL_optstring(L, 2, "the signer has no signature"));
  }
  self->state = ANSWERED;
  cir_ssh_schedule(self->base.session);
  return 0;
}

static void ask_signer(auth *self) {
  cir_runtime *rt = self->base.session->rt;
  lua_State *L = cir_main_state(rt);
  cir_span algorithm = algorithm_of(self->data, self->data_size);
  self->state = ASKED;
  lua_pushlstring(L, (const char *)algorithm.data, algorithm.size);
  lua_pushlstring(L, (const char *)self->data, self->data_size);
  lua_rawgeti(L, LUA_REGISTRYINDEX, self->base.anchor);
  lua_pushcclosure(L, l_reply, 1);
  cir_callback_call(rt, self->signs_ref, 3);
}

static cir_ssh_progress step_auth(cir_ssh_operation *operation) {
  auth *self = CIR_CONTAINER_OF(operation, auth, base);
  cir_ssh_session *session = operation->session;
  void *abstract = self;
  int error;
  for (;;) {
    error = libssh2_userauth_publickey(session->raw, self->user, self->blob, self->blob_size,
                                       on_sign, &abstract);
    if (self->state != WANTED)
      break;
    ask_signer(self);
    if (self->state != ANSWERED || session->state == CIR_SSH_DEAD)
      return CIR_SSH_AGAIN;
  }
  cir_ssh_fault *fault = &operation->fault;
  if (error == 0) {
    session->authenticated = true;
    return CIR_SSH_DONE;
  }
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  if (!cir_ssh_survives(session, error))
    return cir_ssh_die_of(session, "auth", error);
  if (self->trouble != NULL) {
    cir_ssh_fault_set(fault, "auth", "auth", "%s", self->trouble_text);
    fault->reason = self->trouble;
  } else if (error == LIBSSH2_ERROR_METHOD_NONE) {
    cir_ssh_fault_set(fault, "auth", "auth",
                      "the server takes none of the signature algorithms of this key");
    fault->reason = "no_algorithm";
  } else if (error == LIBSSH2_ERROR_AUTHENTICATION_FAILED) {
    cir_ssh_fault_set(fault, "auth", "auth", "the server does not take this key for this user");
    fault->reason = "key_refused";
  } else {
    cir_ssh_fault_set(fault, "auth", "auth",
                      "the server took the key and refused its signature (libssh2 %d)", error);
    fault->reason = "signature_refused";
  }
  return CIR_SSH_FAILED;
}

static int push_nothing(cir_ssh_operation *operation, lua_State *L) {
  (void)operation;
  (void)L;
  return 0;
}

static void release_auth(cir_ssh_operation *operation) {
  auth *self = CIR_CONTAINER_OF(operation, auth, base);
  lua_State *L = cir_main_state(operation->session->rt);
  luaL_unref(L, LUA_REGISTRYINDEX, self->signs_ref);
  free(self->user);
  free(self->blob);
  free(self->data);
  free(self->signature);
  free(self);
}

static const cir_ssh_operation_kind AUTH = {.phase = "auth",
                                            .fatal = true,
                                            .step = step_auth,
                                            .push = push_nothing,
                                            .release = release_auth};

/*
 * session:authenticate(options, function(err) end) -> operation. Options: user, key or sign,
 * public (what the server is shown: needed with sign; a key's certificate with key) and timeout.
 * sign(algorithm, data, reply) is a function that calls reply(signature), with what belongs inside
 * the signature's inner string, or reply(nil, why), once. After a failure with code "auth" another
 * key may be tried. [-3, +1, e]
 */
int cir_ssh_l_authenticate(lua_State *L) {
  static const char *const known[] = {"user", "key", "public", "sign", "timeout", NULL};
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  cir_ssh_check_usable(L, session, false);
  cir_known_options(L, 2, known);
  lua_Integer timeout = cir_integer_option(L, 2, "timeout", 1, 24 * 3600 * 1000, 0);
  const char *user = cir_string_option(L, 2, "user");
  luaL_argcheck(L, user != NULL, 2, "option 'user' is needed");
  lua_getfield(L, 2, "key");
  cir_ssh_key *key = lua_isnil(L, -1) ? NULL : cir_check_handle(L, lua_gettop(L), CIR_SSH_KEY);
  lua_getfield(L, 2, "public");
  lua_getfield(L, 2, "sign");
  bool public = lua_type(L, -2) == LUA_TSTRING;
  bool signer = public && lua_type(L, -1) == LUA_TFUNCTION;
  luaL_argcheck(L, (key != NULL) != signer, 2, "either 'key', or 'public' and 'sign', is needed");

  size_t size;
  const char *blob = public ? lua_tolstring(L, -2, &size) : (const char *)key->blob;
  if (!public)
    size = key->blob_size;
  if (!signer)
    lua_getfield(L, 2, "key");
  int signs_ref = luaL_ref(L, LUA_REGISTRYINDEX);
  auth *self = calloc(1, sizeof *self);
  if (self != NULL) {
    self->user = strdup(user);
    self->blob = malloc(size + 1);
  }
  if (self == NULL || self->user == NULL || self->blob == NULL) {
    if (self != NULL) {
      free(self->user);
      free(self->blob);
    }
    free(self);
    luaL_unref(L, LUA_REGISTRYINDEX, signs_ref);
    return luaL_error(L, "out of memory");
  }
  memcpy(self->blob, blob, size);
  self->blob_size = size;
  self->base.kind = &AUTH;
  self->base.timeout = (uint64_t)timeout;
  self->key = key;
  self->signs_ref = signs_ref;
  cir_ssh_submit(L, 1, &self->base, 3);
  return 1;
}

/* --- what the server offers --------------------------------------------------------------------
 */

typedef struct list {
  cir_ssh_operation base;
  char *user;
  char *methods; /* NULL when the user needs none */
} list;

static cir_ssh_progress step_list(cir_ssh_operation *operation) {
  list *self = CIR_CONTAINER_OF(operation, list, base);
  cir_ssh_session *session = operation->session;
  const char *methods =
      libssh2_userauth_list(session->raw, self->user, (unsigned int)strlen(self->user));
  if (methods != NULL) {
    self->methods = strdup(methods);
    if (self->methods != NULL)
      return CIR_SSH_DONE;
    cir_ssh_fault_set(&operation->fault, "failed", "auth", "out of memory");
    return CIR_SSH_FAILED; /* without methods it would say that the user is let in */
  }
  int error = libssh2_session_last_errno(session->raw);
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  if (libssh2_userauth_authenticated(session->raw)) {
    session->authenticated = true;
    return CIR_SSH_DONE;
  }
  return cir_ssh_die_of(session, "auth", error);
}

static int push_list(cir_ssh_operation *operation, lua_State *L) {
  lua_pushstring(L, CIR_CONTAINER_OF(operation, list, base)->methods);
  return 1;
}

static void release_list(cir_ssh_operation *operation) {
  list *self = CIR_CONTAINER_OF(operation, list, base);
  free(self->user);
  free(self->methods);
  free(self);
}

static const cir_ssh_operation_kind LIST = {
    .phase = "auth", .fatal = true, .step = step_list, .push = push_list, .release = release_list};

/*
 * session:auth_methods(user, timeout_ms, function(err, methods) end) -> operation. The methods are
 * a list such as "publickey,password", or nil when the server has let the user in without any.
 * [-4, +1, e]
 */
int cir_ssh_l_auth_methods(lua_State *L) {
  cir_ssh_session *session = cir_ssh_check_session(L, 1);
  const char *user = luaL_checkstring(L, 2);
  lua_Integer timeout = luaL_checkinteger(L, 3);
  luaL_argcheck(L, timeout >= 0 && timeout <= 24 * 3600 * 1000, 3, "out of range");
  luaL_checktype(L, 4, LUA_TFUNCTION);
  cir_ssh_check_usable(L, session, false);
  list *self = calloc(1, sizeof *self);
  if (self == NULL || (self->user = strdup(user)) == NULL) {
    free(self);
    return luaL_error(L, "out of memory");
  }
  self->base.kind = &LIST;
  self->base.timeout = (uint64_t)timeout;
  cir_ssh_submit(L, 1, &self->base, 4);
  return 1;
}
