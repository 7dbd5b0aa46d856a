/*
 * http_socket.c - a connection without a request: resolved, connected, through a proxy and through
 * TLS as http_client.c would, and then the caller's to speak its own protocol over.
 *
 *   socket:read_start(function(err, data) end)    data, then nil for the end or an error, once
 *   socket:read_stop()                            none follows until it is started again
 *   socket:write(data, function(err) end)         one at a time
 *   socket:close()                                a write that is under way is told "cancelled"
 *
 * curl's functions work in place and say CURLE_AGAIN. TLS may hold bytes that the descriptor no
 * longer shows, so the descriptor is waited for only after a read that found nothing.
 */
#include "http_client.h"

enum {
  CIR_SOCKET_PIECE = 64 * 1024, /* the largest string given to Lua */
  CIR_SOCKET_PIECES = 8         /* read in one turn of the loop */
};

#define CIR_SOCKET_HANDLE "ciranda.http.socket"

/* Freed when the loop has closed the poll handle. */
struct cir_http_socket {
  cir_runtime *rt;
  cir_http_socket **handle; /* the userdata's pointer to this, or NULL once that is collected */
  cir_http_socket **list;   /* the head of the list it is in */
  cir_http_socket *previous, *next;
  cir_http_driver *driver;
  CURL *easy;
  uv_poll_t poll;
  int on_data, on_written;
  int anchor; /* the string that is being sent */
  size_t sent;
  bool reading, dry; /* dry: the last read found nothing */
  bool queued;       /* a pump is queued with cir_defer, which holds the memory */
  bool closed, poll_closed;
};

static void pump(cir_http_socket *self);

static void on_poll(uv_poll_t *poll, int status, int events) {
  cir_http_socket *self = CIR_CONTAINER_OF(poll, cir_http_socket, poll);
  (void)status; /* curl meets the error itself */
  (void)events;
  self->dry = false;
  pump(self);
}

/* Frees the memory once the loop and the queue have let go of it. */
static void release(cir_http_socket *self) {
  if (self->queued || !self->poll_closed)
    return;
  free(self);
}

static void on_deferred(void *arg) {
  cir_http_socket *self = arg;
  self->queued = false;
  if (self->closed)
    release(self);
  else
    pump(self);
}

/* Have the socket looked at on a later turn: for calls that come from Lua. */
static void pump_later(cir_http_socket *self) {
  if (self->queued)
    return;
  self->queued = true;
  cir_defer(self->rt, on_deferred, self);
}

/* Wait for what the socket needs next. */
static void watch(cir_http_socket *self) {
  int events = 0;
  if (self->reading && self->dry)
    events |= UV_READABLE;
  if (self->on_written != CIR_NO_CALLBACK)
    events |= UV_WRITABLE | UV_READABLE; /* TLS may need to read before it writes */
  if (events != 0)
    uv_poll_start(&self->poll, events, on_poll);
  else
    uv_poll_stop(&self->poll);
  if (self->reading && !self->dry)
    pump_later(self);
}

/* Push the error of a curl call. [-0, +1, m] */
static void push_failure(lua_State *L, CURLcode code) {
  bool reset = code == CURLE_RECV_ERROR || code == CURLE_SEND_ERROR;
  cir_push_error(L, reset ? "reset" : "protocol", "%s", curl_easy_strerror(code));
}

/* End a write; the error, or nil, is on the top of the main state. [-1, +0, -] */
static void finish_write(cir_http_socket *self) {
  luaL_unref(cir_main_state(self->rt), LUA_REGISTRYINDEX, self->anchor);
  self->anchor = LUA_NOREF;
  cir_callback_finish(self->rt, &self->on_written, 1);
}

/* Send what there is. TLS wants the same bytes at the same place again after CURLE_AGAIN: it is the
 * Lua string that is sent from, which stays where it is. */
static void pump_write(cir_http_socket *self) {
  lua_State *L = cir_main_state(self->rt);
  CURLcode code = CURLE_OK;
  luaL_checkstack(L, 4, "socket");
  size_t size = 0, sent = 0;
  lua_rawgeti(L, LUA_REGISTRYINDEX, self->anchor);
  const char *data = lua_tolstring(L, -1, &size);
  while (self->sent < size && code == CURLE_OK) {
    code = curl_easy_send(self->easy, data + self->sent, size - self->sent, &sent);
    if (code == CURLE_OK)
      self->sent += sent;
  }
  lua_pop(L, 1);
  if (code == CURLE_AGAIN)
    return;
  if (code == CURLE_OK)
    lua_pushnil(L);
  else
    push_failure(L, code);
  finish_write(self);
}

/* Read some, and give it to Lua. */
static void pump_read(cir_http_socket *self) {
  static char piece[CIR_SOCKET_PIECE];
  lua_State *L = cir_main_state(self->rt);
  for (int i = 0; i < CIR_SOCKET_PIECES && self->reading && !self->closed; i++) {
    size_t size = 0;
    CURLcode code = curl_easy_recv(self->easy, piece, sizeof piece, &size);
    if (code == CURLE_AGAIN) {
      self->dry = true;
      return;
    }
    luaL_checkstack(L, 6, "socket");
    if (code == CURLE_OK)
      lua_pushnil(L);
    else
      push_failure(L, code);
    if (code == CURLE_OK && size > 0) {
      lua_pushlstring(L, piece, size);
      cir_callback_call(self->rt, self->on_data, 2);
    } else {
      self->reading = false;
      lua_pushnil(L);
      cir_callback_finish(self->rt, &self->on_data, 2);
    }
  }
}

/* Runs on a turn of the loop. Lua may close the socket in each callback. */
static void pump(cir_http_socket *self) {
  if (self->on_written != CIR_NO_CALLBACK)
    pump_write(self);
  if (!self->closed && self->reading)
    pump_read(self);
  if (!self->closed)
    watch(self);
}

/* The loop has let go: tell a write that will not be, and free. */
static void on_closed(uv_handle_t *handle) {
  cir_http_socket *self = CIR_CONTAINER_OF(handle, cir_http_socket, poll);
  if (self->on_written != CIR_NO_CALLBACK) {
    cir_push_error(cir_main_state(self->rt), "cancelled", "the connection was closed");
    finish_write(self);
  }
  self->poll_closed = true;
  release(self);
}

void cir_http_socket_close(cir_http_socket *self) {
  if (self->closed)
    return;
  self->closed = true;
  self->reading = false;
  if (self->handle != NULL)
    *self->handle = NULL;
  if (self->previous != NULL)
    self->previous->next = self->next;
  else
    *self->list = self->next;
  if (self->next != NULL)
    self->next->previous = self->previous;
  cir_callback_unref(self->rt, &self->on_data);
  uv_poll_stop(&self->poll); /* before curl closes the descriptor */
  uv_close((uv_handle_t *)&self->poll, on_closed);
  cir_http_driver_free(self->driver, self->easy);
}

bool cir_http_socket_push(lua_State *L, cir_http_request *request) {
  curl_socket_t fd = CURL_SOCKET_BAD;
  curl_easy_getinfo(request->easy, CURLINFO_ACTIVESOCKET, &fd);
  cir_http_socket *self = fd != CURL_SOCKET_BAD ? calloc(1, sizeof *self) : NULL;
  if (self == NULL)
    return false;
  self->rt = cir_http_runtime(request);
  if (uv_poll_init_socket(cir_loop(self->rt), &self->poll, fd) < 0) {
    free(self);
    return false;
  }
  self->poll.data = NULL;
  self->on_data = self->on_written = CIR_NO_CALLBACK;
  self->anchor = LUA_NOREF;
  self->easy = request->easy;
  self->driver = request->driver;
  /* What curl would still write to is the request's, which goes. */
  curl_easy_setopt(self->easy, CURLOPT_ERRORBUFFER, NULL);
  request->easy = NULL;
  request->driver = NULL;
  self->list = cir_http_sockets(request->http);
  self->next = *self->list;
  if (self->next != NULL)
    self->next->previous = self;
  *self->list = self;

  lua_pushnil(L);
  self->handle = lua_newuserdatauv(L, sizeof(cir_http_socket *), 0);
  *self->handle = self;
  luaL_setmetatable(L, CIR_SOCKET_HANDLE);
  return true;
}

/* --- Lua ------------------------------------------------------------------------------------- */

/* The socket at 1, or NULL when it is closed: at the program's end the engine closes it beneath its
 * holder. [-0, +0, v] */
static cir_http_socket *check_socket(lua_State *L) {
  return *(cir_http_socket **)luaL_checkudata(L, 1, CIR_SOCKET_HANDLE);
}

/* socket:read_start(callback) -> whether it is open. [-0, +1, v] */
static int l_read_start(lua_State *L) {
  cir_http_socket *self = check_socket(L);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_pushboolean(L, self != NULL);
  if (self == NULL)
    return 1;
  cir_callback_replace(L, 2, &self->on_data);
  self->reading = true;
  self->dry = false;
  pump_later(self);
  return 1;
}

/* socket:read_stop() */
static int l_read_stop(lua_State *L) {
  cir_http_socket *self = check_socket(L);
  if (self != NULL)
    self->reading = false;
  return 0;
}

/* socket:write(data, callback) -> whether it is open. Raises while the last write is under way.
 * [-0, +1, v] */
static int l_write(lua_State *L) {
  cir_http_socket *self = check_socket(L);
  luaL_checktype(L, 2, LUA_TSTRING);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_pushboolean(L, self != NULL);
  if (self == NULL)
    return 1;
  if (self->on_written != CIR_NO_CALLBACK)
    return luaL_error(L, "socket:write: the last write is still under way");
  cir_callback_ref_both(L, 3, &self->on_written, 2, &self->anchor);
  self->sent = 0;
  pump_later(self);
  return 1;
}

/* socket:close(), also what becomes of a socket that nobody holds. */
static int l_close(lua_State *L) {
  cir_http_socket *self = check_socket(L);
  if (self != NULL)
    cir_http_socket_close(self);
  return 0;
}

void cir_http_socket_register(lua_State *L) {
  static const luaL_Reg methods[] = {{"read_start", l_read_start},
                                     {"read_stop", l_read_stop},
                                     {"write", l_write},
                                     {"close", l_close},
                                     {"__gc", l_close},
                                     {"__close", l_close},
                                     {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_SOCKET_HANDLE)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}
