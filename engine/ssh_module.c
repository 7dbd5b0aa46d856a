/*
 * ssh_module.c - the functions of ciranda.core.ssh: opening sessions and reading keys. See ssh.h.
 */
#include "modules.h"
#include "ssh.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_KEY_FILE = 1024 * 1024 };

/* --- keys --------------------------------------------------------------------------------------
 */

/* A key that is being read on the pool. The handle is kept by `anchor` until the callback. */
typedef struct key_load {
  uv_work_t work;
  cir_runtime *rt;
  struct key_load **handle;
  int anchor, on_done;
  char *path; /* NULL when the text is given */
  char *text;
  size_t text_size;
  char *passphrase; /* or NULL */
  size_t passphrase_size;
  bool cancelled;
  cir_ssh_key *key;
  cir_ssh_key_fault fault;
  int io_error; /* a negative errno, when the file cannot be read */
} key_load;

#define KEY_LOAD "ciranda.ssh.key_load"

/* Read the file into `text`. Runs on the pool. Returns 0 or a negative errno. */
static int read_file(key_load *load) {
  int fd = open(load->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  struct stat info;
  if (fd < 0)
    return -errno;
  int error = fstat(fd, &info) < 0 ? -errno : 0;
  if (error == 0 && S_ISDIR(info.st_mode))
    error = -EISDIR;
  else if (error == 0 && !S_ISREG(info.st_mode))
    error = -EINVAL;
  else if (error == 0 && info.st_size > MAX_KEY_FILE)
    error = -EFBIG;
  size_t room = error == 0 ? (size_t)info.st_size : 0;
  load->text = error == 0 ? malloc(room + 1) : NULL;
  if (error == 0 && load->text == NULL)
    error = -ENOMEM;
  while (error == 0 && load->text_size < room) {
    ssize_t count = read(fd, load->text + load->text_size, room - load->text_size);
    if (count < 0)
      error = errno == EINTR ? 0 : -errno;
    else if (count == 0)
      break;
    else
      load->text_size += (size_t)count;
  }
  close(fd);
  return error;
}

static void on_pool(uv_work_t *work) {
  key_load *load = CIR_CONTAINER_OF(work, key_load, work);
  if (load->path != NULL)
    load->io_error = read_file(load);
  if (load->io_error == 0)
    load->key = cir_ssh_key_parse(load->text, load->text_size, load->passphrase,
                                  load->passphrase_size, &load->fault);
  OPENSSL_thread_stop(); /* what OpenSSL keeps a thread, a random generator among it */
}

static void wipe(char *text, size_t size) {
  if (text != NULL)
    OPENSSL_cleanse(text, size);
  free(text);
}

static void free_load(key_load *load) {
  wipe(load->text, load->text_size);
  wipe(load->passphrase, load->passphrase_size);
  cir_ssh_key_free(load->key);
  free(load->path);
  free(load);
}

static void on_pool_done(uv_work_t *work, int status) {
  key_load *load = CIR_CONTAINER_OF(work, key_load, work);
  cir_runtime *rt = load->rt;
  lua_State *L = cir_main_state(rt);
  int count = 1;
  if (load->cancelled || status == UV_ECANCELED) {
    cir_push_error(L, "cancelled", "cancelled");
  } else if (load->io_error < 0) {
    cir_push_error(L, cir_code_of_uv(load->io_error), "%s: %s", load->path,
                   load->io_error == -EINVAL ? "not a regular file" : uv_strerror(load->io_error));
  } else if (load->key == NULL) {
    cir_push_error(L, load->fault.code, "%s%s%s", load->path != NULL ? load->path : "",
                   load->path != NULL ? ": " : "", load->fault.message);
    if (load->fault.reason != NULL)
      cir_error_field(L, "reason", load->fault.reason);
  } else {
    lua_pushnil(L);
    cir_ssh_key **key = lua_newuserdatauv(L, sizeof *key, 0);
    *key = load->key;
    load->key = NULL;
    luaL_setmetatable(L, CIR_SSH_KEY);
    count = 2;
  }
  *load->handle = NULL;
  luaL_unref(L, LUA_REGISTRYINDEX, load->anchor);
  int callback = load->on_done;
  free_load(load);
  cir_callback_finish(rt, &callback, count);
}

/* A malloc'd copy of the string at index, or NULL when it is nil. [-0, +0, -] */
static char *copy(lua_State *L, int index, size_t *size) {
  const char *text = lua_tolstring(L, index, size);
  if (text == NULL)
    return NULL;
  char *to = malloc(*size + 1);
  if (to != NULL)
    memcpy(to, text, *size + 1);
  return to;
}

/* Start loading; the handle is pushed. [-0, +1, v] */
static int start_load(lua_State *L, bool from_file) {
  luaL_checkstring(L, 1);
  if (!lua_isnil(L, 2))
    luaL_checkstring(L, 2);
  luaL_checktype(L, 3, LUA_TFUNCTION);
  lua_settop(L, 3);
  key_load **handle = lua_newuserdatauv(L, sizeof *handle, 0);
  *handle = NULL;
  luaL_setmetatable(L, KEY_LOAD);
  int on_done, anchor;
  cir_callback_ref_both(L, 3, &on_done, 4, &anchor);
  key_load *load = calloc(1, sizeof *load);
  size_t path_size;
  if (load != NULL && from_file)
    load->path = copy(L, 1, &path_size);
  else if (load != NULL)
    load->text = copy(L, 1, &load->text_size);
  if (load != NULL)
    load->passphrase = copy(L, 2, &load->passphrase_size);
  if (load == NULL || (load->path == NULL && load->text == NULL) ||
      (load->passphrase == NULL && !lua_isnil(L, 2))) {
    if (load != NULL)
      free_load(load);
    cir_callback_unref(cir_runtime_of(L), &on_done);
    luaL_unref(L, LUA_REGISTRYINDEX, anchor);
    return luaL_error(L, "out of memory");
  }
  load->rt = cir_runtime_of(L);
  load->on_done = on_done;
  load->anchor = anchor;
  load->handle = handle;
  *handle = load;
  uv_queue_work(cir_loop(load->rt), &load->work, on_pool, on_pool_done);
  return 1;
}

/* ssh.key_read(path, passphrase or nil, function(err, key) end) -> handle. [-3, +1, v] */
static int l_key_read(lua_State *L) {
  return start_load(L, true);
}

/* ssh.key_parse(text, passphrase or nil, function(err, key) end) -> handle. [-3, +1, v] */
static int l_key_parse(lua_State *L) {
  return start_load(L, false);
}

static int l_load_cancel(lua_State *L) {
  key_load **handle = luaL_checkudata(L, 1, KEY_LOAD);
  if (*handle != NULL) {
    (*handle)->cancelled = true;
    uv_cancel((uv_req_t *)&(*handle)->work);
  }
  return 0;
}

static cir_ssh_key *check_key(lua_State *L) {
  return cir_check_handle(L, 1, CIR_SSH_KEY);
}

static int l_key_type(lua_State *L) {
  lua_pushstring(L, check_key(L)->type);
  return 1;
}

/* key:public() -> the public key as servers know it, in bytes. */
static int l_key_public(lua_State *L) {
  cir_ssh_key *key = check_key(L);
  lua_pushlstring(L, (const char *)key->blob, key->blob_size);
  return 1;
}

static int l_key_comment(lua_State *L) {
  lua_pushstring(L, check_key(L)->comment);
  return 1;
}

/* key:sign(algorithm, data) -> what belongs inside the signature's inner string; nil when it
 * cannot. */
static int l_key_sign(lua_State *L) {
  cir_ssh_key *key = check_key(L);
  size_t algorithm_size, size, signature_size = 0;
  const char *algorithm = luaL_checklstring(L, 2, &algorithm_size);
  const char *data = luaL_checklstring(L, 3, &size);
  uint8_t *signature = cir_ssh_key_sign(key, (cir_span){(const uint8_t *)algorithm, algorithm_size},
                                        (const uint8_t *)data, size, &signature_size);
  if (signature == NULL)
    lua_pushnil(L);
  else
    lua_pushlstring(L, (const char *)signature, signature_size);
  free(signature);
  return 1;
}

static int l_key_gc(lua_State *L) {
  cir_ssh_key **key = luaL_checkudata(L, 1, CIR_SSH_KEY);
  cir_ssh_key_free(*key);
  *key = NULL;
  return 0;
}

void cir_ssh_key_register(lua_State *L) {
  static const luaL_Reg key_methods[] = {{"type", l_key_type},       {"public", l_key_public},
                                         {"comment", l_key_comment}, {"sign", l_key_sign},
                                         {"__gc", l_key_gc},         {NULL, NULL}};
  static const luaL_Reg load_methods[] = {
      {"cancel", l_load_cancel}, {"__close", l_load_cancel}, {NULL, NULL}};
  if (luaL_newmetatable(L, CIR_SSH_KEY)) {
    luaL_setfuncs(L, key_methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
  if (luaL_newmetatable(L, KEY_LOAD)) {
    luaL_setfuncs(L, load_methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}

int luaopen_ciranda_core_ssh(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"open", cir_ssh_l_open}, {"key_read", l_key_read}, {"key_parse", l_key_parse}, {NULL, NULL}};
  cir_ssh_session_register(L);
  cir_ssh_operation_register(L);
  cir_ssh_channel_register(L);
  cir_ssh_key_register(L);
  luaL_newlib(L, functions);
  lua_pushstring(L, libssh2_version(0));
  lua_setfield(L, -2, "version");
  return 1;
}
