/*
 * http_driver.c - libcurl's multi interface on the loop: its sockets, its one timer, and what has
 * ended. See http_client.h.
 */
#include "http_client.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CIR_HTTP_DEAD_MS = 30000 /* bytes unacknowledged for so long: the peer is gone */ };

struct cir_http_driver {
  cir_http *http;
  cir_runtime *rt;
  CURLM *multi;
  uv_timer_t timer;
  bool quiet; /* curl has nothing to do of itself any more */
};

/* What the loop watches for one of curl's sockets. Freed when the loop has closed the poll handle.
 */
typedef struct watched_socket {
  uv_poll_t poll;
  cir_http_driver *driver;
  curl_socket_t socket;
} watched_socket;

/* Ask curl which transfers have ended, and have delivered what all have received. */
static void collect(cir_http_driver *driver) {
  CURLMsg *message;
  int left;
  while ((message = curl_multi_info_read(driver->multi, &left)) != NULL) {
    if (message->msg != CURLMSG_DONE)
      continue;
    CURLcode result = message->data.result; /* the message goes with the transfer */
    char *owner = NULL;
    curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &owner);
    cir_http_ended((cir_http_request *)(void *)owner, result);
  }
  cir_http_deliver(driver->http);
}

/* --- the timer ------------------------------------------------------------------------------- */

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
  if (driver->quiet || timeout_ms < 0) {
    uv_timer_stop(&driver->timer);
    return;
  }
  uv_update_time(cir_loop(driver->rt));
  uv_timer_start(&driver->timer, on_timer, timeout_ms > 0 ? (uint64_t)timeout_ms + 1 : 0, 0);
}

/* CURLMOPT_TIMERFUNCTION. */
static int on_curl_timer(CURLM *multi, long timeout_ms, void *user) {
  (void)multi;
  rearm(user, timeout_ms);
  return 0;
}

/* --- sockets --------------------------------------------------------------------------------- */

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
    if (uv_poll_init_socket(cir_loop(driver->rt), &watched->poll, socket) < 0) {
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

curl_socket_t cir_http_open_socket(void *user, curlsocktype purpose,
                                   struct curl_sockaddr *address) {
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

/* --- beginning and end ----------------------------------------------------------------------- */

cir_http_driver *cir_http_driver_new(cir_http *http, cir_runtime *rt) {
  cir_http_driver *driver = calloc(1, sizeof *driver);
  int lowest = open("/dev/null", O_RDONLY | O_CLOEXEC); /* where curl's wake-up pair will begin */
  if (lowest >= 0)
    close(lowest);
  CURLM *multi = driver != NULL ? curl_multi_init() : NULL;
  if (multi == NULL) {
    free(driver);
    return NULL;
  }
  close_pair_on_exec(lowest);
  driver->http = http;
  driver->rt = rt;
  driver->multi = multi;
  uv_timer_init(cir_loop(rt), &driver->timer);
  driver->timer.data = NULL;
  curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, on_curl_socket);
  curl_multi_setopt(multi, CURLMOPT_SOCKETDATA, driver);
  curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, on_curl_timer);
  curl_multi_setopt(multi, CURLMOPT_TIMERDATA, driver);
  return driver;
}

CURLMcode cir_http_driver_add(cir_http_driver *driver, CURL *easy) {
  return curl_multi_add_handle(driver->multi, easy);
}

void cir_http_driver_remove(cir_http_driver *driver, CURL *easy) {
  curl_multi_remove_handle(driver->multi, easy);
}

void cir_http_driver_quiet(cir_http_driver *driver) {
  driver->quiet = true;
  uv_timer_stop(&driver->timer);
}

static void on_timer_closed(uv_handle_t *timer) {
  free(CIR_CONTAINER_OF(timer, cir_http_driver, timer));
}

void cir_http_driver_free(cir_http_driver *driver, CURL *easy) {
  driver->quiet = true;
  if (easy != NULL) {
    curl_multi_remove_handle(driver->multi, easy);
    curl_easy_cleanup(easy);
  }
  curl_multi_cleanup(driver->multi);
  uv_close((uv_handle_t *)&driver->timer, on_timer_closed);
}
