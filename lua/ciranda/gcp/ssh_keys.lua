--- The keys that may log in to a node's workers: lines of its metadata that many may write at the same time.
local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- Which of some lines a text does not have yet.
local function missing_lines(text, lines)
  local present = {}
  for line in (text or ""):gmatch("[^\n]+") do
    present[line] = true
  end
  local missing = {}
  for _, line in ipairs(lines) do
    if not present[line] then
      present[line] = true
      missing[#missing + 1] = line
    end
  end
  return missing
end

--- Write lines to a node's ssh-keys until they stay there.
local function write_keys(tpu, name, lines, timeout)
  local client = tpu.client
  local deadline = client:now() + timeout
  local wait, verified = client.first_wait, false
  while true do
    local metadata = tpu:get_node(name).metadata or {}
    local before = metadata["ssh-keys"]
    local missing = missing_lines(before, lines)
    local err
    if #missing == 0 then
      if verified then
        return
      end
      verified = true
    else
      verified = false
      metadata["ssh-keys"] = (before and before ~= "" and before:gsub("\n*$", "\n") or "")
        .. table.concat(missing, "\n")
      local done
      done, err = pcall(tpu.patch_node, tpu, name, { metadata = metadata }, "metadata")
      if done then
        err = nil
      elseif not errors.is(err, "busy", "exists", "unavailable") then
        error(err, 0)
      end
    end
    if client:now() >= deadline then
      errors.raise {
        code = "timeout",
        op = "tpu.add_ssh_keys",
        target = name,
        message = ("the ssh keys of %s could not be added in %g s: others kept changing them"):format(
          name,
          timeout
        ),
        cause = err,
      }
    end
    -- Whoever read before this write and writes after it takes the keys away again, soon: so look twice, some time
    -- apart.
    task.sleep(client.first_wait + client.random() * wait)
    wait = err and math.min(wait * 2, client.most_wait) or client.first_wait
  end
end

--- What `tpu:add_ssh_keys` does.
---@async
---@param tpu ciranda.gcp.Tpu
---@param name string
---@param keys string[]
---@param timeout number seconds
-- Raises `timeout` when others kept overwriting, and what a call raises.
function M.add(tpu, name, keys, timeout)
  local additions = tpu.client.key_additions or {}
  tpu.client.key_additions = additions
  local path = ("%s/%s/%s"):format(tpu.project, tpu.zone, name)
  local queue = additions[path] or { lock = task.semaphore(1), lines = {} }
  additions[path] = queue
  for _, line in ipairs(missing_lines(table.concat(queue.lines, "\n"), keys)) do
    queue.lines[#queue.lines + 1] = line
  end
  queue.lock:with(function()
    local metadata = tpu:get_node(name).metadata or {}
    if #missing_lines(metadata["ssh-keys"], keys) == 0 then
      return -- whoever wrote last wrote for us too
    end
    local lines = queue.lines
    queue.lines = {}
    for _, line in ipairs(missing_lines(table.concat(lines, "\n"), keys)) do
      lines[#lines + 1] = line
    end
    write_keys(tpu, name, lines, timeout)
  end)
end

return M
