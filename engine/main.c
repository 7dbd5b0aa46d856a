/*
 * main.c - the program. Everything a user sees of the command line is Lua (ciranda.cli.main); only
 * where the built-in modules are read from must be known before there is any Lua.
 */
#include "host.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* The directory given with --lua-dir (before the first word that is no option) or CIRANDA_LUA_DIR;
 * else NULL. */
static const char *lua_directory(int argc, char **argv) {
  static const char flag[] = "--lua-dir";
  const size_t length = sizeof flag - 1;
  for (int i = 1; i < argc && argv[i][0] == '-'; i++) {
    if (strncmp(argv[i], flag, length) != 0)
      continue;
    if (argv[i][length] == '=')
      return argv[i] + length + 1;
    if (argv[i][length] == '\0' && i + 1 < argc)
      return argv[i + 1];
  }
  const char *directory = getenv("CIRANDA_LUA_DIR");
  return directory != NULL && directory[0] != '\0' ? directory : NULL;
}

enum { CIR_DESCRIPTORS = 65536 /* more would slow programs that close every possible one */ };

/* A session is a descriptor, and a fleet has thousands: the usual soft limit of 1,024 is too low.
 */
static void raise_descriptor_limit(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= CIR_DESCRIPTORS)
    return;
  limit.rlim_cur = limit.rlim_max < CIR_DESCRIPTORS ? limit.rlim_max : CIR_DESCRIPTORS;
  setrlimit(RLIMIT_NOFILE, &limit);
}

/* Who starts us may have closed standard streams. What is opened first would take their place:
 * prints would reach a socket, and libuv aborts when it is to close such a descriptor. */
static void open_standard_streams(void) {
  int fd;
  do
    fd = open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO)
    close(fd);
}

int main(int argc, char **argv) {
  open_standard_streams();
  /* Name look-ups share libuv's pool; its default of 4 threads lets a few dead names hold up the
   * rest. */
  setenv("UV_THREADPOOL_SIZE", "16", 0);
  raise_descriptor_limit();
  return cir_main(argc, argv, lua_directory(argc, argv));
}
