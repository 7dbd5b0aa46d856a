--- gcloud's configuration, read as gcloud reads it: environment, then the active configuration's file.
---
--- Every property `section/name` is also the variable CLOUDSDK_SECTION_NAME, which wins. So one environment points
--- gcloud and Ciranda at the same project, zone, account and endpoints.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")

local M = {}

---@class ciranda.gcp.Config
---@field directory string?      where gcloud keeps its files; nil when there is no HOME
---@field name string            the active configuration
---@field file string?           its file
---@field env fun(name: string): string?
---@field private properties table<string, string>
local Config = {}
Config.__index = Config

--- The sections of an INI file as "section/name" -> value. Comments begin with # or ; on a line of their own.
---@param text string
---@return table<string, string>
function M.parse(text)
  local properties, section = {}, nil
  for line in (text .. "\n"):gmatch("([^\n]*)\r?\n") do
    local content = line:match("^%s*(.-)%s*$")
    local heading = content:match("^%[([^%]]+)%]$")
    if heading then
      section = heading
    elseif content ~= "" and not content:find("^[#;]") and section then
      local name, value = content:match("^([^=:]-)%s*[=:]%s*(.*)$")
      if name then
        properties[section .. "/" .. name] = value
      end
    end
  end
  return properties
end

--- What gcloud takes for "not set".
local function present(value)
  if value == nil or value == "" then
    return nil
  end
  return value
end

--- gcloud's directory.
local function directory_of(env)
  local directory = present(env("CLOUDSDK_CONFIG"))
  if directory then
    return directory
  end
  local home = present(env("HOME"))
  return home and fs.join(home, ".config/gcloud") or nil
end

--- A small file's content, nil when there is none.
local function read(path)
  return fs.exists(path) and fs.read(path, 1 << 20) or nil
end

local OPTIONS = { env = true, configuration = true }

--- Read the configuration.
---@async
---@param options { env: (fun(name: string): string?)?, configuration: string? }? `env`: instead of the environment, for
---       tests; `configuration`: as gcloud's --configuration
---@return ciranda.gcp.Config
--- Raises "usage" when a configuration was named that there is not.
function M.load(options)
  options = options or {}
  errors.check_options(options, OPTIONS, "gcloud_config.load")
  local env = options.env or os.getenv
  local directory = directory_of(env)
  local asked = present(options.configuration) or present(env("CLOUDSDK_ACTIVE_CONFIG_NAME"))
  local name = asked
  if not name and directory then
    local active = read(fs.join(directory, "active_config"))
    name = active and present(active:match("^%s*(.-)%s*$"))
  end
  name = name or "default"
  if not name:match("^%l[%l%d-]*$") then
    errors.raise {
      code = "usage",
      op = "gcloud_config.load",
      message = ("'%s' is no name of a gcloud configuration: small letters, digits and '-', a letter first"):format(
        name
      ),
    }
  end
  local file = directory and fs.join(directory, "configurations", "config_" .. name) or nil
  local text = file and read(file)
  if asked and not text and name ~= "NONE" and name ~= "default" then
    errors.raise {
      code = "usage",
      op = "gcloud_config.load",
      message = ("there is no gcloud configuration '%s': %s does not exist"):format(name, file or "its file"),
    }
  end
  return setmetatable({
    directory = directory,
    name = name,
    file = text and file or nil,
    env = env,
    properties = text and M.parse(text) or {},
  }, Config)
end

--- A property, or nil when neither the environment nor the file has it.
---@param property string "section/name"
---@return string? value
---@return string? source the variable or the file that it came from
function Config:get(property)
  local section, name = property:match("^([%w_]+)/([%w_]+)$")
  if not section then
    errors.misuse(2, "config:get: '%s' is not section/name", property)
  end
  local variable = ("CLOUDSDK_%s_%s"):format(section:upper(), name:upper())
  local value = present(self.env(variable))
  if value then
    return value, variable
  end
  value = present(self.properties[property])
  if value then
    return value, self.file
  end
  return nil
end

--- The first of some variables that is set.
local function first_variable(self, ...)
  for _, name in ipairs { ... } do
    local value = present(self.env(name))
    if value then
      return value, name
    end
  end
  return nil
end

--- The project: gcloud's property, then the variables of Google's libraries. The credentials' file and the metadata
--- server may still know one (ciranda.gcp.credentials).
---@return string? project
---@return string? source
function Config:project()
  local value, source = self:get("core/project")
  if value then
    return value, source
  end
  return first_variable(self, "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "GCP_PROJECT")
end

---@return string? zone
---@return string? source
function Config:zone()
  return self:get("compute/zone")
end

--- The account that `gcloud auth login` made active.
---@return string?
function Config:account()
  return (self:get("core/account"))
end

--- The base URL of one of Google's APIs, with a slash at its end: gcloud's own override, else `default`.
---@param api string gcloud's name: "tpu", "storage", "compute", "oslogin"
---@param default string
---@return string url
function Config:endpoint(api, default)
  local value, source = self:get("api_endpoint_overrides/" .. api)
  if not value then
    return default
  end
  if not value:find("^https?://[^/]") then
    errors.raise {
      code = "usage",
      op = "gcloud_config",
      message = ("%s is '%s'; it must be a URL such as http://127.0.0.1:8080/"):format(source, value),
    }
  end
  return value:find("/$") and value or value .. "/"
end

return M
