/*
 * http_exchange_lua.c - an exchange as Lua sees it. See http_server.h.
 *
 * Lua gets (exchange, request) once the body has arrived, request being {method, target, version,
 * headers, body, remote_address, remote_port, local_address, local_port}; the target is as the
 * client wrote it. It answers, on this turn or later, with one of
 *
 *   exchange:respond(status, headers, body [, truncate_at])  cut after so many bytes, if asked
 *   exchange:start(status, headers [, length])  then :write(data, callback), :finish()
 *   exchange:upgrade(headers, function(err, fd, early_bytes) end)
 *   exchange:drop()   no (further) answer: the client reads an end of file
 *   exchange:reset()  the same: the client reads that the connection was reset
 *
 * Each returns whether the exchange was still there to be answered.
 */
#include "http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* --- telling Lua ----------------------------------------------------------------------------- */

/* MHD_KeyValueIteratorN: appends {name, value} to the table on the top of the main state. [-0, +0,
 * m] */
static enum MHD_Result push_header(void *cls, enum MHD_ValueKind kind, const char *name,
                                   size_t name_size, const char *value, size_t value_size) {
  lua_State *L = cls;
  (void)kind;
  lua_createtable(L, 2, 0);
  lua_pushlstring(L, name, name_size);
  lua_rawseti(L, -2, 1);
  lua_pushlstring(L, value != NULL ? value : "", value != NULL ? value_size : 0);
  lua_rawseti(L, -2, 2);
  lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
  return MHD_YES;
}

/* Set PREFIX_address and PREFIX_port of the table on the top. [-0, +0, m] */
static void set_address(lua_State *L, const char *address_field, const char *port_field,
                        const struct sockaddr_storage *address) {
  char text[INET6_ADDRSTRLEN] = "";
  int port = 0;
  if (address->ss_family == AF_INET) {
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)address;
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text);
    port = ntohs(v4->sin_port);
  } else if (address->ss_family == AF_INET6) {
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)address;
    inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    port = ntohs(v6->sin6_port);
  }
  lua_pushstring(L, text);
  lua_setfield(L, -2, address_field);
  lua_pushinteger(L, port);
  lua_setfield(L, -2, port_field);
}

static int fd_of(const cir_exchange *exchange) {
  const union MHD_ConnectionInfo *info =
      MHD_get_connection_info(exchange->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  return info != NULL ? info->connect_fd : -1;
}

/* Push the request table. [-0, +1, m] */
static void push_request(lua_State *L, cir_exchange *exchange) {
  lua_createtable(L, 0, 9);
  lua_pushstring(L, exchange->method);
  lua_setfield(L, -2, "method");
  lua_pushstring(L, exchange->target);
  lua_setfield(L, -2, "target");
  lua_pushstring(L, strncmp(exchange->version, "HTTP/", 5) == 0 ? exchange->version + 5
                                                                : exchange->version);
  lua_setfield(L, -2, "version");
  lua_newtable(L);
  MHD_get_connection_values_n(exchange->connection, MHD_HEADER_KIND, push_header, L);
  lua_setfield(L, -2, "headers");
  lua_pushlstring(L, cir_buffer_bytes(&exchange->body), cir_buffer_size(&exchange->body));
  cir_buffer_free(&exchange->body);
  lua_setfield(L, -2, "body");

  struct sockaddr_storage address;
  socklen_t size = sizeof address;
  memset(&address, 0, sizeof address);
  getsockname(fd_of(exchange), (struct sockaddr *)&address, &size);
  set_address(L, "local_address", "local_port", &address);
  memset(&address, 0, sizeof address);
  size = sizeof address;
  getpeername(fd_of(exchange), (struct sockaddr *)&address, &size);
  set_address(L, "remote_address", "remote_port", &address);
}

/* The upgraded connection's descriptor, or why there is none. Runs on a turn of the loop. */
static void tell_upgrade(cir_exchange *exchange, lua_State *L) {
  if (exchange->upgraded >= 0) {
    lua_pushnil(L);
    lua_pushinteger(L, exchange->upgraded);
    lua_pushlstring(L, cir_buffer_bytes(&exchange->body), cir_buffer_size(&exchange->body));
  } else {
    cir_push_error(L, exchange->ended ? "io" : "closed", "%s",
                   exchange->ended ? "no descriptor or memory is left for the upgraded connection"
                                   : "the connection was lost before it was upgraded");
    lua_pushnil(L);
    lua_pushnil(L);
  }
  cir_callback_finish(exchange->rt, &exchange->on_upgrade, 3);
}

void cir_exchange_tell(cir_exchange *exchange) {
  lua_State *L = cir_main_state(exchange->rt);
  luaL_checkstack(L, 12, "server");
  if (exchange->state == CIR_EXCHANGE_WAITING && !exchange->told) {
    exchange->told = true;
    cir_exchange **handle = lua_newuserdatauv(L, sizeof(cir_exchange *), 0);
    *handle = exchange;
    exchange->handle = handle;
    exchange->holds++;
    luaL_setmetatable(L, CIR_EXCHANGE_HANDLE);
    push_request(L, exchange);
    cir_callback_call(exchange->rt, cir_server_callback(exchange->server), 2);
  }
  if (exchange->on_upgrade != CIR_NO_CALLBACK &&
      (exchange->ended || exchange->state == CIR_EXCHANGE_OVER))
    tell_upgrade(exchange, L);
  if (exchange->on_room != CIR_NO_CALLBACK &&
      (exchange->state == CIR_EXCHANGE_OVER ||
       cir_buffer_size(&exchange->out) < CIR_EXCHANGE_ROOM)) {
    if (exchange->drop || (exchange->state == CIR_EXCHANGE_OVER && !exchange->sent))
      cir_push_error(L, "closed", "the client has left before the answer was complete");
    else
      lua_pushnil(L);
    cir_callback_finish(exchange->rt, &exchange->on_room, 1);
  }
}

/* --- methods --------------------------------------------------------------------------------- */

/* The exchange at 1, or NULL when it is gone. [-0, +0, v] */
static cir_exchange *check_exchange(lua_State *L) {
  return *(cir_exchange **)luaL_checkudata(L, 1, CIR_EXCHANGE_HANDLE);
}

/*
 * Give the headers at index to the exchange's new response, and the status at index 2. Raises a
 * misuse; the response is then freed with the next answer or with the exchange. [-0, +0, v]
 */
static void set_head(lua_State *L, cir_exchange *exchange, int index) {
  lua_Integer status = luaL_checkinteger(L, 2);
  luaL_argcheck(L, status >= 101 && status <= 599, 2, "a status is from 101 to 599");
  exchange->status = (unsigned)status;
  if (exchange->response == NULL)
    luaL_error(L, "exchange: out of memory");
  if (lua_isnoneornil(L, index))
    return;
  luaL_checktype(L, index, LUA_TTABLE);
  for (lua_Integer i = 1; lua_rawgeti(L, index, i) != LUA_TNIL; i++) {
    const char *name = NULL, *value = NULL;
    if (lua_istable(L, -1)) {
      lua_rawgeti(L, -1, 1);
      lua_rawgeti(L, -2, 2);
      name = lua_tostring(L, -2);
      value = lua_tostring(L, -1);
    }
    if (name == NULL || value == NULL)
      luaL_error(L, "exchange: header %I is not {name, value}", i);
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): luaL_error does not return */
    if (value[0] != '\0' && MHD_add_response_header(exchange->response, name, value) != MHD_YES)
      luaL_error(L, "exchange: header %I (%s) is not allowed in an answer", i, name);
    lua_pop(L, 3);
  }
  lua_pop(L, 1);
}

static int push_result(lua_State *L, bool result) {
  lua_pushboolean(L, result);
  return 1;
}

/* exchange:respond(status, headers, body [, truncate_at]) -> whether it was still waiting. [-n, +1,
 * v] */
static int l_respond(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  size_t size;
  const char *body = luaL_optlstring(L, 4, "", &size);
  lua_Integer cut = luaL_optinteger(L, 5, -1);
  if (!cir_exchange_is_waiting(exchange))
    return push_result(L, false);
  if (cut >= 0 && (size_t)cut < size) {
    if (!cir_buffer_add(&exchange->out, body, (size_t)cut))
      return luaL_error(L, "exchange:respond: out of memory");
    exchange->cut = true;
    cir_exchange_stream(exchange, size);
  } else {
    exchange->response =
        MHD_create_response_from_buffer(size, (void *)(uintptr_t)body, MHD_RESPMEM_MUST_COPY);
  }
  set_head(L, exchange, 3);
  exchange->state = CIR_EXCHANGE_ANSWERED;
  exchange->deadline = 0;
  cir_exchange_resume(exchange);
  return push_result(L, true);
}

/* exchange:start(status, headers [, length]) -> whether it was still waiting. Without a length:
 * chunked. [-n, +1, v] */
static int l_start(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  lua_Integer length = luaL_optinteger(L, 4, -1);
  luaL_argcheck(L, lua_isnoneornil(L, 4) || length >= 0, 4, "a length is at least 0");
  if (!cir_exchange_is_waiting(exchange))
    return push_result(L, false);
  cir_exchange_stream(exchange, length < 0 ? MHD_SIZE_UNKNOWN : (uint64_t)length);
  set_head(L, exchange, 3);
  exchange->state = CIR_EXCHANGE_STREAMING;
  cir_server_watch(exchange->server, exchange, exchange->patience);
  cir_exchange_resume(exchange);
  return push_result(L, true);
}

/*
 * exchange:write(data, callback) -> whether the client is still there. callback(err) follows when
 * there is room for more; one write at a time. [-n, +1, v]
 */
static int l_write(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  if (exchange == NULL || exchange->state != CIR_EXCHANGE_STREAMING || exchange->drop)
    return push_result(L, false);
  if (exchange->on_room != CIR_NO_CALLBACK || exchange->ended)
    return luaL_error(L, "exchange:write: %s",
                      exchange->ended ? "the answer is finished"
                                      : "the last write has not been taken yet");
  int on_room = cir_callback_ref(L, 3);
  if (!cir_buffer_add(&exchange->out, data, size)) {
    cir_callback_unref(exchange->rt, &on_room);
    return luaL_error(L, "exchange:write: out of memory");
  }
  exchange->on_room = on_room;
  cir_server_watch(exchange->server, exchange, exchange->patience);
  cir_server_news(exchange->server, exchange);
  cir_exchange_resume(exchange);
  cir_server_kick(exchange->server);
  return push_result(L, true);
}

/* exchange:finish() -> whether the client is still there. Ends a streamed answer. */
static int l_finish(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  if (exchange == NULL || exchange->state != CIR_EXCHANGE_STREAMING)
    return push_result(L, false);
  exchange->ended = true;
  exchange->deadline = 0;
  exchange->state = CIR_EXCHANGE_ANSWERED;
  cir_exchange_resume(exchange);
  return push_result(L, true);
}

/* exchange:drop(): the connection ends, without or in the middle of an answer; the client reads an
 * end of file. */
static int l_drop(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  if (exchange == NULL || exchange->state == CIR_EXCHANGE_OVER)
    return push_result(L, false);
  cir_exchange_drop(exchange);
  return push_result(L, true);
}

/*
 * exchange:reset(): the client reads ECONNRESET. Dissolving the association sends the reset at
 * once; closing with SO_LINGER 0 would come after the end of file that libmicrohttpd sends first.
 */
static int l_reset(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  if (exchange == NULL || exchange->state == CIR_EXCHANGE_OVER)
    return push_result(L, false);
  struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
  (void)connect(fd_of(exchange), &nowhere, sizeof nowhere);
  cir_exchange_drop(exchange);
  return push_result(L, true);
}

/*
 * exchange:upgrade(headers, callback) -> whether it was still waiting. Answers 101; callback(err,
 * fd, early) then gets a descriptor that is the caller's to close and the bytes that came after the
 * request. [-n, +1, v]
 */
static int l_upgrade(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  if (!cir_exchange_is_waiting(exchange))
    return push_result(L, false);
  cir_exchange_switch(exchange);
  lua_pushinteger(L, MHD_HTTP_SWITCHING_PROTOCOLS);
  lua_insert(L, 2);
  set_head(L, exchange, 3);
  exchange->on_upgrade = cir_callback_ref(L, 4);
  exchange->state = CIR_EXCHANGE_ANSWERED;
  exchange->deadline = 0;
  cir_exchange_resume(exchange);
  return push_result(L, true);
}

/* exchange:deadline(ms) -> whether it is still there: how long Lua may take from now on; 0 for
 * ever. */
static int l_deadline(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  lua_Integer patience = luaL_checkinteger(L, 2);
  luaL_argcheck(L, patience >= 0, 2, "milliseconds of at least 0");
  if (exchange == NULL ||
      (exchange->state != CIR_EXCHANGE_WAITING && exchange->state != CIR_EXCHANGE_STREAMING))
    return push_result(L, false);
  cir_server_watch(exchange->server, exchange, (uint64_t)patience);
  return push_result(L, true);
}

/* __gc: a request that was forgotten is answered with an error instead of a silence; a stream is
 * cut. */
static int l_gc(lua_State *L) {
  cir_exchange *exchange = check_exchange(L);
  if (exchange == NULL)
    return 0;
  *(cir_exchange **)lua_touserdata(L, 1) = NULL;
  exchange->handle = NULL;
  if (exchange->state == CIR_EXCHANGE_WAITING)
    cir_exchange_refuse(exchange, MHD_HTTP_INTERNAL_SERVER_ERROR,
                        "The request was not answered.\n");
  else if (exchange->state == CIR_EXCHANGE_STREAMING)
    cir_exchange_drop(exchange);
  cir_exchange_release(exchange);
  return 0;
}

void cir_exchange_register(lua_State *L) {
  static const luaL_Reg methods[] = {
      {"respond", l_respond}, {"start", l_start}, {"write", l_write},     {"finish", l_finish},
      {"drop", l_drop},       {"reset", l_reset}, {"upgrade", l_upgrade}, {"deadline", l_deadline},
      {"__gc", l_gc},         {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_EXCHANGE_HANDLE)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}
