/*
 * ssh_key.h - private keys of SSH users: read once, used for every session.
 *
 * Nothing here knows Lua or libssh2, and all of it may run on a thread of the pool, one key on one
 * thread at a time. Private material lives in OpenSSL's key object; every copy made on the way to
 * it is wiped.
 */
#ifndef CIR_SSH_KEY_H
#define CIR_SSH_KEY_H

#include "ssh_wire.h"

#include <openssl/evp.h>

typedef struct cir_ssh_key {
  EVP_PKEY *pkey;
  const char *type;     /* "ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", ... */
  int curve_bytes;      /* ECDSA: the size of r and of s; else 0 */
  const EVP_MD *digest; /* ECDSA: the curve's own hash; else NULL */
  uint8_t *blob;        /* the public key as servers know it */
  size_t blob_size;
  char *comment; /* of the file, "" when it has none */
} cir_ssh_key;

/* Why a key cannot be used. */
typedef struct cir_ssh_key_fault {
  const char *code;   /* "auth" (the passphrase), "invalid", "unsupported", "failed" */
  const char *reason; /* "passphrase_needed", "passphrase_wrong", or NULL */
  char message[240];  /* what is wrong and what to do, without the name of the file */
} cir_ssh_key_fault;

/*
 * Read a private key: OpenSSH's own format, or PEM (PKCS#1, SEC 1, PKCS#8, encrypted or not)
 * through OpenSSL. The passphrase may be NULL. Returns a key that the caller frees, or NULL with
 * the fault filled in.
 */
cir_ssh_key *cir_ssh_key_parse(const char *text, size_t size, const char *passphrase,
                               size_t passphrase_size, cir_ssh_key_fault *fault);

void cir_ssh_key_free(cir_ssh_key *key);

/*
 * Sign `data` as SSH's userauth wants it for `algorithm` ("rsa-sha2-512", "rsa-sha2-256" or the
 * key's own type): what goes inside the signature's inner string. Returns malloc'd bytes and their
 * number, or NULL: no such algorithm for this key, or OpenSSL failed.
 */
uint8_t *cir_ssh_key_sign(const cir_ssh_key *key, cir_span algorithm, const uint8_t *data,
                          size_t data_size, size_t *signature_size);

/* --- between ssh_key.c and ssh_key_openssh.c
 * ---------------------------------------------------------------------- */

/* Set the fault; returns NULL, so that a reader can `return cir_ssh_key_refuse(...)`. */
void *cir_ssh_key_refuse(cir_ssh_key_fault *fault, const char *code, const char *reason,
                         const char *format, ...) __attribute__((format(printf, 4, 5)));

/*
 * Make a key of an OpenSSL key object, whose ownership passes whatever the outcome: names its type,
 * makes its blob and proves that its two halves belong together by a signature. Returns NULL with
 * the fault filled in.
 */
cir_ssh_key *cir_ssh_key_adopt(EVP_PKEY *pkey, cir_span comment, cir_ssh_key_fault *fault);

/* The key of a decoded "openssh-key-v1" container. */
cir_ssh_key *cir_ssh_key_parse_openssh(const uint8_t *data, size_t size, const char *passphrase,
                                       size_t passphrase_size, cir_ssh_key_fault *fault);

#endif
