--- Asks a person at the terminal for a secret, which is not shown while it is typed.
local process = require("ciranda.io.process")
local uv = require("luv")

local M = {}

--- How often a passphrase may be mistyped.
local ATTEMPTS = 3

-- The terminal is read by a shell: it restores the echo whatever ends it, and Ctrl-C reaches it as any program. The
-- question comes when the echo is off: who answers at once would be shown otherwise.
local SCRIPT = [[
saved=$(stty -g </dev/tty)
trap 'trap "" INT TERM; stty "$saved" </dev/tty' EXIT
trap 'exit 130' INT TERM
stty -echo </dev/tty
printf '%s' "$1" >/dev/tty
IFS= read -r secret </dev/tty || exit 1
printf '\n' >/dev/tty
printf '%s' "$secret"
]]

--- Asks; nil when there is no terminal or the person gives up (Ctrl-C, Ctrl-D).
---@async
---@param question string
---@return string?
function M.secret(question)
  local result = process.run({
    "sh",
    "-c",
    SCRIPT,
    "sh",
    question,
    foreground = true,
    stdin = process.INHERIT,
    stderr = process.DISCARD,
  })
  return result.code == 0 and result.stdout or nil
end

--- Lets SSH ask for the passphrases of keys, where there is a terminal to ask at.
function M.install()
  if uv.guess_handle(0) ~= "tty" then
    return
  end
  require("ciranda.ssh").set_prompt(function(path, attempt)
    return attempt <= ATTEMPTS and M.secret(("Passphrase for %s: "):format(path)) or nil
  end)
end

return M
