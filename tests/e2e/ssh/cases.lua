-- What the parts of tests/e2e/ssh.sh share: cases that are counted, calls that must fail, one closing line.
local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")
local task = require("ciranda.task")
local uv = require("luv")

local M = { short = os.getenv("CIRANDA_SHORT") ~= nil }

--- What a failure is shown with: a part sets it, to the text of a server's log for instance.
---@type (fun(): string)?
M.explain = nil

local passed, failures = 0, {}

--- Seconds since some moment, whatever is done to the clock.
function M.now()
  return uv.hrtime() / 1e9
end

--- One case.
---@param name string
---@param fn fun()
---@param seconds number? within which it must end (30)
function M.case(name, fn, seconds)
  local began = M.now()
  local ok, err = pcall(task.timeout, seconds or 30, fn)
  local took = M.now() - began
  if ok then
    passed = passed + 1
    print(("ok    %-60s %.2f s"):format(name, took))
  else
    failures[#failures + 1] = name
    print(("FAIL  %-60s %.2f s\n      %s"):format(name, took, errors.text(err)))
    if M.explain then
      print(M.explain())
    end
  end
end

--- The call fails with one of these codes, names the host, and takes about this long at most.
---@param address string
---@param codes string[]
---@param phase string?
---@param seconds number
---@param fn function
function M.fails(address, codes, phase, seconds, fn, ...)
  local began = M.now()
  local ok, err = pcall(fn, ...)
  local took = M.now() - began
  assert(not ok, "it should have failed")
  assert(errors.is(err, table.unpack(codes)), ("code %s: %s"):format(tostring(err.code), errors.text(err)))
  assert(not phase or err.phase == phase, ("phase %s: %s"):format(tostring(err.phase), errors.text(err)))
  assert(tostring(err):find(address, 1, true), "the host is not named: " .. tostring(err))
  assert(took < seconds, ("it took %.1f s"):format(took))
  return err
end

--- Say how it went, and end.
---@param part string
function M.finish(part)
  print(json.encode({ part = part, passed = passed, failed = #failures }))
  os.exit(#failures == 0 and 0 or 1)
end

return M
