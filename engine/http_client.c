/*
 * http_client.c - ciranda.core.http: libcurl's multi interface on the loop. See http_client.h for
 * the rules.
 *
 *   handle = http.request(options, function(err, response) end)
 *   handle:cancel()  handle:pause()  handle:resume()
 *   handle = http.connect(options, function(err, socket) end)      see http_socket.c
 *
 * libcurl is initialised by the first request: its start costs a program that makes none nothing.
 */
#include "http_client.h"
#include "modules.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CIR_HTTP_DEAD_MS = 30000 /* bytes unacknowledged for so long: the peer is gone */ };

/*
 * One multi handle on the loop. Requests share one; a bare connection has its own: curl closes idle
 * connections of a multi handle when it looks for one to use again, and takes those that the
 * program holds for idle.
 */
struct cir_http_driver {
  cir_http *http;
  CURLM *multi;
  uv_timer_t timer;
  bool closing;
};

struct cir_http {
  cir_runtime *rt;
  cir_http_driver driver;
  cir_http_request *requests;            /* all that are under way */
  cir_http_socket *sockets;              /* all that are open */
  cir_http_request *ready, **last_ready; /* those with something to deliver */
  bool deferred;                         /* a delivery is queued with cir_defer */
};

/* What the loop watches for one of curl's sockets. Freed when the loop has closed the poll handle.
 */
typedef struct watched_socket {
  uv_poll_t poll;
  cir_http_driver *driver;
  curl_socket_t socket;
} watched_socket;

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
  curl_multi_remove_handle(request->driver->multi, request->easy);
}

/* Frees the driver of a bare connection once its timer is closed. */
static void on_driver_closed(uv_handle_t *timer) {
  free(CIR_CONTAINER_OF(timer, cir_http_driver, timer));
}

void cir_http_driver_free(cir_http_driver *driver, CURL *easy) {
  driver->closing = true;
  if (easy != NULL) {
    curl_multi_remove_handle(driver->multi, easy);
    curl_easy_cleanup(easy);
  }
  curl_multi_cleanup(driver->multi);
  uv_close((uv_handle_t *)&driver->timer, on_driver_closed);
}

/*
 * Push what the callback of http.connect gets: the socket, which takes over curl's handle and the
 * driver, or an error. [-0, +2, m]
 */
static void push_connection(lua_State *L, cir_http_request *request) {
  if (!request->cancelled && request->fault == NULL && request->result == CURLE_OK) {
    request->driver->closing = true; /* curl has nothing to do of itself any more */
    uv_timer_stop(&request->driver->timer);
    if (cir_http_socket_push(L, request))
      return;
    cir_http_fault(request, "failed", "the connection cannot be watched");
  }
  leave_multi(request);
  cir_http_push_error(L, request);
  lua_pushnil(L);
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

static void deliver_ready(cir_http *http) {
  while (http->ready != NULL) {
    cir_http_request *request = http->ready;
    http->ready = request->next_ready;
    if (http->ready == NULL)
      http->last_ready = &http->ready;
    request->ready = false;
    deliver(request);
    cir_http_release(request);
  }
}

static void on_deferred(void *arg) {
  cir_http *http = arg;
  http->deferred = false;
  deliver_ready(http);
}

/* Have the request's news delivered on a later turn: for calls that come from Lua. */
static void deliver_later(cir_http_request *request) {
  cir_http_mark_ready(request);
  if (!request->http->deferred) {
    request->http->deferred = true;
    cir_defer(request->http->rt, on_deferred, request->http);
  }
}

/* Ask curl which transfers have ended, and deliver what all have received. */
static void collect(cir_http_driver *driver) {
  cir_http *http = driver->http;
  CURLMsg *message;
  int left;
  while ((message = curl_multi_info_read(driver->multi, &left)) != NULL) {
    if (message->msg != CURLMSG_DONE)
      continue;
    CURLcode result = message->data.result;
    char *owner = NULL;
    curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &owner);
    cir_http_request *request = (cir_http_request *)(void *)owner;
    request->result = result;
    request->finished = true;
    if (!request->bare) /* which would close the connection */
      leave_multi(request);
    cir_http_mark_ready(request);
  }
  deliver_ready(http);
}

/* --- curl on the loop ------------------------------------------------------------------------ */

static void rearm(cir_http_driver *driver, long timeout_ms);

static void on_timer(uv_timer_t *timer) {
  cir_http_driver *driver = CIR_CONTAINER_OF(timer, cir_http_driver, timer);
  int running;
  curl_multi_socket_action(driver->multi, CURL_SOCKET_TIMEOUT, 0, &running);
  /* A timer that fires a moment early finds nothing due, and curl does not ask again for the time
   * it asked before. */
  long timeout_ms = -1;
  if (!uv_is_active((uv_handle_t *)timer) &&
      curl_multi_timeout(driver->multi, &timeout_ms) == CURLM_OK)
    rearm(driver, timeout_ms);
  collect(driver);
}

static void rearm(cir_http_driver *driver, long timeout_ms) {
  if (driver->closing || timeout_ms < 0) {
    uv_timer_stop(&driver->timer);
    return;
  }
  uv_update_time(cir_loop(driver->http->rt));
  uv_timer_start(&driver->timer, on_timer, timeout_ms > 0 ? (uint64_t)timeout_ms + 1 : 0, 0);
}

/* CURLMOPT_TIMERFUNCTION. */
static int on_curl_timer(CURLM *multi, long timeout_ms, void *user) {
  (void)multi;
  rearm(user, timeout_ms);
  return 0;
}

static void on_poll(uv_poll_t *poll, int status, int events) {
  watched_socket *watched = CIR_CONTAINER_OF(poll, watched_socket, poll);
  cir_http_driver *driver = watched->driver;
  int flags = 0, running;
  if (status < 0)
    flags = CURL_CSELECT_ERR;
  if (events & UV_READABLE)
    flags |= CURL_CSELECT_IN;
  if (events & UV_WRITABLE)
    flags |= CURL_CSELECT_OUT;
  curl_multi_socket_action(driver->multi, watched->socket, flags, &running);
  collect(driver);
}

static void on_socket_closed(uv_handle_t *handle) {
  free(CIR_CONTAINER_OF(handle, watched_socket, poll));
}

/* Marks an open descriptor close-on-exec. Returns whether it was not. */
static bool close_on_exec(int fd) {
  int flags = fcntl(fd, F_GETFD);
  if (flags < 0 || (flags & FD_CLOEXEC) != 0)
    return false;
  fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
  return true;
}

/*
 * Marks a socket that curl made for itself, and its other end, close-on-exec. curl 7.88 makes them
 * as plain socketpairs (one for waking up the multi handle, one for each name resolution), and
 * processes that are started meanwhile would inherit them. The ends of a pair get the lowest free
 * numbers, so the other end is near by.
 */
static void close_pair_on_exec(int fd) {
  if (!close_on_exec(fd))
    return;
  for (int other = fd + 1; other < fd + 64; other++) {
    int domain = 0;
    socklen_t size = sizeof domain;
    if (getsockopt(other, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX &&
        close_on_exec(other))
      return;
  }
}

/* CURLMOPT_SOCKETFUNCTION. The poll handle stops before curl closes the descriptor. */
static int on_curl_socket(CURL *easy, curl_socket_t socket, int what, void *user, void *assigned) {
  (void)easy;
  cir_http_driver *driver = user;
  watched_socket *watched = assigned;
  if (what == CURL_POLL_REMOVE) {
    if (watched != NULL) {
      uv_poll_stop(&watched->poll);
      uv_close((uv_handle_t *)&watched->poll, on_socket_closed);
      curl_multi_assign(driver->multi, socket, NULL);
    }
    return 0;
  }
  if (watched == NULL) {
    close_pair_on_exec(socket);
    watched = malloc(sizeof *watched);
    if (watched == NULL)
      return -1;
    watched->driver = driver;
    watched->socket = socket;
    if (uv_poll_init_socket(cir_loop(driver->http->rt), &watched->poll, socket) < 0) {
      free(watched);
      return -1;
    }
    watched->poll.data = NULL;
    curl_multi_assign(driver->multi, socket, watched);
  }
  int events = 0;
  if (what != CURL_POLL_OUT)
    events |= UV_READABLE;
  if (what != CURL_POLL_IN)
    events |= UV_WRITABLE;
  return uv_poll_start(&watched->poll, events, on_poll) < 0 ? -1 : 0;
}

/*
 * CURLOPT_OPENSOCKETFUNCTION. The kernel ends a connection whose peer has vanished: a request that
 * times out on a shared HTTP/2 connection leaves it open, and those that follow would be sent into
 * the void as well.
 */
static curl_socket_t on_curl_open(void *user, curlsocktype purpose, struct curl_sockaddr *address) {
  (void)user;
  (void)purpose;
  int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
  if (fd >= 0 && (address->family == AF_INET || address->family == AF_INET6)) {
    int on = 1, dead_ms = CIR_HTTP_DEAD_MS, idle_s = CIR_HTTP_DEAD_MS / 1000, probe_s = idle_s / 3;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_s, sizeof probe_s);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, sizeof dead_ms);
  }
  return fd;
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
  http->driver.closing = true;
  for (cir_http_request *request = http->requests; request != NULL; request = request->next)
    cancel(request);
  while (http->sockets != NULL)
    cir_http_socket_close(http->sockets);
  curl_multi_cleanup(http->driver.multi);
  uv_close((uv_handle_t *)&http->driver.timer, NULL);
}

/* Make a driver's multi handle and timer. Returns false without memory or descriptors. */
static bool start_driver(cir_http *http, cir_http_driver *driver) {
  int lowest = open("/dev/null", O_RDONLY | O_CLOEXEC); /* where curl's wake-up pair will begin */
  if (lowest >= 0)
    close(lowest);
  CURLM *multi = curl_multi_init();
  if (multi == NULL)
    return false;
  close_pair_on_exec(lowest);
  driver->http = http;
  driver->multi = multi;
  uv_timer_init(cir_loop(http->rt), &driver->timer);
  driver->timer.data = NULL;
  curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, on_curl_socket);
  curl_multi_setopt(multi, CURLMOPT_SOCKETDATA, driver);
  curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, on_curl_timer);
  curl_multi_setopt(multi, CURLMOPT_TIMERDATA, driver);
  return true;
}

/*
 * The client of this state, made at first use. It is a userdata in the registry, which goes when
 * the state is closed: after the loop has run dry, and a callback that runs during shutdown still
 * finds it. Raises when curl cannot start.
 * [-0, +0, e]
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
  if (!start_driver(http, &http->driver))
    luaL_error(L, "libcurl cannot be initialised: out of memory or descriptors");
  cir_on_shutdown(http->rt, shut_down, http);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &KEY);
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
  request->driver = &http->driver;
  request->bare = bare;
  cir_http_options(L, 1, request);
  if (bare) {
    request->driver = calloc(1, sizeof *request->driver);
    if (request->driver == NULL || !start_driver(http, request->driver)) {
      free(request->driver);
      return luaL_error(L, "http.connect: out of memory or descriptors");
    }
  }
  curl_easy_setopt(request->easy, CURLOPT_OPENSOCKETFUNCTION, on_curl_open);

  request->started = true;
  request->on_done = cir_callback_ref(L, 2);
  lua_pushvalue(L, 3);
  request->anchor = luaL_ref(L, LUA_REGISTRYINDEX);
  request->next = http->requests;
  if (request->next != NULL)
    request->next->previous = request;
  http->requests = request;

  if (request->fault == NULL && !http->driver.closing) {
    request->in_multi = true;
    CURLMcode code = curl_multi_add_handle(request->driver->multi, request->easy);
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
