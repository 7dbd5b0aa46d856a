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
  /* Bare deflate: with a header, zlib would add up the dictionary for every blob. */
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK)
    return -1;
  inflateSetDictionary(&stream, cir_embedded_dictionary, (uInt)cir_embedded_dictionary_size);
  int status = inflate(&stream, Z_FINISH);
  inflateEnd(&stream);
  if (status != Z_STREAM_END || stream.avail_out != 0)
    return -1;
  return adler32(1, (unsigned char *)room, (uInt)blob->size) == blob->sum ? 0 : -1;
}
