/*
 * bare.c - what bench-ssh compares with: libssh2 in a loop of its own, with nothing round it.
 *
 *   bare COUNT WINDOW PORT USER KEY HOSTKEY.pub       connect, log in, `echo NONCE`, close; each
 * host 127.1.x.y bare stream BYTES PORT USER KEY HOSTKEY.pub       one host: read BYTES of zeroes
 *
 * It does what a careful program on libssh2 does: the key is parsed once and signs in a callback,
 * the host key is compared, nothing blocks. Prints one line: "cpu_ms <milliseconds of CPU a host>
 * wall_s <seconds>".
 */
#define _GNU_SOURCE
#include "ssh_key.h"

#include <arpa/inet.h>
#include <errno.h>
#include <libssh2.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONNECT, HANDSHAKE, AUTH, OPEN, EXEC, READ, CLOSE, DONE };

typedef struct session {
  int fd, state, number;
  LIBSSH2_SESSION *raw;
  LIBSSH2_CHANNEL *channel;
  char nonce[32], output[64];
  size_t length;
  long long received;
} session;

static cir_ssh_key *key;
static const char *user, *command_of_stream;
static char host_blob[1024];
static size_t host_size;
static int port, epoll_fd, done_count;

static void die(const char *what, session *s) {
  char *text = NULL;
  if (s != NULL && s->raw != NULL)
    libssh2_session_last_error(s->raw, &text, NULL, 0);
  fprintf(stderr, "bare: %s: %s\n", what, text != NULL ? text : strerror(errno));
  exit(1);
}

static int on_sign(LIBSSH2_SESSION *raw, unsigned char **sig, size_t *sig_len,
                   const unsigned char *data, size_t data_len, void **abstract) {
  (void)raw;
  (void)abstract;
  cir_wire wire = cir_wire_of(data, data_len);
  cir_wire_string(&wire);
  cir_wire_bytes(&wire, 1);
  cir_wire_string(&wire);
  cir_wire_string(&wire);
  cir_wire_string(&wire);
  cir_wire_bytes(&wire, 1);
  *sig = cir_ssh_key_sign(key, cir_wire_string(&wire), data, data_len, sig_len);
  return *sig != NULL ? 0 : -1;
}

static void begin(session *s, int number) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  to.sin_addr.s_addr =
      htonl((127u << 24) + (1u << 16) + ((unsigned)number / 250 << 8) + (unsigned)number % 250 + 1);
  memset(s, 0, sizeof *s);
  s->number = number;
  s->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int on = 1;
  setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (s->fd < 0 || (connect(s->fd, (struct sockaddr *)&to, sizeof to) < 0 && errno != EINPROGRESS))
    die("connect", NULL);
  s->raw = libssh2_session_init();
  libssh2_session_set_blocking(s->raw, 0);
  libssh2_session_method_pref(s->raw, LIBSSH2_METHOD_HOSTKEY,
                              "ssh-ed25519,ecdsa-sha2-nistp256,rsa-sha2-512,rsa-sha2-256");
  libssh2_session_method_pref(s->raw, LIBSSH2_METHOD_KEX, "curve25519-sha256");
  snprintf(s->nonce, sizeof s->nonce, "nonce-%d-%lx", number, (unsigned long)random());
  struct epoll_event event = {.events = EPOLLOUT, .data.ptr = s};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, s->fd, &event);
}

/* One step further; returns 0, or LIBSSH2_ERROR_EAGAIN. */
static int step(session *s) {
  int error = 0;
  size_t size;
  int type;
  char command[64];
  void *abstract = NULL;
  static char buffer[64 * 1024];
  switch (s->state) {
  case CONNECT:
    break;
  case HANDSHAKE:
    error = libssh2_session_handshake(s->raw, s->fd);
    if (error == 0) {
      const char *blob = libssh2_session_hostkey(s->raw, &size, &type);
      if (size != host_size || memcmp(blob, host_blob, size) != 0)
        die("the host key differs", s);
    }
    break;
  case AUTH:
    error = libssh2_userauth_publickey(s->raw, user, key->blob, key->blob_size, on_sign, &abstract);
    break;
  case OPEN:
    s->channel = libssh2_channel_open_session(s->raw);
    error = s->channel != NULL ? 0 : libssh2_session_last_errno(s->raw);
    break;
  case EXEC:
    snprintf(command, sizeof command, "echo %s", s->nonce);
    error =
        libssh2_channel_exec(s->channel, command_of_stream != NULL ? command_of_stream : command);
    break;
  case READ:
    for (;;) {
      ssize_t count = libssh2_channel_read(s->channel, buffer, sizeof buffer);
      if (count == LIBSSH2_ERROR_EAGAIN)
        return LIBSSH2_ERROR_EAGAIN;
      if (count < 0)
        die("read", s);
      if (count == 0)
        break;
      s->received += count;
      if (command_of_stream == NULL && s->length + (size_t)count < sizeof s->output) {
        memcpy(s->output + s->length, buffer, (size_t)count);
        s->length += (size_t)count;
      }
    }
    break;
  case CLOSE:
    error = libssh2_channel_close(s->channel);
    if (error == 0 && command_of_stream == NULL) {
      size_t length = strlen(s->nonce);
      if (libssh2_channel_get_exit_status(s->channel) != 0 || s->length != length + 1 ||
          memcmp(s->output, s->nonce, length) != 0)
        die("wrong output", s);
    }
    break;
  }
  if (error != 0 && error != LIBSSH2_ERROR_EAGAIN)
    die("failed", s);
  if (error == 0)
    s->state++;
  return error;
}

static double seconds(struct timeval a) {
  return (double)a.tv_sec + (double)a.tv_usec / 1e6;
}

int main(int argc, char **argv) {
  if (argc < 7)
    return 2;
  bool stream = strcmp(argv[1], "stream") == 0;
  int total = stream ? 1 : atoi(argv[1]), window = stream ? 1 : atoi(argv[2]);
  port = atoi(argv[3]);
  user = argv[4];
  char command[64];
  snprintf(command, sizeof command, "head -c %s /dev/zero", argv[2]);
  if (stream)
    command_of_stream = command;

  static char text[65536];
  FILE *file = fopen(argv[5], "r");
  if (file == NULL)
    die(argv[5], NULL);
  size_t length = fread(text, 1, sizeof text, file);
  fclose(file);
  cir_ssh_key_fault fault;
  key = cir_ssh_key_parse(text, length, NULL, 0, &fault);
  if (key == NULL) {
    fprintf(stderr, "bare: %s\n", fault.message);
    return 1;
  }
  char encoded[4096];
  file = fopen(argv[6], "r");
  if (file == NULL || fscanf(file, "%*s %4095s", encoded) != 1)
    die(argv[6], NULL);
  fclose(file);
  host_size = (size_t)EVP_DecodeBlock((unsigned char *)host_blob, (unsigned char *)encoded,
                                      (int)strlen(encoded));
  for (size_t i = strlen(encoded); i > 0 && encoded[i - 1] == '='; i--)
    host_size--;

  libssh2_init(0);
  epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  session *sessions = calloc((size_t)total, sizeof *sessions);
  struct timespec from, to;
  struct rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  clock_gettime(CLOCK_MONOTONIC, &from);
  int started = 0;
  while (started < window && started < total) {
    begin(&sessions[started], started);
    started++;
  }
  long long received = 0;
  while (done_count < total) {
    struct epoll_event events[256];
    int count = epoll_wait(epoll_fd, events, 256, 10000);
    if (count <= 0)
      die("nothing happens", NULL);
    for (int i = 0; i < count; i++) {
      session *s = events[i].data.ptr;
      while (s->state != DONE && step(s) == 0)
        ;
      if (s->state != DONE) {
        int directions = libssh2_session_block_directions(s->raw);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
        if ((directions & LIBSSH2_SESSION_BLOCK_OUTBOUND) != 0)
          event.events |= EPOLLOUT;
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, s->fd, &event);
        continue;
      }
      received += s->received;
      libssh2_channel_free(s->channel);
      libssh2_session_disconnect(s->raw, "done");
      epoll_ctl(epoll_fd, EPOLL_CTL_DEL, s->fd, NULL);
      close(s->fd);
      libssh2_session_free(s->raw);
      done_count++;
      if (started < total) {
        begin(&sessions[started], started);
        started++;
      }
    }
  }
  clock_gettime(CLOCK_MONOTONIC, &to);
  getrusage(RUSAGE_SELF, &after);
  double cpu = seconds(after.ru_utime) + seconds(after.ru_stime) - seconds(before.ru_utime) -
               seconds(before.ru_stime);
  double wall = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) / 1e9;
  if (stream && received != atoll(argv[2]))
    die("bytes are missing", NULL);
  printf("cpu_ms %.4f wall_s %.4f\n", cpu * 1000 / total, wall);
  cir_ssh_key_free(key);
  return 0;
}
