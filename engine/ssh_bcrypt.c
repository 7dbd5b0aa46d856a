/*
 * ssh_bcrypt.c - see ssh_bcrypt.h.
 *
 * bcrypt_pbkdf is PBKDF2 with SHA-512 around a variant of bcrypt, and bcrypt needs Blowfish with a
 * key schedule that takes a salt, which OpenSSL's Blowfish does not offer. Blowfish begins with
 * 1,042 words that are the binary digits of pi after the point; they are computed once instead of
 * being listed.
 */
#include "ssh_bcrypt.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

enum {
  P_WORDS = 18,
  S_WORDS = 1024,
  PI_WORDS = P_WORDS + S_WORDS,
  GUARD_WORDS = 2, /* room for the rounding of some 10,000 additions */
  FIXED_WORDS = 1 + PI_WORDS + GUARD_WORDS,
  HASH_SIZE = 64,
  BLOCK_SIZE = 32
};

typedef struct blowfish {
  uint32_t p[P_WORDS];
  uint32_t s[S_WORDS];
} blowfish;

/* --- pi
 * ----------------------------------------------------------------------------------------------------------
 */

/* A number from 0 to 2^32: word 0 is the integer, the others are the digits after the point, high
 * first. */
typedef uint32_t fixed[FIXED_WORDS];

/* to = from / divisor. Words before `first` are known to be zero; returns the first that is not, in
 * the result. */
static size_t fixed_divide(uint32_t *to, const uint32_t *from, size_t first, uint32_t divisor) {
  uint64_t rest = 0;
  for (size_t i = first; i < FIXED_WORDS; i++) {
    uint64_t value = rest << 32 | from[i];
    to[i] = (uint32_t)(value / divisor);
    rest = value % divisor;
  }
  while (first < FIXED_WORDS && to[first] == 0)
    first++;
  return first;
}

/* sum += term, or sum -= term; the term's words before `first` are zero. */
static void fixed_accumulate(uint32_t *sum, const uint32_t *term, size_t first, bool subtract) {
  uint64_t carry = 0;
  for (size_t i = FIXED_WORDS; i-- > 0 && (i >= first || carry != 0);) {
    uint64_t operand = (i >= first ? term[i] : 0) + carry;
    uint64_t value = subtract ? (uint64_t)sum[i] - operand : (uint64_t)sum[i] + operand;
    sum[i] = (uint32_t)value;
    carry = value >> 32 != 0 ? 1 : 0;
  }
}

/* sum += factor * atan(1/x), or minus that: 1/x - 1/(3 x^3) + 1/(5 x^5) - ... */
static void add_arctangent(uint32_t *sum, uint32_t factor, uint32_t x, bool subtract) {
  fixed power = {factor}, term = {0};
  size_t first = fixed_divide(power, power, 0, x);
  for (uint32_t k = 1; first < FIXED_WORDS; k += 2) {
    fixed_divide(term, power, first, k);
    fixed_accumulate(sum, term, first, subtract);
    first = fixed_divide(power, power, first, x * x);
    subtract = !subtract;
  }
}

static blowfish initial;
static CRYPTO_ONCE initial_once = CRYPTO_ONCE_STATIC_INIT;

/* Machin's formula: pi = 16 atan(1/5) - 4 atan(1/239). */
static void compute_initial(void) {
  fixed pi = {0};
  add_arctangent(pi, 16, 5, false);
  add_arctangent(pi, 4, 239, true);
  memcpy(initial.p, pi + 1, sizeof initial.p);
  memcpy(initial.s, pi + 1 + P_WORDS, sizeof initial.s);
}

/* --- Blowfish
 * ----------------------------------------------------------------------------------------------------
 */

static void encipher(const blowfish *state, uint32_t *left, uint32_t *right) {
  uint32_t l = *left, r = *right;
  for (int i = 0; i < 16; i++) {
    l ^= state->p[i];
    r ^= ((state->s[l >> 24] + state->s[256 + (l >> 16 & 255)]) ^ state->s[512 + (l >> 8 & 255)]) +
         state->s[768 + (l & 255)];
    uint32_t swap = l;
    l = r;
    r = swap;
  }
  *left = r ^ state->p[17];
  *right = l ^ state->p[16];
}

/* Reads words, high byte first, round and round a run of HASH_SIZE bytes. */
static uint32_t next_word(const uint8_t *bytes, size_t *at) {
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) {
    word = word << 8 | bytes[*at];
    *at = (*at + 1) % HASH_SIZE;
  }
  return word;
}

/* The key schedule: mix in the key, then replace every word by the cipher run over the salt (or
 * over zeroes). */
static void expand(blowfish *state, const uint8_t *key, const uint8_t *salt) {
  size_t at = 0;
  for (int i = 0; i < P_WORDS; i++)
    state->p[i] ^= next_word(key, &at);
  at = 0;
  uint32_t left = 0, right = 0;
  for (int i = 0; i < P_WORDS + S_WORDS; i += 2) {
    if (salt != NULL) {
      left ^= next_word(salt, &at);
      right ^= next_word(salt, &at);
    }
    encipher(state, &left, &right);
    uint32_t *to = i < P_WORDS ? &state->p[i] : &state->s[i - P_WORDS];
    to[0] = left;
    to[1] = right;
  }
}

/* One block: bcrypt of two hashes, with a text and an order of bytes of its own. */
static void bcrypt_block(const uint8_t *key, const uint8_t *salt, uint8_t *out) {
  static const char text[BLOCK_SIZE + 1] = "OxychromaticBlowfishSwatDynamite";
  blowfish state = initial;
  expand(&state, key, salt);
  for (int i = 0; i < 64; i++) {
    expand(&state, salt, NULL);
    expand(&state, key, NULL);
  }
  uint32_t words[BLOCK_SIZE / 4];
  for (int i = 0; i < BLOCK_SIZE / 4; i++)
    words[i] = (uint32_t)(uint8_t)text[4 * i] << 24 | (uint32_t)(uint8_t)text[4 * i + 1] << 16 |
               (uint32_t)(uint8_t)text[4 * i + 2] << 8 | (uint8_t)text[4 * i + 3];
  for (int round = 0; round < 64; round++)
    for (int i = 0; i < BLOCK_SIZE / 4; i += 2)
      encipher(&state, &words[i], &words[i + 1]);
  for (int i = 0; i < BLOCK_SIZE; i++)
    out[i] = (uint8_t)(words[i / 4] >> (8 * (i % 4)));
  OPENSSL_cleanse(&state, sizeof state);
  OPENSSL_cleanse(words, sizeof words);
}

/* --- PBKDF
 * -------------------------------------------------------------------------------------------------------
 */

/* SHA-512 of two runs of bytes. */
static bool hash(const void *a, size_t a_size, const void *b, size_t b_size, uint8_t *out) {
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  bool good = context != NULL && EVP_DigestInit_ex(context, EVP_sha512(), NULL) == 1 &&
              EVP_DigestUpdate(context, a, a_size) == 1 &&
              EVP_DigestUpdate(context, b, b_size) == 1 &&
              EVP_DigestFinal_ex(context, out, NULL) == 1;
  EVP_MD_CTX_free(context);
  return good;
}

bool cir_bcrypt_pbkdf(const char *passphrase, size_t passphrase_size, const uint8_t *salt,
                      size_t salt_size, uint32_t rounds, uint8_t *out, size_t size) {
  if (size == 0 || !CRYPTO_THREAD_run_once(&initial_once, compute_initial))
    return false;
  uint8_t key[HASH_SIZE], salted[HASH_SIZE], block[BLOCK_SIZE], sum[BLOCK_SIZE];
  bool good = hash(passphrase, passphrase_size, "", 0, key);

  /* The bytes of the blocks are dealt out in turn, so that all blocks are needed for any stretch of
   * the result. */
  size_t blocks = (size + BLOCK_SIZE - 1) / BLOCK_SIZE;
  for (size_t n = 0; n < blocks && good; n++) {
    uint8_t number[4] = {(uint8_t)((n + 1) >> 24), (uint8_t)((n + 1) >> 16),
                         (uint8_t)((n + 1) >> 8), (uint8_t)(n + 1)};
    good = hash(salt, salt_size, number, sizeof number, salted);
    memset(sum, 0, sizeof sum);
    for (uint32_t round = 0; round < rounds && good; round++) {
      bcrypt_block(key, salted, block);
      for (int i = 0; i < BLOCK_SIZE; i++)
        sum[i] ^= block[i];
      good = hash(block, sizeof block, "", 0, salted);
    }
    for (size_t i = 0; i < BLOCK_SIZE && i * blocks + n < size; i++)
      out[i * blocks + n] = sum[i];
  }
  OPENSSL_cleanse(key, sizeof key);
  OPENSSL_cleanse(salted, sizeof salted);
  OPENSSL_cleanse(block, sizeof block);
  OPENSSL_cleanse(sum, sizeof sum);
  return good;
}
