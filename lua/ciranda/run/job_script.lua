--- The start-up script of a job: what a worker runs at every boot, with nobody watching.
--
-- It needs a POSIX sh, curl, tar and, for the virtual environment, python3. Its values come first, as assignments; the
-- rest (job_boot.lua) is the same for every job.
local err = require("ciranda.io.error")
local shell = require("ciranda.io.shell")

local M = {}

---@class ciranda.run.JobValues
---@field RUN string name of the run
---@field BUCKET string
---@field PREFIX string directory of the run's objects
---@field STORAGE string base of the Cloud Storage API, ending in "/"
---@field TPU string base of the TPU API, ending in "/"
---@field VERSION string of the TPU API
---@field PROJECT string
---@field ZONE string
---@field QUEUED_RESOURCE string
---@field NUM_SLICES integer
---@field NUM_WORKERS integer
---@field UPLOAD_EVERY integer seconds between two looks at whether the log has grown
---@field PEERS_EVERY integer seconds between two looks at whether another worker has failed
---@field SETTLE integer seconds that another worker's notice may take to arrive
---@field GRACE integer seconds between TERM and KILL when another worker has failed

local NAMES = {
  "RUN",
  "BUCKET",
  "PREFIX",
  "STORAGE",
  "TPU",
  "VERSION",
  "PROJECT",
  "ZONE",
  "QUEUED_RESOURCE",
  "NUM_SLICES",
  "NUM_WORKERS",
  "UPLOAD_EVERY",
  "PEERS_EVERY",
  "SETTLE",
  "GRACE",
}

--- The script for a job.
---@param values ciranda.run.JobValues
---@return string
function M.text(values)
  local lines = { "#!/bin/sh", "# Written by ciranda multihost_job. Run at every boot." }
  for _, name in ipairs(NAMES) do
    local value = values[name]
    if value == nil then
      err.misuse(2, "job_script.text: %s is missing", name)
    end
    lines[#lines + 1] = name .. "=" .. shell.quote(tostring(value))
  end
  return table.concat(lines, "\n") .. "\n" .. require("ciranda.run.job_boot")
end

return M
