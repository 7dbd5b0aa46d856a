/*
 * child.c - the program that a guard's tests run: it says what happens to it, and saves when it
 * gets a SIGTERM.
 *
 *   child JOURNAL NONCE SAVE_MS STATUS [OPTION...]
 *
 * Every line in JOURNAL (appended) is "NONCE PID EVENT". Without a signal it ends with status 99
 * after 60 s. ignore      SIGTERM does nothing workers     two forked workers, which die of
 * SIGTERM; without both of them there is nothing to save device=F    hold the file F open root (of
 * a setuid copy) become root for good chatter=N   print N lines of 64 bytes, in bursts for=MS end
 * with STATUS after MS without a signal threads     the save is done by another thread than the
 * main one
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *nonce;
static int journal = -1;
static volatile sig_atomic_t terms;

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

int main(int argc, char **argv) {
  if (argc < 5)
    return 98;
  nonce = argv[2];
  long save = atol(argv[3]), lines = 0, limit = 60000, start = now();
  int status = atoi(argv[4]), device = -1, workers = 0;
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
    else if (strcmp(argv[i], "threads") == 0)
      for (int t = 0; t < 4; t++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, idle, NULL) != 0)
          return 97;
      }
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
  say("ready");
  chatter(lines);
  while (!terms && now() - start < limit)
    nap(10);
  if (!terms) {
    say("end");
    return limit < 60000 ? status : 99;
  }
  for (long begin = now(); now() - begin < save;)
    nap(10);
  for (int w = 0; w < workers; w++)
    if (waitpid(-1, NULL, WNOHANG) != 0) {
      say("lost");
      return 96;
    }
  say("saved");
  if (device >= 0)
    close(device);
  return status;
}
