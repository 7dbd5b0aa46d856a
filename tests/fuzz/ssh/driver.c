/*
 * driver.c - a mutator for compilers without libFuzzer: driver SECONDS SEED FILE... runs mutations
 * of the files through LLVMFuzzerTestOneInput and prints how many. It keeps the input that is being
 * run in ./fuzz-last, for a crash.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_SEEDS = 256, MAX_SIZE = 16384 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t state;

static uint32_t random_below(uint32_t limit) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 32) % limit;
}

static size_t mutate(uint8_t *data, size_t size) {
  uint32_t changes = 1 + random_below(4);
  for (uint32_t i = 0; i < changes && size > 2; i++) {
    uint32_t at = random_below((uint32_t)size), kind = random_below(7);
    if (kind == 0) {
      data[at] ^= (uint8_t)(1u << random_below(8));
    } else if (kind == 1) {
      data[at] = (uint8_t)random_below(256);
    } else if (kind == 2) {
      data[at] = (uint8_t)(random_below(2) != 0 ? 0xff : 0);
    } else if (kind == 3) { /* cut short */
      size = at > 2 ? at : size;
    } else if (kind == 4 && size > at + 8) { /* a run is left out */
      uint32_t run = 1 + random_below(7);
      memmove(data + at, data + at + run, size - at - run);
      size -= run;
    } else if (kind == 5 && size + 8 < MAX_SIZE) { /* a run is doubled */
      uint32_t run = 1 + random_below(7);
      if (at + run < size) {
        memmove(data + at + run, data + at, size - at);
        size += run;
      }
    } else if (size > 6) { /* a length is changed */
      at &= ~3u;
      if (at + 4 <= size)
        memcpy(data + at, &(uint32_t){random_below(3) * 0x7fffffffu}, 4);
    }
  }
  return size;
}

int main(int argc, char **argv) {
  static uint8_t seeds[MAX_SEEDS][MAX_SIZE], input[MAX_SIZE];
  static size_t sizes[MAX_SEEDS];
  int count = 0;
  if (argc < 4)
    return 2;
  time_t end = time(NULL) + atol(argv[1]);
  state = strtoull(argv[2], NULL, 10) * 2654435761u + 88172645463325252u;
  for (int i = 3; i < argc && count < MAX_SEEDS; i++) {
    FILE *file = fopen(argv[i], "rb");
    if (file == NULL)
      return 2;
    sizes[count] = fread(seeds[count], 1, MAX_SIZE, file);
    fclose(file);
    LLVMFuzzerTestOneInput(seeds[count], sizes[count]);
    count++;
  }
  unsigned long runs = 0;
  for (; time(NULL) < end; runs++) {
    uint32_t pick = random_below((uint32_t)count);
    memcpy(input, seeds[pick], sizes[pick]);
    size_t size = mutate(input, sizes[pick]);
    FILE *last = fopen("fuzz-last", "wb");
    if (last != NULL) {
      fwrite(input, 1, size, last);
      fclose(last);
    }
    /* A copy of just this size, so that a read past its end is seen. */
    uint8_t *exact = malloc(size);
    if (exact == NULL)
      return 1;
    memcpy(exact, input, size);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
  }
  printf("%lu\n", runs);
  return 0;
}
