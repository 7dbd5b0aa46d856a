local clock = require("ciranda.sim.clock")
local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")
local oauth = require("ciranda.sim.oauth")

describe("the simulated credentials", function()
  local time, service

  before_each(function()
    time = clock.manual()
    service = oauth.new({ clock = time, project = "p", project_number = "42" })
  end)

  local function post(path, form)
    local request = {
      method = "POST",
      path = path,
      headers = {},
      query = {},
      body = "",
      form = function()
        return form
      end,
    }
    local answer = service:handle(request)
    return answer.status, json.decode(answer.body)
  end

  local function accepts(token)
    local ok, err =
      pcall(service.check, service, { headers = { authorization = "Bearer " .. token }, query = {} })
    if not ok then
      assert.is_true(errors.is(err))
      assert.are.equal("UNAUTHENTICATED", err.status)
    end
    return ok
  end

  it("accepts a token until it expires, and no other", function()
    local token = service:issue("somebody")
    assert.is_true(accepts(token))
    assert.is_false(accepts(token .. "x"))
    time:advance(oauth.LIFETIME + 1)
    assert.is_false(accepts(token))
  end)

  it("refuses a call without credentials, unless it is open", function()
    local ok, err = pcall(service.check, service, { headers = {}, query = {} })
    assert.is_false(ok)
    assert.is_truthy(err.message:find("missing required authentication credential", 1, true))
    service.open = true
    assert.are.equal("anonymous", service:check({ headers = {}, query = {} }))
  end)

  it("exchanges a user's refresh token", function()
    local file = service:make_user("someone@example.com")
    local form = {
      grant_type = "refresh_token",
      client_id = file.client_id,
      client_secret = file.client_secret,
      refresh_token = file.refresh_token,
    }
    local status, body = post("/token", form)
    assert.are.equal(200, status)
    assert.are.equal(oauth.LIFETIME, body.expires_in)
    assert.is_true(accepts(body.access_token))
    form.client_secret = "wrong"
    status, body = post("/token", form)
    assert.are.equal(401, status)
    assert.are.equal("invalid_client", body.error)
    form.refresh_token = "revoked"
    status, body = post("/token", form)
    assert.are.equal(400, status)
    assert.are.equal("invalid_grant", body.error)
    assert.are.equal("unsupported_grant_type", select(2, post("/token", { grant_type = "x" })).error)
  end)

  describe("of a service account", function()
    local file

    local function jwt(claims, key, header)
      local head =
        crypto.base64url(json.encode(header or { typ = "JWT", alg = "RS256", kid = file.private_key_id }))
      local text = head .. "." .. crypto.base64url(json.encode(claims))
      return text .. "." .. crypto.base64url(crypto.rs256_sign(key or file.private_key, text))
    end

    local function claims(change)
      local now = math.floor(time:now())
      local result =
        { iss = file.client_email, iat = now, exp = now + 3600, scope = "s", aud = file.token_uri }
      for name, value in pairs(change or {}) do
        result[name] = value
      end
      return result
    end

    local function exchange(assertion)
      return post(
        "/token",
        { grant_type = "urn:ietf:params:oauth:grant-type:jwt-bearer", assertion = assertion }
      )
    end

    before_each(function()
      file = service:make_service_account("robot@p.iam.gserviceaccount.com", "p", "http://x/token")
    end)

    it("are good when they are signed with its key", function()
      local status, body = exchange(jwt(claims()))
      assert.are.equal(200, status)
      assert.is_true(accepts(body.access_token))
      assert.is_true(accepts(jwt(claims())))
    end)

    it("are refused when anything about them is wrong", function()
      local other = crypto.rsa_generate(2048)
      local function refused(assertion, text)
        local status, body = exchange(assertion)
        assert.are.equal(400, status)
        assert.are.equal("invalid_grant", body.error)
        assert.is_truthy(body.error_description:find(text, 1, true), body.error_description)
        assert.is_false(accepts(assertion))
      end
      refused(jwt(claims(), other.private_key), "Invalid JWT Signature")
      refused(jwt(claims({ iss = "nobody@example.com" })), "account not found")
      refused(jwt(claims({ exp = 1 })), "short-lived token")
      refused(
        jwt(claims({ iat = math.floor(time:now()) + 3000, exp = math.floor(time:now()) + 3600 })),
        "short-lived"
      )
      refused(jwt(claims(), nil, { alg = "none" }), "Invalid JWT Signature")
      refused("a.b.c", "Invalid JWT")
      refused("abc", "not a JWT")
      local status, body = exchange(jwt(claims({ scope = "" })))
      assert.are.equal(400, status)
      assert.are.equal("invalid_scope", body.error)
    end)
  end)

  it("exchanges the token of an identity pool, and impersonates", function()
    local status, body = post("/v1/token", {
      grant_type = "urn:ietf:params:oauth:grant-type:token-exchange",
      audience = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/r",
      subject_token = "t",
      subject_token_type = "urn:ietf:params:oauth:token-type:jwt",
      requested_token_type = "urn:ietf:params:oauth:token-type:access_token",
    })
    assert.are.equal(200, status)
    assert.are.equal("urn:ietf:params:oauth:token-type:access_token", body.issued_token_type)
    local path = "/v1/projects/-/serviceAccounts/a%40example.com:generateAccessToken"
    local answer = service:handle({
      method = "POST",
      path = path,
      query = {},
      headers = { authorization = "Bearer " .. body.access_token },
      body = [[{"scope": ["s"], "lifetime": "60s"}]],
    })
    local impersonated = json.decode(answer.body)
    assert.is_true(accepts(impersonated.accessToken))
    assert.is_truthy(impersonated.expireTime:find("^%d+%-%d+%-%d+T"))
    time:advance(61)
    assert.is_false(accepts(impersonated.accessToken))
  end)
end)
