/* options.h - reading option tables, the way every module of the engine refuses a wrong one. */
#ifndef CIR_OPTIONS_H
#define CIR_OPTIONS_H

#include <lua.h>

/* Raise a misuse for keys of the table at index that are not in known (ends with NULL). [-0, +0, v]
 */
void cir_known_options(lua_State *L, int index, const char *const *known);

/* The string option, or NULL. It stays on the stack, so that it lives as long as the call. [-0, +1,
 * v] */
const char *cir_string_option(lua_State *L, int index, const char *name);

/* The integer option within lowest..highest, or otherwise. [-0, +0, v] */
lua_Integer cir_integer_option(lua_State *L, int index, const char *name, lua_Integer lowest,
                               lua_Integer highest, lua_Integer otherwise);

#endif
