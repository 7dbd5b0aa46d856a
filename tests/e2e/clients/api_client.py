"""google-api-python-client, built from the discovery documents in its own package, for both versions.

It returns decoded JSON as it came; every answer is checked against the same discovery document. It
asks for enums as names.
"""

import http.client
import json
import re
import uuid

import google.auth
import google_auth_httplib2
import httplib2
from google.auth import exceptions as auth_exceptions
from google.oauth2 import credentials as oauth2_credentials
from googleapiclient import discovery, errors
from googleapiclient.discovery_cache import get_static_doc
from googleapiclient.http import BatchHttpRequest

import answers
import faults
from checks import check, equal, eventually, held, matches

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]

RUNTIME = "v2-alpha-tpuv5-lite"

OPERATION = re.compile(
    r"^projects/[^/]+/locations/[^/]+/operations/operation-\d{13}(-[0-9a-f]+){3}$"
)


def label(error):
    """An exception's name, and the canonical code, or the reason in the older APIs: one class stands
    for every status here.
    """
    name = type(error).__name__
    if isinstance(error, errors.HttpError):
        body = json.loads(error.content)["error"]
        return f"{name} {body.get('status') or body['errors'][0]['reason']}"
    return name


class Service:
    """One version of the API."""

    def __init__(self, client, version):
        self.client = client
        self.cloud = client.cloud
        self.version = version
        text = get_static_doc("tpu", version)
        self.document = answers.Document(json.loads(text))
        self.api = self.build(self.authorized(google.auth.default(scopes=SCOPES)[0]))
        places = self.api.projects().locations()
        self.places, self.operations = places, places.operations()
        self.nodes, self.queued = places.nodes(), places.queuedResources()
        self.types, self.versions = places.acceleratorTypes(), places.runtimeVersions()

    def authorized(self, credentials, timeout=30):
        """What sends requests with credentials."""
        return google_auth_httplib2.AuthorizedHttp(credentials, http=httplib2.Http(timeout=timeout))

    def build(self, http):
        """The API, as its documentation says for an endpoint of one's own."""
        return discovery.build(
            "tpu",
            self.version,
            http=http,
            static_discovery=True,
            cache_discovery=False,
            client_options={"api_endpoint": self.cloud.url},
        )

    def call(self, request):
        """Execute a request and check its answer against the discovery document."""
        answer = request.execute()
        self.document.check_answer(request.methodId, answer)
        return answer

    def refuses(self, request, text=None):
        """Execute a request that is refused; the body of the refusal is checked, too."""
        error = self.client.raises(errors.HttpError, request.execute, text=text)
        answers.check_error(error.resp.status, json.loads(error.content))
        return error

    def done(self, operation):
        """The operation when it has ended."""

        def ended():
            answer = self.call(self.operations.get(name=operation["name"]))
            return answer if answer.get("done") else None

        return eventually(f"{operation['name']} has ended", ended)

    def succeeded(self, operation, kind=None):
        """The response of an operation that ends well: a message of the API, or an Empty."""
        operation = self.done(operation)
        check("error" not in operation, f"{operation['name']} failed: {operation.get('error')}")
        package = f"google.cloud.tpu.{self.version}.{kind}" if kind else "google.protobuf.Empty"
        response = operation["response"]
        equal(response["@type"], f"type.googleapis.com/{package}", "the type of the response")
        return response

    def started(self, operation, verb, target):
        """Check an operation that has just been begun, and return it."""
        metadata = operation["metadata"]
        matches(OPERATION, operation["name"], "the operation's name")
        equal(
            metadata["@type"],
            f"type.googleapis.com/google.cloud.tpu.{self.version}.OperationMetadata",
            "the type of the metadata",
        )
        equal((metadata["verb"], metadata["target"]), (verb, target), "verb and target")
        equal(metadata["apiVersion"], self.version, "the API version")
        return operation

    def pages(self, first, following, field):
        """The items of all pages, and the sizes of the pages."""
        items, sizes, request = [], [], first
        while request is not None:
            answer = self.call(request)
            sizes.append(len(answer.get(field, [])))
            items += answer.get(field, [])
            request = following(request, answer)
        return items, sizes


def node(**fields):
    return {"acceleratorType": "v5litepod-1", "runtimeVersion": RUNTIME, **fields}


def walk_catalogue(service):
    cloud = service.cloud
    project = f"projects/{cloud.project}"
    places, sizes = service.pages(
        service.places.list(name=project, pageSize=5), service.places.list_next, "locations"
    )
    check(len(sizes) > 1, "the locations came in one page")
    check(cloud.zone in [place["locationId"] for place in places], "the zone is not listed")
    check(service.call(service.places.get(name=cloud.parent)) in places, "another location")
    identity = service.call(service.places.generateServiceIdentity(parent=cloud.parent, body={}))
    check("@" in identity["identity"]["email"], "the service identity has no address")
    types, sizes = service.pages(
        service.types.list(parent=cloud.parent, pageSize=50),
        service.types.list_next,
        "acceleratorTypes",
    )
    check(len(sizes) > 1 and sizes[0] == 50, f"the accelerator types came in pages of {sizes}")
    by_name = {entry["type"]: entry for entry in types}
    equal(
        by_name["v5litepod-16"]["acceleratorConfigs"],
        [{"type": "V5LITE_POD", "topology": "4x4"}],
        "v5litepod-16",
    )
    name = f"{cloud.parent}/acceleratorTypes/v4-16"
    equal(service.call(service.types.get(name=name)), by_name["v4-16"], "the type asked for")
    service.refuses(service.types.get(name=f"{cloud.parent}/acceleratorTypes/v4-7"), "v4-7")
    versions = service.call(
        service.versions.list(parent=cloud.parent, filter=f'version="{RUNTIME}"')
    )
    equal(len(versions["runtimeVersions"]), 1, "the filtered runtime versions")
    name = f"{cloud.parent}/runtimeVersions/{RUNTIME}"
    equal(service.call(service.versions.get(name=name))["version"], RUNTIME, "the runtime version")


def multislice(service, count, prefix):
    """The parameters that the two versions spell differently."""
    field = "multisliceParams" if service.version == "v2" else "multiNodeParams"
    return {field: {"nodeCount": count, "nodeIdPrefix": prefix}}


def walk_queued_resource(service):
    """Two slices of a spot request, from the request to the end, with a request id."""
    cloud, name = service.cloud, service.client.called("multi")
    full = f"{cloud.parent}/queuedResources/{name}"
    body = {
        "tpu": {
            "nodeSpec": [
                {
                    "parent": cloud.parent,
                    "node": node(
                        networkConfig={"network": "default", "enableExternalIps": True},
                        metadata={"startup-script": "#!/bin/sh\n:\n"},
                        labels={"purpose": "walk"},
                        shieldedInstanceConfig={"enableSecureBoot": True},
                    ),
                    **multislice(service, 2, name),
                }
            ]
        },
        "spot": {},
        "queueingPolicy": {"validUntilDuration": "86400s"},
    }
    request = {
        "parent": cloud.parent,
        "queuedResourceId": name,
        "requestId": str(uuid.uuid4()),
    }
    operation = service.call(service.queued.create(body=body, **request))
    service.started(operation, "create", full)
    again = service.call(service.queued.create(body=body, **request))
    equal(again["name"], operation["name"], "the operation of the repeated request")
    service.refuses(
        service.queued.create(parent=cloud.parent, queuedResourceId=name, body=body),
        f"Resource '{full}' already exists",
    )
    response = service.succeeded(operation, "QueuedResource")
    equal(response["name"], full, "the operation's response")

    def active():
        answer = service.call(service.queued.get(name=full))
        return answer if answer["state"]["state"] == "ACTIVE" else None

    resource = eventually(f"{name} is ACTIVE", active)
    equal(resource["spot"], {}, "the tier")
    equal(resource["state"]["activeData"], {}, "the data of the state")
    equal(resource["queueingPolicy"], {"validUntilDuration": "86400s"}, "the policy")
    ids = [spec["nodeId"] for spec in resource["tpu"]["nodeSpec"]]
    equal(ids, [f"{name}-0", f"{name}-1"], "a nodeSpec a node")
    slices = [
        service.call(service.nodes.get(name=f"{cloud.parent}/nodes/{node_id}")) for node_id in ids
    ]
    for each in slices:
        equal((each["state"], each["health"]), ("READY", "HEALTHY"), f"the state of {each['name']}")
        equal(each["queuedResource"], full, "the node's queued resource")
        equal(each["acceleratorConfig"], {"type": "V5LITE_POD", "topology": "1x1"}, "its shape")
        equal(each["multisliceNode"], True, "multisliceNode")
        check(each["networkEndpoints"][0]["accessConfig"]["externalIp"], "no external address")
        check(each["schedulingConfig"].get("spot"), "a node of a spot request is not spot")
    listed = service.call(service.nodes.list(parent=cloud.parent))["nodes"]
    check(all(each in listed for each in slices), "the nodes are not listed as they are")
    attributes = service.call(
        service.nodes.getGuestAttributes(name=slices[0]["name"], body={"queryPath": "hostkeys/"})
    )
    items = attributes["guestAttributes"][0]["queryValue"]["items"]
    check("ssh-ed25519" in [item["key"] for item in items], "there is no host key")
    partial = service.queued.list(
        parent=cloud.parent, fields="queuedResources(name,state/state)"
    ).execute()
    check(
        {"name": full, "state": {"state": "ACTIVE"}} in partial["queuedResources"],
        f"a partial answer: {partial}",
    )
    if service.version == "v2alpha1":
        walk_maintenance(service, resource, slices)
    operation = service.call(service.queued.reset(name=full, body={}))
    equal(
        service.succeeded(service.started(operation, "reset", full), "QueuedResource")["name"],
        full,
        "the response of the reset",
    )
    refusal = service.refuses(service.queued.delete(name=full), "still has nodes")
    equal(refusal.resp.status, 400, "the status of a delete without force")
    with held(cloud, "delete"):
        operation = service.call(service.queued.delete(name=full, force=True))
        state = service.call(service.queued.get(name=full))["state"]
        equal(state, {"state": "DELETING", "deletingData": {}}, "the state meanwhile")
    service.succeeded(service.started(operation, "delete", full))
    service.refuses(service.queued.get(name=full), full)


def walk_maintenance(service, resource, slices):
    """What only version v2alpha1 has."""
    cloud, first = service.cloud, slices[0]["name"]
    info = service.call(service.queued.getMaintenanceInfo(name=resource["name"]))
    equal(info, {}, "the maintenance that is coming")
    operation = service.call(service.nodes.simulateMaintenanceEvent(name=first, body={}))
    service.succeeded(service.started(operation, "simulateMaintenanceEvent", first), "Node")
    info = service.call(service.queued.getMaintenanceInfo(name=resource["name"]))
    upcoming = info["nodeUpcomingMaintenances"][0]
    equal((upcoming["nodeName"], upcoming["nodeUid"]), (first, slices[0]["id"]), "whose it is")
    shown = service.call(service.nodes.get(name=first))["upcomingMaintenance"]
    equal(upcoming["upcomingMaintenance"], shown, "the maintenance, twice told")
    operation = service.call(service.nodes.performMaintenance(name=first, body={}))
    service.succeeded(service.started(operation, "performMaintenance", first), "Node")
    ready(service, slices)
    operation = service.call(
        service.queued.performMaintenanceQueuedResource(
            name=resource["name"], body={"nodeNames": [slices[1]["name"]]}
        )
    )
    service.succeeded(
        service.started(operation, "performMaintenance", resource["name"]), "QueuedResource"
    )
    ready(service, slices)
    reservations = service.places.reservations()
    listed = service.call(reservations.list(parent=cloud.parent))
    equal(listed, {}, "the reservations of a project without any")


def ready(service, slices):
    for each in slices:
        eventually(
            f"{each['name']} is READY",
            lambda name=each["name"]: (
                service.call(service.nodes.get(name=name))["state"] == "READY"
            ),
        )


def walk_node(service):
    cloud, name = service.cloud, service.client.called("node")
    full = f"{cloud.parent}/nodes/{name}"
    body = node(schedulingConfig={"preemptible": True}, tags=["a-tag"], description="é")
    alpha = service.version == "v2alpha1"
    if alpha:
        body.update(autocheckpointEnabled=True, bootDiskConfig={"diskSizeGb": "200"})
    operation = service.call(service.nodes.create(parent=cloud.parent, nodeId=name, body=body))
    service.started(operation, "create", full)
    made = service.succeeded(operation, "Node")
    equal((made["name"], made["state"]), (full, "READY"), "the response of the create")
    equal(made["description"], "é", "the description")
    if alpha:
        equal(made["bootDiskConfig"], {"diskSizeGb": "200"}, "the boot disk")
    mask = "metadata,network_config.enable_external_ips"
    change = {"metadata": {"a": "b"}, "networkConfig": {"enableExternalIps": True}}
    request = service.nodes.patch(name=full, updateMask=mask, body=change)
    with held(cloud, "patch"):
        operation = service.call(request)
        if alpha:
            # Another update while one is under way: in gcloud's experience a 409, which it ignores.
            service.refuses(request, "Another update")
    patched = service.succeeded(service.started(operation, "update", full), "Node")
    equal(patched["metadata"], {"a": "b"}, "the metadata")
    check("externalIp" in patched["networkEndpoints"][0]["accessConfig"], "no external address")
    service.refuses(service.nodes.patch(name=full, updateMask="state", body={}), "update_mask")
    operation = service.call(service.nodes.stop(name=full, body={}))
    service.succeeded(service.started(operation, "stop", full), "Node")
    operation = service.call(service.nodes.start(name=full, body={}))
    started = service.succeeded(service.started(operation, "start", full), "Node")
    equal(started["state"], "READY", "the response of the start")
    operation = service.call(service.nodes.delete(name=full))
    service.succeeded(service.started(operation, "delete", full))
    equal(service.refuses(service.nodes.get(name=full), full).resp.status, 404, "a deleted node")


def walk_pages(service):
    """A list in pages. For what is asked for here there is no capacity: it waits, and costs nothing."""
    cloud, prefix = service.cloud, service.client.called("page")
    names = [f"{cloud.parent}/queuedResources/{prefix}-{i}" for i in range(5)]
    for name in names:
        spec = {
            "parent": cloud.parent,
            "nodeId": name.rpartition("/")[2],
            "node": {"acceleratorType": "v5p-8", "runtimeVersion": "v2-alpha-tpuv5"},
        }
        operation = service.queued.create(
            parent=cloud.parent,
            queuedResourceId=spec["nodeId"],
            body={"tpu": {"nodeSpec": [spec]}},
        )
        service.succeeded(service.call(operation), "QueuedResource")
    listed, sizes = service.pages(
        service.queued.list(parent=cloud.parent, pageSize=2),
        service.queued.list_next,
        "queuedResources",
    )
    equal(sizes[:-1], [2] * (len(sizes) - 1), "the sizes of the pages")
    found = [entry["name"] for entry in listed]
    equal([name for name in found if name in names], names, "what the pages hold")
    equal(len(set(found)), len(found), "each once")
    service.refuses(service.queued.list(parent=cloud.parent, pageToken="zz"), "page token")
    waiting = next(entry for entry in listed if entry["name"] == names[0])
    equal(waiting["state"]["state"], "WAITING_FOR_RESOURCES", "the state without capacity")
    for name in names:
        service.succeeded(service.call(service.queued.delete(name=name)))


def walk_operations(service):
    cloud = service.cloud
    listed, _ = service.pages(
        service.operations.list(name=cloud.parent, pageSize=10, returnPartialSuccess=True),
        service.operations.list_next,
        "operations",
    )
    ended = next(entry for entry in listed if entry.get("done"))
    equal(service.call(service.operations.get(name=ended["name"])), ended, "the operation")
    equal(service.call(service.operations.cancel(name=ended["name"])), {}, "the cancel's answer")
    equal(service.call(service.operations.delete(name=ended["name"])), {}, "the delete's answer")
    service.refuses(service.operations.get(name=ended["name"]), ended["name"])


def walk_batch(service):
    """Several calls in one request; each has its own answer."""
    cloud, outcome = service.cloud, {}

    def note(request_id, answer, error):
        outcome[request_id] = error or answer

    batch = BatchHttpRequest(callback=note, batch_uri=f"{cloud.url}/batch")
    batch.add(service.places.get(name=cloud.parent), request_id="there")
    batch.add(service.nodes.get(name=f"{cloud.parent}/nodes/none"), request_id="not there")
    batch.add(service.versions.list(parent=cloud.parent), request_id="list")
    batch.execute(http=service.authorized(google.auth.default(scopes=SCOPES)[0]))
    service.document.check("Location", outcome["there"], "a location in a batch")
    service.document.check("ListRuntimeVersionsResponse", outcome["list"], "a list in a batch")
    equal(outcome["not there"].resp.status, 404, "the status of what is not there, in a batch")


def walk_refusals(service):
    cloud = service.cloud
    queued = {"parent": cloud.parent, "nodeId": "x", "node": node()}

    def create(body, name="x"):
        return service.queued.create(parent=cloud.parent, queuedResourceId=name, body=body)

    def create_spec(**fields):
        return create({"tpu": {"nodeSpec": [{**queued, **fields}]}})

    service.refuses(create({"tpu": {"nodeSpec": [queued, queued]}}), "exactly one node_spec")
    service.refuses(
        create({"tpu": {"nodeSpec": [queued]}, "spot": {}, "guaranteed": {}}), "only one"
    )
    service.refuses(create({"tpu": {"nodeSpec": [queued]}}, "Capital"), "queued_resource_id")
    service.refuses(create_spec(slices=2), 'Unknown name "slices"')
    service.refuses(create_spec(node={**node(), "tags": "a"}), "tags")
    service.refuses(create_spec(**multislice(service, 2, "x")), "cannot both be set")
    other = "multiNodeParams" if service.version == "v2" else "multisliceParams"
    service.refuses(
        create({"tpu": {"nodeSpec": [{"parent": cloud.parent, "node": node(), other: {}}]}}),
        f'Unknown name "{other}"',
    )
    service.refuses(
        service.nodes.list(parent=f"projects/somebody-elses/locations/{cloud.zone}"),
        "Permission 'tpu.nodes.list' denied",
    )
    listing = service.build(
        service.authorized(oauth2_credentials.Credentials(token="ya29.nobody-gave-this"))
    )
    # The client would renew the token, and says that it has nothing to renew it with.
    service.client.raises(
        auth_exceptions.RefreshError,
        listing.projects().locations().list(name=f"projects/{cloud.project}").execute,
    )
    anonymous = service.build(httplib2.Http(timeout=30)).projects().locations()
    service.refuses(
        anonymous.list(name=f"projects/{cloud.project}"),
        "missing required authentication credential",
    )
    cloud.control("PUT", "quota", {f"{cloud.zone}/TPUV6EPerProjectPerZoneForTPUAPI": 8})
    body = {"acceleratorType": "v6e-16", "runtimeVersion": "v2-alpha-tpuv6e"}
    refusal = service.refuses(
        service.nodes.create(parent=cloud.parent, nodeId="x", body=body), "has been exceeded"
    )
    check(
        any(detail["@type"].endswith("QuotaFailure") for detail in refusal.error_details),
        f"a quota's refusal without QuotaFailure: {refusal.error_details}",
    )
    cloud.control("PUT", "quota", {f"{cloud.zone}/TPUV6EPerProjectPerZoneForTPUAPI": None})


def walk_calls_that_fail(service):
    services = {
        patience: service.build(
            service.authorized(google.auth.default(scopes=SCOPES)[0], timeout=patience)
        )
        for patience in (faults.PATIENCE, faults.PATIENT)
    }

    def call(patience=faults.PATIENT):
        return services[patience].projects().locations().get(name=service.cloud.parent).execute()

    classes = dict.fromkeys(faults.API_CORE, errors.HttpError)
    faults.each_status(service.client, "locations.get", call, classes)
    faults.each_loss(
        service.client,
        "locations.get",
        call,
        reset=ConnectionResetError,
        truncate=http.client.IncompleteRead,
        timeout=TimeoutError,
    )
    faults.late(service.client, "locations.get", call)
    # The library's own repetition.
    before = service.cloud.mark()
    service.cloud.fault(kind="error", method="locations.get", status="UNAVAILABLE")
    service.places.get(name=service.cloud.parent).execute(num_retries=1)
    statuses = [entry["status"] for entry in service.cloud.requests(before) if entry.get("method")]
    equal(statuses[-2:], [503, 200], "statuses of a call that is repeated")


def walk_queue_that_fails(service):
    """Queued resources that end as FAILED or SUSPENDED: why, and what they refuse then."""
    cloud = service.cloud
    for kind, code, text in (
        ("stockout", 8, "There is no more capacity"),
        ("internal", 13, "an internal error has occurred"),
        ("quota", 8, "Quota '"),
        ("reservation", 9, "Insufficient reserved capacity"),
    ):
        name = service.client.called(kind)
        cloud.fault(kind=kind, name=name)
        state = ended(service, name, 1, "FAILED")
        error = state["failedData"]["error"]
        equal(error["code"], code, f"the code of a failure by {kind}")
        check(text in error["message"], f"a failure by {kind} without {text!r}: {error}")
        service.refuses(service.queued.reset(name=full_name(service, name)), "state ACTIVE")
        forget(service, name)
    # The guide's rare case: FAILED, with some slices alive.
    name = service.client.called("half")
    cloud.fault(kind="internal", name=name, slice=1)
    ended(service, name, 2, "FAILED")
    ready(service, [{"name": f"{cloud.parent}/nodes/{name}-0"}])
    dead = f"{cloud.parent}/nodes/{name}-1"
    listing = service.nodes.list(parent=cloud.parent)
    eventually(f"{dead} is gone", lambda: dead not in names_of(service.call(listing), "nodes"))
    service.refuses(service.nodes.get(name=dead), f"Resource '{dead}' was not found")
    forget(service, name)
    name = service.client.called("spot")
    ended(service, name, 1, "ACTIVE", spot={})
    cloud.control("POST", f"nodes/{name}:preempt", {"notice": 0})
    state = eventually(f"{name} is SUSPENDED", lambda: in_state(service, name, "SUSPENDED"))
    equal(state["stateInitiator"], "SERVICE", "who has suspended it")
    service.refuses(service.queued.reset(name=full_name(service, name)), "state ACTIVE")
    forget(service, name)


def names_of(answer, field):
    return [entry["name"] for entry in answer.get(field, [])]


def full_name(service, name):
    return f"{service.cloud.parent}/queuedResources/{name}"


def in_state(service, name, wanted):
    state = service.call(service.queued.get(name=full_name(service, name)))["state"]
    return state if state["state"] == wanted else None


def ended(service, name, count, wanted, **fields):
    """Ask for slices, and wait for a state."""
    spec = {"parent": service.cloud.parent, "node": node()}
    spec.update(multislice(service, count, name) if count > 1 else {"nodeId": name})
    body = {"tpu": {"nodeSpec": [spec]}, **fields}
    service.call(
        service.queued.create(parent=service.cloud.parent, queuedResourceId=name, body=body)
    )
    return eventually(f"{name} is {wanted}", lambda: in_state(service, name, wanted))


def forget(service, name):
    service.succeeded(
        service.call(service.queued.delete(name=full_name(service, name), force=True))
    )


def walk_failing_calls(client, version):
    walk_calls_that_fail(Service(client, version))


def walk_failing_queue(client, version):
    walk_queue_that_fails(Service(client, version))


def walk(client, version):
    service = Service(client, version)
    walk_catalogue(service)
    walk_pages(service)
    walk_queued_resource(service)
    walk_node(service)
    walk_operations(service)
    walk_batch(service)
    walk_refusals(service)
