/*
 * http_exchange.c - one request to the server and its answer, as libmicrohttpd sees them: its
 * callbacks, which never call Lua. See http_server.h; what Lua sees is in http_exchange_lua.c.
 */
#include "http_server.h"

#include <fcntl.h>
#include <unistd.h>

enum { CIR_EXCHANGE_BLOCK = 32 * 1024 /* bytes of a streamed answer that are asked for at once */ };

static void release_response(cir_exchange *exchange) {
  if (exchange->response != NULL)
    MHD_destroy_response(exchange->response);
  exchange->response = NULL;
}

void cir_exchange_release(cir_exchange *exchange) {
  if (--exchange->holds > 0)
    return;
  if (exchange->handle != NULL)
    *exchange->handle = NULL;
  release_response(exchange);
  cir_callback_unref(exchange->rt, &exchange->on_room);
  cir_callback_unref(exchange->rt, &exchange->on_upgrade);
  cir_buffer_free(&exchange->body);
  cir_buffer_free(&exchange->out);
  free(exchange->target);
  free(exchange);
}

void cir_exchange_resume(cir_exchange *exchange) {
  if (!exchange->suspended || exchange->connection == NULL)
    return;
  exchange->suspended = false;
  MHD_resume_connection(exchange->connection);
  cir_server_kick(exchange->server);
}

void cir_exchange_drop(cir_exchange *exchange) {
  if (exchange->state == CIR_EXCHANGE_OVER)
    return;
  exchange->drop = true;
  if (exchange->state == CIR_EXCHANGE_WAITING)
    exchange->state = CIR_EXCHANGE_ANSWERED;
  exchange->deadline = 0;
  cir_exchange_resume(exchange);
}

bool cir_exchange_is_waiting(cir_exchange *exchange) {
  if (exchange == NULL || exchange->state != CIR_EXCHANGE_WAITING)
    return false;
  release_response(exchange);
  cir_buffer_clear(&exchange->out);
  exchange->cut = false;
  return true;
}

void cir_exchange_refuse(cir_exchange *exchange, unsigned status, const char *text) {
  if (!cir_exchange_is_waiting(exchange))
    return;
  exchange->response = MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text,
                                                       MHD_RESPMEM_PERSISTENT);
  if (exchange->response == NULL) {
    cir_exchange_drop(exchange);
    return;
  }
  MHD_add_response_header(exchange->response, "Content-Type", "text/plain");
  exchange->status = status;
  exchange->state = CIR_EXCHANGE_ANSWERED;
  exchange->deadline = 0;
  cir_exchange_resume(exchange);
}

/* --- libmicrohttpd's callbacks --------------------------------------------------------------- */

/* MHD_OPTION_URI_LOG_CALLBACK: the first that is heard of a request, and the only place where its
 * target is whole. */
void *cir_exchange_begin(void *cls, const char *target, struct MHD_Connection *connection) {
  cir_server *server = cls;
  cir_exchange *exchange = calloc(1, sizeof *exchange);
  if (exchange == NULL || (exchange->target = strdup(target)) == NULL) {
    free(exchange);
    return NULL;
  }
  exchange->rt = cir_server_runtime(server);
  exchange->server = server;
  exchange->connection = connection;
  exchange->state = CIR_EXCHANGE_READING;
  exchange->first_call = true;
  exchange->holds = 1;
  exchange->on_room = exchange->on_upgrade = CIR_NO_CALLBACK;
  exchange->upgraded = -1;
  cir_server_enter(server, exchange);
  return exchange;
}

/* Queue the answer that Lua has given. */
static enum MHD_Result queue_answer(cir_exchange *exchange) {
  if (exchange->drop || exchange->response == NULL)
    return MHD_NO;
  enum MHD_Result result =
      MHD_queue_response(exchange->connection, exchange->status, exchange->response);
  release_response(exchange);
  return result;
}

/* Answer at once that the body is too large; the rest of it is not read. */
static enum MHD_Result refuse_body(cir_exchange *exchange) {
  static const char text[] = "The body of the request is too large.\n";
  struct MHD_Response *response = MHD_create_response_from_buffer(
      sizeof text - 1, (void *)(uintptr_t)text, MHD_RESPMEM_PERSISTENT);
  if (response == NULL)
    return MHD_NO;
  MHD_add_response_header(response, "Content-Type", "text/plain");
  MHD_add_response_header(response, "Connection", "close");
  exchange->state = CIR_EXCHANGE_ANSWERED;
  enum MHD_Result result = MHD_queue_response(exchange->connection, 413, response);
  MHD_destroy_response(response);
  return result;
}

/* MHD_AccessHandlerCallback: the headers, each part of the body, its end; and again after the
 * connection is resumed. */
enum MHD_Result cir_exchange_access(void *cls, struct MHD_Connection *connection, const char *url,
                                    const char *method, const char *version, const char *upload,
                                    size_t *upload_size, void **user) {
  cir_server *server = cls;
  cir_exchange *exchange = *user;
  (void)url;
  if (exchange == NULL || exchange->drop)
    return MHD_NO;
  if (exchange->first_call) {
    exchange->first_call = false;
    exchange->method = method;
    exchange->version = version;
    const char *length = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Length");
    if (length != NULL && strtoull(length, NULL, 10) > cir_server_max_body(server))
      return refuse_body(exchange);
    return MHD_YES;
  }
  if (*upload_size > 0) {
    if (cir_buffer_size(&exchange->body) + *upload_size > cir_server_max_body(server) ||
        !cir_buffer_add(&exchange->body, upload, *upload_size))
      return MHD_NO;
    *upload_size = 0;
    return MHD_YES;
  }
  if (exchange->state != CIR_EXCHANGE_READING)
    return queue_answer(exchange);
  if (cir_server_stopping(server))
    return MHD_NO;
  exchange->state = CIR_EXCHANGE_WAITING;
  exchange->suspended = true;
  MHD_suspend_connection(connection);
  cir_server_watch(server, exchange, cir_server_patience(server));
  cir_server_news(server, exchange);
  return MHD_YES;
}

/* MHD_OPTION_NOTIFY_COMPLETED: the answer was sent, or the connection is lost. */
void cir_exchange_completed(void *cls, struct MHD_Connection *connection, void **user,
                            enum MHD_RequestTerminationCode reason) {
  cir_server *server = cls;
  cir_exchange *exchange = *user;
  (void)connection;
  if (exchange == NULL)
    return;
  *user = NULL;
  exchange->state = CIR_EXCHANGE_OVER;
  exchange->sent = reason == MHD_REQUEST_TERMINATED_COMPLETED_OK;
  exchange->connection = NULL;
  exchange->deadline = 0;
  cir_server_leave(server, exchange);
  if (exchange->on_room != CIR_NO_CALLBACK || exchange->on_upgrade != CIR_NO_CALLBACK)
    cir_server_news(server, exchange);
  exchange->server = NULL;
  cir_exchange_release(exchange);
}

/* MHD_ContentReaderCallback of a streamed or truncated answer. Waits, suspended, while Lua has
 * given nothing. */
static ssize_t read_answer(void *cls, uint64_t position, char *to, size_t size) {
  cir_exchange *exchange = cls;
  (void)position;
  if (exchange->drop)
    return MHD_CONTENT_READER_END_WITH_ERROR;
  size_t given = cir_buffer_take(&exchange->out, to, size);
  if (exchange->on_room != CIR_NO_CALLBACK && cir_buffer_size(&exchange->out) < CIR_EXCHANGE_ROOM)
    cir_server_news(exchange->server, exchange);
  if (given > 0)
    return (ssize_t)given;
  if (exchange->cut)
    return MHD_CONTENT_READER_END_WITH_ERROR;
  if (exchange->ended)
    return MHD_CONTENT_READER_END_OF_STREAM;
  exchange->suspended = true;
  MHD_suspend_connection(exchange->connection);
  return 0;
}

/*
 * MHD_UpgradeHandler. Lua gets a descriptor of its own, so that libmicrohttpd's bookkeeping ends
 * here: what is done with the connection from now on is no business of the server.
 */
static void on_upgrade(void *cls, struct MHD_Connection *connection, void *user, const char *early,
                       size_t early_size, MHD_socket fd,
                       struct MHD_UpgradeResponseHandle *upgraded) {
  cir_exchange *exchange = cls;
  (void)connection;
  (void)user;
  exchange->upgraded = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  cir_buffer_clear(&exchange->body);
  if (exchange->upgraded >= 0 && !cir_buffer_add(&exchange->body, early, early_size)) {
    close(exchange->upgraded); /* without its first bytes it would be another connection */
    exchange->upgraded = -1;
  }
  exchange->ended = true;
  MHD_upgrade_action(upgraded, MHD_UPGRADE_ACTION_CLOSE);
  cir_server_news(exchange->server, exchange);
  cir_server_kick(exchange->server);
}

/* --- answers that are made as they go ----------------------------------------------------------
 */

void cir_exchange_stream(cir_exchange *exchange, uint64_t length) {
  exchange->response =
      MHD_create_response_from_callback(length, CIR_EXCHANGE_BLOCK, read_answer, exchange, NULL);
}

void cir_exchange_switch(cir_exchange *exchange) {
  exchange->response = MHD_create_response_for_upgrade(on_upgrade, exchange);
}
