/*
 * http_server.h - what the files of the http server share.
 *
 * http_server.c runs a libmicrohttpd daemon on the loop; http_exchange.c is one request and its
 * answer as libmicrohttpd sees them, http_exchange_lua.c as Lua does.
 *
 * Rules. MHD_run is called only from a turn of the loop (cir_server_run), never from a call from
 * Lua; libmicrohttpd's callbacks never call Lua. A request that Lua has not answered is a suspended
 * connection. Everything suspended is resumed before the daemon is stopped: libmicrohttpd aborts
 * the process otherwise.
 */
#ifndef CIR_HTTP_SERVER_H
#define CIR_HTTP_SERVER_H

#include "buffer.h"
#include "callback.h"
#include "lazy_microhttpd.h"

#define CIR_SERVER_HANDLE "ciranda.http.server"
#define CIR_EXCHANGE_HANDLE "ciranda.http.exchange"

enum { CIR_EXCHANGE_ROOM = 64 * 1024 /* a streamed answer asks for more when it has less */ };

typedef struct cir_server cir_server;

typedef enum cir_exchange_state {
  CIR_EXCHANGE_READING,   /* the request is still arriving */
  CIR_EXCHANGE_WAITING,   /* suspended until Lua answers */
  CIR_EXCHANGE_ANSWERED,  /* the answer is with libmicrohttpd, or about to be */
  CIR_EXCHANGE_STREAMING, /* the same, and Lua still adds to its body */
  CIR_EXCHANGE_OVER       /* libmicrohttpd has let go of it */
} cir_exchange_state;

typedef struct cir_exchange {
  cir_runtime *rt;
  cir_server *server;           /* NULL once libmicrohttpd has let go of the exchange */
  struct cir_exchange **handle; /* the userdata's pointer to this, or NULL */
  struct cir_exchange *previous, *next;
  struct cir_exchange *next_news; /* those that Lua is to hear of */
  struct MHD_Connection *connection;
  struct MHD_Response *response; /* ours until it is queued */
  unsigned status;
  cir_exchange_state state;
  char *target; /* the request line's, as it came */
  const char *method, *version;
  cir_buffer body;   /* of the request */
  cir_buffer out;    /* of the answer: not yet taken by libmicrohttpd */
  uint64_t deadline; /* loop time in ms after which Lua has kept the client waiting for too long; 0:
                        none */
  uint64_t patience; /* how long that is, ms */
  int on_room;       /* Lua waits for `out` to drain */
  int on_upgrade;
  int upgraded; /* the upgraded connection's descriptor, which becomes Lua's, or -1 */
  int holds;    /* libmicrohttpd, the userdata, the news queue */
  bool first_call, suspended, ended, cut, drop, news, told;
  bool sent; /* once over: the whole answer went out */
} cir_exchange;

/* libmicrohttpd's callbacks for one request; cls is the server. */
void *cir_exchange_begin(void *cls, const char *target, struct MHD_Connection *connection);
enum MHD_Result cir_exchange_access(void *cls, struct MHD_Connection *connection, const char *url,
                                    const char *method, const char *version, const char *upload,
                                    size_t *upload_size, void **user);
void cir_exchange_completed(void *cls, struct MHD_Connection *connection, void **user,
                            enum MHD_RequestTerminationCode reason);

/* Tell Lua what is new: a request that has arrived, or room in a streamed answer. Runs on a turn of
 * the loop. */
void cir_exchange_tell(cir_exchange *exchange);

/* Close the connection without (the rest of) an answer. */
void cir_exchange_drop(cir_exchange *exchange);

/* Answer for Lua, which did not, with a line of text. Does nothing unless the exchange waits. */
void cir_exchange_refuse(cir_exchange *exchange, unsigned status, const char *text);

/* Whether the exchange waits for an answer; forgets what an earlier, failed call has left. */
bool cir_exchange_is_waiting(cir_exchange *exchange);

/* Make a response whose body is what `out` gets as it goes (of `length` bytes, or
 * MHD_SIZE_UNKNOWN), or one that changes the protocol; on_upgrade is told then. It is NULL without
 * memory. */
void cir_exchange_stream(cir_exchange *exchange, uint64_t length);
void cir_exchange_switch(cir_exchange *exchange);

/* Let libmicrohttpd go on with the connection, on a later turn. */
void cir_exchange_resume(cir_exchange *exchange);

/* Give back a share in the exchange's memory: libmicrohttpd's, the userdata's or the queue's. */
void cir_exchange_release(cir_exchange *exchange);

/* Make the exchange's class. [-0, +0, m] */
void cir_exchange_register(lua_State *L);

/* --- of the server, for exchanges */

cir_runtime *cir_server_runtime(const cir_server *server);
int cir_server_callback(const cir_server *server);
size_t cir_server_max_body(const cir_server *server);
uint64_t cir_server_patience(const cir_server *server);
bool cir_server_stopping(const cir_server *server);

/* Enter and leave the server's list of exchanges. */
void cir_server_enter(cir_server *server, cir_exchange *exchange);
void cir_server_leave(cir_server *server, cir_exchange *exchange);

/* Queue the exchange for cir_exchange_tell. It is held until then. */
void cir_server_news(cir_server *server, cir_exchange *exchange);

/* Let libmicrohttpd run on a later turn: after a connection was resumed. */
void cir_server_kick(cir_server *server);

/* Begin to watch the exchange's deadline. */
void cir_server_watch(cir_server *server, cir_exchange *exchange, uint64_t patience_ms);

#endif
