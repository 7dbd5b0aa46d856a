/*
 * embed.c - runs cmake/embed.lua at build time: embed SCRIPT ARGUMENT...
 *
 * It is built with the very liblua that the program links, so that the two agree on the form of
 * compiled chunks, and gives the script what Lua has not: deflate.
 */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

/* deflate(bytes, dictionary) -> packed bytes, Adler-32 of the bytes. [-0, +2, e] */
static int l_deflate(lua_State *L) {
  size_t size, dictionary_size;
  const char *bytes = luaL_checklstring(L, 1, &size);
  const char *dictionary = luaL_checklstring(L, 2, &dictionary_size);
  z_stream stream;
  memset(&stream, 0, sizeof stream);
  if (deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, -MAX_WBITS, MAX_MEM_LEVEL,
                   Z_DEFAULT_STRATEGY) != Z_OK)
    return luaL_error(L, "zlib has no memory");
  deflateSetDictionary(&stream, (const Bytef *)dictionary, (uInt)dictionary_size);
  uLong bound = deflateBound(&stream, (uLong)size);
  Bytef *room = lua_newuserdatauv(L, bound, 0);
  stream.next_in = (z_const Bytef *)bytes;
  stream.avail_in = (uInt)size;
  stream.next_out = room;
  stream.avail_out = (uInt)bound;
  int status = deflate(&stream, Z_FINISH);
  size_t packed = stream.total_out;
  deflateEnd(&stream);
  if (status != Z_STREAM_END)
    return luaL_error(L, "deflate: %d", status);
  lua_pushlstring(L, (const char *)room, packed);
  lua_pushinteger(L, (lua_Integer)adler32(1, (const Bytef *)bytes, (uInt)size));
  return 2;
}

int main(int argc, char **argv) {
  lua_State *L = luaL_newstate();
  if (L == NULL || argc < 2) {
    fputs("usage: embed SCRIPT ARGUMENT...\n", stderr);
    return 2;
  }
  luaL_openlibs(L);
  lua_register(L, "deflate", l_deflate);
  int status = luaL_loadfile(L, argv[1]);
  if (status == LUA_OK) {
    luaL_checkstack(L, argc, NULL);
    for (int i = 2; i < argc; i++)
      lua_pushstring(L, argv[i]);
    status = lua_pcall(L, argc - 2, 0, 0);
  }
  if (status != LUA_OK)
    fprintf(stderr, "%s\n", lua_tostring(L, -1));
  lua_close(L);
  return status == LUA_OK ? 0 : 1;
}
