--- Saving on a signal has two halves: the platform sends it (autocheckpoint), and the framework obeys it (its own
--- flags). One without the other saves nothing, which is worth knowing before money is spent.
--
-- Read in MaxText e591f30 and paxml b397693: MaxText saves on SIGTERM only with enable_autocheckpoint=true, and its
-- JAX processes find each other only with enable_checkpointing; Pax starts the service that catches the signal only
-- with --jax_fully_async_checkpoint, and leaves after the save only with --exit_after_ondemand_checkpoint.
local M = {}

local TRUE = { ["true"] = true, ["1"] = true, yes = true, t = true, y = true, on = true }
local FALSE = { ["false"] = false, ["0"] = false, no = false, f = false, n = false, off = false }

--- The words of a command, without the quotes around them. Good enough to find flags in; no shell.
---@param command string
---@return string[]
local function words_of(command)
  local words = {}
  for word in command:gsub("[\"']", ""):gmatch("[^%s;|&(){}]+") do
    words[#words + 1] = word
  end
  return words
end

--- What the last mention of a switch in a command says.
---@param words string[]
---@param name string without dashes
---@param valueless boolean does the bare flag mean true, and --noNAME false?
---@return boolean|"unknown"|nil value nil when it is not mentioned; "unknown" for a shell variable and the like
local function switch(words, name, valueless)
  local value
  for _, word in ipairs(words) do
    local key, text = word:match("^%-*([%w_]+)=(.*)$")
    if key == name then
      text = text:lower()
      value = TRUE[text]
      if value == nil then
        value = FALSE[text]
      end
      if value == nil then
        value = "unknown"
      end
    elseif valueless and word:match("^%-%-?(.+)$") == name then
      value = true
    elseif valueless and word:match("^%-%-?no(.+)$") == name then
      value = false
    end
  end
  return value
end

--- Which framework a command starts, as far as its words say.
---@param command string
---@return "maxtext"|"pax"|nil
function M.framework(command)
  for _, word in ipairs(words_of(command)) do
    local lower = word:lower()
    if lower:find("paxml", 1, true) then
      return "pax"
    elseif lower:match("^maxtext[./]") or lower:find("/maxtext/", 1, true) then
      return "maxtext"
    end
  end
  return nil
end

local check = {}

---@param words string[]
---@param autocheckpoint boolean?
---@param say fun(text: string)
function check.maxtext(words, autocheckpoint, say)
  local enabled = switch(words, "enable_autocheckpoint", false)
  if autocheckpoint and not enabled then
    say(
      "the platform will send SIGTERM before maintenance, but COMMAND runs MaxText without "
        .. "enable_autocheckpoint=true: it would stop without a save"
    )
  elseif autocheckpoint == false and enabled == true then
    say(
      "COMMAND has MaxText's enable_autocheckpoint=true, but the slices are asked for without autocheckpoint "
        .. "(ENABLE_AUTOCHECKPOINT=true): nobody sends SIGTERM before maintenance"
    )
  end
  if (autocheckpoint or enabled == true) and switch(words, "enable_checkpointing", false) == false then
    say("COMMAND has enable_checkpointing=false: MaxText saves nothing, and no SIGTERM is caught")
  end
end

---@param words string[]
---@param autocheckpoint boolean?
---@param say fun(text: string)
function check.pax(words, autocheckpoint, say)
  local async = switch(words, "jax_fully_async_checkpoint", true)
  local leaves = switch(words, "exit_after_ondemand_checkpoint", true)
  if autocheckpoint and not async then
    say(
      "the platform will send SIGTERM before maintenance, but COMMAND runs Pax without "
        .. "--jax_fully_async_checkpoint=1: nothing catches it, and nothing is saved"
    )
  elseif autocheckpoint and not leaves then
    say(
      "COMMAND runs Pax without --exit_after_ondemand_checkpoint=1: it goes on after the save, what it does then "
        .. "is lost, and maintenance waits for five minutes"
    )
  elseif autocheckpoint == false and leaves == true then
    say(
      "COMMAND has Pax's --exit_after_ondemand_checkpoint, but the slices are asked for without autocheckpoint "
        .. "(ENABLE_AUTOCHECKPOINT=true): nobody sends SIGTERM before maintenance"
    )
  end
end

--- What does not fit between the platform's autocheckpoint and a command's own flags.
---@param command string
---@param autocheckpoint boolean? nil when nobody knows: then only the command is looked at
---@return string[] warnings one sentence each, without a full stop
function M.warnings(command, autocheckpoint)
  local framework = M.framework(command)
  local warnings = {}
  if framework then
    check[framework](words_of(command), autocheckpoint, function(text)
      warnings[#warnings + 1] = text
    end)
  end
  return warnings
end

return M
