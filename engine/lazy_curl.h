/* lazy_curl.h - curl/curl.h under its own names, loaded by cir_curl_load(): see lazy.h. */
#ifndef CIR_LAZY_CURL_H
#define CIR_LAZY_CURL_H

#include "lazy.h"

#define CURL_DISABLE_TYPECHECK /* its macros name the functions that are pointers here */
#include <curl/curl.h>

/* The ABI of the headers that this is built with. */
#define CIR_CURL_LIBRARY "libcurl.so.4"

/* clang-format off */
#define CIR_CURL_FUNCTIONS(X)                                                                      \
  X(easy_cleanup)                                                                                  \
  X(easy_getinfo) X(easy_init) X(easy_pause) X(easy_recv) X(easy_send) X(easy_setopt) X(easy_strerror) X(global_init)        \
      X(multi_add_handle) X(multi_assign) X(multi_cleanup) X(multi_info_read) X(multi_init)        \
          X(multi_remove_handle) X(multi_setopt) X(multi_socket_action) X(multi_strerror)          \
              X(multi_timeout) X(slist_append) X(slist_free_all)
/* clang-format on */

#define CIR_CURL_FUNCTION(name) __typeof__(curl_##name) *name;
extern struct cir_curl_functions { CIR_CURL_FUNCTIONS(CIR_CURL_FUNCTION) } cir_curl;

/* Load the library once. Returns NULL, or a text that says why it cannot be. */
const char *cir_curl_load(void);

/* curl.h has macros of these names, which only count arguments. */
#undef curl_easy_getinfo
#undef curl_easy_setopt
#undef curl_multi_setopt

#define curl_easy_cleanup (cir_curl.easy_cleanup)
#define curl_easy_getinfo (cir_curl.easy_getinfo)
#define curl_easy_init (cir_curl.easy_init)
#define curl_easy_pause (cir_curl.easy_pause)
#define curl_easy_recv (cir_curl.easy_recv)
#define curl_easy_send (cir_curl.easy_send)
#define curl_easy_setopt (cir_curl.easy_setopt)
#define curl_easy_strerror (cir_curl.easy_strerror)
#define curl_global_init (cir_curl.global_init)
#define curl_multi_add_handle (cir_curl.multi_add_handle)
#define curl_multi_assign (cir_curl.multi_assign)
#define curl_multi_cleanup (cir_curl.multi_cleanup)
#define curl_multi_info_read (cir_curl.multi_info_read)
#define curl_multi_init (cir_curl.multi_init)
#define curl_multi_remove_handle (cir_curl.multi_remove_handle)
#define curl_multi_setopt (cir_curl.multi_setopt)
#define curl_multi_socket_action (cir_curl.multi_socket_action)
#define curl_multi_strerror (cir_curl.multi_strerror)
#define curl_multi_timeout (cir_curl.multi_timeout)
#define curl_slist_append (cir_curl.slist_append)
#define curl_slist_free_all (cir_curl.slist_free_all)

#endif
