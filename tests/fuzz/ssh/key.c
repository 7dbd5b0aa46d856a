/*
 * key.c - private key files, as a fuzzer makes them. The first byte of an input chooses the way in:
 * the text of a file, or the bytes of a decoded OpenSSH container (which mutated base64 would
 * hardly reach); the second whether there is a passphrase.
 *
 * Built with clang's libFuzzer where that is, else with driver.c.
 */
#include "ssh_key.h"

#include <stdlib.h>

/* bcrypt takes milliseconds a round: containers that ask for more are parsed without a passphrase.
 */
static bool is_quick(const uint8_t *data, size_t size) {
  cir_wire wire = cir_wire_of(data, size);
  cir_wire_bytes(&wire, sizeof "openssh-key-v1");
  cir_wire_string(&wire);
  cir_wire_string(&wire);
  cir_span options = cir_wire_string(&wire);
  cir_wire inner = cir_wire_of(options.data, options.size);
  cir_wire_string(&inner);
  return cir_wire_u32(&inner) <= 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const char passphrase[] = "passphrase";
  if (size < 2)
    return 0;
  bool text = (data[0] & 1) != 0, with_passphrase = (data[1] & 1) != 0;
  data += 2;
  size -= 2;
  cir_ssh_key_fault fault = {0};
  cir_ssh_key *key;
  if (text)
    key = cir_ssh_key_parse((const char *)data, size, NULL, 0, &fault);
  else if (with_passphrase && is_quick(data, size))
    key = cir_ssh_key_parse_openssh(data, size, passphrase, sizeof passphrase - 1, &fault);
  else
    key = cir_ssh_key_parse_openssh(data, size, NULL, 0, &fault);
  if (key == NULL && (fault.code == NULL || fault.message[0] == '\0'))
    abort(); /* refused without a reason */
  if (key != NULL) {
    const char *algorithm = strcmp(key->type, "ssh-rsa") == 0 ? "rsa-sha2-512" : key->type;
    size_t length = 0;
    uint8_t *signature =
        cir_ssh_key_sign(key, (cir_span){(const uint8_t *)algorithm, strlen(algorithm)},
                         (const uint8_t *)"x", 1, &length);
    if (signature == NULL || length == 0)
      abort(); /* a key that was accepted signs */
    free(signature);
    cir_ssh_key_free(key);
  }
  return 0;
}
