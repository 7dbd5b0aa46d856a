/*
 * tree.c - who is there: the processes of the machine, which of them are ours, and what each of
 * them is.
 *
 * A process is ours when its parent chain reaches the guard. Where an earlier guard was killed the
 * chain is broken; then the attempt's variable in the environment marks the top of each piece. It
 * cannot be read in the middle of exec or exit: a top that was found once is remembered as a
 * target.
 */
#include "guard.h"
#include <dirent.h>

/*
 * What a program is, by the base name of its executable. Shells run command after command; xargs,
 * watch and find do the same. Wrappers run one command and end with it; some pass signals on.
 * Filters, and helpers like sleep and yes, serve another program: they never get a first signal.
 */
static const char *const names[] = {
    [CIR_SHELL] = " sh ash bash dash rbash zsh ksh ksh93 mksh fish tcsh csh yash xargs watch find ",
    [CIR_WRAPPER] =
        " sudo su doas runuser setpriv timeout nohup env stdbuf setsid tini tini-static dumb-init "
        "catatonit nice ionice chrt taskset numactl chroot unshare nsenter script time strace "
        "ltrace flock prlimit setarch linux64 systemd-cat systemd-inhibit bwrap runcon sg newgrp "
        "dbus-run-session expect ",
    [CIR_FILTER] =
        " tee cat grep egrep fgrep rg sed awk gawk mawk original-awk ts tr cut head tail sort "
        "uniq nl pv wc paste rev tac column fold fmt jq less more logger multilog svlogd s6-log "
        "rotatelogs cronolog split gzip pigz xz bzip2 zstd lz4 base64 od xxd hexdump iconv "
        "mbuffer sponge sleep yes echo printf seq true false date "};

static bool listed(const char *list, const char *name) {
  char word[40];
  snprintf(word, sizeof word, " %s ", name);
  return strstr(list, word) != NULL;
}

/* A file of /proc/PID; the caller frees it. */
static char *proc_file(pid_t pid, const char *name, size_t *size) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
  return cir_read(path, size);
}

/* The executable's path, empty where there is none to read. Returns whether we may look at the
 * process that closely. */
static bool exe_path(pid_t pid, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/%d/exe", (int)pid);
  ssize_t length = readlink(link, path, size - 1);
  path[length > 0 ? length : 0] = '\0';
  char *deleted = strstr(path, " (deleted)");
  if (deleted)
    *deleted = '\0';
  return length >= 0 || errno != EACCES;
}

/* Class a process by its executable's base name, or by comm (which `exe` still holds) where that
 * says nothing, as where one executable is many programs. */
static void classify(cir_proc *proc) {
  char path[4096];
  exe_path(proc->pid, path, sizeof path);
  const char *name = strrchr(path, '/');
  if (name && name[1] && !listed(" busybox coreutils toybox ", name + 1))
    snprintf(proc->exe, sizeof proc->exe, "%.33s", name + 1);
  while (proc->kind < CIR_PROGRAM && !listed(names[proc->kind], proc->exe))
    proc->kind++;
}

/* Fill proc from /proc/PID/stat; exit_status, when given, gets a zombie's status, or -1. Who may
 * not look closely at a process reads 0 for its status. */
bool cir_proc_read(pid_t pid, cir_proc *proc, int *exit_status) {
  char path[4096];
  bool shown = exit_status && exe_path(pid, path, sizeof path);
  char *stat = proc_file(pid, "stat", NULL);
  char *comm = stat ? strchr(stat, '(') : NULL, *end = stat ? strrchr(stat, ')') : NULL;
  bool good = comm && end && end[1] == ' ';
  *proc = (cir_proc){.pid = pid, .up = -1};
  if (good) {
    *end = '\0';
    snprintf(proc->exe, sizeof proc->exe, "%.33s", comm + 1);
    char *at = end + 3;
    unsigned long long fields[53] = {0}; /* as proc(5) numbers them */
    for (int field = 4; field <= 52 && *at; field++)
      fields[field] = strtoull(at, &at, 10);
    proc->parent = (pid_t)fields[4];
    proc->start = fields[22];
    /* The first thread may end before the others: it is a zombie then, the program is none. */
    proc->alive = (end[2] != 'Z' && end[2] != 'X') || fields[20] > 1;
    if (exit_status)
      *exit_status = proc->alive || !shown ? -1 : (int)fields[52];
  }
  free(stat);
  return good;
}

/* VARIABLE=DIR: what every process of the attempt has in its environment. Empty, with errno, where
 * the directory's path cannot be told. */
char *cir_marker(void) {
  static char marker[4200], directory[4096];
  if (!marker[0] && getcwd(directory, sizeof directory))
    snprintf(marker, sizeof marker, "CIRANDA_ATTEMPT_DIR=%s", directory);
  return marker;
}

/* Whether the process has the attempt's variable. */
static bool marked(pid_t pid) {
  size_t size = 0;
  char *environment = *cir_marker() ? proc_file(pid, "environ", &size) : NULL;
  bool found = false;
  for (size_t at = 0; at < size && !found; at += strlen(environment + at) + 1)
    found = strcmp(environment + at, cir_marker()) == 0;
  free(environment);
  return found;
}

static int by_pid(const void *a, const void *b) {
  return ((const cir_proc *)a)->pid - ((const cir_proc *)b)->pid;
}

/* Whether process i is ours. Each is asked once: the answer stays in `in_tree`. */
static bool belongs(cir_tree *tree, size_t i, cir_state *state) {
  cir_proc *proc = &tree->list[i];
  if (proc->visited)
    return proc->in_tree;
  proc->visited = true;
  if (proc->pid == state->guard || proc->pid == state->outer || proc->pid == getpid())
    return false;
  if (proc->up >= 0)
    proc->in_tree = proc->parent == state->guard || belongs(tree, (size_t)proc->up, state);
  if (!proc->in_tree && (state->adopted || state->guard == 0))
    proc->top = proc->in_tree = cir_find(state, proc) || marked(proc->pid);
  return proc->in_tree;
}

/* Read the process list, find parents by pid, mark and class what is ours. Returns how many of ours
 * are alive. */
size_t cir_tree_scan(cir_tree *tree, cir_state *state) {
  size_t alive = 0;
  DIR *directory = opendir("/proc");
  if (!directory)
    return 1; /* nothing can be seen, so nothing can be said to have ended */
  tree->count = 0;
  for (struct dirent *entry; (entry = readdir(directory));) { /* what is no number is read as 0 */
    tree->list = cir_room(tree->list, tree->count, &tree->size, sizeof *tree->list);
    tree->count += cir_proc_read((pid_t)atol(entry->d_name), &tree->list[tree->count], NULL);
  }
  closedir(directory);
  qsort(tree->list, tree->count, sizeof *tree->list, by_pid);
  for (size_t i = 0; i < tree->count; i++) {
    const cir_proc key = {.pid = tree->list[i].parent};
    const cir_proc *up = bsearch(&key, tree->list, tree->count, sizeof key, by_pid);
    tree->list[i].up = up ? (int)(up - tree->list) : -1;
  }
  for (size_t i = 0; i < tree->count; i++) {
    cir_proc *proc = &tree->list[i];
    if (!belongs(tree, i, state))
      continue;
    classify(proc);
    proc->ours = proc->alive;
    alive += proc->ours;
    if (proc->up >= 0) /* one that has ended counts until it was waited for */
      tree->list[proc->up].has_child = true;
  }
  return alive;
}

static bool has_prefix(const char *path, const char *prefixes) {
  for (size_t length; prefixes && *prefixes; prefixes += length + (prefixes[length] == ',')) {
    length = strcspn(prefixes, ",");
    if (length > 0 && strncmp(path, prefixes, length) == 0)
      return true;
  }
  return false;
}

/*
 * Look at the open descriptors: who holds a file whose path begins with one of the prefixes
 * (outside the tree too), and in the tree who writes which pipe and who reads one as its standard
 * input.
 */
void cir_tree_descriptors(cir_tree *tree, const char *prefixes) {
  tree->pipe_count = 0;
  for (size_t i = 0; i < tree->count; i++) {
    cir_proc *proc = &tree->list[i];
    char path[64], link[512];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)proc->pid);
    DIR *directory = proc->in_tree || prefixes ? opendir(path) : NULL;
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
      ssize_t length = readlinkat(dirfd(directory), entry->d_name, link, sizeof link - 1);
      link[length > 0 ? length : 0] = '\0';
      proc->holds = proc->holds || has_prefix(link, prefixes);
      if (!proc->in_tree || strncmp(link, "pipe:[", 6) != 0)
        continue;
      uint64_t pipe = strtoull(link + 6, NULL, 10);
      struct stat how; /* the link's own mode says how the descriptor was opened */
      if (strcmp(entry->d_name, "0") == 0)
        proc->stdin_pipe = pipe;
      else if (fstatat(dirfd(directory), entry->d_name, &how, AT_SYMLINK_NOFOLLOW) == 0 &&
               (how.st_mode & S_IWUSR)) {
        tree->pipes =
            cir_room(tree->pipes, tree->pipe_count, &tree->pipe_size, sizeof *tree->pipes);
        tree->pipes[tree->pipe_count].pipe = pipe;
        tree->pipes[tree->pipe_count++].writer = i;
      }
    }
    if (directory)
      closedir(directory);
  }
}

/* A hash (FNV-1a) of the executable's path and the arguments: equal for a program that is started
 * again. */
uint64_t cir_look(pid_t pid) {
  char path[4096];
  size_t size = 0;
  exe_path(pid, path, sizeof path);
  char *arguments = proc_file(pid, "cmdline", &size);
  uint64_t hash = 14695981039346656037u;
  for (const char *c = path; *c; c++)
    hash = (hash ^ (unsigned char)*c) * 1099511628211u;
  for (size_t i = 0; i < size; i++)
    hash = (hash ^ (unsigned char)arguments[i]) * 1099511628211u;
  free(arguments);
  return hash;
}
