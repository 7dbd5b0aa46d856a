/* embedded.c - see embedded.h. */
#include "embedded.h"

#include <stdlib.h>
#include <string.h>

static int by_name(const void *name, const void *module) {
  return strcmp(name, ((const cir_embedded *)module)->name);
}

const cir_embedded *cir_embedded_find(const char *name) {
  return bsearch(name, cir_embedded_modules, cir_embedded_count, sizeof(cir_embedded), by_name);
}
