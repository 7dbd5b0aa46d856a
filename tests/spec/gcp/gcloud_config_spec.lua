local gcloud_config = require("ciranda.gcp.gcloud_config")

local support = dofile("tests/spec/gcp/support.lua")
local fails = support.fails

describe("ciranda.gcp.gcloud_config", function()
  it("reads sections, spaces and comments as gcloud's files have them", function()
    assert.same(
      {
        ["core/project"] = "my-project",
        ["core/account"] = "user@example.com",
        ["compute/zone"] = "us-central2-b",
        ["proxy/address"] = "a=b:c",
        ["core/empty"] = "",
      },
      gcloud_config.parse(
        "stray = 1\n[core]\n# a comment\nproject = my-project\r\n; another\naccount=user@example.com\nempty =\n"
          .. "no value\n\n[compute]\n zone: us-central2-b \n[proxy]\naddress = a=b:c"
      )
    )
  end)

  it("finds the active configuration, which the environment beats", function()
    support.with_directory(function(directory)
      support.write(directory .. "/configurations/config_default", "[core]\nproject = from-default\n")
      support.write(
        directory .. "/configurations/config_work",
        "[core]\nproject = from-work\n[compute]\nzone = z1\n"
      )
      local function load(variables, configuration)
        variables.CLOUDSDK_CONFIG = directory
        return gcloud_config.load { env = support.env(variables), configuration = configuration }
      end
      assert.equal("from-default", (load({}):project()))
      support.write(directory .. "/active_config", "work\n")
      local config = load {}
      assert.equal("work", config.name)
      local project, source = config:project()
      assert.equal("from-work", project)
      assert.equal(directory .. "/configurations/config_work", source)
      assert.equal("z1", (config:zone()))
      assert.equal("from-default", (load({ CLOUDSDK_ACTIVE_CONFIG_NAME = "default" }):project()))
      assert.equal("from-default", (load({}, "default"):project()))
      project, source = load({ CLOUDSDK_CORE_PROJECT = "from-variable" }):project()
      assert.equal("from-variable", project)
      assert.equal("CLOUDSDK_CORE_PROJECT", source)
      assert.equal("z2", (load({ CLOUDSDK_COMPUTE_ZONE = "z2" }):zone()))
      assert.equal("from-work", (load({ GOOGLE_CLOUD_PROJECT = "last" }):project()))
    end)
  end)

  it("does without any file", function()
    local config = gcloud_config.load { env = support.env { HOME = "/nonexistent" } }
    assert.is_nil(config:project())
    assert.is_nil(config:zone())
    assert.equal("/nonexistent/.config/gcloud", config.directory)
    assert.equal("q", (gcloud_config.load({ env = support.env { GCLOUD_PROJECT = "q" } }):project()))
    assert.is_nil(gcloud_config.load({ env = support.env {} }).directory)
  end)

  it("gives endpoints with a slash at their end, and refuses what is none", function()
    local function endpoint(value)
      return gcloud_config
        .load({ env = support.env { CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU = value } })
        :endpoint("tpu", "https://default/")
    end
    assert.equal("https://default/", endpoint(nil))
    assert.equal("http://127.0.0.1:1/", endpoint("http://127.0.0.1:1"))
    assert.equal("http://127.0.0.1:1/x/", endpoint("http://127.0.0.1:1/x/"))
    local err = fails("usage", endpoint, "127.0.0.1:1")
    assert.matches("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", tostring(err), 1, true)
  end)

  it("says that a configuration that was named does not exist", function()
    support.with_directory(function(directory)
      local env = support.env { CLOUDSDK_CONFIG = directory, CLOUDSDK_ACTIVE_CONFIG_NAME = "gone" }
      assert.matches("gone", tostring(fails("usage", gcloud_config.load, { env = env })), 1, true)
      env = support.env { CLOUDSDK_CONFIG = directory, CLOUDSDK_ACTIVE_CONFIG_NAME = "../../etc" }
      fails("usage", gcloud_config.load, { env = env })
    end)
    fails("misuse", gcloud_config.load, { environment = {} })
    fails("misuse", function()
      gcloud_config.load({ env = support.env {} }):get("project")
    end)
  end)
end)
