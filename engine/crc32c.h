/* crc32c.h - CRC-32C (Castagnoli), the checksum of Cloud Storage. */
#ifndef CIR_CRC32C_H
#define CIR_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of what `crc` is the checksum of, followed by size bytes. Begin with 0. */
uint32_t cir_crc32c(uint32_t crc, const void *bytes, size_t size);

#endif
