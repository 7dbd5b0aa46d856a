/*
 * start.c - starting once, and adopting what was started.
 *
 * `run` leaves two processes behind, in a session of their own: the outer one waits for the inner
 * one, which is the command's guard. Both are subreapers: when the inner one is killed its children
 * become the outer one's, which goes on from the shared state. When both are killed, `adopt` finds
 * the processes by their environment.
 */
#include "guard.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

/* What the runner has staged; cwd is a descriptor. */
typedef struct {
  char *command, *shell, *environment;
  size_t environment_size;
  int cwd;
  mode_t mask;
} staged;

/* Read what was staged. What can be refused is refused here, while the attempt can be repaired. */
static int prepare(const char *directory, staged *start) {
  size_t size = 0;
  const char *shell = getenv("SHELL"), *home = getenv("HOME");
  if (!*cir_marker())
    return cir_fail("cannot tell the path of %s, by which its processes are known: %m", directory);
  start->command = cir_read("command", &size);
  if (!start->command)
    return cir_fail("cannot read %s/command: %m; stage it first", directory);
  if (strlen(start->command) != size)
    return cir_fail("%s/command holds a NUL byte: it must be text", directory);
  start->environment = cir_read("environment", &start->environment_size);
  if (!start->environment && errno != ENOENT)
    return cir_fail("cannot read %s/environment: %m", directory);
  for (size_t at = 0; at < start->environment_size; at += strlen(start->environment + at) + 1)
    if (!strchr(start->environment + at, '=') || start->environment[at] == '=')
      return cir_fail("%s/environment: the entry at byte %zu is not VARIABLE=VALUE and a NUL byte",
                      directory, at);
  start->shell = cir_first_line("shell");
  if (!start->shell || !*start->shell)
    start->shell = strdup(shell && shell[0] == '/' ? shell : "/bin/sh");
  if (access(start->shell, X_OK) != 0)
    return cir_fail("cannot run the shell %s: %m; name another in %s/shell", start->shell,
                    directory);
  char *cwd = cir_first_line("cwd"), path[8192]; /* a relative one is below the home directory */
  bool absolute = cwd && *cwd == '/';
  snprintf(path, sizeof path, "%s/%s", absolute || !home ? "" : home, cwd ? cwd + absolute : "");
  free(cwd);
  start->cwd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (start->cwd < 0 || faccessat(start->cwd, ".", X_OK, 0) != 0)
    return cir_fail("cannot enter the working directory %s: %m", path);
  return CIR_OK;
}

/* Take the lock of an attempt; -1 with errno, EEXIST when a guard has it. Who asks whether one has
 * it shares the lock for a moment, and who is about to start the attempt has it alone: both are
 * waited out. */
int cir_take_lock(void) {
  int lock = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  for (int tries = 6000; flock(lock, LOCK_EX | LOCK_NB) != 0; tries--) {
    int error = tries == 0 ? EBUSY : flock(lock, LOCK_SH | LOCK_NB) == 0 ? 0 : errno;
    if (error == EWOULDBLOCK)
      error = access("started", F_OK) == 0 ? EEXIST : 0;
    if (error) {
      close(lock);
      errno = error;
      return -1;
    }
    flock(lock, LOCK_UN);
    cir_nap(5);
  }
  return lock;
}

/* Make the attempt ours. 1: it is; 0: it was started before; -1: neither, and why was said. */
static int claim(const char *directory, staged *start, int *lock) {
  if (access("started", F_OK) == 0)
    return 0;
  if (prepare(directory, start) != CIR_OK)
    return -1;
  *lock = cir_take_lock();
  bool made = *lock >= 0 && mkdir("started", 0700) == 0;
  if (made || errno == EEXIST)
    return made;
  return -cir_fail("cannot make %s/started: %m; nothing was started", directory);
}

/* Map the shared state, a new one or the one that is there. NULL with errno; EPROTO: another build
 * of the guard made it; EAGAIN: somebody is making it, on a slow disk for seconds. */
cir_state *cir_map(bool fresh) {
  const uint32_t magic = 0x43524700u + (uint32_t)sizeof(cir_state);
  uint32_t found = 0;
  int file = fresh ? cir_reserve("state", sizeof(cir_state)) : open("state", O_RDWR | O_CLOEXEC);
  if (file < 0)
    return NULL;
  bool whole = pread(file, &found, sizeof found, 0) >= 0 &&
               lseek(file, 0, SEEK_END) >= (off_t)sizeof(cir_state);
  cir_state *state =
      whole ? mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (state != MAP_FAILED && fresh)
    *state = (cir_state){.magic = magic};
  if (state != MAP_FAILED && state->magic == magic && state->count <= CIR_TARGETS)
    return state;
  errno = found ? EPROTO : EAGAIN;
  return NULL;
}

/* Open what every guarding process needs and reserve the record's blocks. */
static int set_up(cir_guard *guard, const cir_options *options, bool fresh) {
  guard->state = cir_map(fresh);
  for (size_t i = 0; i < CIR_TARGETS; i++)
    guard->pidfds[i] = -1;
  if (fresh && guard->state) { /* first of all: who is killed from here on leaves the truth */
    strcpy(guard->state->error, "the guard was killed before it started the command");
    guard->state->options = *options;
    cir_boot_id(options, guard->state->boot_id, sizeof guard->state->boot_id);
    cir_clear_lock(guard);
  }
  int record = guard->state ? cir_reserve("exit.new", CIR_RECORD_SIZE) : -1;
  if (record < 0 || cir_log_open(guard) != 0 || (mkfifo("wake", 0600) != 0 && errno != EEXIST) ||
      (guard->wake = open("wake", O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0)
    return cir_fail("cannot set up the guard in %s: %m; %s", options->directory,
                    fresh ? "nothing was started" : "what runs goes on");
  close(record);
  return CIR_OK;
}

/* Leave the caller's session, terminal, streams and signals, in the child that becomes a guard. */
static void detach(cir_guard *guard) {
  sigset_t set;
  setsid();
  int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int stream = 0; stream <= 2; stream++)
    dup2(null, stream);
  signal(SIGCHLD, SIG_DFL); /* inherited as ignored it would take the children's statuses away */
  sigfillset(&set);
  sigprocmask(SIG_SETMASK, &set, NULL);
  guard->signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
}

/* Become the command when the guard says go, in the leader. What fails is left in the shared state.
 */
static void become_command(cir_state *state, const staged *start, const int go[2], int output) {
  char byte;
  sigset_t none;
  close(go[0]);
  if (read(go[1], &byte, 1) != 1)
    _exit(127); /* the guard is gone: nothing may run */
  state->error[0] = '\0';
  setsid();
  umask(start->mask);
  for (int number = 1; number < NSIG; number++)
    signal(number, SIG_DFL);
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  for (size_t at = 0; at < start->environment_size; at += strlen(start->environment + at) + 1)
    putenv(start->environment + at);
  putenv(cir_marker());
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  if (fchdir(start->cwd) == 0)
    execl(start->shell, basename(start->shell), "-c", start->command, (char *)NULL);
  snprintf(state->error, sizeof state->error, "cannot run %.99s: %m", start->shell);
  _exit(127);
}

/* Start the leader: it is noted, in DIR/pid too, before it may become the command. */
static void start_leader(cir_guard *guard, const staged *start) {
  cir_state *state = guard->state;
  cir_proc proc;
  char line[200];
  cir_text text = {line, sizeof line, 0};
  int go[] = {-1, -1}, output = open("output", O_RDWR | O_CLOEXEC);
  pid_t leader =
      output >= 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, go) == 0 ? fork() : -1;
  if (leader == 0)
    become_command(state, start, go, output);
  if (leader > 0) {
    close(go[1]);
    cir_proc_read(leader, &proc, NULL);
    cir_add(&text, "%d %llu %s\n", (int)leader, (unsigned long long)proc.start, state->boot_id);
  }
  if (leader < 0 || cir_replace("pid.new", "pid", &text) != 0) {
    snprintf(state->error, sizeof state->error, "cannot start the command: %m");
  } else {
    cir_target_add(guard, &proc);
    state->started_at = cir_wall();
    /* The other end is closed by exec, and by its failure. */
    if (write(go[0], "g", 1) != 1 || read(go[0], line, 1) != 0)
      strcpy(state->error, "the command was killed before it began");
    cir_proc_read(leader, &proc, NULL);
    memcpy(state->targets[0].exe, proc.exe, sizeof proc.exe);
  }
  close(go[0]);
  close(output);
  close(start->cwd); /* the guards hold no file system but the attempt's */
}

/* Fork a guard, to start what is staged or, without, to watch what is there, and wait until it
 * does. */
static int begin(cir_guard *guard, staged *start, const char *directory) {
  cir_state *state = guard->state;
  state->begun = false;
  pid_t outer = fork();
  if (outer < 0 && start)
    rmdir("started");
  if (outer < 0)
    return cir_fail("cannot start a guard for %s: %m; %s", directory,
                    start ? "nothing was started" : "what runs goes on");
  if (outer > 0) {
    close(guard->lock); /* it is the guard's */
    for (int tries = 30000; !__atomic_load_n(&state->begun, __ATOMIC_ACQUIRE); tries--) {
      /* A command may be over as soon as it has begun: who is gone may have begun before. */
      if (cir_guarded() ? tries == 0 : !__atomic_load_n(&state->begun, __ATOMIC_ACQUIRE))
        return cir_fail("the guard of %s %s", directory,
                        tries ? "died while it started" : "has not begun in 30 s");
      cir_nap(1);
    }
    return start && state->error[0] ? cir_fail("%s", state->error) : CIR_OK;
  }
  detach(guard);
  state->outer = getpid();
  if (start) {
    start->mask = umask(077);
    pid_t inner = fork();
    if (inner > 0) {
      close(start->cwd);
      exit(cir_outer_loop(guard, inner));
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  }
  guard->exit_info = cir_has_exit_info();
  if (start)
    start_leader(guard, start);
  exit(cir_guard_loop(guard));
}

/* `run DIR`: start the command once and leave a guard behind. */
int cir_run(const cir_options *options) {
  static cir_guard guard;
  static staged start;
  int claimed = claim(options->directory, &start, &guard.lock);
  bool good = claimed == 0 || (claimed > 0 && set_up(&guard, options, true) == CIR_OK);
  if (claimed > 0 && !good)
    rmdir("started"); /* it can be started when there is room again */
  if (!good || (claimed > 0 && begin(&guard, &start, options->directory) != CIR_OK))
    return CIR_FAILED;
  cir_status(options);
  return CIR_OK;
}

/* `adopt DIR`: guard what is left of an attempt whose guards were killed. Quiet, and CIR_OK where
 * there is nothing to do. */
int cir_adopt(const cir_options *options) {
  static cir_guard guard;
  /* In this order: who had the lock before may have written the record. */
  if (access("started", F_OK) != 0 || (guard.lock = cir_take_lock()) < 0 ||
      access("exit", F_OK) == 0)
    return CIR_OK;
  const cir_state *there = cir_map(false);
  char boot_id[64];
  cir_boot_id(options, boot_id, sizeof boot_id);
  if (!there || strcmp(there->boot_id, boot_id) != 0) {
    close(guard.lock);
    cir_status(options);
    return cir_refuse(CIR_LOST, "%s is lost: %s", options->directory,
                      there ? "the machine was started again" : "no state that this build knows");
  }
  if (set_up(&guard, options, false) != CIR_OK)
    return CIR_FAILED;
  guard.state->adopted = true;
  return begin(&guard, NULL, options->directory);
}
