/*
 * callback.h - the one way in which C calls Lua, and the one way in which C reports an error.
 *
 * A callback is a Lua function kept in the registry. It is called on the main state, with a message
 * handler, and never before the engine call that took it has returned (see cir_defer). What it
 * raises is reported and ends the process with status 1: a callback of the standard library does
 * not raise.
 */
#ifndef CIR_CALLBACK_H
#define CIR_CALLBACK_H

#include "runtime.h"
#include <lauxlib.h>

#define CIR_NO_CALLBACK LUA_NOREF

/*
 * The pointer in the handle of that class at index, for a class whose finaliser clears it. Raises
 * when it has: Lua finalises in an order of its own, so a finaliser may still use a handle that was
 * finalised before it. [-0, +0, v]
 */
void *cir_check_handle(lua_State *L, int index, const char *name);

/* Keep the function at index; raises a Lua error when it is none. [-0, +0, v] */
int cir_callback_ref(lua_State *L, int index);

/* Keep the function at index in place of the one kept as *ref, which stays when this raises. [-0,
 * +0, v] */
void cir_callback_replace(lua_State *L, int index, int *ref);

/*
 * Keep the function at `callback` and the value at `value`, both or neither: what is kept when the
 * second finds no memory would be kept for ever. For an operation this is the last that may raise.
 * [-0, +0, v]
 */
void cir_callback_ref_both(lua_State *L, int callback, int *callback_ref, int value,
                           int *value_ref);

/* Let go of *ref (CIR_NO_CALLBACK is ignored) and set it to CIR_NO_CALLBACK. [-0, +0, -] */
void cir_callback_unref(cir_runtime *rt, int *ref);

/*
 * Call the function kept as ref with the nargs topmost values of the main state, which are popped.
 * The function stays kept. Never throws; safe from libuv, libcurl and libssh2 callbacks that are
 * not themselves called from Lua.
 */
void cir_callback_call(cir_runtime *rt, int ref, int nargs);

/* cir_callback_call, then cir_callback_unref: for an operation's one completion. *ref is cleared
 * before the call. */
void cir_callback_finish(cir_runtime *rt, int *ref, int nargs);

/*
 * Push an error value as the engine's callbacks pass it: a plain table {code =, message =}. `code`
 * is one of the stable words of lua/ciranda/io/error.lua ("timeout", "refused", "cancelled", ...).
 * [-0, +1, m]
 */
void cir_push_error(lua_State *L, const char *code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Add a string field to the error table on the top of the stack. [-0, +0, m] */
void cir_error_field(lua_State *L, const char *name, const char *value);

/* The stable word for a libuv status or an errno made negative: UV_ECONNREFUSED -> "refused",
 * unknown -> "io". */
const char *cir_code_of_uv(int status);

/* The runner given to luv_set_callback: the same message handler and the same report for luv's
 * callbacks. */
int cir_luv_call(lua_State *L, int nargs, int nresults, int flags);

#endif
