/*
 * line_editor.c - ciranda.core.edit: the REPL's input line, libedit driven by the loop.
 *
 * libedit keeps its state in globals, so there is one editor a process. While a line is being
 * edited the terminal is in libedit's mode; from the moment a line is complete until prompt() is
 * called again it is as it was found, so that what the line runs sees a terminal like any other
 * program does.
 */
#include "callback.h"
#include "lazy_edit.h"
#include "modules.h"
#include "options.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CIR_HISTORY_LINES = 2000 };

static struct {
  cir_runtime *rt;
  uv_poll_t poll;
  bool open;      /* between start and close */
  bool listening; /* the poll handle is initialised */
  bool editing;   /* libedit has the terminal */
  int line_ref, complete_ref;
  char *prompt;
  char *history_path;
} E = {.line_ref = LUA_NOREF, .complete_ref = LUA_NOREF};

static void stop_editing(void) {
  if (!E.editing)
    return;
  E.editing = false;
  uv_poll_stop(&E.poll);
  rl_callback_handler_remove();
}

/* libedit has a whole line, or the end of input (NULL). The text is libedit's malloc and ours to
 * free. */
static void on_line(char *text) {
  lua_State *L = cir_main_state(E.rt);
  stop_editing();
  if (text == NULL) {
    lua_pushnil(L);
  } else {
    lua_pushstring(L, text);
    free(text);
  }
  cir_callback_call(E.rt, E.line_ref, 1);
}

static void on_input(uv_poll_t *poll, int status, int events) {
  (void)poll;
  (void)events;
  if (status < 0) {
    on_line(NULL);
    return;
  }
  rl_callback_read_char();
}

/* Asks Lua for the words that complete text; libedit frees the result and what it holds. */
static char **complete(const char *text, int start, int end) {
  (void)end;
  rl_attempted_completion_over = 1;
  lua_State *L = cir_main_state(E.rt);
  if (E.complete_ref == LUA_NOREF)
    return NULL;
  int top = lua_gettop(L);
  lua_rawgeti(L, LUA_REGISTRYINDEX, E.complete_ref);
  lua_pushstring(L, text);
  lua_pushlstring(L, rl_line_buffer, (size_t)start);
  char **words = NULL;
  if (cir_luv_call(L, 2, 1, 0) == 1 && lua_istable(L, -1)) {
    size_t count = lua_rawlen(L, -1);
    /* readline's form: [0] is what all have in common, then the words, then NULL; one word stands
     * in [0] alone. */
    if (count > 0)
      words = calloc(count + 2, sizeof *words);
    size_t common = 0;
    for (size_t i = 0; words != NULL && i < count; i++) {
      lua_rawgeti(L, -1, (lua_Integer)i + 1);
      const char *word = lua_tostring(L, -1);
      words[i + 1] = strdup(word != NULL ? word : "");
      lua_pop(L, 1);
      if (words[i + 1] == NULL)
        cir_give_up("not enough memory");
      size_t length = strlen(words[i + 1]);
      if (i == 0 || length < common)
        common = length;
      for (size_t k = 0; k < common; k++)
        if (words[i + 1][k] != words[1][k])
          common = k;
    }
    if (words != NULL)
      words[0] = strndup(words[1], common);
    if (words != NULL && count == 1) {
      free(words[1]);
      words[1] = NULL;
    }
  }
  lua_settop(L, top);
  return words;
}

static void shut_down(void *unused) {
  (void)unused;
  stop_editing();
  E.open = false;
  cir_callback_unref(E.rt, &E.line_ref);
  cir_callback_unref(E.rt, &E.complete_ref);
  if (E.listening)
    uv_close((uv_handle_t *)&E.poll, NULL);
  E.listening = false;
  free(E.prompt);
  free(E.history_path);
  E.prompt = E.history_path = NULL;
}

/*
 * edit.start({history = path or nil, complete = function(word, before) -> {words} or nil}, on_line)
 * on_line(text) is called once a prompt, with nil at the end of input. [-2, +0, e]
 */
static int l_start(lua_State *L) {
  static const char *const known[] = {"history", "complete", NULL};
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  cir_known_options(L, 1, known);
  const char *history = cir_string_option(L, 1, "history");
  bool completes = lua_getfield(L, 1, "complete") != LUA_TNIL;
  if (completes)
    luaL_checktype(L, -1, LUA_TFUNCTION);
  if (E.open)
    return luaL_error(L, "the line editor is in use");
  E.rt = cir_runtime_of(L);
  const char *problem = cir_edit_load();
  if (problem != NULL)
    return luaL_error(L, "the line editor cannot be used: %s", problem);
  if (!E.listening) {
    int status = uv_poll_init(cir_loop(E.rt), &E.poll, STDIN_FILENO);
    if (status < 0)
      return luaL_error(L, "standard input cannot be edited: %s", uv_strerror(status));
    E.poll.data = NULL;
    E.listening = true;
    cir_on_shutdown(E.rt, shut_down, NULL);
    rl_readline_name = (char *)"ciranda";
    rl_catch_signals = 0;
    rl_initialize();
    using_history();
    stifle_history(CIR_HISTORY_LINES);
    rl_attempted_completion_function = complete;
    rl_completer_word_break_characters = (char *)" \t\n\"'`@$><=;|&{}()[]+-*/%^#~,";
    rl_completion_append_character = '\0';
  }
  if (completes)
    cir_callback_ref_both(L, 2, &E.line_ref, -1, &E.complete_ref);
  else
    E.line_ref = cir_callback_ref(L, 2);
  if (history != NULL && (E.history_path = strdup(history)) != NULL)
    read_history(E.history_path);
  E.open = true;
  return 0;
}

/* edit.prompt(text): edit a line after that prompt. [-1, +0, e] */
static int l_prompt(lua_State *L) {
  const char *text = luaL_checkstring(L, 1);
  if (!E.open)
    return luaL_error(L, "the line editor is not started");
  if (E.editing)
    stop_editing();
  char *prompt = strdup(text);
  if (prompt == NULL)
    return luaL_error(L, "out of memory");
  free(E.prompt);
  E.prompt = prompt;
  E.editing = true;
  rl_callback_handler_install(E.prompt, on_line);
  uv_poll_start(&E.poll, UV_READABLE, on_input);
  return 0;
}

/* edit.cancel(): drop the line that is being edited; nothing is told to on_line. [-0, +0, -] */
static int l_cancel(lua_State *L) {
  (void)L;
  stop_editing();
  return 0;
}

/*
 * edit.print(text): write text above the line that is being edited and show that line again below
 * it, as typed so far; without one, just write. [-1, +0, e]
 */
static int l_print(lua_State *L) {
  size_t length;
  const char *text = luaL_checklstring(L, 1, &length);
  if (E.editing)
    fputs("\r\033[K", stdout);
  fwrite(text, 1, length, stdout);
  if (E.editing) {
    if (length > 0 && text[length - 1] != '\n')
      fputc('\n', stdout);
    fflush(stdout);
    rl_forced_update_display();
  }
  fflush(stdout);
  return 0;
}

/* edit.remember(text): add a line to the history and its file, which only the user may read. [-1,
 * +0, e] */
static int l_remember(lua_State *L) {
  const char *text = luaL_checkstring(L, 1);
  if (text[0] == '\0')
    return 0;
  if (!E.listening)
    return luaL_error(L, "the line editor is not started");
  add_history(text);
  if (E.history_path == NULL)
    return 0;
  /* libedit would make it for everyone to read. */
  int file = open(E.history_path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK,
                  S_IRUSR | S_IWUSR);
  if (file < 0)
    return 0;
  fchmod(file, S_IRUSR | S_IWUSR); /* one that is older than this rule */
  close(file);
  write_history(E.history_path);
  return 0;
}

/* edit.close(): give the terminal back. [-0, +0, -] */
static int l_close(lua_State *L) {
  (void)L;
  if (!E.open)
    return 0;
  stop_editing();
  E.open = false;
  cir_callback_unref(E.rt, &E.line_ref);
  cir_callback_unref(E.rt, &E.complete_ref);
  free(E.history_path);
  E.history_path = NULL;
  return 0;
}

int luaopen_ciranda_core_edit(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"start", l_start}, {"prompt", l_prompt},     {"cancel", l_cancel}, {"print", l_print},
      {"close", l_close}, {"remember", l_remember}, {NULL, NULL}};
  luaL_newlib(L, functions);
  return 1;
}
