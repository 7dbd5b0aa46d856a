/*
 * modules.h - the Lua modules that C provides. Each is registered in package.preload under the name
 * in the comment, and is private: users see only what lua/ciranda makes of it. Each may be opened
 * more than once.
 */
#ifndef CIR_MODULES_H
#define CIR_MODULES_H

#include <lua.h>

int luaopen_ciranda_core_engine(lua_State *L); /* ciranda.core.engine: runtime.c, interrupt.c */
int luaopen_ciranda_core_http(lua_State *L);   /* ciranda.core.http: http_client.c */
int luaopen_ciranda_core_server(lua_State *L); /* ciranda.core.server: http_server.c */
int luaopen_ciranda_core_ssh(lua_State *L);    /* ciranda.core.ssh: ssh_module.c */
int luaopen_ciranda_core_crypto(lua_State *L); /* ciranda.core.crypto: crypto.c */
int luaopen_ciranda_core_edit(lua_State *L);   /* ciranda.core.edit: line_editor.c */
int luaopen_ciranda_core_keeper(lua_State *L); /* ciranda.core.keeper: keeper.c */
int luaopen_ciranda_core_json(lua_State *L);   /* ciranda.core.json: json_scan.c */

#endif
