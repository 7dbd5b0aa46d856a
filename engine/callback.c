/* callback.c - see callback.h. */
#include "callback.h"
#include "interrupt.h"

#include <lualib.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/*
 * Message handler: leaves the error value as it is when it is a table (the library's errors carry
 * their own traceback once one is set here) and appends a traceback to anything else. [-1, +1, m]
 */
static int message_handler(lua_State *L) {
  if (lua_istable(L, 1)) {
    if (lua_getfield(L, 1, "traceback") == LUA_TNIL) {
      luaL_traceback(L, L, NULL, 1);
      lua_setfield(L, 1, "traceback");
    }
    lua_pop(L, 1);
    return 1;
  }
  const char *text = luaL_tolstring(L, 1, NULL);
  luaL_traceback(L, L, text, 1);
  return 1;
}

/*
 * Report the error value on the top of the stack, which is popped: to the function that the library
 * has registered (engine.on_fatal), else to standard error and the end of the process. Never
 * throws.
 */
static void report(lua_State *L) {
  int ref = cir_fatal_ref();
  if (ref != LUA_NOREF && ref != LUA_REFNIL) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, ref);
    lua_insert(L, -2);
    if (lua_pcall(L, 1, 0, 0) == LUA_OK)
      return;
  }
  const char *text = lua_tostring(L, -1);
  fprintf(stderr, "ciranda: error in a callback: %s\n",
          text ? text : "(error value that is no string)");
  fflush(stderr);
  _exit(1);
}

/*
 * Call the function below nargs values, with the message handler, as a turn of the loop
 * (interrupt.h times it). On success leaves nresults (or all, LUA_MULTRET) and returns their
 * number; on failure leaves nothing, has reported the error, and returns -1. [-(nargs+1),
 * +nresults, -]
 */
static int protected_call(cir_runtime *rt, lua_State *L, int nargs, int nresults) {
  int base = lua_gettop(L) - nargs;
  lua_pushcfunction(L, message_handler);
  lua_insert(L, base);
  cir_turn_begin();
  int status = lua_pcall(L, nargs, nresults, base);
  lua_remove(L, base);
  if (status != LUA_OK)
    report(L);
  cir_turn_end(rt);
  return status == LUA_OK ? lua_gettop(L) - base + 1 : -1;
}

void *cir_check_handle(lua_State *L, int index, const char *name) {
  void **handle = luaL_checkudata(L, index, name);
  if (*handle == NULL)
    luaL_argerror(L, index, "it is finalised already");
  return *handle;
}

int cir_callback_ref(lua_State *L, int index) {
  luaL_checktype(L, index, LUA_TFUNCTION);
  lua_pushvalue(L, index);
  return luaL_ref(L, LUA_REGISTRYINDEX);
}

void cir_callback_replace(lua_State *L, int index, int *ref) {
  int fresh = cir_callback_ref(L, index);
  cir_callback_unref(cir_runtime_of(L), ref);
  *ref = fresh;
}

/* (refs, callback, value): refs[0] and refs[1] keep the others. Runs protected. [-3, +0, m] */
static int keep_both(lua_State *L) {
  int *refs = lua_touserdata(L, 1);
  refs[1] = luaL_ref(L, LUA_REGISTRYINDEX);
  refs[0] = luaL_ref(L, LUA_REGISTRYINDEX);
  return 0;
}

void cir_callback_ref_both(lua_State *L, int callback, int *callback_ref, int value,
                           int *value_ref) {
  int refs[2] = {LUA_NOREF, LUA_NOREF};
  luaL_checktype(L, callback, LUA_TFUNCTION);
  callback = lua_absindex(L, callback);
  value = lua_absindex(L, value);
  lua_pushcfunction(L, keep_both);
  lua_pushlightuserdata(L, refs);
  lua_pushvalue(L, callback);
  lua_pushvalue(L, value);
  if (lua_pcall(L, 3, 0, 0) != LUA_OK) {
    luaL_unref(L, LUA_REGISTRYINDEX, refs[1]);
    lua_error(L);
  }
  *callback_ref = refs[0];
  *value_ref = refs[1];
}

void cir_callback_unref(cir_runtime *rt, int *ref) {
  if (*ref != CIR_NO_CALLBACK)
    luaL_unref(cir_main_state(rt), LUA_REGISTRYINDEX, *ref);
  *ref = CIR_NO_CALLBACK;
}

void cir_callback_call(cir_runtime *rt, int ref, int nargs) {
  lua_State *L = cir_main_state(rt);
  if (ref == CIR_NO_CALLBACK) {
    lua_pop(L, nargs);
    return;
  }
  luaL_checkstack(L, 4, "callback");
  lua_rawgeti(L, LUA_REGISTRYINDEX, ref);
  lua_insert(L, -nargs - 1);
  protected_call(rt, L, nargs, 0);
}

void cir_callback_finish(cir_runtime *rt, int *ref, int nargs) {
  lua_State *L = cir_main_state(rt);
  int once = *ref;
  *ref = CIR_NO_CALLBACK;
  cir_callback_call(rt, once, nargs);
  if (once != CIR_NO_CALLBACK)
    luaL_unref(L, LUA_REGISTRYINDEX, once);
}

void cir_push_error(lua_State *L, const char *code, const char *format, ...) {
  luaL_checkstack(L, 4, "error");
  lua_createtable(L, 0, 4);
  lua_pushstring(L, code);
  lua_setfield(L, -2, "code");
  va_list arguments;
  va_start(arguments, format);
  char small[512];
  va_list again;
  va_copy(again, arguments);
  int length = vsnprintf(small, sizeof small, format, arguments);
  if (length >= 0 && (size_t)length < sizeof small) {
    lua_pushlstring(L, small, (size_t)length);
  } else if (length >= 0) {
    luaL_Buffer buffer;
    char *room = luaL_buffinitsize(L, &buffer, (size_t)length + 1);
    vsnprintf(room, (size_t)length + 1, format, again);
    luaL_pushresultsize(&buffer, (size_t)length);
  } else {
    lua_pushliteral(L, "(message that cannot be formatted)");
  }
  va_end(again);
  va_end(arguments);
  lua_setfield(L, -2, "message");
}

void cir_error_field(lua_State *L, const char *name, const char *value) {
  lua_pushstring(L, value);
  lua_setfield(L, -2, name);
}

const char *cir_code_of_uv(int status) {
  switch (status) {
  case UV_ECANCELED:
    return "cancelled";
  case UV_ETIMEDOUT:
    return "timeout";
  case UV_ECONNREFUSED:
    return "refused";
  case UV_EHOSTUNREACH:
  case UV_ENETUNREACH:
  case UV_EHOSTDOWN:
  case UV_ENETDOWN:
    return "unreachable";
  case UV_ECONNRESET:
  case UV_ECONNABORTED:
  case UV_EPIPE:
    return "reset";
  case UV_EOF:
    return "closed";
  case UV_EAI_AGAIN:
  case UV_EAI_FAIL:
  case UV_EAI_NODATA:
  case UV_EAI_NONAME:
    return "resolve";
  case UV_ENOENT:
    return "not_found";
  case UV_EEXIST:
    return "exists";
  case UV_EACCES:
  case UV_EPERM:
    return "permission";
  case UV_ENOSPC:
    return "no_space";
  case UV_EBUSY:
  case UV_EADDRINUSE:
    return "busy";
  default:
    return "io";
  }
}

int cir_luv_call(lua_State *L, int nargs, int nresults, int flags) {
  (void)flags;
  return protected_call(cir_runtime_of(L), L, nargs, nresults);
}
