/*
 * crc32c.c - see crc32c.h. With the instruction of SSE 4.2 where there is one, else eight bytes a
 * step by tables.
 */
#include "crc32c.h"

#include <stdbool.h>
#include <string.h>

enum { CIR_CRC32C_POLYNOMIAL = 0x82F63B78 /* reflected */ };

/* table[n][b]: what byte b does to the checksum when n more bytes follow it in the step. */
static uint32_t table[8][256];

static void fill_table(void) {
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++)
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? (uint32_t)CIR_CRC32C_POLYNOMIAL : 0);
    table[0][byte] = crc;
  }
  for (int more = 1; more < 8; more++)
    for (uint32_t byte = 0; byte < 256; byte++)
      table[more][byte] = (table[more - 1][byte] >> 8) ^ table[0][table[more - 1][byte] & 0xff];
}

static uint32_t by_table(uint32_t crc, const unsigned char *at, size_t size) {
  for (; size >= 8; at += 8, size -= 8) {
    uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                          (uint32_t)at[3] << 24);
    crc = table[7][low & 0xff] ^ table[6][low >> 8 & 0xff] ^ table[5][low >> 16 & 0xff] ^
          table[4][low >> 24] ^ table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^
          table[0][at[7]];
  }
  for (; size > 0; at++, size--)
    crc = (crc >> 8) ^ table[0][(crc ^ *at) & 0xff];
  return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>

__attribute__((target("sse4.2"))) static uint32_t
by_instruction(uint32_t crc, const unsigned char *at, size_t size) {
  uint64_t wide = crc;
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = (uint32_t)wide;
  for (; size > 0; at++, size--)
    crc = _mm_crc32_u8(crc, *at);
  return crc;
}

static bool has_instruction(void) {
  return __builtin_cpu_supports("sse4.2");
}
#else
static uint32_t by_instruction(uint32_t crc, const unsigned char *at, size_t size) {
  return by_table(crc, at, size);
}

static bool has_instruction(void) {
  return false;
}
#endif

uint32_t cir_crc32c(uint32_t crc, const void *bytes, size_t size) {
  if (has_instruction())
    return ~by_instruction(~crc, bytes, size);
  return ~by_table(~crc, bytes, size);
}

/* Before main, so that the threads of the pool find it filled. */
__attribute__((constructor)) static void prepare(void) {
  if (!has_instruction())
    fill_table();
}
