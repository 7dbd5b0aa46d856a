/*
 * http_request.c - an option table becomes a curl easy handle; what curl says becomes Lua values.
 *
 * No environment surprises: proxies only through the option, no netrc, no redirects (a redirect
 * would carry the caller's Authorization to wherever the answer points), http and https only.
 * Messages are libcurl's own, which name hosts and ports but neither headers nor the URL's query.
 */
#include "http_client.h"
#include "options.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <strings.h>

enum {
  CIR_HTTP_BODY =
      1, /* user value of the handle that keeps the body string alive: curl reads it in place */
  CIR_HTTP_MAX_HEAD = 256 * 1024,
  CIR_HTTP_BUFFER = 128 * 1024
};

void cir_http_fault(cir_http_request *request, const char *code, const char *format, ...) {
  if (request->fault != NULL)
    return;
  request->fault = code;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(request->fault_text, sizeof request->fault_text, format, arguments);
  va_end(arguments);
}

/* --- curl's callbacks: bytes into buffers ---------------------------------------------------- */

/* CURLOPT_HEADERFUNCTION. Keeps the head of the last answer only: a 100 Continue comes before the
 * one that counts. The limit is on all of them together, and on trailers: curl has one of its own
 * (300 KiB) on their sum, whose error cannot be told from a reset connection. */
static size_t on_curl_header(char *line, size_t size, size_t count, void *user) {
  cir_http_request *request = user;
  size_t length = size * count;
  request->head_bytes += length;
  if (request->head_bytes > request->max_head) {
    cir_http_fault(request, "protocol", "the headers of the answer are larger than %zu bytes",
                   request->max_head);
    return 0;
  }
  if (length >= 5 && memcmp(line, "HTTP/", 5) == 0) {
    cir_buffer_clear(&request->head);
    request->head_complete = false;
  }
  if (request->head_complete) /* trailers */
    return length;
  if (length <= 2 && (length == 0 || line[0] == '\r' || line[0] == '\n')) {
    long status = 0;
    curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
    request->head_complete = status >= 200;
    if (request->head_complete && request->on_response != CIR_NO_CALLBACK)
      cir_http_mark_ready(request);
    return length;
  }
  if (!cir_buffer_add(&request->head, line, length)) {
    cir_http_fault(request, "failed", "out of memory");
    return 0;
  }
  return length;
}

/* CURLOPT_WRITEFUNCTION. Refuses more while Lua has paused the request: curl then stops reading the
 * socket. */
static size_t on_curl_body(char *bytes, size_t size, size_t count, void *user) {
  cir_http_request *request = user;
  size_t length = size * count;
  if (request->discard)
    return length;
  if (request->paused) {
    request->write_refused = true;
    return CURL_WRITEFUNC_PAUSE;
  }
  if (request->on_data == CIR_NO_CALLBACK &&
      cir_buffer_size(&request->body) + length > request->max_body) {
    cir_http_fault(request, "protocol",
                   "the body of the answer is larger than the limit of %zu bytes",
                   request->max_body);
    return 0;
  }
  if (!cir_buffer_add(&request->body, bytes, length)) {
    cir_http_fault(request, "failed", "out of memory for the body of the answer");
    return 0;
  }
  request->received += (curl_off_t)length;
  if (request->on_data != CIR_NO_CALLBACK)
    cir_http_mark_ready(request);
  return length;
}

/*
 * CURLOPT_PREREQFUNCTION: the request is about to be sent. When a kept connection ends without a
 * byte of an answer curl sends the request again on a fresh one, whatever its method; it cannot
 * know that the first was not carried out.
 */
static int on_curl_send(void *user, char *remote, char *local, int remote_port, int local_port) {
  cir_http_request *request = user;
  (void)remote;
  (void)local;
  (void)remote_port;
  (void)local_port;
  if (request->sent && request->once) {
    cir_http_fault(request, "closed", "the server closed the kept connection without an answer");
    return CURL_PREREQFUNC_ABORT;
  }
  request->sent = true;
  return CURL_PREREQFUNC_OK;
}

/* --- options --------------------------------------------------------------------------------- */

static const char *const KNOWN[] = {"method",
                                    "url",
                                    "headers",
                                    "body",
                                    "body_file",
                                    "body_offset",
                                    "body_length",
                                    "timeout_ms",
                                    "connect_timeout_ms",
                                    "low_speed_limit",
                                    "low_speed_ms",
                                    "http2",
                                    "ca_file",
                                    "proxy",
                                    "unix_socket",
                                    "max_body",
                                    "max_head",
                                    "once",
                                    "accept_encoding",
                                    "on_response",
                                    "on_data",
                                    NULL};

static bool header_is(const char *line, const char *name) {
  size_t length = strlen(name);
  /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): luaL_error does not return */
  return strncasecmp(line, name, length) == 0 && line[length] == ':';
}

/* Appends to the request's header list; raises when there is no memory. [-0, +0, m] */
static void add_header(lua_State *L, cir_http_request *request, const char *line) {
  struct curl_slist *list = curl_slist_append(request->headers, line);
  if (list == NULL)
    luaL_error(L, "http.request: out of memory");
  request->headers = list;
}

/*
 * The `headers` option. A line break or zero byte would let a value smuggle in a header of its own,
 * so it is refused, without the value in the message. libcurl's own additions (a form's
 * Content-Type, Expect) are switched off unless the caller sets them. [-0, +0, v]
 */
static void set_headers(lua_State *L, int index, cir_http_request *request) {
  bool type_given = false, expect_given = false;
  int type = lua_getfield(L, index, "headers");
  if (type != LUA_TNIL && type != LUA_TTABLE)
    luaL_error(L, "http.request: option 'headers' must be an array of \"Name: value\"");
  for (lua_Integer i = 1; type == LUA_TTABLE && lua_rawgeti(L, -1, i) != LUA_TNIL; i++) {
    size_t length;
    const char *line = lua_type(L, -1) == LUA_TSTRING ? lua_tolstring(L, -1, &length) : NULL;
    const char *colon = line != NULL ? memchr(line, ':', length) : NULL;
    if (colon == NULL || colon == line || strcspn(line, "\r\n") != length ||
        strcspn(line, " \t") < (size_t)(colon - line)) /* which would go on with the line before */
      luaL_error(L, "http.request: header %I is not a \"Name: value\" string without line breaks",
                 i);
    type_given = type_given || header_is(line, "content-type");
    expect_given = expect_given || header_is(line, "expect");
    /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): luaL_error does not return */
    size_t blanks = strspn(colon + 1, " \t");
    if (colon[1 + blanks] == '\0') { /* curl's spelling of a header without a value */
      lua_pushlstring(L, line, (size_t)(colon - line));
      lua_pushliteral(L, ";");
      lua_concat(L, 2);
      add_header(L, request, lua_tostring(L, -1));
      lua_pop(L, 1);
    } else {
      add_header(L, request, line);
    }
    lua_pop(L, 1);
  }
  lua_pop(L, type == LUA_TTABLE ? 2 : 1);
  if (!type_given)
    add_header(L, request, "Content-Type:");
  if (!expect_given)
    add_header(L, request, "Expect:");
  curl_easy_setopt(request->easy, CURLOPT_HTTPHEADER, request->headers);
}

/* The method and the body. [-0, +0, v] */
static void set_body(lua_State *L, int index, cir_http_request *request) {
  CURL *easy = request->easy;
  const char *method = cir_string_option(L, index, "method");
  const char *body_file = cir_string_option(L, index, "body_file");
  int type = lua_getfield(L, index, "body");
  if (type != LUA_TNIL && type != LUA_TSTRING)
    luaL_error(L, "http.request: option 'body' must be a string, not %s", luaL_typename(L, -1));
  if (type != LUA_TNIL && body_file != NULL)
    luaL_error(L, "http.request: options 'body' and 'body_file' exclude each other");
  if (method == NULL)
    method = type == LUA_TNIL && body_file == NULL ? "GET" : "POST";
  if (method[0] == '\0' || strspn(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != strlen(method))
    luaL_error(L, "http.request: option 'method' must be a word in capitals, like \"GET\"");

  lua_Integer offset = cir_integer_option(L, index, "body_offset", 0, LLONG_MAX / 2, 0);
  lua_Integer length = cir_integer_option(L, index, "body_length", 0, LLONG_MAX / 2, -1);
  bool sends =
      strcmp(method, "POST") == 0 || strcmp(method, "PUT") == 0 || strcmp(method, "PATCH") == 0;
  if (body_file != NULL) {
    cir_http_upload_open(request, body_file, offset, length);
  } else if (type == LUA_TSTRING || sends) {
    size_t size = 0;
    const char *body = type == LUA_TSTRING ? lua_tolstring(L, -1, &size) : "";
    curl_easy_setopt(easy, CURLOPT_POST, 1L);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)size);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body);
    lua_pushvalue(L, -1);
    lua_setiuservalue(L, -5, CIR_HTTP_BODY);
  } else if (strcmp(method, "HEAD") == 0) {
    curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
  } else {
    curl_easy_setopt(easy, CURLOPT_HTTPGET, 1L);
  }
  curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, strcmp(method, "HEAD") == 0 ? NULL : method);
  lua_pop(L, 3);
}

/*
 * Fills the request, whose handle is on the top of the stack. [-0, +0, v]
 */
void cir_http_options(lua_State *L, int index, cir_http_request *request) {
  CURL *easy = request->easy;
  int top = lua_gettop(L);
  cir_known_options(L, index, KNOWN);

  const char *url = cir_string_option(L, index, "url");
  if (url == NULL || (strncasecmp(url, "http://", 7) != 0 && strncasecmp(url, "https://", 8) != 0))
    luaL_error(L, "http.request: option 'url' must be an http:// or https:// URL");
  /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): luaL_error does not return */
  if (url[strcspn(url, " \t\r\n")] != '\0')
    luaL_error(L, "http.request: option 'url' holds white space; percent-encode it");
  bool secure = strncasecmp(url, "https://", 8) == 0;
  curl_easy_setopt(easy, CURLOPT_URL, url);
  lua_settop(L, top);
  set_body(L, index, request);
  set_headers(L, index, request);

  curl_easy_setopt(easy, CURLOPT_PRIVATE, request);
  curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, request->error);
  curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_curl_header);
  curl_easy_setopt(easy, CURLOPT_HEADERDATA, request);
  curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_curl_body);
  curl_easy_setopt(easy, CURLOPT_WRITEDATA, request);
  curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, (long)CIR_HTTP_BUFFER);
  curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(easy, CURLOPT_QUICK_EXIT,
                   1L); /* a cancelled name resolution is not waited for */
  curl_easy_setopt(easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
  curl_easy_setopt(easy, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);

  bool http2 = lua_getfield(L, index, "http2") == LUA_TNIL || lua_toboolean(L, -1);
  if (request->bare) { /* through a proxy too there is but a way to the server */
    http2 = false;
    curl_easy_setopt(easy, CURLOPT_CONNECT_ONLY, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTPPROXYTUNNEL, 1L);
  }
  curl_easy_setopt(easy, CURLOPT_HTTP_VERSION,
                   (long)(http2 ? CURL_HTTP_VERSION_2TLS : CURL_HTTP_VERSION_1_1));
  curl_easy_setopt(easy, CURLOPT_PIPEWAIT, http2 && secure ? 1L : 0L);

  const lua_Integer longest = 1000L * 3600 * 24 * 7;
  curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS,
                   (long)cir_integer_option(L, index, "timeout_ms", 1, longest, 0));
  curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS,
                   (long)cir_integer_option(L, index, "connect_timeout_ms", 1, longest, 0));
  lua_Integer low_speed_ms = cir_integer_option(L, index, "low_speed_ms", 1, longest, 0);
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)((low_speed_ms + 999) / 1000));
  curl_easy_setopt(
      easy, CURLOPT_LOW_SPEED_LIMIT,
      (long)cir_integer_option(L, index, "low_speed_limit", 1, LONG_MAX, low_speed_ms > 0 ? 1 : 0));

  request->max_body = (size_t)cir_integer_option(L, index, "max_body", 0, LLONG_MAX, 64L << 20);
  request->max_head =
      (size_t)cir_integer_option(L, index, "max_head", 1024, LLONG_MAX, CIR_HTTP_MAX_HEAD);

  lua_getfield(L, index, "once");
  request->once = lua_toboolean(L, -1);
  curl_easy_setopt(easy, CURLOPT_PREREQFUNCTION, on_curl_send);
  curl_easy_setopt(easy, CURLOPT_PREREQDATA, request);

  const char *proxy = cir_string_option(L, index, "proxy");
  curl_easy_setopt(easy, CURLOPT_PROXY, proxy != NULL ? proxy : "");
  curl_easy_setopt(easy, CURLOPT_NOPROXY, "");
  const char *text = cir_string_option(L, index, "ca_file");
  if (text != NULL)
    curl_easy_setopt(easy, CURLOPT_CAINFO, text);
  text = cir_string_option(L, index, "unix_socket");
  if (text != NULL)
    curl_easy_setopt(easy, CURLOPT_UNIX_SOCKET_PATH, text);
  text = cir_string_option(L, index, "accept_encoding");
  if (text != NULL)
    curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, text);

  if (lua_getfield(L, index, "on_response") != LUA_TNIL)
    request->on_response = cir_callback_ref(L, lua_gettop(L));
  if (lua_getfield(L, index, "on_data") != LUA_TNIL)
    request->on_data = cir_callback_ref(L, lua_gettop(L));
  lua_settop(L, top);
}

/* --- results --------------------------------------------------------------------------------- */

/* Push {name, value} of one header line. [-0, +1, m] */
static void push_header(lua_State *L, const char *line, size_t length) {
  const char *colon = memchr(line, ':', length);
  const char *value = colon + 1, *end = line + length;
  while (value < end && (*value == ' ' || *value == '\t'))
    value++;
  while (end > value && (end[-1] == '\r' || end[-1] == '\n' || end[-1] == ' ' || end[-1] == '\t'))
    end--;
  lua_createtable(L, 2, 0);
  lua_pushlstring(L, line, (size_t)(colon - line));
  lua_rawseti(L, -2, 1);
  lua_pushlstring(L, value, (size_t)(end - value));
  lua_rawseti(L, -2, 2);
}

void cir_http_push_headers(lua_State *L, const cir_buffer *head) {
  const char *at = cir_buffer_bytes(head), *end = at + cir_buffer_size(head);
  lua_Integer count = 0;
  luaL_checkstack(L, 6, "headers");
  lua_newtable(L);
  while (at < end) {
    const char *newline = memchr(at, '\n', (size_t)(end - at));
    const char *next = newline != NULL ? newline + 1 : end;
    if (memchr(at, ':', (size_t)(next - at)) != NULL &&
        !(end - at >= 5 && memcmp(at, "HTTP/", 5) == 0)) {
      push_header(L, at, (size_t)(next - at));
      lua_rawseti(L, -2, ++count);
    }
    at = next;
  }
}

static const char *version_name(long version) {
  switch (version) {
  case CURL_HTTP_VERSION_1_0:
    return "1.0";
  case CURL_HTTP_VERSION_2_0:
    return "2";
  case CURL_HTTP_VERSION_3:
    return "3";
  default:
    return "1.1";
  }
}

void cir_http_push_response(lua_State *L, cir_http_request *request) {
  long status = 0, version = 0, connects = 0;
  char *address = NULL;
  curl_off_t microseconds = 0;
  curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
  curl_easy_getinfo(request->easy, CURLINFO_HTTP_VERSION, &version);
  curl_easy_getinfo(request->easy, CURLINFO_NUM_CONNECTS, &connects);
  curl_easy_getinfo(request->easy, CURLINFO_PRIMARY_IP, &address);
  curl_easy_getinfo(request->easy, CURLINFO_TOTAL_TIME_T, &microseconds);
  luaL_checkstack(L, 4, "response");
  lua_createtable(L, 0, 8);
  lua_pushinteger(L, status);
  lua_setfield(L, -2, "status");
  cir_http_push_headers(L, &request->head);
  lua_setfield(L, -2, "headers");
  if (request->on_data == CIR_NO_CALLBACK) {
    lua_pushlstring(L, cir_buffer_bytes(&request->body), cir_buffer_size(&request->body));
    lua_setfield(L, -2, "body");
  }
  lua_pushinteger(L, request->received);
  lua_setfield(L, -2, "received");
  lua_pushstring(L, version_name(version));
  lua_setfield(L, -2, "http_version");
  lua_pushstring(L, address);
  lua_setfield(L, -2, "effective_ip");
  lua_pushinteger(L, microseconds / 1000);
  lua_setfield(L, -2, "time_ms");
  lua_pushboolean(L, connects == 0);
  lua_setfield(L, -2, "reused");
}

/* How far the request got: the word for a message or a decision to try again. */
static const char *phase_of(cir_http_request *request) {
  curl_off_t resolved = 0, connected = 0, ready = 0, answered = 0;
  curl_easy_getinfo(request->easy, CURLINFO_NAMELOOKUP_TIME_T, &resolved);
  curl_easy_getinfo(request->easy, CURLINFO_CONNECT_TIME_T, &connected);
  curl_easy_getinfo(request->easy, CURLINFO_PRETRANSFER_TIME_T, &ready);
  curl_easy_getinfo(request->easy, CURLINFO_STARTTRANSFER_TIME_T, &answered);
  if (request->head_complete)
    return "body";
  if (answered > 0)
    return "headers";
  if (ready > 0)
    return "answer";
  if (connected > 0)
    return "tls";
  char *address = NULL; /* known from the moment that TCP is connected */
  curl_easy_getinfo(request->easy, CURLINFO_PRIMARY_IP, &address);
  if (address != NULL && address[0] != '\0')
    return "tls";
  return resolved > 0 ? "connect" : "resolve";
}

/* The stable word for a failed transfer. The system's error tells refused from unreachable where
 * curl does not. */
static const char *code_of(cir_http_request *request) {
  long problem = 0;
  curl_easy_getinfo(request->easy, CURLINFO_OS_ERRNO, &problem);
  switch (request->result) {
  case CURLE_COULDNT_RESOLVE_HOST:
  case CURLE_COULDNT_RESOLVE_PROXY:
    return "resolve";
  case CURLE_OPERATION_TIMEDOUT:
    return "timeout";
  case CURLE_COULDNT_CONNECT:
    return problem == 0 || problem == ENOENT ? "refused" : cir_code_of_uv(-(int)problem);
  case CURLE_RECV_ERROR:
  case CURLE_SEND_ERROR:
    return "reset";
  case CURLE_SSL_CONNECT_ERROR:
    return problem == ECONNRESET ? "reset" : "protocol";
  case CURLE_GOT_NOTHING:
  case CURLE_PARTIAL_FILE:
    return "closed";
  case CURLE_URL_MALFORMAT:
    return "invalid";
  case CURLE_SSL_CACERT_BADFILE:
  case CURLE_READ_ERROR:
    return "io";
  default:
    return "protocol";
  }
}

void cir_http_push_error(lua_State *L, cir_http_request *request) {
  if (request->cancelled) {
    cir_push_error(L, "cancelled", "the request was cancelled");
  } else if (request->fault != NULL) {
    cir_push_error(L, request->fault, "%s", request->fault_text);
  } else {
    const char *text =
        request->error[0] != '\0' ? request->error : curl_easy_strerror(request->result);
    if (request->result == CURLE_OUT_OF_MEMORY) /* curl's word for a line beyond its own limit */
      text = "a header line of the answer is longer than 100 KB, or there is no memory";
    cir_push_error(L, code_of(request), "%s", text);
    cir_error_field(L, "curl", curl_easy_strerror(request->result));
  }
  if (request->in_multi || request->finished)
    cir_error_field(L, "phase", phase_of(request));
  lua_pushinteger(L, request->received);
  lua_setfield(L, -2, "received");
  long status = 0;
  if (request->head_complete &&
      curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status) == CURLE_OK) {
    lua_pushinteger(L, status);
    lua_setfield(L, -2, "status");
  }
}
