/*
 * ssh_raw.c - between a session and its LIBSSH2_SESSION: memory, bytes and failures. See ssh.h.
 */
#include "ssh.h"

#include <errno.h>
#include <limits.h>
#include <openssl/crypto.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

enum { KEXINIT = 20 }; /* the type of a packet: a proposal for the key exchange */

/* --- faults ------------------------------------------------------------------------------------
 */

void cir_ssh_fault_set(cir_ssh_fault *fault, const char *code, const char *phase,
                       const char *format, ...) {
  fault->code = code;
  fault->phase = phase;
  fault->reason = NULL;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault->message, sizeof fault->message, format, arguments);
  va_end(arguments);
}

void cir_ssh_push_fault(lua_State *L, const cir_ssh_fault *fault) {
  cir_push_error(L, fault->code, "%s", fault->message);
  cir_error_field(L, "phase", fault->phase);
  if (fault->reason != NULL)
    cir_error_field(L, "reason", fault->reason);
}

/* --- what libssh2 calls ------------------------------------------------------------------------
 */

/*
 * Memory of libssh2. Each block knows its size, so that on_free knows how many bytes it may look
 * at, and its session's other blocks: libssh2 forgets some (the host key at each new key exchange,
 * what a session that ends in the middle of one has), and they go with the session.
 */
struct cir_ssh_block {
  cir_ssh_block *previous, *next;
  size_t size;
  max_align_t bytes[];
};

static cir_ssh_block *block_of(void *bytes) {
  return CIR_CONTAINER_OF(bytes, cir_ssh_block, bytes);
}

static void *enter(cir_ssh_session *session, cir_ssh_block *block, size_t size) {
  block->size = size;
  block->previous = NULL;
  block->next = session->blocks;
  if (session->blocks != NULL)
    session->blocks->previous = block;
  session->blocks = block;
  session->held += size;
  return block->bytes;
}

static void leave(cir_ssh_session *session, cir_ssh_block *block) {
  session->held -= block->size;
  if (block->previous != NULL)
    block->previous->next = block->next;
  else
    session->blocks = block->next;
  if (block->next != NULL)
    block->next->previous = block->previous;
}

/* The start of a block is cleared, since on_free looks at it whether or not it was ever written. */
void *cir_ssh_allocate(cir_ssh_session *session, size_t size) {
  enum { LOOKED_AT = 128 };
  cir_ssh_block *block = malloc(sizeof *block + size);
  if (block == NULL)
    return NULL;
  memset(block->bytes, 0, size < LOOKED_AT ? size : LOOKED_AT);
  return enter(session, block, size);
}

static LIBSSH2_ALLOC_FUNC(on_alloc) {
  cir_ssh_session *session = *abstract;
  session->given += count;
  if (session->given > CIR_SSH_UNREAD) { /* rule 9 */
    session->io_error = -EBADMSG;
    return NULL;
  }
  if (session->held > CIR_SSH_HELD + CIR_SSH_PER_BYTE * session->windows) { /* rule 10 */
    session->io_error = -EMSGSIZE;
    return NULL;
  }
  return cir_ssh_allocate(session, count);
}

static LIBSSH2_REALLOC_FUNC(on_realloc) {
  cir_ssh_session *session = *abstract;
  if (ptr == NULL)
    return cir_ssh_allocate(session, count);
  cir_ssh_block *block = block_of(ptr);
  leave(session, block);
  cir_ssh_block *moved = realloc(block, sizeof *block + count);
  if (moved == NULL) {
    enter(session, block, block->size);
    return NULL;
  }
  return enter(session, moved, count);
}

/* A channel request of the peer: "exit-status" and "exit-signal" are noted. */
static void note_request(cir_ssh_session *session, cir_wire packet) {
  cir_ssh_channel *channel = cir_ssh_channel_find(session, cir_wire_u32(&packet));
  cir_span name = cir_wire_string(&packet);
  cir_wire_bytes(&packet, 1); /* whether an answer is wanted */
  if (channel == NULL || packet.bad)
    return;
  if (cir_span_is(name, "exit-status")) {
    uint32_t status = cir_wire_u32(&packet);
    if (!packet.bad)
      cir_ssh_channel_status(channel, status);
  } else if (cir_span_is(name, "exit-signal")) {
    cir_span signal = cir_wire_string(&packet);
    cir_wire_bytes(&packet, 1); /* whether it dumped core */
    cir_span message = cir_wire_string(&packet);
    if (!packet.bad)
      cir_ssh_channel_signalled(channel, signal, message);
  }
}

/*
 * Packets that libssh2 has dealt with are freed here, payload first. Two kinds say what libssh2
 * does not tell: the number of a channel that is being opened (so that packets can be matched), and
 * that an exit status or signal has come at all. A peer gains nothing by making other memory look
 * like these: it may send them as packets.
 */
static LIBSSH2_FREE_FUNC(on_free) {
  enum { CHANNEL_OPEN_CONFIRMATION = 91, CHANNEL_REQUEST = 98 };
  if (ptr == NULL)
    return;
  cir_ssh_block *block = block_of(ptr);
  cir_wire packet = cir_wire_of(ptr, block->size);
  cir_ssh_session *session = *abstract;
  uint8_t type = block->size > 0 ? *cir_wire_bytes(&packet, 1).data : 0;
  if (type == CHANNEL_OPEN_CONFIRMATION)
    session->confirmed_channel = cir_wire_u32(&packet);
  else if (type == CHANNEL_REQUEST)
    note_request(session, packet);
  leave(session, block);
  free(block);
}

/*
 * Rule 11: the preferences, a text that libssh2 keeps and that begins with the names that are no
 * key exchanges, lose those. What is left of them is unknown to libssh2, so a server gains nothing
 * by listing that.
 */
static void forget_signals(cir_ssh_session *session) {
  static const char *const names[] = {"ext-info-c", "kex-strict-c-v00@openssh.com"};
  for (cir_ssh_block *block = session->blocks; block != NULL; block = block->next) {
    char *at = (char *)block->bytes;
    size_t left = block->size;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
      size_t length = strlen(names[i]);
      if (left <= length || memcmp(at, names[i], length) != 0)
        continue;
      *at = 'x';
      at += length + 1;
      left -= length + 1;
    }
  }
}

/* Rule 1: everything is taken, into `out`. */
static LIBSSH2_SEND_FUNC(on_send) {
  enum { TYPE_AT = 5 }; /* of a packet that is not encrypted: behind its sizes */
  cir_ssh_session *session = *abstract;
  session->given = 0;
  if (session->state == CIR_SSH_OPENING && length > TYPE_AT &&
      ((const uint8_t *)buffer)[TYPE_AT] == KEXINIT)
    forget_signals(session);
  (void)socket;
  (void)flags;
  if (session->transport == NULL)
    return -EPIPE;
  if (cir_buffer_size(&session->out) + length > CIR_SSH_OUT_MAX ||
      !cir_buffer_add(&session->out, buffer, length)) {
    session->io_error = -ENOBUFS;
    return -ENOBUFS;
  }
  return (ssize_t)length;
}

static LIBSSH2_RECV_FUNC(on_receive) {
  cir_ssh_session *session = *abstract;
  session->given = 0;
  (void)socket;
  (void)flags;
  session->unread = false;
  if (session->transport == NULL)
    return -ECONNRESET;
  if (session->allowance == 0) {
    session->starved = true;
    return -EAGAIN;
  }
  ssize_t count = session->transport->kind->receive(session->transport, buffer, length);
  session->dry = count == -EAGAIN;
  if (count > 0) {
    session->received += (uint64_t)count;
    session->allowance -= (size_t)count < session->allowance ? (size_t)count : session->allowance;
  } else if (count != -EAGAIN) {
    session->io_error = count == 0 ? 1 : (int)count;
  }
  return count;
}

static LIBSSH2_DISCONNECT_FUNC(on_disconnect) {
  cir_ssh_session *ours = *abstract;
  (void)session;
  (void)reason;
  (void)language;
  (void)language_len;
  int size =
      message_len < (int)sizeof ours->disconnect ? message_len : (int)sizeof ours->disconnect;
  snprintf(ours->disconnect, sizeof ours->disconnect, "%.*s", size > 0 ? size : 0, message);
  for (char *c = ours->disconnect; *c != '\0'; c++)
    if ((unsigned char)*c < ' ' || *c == 0x7f)
      *c = ' ';
  if (ours->disconnect[0] == '\0')
    snprintf(ours->disconnect, sizeof ours->disconnect, "(no reason)");
}

/* --- making and freeing ------------------------------------------------------------------------
 */

bool cir_ssh_raw_new(cir_ssh_session *session) {
  LIBSSH2_SESSION *raw = libssh2_session_init_ex(on_alloc, on_free, on_realloc, session);
  session->raw = raw;
  if (raw == NULL)
    return false;
  libssh2_session_set_blocking(raw, 0);
  libssh2_session_set_read_timeout(raw, LONG_MAX / 4); /* rule 5: however far it jumps */
  libssh2_session_callback_set2(raw, LIBSSH2_CALLBACK_SEND, (libssh2_cb_generic *)on_send);
  libssh2_session_callback_set2(raw, LIBSSH2_CALLBACK_RECV, (libssh2_cb_generic *)on_receive);
  libssh2_session_callback_set2(raw, LIBSSH2_CALLBACK_DISCONNECT,
                                (libssh2_cb_generic *)on_disconnect);
  return true;
}

/* Rule 6: the transport is closed, so nothing is waited for; the bound is for what is not foreseen.
 */
void cir_ssh_raw_free(cir_ssh_session *session) {
  enum { ATTEMPTS = 64 };
  for (int i = 0; i < ATTEMPTS && session->raw != NULL; i++)
    if (libssh2_session_free(session->raw) != LIBSSH2_ERROR_EAGAIN)
      session->raw = NULL;
  session->raw = NULL;
  session->spare = NULL;
  while (session->blocks != NULL) {
    cir_ssh_block *block = session->blocks;
    session->blocks = block->next;
    OPENSSL_cleanse(block->bytes, block->size); /* of a key exchange that did not end, perhaps */
    free(block);
  }
}

/* --- failures ----------------------------------------------------------------------------------
 */

cir_ssh_progress cir_ssh_die_of(cir_ssh_session *session, const char *phase, int error) {
  cir_ssh_fault fault;
  char *text = NULL;
  if (session->raw != NULL)
    libssh2_session_last_error(session->raw, &text, NULL, 0);
  if (text == NULL || text[0] == '\0')
    text = "no reason given";
  if (session->disconnect[0] != '\0')
    cir_ssh_fault_set(&fault, strcmp(phase, "auth") == 0 ? "auth" : "closed", phase,
                      "the server ended the connection: %s", session->disconnect);
  else if (session->io_error == 1)
    cir_ssh_fault_set(&fault, "closed", phase, "the server closed the connection");
  else if (session->io_error == -ENOBUFS)
    cir_ssh_fault_set(&fault, "protocol", phase,
                      "the peer asks for answers and does not read them");
  else if (session->io_error == -EMSGSIZE)
    cir_ssh_fault_set(&fault, "protocol", phase,
                      "the peer sends without end what nobody has asked for");
  else if (session->io_error == -EBADMSG)
    cir_ssh_fault_set(&fault, "protocol", phase,
                      "what arrived is not what the server sent: a packet failed its check");
  else if (session->io_error < 0)
    cir_ssh_fault_set(&fault, cir_code_of_uv(session->io_error), phase, "the connection failed: %s",
                      uv_strerror(session->io_error));
  else if (error == LIBSSH2_ERROR_KEX_FAILURE || error == LIBSSH2_ERROR_METHOD_NONE)
    cir_ssh_fault_set(&fault, "unsupported", phase,
                      "no common algorithm, or a key exchange that failed: %s (libssh2 %d)", text,
                      error);
  else if (error == LIBSSH2_ERROR_HOSTKEY_INIT || error == LIBSSH2_ERROR_HOSTKEY_SIGN)
    cir_ssh_fault_set(
        &fault, "hostkey", phase,
        "the server does not prove that it has the host key it shows: %s (libssh2 %d)", text,
        error);
  else
    cir_ssh_fault_set(&fault, "protocol", phase, "%s (libssh2 %d)", text, error);
  return cir_ssh_die(session, &fault);
}

bool cir_ssh_survives(const cir_ssh_session *session, int error) {
  switch (error) {
  case LIBSSH2_ERROR_SOCKET_SEND:
  case LIBSSH2_ERROR_SOCKET_RECV:
  case LIBSSH2_ERROR_SOCKET_DISCONNECT:
  case LIBSSH2_ERROR_SOCKET_NONE:
  case LIBSSH2_ERROR_BAD_SOCKET:
  case LIBSSH2_ERROR_PROTO:
  case LIBSSH2_ERROR_DECRYPT:
  case LIBSSH2_ERROR_INVALID_MAC:
  case LIBSSH2_ERROR_OUT_OF_BOUNDARY:
  case LIBSSH2_ERROR_KEX_FAILURE:
  case LIBSSH2_ERROR_KEY_EXCHANGE_FAILURE:
    return false;
  default:
    return session->io_error == 0 && session->disconnect[0] == '\0';
  }
}
