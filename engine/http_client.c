/*
 * http_client.c - ciranda.core.http: requests as Lua sees them, from the call to the last callback.
 * See http_client.h for the rules.
 *
 *   handle = http.request(options, function(err, response) end)
 *   handle:cancel()  handle:pause()  handle:resume()
 *   handle = http.connect(options, function(err, socket) end)      see http_socket.c
 *
 * libcurl is initialised by the first request: its start costs a program that makes none nothing.
 */
#include "http_client.h"
#include "modules.h"

struct cir_http {
  cir_runtime *rt;
  cir_http_driver *driver;               /* NULL once the program ends */
  cir_http_request *requests;            /* all that are under way */
  cir_http_socket *sockets;              /* all that are open */
  cir_http_request *ready, **last_ready; /* those with something to deliver */
  bool deferred;                         /* a delivery is queued with cir_defer */
};

static const char KEY = 0; /* registry: the cir_http */

cir_runtime *cir_http_runtime(cir_http_request *request) {
  return request->http->rt;
}

cir_http_socket **cir_http_sockets(cir_http *http) {
  return &http->sockets;
}

/* --- delivering to Lua ----------------------------------------------------------------------- */

/* The queue holds what is in it. */
void cir_http_mark_ready(cir_http_request *request) {
  cir_http *http = request->http;
  if (request->ready)
    return;
  cir_http_hold(request);
  request->ready = true;
  request->next_ready = NULL;
  *http->last_ready = request;
  http->last_ready = &request->next_ready;
}

/*
 * Take the request out of curl. Its connection is closed when the answer was not complete. What a
 * paused transfer holds back is let out, into nothing, first: curl 7.88 forgets it when an HTTP/2
 * stream ends while it is paused.
 */
static void leave_multi(cir_http_request *request) {
  if (!request->in_multi)
    return;
  if (request->write_refused) {
    request->discard = true;
    curl_easy_pause(request->easy, CURLPAUSE_CONT);
  }
  request->in_multi = false;
  cir_http_driver_remove(request->driver, request->easy);
}

/*
 * Push what the callback of http.connect gets: the socket, which takes over curl's handle and the
 * driver, or an error. [-0, +2, m]
 */
static void push_connection(lua_State *L, cir_http_request *request) {
  if (!request->cancelled && request->fault == NULL && request->result == CURLE_OK) {
    cir_http_driver_quiet(request->driver);
    if (cir_http_socket_push(L, request))
      return;
    cir_http_fault(request, "failed", "the connection cannot be watched");
  }
  leave_multi(request);
  cir_http_push_error(L, request);
  lua_pushnil(L);
  if (request->driver != NULL) /* else it never began */
    cir_http_driver_free(request->driver, NULL);
  request->driver = NULL;
}

/* Call the completion with the outcome and end the flight. Runs on a turn of the loop. */
static void complete(cir_http_request *request) {
  cir_http *http = request->http;
  lua_State *L = cir_main_state(http->rt);
  if (!request->bare)
    leave_multi(request);
  cir_http_upload_close(request);
  if (request->previous != NULL)
    request->previous->next = request->next;
  else
    http->requests = request->next;
  if (request->next != NULL)
    request->next->previous = request->previous;

  luaL_checkstack(L, 8, "http");
  if (request->bare) {
    push_connection(L, request);
  } else if (request->cancelled || request->fault != NULL || request->result != CURLE_OK) {
    cir_http_push_error(L, request);
    lua_pushnil(L);
  } else {
    lua_pushnil(L);
    cir_http_push_response(L, request);
  }
  cir_buffer_free(&request->body);
  cir_callback_unref(http->rt, &request->on_response);
  cir_callback_unref(http->rt, &request->on_data);
  luaL_unref(L, LUA_REGISTRYINDEX, request->anchor);
  request->anchor = LUA_NOREF;
  cir_callback_finish(http->rt, &request->on_done, 2);
  cir_http_release(request);
}

/* Call Lua with what has come: the head, the data unless paused, the end once everything before it
 * was taken. */
static void deliver(cir_http_request *request) {
  lua_State *L = cir_main_state(request->http->rt);
  cir_runtime *rt = request->http->rt;
  if (request->anchor == LUA_NOREF) /* over since it was queued */
    return;
  if (request->head_complete && !request->response_delivered && !request->cancelled) {
    request->response_delivered = true;
    if (request->on_response != CIR_NO_CALLBACK) {
      long status = 0;
      curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
      luaL_checkstack(L, 8, "http");
      lua_pushinteger(L, status);
      cir_http_push_headers(L, &request->head);
      cir_callback_call(rt, request->on_response, 2);
    }
  }
  while (request->on_data != CIR_NO_CALLBACK && !request->paused && !request->cancelled &&
         cir_buffer_size(&request->body) > 0) {
    luaL_checkstack(L, 4, "http");
    lua_pushlstring(L, cir_buffer_bytes(&request->body), cir_buffer_size(&request->body));
    cir_buffer_clear(&request->body);
    cir_callback_call(rt, request->on_data, 1);
  }
  bool drained = request->on_data == CIR_NO_CALLBACK || cir_buffer_size(&request->body) == 0;
  if (request->cancelled || (request->finished && drained))
    complete(request);
}

void cir_http_deliver(cir_http *http) {
  while (http->ready != NULL) {
    cir_http_request *request = http->ready;
    http->ready = request->next_ready;
    if (http->ready == NULL)
      http->last_ready = &http->ready;
    request->ready = false;
    deliver(request);
    /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): the queue has a hold of its own */
    cir_http_release(request);
  }
}

static void on_deferred(void *arg) {
  cir_http *http = arg;
  http->deferred = false;
  cir_http_deliver(http);
}

/* Have the request's news delivered on a later turn: for calls that come from Lua. */
static void deliver_later(cir_http_request *request) {
  cir_http_mark_ready(request);
  if (!request->http->deferred) {
    request->http->deferred = true;
    cir_defer(request->http->rt, on_deferred, request->http);
  }
}

void cir_http_ended(cir_http_request *request, CURLcode result) {
  request->result = result;
  request->finished = true;
  if (!request->bare) /* which would close the connection */
    leave_multi(request);
  cir_http_mark_ready(request);
}

/* --- life cycle ------------------------------------------------------------------------------ */

void cir_http_hold(cir_http_request *request) {
  request->holds++;
}

/* Not inlined: gcc 12, which cannot see that each release has its hold, would warn of use after
 * free. */
__attribute__((noinline)) void cir_http_release(cir_http_request *request) {
  if (--request->holds > 0)
    return;
  if (request->handle != NULL)
    *request->handle = NULL;
  if (request->easy != NULL) /* a socket has taken it over */
    curl_easy_cleanup(request->easy);
  curl_slist_free_all(request->headers);
  cir_buffer_free(&request->head);
  cir_buffer_free(&request->body);
  free(request);
}

void cir_http_unpause(cir_http_request *request) {
  if (!request->in_multi)
    return;
  request->write_refused = request->write_refused && request->paused;
  curl_easy_pause(request->easy, request->write_refused ? CURLPAUSE_RECV : CURLPAUSE_CONT);
  if (request->on_data != CIR_NO_CALLBACK) /* curl hands over what it kept at once */
    deliver_later(request);
}

/* Cancel a request: curl drops it now, the callback follows on a later turn. */
static void cancel(cir_http_request *request) {
  if (request->cancelled || request->anchor == LUA_NOREF)
    return;
  request->cancelled = true;
  leave_multi(request);
  deliver_later(request);
}

/*
 * Shutdown: every request is told that it was cancelled, connections and their poll handles are
 * closed. libcurl's global state stays: detached resolver threads may still use it, and the process
 * is about to end.
 */
static void shut_down(void *arg) {
  cir_http *http = arg;
  for (cir_http_request *request = http->requests; request != NULL; request = request->next)
    cancel(request);
  while (http->sockets != NULL)
    cir_http_socket_close(http->sockets);
  cir_http_driver_free(http->driver, NULL);
  http->driver = NULL;
}

/*
 * The client of this state, made at first use. It is a userdata in the registry, which goes when
 * the state is closed: after the loop has run dry, and a callback that runs during shutdown still
 * finds it. Raises when curl cannot start. [-0, +0, e]
 */
static cir_http *client(lua_State *L) {
  lua_rawgetp(L, LUA_REGISTRYINDEX, &KEY);
  cir_http *http = lua_touserdata(L, -1);
  lua_pop(L, 1);
  if (http != NULL)
    return http;
  const char *problem = cir_curl_load();
  if (problem != NULL)
    luaL_error(L, "%s", problem);
  if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
    luaL_error(L, "libcurl cannot be initialised");
  http = lua_newuserdatauv(L, sizeof *http, 0);
  memset(http, 0, sizeof *http);
  http->rt = cir_runtime_of(L);
  http->last_ready = &http->ready;
  lua_pushvalue(L, -1);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &KEY); /* the loop may know it only once nothing can fail */
  http->driver = cir_http_driver_new(http, http->rt);
  if (http->driver == NULL) {
    lua_pushnil(L);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &KEY);
    luaL_error(L, "libcurl cannot be initialised: out of memory or descriptors");
  }
  cir_on_shutdown(http->rt, shut_down, http);
  lua_pop(L, 1);
  return http;
}

/* --- Lua ------------------------------------------------------------------------------------- */

/* Start a request, or a bare connection. [-2, +1, v] */
static int start(lua_State *L, bool bare) {
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_settop(L, 2);
  cir_http *http = client(L);

  cir_http_request **handle = lua_newuserdatauv(L, sizeof(cir_http_request *), 1);
  *handle = NULL;
  luaL_setmetatable(L, CIR_HTTP_HANDLE);
  cir_http_request *request = calloc(1, sizeof *request);
  if (request == NULL || (request->easy = curl_easy_init()) == NULL) {
    free(request);
    return luaL_error(L, "http.request: out of memory");
  }
  *handle = request;
  request->handle = handle;
  request->holds = 1;
  request->anchor = LUA_NOREF;
  request->on_done = request->on_response = request->on_data = CIR_NO_CALLBACK;
  request->http = http; /* an option may already need the loop */
  request->driver = http->driver;
  request->bare = bare;
  cir_http_options(L, 1, request);
  curl_easy_setopt(request->easy, CURLOPT_OPENSOCKETFUNCTION, cir_http_open_socket);
  cir_callback_ref_both(L, 2, &request->on_done, 3, &request->anchor);
  request->started = true; /* what fails from here on is told to the callback */
  request->next = http->requests;
  if (request->next != NULL)
    request->next->previous = request;
  http->requests = request;

  bool ending = http->driver == NULL;
  if (bare && !ending) {
    request->driver = cir_http_driver_new(http, http->rt);
    if (request->driver == NULL)
      cir_http_fault(request, "failed", "out of memory or descriptors");
  }
  if (request->fault == NULL && !ending) {
    request->in_multi = true;
    CURLMcode code = cir_http_driver_add(request->driver, request->easy);
    if (code == CURLM_OK)
      return 1;
    request->in_multi = false;
    cir_http_fault(request, "failed", "%s", curl_multi_strerror(code));
  }
  request->cancelled = request->fault == NULL;
  request->result = CURLE_FAILED_INIT;
  request->finished = true;
  deliver_later(request);
  return 1;
}

/* http.request(options, callback) -> handle. Raises a misuse. [-2, +1, v] */
static int l_request(lua_State *L) {
  return start(L, false);
}

/* http.connect(options, callback) -> handle. Raises a misuse. [-2, +1, v] */
static int l_connect(lua_State *L) {
  return start(L, true);
}

/* The request of the handle at 1, or NULL when it is over. [-0, +0, v] */
static cir_http_request *check_handle(lua_State *L) {
  return *(cir_http_request **)luaL_checkudata(L, 1, CIR_HTTP_HANDLE);
}

/* handle:cancel(): the callback then gets an error with code "cancelled". A request that is over is
 * left alone. */
static int l_cancel(lua_State *L) {
  cir_http_request *request = check_handle(L);
  if (request != NULL)
    cancel(request);
  return 0;
}

/* handle:pause(): no on_data until resume; at most one buffer more is read from the socket. */
static int l_pause(lua_State *L) {
  cir_http_request *request = check_handle(L);
  if (request != NULL)
    request->paused = true;
  return 0;
}

/* handle:resume() */
static int l_resume(lua_State *L) {
  cir_http_request *request = check_handle(L);
  if (request == NULL || !request->paused)
    return 0;
  request->paused = false;
  if (request->write_refused)
    cir_http_unpause(request);
  deliver_later(request);
  return 0;
}

/*
 * __gc. A request that is under way anchors its handle, so what is collected is over or never
 * started (its options were a misuse). Only the latter's memory is still ours to free.
 */
static int l_gc(lua_State *L) {
  cir_http_request *request = check_handle(L);
  if (request == NULL)
    return 0;
  request->handle = NULL;
  *(cir_http_request **)lua_touserdata(L, 1) = NULL;
  if (!request->started) {
    luaL_unref(L, LUA_REGISTRYINDEX, request->on_response);
    luaL_unref(L, LUA_REGISTRYINDEX, request->on_data);
    cir_http_upload_close(request);
    cir_http_release(request);
  }
  return 0;
}

int luaopen_ciranda_core_http(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"request", l_request}, {"connect", l_connect}, {NULL, NULL}};
  static const luaL_Reg methods[] = {{"cancel", l_cancel},  {"pause", l_pause},
                                     {"resume", l_resume},  {"__gc", l_gc},
                                     {"__close", l_cancel}, {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_HTTP_HANDLE)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
  cir_http_socket_register(L);
  luaL_newlib(L, functions);
  return 1;
}
