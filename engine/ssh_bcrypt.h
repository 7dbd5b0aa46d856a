/* ssh_bcrypt.h - the key derivation of OpenSSH's private key files, which OpenSSL does not have. */
#ifndef CIR_SSH_BCRYPT_H
#define CIR_SSH_BCRYPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Derive `size` bytes into `out` from a passphrase, a salt and a number of rounds (at least 1), as
 * OpenBSD's bcrypt_pbkdf does. A round takes milliseconds, and key files ask for 16 and more: call
 * it on the thread pool. Returns false when OpenSSL or memory fails. What it computed on the way is
 * wiped.
 */
bool cir_bcrypt_pbkdf(const char *passphrase, size_t passphrase_size, const uint8_t *salt,
                      size_t salt_size, uint32_t rounds, uint8_t *out, size_t size);

#endif
