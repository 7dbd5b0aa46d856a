/*
 * supervise.c - the loop of a guard, its end, and the outer process that takes over when the inner
 * one is killed.
 */
#include "guard.h"
#include <sys/signalfd.h>

#define BEAT 5000        /* ms between two signs of life */
#define ADOPTED_BEAT 250 /* ms between two looks at processes that are nobody's children here */

/* Remove the accelerator library's lock file when nobody has it locked or holds the device: the
 * dead leave it behind. */
void cir_clear_lock(cir_guard *guard) {
  const cir_options *options = &guard->state->options;
  int lock = open(options->lock, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (lock < 0)
    return;
  bool held = flock(lock, LOCK_EX | LOCK_NB) != 0;
  cir_tree_scan(&guard->tree, guard->state);
  cir_tree_descriptors(&guard->tree, options->devices);
  for (size_t i = 0; i < guard->tree.count; i++)
    held = held || guard->tree.list[i].holds;
  if (!held)
    unlink(options->lock);
  close(lock);
}

/* Nothing is left: write down what is known, and go. Returns the guard's exit status. */
static int finish(cir_guard *guard) {
  for (int64_t deadline = cir_now() + 10000; cir_log_drain(guard) && cir_now() < deadline;)
    ;
  cir_settle(guard);
  cir_clear_lock(guard);
  fdatasync(guard->log);
  if (guard->state->error[0]) {
    guard->state->count = 0; /* what has ended is not the command */
    unlink("pid");
  }
  for (int tries = 60; cir_record_write(guard->state) != 0; tries--) {
    if (tries == 0)
      return CIR_FAILED; /* the state file still says everything to the next guard */
    cir_nap(1000);
  }
  static const char *const mine[] = {"alive", "wake", "output", "state"};
  for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
    unlink(mine[i]);
  return CIR_OK;
}

/* Take in the signals of this process. To be told to end is to be asked to stop: in the shared
 * state, so that it outlives this process too. */
static void take_signals(const cir_guard *guard) {
  const cir_options *options = &guard->state->options;
  struct signalfd_siginfo info;
  while (read(guard->signals, &info, sizeof info) == (ssize_t)sizeof info)
    if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
      cir_ask(guard->state, options->grace, options->linger, "the guard was told to end");
}

/* Whether anything of ours runs. What was adopted is nobody's child here: look for it. */
static bool anything_left(cir_guard *guard, int64_t *look) {
  bool children = cir_reap(guard);
  if (!guard->state->adopted || cir_now() < *look)
    return children || guard->state->adopted;
  *look = cir_now() + ADOPTED_BEAT;
  cir_settle(guard);
  size_t left = cir_tree_scan(&guard->tree, guard->state);
  for (size_t i = 0; i < guard->tree.count && guard->state->count < CIR_TARGETS / 2; i++)
    if (guard->tree.list[i].top && !cir_find(guard->state, &guard->tree.list[i]))
      cir_target_add(guard, &guard->tree.list[i]);
  return left > 0;
}

/* Guard until nothing of the command is left. Returns the guard's exit status. */
int cir_guard_loop(cir_guard *guard) {
  cir_state *state = guard->state;
  int64_t beat = 0, step = 0, look = 0;
  for (uint32_t i = 0; i < state->count; i++)
    state->targets[i].seized = false; /* the kernel let go of what another guard traced */
  cir_settle(guard); /* get hold of them before anything else: who ends unheld is never known */
  state->guard = getpid();
  __atomic_store_n(&state->begun, true, __ATOMIC_RELEASE);
  while (anything_left(guard, &look)) {
    bool more = cir_log_drain(guard);
    int64_t now = cir_now();
    cir_announce(state);
    if (now >= beat) {
      int alive = open("alive", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
      futimens(alive, NULL);
      close(alive);
      beat = now + BEAT;
    }
    if (now >= step && cir_stop_step(guard)) {
      /* Soon again, later less often; and a long process list must not cost a core. */
      int64_t took = cir_now() - now, least = cir_wall() - state->stop_at < 10000 ? 20 : 100;
      step = now + (5 * took > least ? 5 * took : least);
    }
    int64_t next = state->asked && step < beat ? step : beat;
    next = state->adopted && look < next ? look : next;
    int64_t rest = more ? 0 : next - cir_now();
    struct pollfd fds[] = {
        {guard->signals, POLLIN, 0}, {guard->wake, POLLIN, 0}, {guard->output, POLLIN, 0}};
    poll(fds, 3, rest > 0 ? (int)rest : 0); /* below 0 it would wait for ever */
    char wake[64];
    while (read(guard->wake, wake, sizeof wake) > 0)
      step = 0; /* somebody asks for something: it is in the state */
    take_signals(guard);
  }
  return finish(guard);
}

/* Wake the inner process when a signal came here, and go on in its place when it is killed. Returns
 * the guard's exit status. */
int cir_outer_loop(cir_guard *guard, pid_t inner) {
  struct pollfd fd = {guard->signals, POLLIN, 0};
  siginfo_t info = {0};
  while (waitid(P_PID, (id_t)inner, &info, WEXITED | WNOHANG) == 0 && info.si_pid == 0) {
    poll(&fd, 1, -1);
    take_signals(guard);
    dprintf(guard->wake, "w");
  }
  if (access("exit", F_OK) == 0 || (info.si_code == CLD_EXITED && info.si_status == CIR_OK))
    return CIR_OK; /* whoever read the record may have taken the directory away by now */
  guard->state->takeovers++;
  cir_log_resume(guard);
  return cir_guard_loop(guard);
}
