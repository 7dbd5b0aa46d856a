--- Files of credentials for the simulated project, of each kind that Google's libraries read. Whatever a
--- client exchanges them for is exchanged at the simulator.

local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

---@class ciranda.sim.FileMaker
---@field oauth ciranda.sim.OAuth
---@field project { id: string, number: string }
---@field url string of the simulator
---@field email string? whose credentials they are

local function robot(maker, name)
  return maker.email or ("%s@%s.iam.gserviceaccount.com"):format(name, maker.project.id)
end

local kinds = {}

function kinds.authorized_user(maker)
  local file = maker.oauth:make_user(maker.email or "user@example.com")
  file.token_uri = maker.url .. "/token"
  return file
end

-- Takes some tenths of a second: a key has to be found.
function kinds.service_account(maker)
  return maker.oauth:make_service_account(robot(maker, "robot"), maker.project.id, maker.url .. "/token")
end

function kinds.impersonated_service_account(maker)
  local source = kinds.authorized_user({ oauth = maker.oauth, url = maker.url })
  return {
    type = "impersonated_service_account",
    delegates = json.array({}),
    service_account_impersonation_url = ("%s/v1/projects/-/serviceAccounts/%s:generateAccessToken"):format(
      maker.url,
      robot(maker, "impersonated")
    ),
    source_credentials = source,
  }
end

-- Workload identity: the subject is a token of the metadata server, which stands for another provider's.
function kinds.external_account(maker)
  local pool = "//iam.googleapis.com/projects/%s/locations/global/workloadIdentityPools/pool"
  return {
    type = "external_account",
    audience = pool:format(maker.project.number) .. "/providers/provider",
    subject_token_type = "urn:ietf:params:oauth:token-type:jwt",
    token_url = maker.url .. "/v1/token",
    credential_source = {
      url = ("%s/computeMetadata/v1/instance/service-accounts/default/identity?audience=provider"):format(
        maker.url
      ),
      headers = { ["Metadata-Flavor"] = "Google" },
      format = { type = "text" },
    },
  }
end

-- Workforce identity: a user of another provider who has logged in.
function kinds.external_account_authorized_user(maker)
  local user = maker.oauth:make_user(maker.email or "user@example.com")
  return {
    type = "external_account_authorized_user",
    audience = "//iam.googleapis.com/locations/global/workforcePools/pool/providers/provider",
    client_id = user.client_id,
    client_secret = user.client_secret,
    refresh_token = user.refresh_token,
    token_url = maker.url .. "/v1/oauth/token",
  }
end

--- Make the file of a kind.
---@async
---@param maker ciranda.sim.FileMaker
---@param kind any "authorized_user", ...
---@return table file
--- Raises ciranda.sim.Status INVALID_ARGUMENT when there is no such kind.
function M.make(maker, kind)
  local make = kinds[kind]
  if not make then
    local names = {}
    for name in pairs(kinds) do
      names[#names + 1] = name
    end
    table.sort(names)
    errors.raise(
      errors.invalid(
        ("'%s' is no type of credentials; there are %s"):format(tostring(kind), table.concat(names, ", ")),
        "type"
      )
    )
  end
  return make(maker)
end

return M
