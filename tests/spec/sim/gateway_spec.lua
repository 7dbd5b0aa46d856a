-- The simulator's front door, called directly: what every service has in common.
local clock = require("ciranda.sim.clock")
local compute = require("ciranda.sim.compute")
local control = require("ciranda.sim.control")
local fs = require("ciranda.io.fs")
local gateway = require("ciranda.sim.gateway")
local json = require("ciranda.io.json")
local oauth = require("ciranda.sim.oauth")
local os_login = require("ciranda.sim.os_login")
local request_log = require("ciranda.sim.request_log")
local resource_manager = require("ciranda.sim.resource_manager")
local storage = require("ciranda.sim.storage")
local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "support.lua")

describe("the simulator's front door", function()
  local project, credentials, log, handler, directory, token

  before_each(function()
    directory = fs.tempdir("ciranda-spec-")
    credentials = oauth.new({ clock = clock.manual(), project = "p", project_number = "42" })
    project = support.project({ oauth = credentials })
    log = request_log.new(project.clock)
    handler = gateway.new({
      world = project.world,
      oauth = credentials,
      requests = log,
      services = {
        control.new(project.world, log),
        project.service,
        storage.new(project.world, directory, { buckets = { "bucket" } }),
        compute.new(project.world),
        resource_manager.new(project.world),
        os_login.service(project.world),
      },
    })
    token = credentials:issue("somebody")
  end)

  after_each(function()
    fs.remove_tree(directory)
  end)

  -- Call: status, decoded body or text, headers.
  local function call(verb, target, body, headers)
    local path, text = target:match("^([^?]*)%??(.*)$")
    local query = {}
    for name, value in text:gmatch("([^&=]+)=([^&]*)") do
      query[name] = value
    end
    local lower = { host = "sim:1", authorization = "Bearer " .. token }
    for name, value in pairs(headers or {}) do
      lower[name:lower()] = value
    end
    local answer = handler({
      method = verb,
      target = target,
      path = path,
      headers = setmetatable(lower, {
        __index = function(self, name)
          return rawget(self, name:lower())
        end,
      }),
      body = type(body) == "string" and body
        or not headers and type(body) == "table" and json.encode(body)
        or "",
      args = function()
        return query
      end,
      form = function()
        return body
      end,
    })
    local ok, value = pcall(json.decode, answer.body)
    return answer.status, ok and value or answer.body, answer.headers
  end

  -- The answer of a token endpoint to a form.
  local function post_form(path, form, headers)
    return call("POST", path, form, headers or {})
  end

  local CALLS = {
    ["nodes.list"] = { "GET", "/v2/" .. support.ZONE .. "/nodes" },
    ["storage.objects.get"] = { "GET", "/storage/v1/b/bucket/o/none" },
    ["storage.objects.insert"] = { "POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=a" },
    ["compute.projects.get"] = { "GET", "/compute/v1/projects/p" },
    ["cloudresourcemanager.projects.get"] = { "GET", "/v1/projects/p" },
    ["oslogin.users.getLoginProfile"] = { "GET", "/v1/users/somebody/loginProfile" },
    ["oauth.token"] = { "POST", "/token" },
    ["sts.token"] = { "POST", "/v1/token" },
    ["sts.oauthtoken"] = { "POST", "/v1/oauth/token" },
    ["iamcredentials.generateAccessToken"] = {
      "POST",
      "/v1/projects/-/serviceAccounts/a@b:generateAccessToken",
    },
    ["metadata"] = { "GET", "/computeMetadata/v1/project/project-id" },
  }

  it("keeps the project's metadata, guarded by its fingerprint, and the operation that changed it", function()
    local path = "/compute/v1/projects/p"
    local _, shown = call("GET", path)
    local mark = shown.commonInstanceMetadata.fingerprint
    local body = { fingerprint = mark, items = { { key = "ssh-keys", value = "a:ssh-ed25519 AAAA" } } }
    local status, operation = call("POST", path .. "/setCommonInstanceMetadata", body)
    assert.are.equal(200, status)
    assert.are.same(operation, select(2, call("GET", path .. "/global/operations/" .. operation.name)))
    assert.are.same(
      operation,
      select(2, call("POST", path .. "/global/operations/" .. operation.name .. "/wait", {}))
    )
    assert.are.equal(404, (call("GET", path .. "/global/operations/none")))
    assert.are.same(body.items, select(2, call("GET", path)).commonInstanceMetadata.items)
    local refusal
    status, refusal = call("POST", path .. "/setCommonInstanceMetadata", body)
    assert.are.equal(412, status)
    assert.are.equal("conditionNotMet", refusal.error.errors[1].reason)
    assert.are.equal(400, (call("POST", path .. "/setCommonInstanceMetadata", { items = { 1 } })))
    assert.are.equal(404, (call("GET", "/compute/v1/projects/other")))
    assert.are.equal(404, (call("GET", "/compute/v1/zones")))
  end)

  it("lets every method of every service fail on request, and logs it by its id", function()
    for method, target in pairs(CALLS) do
      local before = #log:since(0)
      project.world.faults:add({ kind = "error", method = method, status = "UNAVAILABLE", retry_after = 2 })
      assert.are.equal(503, (call(target[1], target[2], {})), method)
      assert.are.equal(0, #project.world.faults:pending(), method)
      assert.are_not.equal(503, (call(target[1], target[2], {})), method)
      local entries = log:since(before)
      assert.are.equal(method, entries[1].method)
      assert.are.equal(503, entries[1].status)
      assert.are.equal(method, entries[2].method)
    end
  end)

  it("refuses in the form of each service", function()
    local function refused(method, status)
      project.world.faults:add({ kind = "error", method = method, status = status, retry_after = 1.5 })
      local _, body, headers = call(CALLS[method][1], CALLS[method][2], {})
      return body, headers
    end
    local body, headers = refused("nodes.list", "UNAVAILABLE")
    assert.are.equal("UNAVAILABLE", body.error.status)
    assert.are.equal("2", headers["Retry-After"])
    for _, method in ipairs({ "storage.objects.get", "storage.objects.insert", "compute.projects.get" }) do
      body, headers = refused(method, "RESOURCE_EXHAUSTED")
      assert.are.equal(429, body.error.code)
      assert.are.equal("rateLimitExceeded", body.error.errors[1].reason)
      assert.is_nil(body.error.status)
      assert.are.equal("2", headers["Retry-After"])
    end
    assert.are.equal("temporarily_unavailable", refused("oauth.token", "UNAVAILABLE").error)
    assert.are.equal("internal_failure", refused("sts.token", "INTERNAL").error)
    assert.are.equal("string", type(refused("metadata", "UNAVAILABLE")))
    token = "nobody gave this"
    local _, bad = call("GET", "/storage/v1/b/bucket")
    assert.are.equal("authError", bad.error.errors[1].reason)
    local entries = log:since(0)
    assert.are.equal("storage.buckets.get", entries[#entries].method)
  end)

  it("alters one field of an answer", function()
    local zone = "/v2/" .. support.ZONE
    call(
      "POST",
      zone .. "/queuedResources?queuedResourceId=job",
      support.queued_resource(2, nil, { spot = json.object() })
    )
    project.settle()
    local function altered(method, target, field, value)
      project.world.faults:add({ kind = "alter", method = method, field = field, value = value })
      local _, body = call("GET", zone .. target)
      assert.are.same({}, project.world.faults:pending())
      return body
    end
    local body = altered("nodes.list", "/nodes", "nodes.*.id", 7)
    assert.are.same({ 7, 7 }, { body.nodes[1].id, body.nodes[2].id })
    body = altered("queuedResources.get", "/queuedResources/job", "state", "ACTIVE")
    assert.are.equal("ACTIVE", body.state)
    assert.are.equal("object", json.kind(body.spot))
    body = altered("nodes.list", "/nodes?pageSize=1", "nextPageToken")
    assert.is_nil(body.nextPageToken)
    assert.are.equal(1, #body.nodes)
    local plain = select(2, call("GET", zone .. "/nodes/job-0"))
    assert.are.same(plain, altered("nodes.get", "/nodes/job-0", "absent.deeper", 1))
    assert.are.same(plain, altered("nodes.get", "/nodes/job-0", "networkEndpoints.port", 1))
    local status, refusal = call("POST", "/sim/v1/faults", { kind = "alter", method = "*" })
    assert.are.equal(400, status)
    assert.is_truthy(refusal.error.message:find("needs a field", 1, true))
    refusal = select(2, call("POST", "/sim/v1/faults", { kind = "none" }))
    assert.is_truthy(refusal.error.message:find("there are alter, changeHostKey, error,", 1, true))
  end)

  describe("takes batches", function()
    local TYPE = { ["Content-Type"] = 'multipart/mixed; boundary="=X="' }

    local function part(id, request)
      local id_line = id and ("Content-ID: <%s>\n"):format(id) or ""
      return "--=X=\nContent-Type: application/http\n" .. id_line .. "\n" .. request .. "\n"
    end

    it("and answers each call with its id", function()
      local zone = "/v2/" .. support.ZONE
      local before = #log:since(0)
      local create = [[{"tpu": {"nodeSpec": [{"parent": "]]
        .. support.ZONE
        .. [[", "nodeId": "a", "node":]]
        .. [[ {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}}]}}]]
      local text = part("b + 1", "GET " .. zone .. "/nodes?pageSize=1 HTTP/1.1\r\nAccept: */*\r\n\r\n")
        .. part("b + 2", "GET http://sim:1" .. zone .. "/nodes/none HTTP/1.1\n\n")
        .. part(
          nil,
          ("POST %s/queuedResources?queuedResourceId=q HTTP/1.1\nContent-Length: %d\n\n%s"):format(
            zone,
            #create,
            create
          )
        )
        .. part("b + 4", "GET /storage/v1/b/bucket/o/none HTTP/1.1\nAuthorization: Bearer none\n\n")
        .. "--=X=--\n"
      local status, body, headers = call("POST", "/batch", text, TYPE)
      assert.are.equal(200, status)
      local boundary = headers["Content-Type"]:match("^multipart/mixed; boundary=(%S+)$")
      assert.is_truthy(body:find("--" .. boundary .. "--\r\n", 1, true))
      local found = {}
      for answer in body:gmatch("Content%-Type: application/http\r\n(.-HTTP/1.1 %d+ [%w ]+)\r\n") do
        found[#found + 1] = answer:match("Content%-ID: <(.-)>") or "none"
        found[#found + 1] = answer:match("HTTP/1.1 (.*)$")
      end
      assert.are.same({
        "response-b + 1",
        "200 OK",
        "response-b + 2",
        "404 Not Found",
        "none",
        "200 OK",
        "response-b + 4",
        "401 Unauthorized",
      }, found)
      assert.is_truthy(project.world.queued_resources:find(support.ZONE .. "/queuedResources/q"))
      local methods = {}
      for i, entry in ipairs(log:since(before)) do
        methods[i] = entry.method
      end
      assert.are.same(
        { "nodes.list", "nodes.get", "queuedResources.create", "storage.objects.get", "batch" },
        methods
      )
    end)

    it("but none that is malformed or holds another", function()
      local get = part("a", "GET /v2/x HTTP/1.1\n\n")
      for text, message in pairs({
        [""] = "no end",
        [get] = "no end",
        ["--=X=--\n"] = "from 1 to",
        [part("a", "nonsense") .. "--=X=--"] = "is no request",
        [part("a", "GET /v2/x HTTP/1.1\nbad header\n\n") .. "--=X=--"] = "is no header",
        [part("a", "POST /batch HTTP/1.1\n\n") .. "--=X=--"] = "cannot hold another",
      }) do
        local status, body = call("POST", "/batch", text, TYPE)
        assert.are.equal(400, status)
        assert.is_truthy(body.error.message:find(message, 1, true), body.error.message)
      end
      assert.are.equal(400, (call("POST", "/batch/storage/v1", get, { ["Content-Type"] = "text/plain" })))
    end)
  end)

  it("names the actions that there are when it is asked for another", function()
    for path, text in pairs({
      ["nodes/job-0:explode"] = "on a node; there are lose, maintain, preempt",
      ["nodes/job-0/workers/0:explode"] = "on a worker; there are changeHostKey, ",
    }) do
      local status, body = call("POST", "/sim/v1/" .. path, {})
      assert.are.equal(400, status)
      assert.is_truthy(body.error.message:find(text, 1, true), body.error.message)
    end
  end)

  local GRANTS = {
    authorized_user = function(file)
      return post_form("/token", {
        grant_type = "refresh_token",
        client_id = file.client_id,
        client_secret = file.client_secret,
        refresh_token = file.refresh_token,
      })
    end,
    external_account_authorized_user = function(file)
      local basic = require("ciranda.io.crypto").base64(file.client_id .. ":" .. file.client_secret)
      local form = { grant_type = "refresh_token", refresh_token = file.refresh_token }
      assert.are.equal(401, (post_form("/v1/oauth/token", form)))
      return post_form("/v1/oauth/token", form, { Authorization = "Basic " .. basic })
    end,
    external_account = function(file)
      local status, subject = call("GET", file.credential_source.url:match("^http://sim:1(.*)$"), nil, {
        ["Metadata-Flavor"] = "Google",
      })
      assert.are.equal(200, status)
      local form = {
        grant_type = "urn:ietf:params:oauth:grant-type:token-exchange",
        audience = file.audience,
        subject_token = subject,
        subject_token_type = file.subject_token_type,
        requested_token_type = "urn:ietf:params:oauth:token-type:access_token",
      }
      for _, name in ipairs({ "subject_token", "subject_token_type", "requested_token_type" }) do
        local kept = form[name]
        form[name] = nil
        assert.are.equal("invalid_request", select(2, post_form("/v1/token", form)).error)
        form[name] = kept
      end
      return post_form("/v1/token", form)
    end,
  }

  function GRANTS.impersonated_service_account(file)
    local _, source = GRANTS.authorized_user(file.source_credentials)
    token = source.access_token
    local path = file.service_account_impersonation_url:match("^http://sim:1(.*)$")
    local status, body = call("POST", path, { scope = { "s" }, lifetime = "60s" })
    return status, { access_token = body.accessToken }
  end

  for kind, exchange in pairs(GRANTS) do
    it("gives credentials of the kind " .. kind .. ", which can be exchanged", function()
      local status, file = call("POST", "/sim/v1/credentials", { type = kind })
      assert.are.equal(200, status)
      assert.are.equal(kind, file.type)
      local granted, body = exchange(file)
      assert.are.equal(200, granted)
      token = body.access_token
      assert.are.equal(200, (call("GET", "/v2/" .. support.ZONE .. "/nodes")))
    end)
  end

  it("gives a service account's key, and says which kinds there are", function()
    local _, file = call("POST", "/sim/v1/credentials", { type = "service_account", email = "a@b" })
    assert.are.equal("a@b", file.client_email)
    assert.is_truthy(file.private_key:find("BEGIN", 1, true))
    local status, body = call("POST", "/sim/v1/credentials", { type = "password" })
    assert.are.equal(400, status)
    assert.is_truthy(body.error.message:find("authorized_user, external_account,", 1, true))
  end)
end)
