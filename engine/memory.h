/*
 * memory.h - where the Lua state's memory comes from: small pieces from lists by size, the rest
 * from malloc. Lua names the size of what it gives back, so a piece needs no header and no search.
 */
#ifndef CIR_MEMORY_H
#define CIR_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

enum {
  CIR_PIECE_STEP = 16,    /* sizes are rounded up to this, which is malloc's alignment as well */
  CIR_PIECE_LARGEST = 512 /* what is larger is malloc's */
};

typedef struct cir_piece cir_piece;
typedef struct cir_slab cir_slab;

/* All zero is a memory that holds nothing yet. */
typedef struct {
  cir_piece *unused[CIR_PIECE_LARGEST / CIR_PIECE_STEP];
  char *next, *end; /* of the newest slab: what no piece has been cut from */
  cir_slab *slabs;
  bool closing;
} cir_memory;

/* A lua_Alloc; opaque is the cir_memory. */
void *cir_memory_alloc(void *opaque, void *block, size_t old_size, size_t size);

/* The state is about to be closed: from now on small pieces are not sorted into the lists. */
void cir_memory_closing(cir_memory *memory);

/* Gives everything back to the system. The state is closed. */
void cir_memory_free(cir_memory *memory);

#endif
