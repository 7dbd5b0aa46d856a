/*
 * json_scan.c - ciranda.core.json: what must be known of a JSON text before lua-cjson decodes it.
 *
 *   json.scan(text) -> bad, special
 *
 * `bad` is the place of the first byte that is not UTF-8, or nil; `special` says whether there is a
 * number, or an empty array or object: only then is what lua-cjson makes of the text to be mended.
 * One pass over the bytes, with no allocation, where Lua takes ten times as long as the decoder.
 */
#include "modules.h"

#include <lauxlib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of the UTF-8 sequence at `at`, whose first byte is no ASCII; 0 when it is none: too long
 * for its value, a surrogate, beyond U+10FFFF or broken. */
static size_t sequence(const unsigned char *at, const unsigned char *end) {
  unsigned char first = *at;
  size_t length = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  if (length == 0 || (size_t)(end - at) < length)
    return 0;
  for (size_t i = 1; i < length; i++)
    if ((at[i] & 0xC0) != 0x80)
      return 0;
  if ((first == 0xE0 && at[1] < 0xA0) || (first == 0xED && at[1] > 0x9F) ||
      (first == 0xF0 && at[1] < 0x90) || (first == 0xF4 && at[1] > 0x8F))
    return 0;
  return length;
}

/* Every byte of a word the same. */
#define CIR_BYTES(byte) (UINT64_C(0x0101010101010101) * (byte))

/* Not 0 when one of the eight bytes is 0; each is below 0x80. */
static uint64_t has_zero(uint64_t bytes) {
  return (bytes - CIR_BYTES(1)) & CIR_BYTES(0x80);
}

/* Where the plain part of a string that goes on at `at` ends, or some bytes before that: what is
 * neither a quote nor a backslash and is ASCII is gone over eight bytes at a time. */
static const unsigned char *plain(const unsigned char *at, const unsigned char *end) {
  for (uint64_t word; end - at >= (ptrdiff_t)sizeof word; at += sizeof word) {
    memcpy(&word, at, sizeof word);
    if ((word & CIR_BYTES(0x80)) != 0 || has_zero(word ^ CIR_BYTES('"')) != 0 ||
        has_zero(word ^ CIR_BYTES('\\')) != 0)
      break;
  }
  return at;
}

static bool is_space(unsigned char byte) {
  return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t';
}

/* Whether nothing stands between the bracket at `at` and the one that closes it. */
static bool is_empty(const unsigned char *at, const unsigned char *end) {
  const unsigned char closing = *at == '[' ? ']' : '}';
  do
    at++;
  while (at < end && is_space(*at));
  return at < end && *at == closing;
}

/* scan(text) -> bad or nil, special [-0, +2, e] */
static int l_scan(lua_State *L) {
  size_t size;
  const unsigned char *text = (const unsigned char *)luaL_checklstring(L, 1, &size);
  const unsigned char *at = text;
  const unsigned char *end = text + size;
  bool special = false;
  bool quoted = false;
  while (at < end) {
    unsigned char byte = *at;
    if (byte >= 0x80) {
      size_t length = sequence(at, end);
      if (length == 0) {
        lua_pushinteger(L, (lua_Integer)(at - text) + 1);
        lua_pushboolean(L, special);
        return 2;
      }
      at += length;
      continue;
    }
    if (byte == '"') {
      quoted = !quoted;
      if (quoted) {
        at = plain(at + 1, end);
        continue;
      }
    } else if (quoted)
      at += byte == '\\' && at + 1 < end && at[1] < 0x80; /* the escaped byte may be a quote */
    else if (byte == '-' || (byte >= '0' && byte <= '9'))
      special = true;
    else if (byte == '[' || byte == '{')
      special = special || is_empty(at, end);
    at++;
  }
  lua_pushnil(L);
  lua_pushboolean(L, special);
  return 2;
}

/* [-0, +1, m] */
int luaopen_ciranda_core_json(lua_State *L) {
  static const luaL_Reg functions[] = {{"scan", l_scan}, {NULL, NULL}};
  luaL_newlib(L, functions);
  return 1;
}
