/* runtime.c - see runtime.h and host.h. */
#include "runtime.h"
#include "callback.h"
#include "embedded.h"
#include "host.h"
#include "interrupt.h"
#include "memory.h"
#include "modules.h"

#include <assert.h>
#include <lua-cjson.h>
#include <lualib.h>
#include <luv/lhandle.h>
#include <luv/luv.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  CIR_DRAIN_MS =
      5000, /* how long shutdown waits for handles and pool work before it leaves without */
  CIR_DRAIN_LOOK_MS = 100 /* how often it looks whether that has passed */
};

typedef struct deferred {
  struct deferred *next;
  void (*fn)(void *);
  void *arg;
} deferred;

typedef struct hook {
  struct hook *next;
  void (*fn)(void *);
  void *arg;
} hook;

struct cir_runtime {
  lua_State *L;
  cir_memory memory; /* the state's */
  bool warns;        /* warn() is on, and */
  bool continues;    /* what comes is a further piece of a warning */
  uv_loop_t loop;
  uv_idle_t idle; /* active while something is deferred, so that the loop does not block in poll */
  deferred *first, **last;
  hook *hooks;
  const char *lua_dir; /* NULL: embedded modules only */
  char *room;          /* where modules are unpacked: as strings they would be garbage at once */
  size_t room_size;
  char executable[4096];
  int argc;
  char **argv;
};

/* There is one runtime a process; its address is also kept in the extra space of each state
 * (lua_getextraspace). */
cir_runtime *cir_runtime_of(lua_State *L) {
  return *(cir_runtime **)lua_getextraspace(L);
}

lua_State *cir_main_state(cir_runtime *rt) {
  return rt->L;
}

uv_loop_t *cir_loop(cir_runtime *rt) {
  return &rt->loop;
}

_Noreturn void cir_give_up(const char *why) {
  fprintf(stderr, "ciranda: %s\n", why != NULL ? why : "an error that is no text");
  fflush(NULL);
  _exit(1);
}

/* Memory for what may not be refused: the caller frees it. */
static void *need(size_t size) {
  void *memory = malloc(size);
  if (memory == NULL)
    cir_give_up("not enough memory");
  return memory;
}

static void on_idle(uv_idle_t *idle) {
  cir_runtime *rt = CIR_CONTAINER_OF(idle, cir_runtime, idle);
  deferred *list = rt->first;
  rt->first = NULL;
  rt->last = &rt->first;
  while (list != NULL) {
    deferred *item = list;
    list = item->next;
    item->fn(item->arg);
    free(item);
  }
  if (rt->first == NULL)
    uv_idle_stop(&rt->idle);
}

void cir_defer(cir_runtime *rt, void (*fn)(void *), void *arg) {
  deferred *item = need(sizeof *item);
  *item = (deferred){.next = NULL, .fn = fn, .arg = arg};
  *rt->last = item;
  rt->last = &item->next;
  uv_idle_start(&rt->idle, on_idle);
}

void cir_on_shutdown(cir_runtime *rt, void (*fn)(void *), void *arg) {
  hook *item = need(sizeof *item);
  *item = (hook){.next = rt->hooks, .fn = fn, .arg = arg};
  rt->hooks = item;
}

static const char DAMAGED[] = "the program's file is damaged: install it again";

/* Pushes what is embedded, unpacked, as a string. [-0, +1, e] */
static const char *push_unpacked(lua_State *L, const cir_blob *blob) {
  luaL_Buffer buffer;
  char *room = luaL_buffinitsize(L, &buffer, blob->size);
  if (cir_embedded_unpack(blob, room) != 0)
    luaL_error(L, "%s", DAMAGED);
  luaL_pushresultsize(&buffer, blob->size);
  return lua_tostring(L, -1);
}

/*
 * Finds an embedded module; with --lua-dir, the file of that directory first. Chunks are named as
 * files are, so that tracebacks read well. Returns false when there is none; raises a syntax error.
 * [-0, +1 on success, e]
 */
static bool load_module(lua_State *L, const char *name) {
  cir_runtime *rt = cir_runtime_of(L);
  const cir_embedded *module = cir_embedded_find(name);
  if (module == NULL)
    return false;
  int status;
  if (rt->lua_dir != NULL) {
    const char *path = lua_pushfstring(L, "%s/%s", rt->lua_dir, module->path);
    if (access(path, R_OK) == 0) {
      status = luaL_loadfilex(L, path, "t");
      lua_remove(L, -2);
      if (status != LUA_OK)
        lua_error(L);
      return true;
    }
    lua_pop(L, 1);
  }
  const char *chunk_name = lua_pushfstring(L, "@%s", module->path);
  char *room = rt->room; /* a finaliser that runs meanwhile may load a module too */
  size_t size = rt->room_size;
  rt->room = NULL;
  rt->room_size = 0;
  if (size < module->chunk.size) {
    free(room);
    size = module->chunk.size;
    room = malloc(size);
    if (room == NULL)
      return luaL_error(L, "out of memory");
  }
  if (cir_embedded_unpack(&module->chunk, room) != 0) {
    free(room);
    return luaL_error(L, "%s", DAMAGED);
  }
  status = luaL_loadbufferx(L, room, module->chunk.size, chunk_name, "bt");
  free(rt->room);
  rt->room = room;
  rt->room_size = size;
  if (status != LUA_OK)
    lua_error(L);
  lua_remove(L, -2);
  return true;
}

/* package.searchers entry. [-0, +1 or +2, e] */
static int l_searcher(lua_State *L) {
  const char *name = luaL_checkstring(L, 1);
  if (!load_module(L, name)) {
    lua_pushfstring(L, "no built-in module '%s'", name);
    return 1;
  }
  lua_pushfstring(L, ":built-in:%s", name);
  return 2;
}

/* engine.load(name) -> the chunk of an embedded module, or nil. [-1, +1, e] */
static int l_load(lua_State *L) {
  if (!load_module(L, luaL_checkstring(L, 1)))
    lua_pushnil(L);
  return 1;
}

/* engine.embedded() -> the sorted names of the embedded modules. [-0, +1, m] */
static int l_embedded(lua_State *L) {
  lua_createtable(L, (int)cir_embedded_count, 0);
  for (size_t i = 0; i < cir_embedded_count; i++) {
    lua_pushstring(L, cir_embedded_modules[i].name);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  return 1;
}

/* engine.guard() -> the bytes of ciranda-guard for x86-64, or nil when this build carries none.
 * [-0, +1, m] */
static int l_guard(lua_State *L) {
  if (cir_embedded_guard.size == 0)
    lua_pushnil(L);
  else
    push_unpacked(L, &cir_embedded_guard);
  return 1;
}

/* engine.guard_digest() -> the SHA-256 of those bytes in hexadecimal and their number, without
 * unpacking them, or nil. [-0, +1 or +2, m] */
static int l_guard_digest(lua_State *L) {
  if (cir_embedded_guard.size == 0)
    return 0;
  lua_pushstring(L, cir_embedded_guard_sha256);
  lua_pushinteger(L, (lua_Integer)cir_embedded_guard.size);
  return 2;
}

/* engine.exit_now(status): flush and leave without any clean-up. Does not return. [-1, +0, e] */
static int l_exit_now(lua_State *L) {
  int status = (int)luaL_checkinteger(L, 1);
  fflush(NULL);
  _exit(status);
}

/* engine.loop_alive() -> whether a referenced handle or request keeps the loop alive, deferred work
 * included. */
static int l_loop_alive(lua_State *L) {
  lua_pushboolean(L, uv_loop_alive(cir_loop(cir_runtime_of(L))));
  return 1;
}

int luaopen_ciranda_core_engine(lua_State *L) {
  static const luaL_Reg functions[] = {{"load", l_load},
                                       {"embedded", l_embedded},
                                       {"guard", l_guard},
                                       {"guard_digest", l_guard_digest},
                                       {"exit_now", l_exit_now},
                                       {"loop_alive", l_loop_alive},
                                       {NULL, NULL}};
  cir_runtime *rt = cir_runtime_of(L);
  luaL_newlib(L, functions);
  cir_interrupt_register(L);
  lua_pushliteral(L, CIR_VERSION);
  lua_setfield(L, -2, "version");
  lua_pushstring(L, rt->executable);
  lua_setfield(L, -2, "executable");
  if (rt->lua_dir != NULL)
    lua_pushstring(L, rt->lua_dir);
  else
    lua_pushnil(L);
  lua_setfield(L, -2, "lua_dir");
  lua_createtable(L, rt->argc, 0);
  for (int i = 0; i < rt->argc; i++) {
    lua_pushstring(L, rt->argv[i]);
    lua_rawseti(L, -2, i);
  }
  lua_setfield(L, -2, "argv");
  return 1;
}

static void count_luv_handle(uv_handle_t *handle, void *arg) {
  if (handle->data != NULL) /* else the engine's own: see CIR_CONTAINER_OF */
    ++*(int *)arg;
}

/* Appends to the table on the top, which has room: an error that left uv_walk would leave the
 * loop's list of handles in pieces. [-0, +0, -] */
static void collect_luv_handle(uv_handle_t *handle, void *arg) {
  lua_State *L = arg;
  if (handle->data == NULL)
    return;
  const luv_handle_t *data = handle->data;
  lua_rawgeti(L, LUA_REGISTRYINDEX, data->ref);
  if (lua_isuserdata(L, -1))
    lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
  else
    lua_pop(L, 1);
}

/* uv.walk(callback), which in luv 1.44 aborts on handles that are not luv's. [-1, +0, e] */
static int l_walk(lua_State *L) {
  luaL_checktype(L, 1, LUA_TFUNCTION);
  lua_settop(L, 1);
  int handles = 0;
  uv_walk(cir_loop(cir_runtime_of(L)), count_luv_handle, &handles);
  lua_createtable(L, handles, 0);
  uv_walk(cir_loop(cir_runtime_of(L)), collect_luv_handle, L);
  lua_Integer count = (lua_Integer)lua_rawlen(L, 2);
  for (lua_Integer i = 1; i <= count; i++) {
    lua_pushvalue(L, 1);
    lua_rawgeti(L, 2, i);
    lua_call(L, 1, 0);
  }
  return 0;
}

/*
 * uv.run(mode), which is upvalue 1. Callbacks in Lua are protected (callback.h). What else raises
 * in the loop is C that has no memory for a value of Lua's, and the error would leave libuv, and
 * whichever library has called, in the middle of their work. It is raised on the main state, on
 * which callbacks run, whoever runs the loop. [-n, +n, e]
 */
static int l_run(lua_State *L) {
  static const char *const modes[] = {"default", "once", "nowait", NULL};
  const char *mode = modes[luaL_checkoption(L, 1, modes[0], modes)];
  lua_State *main = cir_main_state(cir_runtime_of(L));
  luaL_checkstack(main, 4, "uv.run");
  lua_pushcfunction(main, lua_tocfunction(L, lua_upvalueindex(1)));
  lua_pushstring(main, mode);
  if (lua_pcall(main, 1, 1, 0) != LUA_OK)
    cir_give_up(lua_tostring(main, -1));
  lua_pushboolean(L, lua_toboolean(main, -1));
  lua_pop(main, 1);
  return 1;
}

/* signal:start and start_oneshot, which is upvalue 1, refused for SIGINT: luv would leave the
 * process without a handler when it stops. [-n, +n, e] */
static int l_signal_start(lua_State *L) {
  bool interrupt = lua_tonumber(L, 2) == SIGINT; /* luv takes "2" and 2.0 too */
  if (lua_type(L, 2) == LUA_TSTRING && strcmp(lua_tostring(L, 2), "sigint") == 0)
    interrupt = true;
  if (interrupt)
    return luaL_error(
        L, "SIGINT belongs to the engine; cancel a task or use the recipe's on_interrupt instead");
  int count = lua_gettop(L);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  lua_call(L, count, LUA_MULTRET);
  return lua_gettop(L);
}

/* Put l_signal_start before luv's function of that name and, where there is one, before the method
 * of the class on the top. The module is at index. [-0, +0, e] */
static void mend_signal(lua_State *L, int module, const char *name, const char *method) {
  if (lua_getfield(L, module, name) == LUA_TNIL) {
    lua_pop(L, 1);
    return;
  }
  lua_pushcclosure(L, l_signal_start, 1);
  if (lua_getfield(L, -2, method) != LUA_TNIL) {
    lua_pushvalue(L, -2);
    lua_setfield(L, -4, method);
  }
  lua_pop(L, 1);
  lua_setfield(L, module, name);
}

/* luaopen_luv, mended for a loop that is shared. [-0, +1, e] */
static int open_luv(lua_State *L) {
  luaopen_luv(L);
  int module = lua_gettop(L);
  lua_pushcfunction(L, l_walk);
  lua_setfield(L, -2, "walk");
  lua_getfield(L, -1, "run");
  lua_pushcclosure(L, l_run, 1);
  lua_setfield(L, -2, "run");
  if (luaL_getmetatable(L, "uv_signal") == LUA_TTABLE &&
      lua_getfield(L, -1, "__index") == LUA_TTABLE) {
    mend_signal(L, module, "signal_start", "start");
    mend_signal(L, module, "signal_start_oneshot", "start_oneshot");
  }
  lua_settop(L, module);
  return 1;
}

static const luaL_Reg PRELOAD[] = {{"luv", open_luv},
                                   {"cjson", luaopen_cjson},
                                   {"ciranda.core.engine", luaopen_ciranda_core_engine},
                                   {"ciranda.core.http", luaopen_ciranda_core_http},
                                   {"ciranda.core.server", luaopen_ciranda_core_server},
                                   {"ciranda.core.ssh", luaopen_ciranda_core_ssh},
                                   {"ciranda.core.crypto", luaopen_ciranda_core_crypto},
                                   {"ciranda.core.edit", luaopen_ciranda_core_edit},
                                   {"ciranda.core.keeper", luaopen_ciranda_core_keeper},
                                   {"ciranda.core.json", luaopen_ciranda_core_json},
                                   {NULL, NULL}};

/* Opens the libraries and boots ciranda.cli.main; leaves the exit status. Runs protected. [-0, +1,
 * e] */
static int boot(lua_State *L) {
  lua_gc(L, LUA_GCSTOP); /* nothing is garbage yet; ciranda.cli.session has it begin */
  luaL_openlibs(L);
  luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
  luaL_setfuncs(L, PRELOAD, 0);
  lua_pop(L, 1);

  lua_getglobal(L, "package");
  lua_pushliteral(L, "");
  lua_setfield(L, -2, "path");
  lua_pushliteral(L, "");
  lua_setfield(L, -2, "cpath");
  lua_getfield(L, -1, "searchers");
  for (lua_Integer i = (lua_Integer)lua_rawlen(L, -1); i >= 2; i--) {
    lua_rawgeti(L, -1, i);
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushcfunction(L, l_searcher);
  lua_rawseti(L, -2, 2);
  lua_settop(L, 0);

  lua_getglobal(L, "require");
  lua_pushliteral(L, "ciranda.cli.main");
  lua_call(L, 1, 1);
  lua_getfield(L, -1, "boot");
  lua_call(L, 0, 1);
  return 1;
}

/* An error that nobody caught: lua_pcall is around everything, so Lua's memory has run out in a
 * place where it cannot be told. */
static int on_panic(lua_State *L) {
  cir_give_up(lua_tostring(L, -1));
}

/* What warn() says, in pieces, as the lua program has it: "@on" and "@off" alone are orders, and it
 * begins as off. */
static void on_warning(void *opaque, const char *text, int more) {
  cir_runtime *rt = opaque;
  if (!rt->continues && !more && text[0] == '@') {
    if (strcmp(text, "@on") == 0)
      rt->warns = true;
    else if (strcmp(text, "@off") == 0)
      rt->warns = false;
    return;
  }
  if (rt->warns)
    fprintf(stderr, "%s%s%s", rt->continues ? "" : "Lua warning: ", text, more ? "" : "\n");
  rt->continues = more != 0;
}

static int boot_handler(lua_State *L) {
  const char *text = luaL_tolstring(L, 1, NULL);
  luaL_traceback(L, L, text, 1);
  return 1;
}

static void close_luv_handle(uv_handle_t *handle, void *arg) {
  if (handle->data != NULL && !uv_is_closing(handle)) {
    lua_State *L = arg;
    const luv_handle_t *data = handle->data;
    lua_rawgeti(L, LUA_REGISTRYINDEX, data->ref);
    if (lua_isuserdata(L, -1) && luaL_getmetafield(L, -1, "__index") != LUA_TNIL) {
      lua_getfield(L, -1, "close");
      lua_pushvalue(L, -3);
      if (lua_pcall(L, 1, 0, 0) != LUA_OK)
        lua_pop(L, 1);
    }
    lua_settop(L, 0);
  }
}

static void drain_expired(uv_timer_t *timer) {
  (void)timer;
}

/* Leave without waiting for what the loop still has. */
static _Noreturn void leave(int status) {
  fflush(NULL);
  _exit(status);
}

/*
 * Close everything that lives in the loop, run it dry, close the state, close the loop. When pool
 * work outlasts CIR_DRAIN_MS the process leaves with `status` at once, output flushed: libuv cannot
 * cancel running pool work. It leaves as well when a finaliser has begun something while the state
 * was closed: there is nobody left to tell how it ends.
 */
static void shut_down(cir_runtime *rt, int status) {
  while (rt->hooks != NULL) {
    hook *item = rt->hooks;
    rt->hooks = item->next;
    item->fn(item->arg);
    free(item);
  }
  lua_settop(rt->L, 0);
  uv_walk(&rt->loop, close_luv_handle, rt->L);
  cir_interrupt_stop(rt);

  uv_timer_t timer;
  uv_timer_init(&rt->loop, &timer);
  timer.data = NULL;
  uv_update_time(&rt->loop);
  uv_timer_start(&timer, drain_expired, CIR_DRAIN_LOOK_MS, CIR_DRAIN_LOOK_MS);
  uv_unref((uv_handle_t *)&timer);
  uint64_t deadline = uv_hrtime() + (uint64_t)CIR_DRAIN_MS * 1000000u;
  while (uv_run(&rt->loop, UV_RUN_ONCE) != 0 || rt->first != NULL) {
    if (uv_hrtime() >= deadline)
      leave(status);
    uv_walk(&rt->loop, close_luv_handle, rt->L);
  }
  cir_memory_closing(&rt->memory);
  lua_close(rt->L);
  if (rt->first != NULL || uv_loop_alive(&rt->loop))
    leave(status);
  uv_close((uv_handle_t *)&rt->idle, NULL);
  uv_close((uv_handle_t *)&timer, NULL);
  uv_run(&rt->loop, UV_RUN_DEFAULT);
  int left = uv_loop_close(&rt->loop);
  assert(left == 0);
  (void)left;
  free(rt->room);
  cir_memory_free(&rt->memory);
  free(rt);
}

/*
 * Lua frees what a stream of output was in bursts, a few MiB at each collection. glibc would give
 * them back to the kernel and ask for them again, cleared: 50,000 page faults and a twentieth of
 * the time of 1 GiB over SSH. It keeps 8 MiB instead, and takes pieces of up to 1 MiB from there.
 */
static void keep_freed_memory(void) {
#ifdef __GLIBC__
  mallopt(M_TRIM_THRESHOLD, 8 << 20);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

int cir_main(int argc, char **argv, const char *lua_dir) {
  keep_freed_memory();
  cir_runtime *rt = calloc(1, sizeof *rt);
  if (rt == NULL || uv_loop_init(&rt->loop) < 0) {
    fputs("ciranda: out of memory\n", stderr);
    return 1;
  }
  rt->last = &rt->first;
  rt->argc = argc;
  rt->argv = argv;
  rt->lua_dir = lua_dir;
  size_t room = sizeof rt->executable;
  if (uv_exepath(rt->executable, &room) < 0)
    snprintf(rt->executable, sizeof rt->executable, "%s", argv[0]);
  uv_idle_init(&rt->loop, &rt->idle);
  rt->idle.data = NULL;

  rt->L = lua_newstate(cir_memory_alloc, &rt->memory);
  if (rt->L == NULL || cir_interrupt_start(rt) < 0) {
    fputs("ciranda: cannot start: out of memory or threads\n", stderr);
    return 1;
  }
  lua_atpanic(rt->L, on_panic);
  lua_setwarnf(rt->L, on_warning, rt);
  *(cir_runtime **)lua_getextraspace(rt->L) = rt;
  luv_set_loop(rt->L, &rt->loop);
  luv_set_callback(rt->L, cir_luv_call);

  lua_pushcfunction(rt->L, boot_handler);
  lua_pushcfunction(rt->L, boot);
  int status = 1;
  if (lua_pcall(rt->L, 0, 1, 1) != LUA_OK)
    fprintf(stderr, "ciranda: %s\n", lua_tostring(rt->L, -1));
  else
    status = (int)lua_tointeger(rt->L, -1);
  shut_down(rt, status);
#ifndef __SANITIZE_ADDRESS__ /* which looks for leaks when main returns */
  leave(status);
#endif
  return status;
}
