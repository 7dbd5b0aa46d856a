/* embedded.h - the Lua modules and the guard that the build puts into the program
 * (cmake/embed.lua). */
#ifndef CIR_EMBEDDED_H
#define CIR_EMBEDDED_H

#include <stddef.h>

/* Bytes that deflate has packed with the dictionary. */
typedef struct {
  const unsigned char *packed;
  size_t packed_size;
  size_t size;       /* unpacked; 0: there are none */
  unsigned long sum; /* Adler-32 of the unpacked bytes */
} cir_blob;

typedef struct {
  const char *name; /* as require takes it */
  const char *path; /* below the source directory: the chunk's name, and where --lua-dir looks */
  cir_blob chunk;   /* compiled, or the source without its comments */
} cir_embedded;

/* Sorted by name (strcmp). */
extern const cir_embedded cir_embedded_modules[];
extern const size_t cir_embedded_count;

extern const cir_blob cir_embedded_guard;
extern const char cir_embedded_guard_sha256[]; /* of its bytes unpacked, in hexadecimal */

/* What the modules share, as it is: unpacking it would take longer than all modules of a short
 * start. */
extern const unsigned char cir_embedded_dictionary[];
extern const size_t cir_embedded_dictionary_size;

/* The module of that name, or NULL. */
const cir_embedded *cir_embedded_find(const char *name);

/* Unpacks into room, which has blob->size bytes. Returns 0, or -1 when the program's file is
 * damaged. */
int cir_embedded_unpack(const cir_blob *blob, char *room);

#endif
