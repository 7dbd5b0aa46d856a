/*
 * outcome.c - how a process ended, by whichever source knows: waiting, its pidfd, a trace. The
 * first that knows is kept.
 */
#include "guard.h"
#include <sys/ioctl.h>
#include <sys/ptrace.h>

/* Linux 6.15: what a pidfd opened before the exit tells once somebody has waited for the process.
 */
struct pidfd_exit {
  uint64_t mask, cgroup;
  uint32_t ids[11];
  int32_t exit_code;
};
#define PIDFD_EXIT_MASK 8u
#define PIDFD_EXIT_IOCTL ((unsigned long)_IOWR(0xFF, 11, struct pidfd_exit))

static bool pidfd_status(int pidfd, int *status) {
  struct pidfd_exit info = {.mask = PIDFD_EXIT_MASK};
  if (pidfd < 0 || syscall(SYS_ioctl, (long)pidfd, PIDFD_EXIT_IOCTL, &info) != 0 ||
      !(info.mask & PIDFD_EXIT_MASK))
    return false;
  *status = info.exit_code;
  return true;
}

/* Ask the kernel by a child that ends at once. Call it when there are no other children. */
bool cir_has_exit_info(void) {
  int status = -1;
  pid_t child = fork();
  if (child == 0)
    _exit(3);
  int pidfd = child > 0 ? (int)syscall(SYS_pidfd_open, child, 0) : -1;
  waitpid(child, NULL, 0);
  bool known = pidfd_status(pidfd, &status) && status == 3 << 8;
  close(pidfd);
  return known;
}

/* The target that is this process, or NULL. */
cir_target *cir_find(cir_state *state, const cir_proc *proc) {
  for (uint32_t i = 0; i < state->count; i++)
    if (state->targets[i].pid == proc->pid && state->targets[i].start == proc->start)
      return &state->targets[i];
  return NULL;
}

/*
 * Get hold of a target that still lives: its pidfd and, when it is being signalled (or was, by a
 * guard that is gone) and that is the way to its status, a trace. Some descriptors are left for
 * everything else: their number is limited.
 */
void cir_watch(cir_guard *guard, cir_target *target) {
  int *pidfd = &guard->pidfds[target - guard->state->targets];
  bool fresh = *pidfd < 0;
  cir_proc proc;
  if (target->ended_at || (fresh && pidfd - guard->pidfds >= sysconf(_SC_OPEN_MAX) - 32))
    return;
  if (fresh)
    *pidfd = (int)syscall(SYS_pidfd_open, target->pid, 0);
  bool there = cir_proc_read(target->pid, &proc, NULL) && proc.start == target->start;
  if (fresh && !there && *pidfd >= 0) {
    close(*pidfd); /* it is another one's */
    *pidfd = -1;
  }
  cir_source method = guard->state->options.method;
  bool foreign = method == CIR_AUTO && !guard->exit_info && proc.parent != getpid();
  if (there && target->wave != CIR_NO_WAVE && !target->seized &&
      (fresh || target->delivery == -1) && (method == CIR_PTRACE || foreign))
    target->seized = ptrace(PTRACE_SEIZE, target->pid, NULL, NULL) == 0;
}

/* Note that a target has ended, and how, unless that is known or this source is not to be used. */
static void note(cir_guard *guard, cir_target *target, cir_source source, int status) {
  bool allowed = guard->state->options.method == CIR_AUTO || guard->state->options.method == source;
  if (target->source == CIR_UNKNOWN && (allowed || target == guard->state->targets)) {
    target->status = status;
    target->source = source;
  }
  target->ended_at = target->ended_at ? target->ended_at : cir_wall();
}

/* Find out which targets have ended without being our children, and how. */
void cir_settle(cir_guard *guard) {
  for (uint32_t i = 0; i < guard->state->count; i++) {
    cir_target *target = &guard->state->targets[i];
    cir_proc proc;
    int status = -1;
    cir_watch(guard, target); /* after a takeover nothing is held yet */
    struct pollfd gone = {guard->pidfds[i], POLLIN, 0};
    if (target->ended_at && (target->source != CIR_UNKNOWN || gone.fd < 0))
      continue;
    bool there = cir_proc_read(target->pid, &proc, &status) && proc.start == target->start;
    if ((gone.fd >= 0 ? poll(&gone, 1, 0) <= 0 : there && proc.alive) ||
        (there && proc.parent == getpid()))
      continue; /* alive, or waiting will tell */
    /* Where nobody has waited for it, the zombie itself tells. */
    bool told = pidfd_status(gone.fd, &status) || (there && status >= 0);
    note(guard, target, told ? CIR_PIDFD : CIR_UNKNOWN, status);
  }
}

/* A traced target has stopped: hand the signal on, or leave it stopped when a stop is what it was
 * sent. */
static void resume(pid_t pid, int status) {
  bool group_stop = status >> 16 == PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP;
  uintptr_t number = status >> 16 == PTRACE_EVENT_STOP ? 0 : (uintptr_t)WSTOPSIG(status);
  ptrace(group_stop ? PTRACE_LISTEN : PTRACE_CONT, pid, NULL, (void *)number);
}

/* Take in every child that has ended: note it first, then wait for it. Returns false when there are
 * no children. */
bool cir_reap(cir_guard *guard) {
  for (;;) {
    siginfo_t info = {0};
    cir_proc proc;
    int status;
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) != 0)
      return errno != ECHILD;
    if (info.si_pid == 0)
      return true;
    cir_target *target =
        cir_proc_read(info.si_pid, &proc, NULL) ? cir_find(guard->state, &proc) : NULL;
    if (info.si_code == CLD_EXITED || info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED) {
      status = info.si_code == CLD_EXITED ? (info.si_status & 0xff) << 8 : info.si_status;
      if (target)
        note(guard, target, target->seized ? CIR_PTRACE : CIR_WAIT, status);
      waitpid(info.si_pid, NULL, WNOHANG | __WALL);
    } else if (waitpid(info.si_pid, &status, WNOHANG | __WALL) == info.si_pid &&
               WIFSTOPPED(status)) {
      resume(info.si_pid, status);
    }
  }
}
