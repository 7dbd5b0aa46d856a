/*
 * guard.h - ciranda-guard: what its files share.
 *
 * The guard runs one command on a worker and outlives every connection. An attempt is a directory;
 * every subcommand enters it first, so that all its files have short relative names:
 *
 *   command environment cwd shell   written by the runner before the start
 *   started/                        made once, by mkdir: whoever makes it starts the command
 *   pid log alive leader            written while the command runs; a log offset only grows
 *   exit                            the record, whole by rename, when nothing of it is left
 *   state output wake *.new         the guard's own, removed at the end
 *
 * `state` is mapped by everyone who works on the attempt: what is asked of a guard, and what it has
 * done, outlives it.
 */
#ifndef CIR_GUARD_H
#define CIR_GUARD_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CIR_TARGETS 1024                     /* processes whose delivery is remembered */
#define CIR_RECORD_SIZE 32768                /* bytes reserved for the exit record */
#define CIR_WORD 256                         /* the longest option, in bytes with its NUL */
#define cir_now() cir_clock(CLOCK_BOOTTIME)  /* milliseconds since boot */
#define cir_wall() cir_clock(CLOCK_REALTIME) /* milliseconds since 1970 */
#define cir_nap(milliseconds) poll(NULL, 0, milliseconds)

/* Exit statuses of the subcommands. */
enum { CIR_OK, CIR_FAILED, CIR_USAGE, CIR_LOST, CIR_IDLE };

/* Where a status came from. CIR_AUTO is only an option: the best source that the kernel has. */
typedef enum { CIR_UNKNOWN, CIR_WAIT, CIR_PIDFD, CIR_PTRACE, CIR_AUTO } cir_source;

typedef enum { CIR_SHELL, CIR_WRAPPER, CIR_FILTER, CIR_PROGRAM } cir_kind;

/* The first wave is whom a stop is for; the second is what is left of the tree afterwards. */
typedef enum { CIR_NO_WAVE, CIR_FIRST, CIR_SECOND } cir_wave;

/* The command line. Times are milliseconds; idle is below 0 when it was not given. */
typedef struct {
  const char *directory;
  char word[CIR_WORD], devices[CIR_WORD], lock[CIR_WORD], boot_id_file[CIR_WORD];
  int64_t grace, linger, idle, from, keep, leader_only;
  cir_source method;
} cir_options;

/* A process that is watched: the leader (always the first), every process that was sent a TERM, and
 * the top of each piece of a tree that was adopted. */
typedef struct {
  uint64_t start; /* clock ticks since boot: pid, start and boot id are a process' key */
  uint64_t look;  /* hash of executable and arguments */
  int64_t signalled_at, ended_at; /* wall clock; 0: not yet */
  pid_t pid;
  int delivery; /* 0, an errno, or -1 while the signal is being sent */
  int status;   /* as wait() gives it, once source is not CIR_UNKNOWN */
  cir_source source;
  cir_wave wave;
  bool seized;
  char exe[34];
} cir_target;

/* The shared state. Times are milliseconds since boot, those ending in _at since 1970. */
typedef struct {
  uint32_t magic, takeovers, killed, untracked, count, outside_count;
  pid_t guard, outer, outside[8]; /* outside: holders of the device that are not ours */
  int64_t started_at, stop_at, asked, linger, first_ended, log_size, log_first, log_grew;
  uint64_t stop_ticks, dropped;
  cir_wave wave;
  bool begun, announced, adopted;
  cir_options options; /* of `run`: they are every later guard's too */
  char reason[CIR_WORD], error[200], boot_id[64];
  cir_target targets[CIR_TARGETS];
} cir_state;

typedef struct {
  uint64_t start, stdin_pipe; /* the pipe's inode, 0 when standard input is none */
  pid_t pid, parent;
  int up; /* index of the parent, -1 when it is not in the list */
  cir_kind kind;
  /* alive: a thread of it can run; ours: alive and in the tree */
  bool alive, in_tree, ours, visited, top, has_child, holds, fed, chosen;
  char exe[34];
} cir_proc;

/* Every process of the machine, by pid, and who writes which pipe. Kept from scan to scan. */
typedef struct {
  cir_proc *list;
  struct {
    uint64_t pipe;
    size_t writer;
  } * pipes;
  size_t count, size, pipe_count, pipe_size;
} cir_tree;

/* What one guarding process owns. */
typedef struct {
  cir_state *state;
  cir_tree tree;
  int lock, output, log, wake, signals;
  bool exit_info;          /* pidfds tell the exit status */
  int pidfds[CIR_TARGETS]; /* -1 when there is none */
} cir_guard;

typedef struct {
  char *data;
  size_t size, used;
} cir_text;

/* file.c: messages, text, small files, clocks */
int cir_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define cir_refuse(status, ...) (cir_fail(__VA_ARGS__), (status)) /* with a status of its own */
void cir_add(cir_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void cir_add_string(cir_text *text, const char *string);
void *cir_room(void *list, size_t count, size_t *size, size_t each);
char *cir_read(const char *path, size_t *size);
char *cir_first_line(const char *path);
void cir_boot_id(const cir_options *options, char *id, size_t size);
int cir_replace(const char *temporary, const char *path, const cir_text *text);
int cir_reserve(const char *path, size_t size);
int64_t cir_clock(clockid_t clock);

/* tree.c: who is there */
bool cir_proc_read(pid_t pid, cir_proc *proc, int *exit_status);
size_t cir_tree_scan(cir_tree *tree, cir_state *state);
void cir_tree_descriptors(cir_tree *tree, const char *prefixes);
uint64_t cir_look(pid_t pid);
char *cir_marker(void);

/* deliver.c: whom a signal is for, and sending it */
void cir_ask(cir_state *state, int64_t grace, int64_t linger, const char *reason);
bool cir_stop_step(cir_guard *guard);
void cir_signal(cir_state *state, int number, cir_text *reply);
cir_target *cir_target_add(cir_guard *guard, const cir_proc *proc);

/* outcome.c: how a process ended */
cir_target *cir_find(cir_state *state, const cir_proc *proc);
void cir_watch(cir_guard *guard, cir_target *target);
void cir_settle(cir_guard *guard);
bool cir_reap(cir_guard *guard);
bool cir_has_exit_info(void);

/* log.c: from the command's output to the file */
int cir_log_open(cir_guard *guard);
void cir_log_resume(const cir_guard *guard);
bool cir_log_drain(cir_guard *guard);

/* record.c: what is said about an attempt */
void cir_describe(const cir_state *state, cir_text *text);
int cir_record_write(const cir_state *state);
void cir_announce(cir_state *state);
void cir_add_delivery(cir_text *text, int delivery);

/* supervise.c: the loop of a guard */
void cir_clear_lock(cir_guard *guard);
int cir_guard_loop(cir_guard *guard);
int cir_outer_loop(cir_guard *guard, pid_t inner);

/* start.c: starting once, and adopting */
cir_state *cir_map(bool fresh);
int cir_take_lock(void);
int cir_run(const cir_options *options);
int cir_adopt(const cir_options *options);

/* request.c: what is asked about an attempt, and of its guard */
bool cir_guarded(void);
int cir_status(const cir_options *options);
int cir_stop(const cir_options *options);
int cir_ask_signal(const cir_options *options);

/* follow.c */
int cir_follow(const cir_options *options);

#endif
