-- OS Login's client against servers that answer as Google's do, or do not.
local logging = require("ciranda.io.log")
local os_login = require("ciranda.gcp.os_login")
local support = dofile("tests/spec/gcp/support.lua")
local fails = support.fails

local KEY = "ssh-ed25519 AAAA me"

-- A connection of which only the project and the client matter, and the options that point it at a server.
local function connection(s, account, more)
  local client = support.client()
  client.credentials.account = account
  local variables = {
    CLOUDSDK_API_ENDPOINT_OVERRIDES_OSLOGIN = s.url,
    CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE = s.url .. "/compute/v1/",
  }
  for name, value in pairs(more or {}) do
    variables[name] = value
  end
  return { project = "p", client = client }, { config = support.config(s.url, variables) }
end

local function refusal(status, name)
  return { status = status, json = { error = { code = status, status = name, message = "no" } } }
end

describe("ciranda.gcp.os_login", function()
  setup(function()
    logging.configure { level = "off" }
  end)

  teardown(function()
    logging.reset()
  end)

  it("imports a key and says whom to log in as", function()
    support.with_server(function(request)
      assert.equal("/v1/users/me%40example.com:importSshPublicKey", request.path)
      assert.equal("p", request:args().projectId)
      assert.equal(KEY, request:json().key)
      return {
        json = {
          loginProfile = {
            name = "1",
            posixAccounts = { { username = "other" }, { username = "me_example_com", primary = true } },
          },
        },
      }
    end, function(s)
      local tpu, options = connection(s, "me@example.com")
      local user, account = os_login.import(tpu, KEY, options)
      assert.equal("me_example_com", user)
      assert.equal("me@example.com", account)
      -- Credentials that name nobody: gcloud's account.
      tpu, options = connection(s, "", { CLOUDSDK_CORE_ACCOUNT = "me@example.com" })
      assert.equal("me_example_com", (os_login.import(tpu, KEY, options)))
      tpu, options = connection(s, nil)
      assert.matches(
        "gcloud config set account",
        tostring(fails("usage", os_login.import, tpu, KEY, options)),
        1,
        true
      )
    end)
  end)

  it("says what is missing when it is refused, or no user is named", function()
    local answers = {
      refusal(403, "PERMISSION_DENIED"),
      { json = {} },
      { json = { loginProfile = { posixAccounts = { {}, 7, { username = 7 } } } } },
      { json = { loginProfile = { posixAccounts = { { username = "only" } } } } },
    }
    support.with_server(function(_, count)
      return answers[count]
    end, function(s)
      local tpu, options = connection(s, "me@example.com")
      assert.matches(
        "compute.osLogin",
        tostring(fails("permission", os_login.import, tpu, KEY, options)),
        1,
        true
      )
      fails("protocol", os_login.import, tpu, KEY, options)
      fails("protocol", os_login.import, tpu, KEY, options)
      assert.equal("only", (os_login.import(tpu, KEY, options)))
    end)
  end)

  it("is on when the node says so, else when the project does", function()
    local answers = {
      { json = { commonInstanceMetadata = { items = { { key = "x", value = "TRUE" } } } } },
      { json = { commonInstanceMetadata = { items = { { key = "enable-oslogin", value = "True" } } } } },
      { json = { commonInstanceMetadata = {} } },
      { json = {} },
      refusal(403, "PERMISSION_DENIED"),
      refusal(401, "UNAUTHENTICATED"),
      refusal(401, "UNAUTHENTICATED"),
    }
    support.with_server(function(request, count)
      assert.equal("/compute/v1/projects/p", request.path)
      return answers[count]
    end, function(s, log)
      local tpu, options = connection(s, "me@example.com")
      assert.is_true(os_login.enabled(tpu, { ["enable-oslogin"] = "TRUE" }, options))
      assert.is_false(os_login.enabled(tpu, { ["enable-oslogin"] = "false" }, options))
      assert.equal(0, #log)
      for place, expected in ipairs { false, true, false, false, false } do
        assert.equal(expected, os_login.enabled(tpu, { other = "TRUE" }, options), tostring(place))
      end
      fails("auth", os_login.enabled, tpu, nil, options)
    end)
  end)
end)
