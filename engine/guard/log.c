/*
 * log.c - from the command's output to the file.
 *
 * The command writes into a FIFO that it holds open for reading too: the death of the guard neither
 * breaks the pipe nor loses what is in it. The bytes are moved with splice, which takes from the
 * FIFO only what it has put into the file, so that a guard that is killed in between neither loses
 * nor doubles any. On a full disk the command must not fail: what cannot be written is counted and
 * dropped.
 */
#include "guard.h"

#define CHUNK 65536

static char data[CHUNK];

/* Open both ends; an existing log and FIFO are gone on with. -1 with errno. */
int cir_log_open(cir_guard *guard) {
  if (mkfifo("output", 0600) != 0 && errno != EEXIST)
    return -1;
  guard->output = open("output", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  guard->log = open("log", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (guard->output < 0 || guard->log < 0)
    return -1;
  /* Room while another guard takes over; refused is fine. */
  fcntl(guard->output, F_SETPIPE_SZ, 1 << 20);
  cir_log_resume(guard);
  guard->state->log_grew = cir_now();
  return 0;
}

/* Go on behind what an earlier guard wrote. Where that is less than it had counted it was killed
 * while it wrote the last words again: they are lost, and no zeros are passed off as them. */
void cir_log_resume(const cir_guard *guard) {
  off_t end = lseek(guard->log, 0, SEEK_END);
  if (end < guard->state->log_size)
    guard->state->log_first = guard->state->log_size;
  else
    guard->state->log_size = end;
}

/* What splice cannot do, on a full disk or an odd file system. Returns the bytes taken; those not
 * written are counted. */
static ssize_t copy_or_drop(cir_guard *guard) {
  ssize_t got = read(guard->output, data, CHUNK);
  ssize_t put = got > 0 ? pwrite(guard->log, data, (size_t)got, guard->state->log_size) : 0;
  put = put > 0 ? put : 0;
  guard->state->log_size += put;
  guard->state->dropped += got > 0 ? (uint64_t)(got - put) : 0;
  return got;
}

/* Give the log's oldest blocks back to the file system, when that many bytes of them are not to be
 * kept as are. No offset changes. Where a file cannot have holes made, all of it is given back but
 * the last words, which are written again at their offset; that it is bounded goes before that it
 * is long. */
static void forget_oldest(cir_state *state, int log) {
  int64_t first = state->log_size - state->options.keep, given_up = state->log_first;
  if (state->options.keep == 0 || first - given_up < state->options.keep)
    return;
  state->log_first = first; /* before the bytes go: who follows looks at it after reading */
  if (fallocate(log, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, given_up, first - given_up) == 0)
    return;
  first = state->log_size - (state->options.keep < CHUNK ? state->options.keep : CHUNK);
  ssize_t got = pread(log, data, CHUNK, state->log_first = first);
  if (ftruncate(log, 0) != 0 || got <= 0 || pwrite(log, data, (size_t)got, first) != got)
    state->log_first = state->log_size;
}

/* Move what is there, up to a MiB. Returns whether there may be more. */
bool cir_log_drain(cir_guard *guard) {
  for (int turn = 0; turn < 16; turn++) {
    off_t at = guard->state->log_size;
    ssize_t moved =
        splice(guard->output, NULL, guard->log, &at, CHUNK, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
    if (moved > 0)
      guard->state->log_size += moved;
    else if (moved < 0 && errno != EAGAIN && errno != EINTR)
      moved = copy_or_drop(guard);
    if (moved <= 0)
      return false;
    guard->state->log_grew = cir_now();
    forget_oldest(guard->state, guard->log);
  }
  return true;
}
