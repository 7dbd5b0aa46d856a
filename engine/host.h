/* host.h - what main.c asks of runtime.c. */
#ifndef CIR_HOST_H
#define CIR_HOST_H

/*
 * Make the runtime, boot the library (ciranda.cli.main) with the process's arguments and shut
 * everything down. lua_dir, when not NULL, is a directory from which built-in modules are read
 * first. Returns the exit status.
 */
int cir_main(int argc, char **argv, const char *lua_dir);

#endif
