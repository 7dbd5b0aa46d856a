/* lazy_edit.h - libedit's readline.h under its own names, loaded by cir_edit_load(): see lazy.h.
 * Its variables are reached in the same way. */
#ifndef CIR_LAZY_EDIT_H
#define CIR_LAZY_EDIT_H

#include "lazy.h"

#include <stdio.h>

#include <editline/readline.h>

/* Each name in two halves: whole, it is one of the macros below. */
/* clang-format off */
#define CIR_EDIT_SYMBOLS(X) \
  X(add, history) X(read, history) X(rl, attempted_completion_function) \
  X(rl, attempted_completion_over) X(rl, callback_handler_install) X(rl, callback_handler_remove) \
  X(rl, callback_read_char) X(rl, catch_signals) X(rl, completer_word_break_characters) \
  X(rl, completion_append_character) X(rl, forced_update_display) X(rl, initialize) \
  X(rl, line_buffer) X(rl, readline_name) X(stifle, history) X(using, history) X(write, history)
/* clang-format on */

#define CIR_EDIT_SYMBOL(left, right) __typeof__(left##_##right) *of_##left##_##right;
extern struct cir_edit_symbols { CIR_EDIT_SYMBOLS(CIR_EDIT_SYMBOL) } cir_edit;

/* Load the library once. Returns NULL, or a text that says why it cannot be. */
const char *cir_edit_load(void);

#define add_history (*cir_edit.of_add_history)
#define read_history (*cir_edit.of_read_history)
#define rl_attempted_completion_function (*cir_edit.of_rl_attempted_completion_function)
#define rl_attempted_completion_over (*cir_edit.of_rl_attempted_completion_over)
#define rl_callback_handler_install (*cir_edit.of_rl_callback_handler_install)
#define rl_callback_handler_remove (*cir_edit.of_rl_callback_handler_remove)
#define rl_callback_read_char (*cir_edit.of_rl_callback_read_char)
#define rl_catch_signals (*cir_edit.of_rl_catch_signals)
#define rl_completer_word_break_characters (*cir_edit.of_rl_completer_word_break_characters)
#define rl_completion_append_character (*cir_edit.of_rl_completion_append_character)
#define rl_forced_update_display (*cir_edit.of_rl_forced_update_display)
#define rl_initialize (*cir_edit.of_rl_initialize)
#define rl_line_buffer (*cir_edit.of_rl_line_buffer)
#define rl_readline_name (*cir_edit.of_rl_readline_name)
#define stifle_history (*cir_edit.of_stifle_history)
#define using_history (*cir_edit.of_using_history)
#define write_history (*cir_edit.of_write_history)

#endif
