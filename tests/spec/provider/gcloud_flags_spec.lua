local flags = require("ciranda.provider.gcloud_flags")

local function parse(text)
  return flags.parse(flags.shell_words(text))
end

local function failure(text)
  local ok, e = pcall(parse, text)
  assert.is_false(ok)
  assert.equal("usage", e.code)
  return e.message
end

describe("provider.gcloud_flags", function()
  it("cuts words as a shell does", function()
    assert.same(
      { "a", "b c", "d'e", 'f"g', "h\\i", "", "jk" },
      flags.shell_words([[a 'b c' "d'e" 'f"g' "h\\i" '' j\k]])
    )
    assert.same({ "--x=a b", "$HOME" }, flags.shell_words("--x='a b' '$HOME'"))
    assert.same({}, flags.shell_words("  \n "))
    assert.matches("' is not closed", failure("--labels='x"))
    assert.matches('" is not closed', failure('--labels="x'))
  end)

  it("reads gcloud's flags into a request", function()
    local request, global = parse(
      "--spot --network=main --subnetwork sub --internal-ips --tags a,b --labels=^:^k=v,w:l=x "
        .. "--metadata='a=b c,d=e' --valid-until-duration=6h --service-account me@x --scopes=cloud-platform,storage-ro "
        .. "--data-disk=source=projects/p/disks/d,mode=read-only --data-disk source=e --project=p --zone z --async -q"
    )
    assert.equal("spot", request.capacity)
    assert.equal("main", request.network)
    assert.equal("sub", request.subnetwork)
    assert.is_false(request.external_ips)
    assert.same({ "a", "b" }, request.tags)
    assert.same({ k = "v,w", l = "x" }, request.labels)
    assert.same({ a = "b c", d = "e" }, request.metadata)
    assert.equal("6h", request.valid_until)
    assert.same({
      "https://www.googleapis.com/auth/cloud-platform",
      "https://www.googleapis.com/auth/devstorage.read_only",
    }, request.scopes)
    assert.same(
      { { source = "projects/p/disks/d", mode = "read-only" }, { source = "e" } },
      request.data_disks
    )
    assert.same({ project = "p", zone = "z" }, global)
  end)

  it("reads networks, reservations, capacity and numbers", function()
    local request = parse(
      "--network-config=network=a,enable-external-ips=false,queue-count=4 --network-config=network=b "
        .. "--reserved --reservation-host-project=other --reservation=r --node-count=4 --autocheckpoint-enabled"
    )
    assert.same(
      { { network = "a", external_ips = false, queue_count = 4 }, { network = "b" } },
      request.networks
    )
    assert.same({ project = "other", name = "r" }, request.reservation)
    assert.equal("reserved", request.capacity)
    assert.equal(4, request.slices)
    assert.is_true(request.autocheckpoint)
    assert.equal("flex-start", parse("--provisioning-model=flex-start --max-run-duration=2h").capacity)
  end)

  for text, expected in pairs({
    ["--spott"] = "has no such flag",
    ["spot"] = "is no flag of gcloud",
    ["--spot=true"] = "takes no value",
    ["--network"] = "needs a value",
    ["--network=a --network=b"] = "is given twice",
    ["--spot --best-effort"] = "the capacity is spot already",
    ["--provisioning-model=cheap"] = "is none of standard",
    ["--node-count=two"] = "is not a whole number",
    ["--labels=novalue"] = "is not KEY=VALUE",
    ["--network-config=netwrok=a"] = 'there is no "netwrok" in it',
    ["--network-config=enable-external-ips=maybe"] = "neither true nor false",
    ["--scopes=everything"] = "is no scope",
    ["--account=me@example.com"] = "set CLOUDSDK_CORE_ACCOUNT instead",
    ["--impersonate-service-account=sa@example.com"] = "set CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT instead",
    ["--boot-disk=size=5"] = "there are confidential, image, iops, kms-key, size-gb, storage-pool, throughput",
    ["--boot-disk=size-gb=5G"] = "not a whole number",
  }) do
    it("refuses " .. text, function()
      assert.matches(expected, failure(text), 1, true)
    end)
  end
end)
