/*
 * ssh_start.c - opening a channel and asking for what runs on it: a command, a subsystem, a shell,
 * or a tunnel. One operation, so that no answer of another request comes between. See ssh.h.
 */
#include "ssh_channel.h"

enum {
  WINDOW = LIBSSH2_CHANNEL_WINDOW_DEFAULT,
  PACKET = LIBSSH2_CHANNEL_PACKET_DEFAULT,
  MAX_ENVIRONMENT = 256
};

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

/*
 * The request has failed, or its channel has been closed: no answer is due any more, so the channel
 * is closed in the background and the next operation may begin. `code` and `what` say how the
 * server has refused it; any other failure is told in libssh2's words, or it would be blamed on
 * the server.
 */
static cir_ssh_progress start_failed(start *self, int error, const char *code, const char *what) {
  LIBSSH2_SESSION *raw = self->base.session->raw;
  if (!cir_ssh_survives(self->base.session, error))
    return cir_ssh_die_of(self->base.session, "exec", error);
  if (error == LIBSSH2_ERROR_EAGAIN || error == LIBSSH2_ERROR_CHANNEL_REQUEST_DENIED) {
    cir_ssh_fault_set(&self->base.fault, code, "exec", "%s", what);
  } else {
    char *why = NULL;
    if (libssh2_session_last_errno(raw) == error)
      libssh2_session_last_error(raw, &why, NULL, 0);
    cir_ssh_fault_set(&self->base.fault, "protocol", "exec", "the request failed: %s (libssh2 %d)",
                      why != NULL ? why : "no reason given", error);
  }
  cir_ssh_channel_discard(self->channel);
  return CIR_SSH_FAILED;
}

static cir_ssh_progress step_open(start *self) {
  cir_ssh_session *session = self->base.session;
  cir_ssh_channel *channel = self->channel;
  LIBSSH2_CHANNEL *raw;
  if (self->request != NULL)
    raw = libssh2_channel_open_ex(session->raw, "session", sizeof "session" - 1, self->window,
                                  PACKET, NULL, 0);
  else
    raw = libssh2_channel_direct_tcpip(session->raw, self->text, self->port);
  if (raw == NULL) {
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
  cir_ssh_channel_enter(channel, raw, self->request != NULL ? self->window : (unsigned)WINDOW);
  self->phase = self->abandoned ? GIVE_BACK : self->request == NULL ? REQUEST : ENVIRONMENT;
  return CIR_SSH_DONE;
}

/*
 * It was given up before an answer came. The channel is closed, and the operation keeps its place
 * until the server has closed it too: then no answer can come any more. Rule 3 in ssh.h.
 */
static cir_ssh_progress step_give_back(start *self) {
  cir_ssh_session *session = self->base.session;
  cir_ssh_channel *channel = self->channel;
  int error = libssh2_channel_close(channel->raw);
  if (error == LIBSSH2_ERROR_EAGAIN)
    return CIR_SSH_AGAIN;
  if (error != 0 && !cir_ssh_survives(session, error))
    return cir_ssh_die_of(session, "exec", error);
  libssh2_channel_free(channel->raw);
  session->windows -= channel->window;
  channel->raw = NULL;
  cir_ssh_channel **link = &session->channels;
  while (*link != channel)
    link = &(*link)->next;
  *link = channel->next;
  channel->state = CIR_SSH_CLOSED;
  cir_ssh_channel_release(channel);
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
    channel->state = CIR_SSH_RUNNING;
  return CIR_SSH_DONE;
}

static void abandon_start(cir_ssh_operation *operation) {
  start *self = CIR_CONTAINER_OF(operation, start, base);
  self->abandoned = true;
  if (self->phase != OPEN)
    self->phase = GIVE_BACK;
}

/* The channel's userdata, and the names of the variables that the server refused, if any. */
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
  lua_pushnil(L);
  for (size_t i = 0; i < self->variable_count; i++)
    if (self->variables[i].refused) {
      if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        lua_newtable(L);
      }
      lua_pushstring(L, self->variables[i].name);
      lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
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
    cir_ssh_channel_release(self->channel);
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
    if (strlen(lua_tostring(L, -2)) != lua_rawlen(L, -2) ||
        strlen(lua_tostring(L, -1)) != lua_rawlen(L, -1))
      return "option 'env' holds a zero byte";
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
  if (self != NULL)
    self->channel = cir_ssh_channel_new(session);
  if (self == NULL || self->channel == NULL) {
    free(self);
    luaL_error(L, "out of memory");
    return NULL;
  }
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
  cir_known_options(L, 2, known);
  uint64_t timeout = (uint64_t)cir_integer_option(L, 2, "timeout", 1, 24 * 3600 * 1000, 0);
  int columns = (int)cir_integer_option(L, 2, "columns", 1, 10000, 80);
  int rows = (int)cir_integer_option(L, 2, "rows", 1, 10000, 24);
  unsigned window = (unsigned)cir_integer_option(L, 2, "window", PACKET, 64 * 1024 * 1024, WINDOW);
  bool command = lua_getfield(L, 2, "command") == LUA_TSTRING; /* 4 */
  bool subsystem = lua_getfield(L, 2, "subsystem") == LUA_TSTRING;
  lua_getfield(L, 2, "shell");
  bool shell = lua_toboolean(L, -1);
  if (command + subsystem + shell != 1)
    return luaL_error(L,
                      "session:exec: exactly one of 'command', 'subsystem' and 'shell' is needed");
  int environment = lua_getfield(L, 2, "env"); /* 7 */
  const char *terminal = cir_string_option(L, 2, "term");

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
  cir_known_options(L, 2, known);
  uint64_t timeout = (uint64_t)cir_integer_option(L, 2, "timeout", 1, 24 * 3600 * 1000, 0);
  int port = (int)cir_integer_option(L, 2, "port", 1, 65535, 0);
  const char *host = cir_string_option(L, 2, "host");
  luaL_argcheck(L, host != NULL && port > 0, 2, "options 'host' and 'port' are needed");
  start *self = new_start(L, session, timeout);
  self->port = port;
  return submit(L, self, copy_string(L, 4, &self->text, &self->text_size), 3);
}
