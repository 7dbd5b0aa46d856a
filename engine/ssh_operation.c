/*
 * ssh_operation.c - the queue of operations: one is under way, each is reported once. See ssh.h.
 */
#include "ssh.h"

void cir_ssh_deadline(cir_ssh_operation *operation, uint64_t timeout) {
  operation->deadline = timeout > 0 ? cir_ssh_now(operation->session) + timeout : 0;
}

/* Tell Lua, once: the fault when it is not NULL, else the results. */
static void report(cir_ssh_operation *operation, const cir_ssh_fault *fault) {
  cir_ssh_session *session = operation->session;
  if (operation->reported)
    return;
  operation->reported = true;
  lua_State *L = cir_main_state(session->rt);
  int count = 1;
  if (fault != NULL) {
    cir_ssh_push_fault(L, fault);
  } else {
    lua_pushnil(L);
    count += operation->kind->push(operation, L);
  }
  if (operation->handle != NULL) /* nothing is left to cancel, and the handle may be collected */
    *operation->handle = NULL;
  operation->handle = NULL;
  cir_callback_finish(session->rt, &operation->on_done, count);
  luaL_unref(L, LUA_REGISTRYINDEX, operation->anchor);
  operation->anchor = LUA_NOREF;
}

static void dispose(cir_ssh_operation *operation) {
  cir_callback_unref(operation->session->rt, &operation->on_done);
  if (operation->kind->release != NULL)
    operation->kind->release(operation);
  else
    free(operation);
}

/* Fill in why an operation is given up; false when there is no reason to. */
static bool given_up(const cir_ssh_operation *operation, cir_ssh_fault *fault) {
  if (operation->cancelled)
    cir_ssh_fault_set(fault, "cancelled", operation->kind->phase, "cancelled");
  else if (operation->deadline > 0 && operation->deadline <= cir_ssh_now(operation->session))
    cir_ssh_fault_set(fault, "timeout", operation->kind->phase, "no answer within %.3g s",
                      (double)operation->timeout / 1000);
  else
    return false;
  if (operation->fault.phase != NULL) /* the step knows better where it is */
    fault->phase = operation->fault.phase;
  return true;
}

/* Report what is cancelled or too late. Those that have not begun go; the first, which has, goes
 * on. */
static void give_up(cir_ssh_session *session) {
  cir_ssh_fault fault;
  cir_ssh_operation **link = &session->operations;
  while (*link != NULL) {
    cir_ssh_operation *operation = *link;
    if (operation->reported || !given_up(operation, &fault)) {
      link = &operation->next;
      continue;
    }
    operation->deadline = 0;
    if (!operation->started) {
      *link = operation->next;
      report(operation, &fault);
      dispose(operation);
      continue;
    }
    if (operation->kind->fatal) {
      cir_ssh_die(session, &fault);
      return;
    }
    report(operation, &fault);
    if (operation->kind->abandon != NULL)
      operation->kind->abandon(operation);
    link = &operation->next;
  }
}

/* Step the first operation; when it ends, the next. Returns whether any ended. */
bool cir_ssh_operations_step(cir_ssh_session *session) {
  bool progress = false;
  give_up(session);
  while (session->operations != NULL && session->state != CIR_SSH_DEAD) {
    cir_ssh_operation *operation = session->operations;
    if (!operation->started) {
      operation->started = true;
      cir_ssh_deadline(operation, operation->timeout);
    }
    cir_ssh_progress result = operation->kind->step(operation);
    if (result == CIR_SSH_AGAIN || session->state == CIR_SSH_DEAD)
      break;
    session->operations = operation->next;
    report(operation, result == CIR_SSH_FAILED ? &operation->fault : NULL);
    dispose(operation);
    progress = true;
    give_up(session);
  }
  return progress;
}

void cir_ssh_operations_fail(cir_ssh_session *session) {
  while (session->operations != NULL) {
    cir_ssh_operation *operation = session->operations;
    session->operations = operation->next;
    report(operation, &session->fault);
    dispose(operation);
  }
}

/* handle:cancel(): the callback is told "cancelled". Does nothing when it has been called. */
static int l_cancel(lua_State *L) {
  cir_ssh_operation **handle = luaL_checkudata(L, 1, CIR_SSH_OPERATION);
  if (*handle != NULL) {
    (*handle)->cancelled = true;
    cir_ssh_schedule((*handle)->session);
  }
  return 0;
}

/*
 * (operation, session, callback) -> handle: what of a submission may raise. Without finalisers:
 * they would cost a command on a held session more than all else of it in Lua. [-3, +1, v]
 */
static int make_handle(lua_State *L) {
  cir_ssh_operation *operation = lua_touserdata(L, 1);
  cir_ssh_operation **handle = lua_newuserdatauv(L, sizeof *handle, 1);
  *handle = NULL;
  luaL_setmetatable(L, CIR_SSH_OPERATION);
  lua_pushvalue(L, 2);
  lua_setiuservalue(L, -2, 1);
  cir_callback_ref_both(L, 3, &operation->on_done, 4, &operation->anchor);
  *handle = operation;
  operation->handle = handle;
  return 1;
}

void cir_ssh_submit(lua_State *L, int index, cir_ssh_operation *operation, int callback) {
  cir_ssh_session *session = *(cir_ssh_session **)lua_touserdata(L, index);
  operation->session = session;
  operation->on_done = CIR_NO_CALLBACK;
  operation->anchor = LUA_NOREF;
  lua_pushcfunction(L, make_handle);
  lua_pushlightuserdata(L, operation);
  lua_pushvalue(L, index);
  lua_pushvalue(L, callback);
  if (lua_pcall(L, 3, 1, 0) != LUA_OK) {
    dispose(operation);
    lua_error(L);
  }

  cir_ssh_operation **link = &session->operations;
  while (*link != NULL)
    link = &(*link)->next;
  *link = operation;
  cir_ssh_schedule(session);
}

void cir_ssh_operation_register(lua_State *L) {
  static const luaL_Reg methods[] = {{"cancel", l_cancel}, {"__close", l_cancel}, {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_SSH_OPERATION)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}
