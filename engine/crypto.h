/*
 * crypto.h - what the files of the crypto module share: crypto.c has what is done at once,
 * crypto_work.c what is done on the thread pool.
 */
#ifndef CIR_CRYPTO_H
#define CIR_CRYPTO_H

#include <lauxlib.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <stdint.h>

/* A running checksum: OpenSSL's, or CRC-32C when context is NULL. */
typedef struct cir_digest {
  EVP_MD_CTX *context;
  uint32_t crc;
  bool finished;
} cir_digest;

enum { CIR_DIGESTS = 4 };

/* The names of the algorithms; a place in this list stands for one. NULL ends it. */
extern const char *const cir_digest_names[CIR_DIGESTS + 1];

/* Returns false when OpenSSL refuses (no memory, or FIPS mode and MD5); the digest may then only be
 * freed. */
bool cir_digest_begin(cir_digest *running, int algorithm);

void cir_digest_add(cir_digest *running, const void *bytes, size_t size);

/* Writes the checksum and returns its size. CRC-32C is big-endian, as Cloud Storage writes it. */
size_t cir_digest_end(cir_digest *running, unsigned char result[EVP_MAX_MD_SIZE]);

void cir_digest_free(cir_digest *running);

/* Make a class with the methods and itself as __index. [-0, +0, m] */
void cir_crypto_class(lua_State *L, const char *name, const luaL_Reg *methods);

/* Add the functions of crypto_work.c to the module on the top of the stack. [-0, +0, m] */
void cir_crypto_work_register(lua_State *L);

#endif
