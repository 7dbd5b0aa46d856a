/*
 * crypto.c - ciranda.core.crypto: digests, checksums, RS256, AES-256-CTR, base64, random bytes.
 * OpenSSL does the work, and sets itself up at the first call that needs it.
 *
 * Digests and signatures are raw bytes. A misuse raises; what depends on data gives nil and an
 * error table.
 */
#include "crypto.h"
#include "callback.h"
#include "crc32c.h"
#include "modules.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/hmac.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/rsa.h>
#include <string.h>

#define CIR_DIGEST_HANDLE "ciranda.digest"

const char *const cir_digest_names[] = {"sha256", "sha1", "md5", "crc32c", NULL};

/* OpenSSL's digest of that place in cir_digest_names; NULL for crc32c. */
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

/*
 * The same as its provider has it, looked up once: EVP_DigestInit_ex would do that each time, which
 * takes longer than digesting a small file. What this machine's OpenSSL does not give is looked up
 * again. On the main thread only.
 */
static const EVP_MD *fetched(const EVP_MD *kind, int algorithm) {
  static EVP_MD *kept[CIR_DIGESTS];
  if (kept[algorithm] == NULL)
    kept[algorithm] = EVP_MD_fetch(NULL, EVP_MD_get0_name(kind), NULL);
  return kept[algorithm];
}

bool cir_digest_begin(cir_digest *running, int algorithm) {
  const EVP_MD *kind = digest_of(algorithm);
  *running = (cir_digest){NULL, 0, false};
  if (kind == NULL)
    return true;
  kind = fetched(kind, algorithm);
  if (kind == NULL)
    return false;
  running->context = EVP_MD_CTX_new();
  return running->context != NULL && EVP_DigestInit_ex(running->context, kind, NULL) == 1;
}

void cir_digest_add(cir_digest *running, const void *bytes, size_t size) {
  if (running->context != NULL)
    EVP_DigestUpdate(running->context, bytes, size);
  else
    running->crc = cir_crc32c(running->crc, bytes, size);
}

size_t cir_digest_end(cir_digest *running, unsigned char result[EVP_MAX_MD_SIZE]) {
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

void cir_digest_free(cir_digest *running) {
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

/* --- digests --------------------------------------------------------------------------------- */

/* Raise that cir_digest_begin failed, with OpenSSL's queue emptied. [-0, +0, v] */
static int begin_failed(lua_State *L, int algorithm) {
  ERR_clear_error();
  return luaL_error(L, "crypto: OpenSSL, as this machine configures it, gives no %s",
                    cir_digest_names[algorithm]);
}

/* crypto.digest(algorithm, data) -> bytes. [-2, +1, v] */
static int l_digest(lua_State *L) {
  int algorithm = luaL_checkoption(L, 1, NULL, cir_digest_names);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  unsigned char result[EVP_MAX_MD_SIZE];
  cir_digest running;
  if (!cir_digest_begin(&running, algorithm)) {
    cir_digest_free(&running);
    return begin_failed(L, algorithm);
  }
  cir_digest_add(&running, data, size);
  size_t length = cir_digest_end(&running, result);
  cir_digest_free(&running);
  lua_pushlstring(L, (const char *)result, length);
  return 1;
}

/* crypto.start(algorithm) -> digest with :update(data) and :finish(). [-1, +1, v] */
static int l_start(lua_State *L) {
  int algorithm = luaL_checkoption(L, 1, NULL, cir_digest_names);
  cir_digest *running = lua_newuserdatauv(L, sizeof *running, 0);
  *running = (cir_digest){NULL, 0, true};
  luaL_setmetatable(L, CIR_DIGEST_HANDLE);
  if (!cir_digest_begin(running, algorithm))
    return begin_failed(L, algorithm);
  return 1;
}

static cir_digest *check_running(lua_State *L) {
  cir_digest *running = luaL_checkudata(L, 1, CIR_DIGEST_HANDLE);
  luaL_argcheck(L, !running->finished, 1, "the digest is finished");
  return running;
}

/* digest:update(data) -> digest. [-2, +1, v] */
static int l_update(lua_State *L) {
  cir_digest *running = check_running(L);
  size_t size;
  const char *data = luaL_checklstring(L, 2, &size);
  cir_digest_add(running, data, size);
  lua_settop(L, 1);
  return 1;
}

/* digest:finish() -> bytes. [-1, +1, v] */
static int l_finish(lua_State *L) {
  unsigned char result[EVP_MAX_MD_SIZE];
  cir_digest *running = check_running(L);
  size_t length = cir_digest_end(running, result);
  cir_digest_free(running);
  lua_pushlstring(L, (const char *)result, length);
  return 1;
}

static int l_digest_gc(lua_State *L) {
  cir_digest *running = luaL_checkudata(L, 1, CIR_DIGEST_HANDLE);
  running->finished = true; /* without its context it would go on as a CRC */
  cir_digest_free(running);
  return 0;
}

/* crypto.hmac(algorithm, key, data) -> bytes; the algorithm is sha256, sha1 or md5. [-3, +1, v] */
static int l_hmac(lua_State *L) {
  const EVP_MD *kind = digest_of(luaL_checkoption(L, 1, NULL, cir_digest_names));
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

/*
 * crypto.aes256_ctr(key, counter, data) -> data, encrypted or decrypted: counter mode (NIST SP
 * 800-38A), `counter` being the first block's. It hides and does not authenticate. [-3, +1, v]
 */
static int l_aes256_ctr(lua_State *L) {
  size_t key_size, counter_size, size;
  const char *key = luaL_checklstring(L, 1, &key_size);
  const char *counter = luaL_checklstring(L, 2, &counter_size);
  const char *data = luaL_checklstring(L, 3, &size);
  luaL_argcheck(L, key_size == 32, 1, "a key of 32 bytes expected");
  luaL_argcheck(L, counter_size == 16, 2, "a counter of 16 bytes expected");
  luaL_argcheck(L, size <= INT32_MAX, 3, "too long");
  luaL_Buffer buffer;
  unsigned char *to = (unsigned char *)luaL_buffinitsize(L, &buffer, size);
  int length = 0;
  EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
  bool done = context != NULL &&
              EVP_EncryptInit_ex(context, EVP_aes_256_ctr(), NULL, (const unsigned char *)key,
                                 (const unsigned char *)counter) == 1 &&
              EVP_EncryptUpdate(context, to, &length, (const unsigned char *)data, (int)size) == 1;
  EVP_CIPHER_CTX_free(context);
  if (!done) {
    ERR_clear_error();
    return luaL_error(L, "crypto.aes256_ctr: OpenSSL refuses");
  }
  luaL_pushresultsize(&buffer, (size_t)length);
  return 1;
}

/* --- RS256 ----------------------------------------------------------------------------------- */

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
  size_t size, length;
  const char *data = luaL_checklstring(L, 2, &size);
  EVP_PKEY *key = read_key(L, 1, true);
  if (key == NULL)
    return push_openssl_error(L, "invalid", "not an RSA private key in PEM without a passphrase");
  unsigned char signature[OPENSSL_RSA_MAX_MODULUS_BITS / 8];
  length = sizeof signature;
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  bool done = context != NULL && EVP_PKEY_get_size(key) <= (int)sizeof signature &&
              EVP_DigestSignInit(context, NULL, EVP_sha256(), NULL, key) == 1 &&
              EVP_DigestSign(context, signature, &length, (const unsigned char *)data, size) == 1;
  EVP_MD_CTX_free(context);
  EVP_PKEY_free(key);
  if (!done)
    return push_openssl_error(L, "failed", "the data could not be signed");
  lua_pushlstring(L, (const char *)signature, length);
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

/* --- base64, random -------------------------------------------------------------------------- */

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

void cir_crypto_class(lua_State *L, const char *name, const luaL_Reg *methods) {
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
                                       {"aes256_ctr", l_aes256_ctr},
                                       {"rs256_sign", l_rs256_sign},
                                       {"rs256_verify", l_rs256_verify},
                                       {"base64", l_base64},
                                       {"unbase64", l_unbase64},
                                       {"random", l_random},
                                       {"equal", l_equal},
                                       {NULL, NULL}};
  static const luaL_Reg digest_methods[] = {
      {"update", l_update}, {"finish", l_finish}, {"__gc", l_digest_gc}, {NULL, NULL}};
  cir_crypto_class(L, CIR_DIGEST_HANDLE, digest_methods);
  luaL_newlib(L, functions);
  cir_crypto_work_register(L);
  return 1;
}
