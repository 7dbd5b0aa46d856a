/* ssh_key.c - see ssh_key.h: finding the format, PEM, public blobs and signatures. */
#include "ssh_key.h"

#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/ecdsa.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  ED25519_SIZE = 32,
  ED25519_SIGNATURE = 64,
  MAX_NUMBER = 4096 /* bytes: RSA keys of up to 32,768 bits */
};

void *cir_ssh_key_refuse(cir_ssh_key_fault *fault, const char *code, const char *reason,
                         const char *format, ...) {
  fault->code = code;
  fault->reason = reason;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault->message, sizeof fault->message, format, arguments);
  va_end(arguments);
  return NULL;
}

/* --- public blobs
 * -------------------------------------------------------------------------------------------------
 */

static uint8_t *put_u32(uint8_t *to, size_t value) {
  to[0] = (uint8_t)(value >> 24);
  to[1] = (uint8_t)(value >> 16);
  to[2] = (uint8_t)(value >> 8);
  to[3] = (uint8_t)value;
  return to + 4;
}

static uint8_t *put_string(uint8_t *to, const void *bytes, size_t size) {
  to = put_u32(to, size);
  memcpy(to, bytes, size);
  return to + size;
}

/* An mpint of a number that is not negative, whose bytes are given without leading zeroes. Writes
 * size + 5 at most. */
static uint8_t *put_number(uint8_t *to, const uint8_t *bytes, size_t size) {
  bool pad = size > 0 && (bytes[0] & 0x80) != 0;
  to = put_u32(to, size + (pad ? 1 : 0));
  if (pad)
    *to++ = 0;
  memcpy(to, bytes, size);
  return to + size;
}

/* The same for a BIGNUM of at most MAX_NUMBER bytes; `to` has room for that. NULL when it is
 * larger. */
static uint8_t *put_bignum(uint8_t *to, const BIGNUM *number) {
  uint8_t bytes[MAX_NUMBER];
  int size = BN_num_bytes(number);
  if (size > MAX_NUMBER)
    return NULL;
  BN_bn2bin(number, bytes);
  return put_number(to, bytes, (size_t)size);
}

/* Fill in type and blob of an RSA key. Returns whether that worked. */
static bool describe_rsa(cir_ssh_key *key) {
  BIGNUM *e = NULL, *n = NULL;
  bool good = EVP_PKEY_get_bn_param(key->pkey, OSSL_PKEY_PARAM_RSA_E, &e) == 1 &&
              EVP_PKEY_get_bn_param(key->pkey, OSSL_PKEY_PARAM_RSA_N, &n) == 1;
  key->type = "ssh-rsa";
  key->blob = good ? malloc(4 + strlen(key->type) + 2 * (5 + (size_t)MAX_NUMBER)) : NULL;
  if (key->blob != NULL) {
    uint8_t *end = put_string(key->blob, key->type, strlen(key->type));
    end = put_bignum(end, e);
    if (end != NULL)
      end = put_bignum(end, n);
    good = end != NULL;
    key->blob_size = good ? (size_t)(end - key->blob) : 0;
  }
  BN_free(e);
  BN_free(n);
  return good && key->blob != NULL;
}

static bool describe_ed25519(cir_ssh_key *key) {
  uint8_t public[ED25519_SIZE];
  size_t size = sizeof public;
  key->type = "ssh-ed25519";
  if (EVP_PKEY_get_raw_public_key(key->pkey, public, &size) != 1)
    return false;
  key->blob = malloc(8 + strlen(key->type) + size);
  if (key->blob == NULL)
    return false;
  uint8_t *end = put_string(key->blob, key->type, strlen(key->type));
  end = put_string(end, public, size);
  key->blob_size = (size_t)(end - key->blob);
  return true;
}

/* Sets type to NULL when the curve is none of SSH's. */
static bool describe_ecdsa(cir_ssh_key *key) {
  static const struct {
    const char *group, *type;
    int bytes;
    const EVP_MD *(*digest)(void);
  } curves[] = {{"prime256v1", "ecdsa-sha2-nistp256", 32, EVP_sha256},
                {"secp384r1", "ecdsa-sha2-nistp384", 48, EVP_sha384},
                {"secp521r1", "ecdsa-sha2-nistp521", 66, EVP_sha512}};
  char group[64];
  size_t length = 0;
  if (EVP_PKEY_get_utf8_string_param(key->pkey, OSSL_PKEY_PARAM_GROUP_NAME, group, sizeof group,
                                     &length) != 1)
    return false;
  for (size_t i = 0; i < sizeof curves / sizeof curves[0]; i++) {
    if (strcmp(group, curves[i].group) != 0)
      continue;
    key->type = curves[i].type;
    key->curve_bytes = curves[i].bytes;
    key->digest = curves[i].digest();
  }
  if (key->type == NULL)
    return false;

  /* The point, uncompressed, whatever form the file had it in. */
  BIGNUM *x = NULL, *y = NULL;
  size_t half = (size_t)key->curve_bytes;
  const char *curve = key->type + strlen("ecdsa-sha2-");
  bool good = EVP_PKEY_get_bn_param(key->pkey, OSSL_PKEY_PARAM_EC_PUB_X, &x) == 1 &&
              EVP_PKEY_get_bn_param(key->pkey, OSSL_PKEY_PARAM_EC_PUB_Y, &y) == 1;
  key->blob = good ? malloc(12 + strlen(key->type) + strlen(curve) + 1 + 2 * half) : NULL;
  if (key->blob != NULL) {
    uint8_t *end = put_string(key->blob, key->type, strlen(key->type));
    end = put_string(end, curve, strlen(curve));
    end = put_u32(end, 1 + 2 * half);
    *end++ = 4; /* uncompressed */
    good = BN_bn2binpad(x, end, key->curve_bytes) >= 0 &&
           BN_bn2binpad(y, end + half, key->curve_bytes) >= 0;
    end += 2 * half;
    key->blob_size = (size_t)(end - key->blob);
  }
  BN_free(x);
  BN_free(y);
  return good && key->blob != NULL;
}

/* --- signatures
 * ---------------------------------------------------------------------------------------------------
 */

/* An ECDSA signature as SSH writes it (two mpints) from OpenSSL's DER. Takes `der` over. */
static uint8_t *ecdsa_to_ssh(uint8_t *der, size_t der_size, size_t *size) {
  const unsigned char *at = der;
  ECDSA_SIG *signature = d2i_ECDSA_SIG(NULL, &at, (long)der_size);
  free(der);
  if (signature == NULL)
    return NULL;
  uint8_t *out = malloc(2 * (5 + (size_t)MAX_NUMBER));
  if (out != NULL) {
    uint8_t *end = put_bignum(out, ECDSA_SIG_get0_r(signature));
    end = put_bignum(end, ECDSA_SIG_get0_s(signature));
    *size = (size_t)(end - out);
  }
  ECDSA_SIG_free(signature);
  return out;
}

uint8_t *cir_ssh_key_sign(const cir_ssh_key *key, cir_span algorithm, const uint8_t *data,
                          size_t data_size, size_t *signature_size) {
  const EVP_MD *digest = key->digest;
  if (strcmp(key->type, "ssh-rsa") ==
      0) { /* "ssh-rsa" itself is SHA-1, which is not signed any more */
    if (cir_span_is(algorithm, "rsa-sha2-512"))
      digest = EVP_sha512();
    else if (cir_span_is(algorithm, "rsa-sha2-256"))
      digest = EVP_sha256();
    else
      return NULL;
  } else if (!cir_span_is(algorithm, key->type)) {
    return NULL;
  }

  EVP_MD_CTX *context = EVP_MD_CTX_new();
  size_t size = (size_t)EVP_PKEY_get_size(key->pkey);
  uint8_t *signature = malloc(size);
  bool good = context != NULL && signature != NULL &&
              EVP_DigestSignInit(context, NULL, digest, NULL, key->pkey) == 1 &&
              EVP_DigestSign(context, signature, &size, data, data_size) == 1;
  EVP_MD_CTX_free(context);
  if (!good) {
    ERR_clear_error();
    free(signature);
    return NULL;
  }
  if (key->curve_bytes > 0)
    return ecdsa_to_ssh(signature, size, signature_size);
  *signature_size = size;
  return signature;
}

/*
 * Whether the numbers that sign are seen to belong to n and e: p q = n, e dp = 1 (mod p - 1),
 * e dq = 1 (mod q - 1) and qinv q = 1 (mod p). That is all that signing rests on, and takes a
 * hundredth of a signature. A key with other numbers (without them, or with more primes) may be
 * good all the same.
 */
static bool rsa_numbers_match(const EVP_PKEY *pkey) {
  enum { N, E, P, Q, DP, DQ, QINV, COUNT };
  static const char *const NAMES[COUNT] = {
      OSSL_PKEY_PARAM_RSA_N,           OSSL_PKEY_PARAM_RSA_E,         OSSL_PKEY_PARAM_RSA_FACTOR1,
      OSSL_PKEY_PARAM_RSA_FACTOR2,     OSSL_PKEY_PARAM_RSA_EXPONENT1, OSSL_PKEY_PARAM_RSA_EXPONENT2,
      OSSL_PKEY_PARAM_RSA_COEFFICIENT1};
  BIGNUM *v[COUNT] = {NULL};
  BN_CTX *context = BN_CTX_new();
  BIGNUM *product = BN_new(), *modulus = BN_new();
  bool good = context != NULL && product != NULL && modulus != NULL;
  for (int i = 0; good && i < COUNT; i++)
    good = EVP_PKEY_get_bn_param(pkey, NAMES[i], &v[i]) == 1;

  good = good && BN_mul(product, v[P], v[Q], context) && BN_cmp(product, v[N]) == 0;
  for (int i = 0; good && i < 2; i++)
    good = BN_sub(modulus, v[P + i], BN_value_one()) &&
           BN_mod_mul(product, v[E], v[DP + i], modulus, context) && BN_is_one(product);
  good = good && BN_mod_mul(product, v[QINV], v[Q], v[P], context) && BN_is_one(product);

  for (int i = 0; i < COUNT; i++)
    BN_clear_free(v[i]);
  BN_clear_free(product);
  BN_clear_free(modulus);
  BN_CTX_free(context);
  return good;
}

/* Whether the private half is that of the public half: by a signature, where numbers do not tell.
 */
static bool halves_match(const cir_ssh_key *key) {
  static const uint8_t text[] = "do the two halves belong together?";
  const EVP_MD *digest = key->digest;
  if (strcmp(key->type, "ssh-rsa") == 0) {
    if (rsa_numbers_match(key->pkey))
      return true;
    digest = EVP_sha256();
  }
  uint8_t *signature = NULL;
  size_t size = 0;
  EVP_MD_CTX *sign = EVP_MD_CTX_new(), *verify = EVP_MD_CTX_new();
  bool good = sign != NULL && verify != NULL &&
              EVP_DigestSignInit(sign, NULL, digest, NULL, key->pkey) == 1 &&
              EVP_DigestSign(sign, NULL, &size, text, sizeof text) == 1 &&
              (signature = malloc(size)) != NULL &&
              EVP_DigestSign(sign, signature, &size, text, sizeof text) == 1 &&
              EVP_DigestVerifyInit(verify, NULL, digest, NULL, key->pkey) == 1 &&
              EVP_DigestVerify(verify, signature, size, text, sizeof text) == 1;
  EVP_MD_CTX_free(sign);
  EVP_MD_CTX_free(verify);
  free(signature);
  ERR_clear_error();
  return good;
}

/* --- making and freeing
 * ------------------------------------------------------------------------------------------- */

void cir_ssh_key_free(cir_ssh_key *key) {
  if (key == NULL)
    return;
  EVP_PKEY_free(key->pkey); /* wipes the private half */
  free(key->blob);
  free(key->comment);
  free(key);
}

cir_ssh_key *cir_ssh_key_adopt(EVP_PKEY *pkey, cir_span comment, cir_ssh_key_fault *fault) {
  cir_ssh_key *key = calloc(1, sizeof *key);
  if (key == NULL) {
    EVP_PKEY_free(pkey);
    return cir_ssh_key_refuse(fault, "failed", NULL, "out of memory");
  }
  key->pkey = pkey;
  key->comment = calloc(1, comment.size + 1);
  if (key->comment != NULL)
    memcpy(key->comment, comment.data, comment.size);

  bool described = false;
  if (EVP_PKEY_is_a(pkey, "RSA"))
    described = describe_rsa(key);
  else if (EVP_PKEY_is_a(pkey, "ED25519"))
    described = describe_ed25519(key);
  else if (EVP_PKEY_is_a(pkey, "EC"))
    described = describe_ecdsa(key);
  if (key->type == NULL) {
    const char *name = EVP_PKEY_get0_type_name(pkey);
    cir_ssh_key_refuse(fault, "unsupported", NULL,
                       "a key of type %s is none that SSH servers take: use Ed25519, RSA or ECDSA "
                       "(P-256, P-384, P-521)",
                       name != NULL ? name : "unknown");
  } else if (!described || key->comment == NULL) {
    cir_ssh_key_refuse(fault, "failed", NULL, "the public half of the %s key cannot be made",
                       key->type);
  } else if (!halves_match(key)) {
    cir_ssh_key_refuse(fault, "invalid", NULL,
                       "the private and the public half of the %s key do not belong together",
                       key->type);
  } else {
    return key;
  }
  ERR_clear_error();
  cir_ssh_key_free(key);
  return NULL;
}

/* --- PEM
 * ----------------------------------------------------------------------------------------------------------
 */

typedef struct passphrase_request {
  const char *text;
  size_t size;
  bool asked;
} passphrase_request;

/* OpenSSL's pem_password_cb: called only when the key is encrypted. */
static int give_passphrase(char *buffer, int room, int writing, void *user) {
  passphrase_request *request = user;
  (void)writing;
  request->asked = true;
  if (request->text == NULL || request->size > (size_t)room)
    return -1;
  memcpy(buffer, request->text, request->size);
  return (int)request->size;
}

static cir_ssh_key *parse_pem(const char *text, size_t size, const char *passphrase,
                              size_t passphrase_size, cir_ssh_key_fault *fault) {
  BIO *bio = BIO_new_mem_buf(text, (int)size);
  if (bio == NULL)
    return cir_ssh_key_refuse(fault, "failed", NULL, "out of memory");
  passphrase_request request = {passphrase, passphrase_size, false};
  EVP_PKEY *pkey = PEM_read_bio_PrivateKey(bio, NULL, give_passphrase, &request);
  BIO_free(bio);
  ERR_clear_error();
  if (pkey != NULL)
    return cir_ssh_key_adopt(pkey, (cir_span){(const uint8_t *)"", 0}, fault);
  if (request.asked && passphrase == NULL)
    return cir_ssh_key_refuse(fault, "auth", "passphrase_needed",
                              "the key is encrypted and needs its passphrase");
  if (request.asked)
    return cir_ssh_key_refuse(fault, "auth", "passphrase_wrong",
                              "the passphrase does not open the key (or the file is damaged)");
  return cir_ssh_key_refuse(fault, "invalid", NULL,
                            "the PEM text holds no private key that OpenSSL can read");
}

/* --- the format
 * ---------------------------------------------------------------------------------------------------
 */

/* The value of a base64 digit, -1 for white space, -2 for anything else. */
static int base64_value(uint8_t c) {
  if (c >= 'A' && c <= 'Z')
    return c - 'A';
  if (c >= 'a' && c <= 'z')
    return c - 'a' + 26;
  if (c >= '0' && c <= '9')
    return c - '0' + 52;
  if (c == '+')
    return 62;
  if (c == '/')
    return 63;
  return c == ' ' || c == '\t' || c == '\r' || c == '\n' ? -1 : -2;
}

/* Decode base64 with white space in it into `to`, which has room for 3/4 of it. Returns whether it
 * was well formed. */
static bool decode_base64(const char *text, size_t size, uint8_t *to, size_t *to_size) {
  uint32_t bits = 0;
  int count = 0;
  uint8_t *start = to;
  size_t i = 0;
  for (; i < size && text[i] != '='; i++) {
    int value = base64_value((uint8_t)text[i]);
    if (value == -1)
      continue;
    if (value < 0)
      return false;
    bits = bits << 6 | (uint32_t)value;
    if (++count % 4 != 0)
      continue;
    *to++ = (uint8_t)(bits >> 16);
    *to++ = (uint8_t)(bits >> 8);
    *to++ = (uint8_t)bits;
  }
  if (count % 4 == 1)
    return false;
  if (count % 4 == 2) {
    *to++ = (uint8_t)(bits >> 4);
  } else if (count % 4 == 3) {
    *to++ = (uint8_t)(bits >> 10);
    *to++ = (uint8_t)(bits >> 2);
  }
  for (; i < size; i++)
    if (text[i] != '=' && base64_value((uint8_t)text[i]) != -1)
      return false;
  *to_size = (size_t)(to - start);
  return true;
}

/* Where `needle` begins in the text, or NULL. */
static const char *find(const char *text, size_t size, const char *needle) {
  return memmem(text, size, needle, strlen(needle));
}

cir_ssh_key *cir_ssh_key_parse(const char *text, size_t size, const char *passphrase,
                               size_t passphrase_size, cir_ssh_key_fault *fault) {
  static const char begin[] = "-----BEGIN OPENSSH PRIVATE KEY-----";
  static const char end[] = "-----END OPENSSH PRIVATE KEY-----";
  enum { MAX_FILE = 1024 * 1024 };
  if (size > MAX_FILE)
    return cir_ssh_key_refuse(fault, "invalid", NULL, "the file is larger than any private key");

  const char *from = find(text, size, begin);
  if (from != NULL) {
    from += sizeof begin - 1;
    size_t left = size - (size_t)(from - text);
    const char *to = find(from, left, end);
    if (to == NULL)
      return cir_ssh_key_refuse(fault, "invalid", NULL,
                                "the file is cut short: it lacks the line \"%s\"", end);
    size_t length = (size_t)(to - from), decoded_size = 0;
    size_t room = length / 4 * 3 + 3;
    uint8_t *decoded = malloc(room);
    if (decoded == NULL)
      return cir_ssh_key_refuse(fault, "failed", NULL, "out of memory");
    cir_ssh_key *key = NULL;
    if (decode_base64(from, length, decoded, &decoded_size))
      key = cir_ssh_key_parse_openssh(decoded, decoded_size, passphrase, passphrase_size, fault);
    else
      cir_ssh_key_refuse(fault, "invalid", NULL,
                         "the text between the BEGIN and END lines is not base64");
    OPENSSL_cleanse(decoded, room);
    free(decoded);
    return key;
  }
  if (find(text, size, "-----BEGIN ") != NULL && find(text, size, "PRIVATE KEY-----") != NULL)
    return parse_pem(text, size, passphrase, passphrase_size, fault);
  if (size > 4 && (memcmp(text, "ssh-", 4) == 0 || memcmp(text, "ecds", 4) == 0))
    return cir_ssh_key_refuse(fault, "invalid", NULL,
                              "this is a public key: give the file without .pub");
  if (find(text, size, "PuTTY-User-Key-File") != NULL)
    return cir_ssh_key_refuse(
        fault, "unsupported", NULL,
        "this is PuTTY's format: convert it with `puttygen KEY -O private-openssh -o NEW`");
  return cir_ssh_key_refuse(fault, "invalid", NULL,
                            "the file holds no private key (no BEGIN ... PRIVATE KEY line)");
}
