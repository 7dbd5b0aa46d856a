--- Who runs this program, and where their files are: by the environment, else by the system's accounts. A container may
--- run as a number that has no account, and a service without HOME.

local errors = require("ciranda.io.error")
local uv = require("luv")

local M = {}

local function lacking(format)
  errors.raise({ code = "failed", op = "account", message = format:format(uv.getuid()) })
end

--- The home directory.
---@return string path absolute
--- Raises "failed" when neither HOME nor an account says where it is.
function M.home()
  local home = os.getenv("HOME")
  if not home or home:sub(1, 1) ~= "/" then
    home = (uv.os_get_passwd() or {}).homedir
  end
  if not home or home:sub(1, 1) ~= "/" then
    lacking("there is no home directory: HOME is no absolute path, and uid %d has no account here; set HOME")
  end
  return home
end

--- The user's name.
---@return string
--- Raises "failed" when neither USER, LOGNAME nor an account says who it is.
function M.user()
  for _, name in ipairs({ "USER", "LOGNAME" }) do
    local user = os.getenv(name)
    if user and user ~= "" then
      return user
    end
  end
  return M.login_name() or lacking("who is this? USER is not set, and uid %d has no account here; set USER")
end

--- The name of the account, whatever the environment says, as OpenSSH does.
---@return string? name nil when there is no account
function M.login_name()
  return (uv.os_get_passwd() or {}).username
end

return M
