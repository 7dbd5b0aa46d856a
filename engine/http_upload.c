/*
 * http_upload.c - a request body that is part of a file, read ahead on the thread pool so that a
 * slow disk never holds up the loop. While nothing has been read curl's sending side is paused.
 */
#include "http_client.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CIR_UPLOAD_CHUNK = 256 * 1024 };

struct cir_http_upload {
  cir_http_request *request;
  uv_fs_t read;
  int file;
  bool reading, closing;
  bool stale;          /* the read under way began before a seek: its bytes are dropped */
  int64_t first, size; /* the part of the file that is the body */
  int64_t position;    /* where the next read begins, relative to first */
  size_t used, filled; /* the unsent part of chunk */
  char chunk[CIR_UPLOAD_CHUNK];
};

/* Free the upload and close its file. Owned by the request; called when no read is under way. */
static void upload_free(cir_http_request *request) {
  cir_http_upload *upload = request->upload;
  request->upload = NULL;
  close(upload->file);
  free(upload);
}

static void start_read(cir_http_upload *upload);

/* A read has ended: wakes curl, or frees the upload when the request has ended meanwhile. Runs on
 * the loop. */
static void on_read(uv_fs_t *read) {
  cir_http_upload *upload = CIR_CONTAINER_OF(read, cir_http_upload, read);
  cir_http_request *request = upload->request;
  ssize_t count = read->result;
  uv_fs_req_cleanup(read);
  upload->reading = false;
  if (upload->closing) {
    upload_free(request);
  } else if (upload->stale) {
    upload->stale = false;
    start_read(upload);
  } else {
    if (count < 0)
      cir_http_fault(request, "io", "the file of the body cannot be read: %s",
                     uv_strerror((int)count));
    else if (count == 0)
      cir_http_fault(request, "io", "the file of the body became shorter while it was sent");
    else
      upload->filled = (size_t)count;
    upload->used = 0;
    upload->position += count > 0 ? count : 0;
    cir_http_unpause(request);
  }
  cir_http_release(request);
}

/* Begin to read the next chunk. The request is held until the read has ended. */
static void start_read(cir_http_upload *upload) {
  int64_t left = upload->size - upload->position;
  uv_buf_t buffer = uv_buf_init(
      upload->chunk, left < CIR_UPLOAD_CHUNK ? (unsigned)left : (unsigned)CIR_UPLOAD_CHUNK);
  upload->used = upload->filled = 0;
  int status = uv_fs_read(cir_loop(cir_http_runtime(upload->request)), &upload->read, upload->file,
                          &buffer, 1, upload->first + upload->position, on_read);
  if (status < 0) {
    cir_http_fault(upload->request, "io", "the file of the body cannot be read: %s",
                   uv_strerror(status));
    return;
  }
  upload->read.data = NULL;
  upload->reading = true;
  cir_http_hold(upload->request);
}

/* CURLOPT_READFUNCTION. Gives what was read ahead; pauses curl while there is nothing. */
static size_t on_curl_read(char *to, size_t size, size_t count, void *user) {
  cir_http_request *request = user;
  cir_http_upload *upload = request->upload;
  if (upload == NULL || request->fault != NULL)
    return CURL_READFUNC_ABORT;
  size_t have = upload->filled - upload->used;
  if (have > 0 && !upload->reading) {
    size_t room = size * count;
    size_t give = have < room ? have : room;
    memcpy(to, upload->chunk + upload->used, give);
    upload->used += give;
    return give;
  }
  if (!upload->reading) {
    if (upload->position >= upload->size)
      return 0;
    start_read(upload);
    if (request->fault != NULL)
      return CURL_READFUNC_ABORT;
  }
  return CURL_READFUNC_PAUSE;
}

/* CURLOPT_SEEKFUNCTION: curl sends the body again, on a fresh connection, after a kept one turned
 * out to be dead. */
static int on_curl_seek(void *user, curl_off_t offset, int origin) {
  cir_http_upload *upload = ((cir_http_request *)user)->upload;
  if (upload == NULL || origin != SEEK_SET || offset < 0 || offset > upload->size)
    return CURL_SEEKFUNC_FAIL;
  upload->position = offset;
  upload->used = upload->filled = 0;
  upload->stale = upload->reading;
  return CURL_SEEKFUNC_OK;
}

bool cir_http_upload_open(cir_http_request *request, const char *path, curl_off_t offset,
                          curl_off_t length) {
  /* Nonblocking, or a FIFO would hold up the loop until somebody writes into it. */
  int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  struct stat info;
  if (file < 0 || fstat(file, &info) < 0) {
    int problem = errno;
    if (file >= 0)
      close(file);
    cir_http_fault(request, cir_code_of_uv(-problem), "the file of the body, %s: %s", path,
                   strerror(problem));
    return false;
  }
  if (!S_ISREG(info.st_mode)) {
    close(file);
    cir_http_fault(request, "invalid", "the file of the body, %s, is not a regular file", path);
    return false;
  }
  if (length < 0)
    length = info.st_size - offset;
  if (length < 0 || offset > info.st_size - length) {
    close(file);
    cir_http_fault(request, "invalid",
                   "the file of the body, %s, has %lld bytes: no %lld bytes from offset %lld", path,
                   (long long)info.st_size, (long long)length, (long long)offset);
    return false;
  }
  cir_http_upload *upload = malloc(sizeof *upload);
  if (upload == NULL) {
    close(file);
    cir_http_fault(request, "failed", "out of memory");
    return false;
  }
  upload->request = request;
  upload->file = file;
  upload->reading = upload->closing = upload->stale = false;
  upload->first = offset;
  upload->size = length;
  upload->position = 0;
  upload->used = upload->filled = 0;
  request->upload = upload;
  curl_easy_setopt(request->easy, CURLOPT_UPLOAD, 1L);
  curl_easy_setopt(request->easy, CURLOPT_INFILESIZE_LARGE, length);
  curl_easy_setopt(request->easy, CURLOPT_READFUNCTION, on_curl_read);
  curl_easy_setopt(request->easy, CURLOPT_READDATA, request);
  curl_easy_setopt(request->easy, CURLOPT_SEEKFUNCTION, on_curl_seek);
  curl_easy_setopt(request->easy, CURLOPT_SEEKDATA, request);
  return true;
}

void cir_http_upload_close(cir_http_request *request) {
  cir_http_upload *upload = request->upload;
  if (upload == NULL || upload->closing)
    return;
  if (!upload->reading) {
    upload_free(request);
    return;
  }
  upload->closing = true;
  uv_cancel((uv_req_t *)&upload->read); /* a read that runs already ends by itself */
}
