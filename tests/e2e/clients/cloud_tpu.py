"""google-cloud-tpu, version 2 of the API over its REST transport. It asks for enums as numbers.

Its answers are parsed into protocol buffers: an operation whose `@type` nobody knows, a time that is
none and the like are errors of its own.
"""

import concurrent.futures
import json

import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.api_core.future import polling
from google.api_core.retry import Retry, if_transient_error
from google.cloud import tpu_v2
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.oauth2 import service_account

import checks
import faults
from checks import check, equal, eventually, held

# The clients' own are of seconds, for a cloud that takes minutes.
POLLING = polling.DEFAULT_POLLING.with_delay(0.05, 0.3, 1.5).with_timeout(checks.DEADLINE)

RUNTIME = "v2-alpha-tpuv5-lite"

# The service's page of a guest attribute query: the namespace that holds the host keys.
HOST_KEYS = "hostkeys/"


def connect(cloud, credentials=None):
    """A client, as its documentation says for an endpoint of one's own."""
    options = ClientOptions(api_endpoint=cloud.url)
    return tpu_v2.TpuClient(transport="rest", credentials=credentials, client_options=options)


def single(**fields):
    """The smallest node there is: one worker."""
    return tpu_v2.Node(accelerator_type="v5litepod-1", runtime_version=RUNTIME, **fields)


def queued(cloud, node, node_id=None, count=0, prefix="", **fields):
    """A queued resource for one node, or for `count` slices."""
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=cloud.parent, node=node)
    if count:
        spec.multislice_params.node_count = count
        spec.multislice_params.node_id_prefix = prefix
    else:
        spec.node_id = node_id
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]), **fields)


def done(operation):
    """The result of an operation, or the exception that it ended with."""
    return operation.result(polling=POLLING)


def walk_catalogue(client, tpu):
    cloud = client.cloud
    project = f"projects/{cloud.project}"
    locations = tpu.list_locations(locations_pb2.ListLocationsRequest(name=project)).locations
    check(cloud.zone in [place.location_id for place in locations], "the zone is not listed")
    place = tpu.get_location(locations_pb2.GetLocationRequest(name=cloud.parent))
    equal(place.name, cloud.parent, "location.name")
    identity = tpu.generate_service_identity(
        tpu_v2.GenerateServiceIdentityRequest(parent=cloud.parent)
    )
    check("@" in identity.identity.email, "the service identity has no address")
    pager = tpu.list_accelerator_types(
        tpu_v2.ListAcceleratorTypesRequest(parent=cloud.parent, page_size=40)
    )
    pages = [list(page.accelerator_types) for page in pager.pages]
    check(len(pages) > 1, "the accelerator types came in one page")
    types = {entry.type_: entry for page in pages for entry in page}
    equal(len(types), sum(map(len, pages)), "accelerator types, each once")
    for name, generation in (("v2-8", "V2"), ("v3-8", "V3"), ("v4-8", "V4"), ("v5p-8", "V5P")):
        equal(types[name].accelerator_configs[0].type_.name, generation, name)
    equal(types["v5litepod-16"].accelerator_configs[0].topology, "4x4", "v5litepod-16")
    entry = tpu.get_accelerator_type(name=f"{cloud.parent}/acceleratorTypes/v6e-8")
    equal(entry, types["v6e-8"], "the type that was asked for")
    filtered = tpu.list_accelerator_types(
        tpu_v2.ListAcceleratorTypesRequest(parent=cloud.parent, filter='type="v4-8"')
    )
    equal([entry.type_ for entry in filtered], ["v4-8"], "the filtered types")
    versions = [version.version for version in tpu.list_runtime_versions(parent=cloud.parent)]
    check(RUNTIME in versions, f"{RUNTIME} is not listed")
    version = tpu.get_runtime_version(name=f"{cloud.parent}/runtimeVersions/{RUNTIME}")
    equal(version.version, RUNTIME, "the runtime version")


def walk_queued_resource(client, tpu):
    """Two slices from the request to the end; returns their node names."""
    cloud, name = client.cloud, client.called("multi")
    full = f"{cloud.parent}/queuedResources/{name}"
    node = single(
        labels={"purpose": "walk"}, metadata={"note": "é"}, tags=["a-tag"], description="a slice"
    )
    node.network_config.enable_external_ips = True
    node.service_account.scope.append("https://www.googleapis.com/auth/cloud-platform")
    request = tpu_v2.CreateQueuedResourceRequest(
        parent=cloud.parent,
        queued_resource_id=name,
        queued_resource=queued(cloud, node, count=2, prefix=name),
    )
    operation = tpu.create_queued_resource(request)
    equal(operation.metadata.verb, "create", "the operation's verb")
    equal(operation.metadata.target, full, "the operation's target")
    equal(operation.metadata.api_version, "v2", "the operation's API version")
    check(not operation.metadata.end_time, "an operation that is under way has an end")
    equal(done(operation).name, full, "the operation's response")
    check(operation.metadata.end_time >= operation.metadata.create_time, "the end of the operation")
    states = tpu_v2.QueuedResourceState.State
    seen = []

    def active():
        state = tpu.get_queued_resource(name=full).state.state
        if state not in seen:
            seen.append(state)
        return state == states.ACTIVE

    eventually(f"{name} is ACTIVE", active)
    order = [states.CREATING, states.ACCEPTED, states.WAITING_FOR_RESOURCES, states.PROVISIONING]
    equal(seen, [state for state in [*order, states.ACTIVE] if state in seen], "order of states")
    resource = tpu.get_queued_resource(name=full)
    check("active_data" in resource.state, "ACTIVE without active_data")
    specs = resource.tpu.node_spec
    equal([spec.node_id for spec in specs], [f"{name}-0", f"{name}-1"], "a node_spec a node")
    equal(specs[0].node.labels["purpose"], "walk", "the label")
    check(resource.create_time, "no create_time")
    nodes = [tpu.get_node(name=f"{cloud.parent}/nodes/{spec.node_id}") for spec in specs]
    for node in nodes:
        equal(node.state, tpu_v2.Node.State.READY, f"the state of {node.name}")
        equal(node.health, tpu_v2.Node.Health.HEALTHY, f"the health of {node.name}")
        equal(node.api_version, tpu_v2.Node.ApiVersion.V2, "the API version")
        equal(node.queued_resource, full, "the node's queued resource")
        equal(node.metadata["note"], "é", "the node's metadata")
        check(node.multislice_node, "the node is not of a Multislice environment")
        check(node.id > 0, "the node has no id")
        check(node.network_endpoints[0].access_config.external_ip, "no external address")
    check(nodes[0].id != nodes[1].id, "two nodes have one id")
    names = [node.name for node in tpu.list_nodes(parent=cloud.parent)]
    check(all(node.name in names for node in nodes), "the nodes are not listed")
    attributes = tpu.get_guest_attributes(
        tpu_v2.GetGuestAttributesRequest(name=nodes[1].name, query_path=HOST_KEYS)
    ).guest_attributes
    equal(len(attributes), 1, "guest attributes, one entry a worker")
    items = attributes[0].query_value.items
    check(any(item.key == "ssh-ed25519" for item in items), "there is no host key")
    reset = tpu.reset_queued_resource(name=full)
    client.raises(
        exceptions.BadRequest,
        tpu.delete_queued_resource,
        request=tpu_v2.DeleteQueuedResourceRequest(name=full),
        text="still has nodes",
    )
    equal(done(reset).name, full, "the response of the reset")
    with held(cloud, "delete"):
        operation = tpu.delete_queued_resource(
            request=tpu_v2.DeleteQueuedResourceRequest(name=full, force=True)
        )
        state = tpu.get_queued_resource(name=full).state.state
        equal(state, states.DELETING, "the state meanwhile")
    done(operation)
    client.raises(exceptions.NotFound, tpu.get_queued_resource, name=full, text=full)


def walk_node(client, tpu):
    """A node of its own through all its methods."""
    cloud, name = client.cloud, client.called("node")
    full, states = f"{cloud.parent}/nodes/{name}", tpu_v2.Node.State
    with held(cloud, "provision"):
        operation = tpu.create_node(
            parent=cloud.parent,
            node_id=name,
            node=tpu_v2.Node(
                runtime_version=RUNTIME,
                accelerator_config=tpu_v2.AcceleratorConfig(
                    type_=tpu_v2.AcceleratorConfig.Type.V5LITE_POD, topology="1x1"
                ),
            ),
        )
        equal(tpu.get_node(name=full).state, states.CREATING, "the state meanwhile")
    node = done(operation)
    equal((node.name, node.state), (full, states.READY), "the response of the create")
    equal(node.accelerator_type, "v5litepod-1", "the type of a 1x1 slice")
    client.raises(
        exceptions.Conflict,
        tpu.create_node,
        parent=cloud.parent,
        node_id=name,
        node=single(),
        text=f"Resource '{full}' already exists",
    )
    change = tpu_v2.Node(name=full, labels={"a": ""}, description="changed")
    updated = done(tpu.update_node(node=change, update_mask={"paths": ["labels", "description"]}))
    equal((dict(updated.labels), updated.description), ({"a": ""}, "changed"), "what was patched")
    stopped = done(tpu.stop_node(request=tpu_v2.StopNodeRequest(name=full)))
    equal(stopped.state, states.STOPPED, "the response of the stop")
    started = done(tpu.start_node(request=tpu_v2.StartNodeRequest(name=full)))
    equal(started.state, states.READY, "the response of the start")
    done(tpu.delete_node(name=full))
    client.raises(exceptions.NotFound, tpu.get_node, name=full, text=full)


def walk_pages(client, tpu):
    """A list in pages. For what is asked for here there is no capacity: it waits, and costs nothing."""
    cloud, prefix = client.cloud, client.called("page")
    names = [f"{prefix}-{i}" for i in range(5)]
    for name in names:
        node = tpu_v2.Node(accelerator_type="v5p-8", runtime_version="v2-alpha-tpuv5")
        done(
            tpu.create_queued_resource(
                parent=cloud.parent,
                queued_resource_id=name,
                queued_resource=queued(cloud, node, node_id=name),
            )
        )
    request = tpu_v2.ListQueuedResourcesRequest(parent=cloud.parent, page_size=2)
    pages = list(tpu.list_queued_resources(request).pages)
    sizes = [len(page.queued_resources) for page in pages]
    equal(sizes[:-1], [2] * (len(sizes) - 1), "the sizes of the pages")
    listed = [entry.name.rpartition("/")[2] for page in pages for entry in page.queued_resources]
    equal([name for name in listed if name.startswith(prefix)], names, "what the pages hold")
    equal(len(set(listed)), len(listed), "each once")
    everywhere = tpu.list_queued_resources(parent=f"projects/{cloud.project}/locations/-")
    check(
        set(listed) <= {entry.name.rpartition("/")[2] for entry in everywhere},
        "the list of all zones lacks something",
    )
    waiting = tpu.get_queued_resource(name=f"{cloud.parent}/queuedResources/{names[0]}")
    equal(
        waiting.state.state,
        tpu_v2.QueuedResourceState.State.WAITING_FOR_RESOURCES,
        "the state without capacity",
    )
    for name in names:
        done(tpu.delete_queued_resource(name=f"{cloud.parent}/queuedResources/{name}"))


def walk_operations(client, tpu):
    cloud = client.cloud
    listed = tpu.list_operations(operations_pb2.ListOperationsRequest(name=cloud.parent)).operations
    check(len(listed) > 0, "no operations are listed")
    finished = next(entry for entry in listed if entry.done)
    request = operations_pb2.GetOperationRequest(name=finished.name)
    equal(tpu.get_operation(request), finished, "the operation that was asked for")
    tpu.cancel_operation(operations_pb2.CancelOperationRequest(name=finished.name))
    equal(tpu.get_operation(request), finished, "an operation that had ended before the cancel")
    tpu.delete_operation(operations_pb2.DeleteOperationRequest(name=finished.name))
    client.raises(exceptions.NotFound, tpu.get_operation, request, text=finished.name)


def stranger(cloud):
    """Credentials that are signed with a key that the service account does not have."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    with open(cloud.env["GOOGLE_APPLICATION_CREDENTIALS"], encoding="ascii") as file:
        info = json.load(file)
    info["private_key"] = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    return service_account.Credentials.from_service_account_info(info)


def walk_refusals(client, tpu):
    cloud = client.cloud
    wrong = tpu_v2.Node(accelerator_type="v5litepod-3", runtime_version=RUNTIME)
    client.raises(
        exceptions.BadRequest,
        tpu.create_node,
        parent=cloud.parent,
        node_id="x",
        node=wrong,
        text=f'CloudTpu received an invalid AcceleratorType, "v5litepod-3" for zone "{cloud.zone}"',
    )
    client.raises(
        exceptions.Forbidden,
        tpu.list_nodes,
        parent=f"projects/somebody-elses/locations/{cloud.zone}",
        text="Permission 'tpu.nodes.list' denied",
    )
    client.raises(
        exceptions.Forbidden,
        tpu.list_nodes,
        parent=f"projects/{cloud.project}/locations/mars-north1-a",
        text="is not found or access is unauthorized",
    )
    client.raises(
        exceptions.Unauthorized,
        connect(cloud, stranger(cloud)).list_nodes,
        parent=cloud.parent,
        text="invalid authentication credentials",
    )
    cloud.control("PUT", "quota", {f"{cloud.zone}/TPUV6EPerProjectPerZoneForTPUAPI": 8})
    big = tpu_v2.Node(accelerator_type="v6e-16", runtime_version="v2-alpha-tpuv6e")
    client.raises(
        exceptions.TooManyRequests,
        tpu.create_node,
        parent=cloud.parent,
        node_id="x",
        node=big,
        text="Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8",
    )
    cloud.control("PUT", "quota", {f"{cloud.zone}/TPUV6EPerProjectPerZoneForTPUAPI": None})
    two = queued(cloud, single(), node_id="x")
    two.tpu.node_spec.append(two.tpu.node_spec[0])
    client.raises(
        exceptions.BadRequest,
        tpu.create_queued_resource,
        parent=cloud.parent,
        queued_resource_id="x",
        queued_resource=two,
        text="exactly one node_spec",
    )


def walk_retries(client, tpu):
    """What passes is asked again, by the client's own rules; what does not pass in time is told."""
    cloud = client.cloud
    retry = Retry(predicate=if_transient_error, initial=0.05, maximum=0.2, timeout=checks.DEADLINE)
    before = cloud.mark()
    cloud.fault(kind="error", method="nodes.list", status="UNAVAILABLE", count=2)
    list(tpu.list_nodes(parent=cloud.parent, retry=retry))
    statuses = [entry["status"] for entry in cloud.requests(before) if entry.get("method")]
    equal(statuses, [503, 503, 200], "statuses of a call that is repeated")
    before = cloud.mark()
    cloud.fault(kind="error", method="nodes.list", status="UNAUTHENTICATED")
    list(tpu.list_nodes(parent=cloud.parent))
    statuses = [entry["status"] for entry in cloud.requests(before) if entry.get("method")]
    equal(statuses, [401, 200], "statuses of a call whose token is renewed")
    cloud.fault(kind="error", method="nodes.list", status="UNAVAILABLE", probability=1)
    client.raises(
        exceptions.RetryError,
        tpu.list_nodes,
        parent=cloud.parent,
        retry=retry.with_timeout(0.3),
        text="Internal error. Please try again",
    )
    cloud.clear_faults()


def walk_calls_that_fail(client, tpu):
    cloud = client.cloud

    def call(patience=faults.PATIENT):
        return list(tpu.list_nodes(parent=cloud.parent, timeout=patience))

    faults.each_status(client, "nodes.list", call, faults.API_CORE)
    faults.each_loss(
        client,
        "nodes.list",
        call,
        reset=requests.exceptions.ConnectionError,
        truncate=requests.exceptions.ChunkedEncodingError,
        timeout=requests.exceptions.ReadTimeout,
    )
    faults.late(client, "nodes.list", call)


def walk_provisioning_that_fails(client, tpu):
    cloud, name = client.cloud, client.called("denied")

    def create():
        return done(tpu.create_node(parent=cloud.parent, node_id=name, node=single()))

    def gone():
        try:
            tpu.get_node(name=f"{cloud.parent}/nodes/{name}")
        except exceptions.NotFound:
            return True
        return False

    for kind, expected, text in (
        ("stockout", exceptions.ResourceExhausted, f'no more capacity in the zone "{cloud.zone}"'),
        ("internal", exceptions.InternalServerError, "an internal error has occurred"),
        ("quota", exceptions.ResourceExhausted, "TPUV5sLitepodServingPerProjectPerZoneForTPUAPI"),
        ("reservation", exceptions.FailedPrecondition, "Insufficient reserved capacity"),
    ):
        faults.expect(client, {"kind": kind, "name": name}, expected, create, text=text)
        eventually("the node that could not be had is gone", gone)
    quota = f"{cloud.zone}/TPUV5sLitepodServingPerProjectPerZoneForTPUAPI"
    for limits, place, expected, text in (
        ("capacity", f"{cloud.zone}/v5litepod", exceptions.ResourceExhausted, "no more capacity"),
        ("quota", quota, exceptions.TooManyRequests, "has been exceeded. Limit: 0"),
    ):
        cloud.control("PUT", limits, {place: 0})
        client.raises(expected, create, text=text)
        cloud.control("PUT", limits, {place: None})
        eventually("the node that could not be had is gone", gone)
    faults.struck.update(("capacity", "quota limit"))


def walk_operation_that_lags(client, tpu):
    """A create operation that is not done although the node is READY long since."""
    cloud, name = client.cloud, client.called("lagging")
    full, ready = f"{cloud.parent}/nodes/{name}", tpu_v2.Node.State.READY
    cloud.fault(kind="slow_operation", method="nodes.create", seconds=checks.HOLD)
    operation = tpu.create_node(parent=cloud.parent, node_id=name, node=single())
    eventually(f"{name} is READY", lambda: tpu.get_node(name=full).state == ready)
    client.raises(concurrent.futures.TimeoutError, operation.result, timeout=0.3)
    check(not operation.operation.done, "the operation is done after all")
    faults.struck.add("slow_operation")
    checks.let_go(cloud)
    equal(done(operation).state, ready, "the response at last")
    done(tpu.delete_node(name=full))


def walk_nodes_that_fail(client, tpu):
    """Nodes that the service takes away: what they refuse then, in the service's words."""
    cloud, states = client.cloud, tpu_v2.Node.State
    spot = single(scheduling_config=tpu_v2.SchedulingConfig(spot=True))
    for action, node, state in (
        ("preempt", spot, states.PREEMPTED),
        ("lose", single(), states.TERMINATED),
        ("maintain", single(), states.RESTARTING),
    ):
        name = client.called(action)
        full = f"{cloud.parent}/nodes/{name}"
        done(tpu.create_node(parent=cloud.parent, node_id=name, node=node))
        with held(cloud, "reset"):  # what a machine takes to restart
            cloud.control("POST", f"nodes/{name}:{action}", {"notice": 0})
            eventually(
                f"{name} is {state.name}",
                lambda: tpu.get_node(name=full).state == state,  # noqa: B023
            )
            client.raises(
                exceptions.BadRequest,
                tpu.stop_node,
                request=tpu_v2.StopNodeRequest(name=full),
                text=f"stop is not supported while in state {state.name}",
            )
        if action != "maintain":
            change = tpu.update_node(node=tpu_v2.Node(name=full), update_mask={"paths": ["labels"]})
            client.raises(
                exceptions.InvalidArgument,
                done,
                change,
                text=f"update is not supported while in state {state.name}",
            )
        faults.struck.add(action)
        done(tpu.delete_node(name=full))


def walk(client):
    tpu = connect(client.cloud)
    walk_catalogue(client, tpu)
    walk_pages(client, tpu)
    walk_queued_resource(client, tpu)
    walk_node(client, tpu)
    walk_operations(client, tpu)
    walk_refusals(client, tpu)
    walk_retries(client, tpu)


def walk_faults(client):
    tpu = connect(client.cloud)
    walk_calls_that_fail(client, tpu)
    walk_provisioning_that_fails(client, tpu)
    walk_operation_that_lags(client, tpu)
    walk_nodes_that_fail(client, tpu)
