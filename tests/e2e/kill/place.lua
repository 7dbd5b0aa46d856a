--- Killing a program at a chosen place: strace counts its system calls and sends SIGKILL before one, or holds the
--- thread after it, while the killing is done from here. The program knows nothing of it.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

local LIMIT = 60 -- s, for one program
local LOOK = 0.01 -- s between two looks at what strace has written
local HELD = 30000000 -- us for which strace holds a thread; it is killed at once

---@class Place
---@field call string the system call
---@field when integer which of them, from 1, in the thread that comes to it first
---@field side "before"|"after"
---@field path string? only calls on this file

--- The environment of a traced program: one thread for files, so that its calls can be counted.
local function traced_environment(environment)
  local result = { UV_THREADPOOL_SIZE = "1" }
  for name, value in pairs(environment) do
    result[name] = value
  end
  return result
end

local function command(log, arguments, argv, environment)
  local list = { "strace", "-f", "-qq", "-y", "-s", "600", "-o", log }
  table.move(arguments, 1, #arguments, #list + 1, list)
  table.move(argv, 1, #argv, #list + 1, list)
  list.env = traced_environment(environment)
  list.stdout, list.stderr = process.DISCARD, process.DISCARD
  return list
end

local function contents(path)
  return fs.exists(path) and fs.read(path) or ""
end

--- Runs a program to its end and returns the calls it made, a line each.
---@param argv string[]
---@param environment table<string, string>
---@param calls string names, with commas
---@param scratch string a directory
---@return string[]
function M.record(argv, environment, calls, scratch)
  local log = scratch .. "/record"
  local traced = command(log, { "-e", "trace=" .. calls }, argv, environment)
  traced.timeout = LIMIT
  traced.stdout, traced.stderr = nil, nil
  local result = process.run(traced)
  if result.code ~= 0 then
    error(
      ("%s under strace ended with %s: %s"):format(argv[2], result.code or result.signal, result.stderr),
      0
    )
  end
  local lines = {}
  for line in contents(log):gmatch("[^\n]+") do
    lines[#lines + 1] = line
  end
  return lines
end

--- A file of a process; "" when that is gone, which may be so between any two of these calls.
local function of_process(pid, name)
  local file = io.open(("/proc/%d/%s"):format(pid, name))
  local text = file and file:read("a")
  if file then
    file:close()
  end
  return text or ""
end

--- Is this process there?
local function alive(pid)
  local state = of_process(pid, "stat"):match("^.*%) (%S)")
  return state ~= nil and state ~= "Z" and state ~= "X"
end

--- Kills a process and waits until it is gone.
local function kill(pid)
  uv.kill(pid, "sigkill")
  task.timeout(LIMIT, function()
    while alive(pid) do
      task.sleep(LOOK)
    end
  end)
end

--- The process that a thread belongs to.
local function process_of(thread)
  return math.tointeger(tonumber(of_process(thread, "status"):match("\nTgid:%s*(%d+)")))
end

--- The thread that strace says it holds.
local function held_thread(text)
  for line in text:gmatch("[^\n]+") do
    if line:find("(DELAYED)", 1, true) then
      return line:match("^%d+")
    end
  end
  return nil
end

--- Runs a program and kills it at a place; returns whether it came there.
---@param argv string[]
---@param environment table<string, string>
---@param place Place
---@param scratch string a directory
---@return boolean killed
function M.kill_at(argv, environment, place, scratch)
  local log = scratch .. "/strace"
  fs.write(log, "")
  local what = place.side == "before" and "signal=SIGKILL" or "delay_exit=" .. HELD
  local arguments = {
    "-e",
    "trace=" .. place.call,
    "-e",
    ("inject=%s:%s:when=%d"):format(place.call, what, place.when),
  }
  if place.path then
    table.insert(arguments, "-P")
    table.insert(arguments, place.path)
  end
  local strace <close> = process.spawn(command(log, arguments, argv, environment))
  local scope <close> = task.scope()
  local waiting = scope:spawn(strace.wait, strace)
  local held
  if place.side == "after" then
    task.timeout(LIMIT, function()
      while waiting:status() ~= "done" and not held do
        held = held_thread(contents(log))
        task.sleep(held and 0 or LOOK)
      end
    end)
    if held then
      -- strace would hold the dead thread to the end of its time: it is ended with it.
      local pid = process_of(tonumber(held))
      uv.kill(pid, "sigkill")
      strace:signal("SIGKILL")
      kill(pid)
    end
  end
  local result = task.timeout(LIMIT, waiting.wait, waiting)
  return held ~= nil or result.signal == "SIGKILL"
end

--- Runs a program and kills it after some seconds; returns whether it was still there.
---@param argv string[]
---@param environment table<string, string>
---@param seconds number
---@return boolean killed
function M.kill_after(argv, environment, seconds)
  local list = table.move(argv, 1, #argv, 1, {})
  list.env, list.stdout, list.stderr = environment, process.DISCARD, process.DISCARD
  local child <close> = process.spawn(list)
  task.sleep(seconds)
  child:signal("SIGKILL")
  return task.timeout(LIMIT, child.wait, child).signal == "SIGKILL"
end

return M
