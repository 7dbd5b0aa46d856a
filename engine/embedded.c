/* embedded.c - see embedded.h. */
#define ZLIB_CONST
#include "embedded.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

static int by_name(const void *name, const void *module) {
  return strcmp(name, ((const cir_embedded *)module)->name);
}

const cir_embedded *cir_embedded_find(const char *name) {
  return bsearch(name, cir_embedded_modules, cir_embedded_count, sizeof(cir_embedded), by_name);
}

int cir_embedded_unpack(const cir_blob *blob, char *room) {
  z_stream stream;
  memset(&stream, 0, sizeof stream);
  stream.next_in = blob->packed;
  stream.avail_in = (uInt)blob->packed_size;
  stream.next_out = (unsigned char *)room;
  stream.avail_out = (uInt)blob->size;
  if (inflateInit2(&stream, MAX_WBITS + 16) != Z_OK) /* 16: a gzip header */
    return -1;
  int status = inflate(&stream, Z_FINISH);
  inflateEnd(&stream);
  return status == Z_STREAM_END && stream.avail_out == 0 ? 0 : -1;
}
