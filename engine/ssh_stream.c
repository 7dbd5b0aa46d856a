/*
 * ssh_stream.c - a session's bytes over functions in Lua: a channel of another session (a jump
 * host), a relay's messages, a proxy command's pipes. See ssh.h.
 */
#include "ssh.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

enum {
  INPUT_FULL = 256 * 1024, /* unread bytes from which feeding should pause */
  PIECE = 64 * 1024        /* the largest string given to Lua */
};

typedef struct stream_transport {
  cir_ssh_transport base;
  cir_runtime *rt;
  cir_buffer in;
  int write_ref, drained_ref;
  int failure;  /* a negative errno that receive reports */
  bool writing; /* Lua has a piece and has not said that it is done with it */
  bool ended, full;
} stream_transport;

static stream_transport *stream_of(cir_ssh_transport *transport) {
  return CIR_CONTAINER_OF(transport, stream_transport, base);
}

static int connected(cir_ssh_transport *transport) {
  (void)transport;
  return 0;
}

/* libssh2 wants a descriptor to ask for its O_NONBLOCK. One that leads nowhere serves all streams.
 */
static int descriptor(cir_ssh_transport *transport) {
  static int nowhere = -1;
  (void)transport;
  if (nowhere < 0)
    nowhere = open("/dev/null", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  return nowhere;
}

/* Called from inside libssh2: tells Lua nothing (see watch). */
static ssize_t receive(cir_ssh_transport *transport, void *to, size_t size) {
  stream_transport *self = stream_of(transport);
  if (cir_buffer_size(&self->in) > 0)
    return (ssize_t)cir_buffer_take(&self->in, to, size);
  if (self->failure != 0)
    return self->failure;
  return self->ended ? 0 : -EAGAIN;
}

static ssize_t transmit(cir_ssh_transport *transport, const void *from, size_t size) {
  stream_transport *self = stream_of(transport);
  if (self->writing)
    return -EAGAIN;
  if (size > PIECE)
    size = PIECE;
  self->writing = true;
  lua_pushlstring(cir_main_state(self->rt), from, size);
  cir_callback_call(self->rt, self->write_ref, 1);
  return (ssize_t)size;
}

/* Runs at the end of each pump: the place to say that the input has been used up. */
static void watch(cir_ssh_transport *transport, bool readable, bool writable) {
  stream_transport *self = stream_of(transport);
  (void)readable;
  (void)writable;
  if (!self->full || cir_buffer_size(&self->in) >= INPUT_FULL / 2)
    return;
  self->full = false;
  cir_callback_call(self->rt, self->drained_ref, 0);
}

static void finish_close(void *arg) {
  stream_transport *self = arg;
  cir_ssh_session *session = self->base.session;
  cir_callback_unref(self->rt, &self->write_ref);
  cir_callback_unref(self->rt, &self->drained_ref);
  cir_buffer_free(&self->in);
  free(self);
  cir_ssh_transport_closed(session);
}

static void close_stream(cir_ssh_transport *transport) {
  stream_transport *self = stream_of(transport);
  cir_defer(self->rt, finish_close, self);
}

static const cir_ssh_transport_kind STREAM = {.connected = connected,
                                              .descriptor = descriptor,
                                              .receive = receive,
                                              .send = transmit,
                                              .watch = watch,
                                              .close = close_stream};

bool cir_ssh_is_stream(const cir_ssh_transport *transport) {
  return transport != NULL && transport->kind == &STREAM;
}

cir_ssh_transport *cir_ssh_stream_new(cir_runtime *rt, int write_ref, int drained_ref, int *error) {
  stream_transport *self = calloc(1, sizeof *self);
  if (self == NULL) {
    cir_callback_unref(rt, &write_ref);
    cir_callback_unref(rt, &drained_ref);
    *error = -ENOMEM;
    return NULL;
  }
  self->base.kind = &STREAM;
  self->rt = rt;
  self->write_ref = write_ref;
  self->drained_ref = drained_ref;
  return &self->base;
}

void cir_ssh_stream_written(cir_ssh_transport *transport) {
  stream_of(transport)->writing = false;
}

bool cir_ssh_stream_feed(cir_ssh_transport *transport, const char *data, size_t size) {
  stream_transport *self = stream_of(transport);
  if (!cir_buffer_add(&self->in, data, size)) {
    self->failure = -ENOMEM;
    return false;
  }
  self->full = cir_buffer_size(&self->in) >= INPUT_FULL;
  return !self->full;
}

void cir_ssh_stream_end(cir_ssh_transport *transport) {
  stream_of(transport)->ended = true;
}
