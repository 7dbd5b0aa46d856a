/* options.c - see options.h. */
#include "options.h"

#include <lauxlib.h>
#include <string.h>

const char *cir_string_option(lua_State *L, int index, const char *name) {
  int type = lua_getfield(L, index, name);
  if (type == LUA_TNIL)
    return NULL;
  if (type != LUA_TSTRING)
    luaL_error(L, "option '%s' must be a string, not %s", name, luaL_typename(L, -1));
  size_t length;
  const char *text = lua_tolstring(L, -1, &length);
  if (strlen(text) != length)
    luaL_error(L, "option '%s' holds a zero byte", name);
  return text;
}

lua_Integer cir_integer_option(lua_State *L, int index, const char *name, lua_Integer lowest,
                               lua_Integer highest, lua_Integer otherwise) {
  lua_Integer value = otherwise;
  if (lua_getfield(L, index, name) != LUA_TNIL) {
    int exact;
    value = lua_tointegerx(L, -1, &exact);
    if (!exact || value < lowest || value > highest)
      luaL_error(L, "option '%s' must be an integer from %I to %I", name, lowest, highest);
  }
  lua_pop(L, 1);
  return value;
}

void cir_known_options(lua_State *L, int index, const char *const *known) {
  lua_pushnil(L);
  while (lua_next(L, index) != 0) {
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : NULL;
    const char *const *name = known;
    while (*name != NULL && (key == NULL || strcmp(*name, key) != 0))
      name++;
    if (*name == NULL)
      luaL_error(L, "unknown option '%s'", key != NULL ? key : luaL_tolstring(L, -2, NULL));
    lua_pop(L, 1);
  }
}
