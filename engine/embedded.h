/* embedded.h - the Lua modules and the guard that the build puts into the program (cmake/embed.cmake). */
#ifndef CIR_EMBEDDED_H
#define CIR_EMBEDDED_H

#include <stddef.h>

typedef struct {
  const char *name; /* as require takes it */
  const char *path; /* below the source directory of the modules: the chunk's name, and where --lua-dir looks */
  const unsigned char *text;
  size_t size;
} cir_embedded;

/* Sorted by name (strcmp). */
extern const cir_embedded cir_embedded_modules[];
extern const size_t cir_embedded_count;

extern const unsigned char cir_guard_bytes[];
extern const size_t cir_guard_size; /* 0: none */

/* The module of that name, or NULL. */
const cir_embedded *cir_embedded_find(const char *name);

#endif
