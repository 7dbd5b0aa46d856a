/*
 * json_decode.c - ciranda.core.json: JSON (RFC 8259) becomes Lua values, exactly, in one pass.
 *
 *   json.decode(text, object, array) -> value, or nil, place, what, invalid
 *   json.null     json.max_depth
 *
 * An integer that fits is a Lua integer, and so is a float that is integral and below 2^53; null is
 * json.null; an empty object or array gets the metatable `object` or `array`. `place` is the byte
 * at which `what` is wrong, and `invalid` says that it is no UTF-8. Control characters in strings
 * are let through. Nothing is allocated but the values, so an error of Lua's leaks nothing.
 */
#include "modules.h"

#include <endian.h>
#include <lauxlib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
  CIR_JSON_DEPTH = 256,   /* deepest nesting */
  CIR_JSON_FORESEEN = 64, /* most places that a table is made with before its content is known */
  CIR_JSON_NAMES = 64,    /* names of fields that are remembered */
  CIR_JSON_NAME = 32,     /* bytes of the longest of these */
  CIR_JSON_DIGITS = 18,   /* so many always fit in 64 bits */
  CIR_JSON_SLOTS = 8,     /* of the stack, for what is read at one depth and a failure */
  CIR_JSON_OBJECT = 2,    /* on the stack: the metatables, then the names */
  CIR_JSON_ARRAY = 3,
  CIR_JSON_FIRST_NAME = 4
};

/*
 * A text that is read. Lua ends every string with a zero byte, which has no place in JSON outside
 * of strings: what looks at one byte after the other needs no other end.
 *
 * What is listed is alike. So a table is made as large as the last one at its depth had to be, and
 * a name that stands in its place among the names is taken from there.
 */
typedef struct reader {
  lua_State *L;
  const unsigned char *text, *at, *end;
  int depth;
  const char *problem; /* with `at` at its place */
  bool invalid;
  unsigned char fields[CIR_JSON_DEPTH + 1], items[CIR_JSON_DEPTH + 1];
  struct {
    const char *bytes; /* of the string on the stack */
    size_t length;
  } names[CIR_JSON_NAMES];
} reader;

/* [-0, +1 on success, m], as all functions below that read something. */
static bool read_value(reader *r);

static bool fail(reader *r, const char *problem) {
  r->problem = r->at == r->end ? "it ends too early" : problem;
  return false;
}

static void skip_space(reader *r) {
  while (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t')
    r->at++;
}

/* --- strings ---------------------------------------------------------------------------------- */

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

/* The high bit of the lowest byte that is 0 is set, and none below it but of bytes from 0x81. */
static uint64_t mark_zero(uint64_t bytes) {
  return (bytes - CIR_BYTES(1)) & CIR_BYTES(0x80);
}

/* Where the plain part of a string that goes on at `at` ends: what is neither a quote nor a
 * backslash and is ASCII is gone over eight bytes at a time. */
static const unsigned char *plain(const unsigned char *at, const unsigned char *end) {
  for (uint64_t word; end - at >= (ptrdiff_t)sizeof word; at += sizeof word) {
    memcpy(&word, at, sizeof word);
    word = le64toh(word);
    uint64_t marks = (word & CIR_BYTES(0x80)) | mark_zero(word ^ CIR_BYTES('"')) |
                     mark_zero(word ^ CIR_BYTES('\\'));
    if (marks != 0)
      return at + __builtin_ctzll(marks) / 8;
  }
  while (at < end && *at < 0x80 && *at != '"' && *at != '\\')
    at++;
  return at;
}

/* The four hexadecimal digits at `at`, or -1. */
static int hexadecimal(const unsigned char *at) {
  int value = 0;
  for (int i = 0; i < 4; i++) {
    unsigned char byte = at[i];
    if (byte >= '0' && byte <= '9')
      value = value * 16 + (byte - '0');
    else if ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'f')
      value = value * 16 + ((byte | 0x20) - 'a' + 10);
    else
      return -1;
  }
  return value;
}

/* Write a code point as UTF-8. Returns the place behind it. */
static char *put_utf8(char *to, int code) {
  if (code < 0x80) {
    *to++ = (char)code;
    return to;
  }
  if (code < 0x800) {
    *to++ = (char)(0xC0 | (code >> 6));
  } else {
    if (code < 0x10000) {
      *to++ = (char)(0xE0 | (code >> 12));
    } else {
      *to++ = (char)(0xF0 | (code >> 18));
      *to++ = (char)(0x80 | ((code >> 12) & 0x3F));
    }
    *to++ = (char)(0x80 | ((code >> 6) & 0x3F));
  }
  *to++ = (char)(0x80 | (code & 0x3F));
  return to;
}

/* What the escape whose backslash is at r->at stands for, which is gone over; -1 when it is none.
 * The string's closing quote is behind it, so it ends the digits at the latest. */
static int read_escape(reader *r) {
  static const char LETTERS[] = "\"\\/bfnrt", MEANT[] = "\"\\/\b\f\n\r\t";
  const unsigned char *at = r->at + 1;
  const char *letter = memchr(LETTERS, *at, sizeof LETTERS - 1);
  if (letter != NULL) {
    r->at += 2;
    return MEANT[letter - LETTERS];
  }
  int code = *at == 'u' ? hexadecimal(at + 1) : -1;
  if (code < 0 || (code >= 0xDC00 && code < 0xE000))
    return -1;
  r->at += 6;
  if (code < 0xD800 || code >= 0xE000)
    return code;
  int low = r->at[0] == '\\' && r->at[1] == 'u' ? hexadecimal(r->at + 2) : -1;
  if (low < 0xDC00 || low >= 0xE000) {
    r->at -= 6;
    return -1;
  }
  r->at += 6;
  return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
}

/* Push the string from r->at to its closing quote at `end`, without its escapes: each is longer
 * than what it stands for. */
static bool unescape(reader *r, const unsigned char *end) {
  luaL_Buffer buffer;
  char *room = luaL_buffinitsize(r->L, &buffer, (size_t)(end - r->at)), *to = room;
  while (r->at < end) {
    if (*r->at != '\\') {
      *to++ = (char)*r->at++;
      continue;
    }
    int code = read_escape(r);
    if (code < 0)
      return fail(r, "an escape that there is none of");
    to = put_utf8(to, code);
  }
  luaL_pushresultsize(&buffer, (size_t)(to - room));
  return true;
}

/* Find the closing quote of the string that begins at r->at, behind its opening one; NULL after a
 * failure. */
static const unsigned char *closing_quote(reader *r, bool *escaped) {
  const unsigned char *at = r->at;
  *escaped = false;
  while (*(at = plain(at, r->end)) != '"') {
    if (at == r->end) {
      r->at = at;
      fail(r, "");
      return NULL;
    }
    if (*at == '\\') {
      *escaped = true;
      at += at[1] == '"' || at[1] == '\\' ? 2 : 1;
      continue;
    }
    size_t length = sequence(at, r->end);
    if (length == 0) {
      r->at = at;
      r->problem = "not valid UTF-8";
      r->invalid = true;
      return NULL;
    }
    at += length;
  }
  return at;
}

static bool read_string(reader *r) {
  bool escaped;
  r->at++;
  const unsigned char *end = closing_quote(r, &escaped);
  if (end == NULL || (escaped && !unescape(r, end)))
    return false;
  if (!escaped)
    lua_pushlstring(r->L, (const char *)r->at, (size_t)(end - r->at));
  r->at = end + 1;
  return true;
}

/* A string that is a field's name: a short one is looked for among those that are remembered, which
 * saves Lua from hashing it. */
static bool read_name(reader *r) {
  const unsigned char *at = r->at + 1;
  size_t length = (size_t)(plain(at, r->end) - at);
  if (length == 0 || length > CIR_JSON_NAME || at[length] != '"')
    return read_string(r);
  size_t slot = (at[0] + at[length - 1] * 3u + length * 5u) % CIR_JSON_NAMES;
  int index = CIR_JSON_FIRST_NAME + (int)slot;
  if (r->names[slot].length != length || memcmp(r->names[slot].bytes, at, length) != 0) {
    r->names[slot].bytes = lua_pushlstring(r->L, (const char *)at, length);
    r->names[slot].length = length;
    lua_replace(r->L, index);
  }
  lua_pushvalue(r->L, index);
  r->at = at + length + 1;
  return true;
}

/* --- numbers and words ------------------------------------------------------------------------ */

static bool is_digit(unsigned char byte) {
  return byte >= '0' && byte <= '9';
}

/* Go over digits, of which there must be one. */
static bool skip_digits(reader *r) {
  if (!is_digit(*r->at))
    return fail(r, "a digit was expected");
  do
    r->at++;
  while (is_digit(*r->at));
  return true;
}

/* A number that is long or has a fraction or an exponent, from `from` to r->at: Lua's own reader,
 * which knows the locale's decimal point, has each digit count. */
static bool push_number(reader *r, const unsigned char *from) {
  const lua_Number exact = 9007199254740992.0; /* 2^53 */
  lua_State *L = r->L;
  const char *text = lua_pushlstring(L, (const char *)from, (size_t)(r->at - from));
  if (lua_stringtonumber(L, text) == 0) {
    r->at = from;
    return fail(r, "a number that is too long");
  }
  lua_remove(L, -2);
  lua_Number number = lua_tonumber(L, -1);
  int integral;
  lua_Integer integer = lua_tointegerx(L, -1, &integral);
  if (integral && number > -exact && number < exact) {
    lua_pop(L, 1);
    lua_pushinteger(L, integer);
  }
  return true;
}

static bool read_number(reader *r) {
  const unsigned char *from = r->at;
  r->at += *from == '-';
  const unsigned char *digits = r->at;
  lua_Unsigned value = 0;
  if (*digits == '0')
    r->at++;
  else if (!skip_digits(r))
    return false;
  bool plain_integer = *r->at != '.' && (*r->at | 0x20) != 'e';
  if (plain_integer && r->at - digits <= CIR_JSON_DIGITS) {
    for (const unsigned char *at = digits; at < r->at; at++)
      value = value * 10 + (lua_Unsigned)(*at - '0');
    lua_pushinteger(r->L, digits == from ? (lua_Integer)value : -(lua_Integer)value);
    return true;
  }
  if (*r->at == '.') {
    r->at++;
    if (!skip_digits(r))
      return false;
  }
  if ((*r->at | 0x20) == 'e') {
    r->at++;
    r->at += *r->at == '+' || *r->at == '-';
    if (!skip_digits(r))
      return false;
  }
  return push_number(r, from);
}

/* Go over a word. The text may end in it: strncmp stops there. */
static bool read_word(reader *r, const char *word) {
  size_t length = strlen(word);
  if (strncmp((const char *)r->at, word, length) != 0)
    return fail(r, "a value was expected");
  r->at += length;
  return true;
}

/* --- arrays and objects ----------------------------------------------------------------------- */

/* Go into an array or object, to its first item or its end. [-0, +0, m] */
static bool enter(reader *r) {
  if (r->depth == CIR_JSON_DEPTH)
    return fail(r, "it is nested too deeply");
  luaL_checkstack(r->L, CIR_JSON_SLOTS, "JSON");
  r->depth++;
  r->at++;
  skip_space(r);
  return true;
}

/* Behind an item: go to the next one, or to what closes. Returns false at the end, and after a
 * failure. */
static bool next_item(reader *r, char closing, const char *expected) {
  skip_space(r);
  if (*r->at == ',') {
    r->at++;
    skip_space(r);
    return true;
  }
  return *r->at != closing && fail(r, expected);
}

/* Go out of an array or object that had `count` items. */
static bool leave(reader *r, unsigned char *foreseen, size_t count) {
  if (r->problem != NULL)
    return false;
  *foreseen = (unsigned char)(count < CIR_JSON_FORESEEN ? count : CIR_JSON_FORESEEN);
  r->depth--;
  r->at++;
  return true;
}

/* Push what is empty. */
static bool leave_empty(reader *r, int metatable) {
  lua_newtable(r->L);
  lua_pushvalue(r->L, metatable);
  lua_setmetatable(r->L, -2);
  r->depth--;
  r->at++;
  return true;
}

static bool read_array(reader *r) {
  if (!enter(r))
    return false;
  if (*r->at == ']')
    return leave_empty(r, CIR_JSON_ARRAY);
  unsigned char *foreseen = &r->items[r->depth];
  lua_createtable(r->L, *foreseen, 0);
  lua_Integer count = 0;
  do {
    if (!read_value(r))
      return false;
    lua_rawseti(r->L, -2, ++count);
  } while (next_item(r, ']', "',' or ']' was expected"));
  return leave(r, foreseen, (size_t)count);
}

static bool read_object(reader *r) {
  if (!enter(r))
    return false;
  if (*r->at == '}')
    return leave_empty(r, CIR_JSON_OBJECT);
  unsigned char *foreseen = &r->fields[r->depth];
  lua_createtable(r->L, 0, *foreseen);
  size_t count = 0;
  do {
    if (*r->at != '"')
      return fail(r, "a name in quotes was expected");
    if (!read_name(r))
      return false;
    skip_space(r);
    if (*r->at != ':')
      return fail(r, "':' was expected");
    r->at++;
    if (!read_value(r))
      return false;
    lua_rawset(r->L, -3);
    count++;
  } while (next_item(r, '}', "',' or '}' was expected"));
  return leave(r, foreseen, count);
}

static bool read_value(reader *r) {
  skip_space(r);
  switch (*r->at) {
  case '"':
    return read_string(r);
  case '{':
    return read_object(r);
  case '[':
    return read_array(r);
  case 't':
  case 'f':
    if (!read_word(r, *r->at == 't' ? "true" : "false"))
      return false;
    lua_pushboolean(r->L, r->at[-2] == 'u');
    return true;
  case 'n':
    if (!read_word(r, "null"))
      return false;
    lua_pushlightuserdata(r->L, NULL);
    return true;
  default:
    return *r->at == '-' || is_digit(*r->at) ? read_number(r) : fail(r, "a value was expected");
  }
}

/* decode(text, object, array) -> value, or nil, place, what, invalid [-0, +1 or +4, e] */
static int l_decode(lua_State *L) {
  size_t size;
  const char *text = luaL_checklstring(L, 1, &size);
  luaL_checktype(L, CIR_JSON_OBJECT, LUA_TTABLE);
  luaL_checktype(L, CIR_JSON_ARRAY, LUA_TTABLE);
  luaL_checkstack(L, CIR_JSON_NAMES + CIR_JSON_SLOTS, "JSON");
  lua_settop(L, CIR_JSON_FIRST_NAME + CIR_JSON_NAMES - 1);
  reader r = {.L = L, .text = (const unsigned char *)text};
  r.at = r.text;
  r.end = r.text + size;
  if (read_value(&r)) {
    skip_space(&r);
    if (r.at == r.end)
      return 1;
    fail(&r, "something follows the value");
  }
  lua_pushnil(L);
  lua_pushinteger(L, (lua_Integer)(r.at - r.text) + 1);
  lua_pushstring(L, r.problem);
  lua_pushboolean(L, r.invalid);
  return 4;
}

/* [-0, +1, m] */
int luaopen_ciranda_core_json(lua_State *L) {
  static const luaL_Reg functions[] = {{"decode", l_decode}, {NULL, NULL}};
  luaL_newlib(L, functions);
  lua_pushlightuserdata(L, NULL);
  lua_setfield(L, -2, "null");
  lua_pushinteger(L, CIR_JSON_DEPTH);
  lua_setfield(L, -2, "max_depth");
  return 1;
}
