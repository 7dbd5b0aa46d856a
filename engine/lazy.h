/*
 * lazy.h - libraries that are loaded when they are first used.
 *
 * libcurl and libmicrohttpd pull in some thirty shared objects (Kerberos, LDAP, GnuTLS, ...), whose
 * loading takes three times as long as all else that starting the program does; libedit pulls in
 * three, for the REPL alone. Code that uses them includes lazy_curl.h, lazy_microhttpd.h or
 * lazy_edit.h instead of their headers and calls cir_curl_load(), ... first; from then on their
 * functions are called by their own names. The libraries stay loaded, and their symbols stay local:
 * libcurl's own libssh2 never meets ours.
 */
#ifndef CIR_LAZY_H
#define CIR_LAZY_H

#include <stddef.h>

/* A function's name and where its address goes. */
typedef struct {
  const char *name;
  void (**slot)(void);
} cir_lazy_symbol;

/*
 * Load the library and find count symbols, all or none. Returns NULL, or why it cannot be (a static
 * text, valid until the next call).
 */
const char *cir_lazy_load(const char *library, const cir_lazy_symbol *symbols, size_t count);

#endif
