/*
 * crypto_work.c - of ciranda.core.crypto, what takes long: digesting files, making key pairs and
 * compressing, on the thread pool.
 */
#define ZLIB_CONST
#include "callback.h"
#include "crypto.h"
#include "options.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define CIR_WORK_HANDLE "ciranda.crypto.work"

enum {
  CIR_CRYPTO_CHUNK = 256 * 1024,
  CIR_GZIP = 16 /* added to the size of zlib's window: with gzip's header and check */
};

/*
 * A file to digest, a key pair to make or a text to compress, on a thread of the pool. The handle
 * points here; the memory goes after the callback. `cancelled` is read by the thread between
 * chunks.
 */
typedef struct work {
  uv_work_t job;
  cir_runtime *rt;
  struct work **handle;
  int on_done;
  _Atomic bool cancelled;
  const char *path; /* NULL: make a key pair, or compress `text` */
  const char *text;
  int text_ref; /* keeps the string of Lua's that `path` or `text` points to */
  int level;
  size_t text_size;
  char *packed; /* NULL: without memory, or cancelled */
  size_t packed_size;
  int64_t offset, length;
  int problem; /* errno */
  bool wanted[CIR_DIGESTS];
  cir_digest running[CIR_DIGESTS];
  int64_t size;
  unsigned bits;
  EVP_PKEY *key;
} work;

static void work_file(work *own) {
  static const size_t chunk_size = CIR_CRYPTO_CHUNK;
  char *chunk = malloc(chunk_size);
  /* Nonblocking, or a FIFO would hold the thread until somebody writes into it. */
  int file = open(own->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  struct stat info;
  if (chunk == NULL || file < 0 || fstat(file, &info) < 0) {
    own->problem = chunk == NULL ? ENOMEM : errno;
  } else if (S_ISDIR(info.st_mode)) {
    own->problem = EISDIR;
  } else {
    int64_t position = own->offset, left = own->length < 0 ? INT64_MAX : own->length;
    while (left > 0 && !own->cancelled) {
      ssize_t count =
          pread(file, chunk, left < (int64_t)chunk_size ? (size_t)left : chunk_size, position);
      if (count < 0 && errno == EINTR)
        continue;
      if (count < 0)
        own->problem = errno;
      if (count <= 0)
        break;
      for (int i = 0; i < CIR_DIGESTS; i++)
        if (own->wanted[i])
          cir_digest_add(&own->running[i], chunk, (size_t)count);
      position += count;
      left -= count;
      own->size += count;
    }
  }
  if (file >= 0)
    close(file);
  free(chunk);
}

static void work_gzip(work *own) {
  z_stream stream;
  memset(&stream, 0, sizeof stream);
  if (deflateInit2(&stream, own->level, Z_DEFLATED, MAX_WBITS + CIR_GZIP, MAX_MEM_LEVEL,
                   Z_DEFAULT_STRATEGY) != Z_OK)
    return;
  size_t room = deflateBound(&stream, own->text_size);
  char *packed = malloc(room);
  size_t done = 0, written = 0;
  int status = packed == NULL ? Z_MEM_ERROR : Z_OK;
  while (status == Z_OK && !own->cancelled) {
    size_t left = own->text_size - done, space = room - written;
    size_t chunk = left < CIR_CRYPTO_CHUNK ? left : CIR_CRYPTO_CHUNK;
    stream.next_in = (const Bytef *)own->text + done;
    stream.avail_in = (uInt)chunk;
    stream.next_out = (Bytef *)packed + written;
    stream.avail_out = (uInt)(space < UINT_MAX ? space : UINT_MAX);
    uInt before = stream.avail_out;
    status = deflate(&stream, chunk == left ? Z_FINISH : Z_NO_FLUSH);
    done += chunk - stream.avail_in;
    written += before - stream.avail_out;
  }
  deflateEnd(&stream);
  if (status == Z_STREAM_END) {
    own->packed = packed;
    own->packed_size = written;
  } else {
    free(packed);
  }
}

/*
 * Runs on a thread of the pool: no Lua. What OpenSSL keeps for a thread is given back here, since
 * the pool's threads end after OpenSSL's own clean-up.
 */
static void on_work(uv_work_t *job) {
  work *own = CIR_CONTAINER_OF(job, work, job);
  if (own->path != NULL)
    work_file(own);
  else if (own->text != NULL)
    work_gzip(own);
  else
    own->key = EVP_RSA_gen(own->bits);
  OPENSSL_thread_stop();
}

/* On the main thread. */
static void work_free(work *own) {
  if (own->handle != NULL)
    *own->handle = NULL;
  cir_callback_unref(own->rt, &own->on_done);
  luaL_unref(cir_main_state(own->rt), LUA_REGISTRYINDEX, own->text_ref);
  free(own->packed);
  for (int i = 0; i < CIR_DIGESTS; i++)
    cir_digest_free(&own->running[i]);
  EVP_PKEY_free(own->key);
  free(own);
}

/* Push the PEM text of the key's private or public half, or nil. [-0, +1, m] */
static void push_pem(lua_State *L, EVP_PKEY *key, bool private_half) {
  BIO *memory = BIO_new(BIO_s_mem());
  char *text = NULL;
  long size = 0;
  if (memory != NULL &&
      (private_half ? PEM_write_bio_PrivateKey(memory, key, NULL, NULL, 0, NULL, NULL)
                    : PEM_write_bio_PUBKEY(memory, key)) == 1)
    size = BIO_get_mem_data(memory, &text);
  if (size > 0)
    lua_pushlstring(L, text, (size_t)size);
  else
    lua_pushnil(L);
  BIO_free(memory);
}

/* Push err, value for the work that has ended. [-0, +2, m] */
static void push_outcome(lua_State *L, work *own, int status) {
  if (status == UV_ECANCELED || own->cancelled) {
    cir_push_error(L, "cancelled", "the work was cancelled");
    lua_pushnil(L);
  } else if (own->problem != 0) {
    cir_push_error(L, cir_code_of_uv(-own->problem), "%s: %s", own->path, strerror(own->problem));
    lua_pushnil(L);
  } else if (own->path != NULL) {
    lua_pushnil(L);
    lua_createtable(L, 0, 5);
    for (int i = 0; i < CIR_DIGESTS; i++) {
      unsigned char result[EVP_MAX_MD_SIZE];
      if (!own->wanted[i])
        continue;
      lua_pushlstring(L, (const char *)result, cir_digest_end(&own->running[i], result));
      lua_setfield(L, -2, cir_digest_names[i]);
    }
    lua_pushinteger(L, own->size);
    lua_setfield(L, -2, "size");
  } else if (own->text != NULL && own->packed == NULL) {
    cir_push_error(L, "failed", "there is no memory to compress %zu bytes", own->text_size);
    lua_pushnil(L);
  } else if (own->text != NULL) {
    lua_pushnil(L);
    lua_pushlstring(L, own->packed, own->packed_size);
  } else if (own->key == NULL) {
    cir_push_error(L, "failed", "OpenSSL could not make an RSA key of %u bits", own->bits);
    lua_pushnil(L);
  } else {
    lua_pushnil(L);
    lua_createtable(L, 0, 2);
    push_pem(L, own->key, true);
    lua_setfield(L, -2, "private_key");
    push_pem(L, own->key, false);
    lua_setfield(L, -2, "public_key");
  }
}

/* Back on the loop. */
static void after_work(uv_work_t *job, int status) {
  work *own = CIR_CONTAINER_OF(job, work, job);
  lua_State *L = cir_main_state(own->rt);
  luaL_checkstack(L, 8, "crypto");
  if (own->handle != NULL) /* nothing is left to cancel */
    *own->handle = NULL;
  own->handle = NULL;
  push_outcome(L, own, status);
  cir_callback_finish(own->rt, &own->on_done, 2);
  work_free(own);
}

/*
 * A work with the handle that is pushed, whose callback is at `callback` and which keeps the value
 * at `text` until it ends. Nothing of Lua's may fail from here on. [-0, +1, v]
 */
static work *work_new(lua_State *L, int callback, int text) {
  int on_done, text_ref;
  work **handle = lua_newuserdatauv(L, sizeof(work *), 0);
  *handle = NULL;
  luaL_setmetatable(L, CIR_WORK_HANDLE);
  cir_callback_ref_both(L, callback, &on_done, text, &text_ref);
  work *own = calloc(1, sizeof *own);
  if (own == NULL) {
    cir_callback_unref(cir_runtime_of(L), &on_done);
    luaL_unref(L, LUA_REGISTRYINDEX, text_ref);
    luaL_error(L, "crypto: out of memory");
    return NULL;
  }
  own->rt = cir_runtime_of(L);
  own->on_done = on_done;
  own->text_ref = text_ref;
  own->handle = handle;
  *handle = own;
  return own;
}

/* Queue the work. [-0, +0, v] */
static int work_queue(lua_State *L, work *own) {
  if (uv_queue_work(cir_loop(own->rt), &own->job, on_work, after_work) == 0)
    return 1;
  work_free(own);
  return luaL_error(L, "crypto: the thread pool does not start");
}

/*
 * crypto.digest_file(path, {sha256 = true, ..., offset =, length =}, callback) -> handle. The
 * callback gets err and a table of the digests asked for and `size`, the bytes that were read. [-3,
 * +1, v]
 */
static int l_digest_file(lua_State *L) {
  const char *known[CIR_DIGESTS + 3] = {"offset", "length"};
  memcpy(known + 2, cir_digest_names, sizeof cir_digest_names); /* and the NULL behind them */
  const char *path = luaL_checkstring(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  cir_known_options(L, 2, known);
  lua_Integer offset = cir_integer_option(L, 2, "offset", 0, LUA_MAXINTEGER, 0);
  lua_Integer length = cir_integer_option(L, 2, "length", 0, LUA_MAXINTEGER, -1);
  bool wanted[CIR_DIGESTS];
  for (int i = 0; i < CIR_DIGESTS; i++) {
    lua_getfield(L, 2, cir_digest_names[i]);
    wanted[i] = lua_toboolean(L, -1);
  }
  work *own = work_new(L, 3, 1);
  own->offset = offset;
  own->length = length;
  own->path = path;
  bool ready = true;
  for (int i = 0; i < CIR_DIGESTS; i++) {
    own->wanted[i] = wanted[i];
    if (wanted[i])
      ready = cir_digest_begin(&own->running[i], i) && ready;
  }
  if (!ready) {
    work_free(own);
    return luaL_error(
        L, "crypto.digest_file: out of memory, or a digest that OpenSSL, as this machine "
           "configures it, does not give");
  }
  return work_queue(L, own);
}

/* crypto.rsa_generate(bits, callback) -> handle. The callback gets err, {private_key =, public_key
 * =} as PEM. [-2, +1, v] */
static int l_rsa_generate(lua_State *L) {
  lua_Integer bits = luaL_checkinteger(L, 1);
  luaL_argcheck(L, bits >= 2048 && bits <= 8192, 1, "from 2048 to 8192 bits");
  luaL_checktype(L, 2, LUA_TFUNCTION);
  work *own = work_new(L, 2, 1);
  own->bits = (unsigned)bits;
  return work_queue(L, own);
}

/* crypto.gzip(text, level, callback) -> handle. The callback gets err and the packed bytes. [-3,
 * +1, v] */
static int l_gzip(lua_State *L) {
  size_t size;
  const char *text = luaL_checklstring(L, 1, &size);
  lua_Integer level = luaL_checkinteger(L, 2);
  luaL_argcheck(L, level >= 1 && level <= 9, 2, "from 1 to 9");
  luaL_checktype(L, 3, LUA_TFUNCTION);
  work *own = work_new(L, 3, 1);
  own->text = text;
  own->text_size = size;
  own->level = (int)level;
  return work_queue(L, own);
}

/* handle:cancel(): the callback gets an error with code "cancelled", after the thread has let go.
 */
static int l_work_cancel(lua_State *L) {
  work *own = *(work **)luaL_checkudata(L, 1, CIR_WORK_HANDLE);
  if (own != NULL) {
    own->cancelled = true;
    uv_cancel((uv_req_t *)&own->job);
  }
  return 0;
}

static int l_work_gc(lua_State *L) {
  work **handle = luaL_checkudata(L, 1, CIR_WORK_HANDLE);
  if (*handle != NULL)
    (*handle)->handle = NULL;
  *handle = NULL;
  return 0;
}

void cir_crypto_work_register(lua_State *L) {
  static const luaL_Reg functions[] = {{"digest_file", l_digest_file},
                                       {"rsa_generate", l_rsa_generate},
                                       {"gzip", l_gzip},
                                       {NULL, NULL}};
  static const luaL_Reg methods[] = {
      {"cancel", l_work_cancel}, {"__close", l_work_cancel}, {"__gc", l_work_gc}, {NULL, NULL}};
  cir_crypto_class(L, CIR_WORK_HANDLE, methods);
  luaL_setfuncs(L, functions, 0);
}
