--- The simulated cloud as it is seen from outside: its own lists, asked for without the client under test.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")

local M = {}

--- All items of a list of the TPU API.
---@param simulator ciranda.Simulator
---@param list string "queuedResources", "nodes", "operations"
---@return table[]
function M.list(simulator, list)
  local environment = simulator.env
  local token = fs.read(environment.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE):match("%S+")
  local items, page = {}, nil
  repeat
    local response = http.request({
      url = ("%s/v2/projects/%s/locations/%s/%s"):format(
        simulator.url,
        environment.CLOUDSDK_CORE_PROJECT,
        environment.CLOUDSDK_COMPUTE_ZONE,
        list
      ),
      query = { pageToken = page },
      headers = { Authorization = "Bearer " .. token },
      timeout = 20,
    })
    assert(response.status == 200, ("the list of %s: HTTP %d"):format(list, response.status))
    local answer = json.decode(response.body)
    for _, item in ipairs(answer[list] or {}) do
      items[#items + 1] = item
    end
    page = answer.nextPageToken
  until not page
  return items
end

return M
