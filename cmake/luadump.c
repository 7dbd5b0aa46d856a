/*
 * luadump.c - compiles a Lua module for the program: luadump SOURCE CHUNKNAME OUTPUT.
 *
 * It is built with the very liblua that the program links, so that the two agree on the form. Nothing is stripped:
 * line numbers and names are in tracebacks as they are for a source. Compiling here saves every start of a recipe
 * some ten milliseconds.
 */
#include <lauxlib.h>
#include <lua.h>
#include <stdio.h>

static int write_out(lua_State *L, const void *bytes, size_t size, void *file) {
  (void)L;
  return size > 0 && fwrite(bytes, 1, size, file) != size;
}

int main(int argc, char **argv) {
  if (argc != 4) {
    fputs("usage: luadump SOURCE CHUNKNAME OUTPUT\n", stderr);
    return 2;
  }
  lua_State *L = luaL_newstate();
  FILE *source = fopen(argv[1], "rb");
  if (L == NULL || source == NULL) {
    perror(argv[1]);
    return 1;
  }
  luaL_Buffer buffer;
  luaL_buffinit(L, &buffer);
  size_t count;
  do {
    count = fread(luaL_prepbuffer(&buffer), 1, LUAL_BUFFERSIZE, source);
    luaL_addsize(&buffer, count);
  } while (count > 0);
  fclose(source);
  luaL_pushresult(&buffer);
  size_t size;
  const char *text = lua_tolstring(L, -1, &size);
  if (luaL_loadbufferx(L, text, size, argv[2], "t") != LUA_OK) {
    fprintf(stderr, "%s\n", lua_tostring(L, -1));
    return 1;
  }
  FILE *output = fopen(argv[3], "wb");
  if (output == NULL || lua_dump(L, write_out, output, 0) != 0 || fclose(output) != 0) {
    perror(argv[3]);
    return 1;
  }
  lua_close(L);
  return 0;
}
