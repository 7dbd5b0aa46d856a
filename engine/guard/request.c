/*
 * request.c - what is asked about an attempt, and of its guard. All of it goes through the shared
 * state, so nothing that was asked is lost with a guard. Everything is called inside the attempt's
 * directory.
 */
#include "guard.h"

/* Whether a guard, or a `run` that is about to become one, holds the attempt. */
bool cir_guarded(void) {
  int directory = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  bool held = flock(directory, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  close(directory);
  return held;
}

/* Print a line on standard output. Returns the exit status. */
static int print(const char *line, int status) {
  return printf("%.*s\n", (int)strcspn(line, "\n"), line) > 0 && fflush(stdout) == 0
             ? status
             : cir_fail("cannot write to standard output");
}

/* The state of an attempt that runs, once it has begun; NULL when none runs. */
static cir_state *running(void) {
  cir_state *state = NULL;
  for (int tries = 6000; tries > 0 && cir_guarded() && access("exit", F_OK) != 0; tries--) {
    state = state ? state : cir_map(false);
    if (state && __atomic_load_n(&state->begun, __ATOMIC_ACQUIRE))
      return state;
    tries -= !state && errno == EPROTO ? 30 : 0; /* another build's guard: do not wait for long */
    cir_nap(5);
  }
  return NULL;
}

/* `status DIR`: one line of JSON. */
int cir_status(const cir_options *options) {
  static char data[2 * CIR_RECORD_SIZE], boot_id[64];
  static cir_state copy;
  static cir_tree tree;
  cir_text text = {data, sizeof data, 0};
  /* In this order: who has started and is not guarded any more has written the record before. */
  bool started = access("started", F_OK) == 0;
  const cir_state *state = running();
  bool guarded = state || cir_guarded();
  char *record = cir_read("exit", NULL);
  bool lost = !record && started && !guarded;
  if (!record && (state || (state = cir_map(false))))
    copy = *state;
  if (lost) /* only the marks tell who is ours: the guards' pids may be another's by now */
    copy.guard = copy.outer = 0;
  cir_boot_id(options, boot_id, sizeof boot_id);
  cir_add(&text, "{\"state\":\"%s\",\"rebooted\":%s",
          record                 ? "exited"
          : lost                 ? "lost"
          : !started && !guarded ? "staged"
          : copy.asked           ? "stopping"
                                 : "running",
          lost && copy.magic && strcmp(copy.boot_id, boot_id) != 0 ? "true" : "false");
  if (copy.begun) {
    cir_tree_scan(&tree, &copy);
    cir_add(&text, ",\"pid\":%d,\"guard\":%d,\"outer\":%d,\"log_idle\":%.3f",
            (int)copy.targets[0].pid, (int)copy.guard, (int)copy.outer,
            (double)(cir_now() - copy.log_grew) / 1000);
    cir_describe(&copy, &text);
  }
  cir_add(&text, ",\"processes\":[");
  for (size_t i = 0, n = 0; i < tree.count; i++)
    if (tree.list[i].ours && text.size - text.used > 2 * CIR_WORD)
      cir_add(&text, "%s%d", n++ ? "," : "", (int)tree.list[i].pid);
  cir_add(&text, "],\"record\":%.*s}", record ? (int)strcspn(record, "\n") : 4,
          record ? record : "null");
  free(record);
  return print(data, lost ? CIR_LOST : CIR_OK);
}

/* An attempt that was never started never will be: a `run` that arrives late finds it ended. One
 * that is being started, or ended by another `stop`, is left to that. */
static int stop_staged(const cir_options *options) {
  static cir_state state;
  state.stop_at = cir_wall();
  strcpy(state.error, "stopped before it was started");
  snprintf(state.reason, sizeof state.reason, "%s", options->word);
  cir_boot_id(options, state.boot_id, sizeof state.boot_id);
  bool made =
      cir_take_lock() >= 0 && mkdir("started", 0700) == 0; /* locked until this process ends */
  if (made ? cir_record_write(&state) == 0 : errno == EEXIST)
    return CIR_OK;
  cir_fail("cannot mark %s as stopped: %m", options->directory);
  if (made) { /* a stop that failed can be asked again */
    unlink("exit.new");
    rmdir("started");
  }
  return CIR_FAILED;
}

/* `stop DIR`: ask, wait until the attempt has ended, print the record. */
int cir_stop(const cir_options *options) {
  if (access("exit", F_OK) != 0 && !cir_guarded()) {
    int result = access("started", F_OK) == 0 ? cir_adopt(options) : stop_staged(options);
    if (result != CIR_OK)
      return result;
  }
  cir_state *state = running();
  if (state) {
    cir_ask(state, options->grace, options->linger, options->word);
    int wake = open("wake", O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    dprintf(wake, "w"); /* and without: the guard looks every few seconds */
    close(wake);
    fputs("asked\n", stderr); /* whatever becomes of this process, the guard carries it out */
  }
  int64_t end = cir_now() + options->grace + 15000;
  while (state && access("exit", F_OK) != 0 && cir_guarded() && cir_now() < end)
    cir_nap(20);
  char *record = cir_read("exit", NULL);
  if (!record) {
    cir_status(options);
    return cir_fail("%s %s; the line above says what is known", options->directory,
                    !cir_guarded() ? "has lost its guard: ask again"
                    : state        ? "has not ended after the grace"
                                   : "has a guard of another build");
  }
  int result = print(record, CIR_OK);
  free(record);
  return result;
}

/* `signal DIR NAME`: to those a stop would be for. The name is one with or without SIG, or a
 * number. */
int cir_ask_signal(const cir_options *options) {
  /* Seven characters each, from signal 1 on. */
  static const char names[] =
      " HUP    INT    QUIT   ILL    TRAP   ABRT   BUS    FPE    KILL   USR1   SEGV   USR2  "
      " PIPE   ALRM   TERM   STKFLT CHLD   CONT   STOP   TSTP   TTIN   TTOU   URG    XCPU  "
      " XFSZ   VTALRM PROF   WINCH  IO     PWR    SYS    ";
  static char data[2 * CIR_RECORD_SIZE];
  cir_text text = {data, sizeof data, 0};
  const char *word = options->word + (strncasecmp(options->word, "SIG", 3) == 0 ? 3 : 0);
  char name[16], *end = "";
  snprintf(name, sizeof name, " %.8s ", word);
  const char *at = strcasestr(names, name);
  long number = at ? (at - names) / 7 + 1 : strtol(word, &end, 10);
  if (!*word || *end || number < 1 || number > SIGSYS || number == SIGTERM)
    return cir_refuse(CIR_USAGE, "signal: \"%s\" is no name or number; TERM is sent by `stop`",
                      options->word);
  cir_state *state = running();
  if (!state)
    return cir_fail("%s: not running", options->directory);
  cir_signal(state, (int)number, &text);
  return print(data, CIR_OK);
}
