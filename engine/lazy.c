/* lazy.c - see lazy.h. */
#include "lazy.h"
#include "lazy_curl.h"
#include "lazy_edit.h"
#include "lazy_microhttpd.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

const char *cir_lazy_load(const char *library, const cir_lazy_symbol *symbols, size_t count) {
  static char problem[256];
  void *handle = dlopen(library, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == NULL) {
    snprintf(problem, sizeof problem, "%s cannot be loaded: %s", library, dlerror());
    return problem;
  }
  for (size_t i = 0; i < count; i++) {
    void *address = dlsym(handle, symbols[i].name);
    if (address == NULL) {
      snprintf(problem, sizeof problem, "%s has no %s: it is too old", library, symbols[i].name);
      return problem;
    }
    *(void **)(void *)symbols[i].slot = address;
  }
  return NULL;
}

#define SYMBOL_CURL(name) {"curl_" #name, (void (**)(void))(void *)&cir_curl.name},
#define SYMBOL_MICROHTTPD(name) {"MHD_" #name, (void (**)(void))(void *)&cir_microhttpd.name},

struct cir_curl_functions cir_curl;

const char *cir_curl_load(void) {
  static const cir_lazy_symbol symbols[] = {CIR_CURL_FUNCTIONS(SYMBOL_CURL)};
  static bool loaded;
  const char *problem =
      loaded ? NULL : cir_lazy_load(CIR_CURL_LIBRARY, symbols, sizeof symbols / sizeof symbols[0]);
  loaded = problem == NULL;
  return problem;
}

struct cir_microhttpd_functions cir_microhttpd;

const char *cir_microhttpd_load(void) {
  static const cir_lazy_symbol symbols[] = {CIR_MICROHTTPD_FUNCTIONS(SYMBOL_MICROHTTPD)};
  static bool loaded;
  const char *problem =
      loaded ? NULL
             : cir_lazy_load(CIR_MICROHTTPD_LIBRARY, symbols, sizeof symbols / sizeof symbols[0]);
  loaded = problem == NULL;
  return problem;
}

#define SYMBOL_EDIT(left, right)                                                                   \
  {#left "_" #right, (void (**)(void))(void *)&cir_edit.of_##left##_##right},

struct cir_edit_symbols cir_edit;

const char *cir_edit_load(void) {
  static const cir_lazy_symbol symbols[] = {CIR_EDIT_SYMBOLS(SYMBOL_EDIT)};
  static bool loaded;
  const char *problem =
      loaded ? NULL : cir_lazy_load(CIR_EDIT_LIBRARY, symbols, sizeof symbols / sizeof symbols[0]);
  loaded = problem == NULL;
  return problem;
}
