local credentials = require("ciranda.gcp.credentials")
local crypto = require("ciranda.io.crypto")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local json = require("ciranda.io.json")
local kinds = require("ciranda.gcp.credential_kinds")
local log = require("ciranda.io.log")
local task = require("ciranda.task")

local environment = dofile("tests/fixtures/environment.lua")
local patience = dofile("tests/fixtures/patience.lua")
local support = dofile("tests/spec/gcp/support.lua")
local fails = support.fails

local pair -- made once: an RSA key takes time

--- Credentials from an environment and a directory that stands for ~/.config/gcloud.
local function find(directory, variables, now)
  local env = { CLOUDSDK_CONFIG = directory, NO_GCE_CHECK = "true", PATH = "/nonexistent" }
  for name, value in pairs(variables or {}) do
    env[name] = value
  end
  return credentials.find { config = gcloud_config.load { env = support.env(env) }, now = now }
end

local function adc(directory, data)
  support.write(directory .. "/application_default_credentials.json", json.encode(data))
end

local USER = {
  type = "authorized_user",
  client_id = "id.example",
  client_secret = "client-secret-1",
  refresh_token = "refresh-token-1",
  quota_project_id = "quota-project",
}

--- A token endpoint that gives token-1, token-2, ...
local function token_server(lifetime)
  local count = 0
  return function()
    count = count + 1
    return {
      json = { access_token = "token-" .. count, expires_in = lifetime or 3600, token_type = "Bearer" },
    }
  end
end

describe("ciranda.gcp.credentials", function()
  describe("of a user", function()
    it("exchange the refresh token and name the quota project", function()
      support.with_directory(function(directory)
        support.with_server(token_server(), function(s, requests)
          adc(directory, USER)
          local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url .. "/token" })
          assert.equal("authorized_user", found.kind)
          assert.equal(0, #requests)
          assert.same(
            { Authorization = "Bearer token-1", ["x-goog-user-project"] = "quota-project" },
            (found:headers())
          )
          assert.same({
            grant_type = "refresh_token",
            client_id = "id.example",
            client_secret = "client-secret-1",
            refresh_token = "refresh-token-1",
          }, requests[1]:form())
          assert.equal("token-1", found:token())
          assert.equal(1, #requests)
        end)
      end)
    end)

    it("refresh before the token expires, and after it was refused", function()
      support.with_directory(function(directory)
        support.with_server(token_server(1000), function(s)
          adc(directory, USER)
          local now = 1000000
          local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url }, function()
            return now
          end)
          assert.equal("token-1", found:token())
          now = now + 1000 - 226
          assert.equal("token-1", found:token())
          now = now + 1
          assert.equal("token-2", found:token())
          found:reject("token-1") -- an old one: somebody else has refreshed meanwhile
          assert.equal("token-2", found:token())
          found:reject("token-2")
          assert.equal("token-3", found:token())
        end)
      end)
    end)

    it("fetch once for many who wait, also when the first of them is cancelled", function()
      support.with_directory(function(directory)
        local give = token_server()
        local answered = task.event()
        support.with_server(function(_, number)
          if number == 2 then
            answered:wait()
          end
          return give()
        end, function(s, requests)
          adc(directory, USER)
          local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url })
          local scope <close> = task.scope()
          local tasks = {}
          for i = 1, 50 do
            tasks[i] = scope:spawn(found.token, found)
          end
          for _, each in ipairs(tasks) do
            assert.equal("token-1", each:wait())
          end
          assert.equal(1, #requests)

          found:reject()
          for i = 1, 5 do
            tasks[i] = scope:spawn(found.token, found)
          end
          patience.wait_for("the second request", function()
            return #requests == 2
          end)
          tasks[1]:cancel()
          pcall(tasks[1].wait, tasks[1])
          answered:set()
          for i = 2, 5 do
            assert.matches("^token%-[23]$", tasks[i]:wait())
          end
          assert.equal(3, #requests)
        end)
      end)
    end)

    it("try again when the endpoint fails in passing, and give up when it refuses", function()
      support.with_directory(function(directory)
        adc(directory, USER)
        local give = token_server()
        support.with_server(function(_, count)
          if count == 1 then
            return { status = 503, json = { error = "temporarily_unavailable" } }
          end
          return give()
        end, function(s, requests)
          assert.equal("token-1", find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url }):token())
          assert.equal(2, #requests)
        end)
        -- An outage without OAuth's words is no refusal: whoever waits for a day goes on waiting.
        support.with_server(function()
          return { status = 503, body = "<html>" }
        end, function(s, requests)
          local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url })
          fails("unavailable", found.token, found)
          assert.equal(3, #requests)
        end)
        support.with_server(function()
          return {
            status = 400,
            json = { error = "invalid_grant", error_description = "Token has been revoked." },
          }
        end, function(s, requests)
          local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url })
          local err = fails("auth", found.token, found)
          assert.equal(1, #requests)
          assert.matches("revoked", tostring(err), 1, true)
          assert.matches("gcloud auth application-default login", tostring(err), 1, true)
          assert.is_nil(err:describe():find("refresh-token-1", 1, true))
        end)
        for _, body in ipairs { "", "[]", "{", '{"access_token": 7}', '{"expires_in": 3600}' } do
          support.with_server(function()
            return { body = body }
          end, function(s)
            local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url })
            fails("auth", found.token, found)
          end)
        end
      end)
    end)

    it("are secret from the first use on", function()
      support.with_directory(function(directory)
        support.with_server(token_server(), function(s)
          adc(directory, USER)
          find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url }):token()
          assert.equal("***", log.redact("client-secret-1"))
          assert.equal("***", log.redact("refresh-token-1"))
          assert.equal("a *** b", log.redact("a token-1 b"))
        end)
      end)
    end)
  end)

  describe("of a service account", function()
    it("sign a JWT that the public key verifies", function()
      pair = pair or crypto.rsa_generate(2048)
      support.with_directory(function(directory)
        support.with_server(token_server(), function(s, requests)
          local path = support.write(
            directory .. "/key.json",
            json.encode {
              type = "service_account",
              project_id = "sa-project",
              private_key_id = "kid-1",
              private_key = pair.private_key,
              client_email = "sa@sa-project.iam.gserviceaccount.com",
              token_uri = s.url .. "/token",
            }
          )
          local found = find(directory, { GOOGLE_APPLICATION_CREDENTIALS = path }, function()
            return 1700000000.5
          end)
          assert.equal("sa-project", found.project)
          assert.equal("token-1", found:token())
          local form = requests[1]:form()
          assert.equal("urn:ietf:params:oauth:grant-type:jwt-bearer", form.grant_type)
          local head, claims, signature = form.assertion:match("^([^.]+)%.([^.]+)%.([^.]+)$")
          assert.is_true(
            crypto.rs256_verify(pair.public_key, head .. "." .. claims, crypto.unbase64url(signature))
          )
          assert.same({ typ = "JWT", alg = "RS256", kid = "kid-1" }, json.decode(crypto.unbase64url(head)))
          assert.same({
            iat = 1700000000,
            exp = 1700003600,
            iss = "sa@sa-project.iam.gserviceaccount.com",
            aud = "https://oauth2.googleapis.com/token",
            scope = "https://www.googleapis.com/auth/cloud-platform",
          }, json.decode(crypto.unbase64url(claims)))
        end)
      end)
    end)

    it("say what is wrong with their key", function()
      support.with_directory(function(directory)
        local data = {
          type = "service_account",
          private_key = "-----BEGIN PRIVATE KEY-----\nQUJD\n-----END PRIVATE KEY-----\n",
          client_email = "sa@example.com",
          token_uri = "http://127.0.0.1:1/",
        }
        adc(directory, data)
        local found = find(directory)
        assert.matches("private_key cannot sign", tostring(fails("auth", found.token, found)), 1, true)
        data.client_email = nil
        adc(directory, data)
        assert.matches("'client_email' is missing", tostring(fails("auth", find, directory)), 1, true)
      end)
    end)
  end)

  describe("of other kinds", function()
    it("act for a service account", function()
      support.with_directory(function(directory)
        support.with_server(function(request)
          if request.path == "/token" then
            return { json = { access_token = "source-token", expires_in = 3600 } }
          end
          return { json = { accessToken = "acting-token", expireTime = "2026-01-01T01:00:00Z" } }
        end, function(s, requests)
          adc(directory, {
            type = "impersonated_service_account",
            service_account_impersonation_url = s.url
              .. "/v1/projects/-/serviceAccounts/a@b.c:generateAccessToken",
            delegates = { "d1" },
            source_credentials = USER,
          })
          local now = kinds.parse_time("2026-01-01T00:00:00Z")
          local found = find(directory, { CLOUDSDK_AUTH_TOKEN_HOST = s.url .. "/token" }, function()
            return now
          end)
          assert.equal("a@b.c", found.account)
          assert.equal("acting-token", found:token())
          assert.equal("Bearer source-token", requests[2].headers.authorization)
          assert.same({
            delegates = { "d1" },
            scope = { "https://www.googleapis.com/auth/cloud-platform" },
            lifetime = "3600s",
          }, requests[2]:json())
          now = now + 3600 - 226
          found:token()
          assert.equal(2, #requests)
          now = now + 1
          found:token()
          assert.equal(4, #requests)
        end)
      end)
    end)

    it("act for the account that gcloud is told to", function()
      support.with_directory(function(directory)
        support.with_server(function(request)
          if request.path == "/token" then
            return { json = { access_token = "source-token", expires_in = 3600 } }
          end
          return { json = { accessToken = "acting", expireTime = "2126-01-01T01:00:00.123Z" } }
        end, function(s, requests)
          adc(directory, USER)
          local found = find(directory, {
            CLOUDSDK_AUTH_TOKEN_HOST = s.url .. "/token",
            CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT = "x@y.z",
            CLOUDSDK_API_ENDPOINT_OVERRIDES_IAMCREDENTIALS = s.url,
          })
          assert.equal("acting", found:token())
          assert.equal("/v1/projects/-/serviceAccounts/x@y.z:generateAccessToken", requests[2].path)
        end)
      end)
    end)

    it("exchange the subject token of a file or a URL", function()
      support.with_directory(function(directory)
        support.with_server(function(request)
          if request.path == "/subject" then
            assert(request.headers["x-key"] == "1")
            return { json = { value = "subject-from-url" } }
          end
          return { json = { access_token = "federated", expires_in = 3600 } }
        end, function(s, requests)
          local data = {
            type = "external_account",
            audience = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/r",
            subject_token_type = "urn:ietf:params:oauth:token-type:jwt",
            token_url = s.url .. "/sts",
            credential_source = { file = support.write(directory .. "/subject", "subject-from-file\n") },
            client_id = "me",
            client_secret = "secret-of-me",
          }
          adc(directory, data)
          assert.equal("federated", find(directory):token())
          local form = requests[1]:form()
          assert.equal("subject-from-file", form.subject_token)
          assert.equal("urn:ietf:params:oauth:grant-type:token-exchange", form.grant_type)
          assert.equal(data.audience, form.audience)
          assert.equal("Basic " .. crypto.base64("me:secret-of-me"), requests[1].headers.authorization)

          data.credential_source = {
            url = s.url .. "/subject",
            headers = { ["X-Key"] = "1" },
            format = { type = "json", subject_token_field_name = "value" },
          }
          adc(directory, data)
          assert.equal("federated", find(directory):token())
          assert.equal("subject-from-url", requests[3]:form().subject_token)
        end)
      end)
    end)

    it("run a program for the subject token only when that is allowed", function()
      support.with_directory(function(directory)
        support.with_server(token_server(), function(s, requests)
          local program = support.write(
            directory .. "/program",
            'printf \'{"version": 1, "success": true, "token_type": "x", "id_token": "%s"}\' '
              .. '"$GOOGLE_EXTERNAL_ACCOUNT_TOKEN_TYPE"'
          )
          adc(directory, {
            type = "external_account",
            audience = "a",
            subject_token_type = "the-type",
            token_url = s.url,
            credential_source = { executable = { command = "sh " .. program } },
          })
          local err = fails("auth", find, directory)
          assert.matches("sh " .. program, tostring(err), 1, true)
          assert.matches("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1", tostring(err), 1, true)
          local found = find(directory, { GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES = "1" })
          assert.equal("token-1", found:token())
          assert.equal("the-type", requests[1]:form().subject_token)
        end)
      end)
    end)

    it("keep the new refresh token of an external user", function()
      support.with_directory(function(directory)
        support.with_server(function(_, count)
          return { json = { access_token = "t" .. count, expires_in = 1, refresh_token = "r" .. count } }
        end, function(s, requests)
          adc(directory, {
            type = "external_account_authorized_user",
            client_id = "c",
            client_secret = "s",
            refresh_token = "r0",
            token_url = s.url,
          })
          local found = find(directory)
          assert.equal("t1", found:token())
          assert.equal("t2", found:token())
          assert.equal("r0", requests[1]:form().refresh_token)
          assert.equal("r1", requests[2]:form().refresh_token)
        end)
      end)
    end)

    it("are refused by name when they are not supported", function()
      support.with_directory(function(directory)
        adc(directory, { type = "gdch_service_account" })
        local err = fails("unsupported", find, directory)
        assert.matches("gdch_service_account", tostring(err), 1, true)
        assert.matches("application_default_credentials.json", tostring(err), 1, true)
        adc(directory, {
          type = "external_account",
          audience = "a",
          subject_token_type = "urn:ietf:params:aws:token-type:aws4_request",
          credential_source = { environment_id = "aws1" },
        })
        assert.matches(
          "AWS (environment_id 'aws1')",
          tostring(fails("unsupported", find, directory)),
          1,
          true
        )
        for name, source in pairs {
          ["come from AWS"] = { environment_id = "aws1", url = "http://x" },
          ["is a certificate"] = { certificate = { use_default_certificate_config = true } },
          ["neither file, url nor executable"] = { pkcs11 = "x" },
        } do
          adc(directory, {
            type = "external_account",
            audience = "a",
            subject_token_type = "t",
            credential_source = source,
          })
          err = fails("unsupported", find, directory)
          assert.matches(name, tostring(err), 1, true)
          assert.matches("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", tostring(err), 1, true)
        end
        adc(directory, { type = "external_account", audience = "a", subject_token_type = "t" })
        assert.matches("credential_source", tostring(fails("auth", find, directory)), 1, true)
        support.write(directory .. "/application_default_credentials.json", "not json")
        fails("parse", find, directory)
        support.write(directory .. "/application_default_credentials.json", "[]")
        fails("unsupported", find, directory)
      end)
    end)
  end)

  describe("are found", function()
    it("in Google's order", function()
      support.with_directory(function(directory)
        support.with_server(function(request)
          if request.headers["metadata-flavor"] ~= "Google" then
            return { json = { access_token = "from-user", expires_in = 3600 } }
          elseif request.path:find("token$") then
            return { json = { access_token = "from-metadata", expires_in = 3600 } }
          end
          return { body = "metadata-project" }
        end, function(s)
          local variables = {
            CLOUDSDK_AUTH_TOKEN_HOST = s.url .. "/token",
            GCE_METADATA_HOST = ("127.0.0.1:%d"):format(s.port),
          }
          local found = find(directory, variables)
          assert.equal("metadata", found.kind)
          assert.equal("metadata-project", found.project)
          assert.equal("from-metadata", found:token())

          support.write(directory .. "/configurations/config_default", "[core]\naccount = user@example.com\n")
          support.write(directory .. "/legacy_credentials/user@example.com/adc.json", json.encode(USER))
          found = find(directory, variables)
          assert.equal("user@example.com", found.account)
          assert.equal("from-user", found:token())

          adc(directory, USER)
          assert.matches("application_default", find(directory, variables).where)

          variables.GOOGLE_APPLICATION_CREDENTIALS =
            support.write(directory .. "/named.json", json.encode(USER))
          assert.matches("named.json", find(directory, variables).where, 1, true)

          variables.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE = support.write(directory .. "/token", "from-file\n")
          assert.equal("from-file", find(directory, variables):token())
          variables.CLOUDSDK_AUTH_ACCESS_TOKEN = "from-variable"
          assert.equal("from-variable", find(directory, variables):token())
        end)
      end)
    end)

    it("with the quota project that the environment names before the file's", function()
      support.with_directory(function(directory)
        local user = { quota_project_id = "of-the-file" }
        for key, value in pairs(USER) do
          user[key] = user[key] or value
        end
        adc(directory, user)
        assert.equal("of-the-file", find(directory).quota_project)
        assert.equal("named", find(directory, { GOOGLE_CLOUD_QUOTA_PROJECT = "named" }).quota_project)
      end)
    end)

    it("with gcloud's help at last", function()
      support.with_directory(function(directory)
        support.write(directory .. "/configurations/config_default", "[core]\naccount = user@example.com\n")
        local program =
          support.write(directory .. "/bin/gcloud", "#!/bin/sh\necho \"token of $*\" | tr ' ' -\n")
        require("ciranda.io.fs").chmod(program, 493)
        local _ <close> = environment.set({ PATH = directory .. "/bin:" .. os.getenv("PATH") })
        local token = find(directory, { PATH = directory .. "/bin" }):token()
        assert.equal("token-of-auth-print-access-token", token)
      end)
    end)

    it("nowhere: one message that names the one command to type", function()
      support.with_directory(function(directory)
        local err = fails("auth", find, directory)
        assert.matches("gcloud auth application-default login", tostring(err), 1, true)
        err = fails("auth", find, directory, { GOOGLE_APPLICATION_CREDENTIALS = directory .. "/gone.json" })
        assert.matches("gone.json", tostring(err), 1, true)
        local found =
          find(directory, { CLOUDSDK_AUTH_ACCESS_TOKEN_FILE = support.write(directory .. "/empty", " \n") })
        fails("auth", found.token, found)
      end)
    end)
  end)

  it("need not be any", function()
    local none = credentials.none()
    assert.is_nil(none:token())
    assert.same({}, (none:headers()))
  end)

  it("read times as Google writes them", function()
    assert.equal(0, kinds.parse_time("1970-01-01T00:00:00Z"))
    assert.equal(951827696, kinds.parse_time("2000-02-29T12:34:56Z"))
    assert.equal(1767225600, kinds.parse_time("2026-01-01T00:00:00.123456789Z"))
    assert.equal(4107542400, kinds.parse_time("2100-03-01T00:00:00Z"))
    for _, bad in ipairs { "2026-01-01", "2026-01-01T00:00:00+01:00", "", 7 } do
      assert.is_nil(kinds.parse_time(bad))
    end
  end)
end)
