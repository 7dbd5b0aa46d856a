/*
 * http_client.h - what the files of the http client share.
 *
 * http_client.c has the requests as Lua sees them: starting, delivering to callbacks, cancelling;
 * http_driver.c drives libcurl's multi interface on the loop;
 * http_request.c turns an option table into a curl easy handle and the outcome into Lua values;
 * http_upload.c reads a request body from a file on the thread pool; http_socket.c is a connection
 * without a request, over which the caller speaks a protocol of its own.
 *
 * Rules. libcurl's callbacks write into C buffers and never call Lua. Lua is called only from
 * cir_http_deliver, which runs on a turn of the loop, never inside libcurl and never inside a call
 * from Lua.
 */
#ifndef CIR_HTTP_CLIENT_H
#define CIR_HTTP_CLIENT_H

#include "buffer.h"
#include "callback.h"
#include "lazy_curl.h"

#define CIR_HTTP_HANDLE "ciranda.http.request"

typedef struct cir_http cir_http;
typedef struct cir_http_driver cir_http_driver;
typedef struct cir_http_socket cir_http_socket;
typedef struct cir_http_upload cir_http_upload;

typedef struct cir_http_request {
  cir_http *http; /* NULL until it is started */
  cir_http_driver *driver;
  struct cir_http_request *
      *handle; /* the userdata's pointer to this, or NULL once that is collected */
  struct cir_http_request *previous, *next; /* all requests that are under way */
  struct cir_http_request *next_ready;      /* those with something to deliver */
  CURL *easy;
  struct curl_slist *headers;
  cir_http_upload *upload; /* NULL unless the body comes from a file */
  cir_buffer head;         /* the status line and header lines of the latest answer, raw */
  cir_buffer body;         /* what was received and not yet delivered */
  curl_off_t received;     /* body bytes in all */
  size_t head_bytes;       /* of every head and trailer so far, interim answers too */
  size_t max_body, max_head;
  int anchor; /* keeps the handle, and with it the body string, while the request is under way */
  int on_done, on_response, on_data;
  int holds;            /* who still needs the memory: the flight, a delivery, a file read */
  CURLcode result;      /* valid once finished */
  const char *fault;    /* our own reason to end it: a stable word, or NULL */
  char fault_text[256]; /* said for that reason */
  char error[CURL_ERROR_SIZE];
  bool bare; /* a connection only: see http_socket.c */
  bool started, in_multi, ready, finished, cancelled;
  bool head_complete, response_delivered;
  bool paused;        /* Lua wants no more data for now */
  bool write_refused; /* curl was told so and waits */
  bool discard;       /* nobody wants the body any more */
  bool once;          /* must not be sent a second time */
  bool sent;          /* was about to be sent */
} cir_http_request;

/* Fill request from the option table at index. Raises a misuse; what was allocated is then freed
 * with the request. */
void cir_http_options(lua_State *L, int index, cir_http_request *request);

/* Push what the callback gets: the response table, or the error table. [-0, +1, m] */
void cir_http_push_response(lua_State *L, cir_http_request *request);
void cir_http_push_error(lua_State *L, cir_http_request *request);

/* Push the answer's headers as {{name, value}, ...}, in the order they came. [-0, +1, m] */
void cir_http_push_headers(lua_State *L, const cir_buffer *head);

/* End a request from within a curl callback for a reason of our own, which is told instead of
 * curl's. */
void cir_http_fault(cir_http_request *request, const char *code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Share in, and let go of, the request's memory. The last to let go frees it. */
void cir_http_hold(cir_http_request *request);
void cir_http_release(cir_http_request *request);

/* Tell curl to go on with what was paused: sending always, receiving unless Lua has paused it. */
void cir_http_unpause(cir_http_request *request);

/* Queue the request for delivery. Whoever calls this outside of libcurl's callbacks sees to it that
 * one follows. */
void cir_http_mark_ready(cir_http_request *request);

/*
 * A driver is one multi handle on the loop. Requests share one; a bare connection has its own: curl
 * closes idle connections of a multi handle when it looks for one to use again, and takes those
 * that the program holds for idle. NULL without memory or descriptors.
 */
cir_http_driver *cir_http_driver_new(cir_http *http, cir_runtime *rt);

CURLMcode cir_http_driver_add(cir_http_driver *driver, CURL *easy);
void cir_http_driver_remove(cir_http_driver *driver, CURL *easy);

/* Curl has nothing to do of itself any more: a connection is the caller's to use. */
void cir_http_driver_quiet(cir_http_driver *driver);

/* Close what it still has, `easy` too unless that is NULL; its memory goes on a later turn. */
void cir_http_driver_free(cir_http_driver *driver, CURL *easy);

/*
 * CURLOPT_OPENSOCKETFUNCTION. The kernel ends a connection whose peer has vanished: a request that
 * times out on a shared HTTP/2 connection leaves it open, and those that follow would be sent into
 * the void as well.
 */
curl_socket_t cir_http_open_socket(void *user, curlsocktype purpose, struct curl_sockaddr *address);

/* From a driver: the transfer has ended; and Lua may be told what is new, on a turn of the loop. */
void cir_http_ended(cir_http_request *request, CURLcode result);
void cir_http_deliver(cir_http *http);

/* The head of the list of open sockets. */
cir_http_socket **cir_http_sockets(cir_http *http);

/* Close a socket: nothing more is read, and what is still to be sent is given up. */
void cir_http_socket_close(cir_http_socket *socket);

/*
 * Push nil and the socket of a bare request that has connected; the socket then owns its easy
 * handle and its driver. Pushes nothing and returns false when the loop cannot watch it.
 * [-0, +0|2, m]
 */
bool cir_http_socket_push(lua_State *L, cir_http_request *request);

/* Make the sockets' class. [-0, +0, m] */
void cir_http_socket_register(lua_State *L);

/* The runtime that the request runs in. */
cir_runtime *cir_http_runtime(cir_http_request *request);

/*
 * Open the file whose bytes offset .. offset+length are the body; length < 0 means to its end. On
 * failure the request is given a fault, which is reported through its callback, and false is
 * returned. Does not touch Lua.
 */
bool cir_http_upload_open(cir_http_request *request, const char *path, curl_off_t offset,
                          curl_off_t length);

/* Stop reading and close the file. A read that is under way ends later and holds the request until
 * then. */
void cir_http_upload_close(cir_http_request *request);

#endif
