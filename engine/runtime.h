/*
 * runtime.h - the one Lua state of the process, its loop and its order of shutdown.
 *
 * There is one cir_runtime a process. It owns the uv loop that every engine module and the
 * linked-in luv share, and the main lua_State. Engine modules reach it from any coroutine with
 * cir_runtime_of().
 */
#ifndef CIR_RUNTIME_H
#define CIR_RUNTIME_H

#include <lua.h>
#include <stdbool.h>
#include <uv.h>

typedef struct cir_runtime cir_runtime;

/* The runtime that owns the state of L (any coroutine of it). Never NULL once the state is up. [-0,
 * +0, -] */
cir_runtime *cir_runtime_of(lua_State *L);

/* The main state: the only one on which callbacks run. A lua_State of a coroutine is never kept by
 * C. */
lua_State *cir_main_state(cir_runtime *rt);

uv_loop_t *cir_loop(cir_runtime *rt);

/* Say why and end the process: where there is no memory to go on with, and where an error would
 * leave a library in pieces. */
_Noreturn void cir_give_up(const char *why);

/*
 * Run fn(arg) on a later turn of the loop, never before the caller has returned to it. It is how an
 * operation that fails at once still reports through its callback. Deferred functions run in the
 * order they were queued and are run, not dropped, during shutdown.
 */
void cir_defer(cir_runtime *rt, void (*fn)(void *arg), void *arg);

/*
 * Register fn(arg), called once at shutdown, after the root task has ended and before the state is
 * closed, in the reverse order of registration. It must start closing every uv handle of the
 * module; the loop then runs until none is left. A module calls this when it first creates
 * something that lives in the loop.
 */
void cir_on_shutdown(cir_runtime *rt, void (*fn)(void *arg), void *arg);

/*
 * Engine handles (uv_poll_t, uv_timer_t, ...) keep `handle->data == NULL` and find their owner with
 * CIR_CONTAINER_OF. luv keeps its own data there: a NULL tells the two apart when handles are
 * walked.
 */
#define CIR_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

#endif
