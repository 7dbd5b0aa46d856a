local metadata = require("ciranda.gcp.metadata")
local task = require("ciranda.task")

local support = dofile("tests/spec/gcp/support.lua")
local fails = support.fails

--- Run `fn(server, log)` with a metadata server that answers from a table of paths.
local function with_metadata(values, fn)
  support.with_server(function(request)
    if request.headers["metadata-flavor"] ~= "Google" then
      return { status = 403, body = "Missing Metadata-Flavor:Google header." }
    end
    local path = request.path:match("^/computeMetadata/v1/(.*)$")
    local value = values[path]
    if type(value) == "function" then
      return value(request)
    elseif value == nil then
      return { status = 404, body = "not found" }
    end
    return { body = value, headers = { ["Metadata-Flavor"] = "Google", ETag = "e1" } }
  end, function(s, log)
    fn(metadata.new { env = support.env { GCE_METADATA_HOST = ("127.0.0.1:%d"):format(s.port) } }, log, s)
  end)
end

describe("ciranda.gcp.metadata", function()
  it("reads values, and tells that there is none", function()
    with_metadata({
      ["instance/attributes/tpu-env"] = "ACCELERATOR_TYPE: 'v4-8'\n",
      ["project/project-id"] = "p",
      ["instance/upcoming-maintenance"] = '{"type": "SCHEDULED"}',
    }, function(server, log)
      assert.is_true(server:present())
      local text, etag = server:get("instance/attributes/tpu-env")
      assert.equal("ACCELERATOR_TYPE: 'v4-8'\n", text)
      assert.equal("e1", etag)
      assert.is_nil(server:get("instance/attributes/none"))
      assert.equal("p", server:project())
      assert.equal("SCHEDULED", server:json("instance/upcoming-maintenance").type)
      assert.equal("alt=json", log[#log].query)
    end)
  end)

  it("gives tokens, and says when the machine has no account", function()
    with_metadata({
      ["instance/service-accounts/default/token"] = '{"access_token": "t", "expires_in": 100, "token_type": "Bearer"}',
    }, function(server, log)
      assert.equal("t", server:token().access_token)
      server:token { "a", "b" }
      assert.equal("scopes=a%2Cb", log[#log].query)
    end)
    with_metadata({}, function(server)
      fails("auth", server.token, server)
    end)
  end)

  it("waits for a change, within a time", function()
    local value, etag = "NONE", "0"
    with_metadata({
      ["instance/maintenance-event"] = function(request)
        local args = request:args()
        assert(args.wait_for_change == "true")
        for _ = 1, 20 do
          if args.last_etag ~= etag then
            break
          end
          task.sleep(0.02)
        end
        return { body = value, headers = { ETag = etag } }
      end,
    }, function(server)
      local scope <close> = task.scope()
      local waiting = scope:spawn(server.wait_for_change, server, "instance/maintenance-event", "0", 5)
      task.sleep(0.05)
      assert.equal("waiting", waiting:status())
      value, etag = "TERMINATE_ON_HOST_MAINTENANCE", "1"
      assert.same({ "TERMINATE_ON_HOST_MAINTENANCE", "1" }, { waiting:wait() })
    end)
  end)

  it("tries again when the server fails in passing, and says when it refuses", function()
    local count = 0
    with_metadata({
      flaky = function()
        count = count + 1
        return count == 1 and { status = 503 } or { body = "there" }
      end,
      forbidden = function()
        return { status = 403 }
      end,
    }, function(server)
      assert.equal("there", server:get("flaky"))
      assert.matches("403", tostring(fails("failed", server.get, server, "forbidden")), 1, true)
    end)
  end)

  it("is present when it answers as one", function()
    local function present(variables)
      return metadata.new({ env = support.env(variables) }):present()
    end
    assert.is_false(present { NO_GCE_CHECK = "true" })
    assert.is_true(present { GCE_METADATA_ROOT = "127.0.0.1:1" })
    support.with_server(function()
      return { headers = { ["Metadata-Flavor"] = "Google" } }
    end, function(s)
      assert.is_true(present { GCE_METADATA_IP = ("127.0.0.1:%d"):format(s.port) })
    end)
    support.with_server(function()
      return {}
    end, function(s)
      assert.is_false(present { GCE_METADATA_IP = ("127.0.0.1:%d"):format(s.port) })
    end)
    assert.is_false(present { GCE_METADATA_IP = "127.0.0.1:1" })
  end)
end)
