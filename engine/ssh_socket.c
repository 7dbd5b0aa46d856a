/*
 * ssh_socket.c - a session's bytes over a TCP socket, watched by one uv_poll. See ssh.h.
 *
 * libssh2 reads the identification a byte at a time, and everything until it is told that there is
 * no more. Neither is a system call here: small reads are served from a piece that was read ahead,
 * and a read that got less than it asked for has emptied the socket until the loop says otherwise.
 */
#include "buffer.h"
#include "ssh.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

enum { AHEAD = 2048 }; /* an identification and the first packet behind it */

typedef struct socket_transport {
  cir_ssh_transport base;
  uv_poll_t poll;
  int fd;
  bool connecting;
  bool hangup; /* the peer has closed its side: reads go on until they find its end */
  bool empty;  /* nothing can be read before the next event */
  int pending; /* an errno that the next read answers */
  int events;
  cir_buffer ahead; /* read and not asked for yet */
} socket_transport;

static socket_transport *socket_of(cir_ssh_transport *transport) {
  return CIR_CONTAINER_OF(transport, socket_transport, base);
}

static void on_poll(uv_poll_t *poll, int status, int events) {
  socket_transport *self = CIR_CONTAINER_OF(poll, socket_transport, poll);
  if (status < 0) /* libuv has stopped the poll; the reason is what the next receive answers */
    self->events = 0;
  self->hangup = self->hangup || status < 0 || (events & UV_DISCONNECT) != 0;
  self->empty = false;
  cir_ssh_transport_event(self->base.session, self->hangup);
}

static int connected(cir_ssh_transport *transport) {
  socket_transport *self = socket_of(transport);
  if (!self->connecting)
    return 0;
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(self->fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
    return -errno;
  if (error == ECONNRESET) { /* a socket that never was connected would have been refused */
    self->connecting = false;
    self->pending = error;
    return 0;
  }
  if (error != 0)
    return -error;
  struct sockaddr_storage peer;
  size = sizeof peer;
  if (getpeername(self->fd, (struct sockaddr *)&peer, &size) < 0)
    return errno == ENOTCONN ? -EAGAIN : -errno;
  self->connecting = false;
  return 0;
}

static int descriptor(cir_ssh_transport *transport) {
  return socket_of(transport)->fd;
}

/* Read the socket itself. */
static ssize_t receive_now(socket_transport *self, void *to, size_t size) {
  ssize_t count;
  if (self->pending != 0)
    return -self->pending;
  do
    count = recv(self->fd, to, size, MSG_DONTWAIT);
  while (count < 0 && errno == EINTR);
  if (count < 0 && errno != EWOULDBLOCK)
    return -errno;
  self->empty = count != 0 && count < (ssize_t)size && !self->hangup;
  return count < 0 ? -EAGAIN : count;
}

static ssize_t receive(cir_ssh_transport *transport, void *to, size_t size) {
  socket_transport *self = socket_of(transport);
  char piece[AHEAD];
  if (cir_buffer_size(&self->ahead) == 0) {
    if (self->empty)
      return -EAGAIN;
    if (size >= AHEAD)
      return receive_now(self, to, size);
    ssize_t count = receive_now(self, piece, AHEAD);
    if (count <= 0)
      return count;
    if (!cir_buffer_add(&self->ahead, piece, (size_t)count))
      return -ENOMEM;
  }
  size_t taken = cir_buffer_take(&self->ahead, to, size);
  if (cir_buffer_size(&self->ahead) == 0)
    cir_buffer_free(&self->ahead);
  return (ssize_t)taken;
}

static ssize_t transmit(cir_ssh_transport *transport, const void *from, size_t size) {
  ssize_t count;
  do
    count = send(socket_of(transport)->fd, from, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (count < 0 && errno == EINTR);
  if (count < 0)
    return errno == EWOULDBLOCK ? -EAGAIN : -errno;
  return count;
}

static void watch(cir_ssh_transport *transport, bool readable, bool writable) {
  socket_transport *self = socket_of(transport);
  int events = UV_DISCONNECT;
  if (readable)
    events |= UV_READABLE;
  if (writable || self->connecting)
    events |= UV_WRITABLE;
  if (events == self->events)
    return;
  self->events = events;
  uv_poll_start(&self->poll, events, on_poll);
}

static void on_closed(uv_handle_t *handle) {
  socket_transport *self = CIR_CONTAINER_OF(handle, socket_transport, poll);
  cir_ssh_session *session = self->base.session;
  cir_buffer_free(&self->ahead);
  free(self);
  cir_ssh_transport_closed(session);
}

/* The descriptor goes after the poll has let go of it: libuv asks for that order. */
static void close_socket(cir_ssh_transport *transport) {
  socket_transport *self = socket_of(transport);
  uv_poll_stop(&self->poll);
  close(self->fd);
  self->fd = -1;
  uv_close((uv_handle_t *)&self->poll, on_closed);
}

static const cir_ssh_transport_kind SOCKET = {.connected = connected,
                                              .descriptor = descriptor,
                                              .receive = receive,
                                              .send = transmit,
                                              .watch = watch,
                                              .close = close_socket};

/* Take over the descriptor. On failure it is closed. */
static cir_ssh_transport *make(cir_runtime *rt, int fd, bool connecting, int *error) {
  socket_transport *self = calloc(1, sizeof *self);
  if (self == NULL) {
    close(fd);
    *error = -ENOMEM;
    return NULL;
  }
  *error = uv_poll_init(cir_loop(rt), &self->poll, fd);
  if (*error < 0) {
    close(fd);
    free(self);
    return NULL;
  }
  self->poll.data = NULL;
  self->base.kind = &SOCKET;
  self->fd = fd;
  self->connecting = connecting;
  return &self->base;
}

/* A numeric address as a socket address; 0 when it is none. */
static socklen_t parse_address(const char *address, int port, struct sockaddr_storage *to) {
  if (uv_ip4_addr(address, port, (struct sockaddr_in *)to) == 0)
    return sizeof(struct sockaddr_in);
  if (uv_ip6_addr(address, port, (struct sockaddr_in6 *)to) == 0)
    return sizeof(struct sockaddr_in6);
  return 0;
}

cir_ssh_transport *cir_ssh_socket_connect(cir_runtime *rt, const char *address, int port,
                                          const char *bind_address, int *error) {
  struct sockaddr_storage to = {0}, from = {0};
  socklen_t to_size = parse_address(address, port, &to);
  int fd = to_size == 0 ? -1 : socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    *error = to_size == 0 ? -EINVAL : -errno;
    return NULL;
  }
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  if (bind_address != NULL) {
    socklen_t from_size = parse_address(bind_address, 0, &from);
    if (from_size == 0 || bind(fd, (struct sockaddr *)&from, from_size) < 0) {
      *error = from_size == 0 ? -EINVAL : -errno;
      close(fd);
      return NULL;
    }
  }
  int status = connect(fd, (struct sockaddr *)&to, to_size);
  if (status < 0 && errno != EINPROGRESS && errno != EINTR) { /* which goes on like the other */
    *error = -errno;
    close(fd);
    return NULL;
  }
  return make(rt, fd, status < 0, error);
}

cir_ssh_transport *cir_ssh_socket_adopt(cir_runtime *rt, int fd, int *error) {
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
      fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
    *error = -errno;
    return NULL;
  }
  return make(rt, fd, false, error);
}
