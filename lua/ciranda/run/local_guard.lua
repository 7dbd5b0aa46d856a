--- The guard on this machine: a command that outlives this program and its terminal, with the guard's own rules.
local attempt = require("ciranda.run.attempt")
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local journals = require("ciranda.run.journal")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local uv = require("luv")

local M = {}

--- Seconds that a short answer of the guard may take.
local SHORT = 60
--- The guard's exit status for what it cannot do.
local FAILED = 1

---@class ciranda.run.LocalGuard
---@field directory string the attempt's directory, as `docs/guard.md` has it
---@field private program string
local Local = {}
Local.__index = Local

--- Where everything of ours is that is not a run: `$XDG_STATE_HOME/ciranda`.
---@return string
local function home()
  return (journals.directory():gsub("/[^/]*$", ""))
end

--- The guard that this program carries, as a file.
---@return string path
-- Raises "not_found" when it carries none; "no_space" and the like.
function M.program()
  local guard = attempt.guard()
  local path = ("%s/bin/guard-%s"):format(home(), guard.sha256)
  if not fs.exists(path) then
    fs.mkdir_p(path:match("^(.*)/"), 448)
    fs.write(path, guard.bytes, { mode = 448 })
  end
  return path
end

--- A command by name: one that was started, or is to be.
---@param name string letters, digits, "_", "-", "."
---@return ciranda.run.LocalGuard
-- Raises "usage" for what is no name.
function M.named(name)
  if not journals.valid_name(name) then
    err.raise({
      code = "usage",
      op = "guard",
      message = ("%q is no name; it takes letters, digits, '_', '-' and '.'"):format(name),
    })
  end
  return setmetatable({ directory = ("%s/guard/%s"):format(home(), name), program = M.program() }, Local)
end

---@private
function Local:ask(subcommand, options)
  local words = { self.program, subcommand, self.directory, timeout = SHORT }
  for name, value in pairs(options or {}) do
    if math.type(name) == "integer" then
      words[#words + 1] = value
    else
      words[name] = value or nil
    end
  end
  return process.run(words)
end

--- Raises what the guard said when it could not.
---@private
---@param answer ciranda.process.Result
function Local:refuse(answer)
  err.raise({
    code = "failed",
    op = "guard",
    target = self.directory,
    message = (answer.stderr:gsub("%s+$", "")),
  })
end

--- Starts it: in the present directory, with the present environment, once.
---@async
---@param command string for a shell
---@param options { shell: string?, keep: integer? }? the shell ($SHELL); bytes of the log that are kept at least (all)
-- Raises "exists" when the name is taken, "failed" with the guard's words.
function Local:start(command, options)
  options = options or {}
  local cwd, gone = uv.cwd()
  if not cwd then
    err.raise({
      code = "not_found",
      op = "guard",
      message = ("the present directory cannot be told: %s; go to one that is there"):format(gone),
    })
  end
  fs.mkdir_p(self.directory:match("^(.*)/"), 448)
  local made, problem = pcall(fs.mkdir, self.directory, 448)
  if not made and err.is(problem, "exists") then
    local name = self.directory:match("[^/]*$")
    err.raise({
      code = "exists",
      target = self.directory,
      message = (
        "there was a %s before, and a name runs once: ciranda guard --name=%s shows it; give another "
        .. "--name, or remove %s"
      ):format(name, name, self.directory),
    })
  elseif not made then
    error(problem, 0)
  end
  local ran, why = pcall(function()
    fs.write(self.directory .. "/command", command)
    fs.write(self.directory .. "/cwd", cwd)
    if options.shell then
      fs.write(self.directory .. "/shell", options.shell)
    end
    local answer = self:ask("run", options.keep and { "--keep", tostring(options.keep) } or {})
    if answer.code ~= 0 then
      self:refuse(answer)
    end
  end)
  if not ran and not err.is_fatal(why) and not fs.exists(self.directory .. "/started") then
    fs.remove_tree(self.directory) -- nothing has run: the name is free
  end
  if not ran then
    error(why, 0)
  end
end

--- What the guard says of it.
---@async
---@return table status as in `docs/guard.md`
-- Raises "not_found" when nothing of that name was ever started.
function Local:status()
  local answer = fs.exists(self.directory) and self:ask("status")
  local ok, status = pcall(json.decode, answer and answer.stdout or "")
  if not ok or type(status) ~= "table" then
    err.raise({
      code = "not_found",
      op = "guard",
      target = self.directory,
      message = ("there is nothing in %s that the guard has started"):format(self.directory),
    })
  end
  return status
end

--- Hands on its output until it has ended. A guard that was killed is replaced.
---@async
---@param from integer offset
---@param sink fun(bytes: string)
---@param on_gap fun(from: integer, to: integer)? these bytes are no longer kept
---@return table? record nil when it was lost
-- Raises "failed" with the guard's words.
function Local:follow(from, sink, on_gap)
  while true do
    local answer = self:ask("follow", {
      "--from",
      tostring(from),
      timeout = false,
      on_stdout = function(bytes)
        from = from + #bytes
        sink(bytes)
      end,
    })
    local status = self:status()
    local record = type(status.record) == "table" and status.record or nil
    local first = (record or status).log_first or 0
    if first > from then
      if on_gap then
        on_gap(from, first)
      end
      from = first
    elseif record and answer.code == 0 then
      return record
    elseif status.state == "lost" then
      if self:ask("adopt").code ~= 0 then
        return nil
      end
    elseif answer.code == FAILED then
      self:refuse(answer)
    end
  end
end

--- Asks it to stop; returns when it has ended. Where the guard was killed meanwhile the next one is asked.
---@async
---@param grace number seconds between TERM and KILL
---@param reason string
---@param on_told fun()? the guard knows of it, and carries it out whatever becomes of this program
-- Raises "failed" when something is left.
function Local:stop(grace, reason, on_told)
  local answer = attempt.ask_again(grace + SHORT, function()
    local said = ""
    local one = self:ask("stop", {
      "--grace",
      ("%.3f"):format(grace),
      "--reason",
      reason,
      timeout = grace + SHORT,
      on_stderr = function(bytes)
        said = said .. bytes
        if on_told and said:find("asked\n", 1, true) then
          on_told()
        end
      end,
    })
    one.stderr = said
    return one
  end)
  if answer.code ~= 0 then
    self:refuse(answer)
  end
end

return M
