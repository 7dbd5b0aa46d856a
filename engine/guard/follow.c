/* follow.c - `follow DIR --from N`: the log's bytes from an offset on, until the attempt has ended
 * and all are out. */
#include "guard.h"
#include <sys/inotify.h>

#define POLL                                                                                       \
  250 /* ms: also where inotify has no instance left or the file system does not tell              \
       */

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

/* Everything there is from *offset on. CIR_OK, or what went wrong, which was said. */
static int copy(int log, int64_t *offset) {
  static char data[65536];
  ssize_t got;
  for (; (got = pread(log, data, sizeof data, *offset)) > 0; *offset += got)
    if (!put(data, (size_t)got))
      return cir_fail("cannot write the log to standard output: %s", strerror(errno));
  return got == 0 ? CIR_OK : cir_fail("cannot read the log: %s", strerror(errno));
}

int cir_follow(const cir_options *options) {
  int64_t offset = options->from, grew = cir_now();
  int log = open("log", O_RDONLY | O_CLOEXEC);
  if (log < 0)
    return cir_fail("cannot follow %s/log: %s (is the attempt started?)", options->directory,
                    strerror(errno));
  if (offset > lseek(log, 0, SEEK_END))
    return cir_fail("--from %lld is beyond the log's end, %lld", (long long)offset,
                    (long long)lseek(log, 0, SEEK_END));
  int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  inotify_add_watch(watch, "log", IN_MODIFY);
  inotify_add_watch(watch, ".", IN_MOVED_TO);
  for (;;) {
    bool ended = access("exit", F_OK) == 0, lost = !ended && !cir_guarded(); /* before the read */
    int64_t before = offset;
    int result = copy(log, &offset);
    if (result != CIR_OK || ended)
      return result;
    if (lost && access("exit", F_OK) != 0) {
      cir_fail("the guard of %s is gone: `adopt` or `stop` it", options->directory);
      return CIR_LOST;
    }
    if (offset > before)
      grew = cir_now();
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
