/*
 * ssh_channel.h - what the files of a channel share: ssh_start.c opens it, ssh_channel.c steps it,
 * ssh_channel_lua.c has its methods.
 */
#ifndef CIR_SSH_CHANNEL_H
#define CIR_SSH_CHANNEL_H

#include "ssh.h"

/* A string of Lua's on its way out, kept by string_ref. */
typedef struct cir_ssh_outgoing {
  struct cir_ssh_outgoing *next;
  const char *data;
  size_t size, done;
  int string_ref, on_done;
} cir_ssh_outgoing;

typedef struct cir_ssh_signal {
  struct cir_ssh_signal *next;
  char name[32];
} cir_ssh_signal;

struct cir_ssh_channel {
  cir_ssh_session *session;
  cir_ssh_channel *next;
  LIBSSH2_CHANNEL *raw; /* NULL before it is open and after it is closed */
  uint32_t number;      /* ours, of the protocol */
  unsigned window;      /* what the peer may send unread, in bytes */
  enum { CIR_SSH_STARTING, CIR_SSH_RUNNING, CIR_SSH_CLOSING, CIR_SSH_CLOSED } state;
  int holds;  /* the session's list and the userdata */
  int anchor; /* keeps the userdata while a callback waits */
  int on_read, on_exit, on_close;
  cir_ssh_outgoing *writes;
  cir_ssh_signal *signals;
  int columns, rows; /* a new size to tell, or 0 */
  uint64_t close_deadline;
  bool reading, ended, end_told, shutdown_wanted, end_sent;
  bool has_status, has_signal, core_told;
  uint32_t status;
  char signal[32];
  char message[160];
  cir_ssh_fault fault; /* why it ended, when not in order; its code is NULL else */
};

/* A channel that the operation has a share in; NULL when there is no memory. */
cir_ssh_channel *cir_ssh_channel_new(cir_ssh_session *session);

/* Enter a channel opened with that window into the session's list, which takes a share. */
void cir_ssh_channel_enter(cir_ssh_channel *channel, LIBSSH2_CHANNEL *raw, unsigned window);

/* Close it without waiting: nothing that is asked on it can be answered any more. */
void cir_ssh_channel_discard(cir_ssh_channel *channel);

/* Give back a share in the channel's memory: the list's, the userdata's or the operation's. */
void cir_ssh_channel_release(cir_ssh_channel *channel);

/* Push the end of the command: code, signal, message, of which any may be nil. [-0, +3, m] */
void cir_ssh_channel_push_exit(lua_State *L, const cir_ssh_channel *channel);

#endif
