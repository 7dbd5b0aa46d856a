/* main.c - ciranda-guard's command line. */
#include "guard.h"

static const char usage[] =
    "usage: ciranda-guard COMMAND DIR [OPTION VALUE]...\n"
    "  run DIR          start DIR/command once, in the background\n"
    "  follow DIR       copy DIR/log to standard output until the attempt has ended\n"
    "  stop DIR         ask it to end, wait until it has, print the record\n"
    "  signal DIR NAME  send another signal to those a stop would be for\n"
    "  status DIR       print one line of JSON\n"
    "  adopt DIR        guard an attempt whose guard was killed\n"
    "options (times in seconds):\n"
    "  --grace S        from the request to stop to SIGKILL (300)\n"
    "  --linger S       from the end of the programs to the stop of the rest (2)\n"
    "  --reason TEXT    why it is stopped, for the record\n"
    "  --devices P,P    where the accelerator's device files begin (/dev/accel,/dev/vfio/)\n"
    "  --lock FILE      lock file to remove when nobody holds it or the device\n"
    "  --boot-id-file F (/proc/sys/kernel/random/boot_id)\n"
    "  --method M       how statuses are learned: auto wait pidfd ptrace unknown (auto)\n"
    "  --keep N         bytes of the log that are kept at least, in place of all (0: all)\n"
    "  --from N         follow: the offset of the first byte (0); beyond the end: wait only\n"
    "  --leader-only 1  follow: until the leader has ended, not its tree\n"
    "  --idle-exit S    follow: leave with status 4 when nothing came for so long\n"
    "exit status: 0 done, 1 failed, 2 usage, 3 the guard is lost, 4 idle\n";

/* Set one option. False when the name or the value is none. */
static bool set_option(cir_options *options, const char *name, const char *value) {
  static const char *const methods[] = {"unknown", "wait", "pidfd", "ptrace", "auto"};
  const struct {
    const char *name;
    char *text;
    int64_t *number;
    int scale;
  } known[] = {
      {"--grace", NULL, &options->grace, 1000}, {"--linger", NULL, &options->linger, 1000},
      {"--from", NULL, &options->from, 1},      {"--idle-exit", NULL, &options->idle, 1000},
      {"--keep", NULL, &options->keep, 1},      {"--leader-only", NULL, &options->leader_only, 1},
      {"--reason", options->word, NULL, 0},     {"--devices", options->devices, NULL, 0},
      {"--lock", options->lock, NULL, 0},       {"--boot-id-file", options->boot_id_file, NULL, 0}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    char *end;
    if (strcmp(name, known[i].name) != 0)
      continue;
    if (known[i].text)
      return snprintf(known[i].text, CIR_WORD, "%s", value) < CIR_WORD;
    double number = strtod(value, &end) * known[i].scale;
    bool good = end != value && *end == '\0' && number >= 0 && number < 9e15;
    *known[i].number = good ? (int64_t)number : 0;
    return good;
  }
  int method = strcmp(name, "--method") == 0 ? CIR_UNKNOWN : CIR_AUTO + 1;
  while (method <= CIR_AUTO && strcmp(value, methods[method]) != 0)
    method++;
  options->method = method <= CIR_AUTO ? (cir_source)method : options->method;
  return method <= CIR_AUTO;
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    int (*function)(const cir_options *options);
  } commands[] = {{"run", cir_run},           {"follow", cir_follow}, {"stop", cir_stop},
                  {"signal", cir_ask_signal}, {"status", cir_status}, {"adopt", cir_adopt}};
  cir_options options = {.grace = 300000, .linger = 2000, .idle = -1, .method = CIR_AUTO};
  strcpy(options.word, "asked to stop");
  strcpy(options.devices, "/dev/accel,/dev/vfio/");
  strcpy(options.boot_id_file, "/proc/sys/kernel/random/boot_id");
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is an error like another */
  for (int fd = 0; fd >= 0 && fd <= STDERR_FILENO;)
    fd = open("/dev/null", O_RDWR); /* so that no file of ours becomes a standard stream */
  if (syscall(SYS_close_range, 3u, ~0u, 0u) != 0)
    for (int fd = 3; fd < 1024; fd++)
      close(fd); /* what the caller forgot to close would hold its connection open */
  if (argc > 1 && strcmp(argv[argc - 1], "--help") == 0)
    return fputs(usage, stdout) >= 0 ? CIR_OK : CIR_FAILED;
  for (int i = 0, at = 3; argc >= 3 && i < (int)(sizeof commands / sizeof *commands); i++) {
    if (strcmp(argv[1], commands[i].name) != 0)
      continue;
    options.directory = argv[2];
    if (commands[i].function == cir_ask_signal)
      snprintf(options.word, CIR_WORD, "%s", at < argc ? argv[at++] : "");
    while (at + 1 < argc && set_option(&options, argv[at], argv[at + 1]))
      at += 2;
    if (at < argc)
      return cir_refuse(CIR_USAGE, "%s: not an option with a value: \"%s\" (see --help)", argv[1],
                        argv[at]);
    if (chdir(options.directory) != 0)
      return cir_fail("cannot enter the attempt directory %s: %m", options.directory);
    return commands[i].function(&options);
  }
  fputs(usage, stderr);
  return CIR_USAGE;
}
