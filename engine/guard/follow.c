/* follow.c - `follow DIR --from N`: the log's bytes from an offset on, until the attempt has ended
 * and all are out. */
#include "guard.h"
#include <sys/inotify.h>

/* ms: also where inotify has no instance left or the file system does not tell */
#define POLL 250

/* How the record says what is kept. */
#define FIRST "\"log_first\":"

/* Write all of it, also where whoever shares the stream has made it nonblocking. False with errno.
 */
static bool put(const char *data, size_t size) {
  while (size > 0) {
    ssize_t written = write(STDOUT_FILENO, data, size);
    if (written < 0 && errno != EAGAIN && errno != EINTR)
      return false;
    if (written < 0)
      poll(&(struct pollfd){STDOUT_FILENO, POLLOUT, 0}, 1, POLL);
    data += written > 0 ? written : 0;
    size -= written > 0 ? (size_t)written : 0;
  }
  return true;
}

/* Everything there is from *offset on. CIR_OK, or what went wrong, which was said. What is read may
 * have been given up meanwhile: then it was zeros. */
static int copy(int log, int64_t *offset, const volatile int64_t *first) {
  static char data[65536];
  ssize_t got;
  for (; (got = pread(log, data, sizeof data, *offset)) > 0; *offset += got)
    if (*offset < *first)
      return cir_fail("byte %lld of the log is no longer kept; the first that is kept is %lld",
                      (long long)*offset, (long long)*first);
    else if (!put(data, (size_t)got))
      return cir_fail("cannot write the log to standard output: %m");
  return got == 0 ? CIR_OK : cir_fail("cannot read the log: %m");
}

int cir_follow(const cir_options *options) {
  int64_t offset = options->from, grew = cir_now();
  const cir_state *state = cir_map(false);
  char *record = state ? NULL : cir_read("exit", NULL), *kept = strstr(record ? record : "", FIRST);
  int64_t kept_then = kept ? strtoll(kept + strlen(FIRST), NULL, 10) : 0;
  free(record);
  int log = open("log", O_RDONLY | O_CLOEXEC);
  if (log < 0)
    return cir_fail("cannot follow %s/log: %m (is the attempt started?)", options->directory);
  int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  inotify_add_watch(watch, "log", IN_MODIFY);
  inotify_add_watch(watch, ".", IN_MOVED_TO);
  for (;;) {
    bool ended = access("exit", F_OK) == 0, lost = !ended && !cir_guarded(); /* before the read */
    bool enough = ended || (options->leader_only && access("leader", F_OK) == 0);
    int64_t before = offset;
    int result = copy(log, &offset, state ? &state->log_first : &kept_then);
    if (result != CIR_OK || enough)
      return result;
    if (lost && access("exit", F_OK) != 0)
      return cir_refuse(CIR_LOST, "the guard of %s is gone: `adopt` or `stop` it",
                        options->directory);
    grew = offset > before ? cir_now() : grew;
    if (options->idle >= 0 && cir_now() - grew >= options->idle)
      return CIR_IDLE;
    struct pollfd fds[] = {{STDOUT_FILENO, 0, 0}, {watch, POLLIN, 0}}; /* -1 is ignored */
    poll(fds, 2, POLL);
    if (fds[0].revents & (POLLERR | POLLHUP))
      return cir_fail("standard output was closed");
    char events[4096];
    while (watch >= 0 && read(watch, events, sizeof events) > 0)
      ;
  }
}
