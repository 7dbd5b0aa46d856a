/*
 * keeper.c - ciranda.core.keeper: what a process needs that must leave no other behind (Linux).
 *
 *   keeper.subreaper()              orphans among the descendants become children of this process
 *   keeper.die_with_parent(signal)  this process gets the signal when its parent ends
 *   keeper.reap(pid)                collects a child that has ended
 *
 * The interpreter that runs scripts must not be a subreaper: libuv waits for its own children only,
 * so somebody has to collect the adopted ones, and only ciranda.sim.keeper does.
 */
#include "modules.h"

#include <errno.h>
#include <lauxlib.h>
#include <limits.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* Pushes true, or nil and what prctl refused. [-0, +1 or +2, m] */
static int prctl_result(lua_State *L, int status) {
  if (status == 0) {
    lua_pushboolean(L, 1);
    return 1;
  }
  lua_pushnil(L);
  lua_pushstring(L, strerror(errno));
  return 2;
}

/* keeper.subreaper() -> true | nil, message. Children do not inherit it. [-0, +1 or +2, m] */
static int l_subreaper(lua_State *L) {
  return prctl_result(L, prctl(PR_SET_CHILD_SUBREAPER, 1L, 0L, 0L, 0L));
}

/*
 * keeper.die_with_parent(signal) -> the parent's pid | nil, message. A parent that ended before the
 * call sends nothing: the caller compares the pid with the one it was given. A program that is
 * executed keeps the setting unless its credentials change. [-1, +1 or +2, e]
 */
static int l_die_with_parent(lua_State *L) {
  lua_Integer number = luaL_checkinteger(L, 1);
  luaL_argcheck(L, number >= 0 && number < NSIG, 1, "a signal's number expected");
  if (prctl(PR_SET_PDEATHSIG, (unsigned long)number, 0L, 0L, 0L) != 0)
    return prctl_result(L, -1);
  lua_pushinteger(L, getppid());
  return 1;
}

/*
 * keeper.reap(pid) -> whether that child had ended and is collected now. Never for a child that
 * libuv started: its exit would not be told. Does not wait. [-1, +1, e]
 */
static int l_reap(lua_State *L) {
  lua_Integer pid = luaL_checkinteger(L, 1);
  luaL_argcheck(L, pid > 1 && pid <= INT_MAX, 1, "a process id expected"); /* 0 and -1 mean any */
  pid_t ended;
  do
    ended = waitpid((pid_t)pid, NULL, WNOHANG);
  while (ended < 0 && errno == EINTR);
  lua_pushboolean(L, ended > 0);
  return 1;
}

int luaopen_ciranda_core_keeper(lua_State *L) {
  static const luaL_Reg functions[] = {{"subreaper", l_subreaper},
                                       {"die_with_parent", l_die_with_parent},
                                       {"reap", l_reap},
                                       {NULL, NULL}};
  luaL_newlib(L, functions);
  return 1;
}
