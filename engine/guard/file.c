/* file.c - messages, text, small files and clocks: what every other file of the guard needs. */
#include "guard.h"
#include <stdarg.h>

/* Say what failed on standard error; %m is errno's text. Returns CIR_FAILED, so that a caller can
 * return it. */
int cir_fail(const char *format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "ciranda-guard: %s\n", line);
  return CIR_FAILED;
}

/* Append to a text. What does not fit is left out as a whole: the text then ends where it ended
 * before. */
void cir_add(cir_text *text, const char *format, ...) {
  size_t room = text->size - text->used;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(text->data + text->used, room, format, arguments);
  va_end(arguments);
  if (length >= 0 && (size_t)length < room)
    text->used += (size_t)length;
  text->data[text->used] = '\0';
}

/* Append a JSON string. Bytes that are not ASCII are shown by their number: a name need not be
 * UTF-8. */
void cir_add_string(cir_text *text, const char *string) {
  cir_add(text, "\"");
  for (const unsigned char *c = (const unsigned char *)string; *c; c++)
    cir_add(text, strchr("\"\\", *c) || *c < 0x20 || *c > 0x7e ? "\\u%04x" : "%c", *c);
  cir_add(text, "\"");
}

/* Room for one more element behind `count` of them (and a NUL). A guard without memory cannot
 * guard: its outer process takes over. */
void *cir_room(void *list, size_t count, size_t *size, size_t each) {
  if (count + 1 < *size)
    return list;
  *size = *size ? *size * 2 : 512;
  list = realloc(list, *size * each);
  if (!list)
    abort();
  return list;
}

/* The whole file, with a NUL behind it; the caller frees it. NULL with errno when it cannot be
 * read. */
char *cir_read(const char *path, size_t *size) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return NULL;
  char *data = NULL;
  size_t used = 0, room = 0;
  ssize_t got = 1;
  for (; got > 0; used += got > 0 ? (size_t)got : 0) {
    data = cir_room(data, used, &room, 1);
    got = read(file, data + used, room - used - 1);
  }
  int error = errno;
  close(file);
  data[used] = '\0';
  if (size)
    *size = used;
  if (got == 0)
    return data;
  free(data);
  errno = error;
  return NULL;
}

static char zeros[4096];

/* Make a file whose blocks are really there, so that it can be written on a full disk. -1 with
 * errno. */
int cir_reserve(const char *path, size_t size) {
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0)
    return -1;
  int error = 0;
  while (error == 0 && lseek(file, 0, SEEK_CUR) < (off_t)size) {
    ssize_t put = write(file, zeros, sizeof zeros);
    error = put < 0 ? errno : put < (ssize_t)sizeof zeros ? ENOSPC : 0;
  }
  if (error == 0)
    return file;
  close(file);
  unlink(path);
  errno = error;
  return -1;
}

/* Write a file whole: into the temporary one (reserved or new), fsync, rename, fsync the directory.
 * -1 with errno. */
int cir_replace(const char *temporary, const char *path, const cir_text *text) {
  int file = open(temporary, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0)
    return -1;
  ssize_t put = write(file, text->data, text->used);
  bool good = put == (ssize_t)text->used && ftruncate(file, put) == 0 && fsync(file) == 0;
  int error = put >= 0 && put < (ssize_t)text->used ? ENOSPC : errno;
  close(file);
  if (!good || rename(temporary, path) != 0) {
    errno = good ? errno : error;
    return -1;
  }
  int directory = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  fsync(directory); /* some file systems refuse this; the rename has happened all the same */
  close(directory);
  return 0;
}

/* The first line of a file without its end, NULL when there is no file; the caller frees it. */
char *cir_first_line(const char *path) {
  char *text = cir_read(path, NULL);
  if (text)
    text[strcspn(text, "\r\n")] = '\0';
  return text;
}

/* The boot id, or an empty string. */
void cir_boot_id(const cir_options *options, char *id, size_t size) {
  char *line = cir_first_line(options->boot_id_file);
  snprintf(id, size, "%s", line ? line : "");
  free(line);
}

/* Milliseconds. */
int64_t cir_clock(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
