/*
 * interrupt.c - see interrupt.h.
 *
 * Facts this rests on (Lua 5.4, libuv 1.44): a hook belongs to one lua_State, so the scheduler
 * tells which state is running (engine.set_running); lua_sethook may be called from a signal
 * handler; a C function cannot be interrupted; threads of libuv's pool block no signals, so a
 * handler that runs elsewhere forwards to the main thread.
 */
#include "interrupt.h"
#include "callback.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum {
  CIR_LONG_TURN_MS = 100,  /* a turn longer than this is reported */
  CIR_UNANSWERED_MS = 200, /* a SIGINT that the loop has not taken within this, though the main
                            * thread could run, raises in the running code */
  CIR_LEAVE_MS = 2000,     /* a second SIGINT not taken within this ends the process */
  CIR_WATCH_MS = 50,       /* how often the watchdog looks */
  CIR_MAX_SIGNAL = 32,
  CIR_TRACE_ROOM = 8192
};

/* The signal by which the watchdog reaches the main thread. Real-time signals are free: libuv and
 * Lua use none. */
#define WATCH_SIGNAL (SIGRTMIN + 3)

static struct {
  cir_runtime *rt;
  uv_async_t async;
  pthread_t main_thread;
  pthread_t watchdog;
  pthread_mutex_t lock;
  pthread_cond_t wake; /* by the monotonic clock: the wall clock may be set back */
  bool started;
  bool ending;                    /* guarded by lock */
  _Atomic(lua_State *) running;   /* the state that executes now; NULL: the main state */
  _Atomic int64_t turn_started;   /* ms of the monotonic clock, 0 between turns */
  _Atomic int64_t interrupted_at; /* ms of the first SIGINT that the loop has not taken, else 0 */
  _Atomic int64_t again_at;       /* ms of the second one, else 0 */
  _Atomic int64_t delay;          /* what delay_ms said at the first one */
  _Atomic int64_t raised;         /* the SIGINT for which the hook was asked to raise, else 0 */
  /*
   * What the hook shall do, and for which SIGINT (interrupted_at) and turn (turn_started). The
   * watchdog may ask just when the loop has taken the signal or the turn has ended: the hook then
   * finds other values there and does nothing.
   */
  _Atomic int64_t raise;               /* raise "interrupted" */
  _Atomic int64_t trace;               /* write down a traceback */
  _Atomic int64_t overrun;             /* raise "timeout" */
  _Atomic(lua_State *) limited;        /* compared only: the state whose turns have a limit */
  _Atomic int64_t limit;               /* ms */
  _Atomic int pending[CIR_MAX_SIGNAL]; /* a handler adds while the loop takes */
  bool caught[CIR_MAX_SIGNAL];
  int depth;   /* nesting of turns */
  bool traced; /* this turn's traceback is in trace_text */
  char trace_text[CIR_TRACE_ROOM];
  int signal_ref, blocked_ref, fatal_ref;
  struct termios terminal;
  bool have_terminal;
} I = {.lock = PTHREAD_MUTEX_INITIALIZER,
       .signal_ref = LUA_NOREF,
       .blocked_ref = LUA_NOREF,
       .fatal_ref = LUA_NOREF};

static const struct {
  const char *name;
  int number;
} SIGNALS[] = {{"SIGINT", SIGINT},   {"SIGTERM", SIGTERM}, {"SIGHUP", SIGHUP},
               {"SIGQUIT", SIGQUIT}, {"SIGUSR1", SIGUSR1}, {"SIGUSR2", SIGUSR2}};

static int64_t now_ms(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/*
 * Milliseconds that the main thread has been ready to run and had no processor (the second number
 * of schedstat, in ns; Documentation/scheduler/sched-stats.rst); 0 where the kernel does not say.
 * Of the main thread, which runs: a wait that goes on is not in it. Async-signal-safe.
 */
static int64_t delay_ms(void) {
  char text[64];
  int file = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return 0;
  ssize_t length = read(file, text, sizeof text);
  close(file);
  int64_t ns = 0;
  ssize_t at = 0;
  while (at < length && text[at] != ' ')
    at++;
  while (++at < length && text[at] >= '0' && text[at] <= '9')
    ns = ns * 10 + (text[at] - '0');
  return ns / 1000000;
}

/*
 * Whether the loop has had its time to take the SIGINT. What a busy machine has taken of it does
 * not count: whoever runs then may be in the middle of a short turn. Only on the main thread.
 */
static bool is_unanswered(void) {
  int64_t lost = delay_ms() - atomic_load(&I.delay);
  return now_ms() - atomic_load(&I.interrupted_at) - lost > CIR_UNANSWERED_MS;
}

/* Whether the hook is asked for what `now` says of now; whatever was asked is done with. */
static bool take_request(_Atomic int64_t *asked, _Atomic int64_t *now) {
  int64_t wanted = atomic_exchange(asked, 0);
  return wanted != 0 && wanted == atomic_load(now);
}

/* Writes the running code's traceback down. A lua_CFunction. [-0, +0, m] */
static int write_trace(lua_State *L) {
  luaL_traceback(L, L, NULL, 1);
  size_t length;
  const char *text = lua_tolstring(L, -1, &length);
  if (length >= sizeof I.trace_text)
    length = sizeof I.trace_text - 1;
  memcpy(I.trace_text, text, length);
  I.trace_text[length] = '\0';
  I.traced = true;
  return 0;
}

/* Raises "interrupted" with the running code's traceback. A lua_CFunction. [-0, +0, v] */
static int raise_interrupted(lua_State *L) {
  cir_push_error(L, "interrupted", "interrupted");
  luaL_traceback(L, L, NULL, 1);
  lua_setfield(L, -2, "traceback");
  return lua_error(L);
}

/* Raises "timeout": the running code has taken too long. A lua_CFunction. [-0, +0, v] */
static int raise_overrun(lua_State *L) {
  cir_push_error(L, "timeout", "it has computed for too long without waiting for anything");
  return lua_error(L);
}

/*
 * Runs inside the Lua code that is executing, and in its frame. What it does stands in functions of
 * their own, for a luaL_Buffer that outgrows its first kilobyte (luaL_traceback has one) marks the
 * frame that it is in as one with something to close: a function of Lua that is marked so returns
 * what lies on its stack in place of nil. May throw: that is its purpose when I.raise is set.
 */
static void hook(lua_State *L, lua_Debug *ar) {
  (void)ar;
  lua_sethook(L, NULL, 0, 0);
  if (take_request(&I.trace, &I.turn_started) && !I.traced) {
    lua_pushcfunction(L, write_trace);
    if (lua_pcall(L, 0, 0, 0) != LUA_OK)
      lua_pop(L, 1); /* no memory: the turn goes unreported */
  }
  if (take_request(&I.overrun, &I.turn_started) && L == atomic_load(&I.limited)) {
    lua_pushcfunction(L, raise_overrun);
    lua_call(L, 0, 0);
  }
  if (take_request(&I.raise, &I.interrupted_at)) {
    if (!is_unanswered()) {
      atomic_store(&I.raised, 0); /* to be asked again */
      return;
    }
    lua_pushcfunction(L, raise_interrupted);
    lua_call(L, 0, 0);
  }
}

/* On the main thread, at the watchdog's request: make the running state call the hook at its next
 * instruction. */
static void on_watch_signal(int number) {
  (void)number;
  if (atomic_load(&I.turn_started) == 0)
    return;
  lua_State *L = atomic_load(&I.running);
  if (L == NULL)
    L = cir_main_state(I.rt);
  /* Not at the return of a function in C: what that has begun would have no handle. */
  lua_sethook(L, hook, LUA_MASKCOUNT, 1);
}

static void on_signal(int number) {
  int saved = errno;
  if (!pthread_equal(pthread_self(), I.main_thread)) {
    pthread_kill(I.main_thread, number);
    errno = saved;
    return;
  }
  if (atomic_load(&I.pending[number]) < 1000)
    atomic_fetch_add(&I.pending[number], 1);
  if (number == SIGINT) {
    int64_t zero = 0;
    if (atomic_compare_exchange_strong(&I.interrupted_at, &zero, now_ms())) {
      atomic_store(&I.delay, delay_ms());
    } else {
      zero = 0;
      atomic_compare_exchange_strong(&I.again_at, &zero, now_ms());
    }
  }
  uv_async_send(&I.async);
  errno = saved;
}

static void *watch(void *unused) {
  (void)unused;
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, NULL);
  int64_t reported = 0, overrun = 0;
  pthread_mutex_lock(&I.lock);
  while (!I.ending) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += CIR_WATCH_MS * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
      until.tv_sec++;
      until.tv_nsec -= 1000000000L;
    }
    pthread_cond_timedwait(&I.wake, &I.lock, &until);
    int64_t now = now_ms();
    int64_t turn = atomic_load(&I.turn_started);
    int64_t first = atomic_load(&I.interrupted_at), second = atomic_load(&I.again_at);
    if (second != 0 && now - second > CIR_LEAVE_MS) {
      if (I.have_terminal)
        tcsetattr(STDIN_FILENO, TCSANOW, &I.terminal);
      _exit(130);
    }
    bool knock = false;
    if (turn != 0 && turn != reported && now - turn > CIR_LONG_TURN_MS) {
      reported = turn;
      atomic_store(&I.trace, turn);
      knock = true;
    }
    lua_State *limited = atomic_load(&I.limited);
    if (turn != 0 && limited != NULL && limited == atomic_load(&I.running) &&
        now - turn > atomic_load(&I.limit) && now - overrun > CIR_LEAVE_MS) {
      overrun = now; /* and again, should the code have caught it */
      atomic_store(&I.overrun, turn);
      knock = true;
    }
    if (turn != 0 && first != 0 && first != atomic_load(&I.raised) &&
        now - first > CIR_UNANSWERED_MS) {
      atomic_store(&I.raised, first);
      atomic_store(&I.raise, first);
      knock = true;
    }
    if (knock)
      pthread_kill(I.main_thread, WATCH_SIGNAL);
  }
  pthread_mutex_unlock(&I.lock);
  return NULL;
}

/* On the loop: tell Lua of each signal that has come since. */
static void on_async(uv_async_t *async) {
  (void)async;
  lua_State *L = cir_main_state(I.rt);
  atomic_store(&I.interrupted_at, 0);
  atomic_store(&I.again_at, 0);
  for (size_t i = 0; i < sizeof SIGNALS / sizeof SIGNALS[0]; i++) {
    int number = SIGNALS[i].number;
    while (atomic_load(&I.pending[number]) > 0) {
      atomic_fetch_sub(&I.pending[number], 1);
      lua_pushstring(L, SIGNALS[i].name);
      lua_pushinteger(L, number);
      cir_callback_call(I.rt, I.signal_ref, 2);
    }
  }
}

void cir_turn_begin(void) {
  if (I.depth++ == 0)
    atomic_store(&I.turn_started, now_ms());
}

void cir_turn_end(cir_runtime *rt) {
  if (--I.depth > 0)
    return;
  int64_t started = atomic_exchange(&I.turn_started, 0);
  if (!I.traced)
    return;
  I.traced = false;
  if (I.blocked_ref == LUA_NOREF)
    return;
  lua_State *L = cir_main_state(rt);
  lua_pushstring(L, I.trace_text);
  lua_pushnumber(L, (lua_Number)(now_ms() - started) / 1000.0);
  cir_callback_call(rt, I.blocked_ref, 2);
}

int cir_interrupt_start(cir_runtime *rt) {
  I.rt = rt;
  I.main_thread = pthread_self();
  I.have_terminal = tcgetattr(STDIN_FILENO, &I.terminal) == 0;
  int status = uv_async_init(cir_loop(rt), &I.async, on_async);
  if (status < 0)
    return status;
  I.async.data = NULL;
  uv_unref((uv_handle_t *)&I.async);
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_watch_signal;
  action.sa_flags = SA_RESTART;
  sigaction(WATCH_SIGNAL, &action, NULL);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&I.wake, &monotonic);
  pthread_condattr_destroy(&monotonic);
  status = pthread_create(&I.watchdog, NULL, watch, NULL);
  I.started = status == 0;
  return -status;
}

void cir_interrupt_stop(cir_runtime *rt) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = SIG_DFL;
  for (int number = 1; number < CIR_MAX_SIGNAL; number++)
    if (I.caught[number])
      sigaction(number, &action, NULL);
  if (I.started) {
    pthread_mutex_lock(&I.lock);
    I.ending = true;
    pthread_cond_signal(&I.wake);
    pthread_mutex_unlock(&I.lock);
    pthread_join(I.watchdog, NULL);
    uv_close((uv_handle_t *)&I.async, NULL);
  }
  cir_callback_unref(rt, &I.signal_ref);
  cir_callback_unref(rt, &I.blocked_ref);
  cir_callback_unref(rt, &I.fatal_ref);
}

int cir_fatal_ref(void) {
  return I.fatal_ref;
}

/* engine.set_running(coroutine | nil): the state that executes from now on. [-1, +0, v] */
static int l_set_running(lua_State *L) {
  lua_State *state = lua_isnoneornil(L, 1) ? NULL : lua_tothread(L, 1);
  if (state == NULL && !lua_isnoneornil(L, 1))
    return luaL_typeerror(L, 1, "thread");
  atomic_store(&I.running, state);
  return 0;
}

/* engine.limit_turns(coroutine | nil, seconds): what that coroutine runs may take so long without
 * waiting; beyond it "timeout" is raised there. There is one such limit. [-2, +0, e] */
static int l_limit_turns(lua_State *L) {
  lua_State *state = lua_isnoneornil(L, 1) ? NULL : lua_tothread(L, 1);
  if (state == NULL && !lua_isnoneornil(L, 1))
    return luaL_typeerror(L, 1, "thread");
  if (state != NULL)
    atomic_store(&I.limit, (int64_t)(luaL_checknumber(L, 2) * 1000));
  atomic_store(&I.limited, state);
  return 0;
}

static int signal_number(lua_State *L, int index) {
  const char *name = luaL_checkstring(L, index);
  for (size_t i = 0; i < sizeof SIGNALS / sizeof SIGNALS[0]; i++)
    if (strcmp(SIGNALS[i].name, name) == 0)
      return SIGNALS[i].number;
  return luaL_error(L, "the engine does not handle the signal '%s'", name);
}

/* engine.catch_signal(name): from now on name is told to on_signal's function instead of its
 * default. [-1, +0, e] */
static int l_catch_signal(lua_State *L) {
  int number = signal_number(L, 1);
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigfillset(&action.sa_mask);
  sigaction(number, NULL, &before);
  /* nohup has SIGHUP ignored: leave it so, as a shell would for a background job. */
  if (before.sa_handler == SIG_IGN && (number == SIGHUP || number == SIGQUIT))
    return 0;
  sigaction(number, &action, NULL);
  I.caught[number] = true;
  return 0;
}

/* engine.release_signal(name): back to its default. [-1, +0, e] */
static int l_release_signal(lua_State *L) {
  int number = signal_number(L, 1);
  if (I.caught[number]) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_DFL;
    sigaction(number, &action, NULL);
    I.caught[number] = false;
  }
  return 0;
}

/* Keep the function at 1, or none, in place of the one that *ref keeps. [-1, +0, v] */
static int set_ref(lua_State *L, int *ref) {
  if (lua_isnoneornil(L, 1))
    cir_callback_unref(cir_runtime_of(L), ref);
  else
    cir_callback_replace(L, 1, ref);
  return 0;
}

/* engine.on_signal(function(name, number) | nil) */
static int l_on_signal(lua_State *L) {
  return set_ref(L, &I.signal_ref);
}

/* engine.on_blocked(function(traceback, seconds) | nil): told after a turn longer than 100 ms */
static int l_on_blocked(lua_State *L) {
  return set_ref(L, &I.blocked_ref);
}

/* engine.on_fatal(function(error_value) | nil): takes what a callback raises */
static int l_on_fatal(lua_State *L) {
  return set_ref(L, &I.fatal_ref);
}

void cir_interrupt_register(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"set_running", l_set_running},   {"limit_turns", l_limit_turns},
      {"catch_signal", l_catch_signal}, {"release_signal", l_release_signal},
      {"on_signal", l_on_signal},       {"on_blocked", l_on_blocked},
      {"on_fatal", l_on_fatal},         {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
}
