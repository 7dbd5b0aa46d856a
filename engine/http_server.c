/*
 * http_server.c - ciranda.core.server: a libmicrohttpd daemon on the loop. See http_server.h for
 * the rules.
 *
 *   server = core.server.start(options, function(exchange, request) end)
 *   port | nil, err = server:listen(address, port)      any number of times; the port may be 0
 *   server:stop(function() end)
 *
 * The daemon has no listening socket: the server accepts by itself, on as many addresses as it is
 * asked to, and hands the connections over. libmicrohttpd's epoll descriptor is watched by one
 * uv_poll.
 */
#include "http_server.h"
#include "modules.h"
#include "options.h"

#include <errno.h>
#include <limits.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
  CIR_SERVER_ACCEPTS = 64,      /* connections accepted in one turn */
  CIR_SERVER_RETRY_MS = 100,    /* pause of accepting when descriptors have run out */
  CIR_SERVER_MEMORY = 64 * 1024 /* a connection's room, which bounds the request's headers */
};

typedef struct listener {
  uv_poll_t poll;
  cir_server *server;
  struct listener *next;
  int socket;
} listener;

struct cir_server {
  cir_runtime *rt;
  cir_server **handle;
  cir_server *previous, *next; /* all servers of the process */
  struct MHD_Daemon *daemon;
  uv_poll_t poll;
  uv_timer_t timer;    /* when libmicrohttpd wants to run again */
  uv_timer_t watchdog; /* the nearest deadline of an exchange */
  uv_timer_t retry;    /* accepting goes on */
  listener *listeners;
  cir_exchange *exchanges;
  cir_exchange *news, **last_news;
  size_t max_body;
  uint64_t patience;
  int on_request, on_stopped, anchor;
  int open;    /* uv handles that are not closed yet */
  bool kicked; /* a run is queued with cir_defer */
  bool stopping;
};

/* The process's servers, kept in the registry, so that shutdown finds them. */
typedef struct servers {
  cir_server *first;
  bool closed;
} servers;

static const char KEY = 0; /* registry: servers */

cir_runtime *cir_server_runtime(const cir_server *server) {
  return server->rt;
}

int cir_server_callback(const cir_server *server) {
  return server->on_request;
}

size_t cir_server_max_body(const cir_server *server) {
  return server->max_body;
}

uint64_t cir_server_patience(const cir_server *server) {
  return server->patience;
}

bool cir_server_stopping(const cir_server *server) {
  return server->stopping;
}

void cir_server_enter(cir_server *server, cir_exchange *exchange) {
  exchange->next = server->exchanges;
  if (exchange->next != NULL)
    exchange->next->previous = exchange;
  server->exchanges = exchange;
}

void cir_server_leave(cir_server *server, cir_exchange *exchange) {
  if (exchange->previous != NULL)
    exchange->previous->next = exchange->next;
  else
    server->exchanges = exchange->next;
  if (exchange->next != NULL)
    exchange->next->previous = exchange->previous;
  exchange->previous = exchange->next = NULL;
}

void cir_server_news(cir_server *server, cir_exchange *exchange) {
  if (exchange->news)
    return;
  exchange->news = true;
  exchange->holds++;
  exchange->next_news = NULL;
  *server->last_news = exchange;
  server->last_news = &exchange->next_news;
}

static void tell_news(cir_server *server) {
  while (server->news != NULL) {
    cir_exchange *exchange = server->news;
    server->news = exchange->next_news;
    if (server->news == NULL)
      server->last_news = &server->news;
    exchange->news = false;
    cir_exchange_tell(exchange);
    cir_exchange_release(exchange);
  }
}

/* --- the daemon on the loop ------------------------------------------------------------------ */

static void finish_stop(cir_server *server);
static void run(cir_server *server);

static void on_timer(uv_timer_t *timer) {
  run(CIR_CONTAINER_OF(timer, cir_server, timer));
}

/* Let the daemon work, tell Lua, and arm the timer for when it wants to work again. Only on a turn
 * of the loop. */
static void run(cir_server *server) {
  MHD_run(server->daemon);
  if (server->stopping) {
    finish_stop(server);
    return;
  }
  tell_news(server);
  MHD_UNSIGNED_LONG_LONG timeout_ms;
  if (MHD_get_timeout(server->daemon, &timeout_ms) == MHD_YES) {
    uv_update_time(cir_loop(server->rt));
    uv_timer_start(&server->timer, on_timer, timeout_ms, 0);
  } else {
    uv_timer_stop(&server->timer);
  }
}

static void on_poll(uv_poll_t *poll, int status, int events) {
  (void)status;
  (void)events;
  run(CIR_CONTAINER_OF(poll, cir_server, poll));
}

static void on_kick(void *arg) {
  cir_server *server = arg;
  server->kicked = false;
  run(server);
}

void cir_server_kick(cir_server *server) {
  if (server->kicked || server->daemon == NULL)
    return;
  server->kicked = true;
  cir_defer(server->rt, on_kick, server);
}

/* The nearest deadline has come: answer for Lua where it is past, and look for the next. */
static void on_watchdog(uv_timer_t *timer) {
  cir_server *server = CIR_CONTAINER_OF(timer, cir_server, watchdog);
  uint64_t now = uv_now(cir_loop(server->rt)), nearest = 0;
  for (cir_exchange *exchange = server->exchanges, *next; exchange != NULL; exchange = next) {
    next = exchange->next;
    if (exchange->deadline != 0 && exchange->deadline <= now) {
      exchange->deadline = 0;
      if (exchange->state == CIR_EXCHANGE_WAITING)
        cir_exchange_refuse(exchange, MHD_HTTP_SERVICE_UNAVAILABLE, "No answer in time.\n");
      else
        cir_exchange_drop(exchange);
    } else if (exchange->deadline != 0 && (nearest == 0 || exchange->deadline < nearest)) {
      nearest = exchange->deadline;
    }
  }
  if (nearest != 0)
    uv_timer_start(timer, on_watchdog, nearest - now, 0);
}

void cir_server_watch(cir_server *server, cir_exchange *exchange, uint64_t patience_ms) {
  uint64_t now = uv_now(cir_loop(server->rt));
  exchange->patience = patience_ms;
  exchange->deadline = patience_ms > 0 ? now + patience_ms : 0;
  if (patience_ms > 0 && !server->stopping &&
      (!uv_is_active((uv_handle_t *)&server->watchdog) ||
       uv_timer_get_due_in(&server->watchdog) > patience_ms))
    uv_timer_start(&server->watchdog, on_watchdog, patience_ms, 0);
}

/* --- accepting ------------------------------------------------------------------------------- */

static void on_listener(uv_poll_t *poll, int status, int events);

static void on_retry(uv_timer_t *timer) {
  cir_server *server = CIR_CONTAINER_OF(timer, cir_server, retry);
  for (listener *each = server->listeners; each != NULL; each = each->next)
    uv_poll_start(&each->poll, UV_READABLE, on_listener);
}

static void on_listener(uv_poll_t *poll, int status, int events) {
  (void)status;
  (void)events;
  listener *own = CIR_CONTAINER_OF(poll, listener, poll);
  cir_server *server = own->server;
  for (int i = 0; i < CIR_SERVER_ACCEPTS; i++) {
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    int socket =
        accept4(own->socket, (struct sockaddr *)&address, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {
      if (errno == EINTR || errno == ECONNABORTED)
        continue;
      if (errno !=
          EAGAIN) { /* EMFILE, ENFILE, ENOBUFS: the pending connection would wake us without end */
        for (listener *each = server->listeners; each != NULL; each = each->next)
          uv_poll_stop(&each->poll);
        uv_timer_start(&server->retry, on_retry, CIR_SERVER_RETRY_MS, 0);
      }
      break;
    }
    MHD_add_connection(server->daemon, socket, (struct sockaddr *)&address,
                       size); /* owns it, also on failure */
  }
  run(server);
}

static void on_listener_closed(uv_handle_t *handle) {
  listener *own = CIR_CONTAINER_OF(handle, listener, poll);
  free(own);
}

/* --- stopping -------------------------------------------------------------------------------- */

/* The last uv handle is closed: nothing refers to the server any more. */
static void on_handle_closed(cir_server *server) {
  if (--server->open > 0)
    return;
  lua_State *L = cir_main_state(server->rt);
  if (server->handle != NULL)
    *server->handle = NULL;
  cir_callback_unref(server->rt, &server->on_request);
  luaL_unref(L, LUA_REGISTRYINDEX, server->anchor);
  cir_callback_finish(server->rt, &server->on_stopped, 0);
  free(server);
}

static void on_poll_closed(uv_handle_t *handle) {
  on_handle_closed(CIR_CONTAINER_OF(handle, cir_server, poll));
}

static void on_timer_closed(uv_handle_t *handle) {
  on_handle_closed(CIR_CONTAINER_OF(handle, cir_server, timer));
}

static void on_watchdog_closed(uv_handle_t *handle) {
  on_handle_closed(CIR_CONTAINER_OF(handle, cir_server, watchdog));
}

static void on_retry_closed(uv_handle_t *handle) {
  on_handle_closed(CIR_CONTAINER_OF(handle, cir_server, retry));
}

/* After the run in which everything resumed was let go: stop the daemon and close the handles. */
static void finish_stop(cir_server *server) {
  if (server->daemon == NULL || server->kicked)
    return;
  uv_poll_stop(&server->poll);
  MHD_stop_daemon(server->daemon);
  server->daemon = NULL;
  tell_news(server);
  if (server->previous != NULL)
    server->previous->next = server->next;
  else {
    lua_State *L = cir_main_state(server->rt);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &KEY);
    ((servers *)lua_touserdata(L, -1))->first = server->next;
    lua_pop(L, 1);
  }
  if (server->next != NULL)
    server->next->previous = server->previous;
  uv_close((uv_handle_t *)&server->poll, on_poll_closed);
  uv_close((uv_handle_t *)&server->timer, on_timer_closed);
  uv_close((uv_handle_t *)&server->watchdog, on_watchdog_closed);
  uv_close((uv_handle_t *)&server->retry, on_retry_closed);
}

/* Stop listening, cut every connection, and finish on a later turn. */
static void stop(cir_server *server) {
  if (server->stopping)
    return;
  server->stopping = true;
  while (server->listeners != NULL) {
    listener *own = server->listeners;
    server->listeners = own->next;
    uv_poll_stop(&own->poll);
    close(own->socket);
    uv_close((uv_handle_t *)&own->poll, on_listener_closed);
  }
  uv_timer_stop(&server->watchdog);
  uv_timer_stop(&server->retry);
  for (cir_exchange *exchange = server->exchanges; exchange != NULL; exchange = exchange->next)
    cir_exchange_drop(exchange);
  cir_server_kick(server);
}

static void shut_down(void *arg) {
  servers *all = arg;
  all->closed = true;
  for (cir_server *server = all->first; server != NULL; server = server->next)
    stop(server);
}

/* The registry's list of servers, made at first use. [-0, +0, m] */
static servers *servers_of(lua_State *L) {
  lua_rawgetp(L, LUA_REGISTRYINDEX, &KEY);
  servers *all = lua_touserdata(L, -1);
  lua_pop(L, 1);
  if (all == NULL) {
    all = lua_newuserdatauv(L, sizeof *all, 0);
    *all = (servers){NULL, false};
    lua_rawsetp(L, LUA_REGISTRYINDEX, &KEY);
    cir_on_shutdown(cir_runtime_of(L), shut_down, all);
  }
  return all;
}

/* --- Lua ------------------------------------------------------------------------------------- */

/* MHD_OPTION_UNESCAPE_CALLBACK: percent-encoding stays as it came. */
static size_t leave_escaped(void *cls, struct MHD_Connection *connection, char *text) {
  (void)cls;
  (void)connection;
  return strlen(text);
}

/*
 * server.start({max_body =, deadline_ms =, idle_ms =, max_connections =}, on_request) -> server.
 * Raises a misuse and when the daemon cannot start. [-2, +1, v]
 */
static int l_start(lua_State *L) {
  static const char *const known[] = {"max_body", "deadline_ms", "idle_ms", "max_connections",
                                      NULL};
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_settop(L, 2);
  cir_known_options(L, 1, known);
  lua_Integer max_body = cir_integer_option(L, 1, "max_body", 0, LUA_MAXINTEGER, 64 << 20);
  lua_Integer patience = cir_integer_option(L, 1, "deadline_ms", 0, LUA_MAXINTEGER, 60000);
  lua_Integer idle_ms = cir_integer_option(L, 1, "idle_ms", 0, INT_MAX * 1000LL, 60000);
  lua_Integer connections = cir_integer_option(L, 1, "max_connections", 0, INT_MAX, 4096);
  servers *all = servers_of(L);
  if (all->closed)
    return luaL_error(L, "server.start: the program is shutting down");

  cir_server **handle = lua_newuserdatauv(L, sizeof(cir_server *), 0);
  *handle = NULL;
  luaL_setmetatable(L, CIR_SERVER_HANDLE);
  const char *problem = cir_microhttpd_load();
  if (problem != NULL)
    return luaL_error(L, "%s", problem);
  int on_request, anchor;
  cir_callback_ref_both(L, 2, &on_request, 3, &anchor);
  cir_server *server = calloc(1, sizeof *server);
  struct MHD_Daemon *daemon =
      server == NULL
          ? NULL
          : MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME |
                                 MHD_ALLOW_UPGRADE,
                             0, NULL, NULL, cir_exchange_access, server,                  /* */
                             MHD_OPTION_URI_LOG_CALLBACK, cir_exchange_begin, server,     /* */
                             MHD_OPTION_NOTIFY_COMPLETED, cir_exchange_completed, server, /* */
                             MHD_OPTION_UNESCAPE_CALLBACK, leave_escaped, server,         /* */
                             MHD_OPTION_CONNECTION_TIMEOUT,
                             (unsigned)((idle_ms + 999) / 1000),                            /* */
                             MHD_OPTION_CONNECTION_LIMIT, (unsigned)connections,            /* */
                             MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CIR_SERVER_MEMORY, /* */
                             MHD_OPTION_END);
  const union MHD_DaemonInfo *info =
      daemon == NULL ? NULL : MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_EPOLL_FD);
  uv_loop_t *loop = cir_loop(cir_runtime_of(L));
  if (info == NULL || uv_poll_init(loop, &server->poll, info->epoll_fd) < 0) {
    luaL_unref(L, LUA_REGISTRYINDEX, on_request);
    luaL_unref(L, LUA_REGISTRYINDEX, anchor);
    if (daemon != NULL)
      MHD_stop_daemon(daemon);
    free(server);
    return luaL_error(L, "server.start: libmicrohttpd cannot start: out of memory or descriptors");
  }
  server->rt = cir_runtime_of(L);
  server->daemon = daemon;
  server->last_news = &server->news;
  server->max_body = (size_t)max_body;
  server->patience = (uint64_t)patience;
  server->on_request = on_request;
  server->on_stopped = CIR_NO_CALLBACK;
  server->handle = handle;
  *handle = server;
  server->anchor = anchor;
  server->next = all->first;
  if (server->next != NULL)
    server->next->previous = server;
  all->first = server;

  uv_timer_init(loop, &server->timer);
  uv_timer_init(loop, &server->watchdog);
  uv_timer_init(loop, &server->retry);
  server->open = 4;
  server->poll.data = server->timer.data = server->watchdog.data = server->retry.data = NULL;
  uv_poll_start(&server->poll, UV_READABLE, on_poll);
  return 1;
}

static cir_server *check_server(lua_State *L) {
  return *(cir_server **)luaL_checkudata(L, 1, CIR_SERVER_HANDLE);
}

/* Push nil and an error for a failed system call on address:port. [-0, +2, m] */
static int push_failure(lua_State *L, int problem, const char *address, int port) {
  lua_pushnil(L);
  cir_push_error(L, cir_code_of_uv(-problem), "listen on %s port %d: %s", address, port,
                 strerror(problem));
  return 2;
}

/* server:listen(address, port) -> port, or nil and an error. The address is numeric. [-3, +1 or +2,
 * v] */
static int l_listen(lua_State *L) {
  cir_server *server = check_server(L);
  const char *address = luaL_checkstring(L, 2);
  lua_Integer port = luaL_checkinteger(L, 3);
  luaL_argcheck(L, port >= 0 && port <= 65535, 3, "a port is from 0 to 65535");
  if (server == NULL || server->stopping)
    return luaL_error(L, "server:listen: the server is stopped");
  union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
  } name;
  socklen_t size = sizeof name.v4;
  memset(&name, 0, sizeof name);
  if (uv_ip4_addr(address, (int)port, &name.v4) < 0) {
    size = sizeof name.v6;
    luaL_argcheck(L, uv_ip6_addr(address, (int)port, &name.v6) == 0, 2, "not a numeric IP address");
  }
  int on = 1;
  int fd = socket(name.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0)
    return push_failure(L, errno, address, (int)port);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, &name.any, size) < 0 || listen(fd, SOMAXCONN) < 0 ||
      getsockname(fd, &name.any, &size) < 0) {
    int problem = errno;
    close(fd);
    return push_failure(L, problem, address, (int)port);
  }
  listener *own = malloc(sizeof *own);
  if (own == NULL || uv_poll_init(cir_loop(server->rt), &own->poll, fd) < 0) {
    free(own);
    close(fd);
    return push_failure(L, ENOMEM, address, (int)port);
  }
  own->poll.data = NULL;
  own->server = server;
  own->socket = fd;
  own->next = server->listeners;
  server->listeners = own;
  uv_poll_start(&own->poll, UV_READABLE, on_listener);
  lua_pushinteger(L, ntohs(name.any.sa_family == AF_INET ? name.v4.sin_port : name.v6.sin6_port));
  return 1;
}

/*
 * server:stop([callback]) -> whether the callback will be called. Every connection is cut, also in
 * the middle of an answer; the callback follows when nothing of the server is left, and not at all
 * when that is so already. [-2, +1, v]
 */
static int l_stop(lua_State *L) {
  cir_server *server = check_server(L);
  bool wanted = !lua_isnoneornil(L, 2);
  if (server != NULL) {
    if (wanted && server->on_stopped != CIR_NO_CALLBACK)
      return luaL_error(L, "server:stop: somebody waits for this stop already");
    if (wanted)
      server->on_stopped = cir_callback_ref(L, 2);
    stop(server);
  }
  lua_pushboolean(L, wanted && server != NULL);
  return 1;
}

/* __close: ask to stop. There is no __gc: the handle is anchored until the server is gone. */
static int l_close(lua_State *L) {
  cir_server *server = check_server(L);
  if (server != NULL)
    stop(server);
  return 0;
}

int luaopen_ciranda_core_server(lua_State *L) {
  static const luaL_Reg functions[] = {{"start", l_start}, {NULL, NULL}};
  static const luaL_Reg methods[] = {
      {"listen", l_listen}, {"stop", l_stop}, {"__close", l_close}, {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_SERVER_HANDLE)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
  cir_exchange_register(L);
  luaL_newlib(L, functions);
  return 1;
}
