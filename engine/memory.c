/* memory.c - see memory.h. */
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CIR_SLAB = 128 * 1024 };

struct cir_piece {
  cir_piece *next;
};

struct cir_slab {
  _Alignas(CIR_PIECE_STEP) cir_slab *next;
};

/* Is a block of this size one of the pieces? AddressSanitizer sees no pieces: there are none then.
 */
static bool is_piece(size_t size) {
#ifdef __SANITIZE_ADDRESS__
  (void)size;
  return false;
#else
  return size <= CIR_PIECE_LARGEST;
#endif
}

static size_t class_of(size_t size) {
  return (size - 1) / CIR_PIECE_STEP;
}

/* Gets a new slab, its pages in one go: faults one by one cost several times as much. */
static bool add_slab(cir_memory *memory) {
  cir_slab *slab = mmap(NULL, CIR_SLAB, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (slab == MAP_FAILED)
    return false;
  slab->next = memory->slabs;
  memory->slabs = slab;
  memory->next = (char *)(slab + 1);
  memory->end = (char *)slab + CIR_SLAB;
  return true;
}

static void *take_piece(cir_memory *memory, size_t size) {
  size_t class = class_of(size);
  cir_piece *piece = memory->unused[class];
  if (piece != NULL) {
    memory->unused[class] = piece->next;
    return piece;
  }
  size = (class + 1) * CIR_PIECE_STEP;
  if ((size_t)(memory->end - memory->next) < size && !add_slab(memory))
    return NULL;
  char *block = memory->next;
  memory->next += size;
  return block;
}

static void give_back(cir_memory *memory, void *block, size_t size) {
  if (!is_piece(size)) {
    free(block);
  } else if (!memory->closing) {
    cir_piece *piece = block;
    piece->next = memory->unused[class_of(size)];
    memory->unused[class_of(size)] = piece;
  }
}

void *cir_memory_alloc(void *opaque, void *block, size_t old_size, size_t size) {
  cir_memory *memory = opaque;
  if (block == NULL)
    old_size = 0; /* else a type of Lua's */
  if (size == 0) {
    if (old_size > 0)
      give_back(memory, block, old_size);
    return NULL;
  }
  if (block == NULL)
    return is_piece(size) ? take_piece(memory, size) : malloc(size);
  if (!is_piece(old_size) && !is_piece(size))
    return realloc(block, size);
  if (is_piece(old_size) && is_piece(size) && class_of(old_size) == class_of(size))
    return block;
  void *moved = is_piece(size) ? take_piece(memory, size) : malloc(size);
  if (moved == NULL) /* Lua counts on it that shrinking succeeds; the block is large enough */
    return size < old_size ? block : NULL;
  memcpy(moved, block, old_size < size ? old_size : size);
  give_back(memory, block, old_size);
  return moved;
}

void cir_memory_closing(cir_memory *memory) {
  memory->closing = true;
}

void cir_memory_free(cir_memory *memory) {
  cir_slab *slab = memory->slabs;
  while (slab != NULL) {
    cir_slab *next = slab->next;
    munmap(slab, CIR_SLAB);
    slab = next;
  }
  *memory = (cir_memory){.slabs = NULL};
}
