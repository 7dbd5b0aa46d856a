--- Names and numbers of Linux signals (signal(7); x86 and ARM).
local M = {}

--- Exit statuses of a program that ends because it was told to: 128+n.
M.STOPPED = { SIGINT = 130, SIGTERM = 143 }

-- By number, from 1.
local NAMES = {}
for name in
  ([[HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT
    STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS]]):gmatch("%S+")
do
  NAMES[#NAMES + 1] = name
end

--- "SIGKILL" for 9; nil for a number that Linux has no name for.
---@param number integer
---@return string?
function M.name(number)
  if NAMES[number] then
    return "SIG" .. NAMES[number]
  elseif number >= 34 and number <= 64 then
    return "SIGRTMIN+" .. (number - 34)
  end
  return nil
end

--- 9 for "SIGKILL" or "KILL", in any case of letters; nil for a name that Linux does not have.
---@param name string
---@return integer?
function M.number(name)
  local short = name:upper():gsub("^SIG", "")
  for number, known in ipairs(NAMES) do
    if known == short then
      return number
    end
  end
  return nil
end

return M
