/*
 * child.c - the program that a guard's tests run: it says what happens to it, and saves when it
 * gets a SIGTERM. Every line in JOURNAL (appended) is "NONCE PID EVENT".
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char usage[] =
    "child JOURNAL NONCE SAVE_MS STATUS [OPTION...]: without a signal it ends with 99 after 60 s\n"
    "  ignore      SIGTERM does nothing\n"
    "  workers     two forked workers, which die of SIGTERM; without both nothing can be saved\n"
    "  device=F    hold the file F open\n"
    "  root        (of a setuid copy) become root for good\n"
    "  chatter=N   print N lines of 64 bytes, in bursts\n"
    "  for=MS      end with STATUS after MS without a signal\n"
    "  until=F     end with STATUS without a signal when there is a file F\n"
    "  saved=F     the save lasts until there is a file F\n"
    "  forget=F    empty the environment when there is a file F\n"
    "  threads     the save is done by another thread than the main one\n"
    "  orphan      the same, and the main thread ends at once\n";

static const char *nonce;
static int journal = -1;
static volatile sig_atomic_t terms;
static long save, lines, start, limit = 60000;
static int status, device = -1, workers;
static const char *until, *saved, *forget;

static void say(const char *event) {
  char line[200];
  int length = snprintf(line, sizeof line, "%s %d %s\n", nonce, (int)getpid(), event);
  if (write(journal, line, (size_t)length) != length)
    abort();
}

static void on_term(int number) {
  (void)number;
  terms++;
  say("term");
}

static void on_usr1(int number) {
  (void)number;
  say("usr1");
}

static long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void nap(long milliseconds) {
  struct timespec t = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&t, NULL);
}

static void *idle(void *arg) {
  for (;;)
    nap(1000);
  return arg;
}

/* Print `lines` numbered lines of 64 bytes: a reader can tell what is lost, doubled or out of
 * order. */
static void chatter(long lines) {
  char line[80];
  for (long i = 0; i < lines; i++) {
    snprintf(line, sizeof line, "%020ld %042d\n", i, 0);
    for (size_t at = 0; at < 64;) {
      ssize_t put = write(i % 3 ? STDOUT_FILENO : STDERR_FILENO, line + at, 64 - at);
      if (put < 0 && errno != EINTR)
        say("write-error");
      if (put < 0 && errno != EINTR)
        return;
      at += put > 0 ? (size_t)put : 0;
    }
    if (i % 500 == 0)
      nap(5);
  }
}

/* Be at work until a signal or the end, and save. */
static void *work(void *arg) {
  say("ready");
  chatter(lines);
  while (!terms && now() - start < limit && !(until && access(until, F_OK) == 0)) {
    if (forget && access(forget, F_OK) == 0)
      for (char **variable = environ; *variable; variable++)
        memset(*variable, 0, strlen(*variable));
    nap(10);
  }
  if (!terms) {
    say("end");
    exit(until || limit < 60000 ? status : 99);
  }
  for (long begin = now(); now() - begin < save || (saved && access(saved, F_OK) != 0);)
    nap(10);
  for (int w = 0; w < workers; w++)
    if (waitpid(-1, NULL, WNOHANG) != 0) {
      say("lost");
      exit(96);
    }
  say("saved");
  if (device >= 0)
    close(device);
  exit(status);
  return arg;
}

int main(int argc, char **argv) {
  if (argc < 5) {
    fputs(usage, stderr);
    return 98;
  }
  nonce = argv[2];
  save = atol(argv[3]);
  status = atoi(argv[4]);
  start = now();
  bool orphan = false;
  pthread_t thread;
  journal = open(argv[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (journal < 0)
    return 98;
  struct sigaction action = {.sa_handler = on_term};
  for (int i = 5; i < argc; i++) {
    if (strcmp(argv[i], "ignore") == 0)
      action.sa_handler = SIG_IGN;
    else if (strcmp(argv[i], "workers") == 0)
      workers = 2;
    else if (strncmp(argv[i], "device=", 7) == 0)
      device = open(argv[i] + 7, O_RDWR | O_CLOEXEC);
    else if (strcmp(argv[i], "root") == 0 && setresuid(0, 0, 0) != 0)
      return 97;
    else if (strncmp(argv[i], "chatter=", 8) == 0)
      lines = atol(argv[i] + 8);
    else if (strncmp(argv[i], "for=", 4) == 0)
      limit = atol(argv[i] + 4);
    else if (strncmp(argv[i], "until=", 6) == 0)
      until = argv[i] + 6;
    else if (strncmp(argv[i], "saved=", 6) == 0)
      saved = argv[i] + 6;
    else if (strncmp(argv[i], "forget=", 7) == 0)
      forget = argv[i] + 7;
    else if (strcmp(argv[i], "orphan") == 0)
      orphan = true;
    else if (strcmp(argv[i], "threads") == 0)
      for (int t = 0; t < 4; t++)
        if (pthread_create(&thread, NULL, idle, NULL) != 0)
          return 97;
  }
  for (int w = 0; w < workers; w++) {
    pid_t pid = fork();
    if (pid == 0)
      for (;;)
        nap(1000);
  }
  sigaction(SIGTERM, &action, NULL);
  action.sa_handler = on_usr1;
  sigaction(SIGUSR1, &action, NULL);
  if (orphan && pthread_create(&thread, NULL, work, NULL) != 0)
    return 97;
  if (orphan)
    pthread_exit(NULL);
  work(NULL);
}
