/*
 * ssh_wire.h - reading SSH's wire format (RFC 4251, section 5) from bytes that may be hostile.
 *
 * A reader never goes past its end: after the first read that would, `bad` is set, and every later
 * read gives nothing. Callers read a whole structure and look at `bad` once.
 */
#ifndef CIR_SSH_WIRE_H
#define CIR_SSH_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct cir_wire {
  const uint8_t *at;
  size_t left;
  bool bad;
} cir_wire;

/* Bytes that someone else owns. */
typedef struct cir_span {
  const uint8_t *data;
  size_t size;
} cir_span;

static inline cir_wire cir_wire_of(const void *data, size_t size) {
  return (cir_wire){.at = data, .left = size, .bad = false};
}

static inline cir_span cir_wire_bytes(cir_wire *wire, size_t size) {
  if (wire->bad || size > wire->left) {
    wire->bad = true;
    return (cir_span){(const uint8_t *)"", 0};
  }
  cir_span span = {wire->at, size};
  wire->at += size;
  wire->left -= size;
  return span;
}

static inline uint32_t cir_wire_u32(cir_wire *wire) {
  cir_span span = cir_wire_bytes(wire, 4);
  if (span.size != 4)
    return 0;
  const uint8_t *p = span.data;
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* A string: its length, then its bytes. */
static inline cir_span cir_wire_string(cir_wire *wire) {
  return cir_wire_bytes(wire, cir_wire_u32(wire));
}

/* A number that is not negative (an mpint), without the leading zero byte that keeps it positive.
 */
static inline cir_span cir_wire_number(cir_wire *wire) {
  cir_span span = cir_wire_string(wire);
  if (span.size > 0 && (span.data[0] & 0x80) != 0)
    wire->bad = true;
  while (span.size > 0 && span.data[0] == 0) {
    span.data++;
    span.size--;
  }
  return span;
}

static inline bool cir_span_is(cir_span span, const char *text) {
  return span.size == strlen(text) && memcmp(span.data, text, span.size) == 0;
}

static inline bool cir_span_equal(cir_span a, cir_span b) {
  return a.size == b.size && memcmp(a.data, b.data, a.size) == 0;
}

#endif
