-- OS Login and Resource Manager of the simulated project, called directly.
local crypto = require("ciranda.io.crypto")
local json = require("ciranda.io.json")
local os_login = require("ciranda.sim.os_login")
local resource_manager = require("ciranda.sim.resource_manager")
local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "support.lua")

local BLOB = crypto.base64(("k"):rep(51))
local KEY = "ssh-ed25519 " .. BLOB .. " somebody"
local FINGERPRINT = crypto.hex(crypto.digest("sha256", ("k"):rep(51)))

local function caller(project, service, account)
  project.world.oauth = {
    check = function()
      return account
    end,
  }
  return function(verb, target, body)
    local path, text = target:match("^([^?]*)%??(.*)$")
    local query = {}
    for name, value in text:gmatch("([^&=]+)=([^&]*)") do
      query[name] = value
    end
    assert.is_true(service:serves(path), path)
    local request = { method = verb, path = path, query = query, body = body and json.encode(body) or "" }
    local answer = service:handle(request)
    return answer.status, json.decode(answer.body), request.called
  end
end

describe("OS Login", function()
  local project, call

  before_each(function()
    project = support.project()
    call = caller(project, os_login.service(project.world), "ann.b@example.com")
  end)

  local USER = "/v1/users/ann.b@example.com"

  it("keeps the keys of an account and says which user it is", function()
    local status, body, called = call("POST", USER .. ":importSshPublicKey?projectId=p", { key = KEY })
    assert.are.equal(200, status)
    assert.are.equal("oslogin.users.importSshPublicKey", called)
    local account = body.loginProfile.posixAccounts[1]
    assert.are.equal("ann_b_example_com", account.username)
    assert.is_true(account.primary)
    assert.are.equal("p", account.accountId)
    assert.are.equal(KEY, body.loginProfile.sshPublicKeys[FINGERPRINT].key)
    assert.are.same(body.loginProfile, select(2, call("GET", USER .. "/loginProfile?projectId=42")))
    assert.are.same(
      body.loginProfile.sshPublicKeys[FINGERPRINT],
      select(2, call("GET", "/v1/users/ann.b%40example.com/sshPublicKeys/" .. FINGERPRINT))
    )
    assert.are.equal(409, (call("POST", USER .. "/sshPublicKeys", { key = KEY })))
    assert.are.equal(200, (call("DELETE", USER .. "/sshPublicKeys/" .. FINGERPRINT)))
    assert.are.equal(404, (call("GET", USER .. "/sshPublicKeys/" .. FINGERPRINT)))
    assert.is_nil(select(2, call("GET", USER .. "/loginProfile")).sshPublicKeys)
  end)

  it("lets nobody see or change what is another's, and takes no key that is none", function()
    assert.are.equal(403, (call("GET", "/v1/users/other@example.com/loginProfile")))
    assert.are.equal(403, (call("POST", "/v1/users/other@example.com:importSshPublicKey", { key = KEY })))
    assert.are.equal(403, (call("POST", USER .. ":importSshPublicKey?projectId=other", { key = KEY })))
    for _, key in ipairs({ "", "nonsense", "ssh-rsa !!!", KEY .. "\nssh-ed25519 AAAA", 7 }) do
      assert.are.equal(400, (call("POST", USER .. ":importSshPublicKey", { key = key })), tostring(key))
    end
    local body = { key = KEY, expirationTimeUsec = "soon" }
    assert.are.equal(400, (call("POST", USER .. ":importSshPublicKey", body)))
    assert.are.equal(404, (call("PUT", USER .. "/loginProfile")))
  end)

  it("names a node's users where the metadata says so, until their keys expire", function()
    local login = project.world.os_login
    local soon = ("%d"):format((project.clock:now() + 60) * 1e6)
    call("POST", USER .. ":importSshPublicKey", { key = KEY, expirationTimeUsec = soon })
    assert.is_nil(login:users({}))
    assert.is_nil(login:users(nil))
    local users = { { name = "ann_b_example_com", keys = { KEY } } }
    assert.are.same(users, login:users({ ["enable-oslogin"] = "TRUE" }))
    project.world.project.metadata["enable-oslogin"] = "true"
    assert.are.same(users, login:users({}))
    assert.is_nil(login:users({ ["enable-oslogin"] = "FALSE" }))
    project.clock:advance(61)
    assert.are.same({}, login:users({}))
    local later = ("%d"):format((project.clock:now() + 60) * 1e6)
    call("PATCH", USER .. "/sshPublicKeys/" .. FINGERPRINT, { expirationTimeUsec = later })
    assert.are.same(users, login:users({}))
  end)

  it("calls service accounts by a number", function()
    call = caller(project, os_login.service(project.world), "r@p.iam.gserviceaccount.com")
    local _, profile = call("GET", "/v1/users/r@p.iam.gserviceaccount.com/loginProfile")
    assert.is_truthy(profile.posixAccounts[1].username:find("^sa_%d+$"))
  end)

  it("tells the machines at once", function()
    project.call(
      "POST",
      "/v2/" .. support.ZONE .. "/queuedResources?queuedResourceId=job",
      support.queued_resource(1)
    )
    project.settle()
    local before = #project.machines.log
    call("POST", USER .. ":importSshPublicKey", { key = KEY })
    assert.are.equal("reconfigure job", project.machines.log[before + 1])
  end)
end)

describe("Resource Manager", function()
  it("knows the one project, by id and number, in both versions", function()
    local project = support.project()
    local call = caller(project, resource_manager.new(project.world), "x")
    local status, body = call("GET", "/v1/projects/p")
    assert.are.equal(200, status)
    assert.are.equal("42", body.projectNumber)
    assert.are.equal("ACTIVE", body.lifecycleState)
    assert.are.same(body, select(2, call("GET", "/v1/projects/42")))
    assert.are.same({ body }, select(2, call("GET", "/v1/projects")).projects)
    body = select(2, call("GET", "/v3/projects/p"))
    assert.are.equal("projects/42", body.name)
    assert.are.same({ body }, select(2, call("GET", "/v3/projects:search?query=x")).projects)
    assert.are.equal(403, (call("GET", "/v1/projects/other")))
    local asked = { permissions = { "tpu.nodes.create" } }
    assert.are.same(asked, select(2, call("POST", "/v1/projects/p:testIamPermissions", asked)))
    assert.are.equal(400, (call("POST", "/v3/projects/p:testIamPermissions", {})))
    assert.is_false(resource_manager.new(project.world):serves("/v1/projects/p/locations"))
  end)
end)
