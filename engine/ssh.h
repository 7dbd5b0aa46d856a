/*
 * ssh.h - what the files of ciranda.core.ssh share: sessions on libssh2, driven by the loop.
 *
 *   ssh_module.c     functions of the module: opening, keys
 *   ssh_session.c    the pump, deadlines, keepalive, death; ssh_session_lua.c its methods in Lua
 *   ssh_operation.c  the queue of what is asked of a session
 *   ssh_raw.c        what libssh2 calls: memory and bytes; what its failures mean
 *   ssh_open.c       connection, identification, key exchange
 *   ssh_auth.c       public key authentication, with a key of ours or a signer in Lua
 *   ssh_start.c      opening a channel for a command, a subsystem or a tunnel
 *   ssh_channel.c    its streams, exit and signals; ssh_channel_lua.c its methods in Lua
 *   ssh_socket.c     a session's bytes over a TCP socket
 *   ssh_stream.c     a session's bytes over functions in Lua: a jump host, a relay, a program
 *   ssh_key*.c       private keys
 *
 * How libssh2 is kept from what hurts its users. Each rule answers a failure that was measured with
 * 1.10 and 1.11.1 or that is an open report against them.
 *
 * 1. libssh2 never meets a full socket. What it sends goes into the session's `out` buffer, whole,
 *    and is written when the socket takes it; commands are told to wait while `out` is long. So
 *    none of libssh2's half-sent states occurs: a window adjustment that cannot be sent and stalls
 *    a reader, an end-of-file packet that must be resent from the same stack address, a key
 *    exchange that begins while a packet is half out (libssh2 792, 1945, 2110). EAGAIN then has one
 *    meaning only: something must be received first. libssh2_session_block_directions, which may
 *    answer 0, is not asked.
 * 2. Any call may take packets of any channel off the socket. A loop that reads one stream until
 *    EAGAIN, then the next, and then waits for the socket, stalls with data already in the queue.
 *    So the pump runs everything again until a pass in which nothing was received or consumed, and
 *    until libssh2, whose buffer may hold further packets, has asked for more and got nothing.
 * 3. libssh2 fails a request when the answer to another channel's request arrives first. So one
 *    request that has an answer is under way a session (the operations queue), and one that was
 *    given up keeps its place until its channel is closed, after which no answer can come.
 * 4. libssh2 reports status 0 both for success and for no status at all. What really came is seen
 *    when libssh2 frees the packet, in our allocator (ssh_raw.c, on_free).
 * 5. Time: deadlines are ours and monotonic. libssh2's own (wall clock) is set out of reach, and a
 *    deadline's clock starts when its phase starts.
 * 6. Freeing may answer EAGAIN for ever on a dead peer: the transport is closed first, after which
 *    its callbacks fail instead, and the number of attempts is bounded.
 * 7. libssh2's keepalive leaks a packet an answer. We open and close a channel instead, which every
 *    server answers, only once the user is authenticated, and count silence. A session that has no
 *    channel to read the socket with does so too when something has waited for CIR_SSH_DEAF_MS: a
 *    server that asks for signs of life (ClientAliveInterval) would hang up on it.
 * 8. One session may not hold up the others: a pump reads CIR_SSH_ALLOWANCE bytes at most, and all
 *    pumps of a turn share CIR_SSH_TURN_NS; the rest is done on the next turn, in the order of a
 *    queue: by the order in which epoll tells of sockets, the last would never be served.
 * 9. A packet of ChaCha20-Poly1305 that fails its check is taken for a packet of type 1 (1.11.1):
 *    its reader decrypts the same bytes again, for ever, with new memory each time. No more memory
 *    than CIR_SSH_UNREAD is given out between two reads or writes; then the session is dead.
 * 10. libssh2 keeps every packet of a type that it does not know, and those that nobody asked for,
 *    for ever, also before the peer has shown who it is. What a session may hold is bounded: by
 *    CIR_SSH_HELD and by what its channels' windows let the peer send, in the smallest packets.
 * 11. A server that lists a name by which only clients say what they understand ("ext-info-c")
 *     makes libssh2 agree on it as a key exchange and call a function that is not there (1.11.1,
 *     libssh2 1763). The names leave the preferences once they have been sent (ssh_raw.c, on_send).
 *
 * Lua is called from the pump, never from inside libssh2 and never from inside a call from Lua:
 * such a call only writes down what is wanted and schedules the pump.
 */
#ifndef CIR_SSH_H
#define CIR_SSH_H

#include "buffer.h"
#include "callback.h"
#include "options.h"
#include "ssh_key.h"

#include <libssh2.h>
#include <sys/types.h>

#define CIR_SSH_OPERATION "ciranda.ssh.operation"
#define CIR_SSH_SESSION "ciranda.ssh.session"
#define CIR_SSH_CHANNEL "ciranda.ssh.channel"
#define CIR_SSH_KEY "ciranda.ssh.key"

enum {
  CIR_SSH_READ = 64 * 1024,         /* the largest piece of output given to Lua */
  CIR_SSH_UNREAD = 4 << 20,         /* bytes for what one read has brought: 35,000 at most */
  CIR_SSH_HELD = 4 << 20,           /* bytes that libssh2 may hold besides what channels bring */
  CIR_SSH_PER_BYTE = 128,           /* and for a byte of a window: one that comes in a packet */
  CIR_SSH_ALLOWANCE = 256 * 1024,   /* received bytes a pump */
  CIR_SSH_TURN_NS = 4 * 1000000,    /* for all pumps, before and after a look at the sockets */
  CIR_SSH_DEAF_MS = 1000,           /* how long what has come may wait where nothing is read */
  CIR_SSH_OUT_FULL = 128 * 1024,    /* unsent bytes from which channels wait */
  CIR_SSH_OUT_MAX = 8 * 1024 * 1024 /* unsent bytes at which the peer is given up */
};

typedef struct cir_ssh_session cir_ssh_session;
typedef struct cir_ssh_channel cir_ssh_channel;
typedef struct cir_ssh_operation cir_ssh_operation;
typedef struct cir_ssh_transport cir_ssh_transport;
typedef struct cir_ssh_block cir_ssh_block;

/* Why something failed: what Lua gets as {code =, phase =, message =, reason =}. */
typedef struct cir_ssh_fault {
  const char *code;   /* a stable word of lua/ciranda/io/error.lua */
  const char *phase;  /* "connect", "banner", "kex", "auth", "channel", "exec", "session" */
  const char *reason; /* finer than the code, or NULL */
  char message[320];
} cir_ssh_fault;

void cir_ssh_fault_set(cir_ssh_fault *fault, const char *code, const char *phase,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));

/* [-0, +1, m] */
void cir_ssh_push_fault(lua_State *L, const cir_ssh_fault *fault);

/* --- transports ------------------------------------------------------------------------------- */

/* What carries a session's bytes. Sizes are at most what was asked; failures are negative errnos.
 */
typedef struct cir_ssh_transport_kind {
  int (*connected)(cir_ssh_transport *transport);  /* 0, -EAGAIN while it is not yet, or why not */
  int (*descriptor)(cir_ssh_transport *transport); /* one that libssh2 may ask about O_NONBLOCK */
  ssize_t (*receive)(cir_ssh_transport *transport, void *to, size_t size);      /* 0 at the end */
  ssize_t (*send)(cir_ssh_transport *transport, const void *from, size_t size); /* may call Lua */
  void (*watch)(cir_ssh_transport *transport, bool readable, bool writable); /* wake us for these */
  void (*close)(cir_ssh_transport *transport); /* at once; on_closed follows on a later turn */
} cir_ssh_transport_kind;

struct cir_ssh_transport {
  const cir_ssh_transport_kind *kind;
  cir_ssh_session *session; /* told by cir_ssh_transport_event and cir_ssh_transport_closed */
};

/*
 * Begin a connection to a numeric address, from the numeric address `bind` unless that is NULL. The
 * caller has checked that they are addresses. Returns NULL with a negative errno in *error.
 */
cir_ssh_transport *cir_ssh_socket_connect(cir_runtime *rt, const char *address, int port,
                                          const char *bind, int *error);

/* Use a connected stream socket, which the transport closes in the end. */
cir_ssh_transport *cir_ssh_socket_adopt(cir_runtime *rt, int descriptor, int *error);

/*
 * Bytes go out by calling the function kept as write_ref with a string, and the next only after
 * cir_ssh_stream_written; bytes come in by cir_ssh_stream_feed. The function kept as drained_ref,
 * unless that is CIR_NO_CALLBACK, is called when a full input has been used up. Takes both. Returns
 * NULL with a negative errno in *error.
 */
cir_ssh_transport *cir_ssh_stream_new(cir_runtime *rt, int write_ref, int drained_ref, int *error);
bool cir_ssh_is_stream(const cir_ssh_transport *transport);
void cir_ssh_stream_written(cir_ssh_transport *transport);

/* Returns whether there is room for more; false also when there is no memory (the session ends). */
bool cir_ssh_stream_feed(cir_ssh_transport *transport, const char *data, size_t size);
void cir_ssh_stream_end(cir_ssh_transport *transport);

/*
 * From the transport: something may be received or sent now. Runs the pump. `hangup` says that the
 * peer has closed its side, perhaps behind bytes that are still to be read.
 */
void cir_ssh_transport_event(cir_ssh_session *session, bool hangup);

/* From the transport: it is closed and its memory is gone. */
void cir_ssh_transport_closed(cir_ssh_session *session);

/* --- operations ------------------------------------------------------------------------------- */

typedef enum { CIR_SSH_AGAIN, CIR_SSH_DONE, CIR_SSH_FAILED } cir_ssh_progress;

typedef struct cir_ssh_operation_kind {
  const char *phase;
  bool fatal; /* giving it up ends the session: libssh2 cannot go back */
  /* Do what can be done. After CIR_SSH_FAILED operation->fault is set, or the session is dying. */
  cir_ssh_progress (*step)(cir_ssh_operation *operation);
  int (*push)(cir_ssh_operation *operation, lua_State *L); /* the results; returns their number */
  /* It was reported before it ended, and goes on so that libssh2's state ends. May be NULL. */
  void (*abandon)(cir_ssh_operation *operation);
  void (*release)(cir_ssh_operation *operation); /* free it; may be NULL for free() */
} cir_ssh_operation_kind;

/* Begins every operation's own struct, which is made by calloc. */
struct cir_ssh_operation {
  const cir_ssh_operation_kind *kind;
  cir_ssh_session *session;
  cir_ssh_operation *next;
  cir_ssh_operation **handle; /* the userdata's pointer to this; NULL once it is reported */
  int anchor;                 /* keeps the handle, and with it the session, while under way */
  int on_done;
  uint64_t timeout;  /* milliseconds, 0 for none; counted from when it is first stepped */
  uint64_t deadline; /* of the loop's clock, 0 for none */
  bool started, cancelled, reported;
  cir_ssh_fault fault;
};

/*
 * Queue the operation on the session at `index`, with the callback at `callback`, both of which the
 * caller has checked; its handle is left on the stack. The operation is the session's from here on,
 * or is released when this raises. On a dead session it fails on a later turn. [-0, +1, m]
 */
void cir_ssh_submit(lua_State *L, int index, cir_ssh_operation *operation, int callback);

/* Step the first operation, and the next when it ends. Returns whether any ended. */
bool cir_ssh_operations_step(cir_ssh_session *session);

/* Report the session's fault to all operations, those queued by the reports included. */
void cir_ssh_operations_fail(cir_ssh_session *session);

/* Set a deadline that counts from now; 0 takes it away. */
void cir_ssh_deadline(cir_ssh_operation *operation, uint64_t timeout);

/* --- sessions --------------------------------------------------------------------------------- */

typedef enum { CIR_SSH_OPENING, CIR_SSH_UP, CIR_SSH_DEAD } cir_ssh_state;

struct cir_ssh_session {
  cir_runtime *rt;
  cir_ssh_session *previous, *next;
  cir_ssh_session *next_waiting; /* in the queue of those to be pumped: the next */
  LIBSSH2_SESSION *raw;          /* NULL once dead */
  cir_ssh_transport *transport;  /* NULL once closed */
  cir_ssh_operation *operations; /* the first is under way */
  cir_ssh_channel *channels;
  LIBSSH2_CHANNEL *spare; /* closed by both sides: kept to read the socket with (see drain) */
  cir_buffer out;
  cir_ssh_block *blocks; /* libssh2's memory */
  uv_timer_t timer;
  uint64_t alarm; /* what the timer is set to, 0 for not at all */
  cir_ssh_state state;
  cir_ssh_fault fault; /* why it is dead */
  int holds;
  int on_close;
  uint64_t received, sent;              /* bytes */
  uint64_t keepalive, next_tick, heard; /* milliseconds; `received` at the last tick */
  uint64_t listen_at;                   /* when what waits unread is read, 0 for never */
  unsigned missed, most_missed;
  size_t allowance;
  size_t given;               /* memory given out since the last read or write (rule 9) */
  size_t held, windows;       /* all memory of libssh2's, and its channels' windows (rule 10) */
  int io_error;               /* what the transport said: a negative errno, 1 for the end, 0 */
  uint32_t confirmed_channel; /* our number of the channel opened last */
  char disconnect[200];       /* the peer's parting words */
  bool authenticated, pumping, again, starved, scheduled;
  bool unread; /* the transport has something, and nobody has asked for it in this pump */
  bool dry;    /* libssh2 has dealt with all that it has received */
  bool deaf;   /* nobody will: not watched until something changes */
  bool hangup; /* the peer has closed its side */
  bool buried; /* dead, and everyone has been told */
};

/* Initialise libssh2 and the end of the module, once. Returns whether it is ready. */
bool cir_ssh_module_begin(cir_runtime *rt);

/* Enter a zeroed session into the list. It has two shares: the userdata's and the timer's. */
void cir_ssh_session_begin(cir_ssh_session *session, cir_runtime *rt);

/* Make session->raw; false when there is no memory. Free it, its transport being closed (rule 6).
 */
bool cir_ssh_raw_new(cir_ssh_session *session);
void cir_ssh_raw_free(cir_ssh_session *session);

/* Take and give back a share in the session's memory. */
void cir_ssh_hold(cir_ssh_session *session);
void cir_ssh_release(cir_ssh_session *session);

/* Run the pump on a later turn. What a call from Lua does after it has written down its wish. */
void cir_ssh_schedule(cir_ssh_session *session);

/* End the session: what is under way fails with this fault. Returns CIR_SSH_FAILED. */
cir_ssh_progress cir_ssh_die(cir_ssh_session *session, const cir_ssh_fault *fault);

/* End it because libssh2 has failed in a way after which the session is no use. The same. */
cir_ssh_progress cir_ssh_die_of(cir_ssh_session *session, const char *phase, int error);

/* Whether a failure of libssh2 leaves the session usable. */
bool cir_ssh_survives(const cir_ssh_session *session, int error);

/* The session at index; raises when it is none. [-0, +0, v] */
cir_ssh_session *cir_ssh_check_session(lua_State *L, int index);

/* Raise a misuse unless the session is open and, when asked, its user authenticated. [-0, +0, v] */
void cir_ssh_check_usable(lua_State *L, cir_ssh_session *session, bool authenticated);

/* The buffer that all sessions read into, CIR_SSH_READ bytes. */
char *cir_ssh_buffer(void);

/* Memory that libssh2 may free; what it does not free goes with the session. */
void *cir_ssh_allocate(cir_ssh_session *session, size_t size);

uint64_t cir_ssh_now(const cir_ssh_session *session);

/* --- channels --------------------------------------------------------------------------------- */

/* Do what can be done on every channel. Returns whether anything was. */
bool cir_ssh_channels_step(cir_ssh_session *session);

/* The session is dead: end all channels with its fault. */
void cir_ssh_channels_fail(cir_ssh_session *session);

/* The next deadline of a channel, or `alarm` when that is earlier; 0 is never. */
uint64_t cir_ssh_channels_alarm(const cir_ssh_session *session, uint64_t alarm);

/* The channel with this number of ours, or NULL. */
cir_ssh_channel *cir_ssh_channel_find(cir_ssh_session *session, uint32_t number);

/* What a packet said about the end of the command. */
void cir_ssh_channel_status(cir_ssh_channel *channel, uint32_t status);
void cir_ssh_channel_signalled(cir_ssh_channel *channel, cir_span name, cir_span message);

/* A channel of libssh2 that is open on both sides, or NULL. */
LIBSSH2_CHANNEL *cir_ssh_channels_any(const cir_ssh_session *session);

/* Close this one, which was opened for nothing, in the background. False when there is no memory.
 */
bool cir_ssh_channels_adopt(cir_ssh_session *session, LIBSSH2_CHANNEL *raw);

/* --- tables of methods -------------------------------------------------------------------------
 */

/* ssh.open. [-n, +1, v] */
int cir_ssh_l_open(lua_State *L);

/* session:exec, session:tunnel. [-n, +1, v] */
int cir_ssh_l_exec(lua_State *L);
int cir_ssh_l_tunnel(lua_State *L);

/* session:authenticate, session:auth_methods. [-n, +1, v] */
int cir_ssh_l_authenticate(lua_State *L);
int cir_ssh_l_auth_methods(lua_State *L);

/* Make the metatables. [-0, +0, m] */
void cir_ssh_session_register(lua_State *L);
void cir_ssh_operation_register(lua_State *L);
void cir_ssh_channel_register(lua_State *L);
void cir_ssh_key_register(lua_State *L);

#endif
