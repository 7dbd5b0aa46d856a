/*
 * interrupt.h - signals of the process, and turns of the loop that take too long.
 *
 * A signal is recorded by its handler and told to Lua on the loop (engine.on_signal). When the loop
 * does not come round because Lua code is running, a watchdog thread makes the main thread set a
 * hook on the running state, which raises there. A turn that runs longer than CIR_LONG_TURN_MS is
 * reported to Lua with the culprit's traceback.
 */
#ifndef CIR_INTERRUPT_H
#define CIR_INTERRUPT_H

#include "runtime.h"

/* A turn is a call from C into Lua. Calls nest; only the outermost is timed. */
void cir_turn_begin(void);
void cir_turn_end(cir_runtime *rt);

/* Start the watchdog and take the async handle of the loop. Called once. Returns 0 or a libuv
 * error. */
int cir_interrupt_start(cir_runtime *rt);

/* Give signals back to their defaults, end the watchdog, close the async handle. */
void cir_interrupt_stop(cir_runtime *rt);

/* Add the functions of this file to the module table on the top of the stack. [-0, +0, m] */
void cir_interrupt_register(lua_State *L);

/* Registry reference of the function that takes uncaught errors of callbacks, or LUA_NOREF. */
int cir_fatal_ref(void);

#endif
