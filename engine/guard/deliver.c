/*
 * deliver.c - whom a signal is for, and sending it.
 *
 * A key (boot id, pid, start time) is sent at most one TERM, whatever happens to the guard in
 * between: the delivery is noted in the shared state before the signal is sent.
 */
#include "guard.h"

/* Send a signal to exactly that process: a pid may have come to name another one. Returns 0 or an
 * errno. */
static int send_signal(int held, pid_t pid, uint64_t start, int number) {
  int pidfd = held >= 0 ? held : (int)syscall(SYS_pidfd_open, pid, 0);
  cir_proc proc;
  int error = ESRCH;
  if (cir_proc_read(pid, &proc, NULL) && proc.start == start) {
    long sent =
        pidfd >= 0 ? syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0) : kill(pid, number);
    error = sent == 0 ? 0 : errno;
  }
  if (held < 0)
    close(pidfd);
  return error;
}

/* Note a process. In a full table an entry of the second wave that has ended makes room; NULL if
 * there is none. */
cir_target *cir_target_add(cir_guard *guard, const cir_proc *proc) {
  cir_state *state = guard->state;
  uint32_t at = state->count < CIR_TARGETS ? state->count : 1;
  while (at < state->count &&
         !(state->targets[at].wave == CIR_SECOND && state->targets[at].ended_at))
    at++;
  if (at == CIR_TARGETS)
    return NULL;
  close(guard->pidfds[at]);
  guard->pidfds[at] = -1;
  state->targets[at] = (cir_target){.pid = proc->pid, .start = proc->start};
  if (at == state->count)
    __atomic_store_n(&state->count, at + 1, __ATOMIC_RELEASE);
  return &state->targets[at];
}

/* TERM to one process, unless it had one. */
static void terminate(cir_guard *guard, const cir_proc *proc, cir_wave wave) {
  cir_target *target = cir_find(guard->state, proc);
  if (target && target->wave != CIR_NO_WAVE)
    return;
  if (!target && !(target = cir_target_add(guard, proc))) {
    guard->state->untracked++; /* the KILL at the end of the grace is for it */
    return;
  }
  /* The leader may have become another program. */
  memcpy(target->exe, proc->exe, sizeof target->exe);
  target->look = cir_look(proc->pid);
  target->signalled_at = cir_wall();
  target->delivery = -1;
  target->wave = wave;
  cir_watch(guard, target);
  target->delivery =
      send_signal(guard->pidfds[target - guard->state->targets], proc->pid, proc->start, SIGTERM);
}

/* Whether an ancestor within the tree is a program (and holds the device, when that is asked). */
static bool under_program(const cir_tree *tree, const cir_proc *proc, bool holder) {
  for (int i = proc->up; i >= 0 && tree->list[i].in_tree; i = tree->list[i].up)
    if (tree->list[i].kind == CIR_PROGRAM && tree->list[i].ours && (!holder || tree->list[i].holds))
      return true;
  return false;
}

/* Whether a chosen process writes the pipe that this one reads as its standard input, itself or
 * through what is no program: filters, a shell that reads lines, a link that is still the shell
 * which will become the filter. */
static bool fed(const cir_tree *tree, size_t reader, int depth) {
  for (size_t i = 0; i < tree->pipe_count && tree->list[reader].stdin_pipe; i++) {
    size_t writer = tree->pipes[i].writer;
    if (tree->pipes[i].pipe == tree->list[reader].stdin_pipe && writer != reader &&
        (tree->list[writer].chosen ||
         (tree->list[writer].kind != CIR_PROGRAM && depth < 8 && fed(tree, writer, depth + 1))))
      return true;
  }
  return false;
}

/*
 * Mark whom a signal is for: the topmost programs that hold the device; else the topmost programs,
 * less those that read another one's output; else the shells; else what is at the top. Never the
 * leaves: workers that a trainer forked would die before it, and the save would be lost.
 */
static void choose(cir_tree *tree, const char *devices) {
  size_t count = 0, kept = 0;
  cir_tree_descriptors(tree, devices);
  for (int rule = 1; rule <= 4 && count == 0; rule++)
    for (size_t i = 0; i < tree->count; i++) {
      cir_proc *proc = &tree->list[i];
      bool program = proc->kind == CIR_PROGRAM;
      proc->chosen =
          proc->ours && (rule == 1   ? program && proc->holds && !under_program(tree, proc, true)
                         : rule == 2 ? program && !under_program(tree, proc, false)
                         : rule == 3 ? proc->kind == CIR_SHELL
                                     : proc->up < 0 || !tree->list[proc->up].in_tree);
      count += proc->chosen;
    }
  for (size_t i = 0; i < tree->count; i++) {
    cir_proc *proc = &tree->list[i];
    proc->fed = proc->chosen && proc->kind == CIR_PROGRAM && !proc->holds && fed(tree, i, 0);
    kept += proc->chosen && !proc->fed;
  }
  for (size_t i = 0; i < tree->count && kept > 0; i++)
    tree->list[i].chosen = tree->list[i].chosen && !tree->list[i].fed;
}

/* Ask the guard to stop. Asked again it sends nothing more, but an earlier end of the grace counts.
 */
void cir_ask(cir_state *state, int64_t grace, int64_t linger, const char *reason) {
  int64_t end = cir_now() + grace, old = state->asked;
  if (old == 0) {
    snprintf(state->reason, sizeof state->reason, "%s", reason);
    state->linger = linger;
  }
  while ((old == 0 || end < old) &&
         !__atomic_compare_exchange_n(&state->asked, &old, end, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE))
    ;
}

static void first_wave(cir_guard *guard, cir_tree *tree) {
  cir_state *state = guard->state;
  state->stop_ticks = (uint64_t)(cir_now() * sysconf(_SC_CLK_TCK) / 1000);
  state->stop_at = cir_wall();
  choose(tree, state->options.devices);
  for (size_t i = 0; i < tree->count; i++)
    if (tree->list[i].chosen)
      terminate(guard, &tree->list[i], CIR_FIRST);
    else if (tree->list[i].holds && !tree->list[i].in_tree && state->outside_count < 8)
      state->outside[state->outside_count++] = tree->list[i].pid;
  state->wave = CIR_FIRST;
}

/* Whether a process lives below one of the first wave that has not ended: that one's business, not
 * a restart. */
static bool below_target(cir_state *state, const cir_tree *tree, const cir_proc *proc) {
  for (int i = proc->up; i >= 0 && tree->list[i].in_tree; i = tree->list[i].up) {
    const cir_target *target = cir_find(state, &tree->list[i]);
    if (target && target->wave == CIR_FIRST && !target->ended_at)
      return true;
  }
  return false;
}

/* A program that was stopped and is started again by its shell (`while true; do CMD; done`): stop
 * both, shell first. */
static void stop_restarts(cir_guard *guard, const cir_tree *tree) {
  cir_state *state = guard->state;
  for (size_t i = 0; i < tree->count; i++) {
    const cir_proc *proc = &tree->list[i];
    if (!proc->ours || proc->kind != CIR_PROGRAM || proc->start < state->stop_ticks ||
        cir_find(state, proc) || below_target(state, tree, proc))
      continue;
    uint64_t look = cir_look(proc->pid);
    bool again = false;
    for (uint32_t t = 0; t < state->count; t++)
      again = again || (state->targets[t].wave == CIR_FIRST && state->targets[t].look == look);
    for (int up = proc->up; again && up >= 0 && tree->list[up].ours; up = tree->list[up].up)
      if (tree->list[up].kind == CIR_SHELL)
        terminate(guard, &tree->list[up], CIR_SECOND);
    if (again)
      terminate(guard, proc, CIR_SECOND);
  }
}

/*
 * What the first wave left: shells, then the others. A filter that reads a pipe ends by itself when
 * its writer has; a wrapper ends with what it runs and may pass a signal on, so it is left alone
 * while something lives below it.
 */
static void second_wave(cir_guard *guard, cir_tree *tree) {
  cir_tree_descriptors(tree, NULL);
  for (int others = 0; others <= 1; others++)
    for (size_t i = 0; i < tree->count; i++) {
      const cir_proc *proc = &tree->list[i];
      if (proc->ours && (proc->kind != CIR_SHELL) == (others == 1) &&
          !(proc->kind == CIR_FILTER && proc->stdin_pipe) &&
          !(proc->kind == CIR_WRAPPER && proc->has_child))
        terminate(guard, proc, CIR_SECOND);
    }
}

/* One step of a stop that is under way; the caller comes back every few milliseconds. Returns false
 * when there is none. */
bool cir_stop_step(cir_guard *guard) {
  static cir_tree tree;
  cir_state *state = guard->state;
  bool waiting = false, first_kill = state->killed == 0;
  if (state->asked == 0)
    return false;
  cir_tree_scan(&tree, state);
  cir_settle(guard);
  for (uint32_t i = 0; i < state->count; i++)
    waiting = waiting || (state->targets[i].wave == CIR_FIRST && !state->targets[i].ended_at);
  if (state->wave == CIR_NO_WAVE) {
    first_wave(guard, &tree);
  } else if (cir_now() < state->asked) {
    if (!waiting && state->first_ended == 0)
      state->first_ended = cir_now();
    stop_restarts(guard, &tree);
    if (!waiting && cir_now() >= state->first_ended + state->linger)
      state->wave = CIR_SECOND;
    if (state->wave == CIR_SECOND)
      second_wave(guard, &tree);
  }
  for (size_t i = 0; i < tree.count && cir_now() >= state->asked; i++)
    if (tree.list[i].in_tree && send_signal(-1, tree.list[i].pid, tree.list[i].start, SIGKILL) == 0)
      state->killed += first_kill && tree.list[i].ours;
  return true;
}

/* Any other signal, to those a stop would be for. The reply says for each whether it was delivered.
 */
void cir_signal(cir_state *state, int number, cir_text *reply) {
  static cir_tree tree;
  const char *comma = "";
  cir_tree_scan(&tree, state);
  choose(&tree, state->options.devices);
  cir_add(reply, "{\"signal\":%d,\"targets\":[", number);
  for (size_t i = 0; i < tree.count; i++)
    if (tree.list[i].chosen) {
      int error = send_signal(-1, tree.list[i].pid, tree.list[i].start, number);
      cir_add(reply, "%s{\"pid\":%d,\"exe\":", comma, (int)tree.list[i].pid);
      cir_add_string(reply, tree.list[i].exe);
      cir_add_delivery(reply, error);
      comma = ",";
    }
  cir_add(reply, "]}");
}
