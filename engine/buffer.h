/*
 * buffer.h - a growing run of bytes, for what arrives in a C callback that must not call Lua.
 *
 * The bytes between `start` and `length` are the content. Growth failure is reported, never fatal:
 * the callers are libraries' callbacks, which can refuse what they are given.
 */
#ifndef CIR_BUFFER_H
#define CIR_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct cir_buffer {
  char *data;
  size_t start, length, capacity; /* content is data[start .. length) */
} cir_buffer;

static inline size_t cir_buffer_size(const cir_buffer *buffer) {
  return buffer->length - buffer->start;
}

static inline const char *cir_buffer_bytes(const cir_buffer *buffer) {
  return buffer->data == NULL ? "" : buffer->data + buffer->start;
}

/* Forget the content and keep the room. */
static inline void cir_buffer_clear(cir_buffer *buffer) {
  buffer->start = buffer->length = 0;
}

/* Give the memory back; the buffer may be used again. */
static inline void cir_buffer_free(cir_buffer *buffer) {
  free(buffer->data);
  *buffer = (cir_buffer){NULL, 0, 0, 0};
}

/* Append size bytes. Returns false, with the content as it was, when there is no memory. */
static inline bool cir_buffer_add(cir_buffer *buffer, const void *bytes, size_t size) {
  if (size == 0)
    return true;
  if (buffer->start > 0 && buffer->start == buffer->length)
    cir_buffer_clear(buffer);
  if (buffer->capacity - buffer->length < size && buffer->start > 0) {
    memmove(buffer->data, buffer->data + buffer->start, cir_buffer_size(buffer));
    buffer->length -= buffer->start;
    buffer->start = 0;
  }
  if (buffer->capacity - buffer->length < size) {
    size_t capacity = buffer->capacity > 0 ? buffer->capacity : 512;
    while (capacity - buffer->length < size) {
      if (capacity > (size_t)-1 / 2)
        return false;
      capacity *= 2;
    }
    char *data = realloc(buffer->data, capacity);
    if (data == NULL)
      return false;
    buffer->data = data;
    buffer->capacity = capacity;
  }
  memcpy(buffer->data + buffer->length, bytes, size);
  buffer->length += size;
  return true;
}

/* Move up to size bytes from the front of the content to `to`. Returns how many. */
static inline size_t cir_buffer_take(cir_buffer *buffer, void *to, size_t size) {
  size_t have = cir_buffer_size(buffer);
  if (size > have)
    size = have;
  if (size > 0)
    memcpy(to, buffer->data + buffer->start, size);
  buffer->start += size;
  return size;
}

#endif
