/*
 * ssh_key_openssh.c - the container "openssh-key-v1" (OpenSSH's PROTOCOL.key), which OpenSSL does
 * not read.
 *
 *   magic | cipher | kdf | kdf options | 1 | public blob | private section
 *
 * The private section, perhaps encrypted, is: check | check | type | the key's numbers | comment |
 * padding 1, 2, 3 ... The two equal check words are how a wrong passphrase is noticed.
 */
#include "ssh_bcrypt.h"
#include "ssh_key.h"

#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/param_build.h>
#include <stdlib.h>

enum {
  MAX_ROUNDS = 20000, /* of bcrypt: minutes of work; ssh-keygen's own number is 16 or 24 */
  MAX_KEY_AND_IV = 64 + 16,
  POLY1305_KEY = 32,
  POLY1305_TAG = 16
};

typedef struct cipher_kind {
  const char *name; /* as OpenSSH writes it */
  const char *evp;  /* as OpenSSL calls it; NULL for none */
  size_t key, iv, block, tag;
} cipher_kind;

static const cipher_kind KINDS[] = {
    {"none", NULL, 0, 0, 8, 0},
    {"aes256-ctr", "AES-256-CTR", 32, 16, 16, 0},
    {"aes192-ctr", "AES-192-CTR", 24, 16, 16, 0},
    {"aes128-ctr", "AES-128-CTR", 16, 16, 16, 0},
    {"aes256-cbc", "AES-256-CBC", 32, 16, 16, 0},
    {"aes192-cbc", "AES-192-CBC", 24, 16, 16, 0},
    {"aes128-cbc", "AES-128-CBC", 16, 16, 16, 0},
    {"rijndael-cbc@lysator.liu.se", "AES-256-CBC", 32, 16, 16, 0},
    {"3des-cbc", "DES-EDE3-CBC", 24, 8, 8, 0},
    {"aes256-gcm@openssh.com", "AES-256-GCM", 32, 12, 16, 16},
    {"aes128-gcm@openssh.com", "AES-128-GCM", 16, 12, 16, 16},
    {"chacha20-poly1305@openssh.com", "ChaCha20", 64, 0, 8, POLY1305_TAG}};

static const cipher_kind *kind_of(cir_span name) {
  for (size_t i = 0; i < sizeof KINDS / sizeof KINDS[0]; i++)
    if (cir_span_is(name, KINDS[i].name))
      return &KINDS[i];
  return NULL;
}

/* --- decryption
 * ---------------------------------------------------------------------------------------------------
 */

/* Run an OpenSSL cipher over whole blocks; `tag` is NULL for those that have none. Returns whether
 * it was good. */
static bool run_cipher(const char *name, const uint8_t *key, const uint8_t *iv, const uint8_t *in,
                       size_t size, uint8_t *out, const uint8_t *tag, size_t tag_size) {
  EVP_CIPHER *cipher = EVP_CIPHER_fetch(NULL, name, NULL);
  EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
  int written = 0, rest = 0;
  bool good = cipher != NULL && context != NULL &&
              EVP_DecryptInit_ex2(context, cipher, key, iv, NULL) == 1 &&
              EVP_CIPHER_CTX_set_padding(context, 0) == 1 &&
              EVP_DecryptUpdate(context, out, &written, in, (int)size) == 1 &&
              (tag == NULL || EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, (int)tag_size,
                                                  (void *)(uintptr_t)tag) == 1) &&
              EVP_DecryptFinal_ex(context, out + written, &rest) == 1 &&
              (size_t)written + (size_t)rest == size;
  EVP_CIPHER_CTX_free(context);
  EVP_CIPHER_free(cipher);
  return good;
}

static bool poly1305(const uint8_t *key, const uint8_t *in, size_t size, uint8_t *tag) {
  EVP_MAC *mac = EVP_MAC_fetch(NULL, "POLY1305", NULL);
  EVP_MAC_CTX *context = mac != NULL ? EVP_MAC_CTX_new(mac) : NULL;
  size_t written = 0;
  bool good = context != NULL && EVP_MAC_init(context, key, POLY1305_KEY, NULL) == 1 &&
              EVP_MAC_update(context, in, size) == 1 &&
              EVP_MAC_final(context, tag, &written, POLY1305_TAG) == 1;
  EVP_MAC_CTX_free(context);
  EVP_MAC_free(mac);
  return good;
}

/*
 * OpenSSH's ChaCha20-Poly1305: the first half of the key, nonce zero; block 0 of the stream is the
 * key of the tag, which covers the ciphertext, and the text begins with block 1. OpenSSL's IV is
 * the counter, then the nonce.
 */
static bool open_chacha(const uint8_t *key, const uint8_t *in, size_t size, const uint8_t *tag,
                        uint8_t *out) {
  static const uint8_t zeroes[POLY1305_KEY];
  static const uint8_t block0[16] = {0}, block1[16] = {1};
  uint8_t tag_key[POLY1305_KEY], expected[POLY1305_TAG];
  bool good = run_cipher("ChaCha20", key, block0, zeroes, sizeof zeroes, tag_key, NULL, 0) &&
              poly1305(tag_key, in, size, expected) &&
              CRYPTO_memcmp(expected, tag, sizeof expected) == 0 &&
              run_cipher("ChaCha20", key, block1, in, size, out, NULL, 0);
  OPENSSL_cleanse(tag_key, sizeof tag_key);
  return good;
}

/* Decrypt the private section with a key made from the passphrase. 1 good, 0 wrong passphrase or
 * damage, -1 failure. */
static int decrypt(const cipher_kind *kind, cir_span salt, uint32_t rounds, const char *passphrase,
                   size_t passphrase_size, cir_span section, const uint8_t *tag, uint8_t *out) {
  uint8_t material[MAX_KEY_AND_IV];
  int result = -1;
  if (cir_bcrypt_pbkdf(passphrase, passphrase_size, salt.data, salt.size, rounds, material,
                       kind->key + kind->iv)) {
    if (strcmp(kind->evp, "ChaCha20") == 0)
      result = open_chacha(material, section.data, section.size, tag, out);
    else
      result = run_cipher(kind->evp, material, material + kind->key, section.data, section.size,
                          out, kind->tag > 0 ? tag : NULL, kind->tag);
  }
  OPENSSL_cleanse(material, sizeof material);
  ERR_clear_error();
  return result;
}

/* --- the numbers of a key
 * ----------------------------------------------------------------------------------------- */

/* An OpenSSL key object from parameters; takes them over. NULL when OpenSSL refuses them. */
static EVP_PKEY *from_params(const char *type, OSSL_PARAM_BLD *builder) {
  OSSL_PARAM *params = OSSL_PARAM_BLD_to_param(builder);
  EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_name(NULL, type, NULL);
  EVP_PKEY *pkey = NULL;
  if (params == NULL || context == NULL || EVP_PKEY_fromdata_init(context) != 1 ||
      EVP_PKEY_fromdata(context, &pkey, EVP_PKEY_KEYPAIR, params) != 1)
    pkey = NULL;
  EVP_PKEY_CTX_free(context);
  OSSL_PARAM_free(params);
  return pkey;
}

/*
 * A secret number; the caller gives it back with BN_clear_free. OpenSSL wipes the parameters that
 * it makes of secure ones only.
 */
static BIGNUM *number(cir_span span) {
  BIGNUM *value = BN_secure_new();
  if (value != NULL && BN_bin2bn(span.data, (int)span.size, value) == NULL) {
    BN_clear_free(value);
    return NULL;
  }
  if (value != NULL)
    BN_set_flags(value, BN_FLG_CONSTTIME);
  return value;
}

static EVP_PKEY *read_rsa(cir_wire *wire) {
  enum { N, E, D, INVERSE, P, Q, FROM_FILE, DP = FROM_FILE, DQ, COUNT };
  static const char *const names[COUNT] = {
      OSSL_PKEY_PARAM_RSA_N,         OSSL_PKEY_PARAM_RSA_E,
      OSSL_PKEY_PARAM_RSA_D,         OSSL_PKEY_PARAM_RSA_COEFFICIENT1,
      OSSL_PKEY_PARAM_RSA_FACTOR1,   OSSL_PKEY_PARAM_RSA_FACTOR2,
      OSSL_PKEY_PARAM_RSA_EXPONENT1, OSSL_PKEY_PARAM_RSA_EXPONENT2};
  enum { MAX_BYTES = 2048 /* 16,384 bits, OpenSSH's own limit */ };
  BIGNUM *value[COUNT] = {NULL};
  bool good = true;
  for (int i = 0; i < FROM_FILE; i++) {
    cir_span span = cir_wire_number(wire);
    if (wire->bad || span.size == 0 || span.size > MAX_BYTES)
      good = false;
    else
      good = (value[i] = number(span)) != NULL && good;
  }
  /* The file leaves out d mod (p-1) and d mod (q-1), which OpenSSL wants. */
  BN_CTX *context = BN_CTX_secure_new();
  BIGNUM *less = BN_secure_new();
  good = good && context != NULL && less != NULL && !BN_is_one(value[P]) && !BN_is_one(value[Q]);
  for (int i = DP; i < COUNT && good; i++) {
    good = (value[i] = BN_secure_new()) != NULL &&
           BN_sub(less, value[i == DP ? P : Q], BN_value_one()) == 1;
    if (good) {
      BN_set_flags(less, BN_FLG_CONSTTIME);
      good = BN_mod(value[i], value[D], less, context) == 1;
    }
  }
  EVP_PKEY *pkey = NULL;
  OSSL_PARAM_BLD *builder = good ? OSSL_PARAM_BLD_new() : NULL;
  if (builder != NULL) {
    for (int i = 0; i < COUNT && good; i++)
      good = OSSL_PARAM_BLD_push_BN(builder, names[i], value[i]) == 1;
    if (good)
      pkey = from_params("RSA", builder);
    OSSL_PARAM_BLD_free(builder);
  }
  for (int i = 0; i < COUNT; i++)
    BN_clear_free(value[i]);
  BN_clear_free(less);
  BN_CTX_free(context);
  return pkey;
}

static EVP_PKEY *read_ecdsa(cir_wire *wire, cir_span type) {
  cir_span curve = cir_wire_string(wire), point = cir_wire_string(wire),
           secret = cir_wire_number(wire);
  static const char prefix[] = "ecdsa-sha2-";
  cir_span wanted = {type.data + sizeof prefix - 1, type.size - (sizeof prefix - 1)};
  if (wire->bad || !cir_span_equal(curve, wanted) || secret.size == 0 || secret.size > 66)
    return NULL;
  const char *group = cir_span_is(curve, "nistp256")   ? "prime256v1"
                      : cir_span_is(curve, "nistp384") ? "secp384r1"
                                                       : "secp521r1";
  BIGNUM *value = number(secret);
  OSSL_PARAM_BLD *builder = OSSL_PARAM_BLD_new();
  EVP_PKEY *pkey = NULL;
  if (value != NULL && builder != NULL &&
      OSSL_PARAM_BLD_push_utf8_string(builder, OSSL_PKEY_PARAM_GROUP_NAME, group, 0) == 1 &&
      OSSL_PARAM_BLD_push_octet_string(builder, OSSL_PKEY_PARAM_PUB_KEY, point.data, point.size) ==
          1 &&
      OSSL_PARAM_BLD_push_BN(builder, OSSL_PKEY_PARAM_PRIV_KEY, value) == 1)
    pkey = from_params("EC", builder);
  OSSL_PARAM_BLD_free(builder);
  BN_clear_free(value);
  return pkey;
}

/* The private half is the seed followed by the public half once more. */
static EVP_PKEY *read_ed25519(cir_wire *wire) {
  cir_span public = cir_wire_string(wire), secret = cir_wire_string(wire);
  if (wire->bad || public.size != 32 || secret.size != 64 ||
      memcmp(secret.data + 32, public.data, 32) != 0)
    return NULL;
  return EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, NULL, secret.data, 32);
}

/* Reads the decrypted private section. `public` is the blob from outside of it, which must say the
 * same. */
static cir_ssh_key *read_section(cir_wire wire, bool encrypted, cir_span public,
                                 cir_ssh_key_fault *fault) {
  uint32_t check1 = cir_wire_u32(&wire), check2 = cir_wire_u32(&wire);
  if (check1 != check2 || wire.bad) {
    if (encrypted)
      return cir_ssh_key_refuse(fault, "auth", "passphrase_wrong",
                                "the passphrase does not open the key");
    return cir_ssh_key_refuse(fault, "invalid", NULL, "the key is damaged: its check words differ");
  }
  cir_span type = cir_wire_string(&wire);
  EVP_PKEY *pkey = NULL;
  if (cir_span_is(type, "ssh-ed25519")) {
    pkey = read_ed25519(&wire);
  } else if (cir_span_is(type, "ssh-rsa")) {
    pkey = read_rsa(&wire);
  } else if (cir_span_is(type, "ecdsa-sha2-nistp256") || cir_span_is(type, "ecdsa-sha2-nistp384") ||
             cir_span_is(type, "ecdsa-sha2-nistp521")) {
    pkey = read_ecdsa(&wire, type);
  } else if (type.size > 3 && memcmp(type.data, "sk-", 3) == 0) {
    return cir_ssh_key_refuse(
        fault, "unsupported", NULL,
        "the key lives in a security key (FIDO), which is not supported: use an Ed25519 key");
  } else {
    return cir_ssh_key_refuse(fault, "unsupported", NULL,
                              "keys of type %.*s are not supported: use Ed25519, RSA or ECDSA",
                              (int)(type.size < 60 ? type.size : 60), (const char *)type.data);
  }
  cir_span comment = cir_wire_string(&wire);
  for (uint8_t i = 1; wire.left > 0 && !wire.bad; i++) /* the padding is 1, 2, 3, ... */
    wire.bad = cir_wire_bytes(&wire, 1).data[0] != i || i == 255;
  if (pkey == NULL || wire.bad) {
    EVP_PKEY_free(pkey);
    ERR_clear_error();
    return cir_ssh_key_refuse(fault, "invalid", NULL,
                              "the key is damaged: its private section does not parse");
  }
  cir_ssh_key *key = cir_ssh_key_adopt(pkey, comment, fault);
  if (key != NULL && !cir_span_equal((cir_span){key->blob, key->blob_size}, public)) {
    cir_ssh_key_free(key);
    return cir_ssh_key_refuse(fault, "invalid", NULL,
                              "the key is damaged: its public and private sections differ");
  }
  return key;
}

/* --- the container
 * ------------------------------------------------------------------------------------------------
 */

cir_ssh_key *cir_ssh_key_parse_openssh(const uint8_t *data, size_t size, const char *passphrase,
                                       size_t passphrase_size, cir_ssh_key_fault *fault) {
  static const char magic[] = "openssh-key-v1"; /* with its zero byte */
  cir_wire wire = cir_wire_of(data, size);
  cir_span start = cir_wire_bytes(&wire, sizeof magic);
  cir_span cipher = cir_wire_string(&wire), kdf = cir_wire_string(&wire),
           options = cir_wire_string(&wire);
  uint32_t count = cir_wire_u32(&wire);
  cir_span public = cir_wire_string(&wire), section = cir_wire_string(&wire);
  if (wire.bad || memcmp(start.data, magic, sizeof magic) != 0)
    return cir_ssh_key_refuse(fault, "invalid", NULL, "the key is damaged or cut short");
  if (count != 1)
    return cir_ssh_key_refuse(fault, "unsupported", NULL,
                              "the file holds %u keys, and only one is supported", count);

  const cipher_kind *kind = kind_of(cipher);
  if (kind == NULL)
    return cir_ssh_key_refuse(
        fault, "unsupported", NULL,
        "the key is encrypted with %.*s, which is not supported: `ssh-keygen -p -f KEY` "
        "encrypts it anew",
        (int)(cipher.size < 40 ? cipher.size : 40), (const char *)cipher.data);
  cir_span tag = cir_wire_bytes(&wire, kind->tag); /* follows the section, outside of its string */
  if (wire.bad || wire.left != 0 || section.size < 8 || section.size % kind->block != 0)
    return cir_ssh_key_refuse(fault, "invalid", NULL,
                              "the key is damaged: its private section has a wrong size");
  if (kind->evp == NULL) {
    if (!cir_span_is(kdf, "none"))
      return cir_ssh_key_refuse(fault, "invalid", NULL,
                                "the key is damaged: a key derivation without a cipher");
    return read_section(cir_wire_of(section.data, section.size), false, public, fault);
  }

  cir_wire inner = cir_wire_of(options.data, options.size);
  cir_span salt = cir_wire_string(&inner);
  uint32_t rounds = cir_wire_u32(&inner);
  if (!cir_span_is(kdf, "bcrypt"))
    return cir_ssh_key_refuse(fault, "unsupported", NULL,
                              "the key derivation %.*s is not supported",
                              (int)(kdf.size < 40 ? kdf.size : 40), (const char *)kdf.data);
  if (inner.bad || salt.size == 0 || rounds == 0)
    return cir_ssh_key_refuse(fault, "invalid", NULL,
                              "the key is damaged: no salt or rounds for its passphrase");
  if (rounds > MAX_ROUNDS)
    return cir_ssh_key_refuse(
        fault, "unsupported", NULL,
        "the passphrase is to be hashed in %u rounds, more than the %d that are supported: "
        "`ssh-keygen -p -a 100 -f KEY` sets fewer",
        rounds, MAX_ROUNDS);
  if (passphrase == NULL)
    return cir_ssh_key_refuse(fault, "auth", "passphrase_needed",
                              "the key is encrypted and needs its passphrase");

  uint8_t *plain = malloc(section.size);
  if (plain == NULL)
    return cir_ssh_key_refuse(fault, "failed", NULL, "out of memory");
  cir_ssh_key *key = NULL;
  int outcome = decrypt(kind, salt, rounds, passphrase, passphrase_size, section, tag.data, plain);
  if (outcome > 0)
    key = read_section(cir_wire_of(plain, section.size), true, public, fault);
  else if (outcome == 0)
    cir_ssh_key_refuse(fault, "auth", "passphrase_wrong",
                       "the passphrase does not open the key (or the file is damaged)");
  else
    cir_ssh_key_refuse(fault, "failed", NULL,
                       "the key's passphrase cannot be hashed: out of memory");
  OPENSSL_cleanse(plain, section.size);
  free(plain);
  return key;
}
