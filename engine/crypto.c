/*
 * crypto.c - ciranda.core.crypto: digests, checksums, RS256, base64, random bytes. OpenSSL does the
 * work, and sets itself up at the first call that needs it.
 *
 * Digests and signatures are raw bytes. A misuse raises; what depends on data gives nil and an
 * error table.
 */
#include "callback.h"
#include "crc32c.h"
#include "modules.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/rsa.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CIR_DIGEST_HANDLE "ciranda.digest"
#define CIR_WORK_HANDLE "ciranda.crypto.work"

enum { CIR_CRYPTO_CHUNK = 256 * 1024 };

/* A running checksum: OpenSSL's, or CRC-32C when context is NULL. */
typedef struct digest {
  EVP_MD_CTX *context;
  uint32_t crc;
  bool finished;
} digest;

static const char *const ALGORITHMS[] = {"sha256", "sha1", "md5", "crc32c", NULL};

/* OpenSSL's digest of that place in ALGORITHMS; NULL for crc32c. */
static const EVP_MD *digest_of(int algorithm) {
  switch (algorithm) {
  case 0:
    return EVP_sha256();
  case 1:
    return EVP_sha1();
  case 2:
    return EVP_md5();
  default:
    return NULL;
  }
}

static bool digest_begin(digest *running, int algorithm) {
  const EVP_MD *kind = digest_of(algorithm);
  *running = (digest){NULL, 0, false};
  if (kind == NULL)
    return true;
  running->context = EVP_MD_CTX_new();
  return running->context != NULL && EVP_DigestInit_ex(running->context, kind, NULL) == 1;
}

static void digest_add(digest *running, const void *bytes, size_t size) {
  if (running->context != NULL)
    EVP_DigestUpdate(running->context, bytes, size);
  else
    running->crc = cir_crc32c(running->crc, bytes, size);
}

/* Writes the checksum and returns its size. CRC-32C is big-endian, as Cloud Storage writes it. */
static size_t digest_end(digest *running, unsigned char result[EVP_MAX_MD_SIZE]) {
  running->finished = true;
  if (running->context == NULL) {
    for (int i = 0; i < 4; i++)
      result[i] = (unsigned char)(running->crc >> (24 - 8 * i));
    return 4;
  }
  unsigned size = 0;
  EVP_DigestFinal_ex(running->context, result, &size);
  return size;
}

static void digest_free(digest *running) {
  EVP_MD_CTX_free(running->context);
  running->context = NULL;
}

/* Push nil and an error with OpenSSL's reason, whose queue is emptied. [-0, +2, m] */
static int push_openssl_error(lua_State *L, const char *code, const char *what) {
  char reason[256] = "no reason given";
  unsigned long problem = ERR_peek_last_error();
  if (problem != 0)
    ERR_error_string_n(problem, reason, sizeof reason);
  ERR_clear_error();
  lua_pushnil(L);
  cir_push_error(L, code, "%s: %s", what, reason);
  return 2;
}

/* --- digests
 * -----------------------------------------------------------------------------------------------------
 */

/* crypto.digest(algorithm, data) -> bytes. [-2, +1, v] */
static int l_digest(lua_State *L) {
  int algorithm = luaL_checkoption(L, 1, NULL, ALGORITHMS);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  unsigned char result[EVP_MAX_MD_SIZE];
  digest running;
  if (!digest_begin(&running, algorithm)) {
    digest_free(&running);
    return luaL_error(L, "crypto.digest: out of memory");
  }
  digest_add(&running, data, size);
  size_t length = digest_end(&running, result);
  digest_free(&running);
  lua_pushlstring(L, (const char *)result, length);
  return 1;
}

/* crypto.start(algorithm) -> digest with :update(data) and :finish(). [-1, +1, v] */
static int l_start(lua_State *L) {
  int algorithm = luaL_checkoption(L, 1, NULL, ALGORITHMS);
  digest *running = lua_newuserdatauv(L, sizeof *running, 0);
  *running = (digest){NULL, 0, true};
  luaL_setmetatable(L, CIR_DIGEST_HANDLE);
  if (!digest_begin(running, algorithm))
    return luaL_error(L, "crypto.start: out of memory");
  return 1;
}

static digest *check_running(lua_State *L) {
  digest *running = luaL_checkudata(L, 1, CIR_DIGEST_HANDLE);
  luaL_argcheck(L, !running->finished, 1, "the digest is finished");
  return running;
}

/* digest:update(data) -> digest. [-2, +1, v] */
static int l_update(lua_State *L) {
  digest *running = check_running(L);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  digest_add(running, data, size);
  lua_settop(L, 1);
  return 1;
}

/* digest:finish() -> bytes. [-1, +1, v] */
static int l_finish(lua_State *L) {
  unsigned char result[EVP_MAX_MD_SIZE];
  digest *running = check_running(L);
  size_t length = digest_end(running, result);
  digest_free(running);
  lua_pushlstring(L, (const char *)result, length);
  return 1;
}

static int l_digest_gc(lua_State *L) {
  digest_free(luaL_checkudata(L, 1, CIR_DIGEST_HANDLE));
  return 0;
}

/* crypto.hmac(algorithm, key, data) -> bytes; the algorithm is sha256, sha1 or md5. [-3, +1, v] */
static int l_hmac(lua_State *L) {
  const EVP_MD *kind = digest_of(luaL_checkoption(L, 1, NULL, ALGORITHMS));
  size_t key_size, size;
  const char *key = luaL_checklstring(L, 2, &key_size);
  const char *data = luaL_checklstring(L, 3, &size);
  luaL_argcheck(L, kind != NULL, 1, "a CRC is no hash");
  luaL_argcheck(L, key_size <= INT32_MAX, 2, "too long");
  unsigned char result[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  if (HMAC(kind, key, (int)key_size, (const unsigned char *)data, size, result, &length) == NULL)
    return luaL_error(L, "crypto.hmac: OpenSSL refuses");
  lua_pushlstring(L, (const char *)result, length);
  return 1;
}

/* --- work on the thread pool
 * ------------------------------------------------------------------------------------- */

/*
 * A file to digest or a key pair to make, on a thread of the pool. The handle points here; the
 * memory goes after the callback. `cancelled` is read by the thread between chunks.
 */
typedef struct work {
  uv_work_t job;
  cir_runtime *rt;
  struct work **handle;
  int on_done;
  _Atomic bool cancelled;
  char *path; /* NULL: make a key pair */
  int64_t offset, length;
  int problem; /* errno */
  bool wanted[4];
  digest running[4];
  int64_t size;
  unsigned bits;
  EVP_PKEY *key;
} work;

static void work_file(work *own) {
  static const size_t chunk_size = CIR_CRYPTO_CHUNK;
  char *chunk = malloc(chunk_size);
  int file = open(own->path, O_RDONLY | O_CLOEXEC);
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
      for (int i = 0; i < 4; i++)
        if (own->wanted[i])
          digest_add(&own->running[i], chunk, (size_t)count);
      position += count;
      left -= count;
      own->size += count;
    }
  }
  if (file >= 0)
    close(file);
  free(chunk);
}

/*
 * Runs on a thread of the pool: no Lua. What OpenSSL keeps for a thread is given back here, since
 * the pool's threads end after OpenSSL's own clean-up.
 */
static void on_work(uv_work_t *job) {
  work *own = CIR_CONTAINER_OF(job, work, job);
  if (own->path != NULL)
    work_file(own);
  else
    own->key = EVP_RSA_gen(own->bits);
  OPENSSL_thread_stop();
}

static void work_free(work *own) {
  for (int i = 0; i < 4; i++)
    digest_free(&own->running[i]);
  EVP_PKEY_free(own->key);
  free(own->path);
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
    for (int i = 0; i < 4; i++) {
      unsigned char result[EVP_MAX_MD_SIZE];
      if (!own->wanted[i])
        continue;
      lua_pushlstring(L, (const char *)result, digest_end(&own->running[i], result));
      lua_setfield(L, -2, ALGORITHMS[i]);
    }
    lua_pushinteger(L, own->size);
    lua_setfield(L, -2, "size");
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
  if (own->handle != NULL)
    *own->handle = NULL;
  push_outcome(L, own, status);
  cir_callback_finish(own->rt, &own->on_done, 2);
  work_free(own);
}

/* Queue the work whose handle is on the top and whose callback is at index. [-0, +0, v] */
static void work_queue(lua_State *L, work *own, int index) {
  own->on_done = cir_callback_ref(L, index);
  if (uv_queue_work(cir_loop(own->rt), &own->job, on_work, after_work) < 0) {
    cir_callback_unref(own->rt, &own->on_done);
    work_free(own);
    luaL_error(L, "crypto: the thread pool does not start");
  }
  work **handle = lua_newuserdatauv(L, sizeof(work *), 0);
  *handle = own;
  own->handle = handle;
  luaL_setmetatable(L, CIR_WORK_HANDLE);
}

/*
 * crypto.digest_file(path, {sha256 = true, ..., offset =, length =}, callback) -> handle. The
 * callback gets err and a table of the digests asked for and `size`, the bytes that were read. [-3,
 * +1, v]
 */
static int l_digest_file(lua_State *L) {
  const char *path = luaL_checkstring(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_getfield(L, 2, "offset");
  lua_Integer offset = luaL_optinteger(L, -1, 0);
  lua_getfield(L, 2, "length");
  lua_Integer length = luaL_optinteger(L, -1, -1);
  luaL_argcheck(L, offset >= 0, 2, "offset must be at least 0");
  bool wanted[4];
  for (int i = 0; i < 4; i++) {
    lua_getfield(L, 2, ALGORITHMS[i]);
    wanted[i] = lua_toboolean(L, -1);
  }
  work *own = calloc(1, sizeof *own);
  if (own == NULL)
    return luaL_error(L, "crypto.digest_file: out of memory");
  own->rt = cir_runtime_of(L);
  own->on_done = CIR_NO_CALLBACK;
  own->offset = offset;
  own->length = length;
  own->path = strdup(path);
  bool ready = own->path != NULL;
  for (int i = 0; i < 4; i++) {
    own->wanted[i] = wanted[i];
    if (wanted[i])
      ready = digest_begin(&own->running[i], i) && ready;
  }
  if (!ready) {
    work_free(own);
    return luaL_error(L, "crypto.digest_file: out of memory");
  }
  work_queue(L, own, 3);
  return 1;
}

/* crypto.rsa_generate(bits, callback) -> handle. The callback gets err, {private_key =, public_key
 * =} as PEM. */
static int l_rsa_generate(lua_State *L) {
  lua_Integer bits = luaL_checkinteger(L, 1);
  luaL_argcheck(L, bits >= 2048 && bits <= 8192, 1, "from 2048 to 8192 bits");
  luaL_checktype(L, 2, LUA_TFUNCTION);
  work *own = calloc(1, sizeof *own);
  if (own == NULL)
    return luaL_error(L, "crypto.rsa_generate: out of memory");
  own->rt = cir_runtime_of(L);
  own->on_done = CIR_NO_CALLBACK;
  own->bits = (unsigned)bits;
  work_queue(L, own, 2);
  return 1;
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

/* --- RS256
 * -------------------------------------------------------------------------------------------------------
 */

/* A PEM key that wants a passphrase is an error, not a question on the terminal. */
static int no_passphrase(char *to, int size, int writing, void *user) {
  (void)to;
  (void)size;
  (void)writing;
  (void)user;
  return -1;
}

/* The RSA key in the PEM text at index, or NULL. */
static EVP_PKEY *read_key(lua_State *L, int index, bool private_half) {
  size_t size;
  const char *pem = luaL_checklstring(L, index, &size);
  luaL_argcheck(L, size <= INT32_MAX, index, "too long");
  BIO *memory = BIO_new_mem_buf(pem, (int)size);
  EVP_PKEY *key = NULL;
  if (memory != NULL)
    key = private_half ? PEM_read_bio_PrivateKey(memory, NULL, no_passphrase, NULL)
                       : PEM_read_bio_PUBKEY(memory, NULL, no_passphrase, NULL);
  BIO_free(memory);
  if (key != NULL && EVP_PKEY_base_id(key) != EVP_PKEY_RSA) {
    EVP_PKEY_free(key);
    key = NULL;
  }
  return key;
}

/* crypto.rs256_sign(private_key_pem, data) -> signature, or nil and an error. [-2, +1 or +2, v] */
static int l_rs256_sign(lua_State *L) {
  size_t size, length = 0;
  const char *data = luaL_checklstring(L, 2, &size);
  EVP_PKEY *key = read_key(L, 1, true);
  if (key == NULL)
    return push_openssl_error(L, "invalid", "not an RSA private key in PEM without a passphrase");
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  unsigned char *signature = malloc((size_t)EVP_PKEY_get_size(key));
  if (signature != NULL)
    length = (size_t)EVP_PKEY_get_size(key);
  bool done = context != NULL && signature != NULL &&
              EVP_DigestSignInit(context, NULL, EVP_sha256(), NULL, key) == 1 &&
              EVP_DigestSign(context, signature, &length, (const unsigned char *)data, size) == 1;
  EVP_MD_CTX_free(context);
  EVP_PKEY_free(key);
  if (!done) {
    free(signature);
    return push_openssl_error(L, "failed", "the data could not be signed");
  }
  lua_pushlstring(L, (const char *)signature, length);
  free(signature);
  return 1;
}

/* crypto.rs256_verify(public_key_pem, data, signature) -> boolean, or nil and an error for a bad
 * key. */
static int l_rs256_verify(lua_State *L) {
  size_t size, length;
  const char *data = luaL_checklstring(L, 2, &size);
  const char *signature = luaL_checklstring(L, 3, &length);
  EVP_PKEY *key = read_key(L, 1, false);
  if (key == NULL)
    return push_openssl_error(L, "invalid", "not an RSA public key in PEM");
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  bool good = context != NULL &&
              EVP_DigestVerifyInit(context, NULL, EVP_sha256(), NULL, key) == 1 &&
              EVP_DigestVerify(context, (const unsigned char *)signature, length,
                               (const unsigned char *)data, size) == 1;
  EVP_MD_CTX_free(context);
  EVP_PKEY_free(key);
  ERR_clear_error();
  lua_pushboolean(L, good);
  return 1;
}

/* --- base64, random
 * ---------------------------------------------------------------------------------------------- */

static const char *const ALPHABETS[] = {
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
};

/* crypto.base64(data [, url]) -> text; the URL alphabet goes without padding (RFC 4648, 5). [-n,
 * +1, v] */
static int l_base64(lua_State *L) {
  size_t size;
  const unsigned char *data = (const unsigned char *)luaL_checklstring(L, 1, &size);
  bool url = lua_toboolean(L, 2);
  const char *alphabet = ALPHABETS[url];
  luaL_Buffer buffer;
  char *to = luaL_buffinitsize(L, &buffer, (size / 3 + 1) * 4), *start = to;
  for (size_t i = 0; i < size; i += 3) {
    size_t count = size - i < 3 ? size - i : 3;
    uint32_t bits = (uint32_t)data[i] << 16;
    if (count > 1)
      bits |= (uint32_t)data[i + 1] << 8;
    if (count > 2)
      bits |= data[i + 2];
    for (size_t k = 0; k <= count; k++)
      *to++ = alphabet[bits >> (18 - 6 * k) & 63];
    for (size_t k = count; k < 3 && !url; k++)
      *to++ = '=';
  }
  luaL_pushresultsize(&buffer, (size_t)(to - start));
  return 1;
}

/* The value of a base64 digit in the alphabet, or -1. */
static int digit_of(char digit, bool url) {
  if (digit >= 'A' && digit <= 'Z')
    return digit - 'A';
  if (digit >= 'a' && digit <= 'z')
    return digit - 'a' + 26;
  if (digit >= '0' && digit <= '9')
    return digit - '0' + 52;
  if (digit == (url ? '-' : '+'))
    return 62;
  return digit == (url ? '_' : '/') ? 63 : -1;
}

/*
 * crypto.unbase64(text [, url]) -> data, or nil and an error. White space is skipped; padding may
 * be absent, but is right when there; bits that no byte has must be zero. [-n, +1 or +2, v]
 */
static int l_unbase64(lua_State *L) {
  size_t size;
  const char *text = luaL_checklstring(L, 1, &size);
  bool url = lua_toboolean(L, 2);
  luaL_Buffer buffer;
  char *to = luaL_buffinitsize(L, &buffer, size / 4 * 3 + 3), *start = to;
  uint32_t bits = 0;
  size_t digits = 0, padding = 0;
  bool good = true;
  for (size_t i = 0; i < size && good; i++) {
    char c = text[i];
    if (c == '\n' || c == '\r' || c == ' ' || c == '\t')
      continue;
    if (c == '=') {
      padding++;
      continue;
    }
    int value = digit_of(c, url);
    good = value >= 0 && padding == 0;
    bits = bits << 6 | (uint32_t)(value & 63);
    if (++digits % 4 == 0) {
      *to++ = (char)(bits >> 16 & 0xff);
      *to++ = (char)(bits >> 8 & 0xff);
      *to++ = (char)(bits & 0xff);
    }
  }
  size_t rest = digits % 4;
  if (rest == 2) {
    *to++ = (char)(bits >> 4 & 0xff);
    good = good && (bits & 15) == 0;
  } else if (rest == 3) {
    *to++ = (char)(bits >> 10 & 0xff);
    *to++ = (char)(bits >> 2 & 0xff);
    good = good && (bits & 3) == 0;
  }
  good = good && rest != 1 && (padding == 0 || (rest != 0 && padding == 4 - rest));
  luaL_pushresultsize(&buffer, (size_t)(to - start));
  if (good)
    return 1;
  lua_pushnil(L);
  cir_push_error(L, "parse", "not base64%s", url ? "url" : "");
  return 2;
}

/* crypto.random(n) -> n bytes. [-1, +1, v] */
static int l_random(lua_State *L) {
  lua_Integer count = luaL_checkinteger(L, 1);
  luaL_argcheck(L, count >= 0 && count <= 1 << 20, 1, "from 0 to 1048576 bytes");
  luaL_Buffer buffer;
  char *to = luaL_buffinitsize(L, &buffer, (size_t)count);
  if (count > 0 && RAND_bytes((unsigned char *)to, (int)count) != 1)
    return luaL_error(L, "crypto.random: the system gives no random bytes");
  luaL_pushresultsize(&buffer, (size_t)count);
  return 1;
}

/* crypto.equal(a, b) -> boolean, in a time that depends on the lengths only. [-2, +1, v] */
static int l_equal(lua_State *L) {
  size_t size_a, size_b;
  const char *a = luaL_checklstring(L, 1, &size_a);
  const char *b = luaL_checklstring(L, 2, &size_b);
  lua_pushboolean(L, size_a == size_b && CRYPTO_memcmp(a, b, size_a) == 0);
  return 1;
}

/* Make a class with the methods and itself as __index. [-0, +0, m] */
static void new_class(lua_State *L, const char *name, const luaL_Reg *methods) {
  if (luaL_newmetatable(L, name)) {
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}

int luaopen_ciranda_core_crypto(lua_State *L) {
  static const luaL_Reg functions[] = {{"digest", l_digest},
                                       {"start", l_start},
                                       {"hmac", l_hmac},
                                       {"digest_file", l_digest_file},
                                       {"rsa_generate", l_rsa_generate},
                                       {"rs256_sign", l_rs256_sign},
                                       {"rs256_verify", l_rs256_verify},
                                       {"base64", l_base64},
                                       {"unbase64", l_unbase64},
                                       {"random", l_random},
                                       {"equal", l_equal},
                                       {NULL, NULL}};
  static const luaL_Reg digest_methods[] = {
      {"update", l_update}, {"finish", l_finish}, {"__gc", l_digest_gc}, {NULL, NULL}};
  static const luaL_Reg work_methods[] = {
      {"cancel", l_work_cancel}, {"__close", l_work_cancel}, {"__gc", l_work_gc}, {NULL, NULL}};
  new_class(L, CIR_DIGEST_HANDLE, digest_methods);
  new_class(L, CIR_WORK_HANDLE, work_methods);
  luaL_newlib(L, functions);
  return 1;
}
