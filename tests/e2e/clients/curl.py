"""curl with the body of Google's guide to Multislice, its missing comma put in: snake_case throughout."""

import json
import os
import subprocess
import tempfile

import answers
from api_client import OPERATION
from checks import check, equal, eventually, matches

# The four capacities, as the guide's body has them or the API's reference names them.
TIERS = {
    "reserved": {"guaranteed": {"reserved": True}},
    "spot": {"spot": {}},
    "on-demand": {},
    "best-effort": {"best_effort": {}},
}


def body(parent, prefix, **tier):
    """The guide's request."""
    return {
        **tier,
        "tpu": {
            "node_spec": [
                {
                    "parent": parent,
                    "node": {
                        "accelerator_type": "v5litepod-1",
                        "runtime_version": "v2-alpha-tpuv5-lite",
                        "network_config": {
                            "network": "default",
                            "subnetwork": "default",
                            "enable_external_ips": True,
                        },
                        "tags": ["example-tag-1"],
                        "metadata": {"startup-script": "#!/bin/bash\n"},
                    },
                    "multi_node_params": {"node_count": 2, "node_id_prefix": prefix},
                }
            ]
        },
    }


class Curl:
    """Runs curl as the guide does."""

    def __init__(self, cloud, directory):
        self.cloud = cloud
        self.directory = directory

    def run(self, verb, target, request=None, query=(), token=None):
        """Status and decoded answer of a call; a request that is a string is sent as it stands."""
        command = ["curl", "-sS", "--max-time", "30", "-w", "\n%{http_code}", "-X", verb]
        command += ["-H", f"Authorization: Bearer {token or self.cloud.token()}"]
        command += ["-H", "Content-Type: application/json"]
        if request is not None:
            path = os.path.join(self.directory, "queued-resource-req.json")
            with open(path, "w", encoding="utf-8") as file:
                file.write(request if isinstance(request, str) else json.dumps(request))
            command += ["-d", f"@{path}"]
        command.append(f"{self.cloud.url}/{target}" + ("?" + "&".join(query) if query else ""))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        check(done.returncode == 0, f"curl ended with {done.returncode}: {done.stderr}")
        text, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(text)


def walk_tier(curl, name, tier, number_in_parent):
    cloud = curl.cloud
    project = cloud_number(cloud) if number_in_parent else cloud.project
    spelling = "queued_resource_id" if number_in_parent else "queuedResourceId"
    request = body(f"projects/{project}/locations/{cloud.zone}", name, **tier)
    full = f"{cloud.parent}/queuedResources/{name}"
    status, operation = curl.run(
        "POST", f"v2alpha1/{cloud.parent}/queuedResources", request, [f"{spelling}={name}"]
    )
    equal(status, 200, f"the status of the create: {operation}")
    matches(OPERATION, operation["name"], "the operation's name")
    metadata = operation["metadata"]
    equal(
        (metadata["target"], metadata["verb"], metadata["apiVersion"]),
        (full, "create", "v2alpha1"),
        "the operation's metadata",
    )

    def active():
        status, answer = curl.run("GET", f"v2/{full}")
        equal(status, 200, f"the status of the get: {answer}")
        return answer if answer["state"]["state"] == "ACTIVE" else None

    resource = eventually(f"{name} is ACTIVE", active)
    specs = resource["tpu"]["nodeSpec"]
    equal([spec["nodeId"] for spec in specs], [f"{name}-0", f"{name}-1"], "a nodeSpec a node")
    equal(specs[0]["node"]["networkConfig"]["enableExternalIps"], True, "camelCase in the answer")
    status, node = curl.run("GET", f"v2alpha1/{cloud.parent}/nodes/{name}-1")
    equal((status, node["state"], node["tags"]), (200, "READY", ["example-tag-1"]), "the node")
    delete(curl, full)


def delete(curl, full):
    status, operation = curl.run("DELETE", f"v2alpha1/{full}", query=["force=true"])
    equal(status, 200, f"the status of the delete: {operation}")
    eventually(f"{full} is gone", lambda: curl.run("GET", f"v2alpha1/{full}")[0] == 404, every=0.2)


def cloud_number(cloud):
    """The project's number, as a worker would read it from the metadata server."""
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "30", "-H", "Metadata-Flavor: Google"]
        + [
            f"http://{cloud.env['GCE_METADATA_HOST']}/computeMetadata/v1/project/numeric-project-id"
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    check(done.stdout.isdigit(), f"the project's number is {done.stdout!r}")
    return done.stdout


def walk_refusals(curl, name):
    cloud = curl.cloud
    target = f"v2alpha1/{cloud.parent}/queuedResources"
    query = [f"queued_resource_id={name}"]

    def refused(status, text, request, verb="POST", where=target, **options):
        got, answer = curl.run(verb, where, request, query, **options)
        equal(got, status, f"the status of {answer}")
        answers.check_error(status, answer)
        check(text in answer["error"]["message"], f"a refusal without {text!r}: {answer}")

    two = body(cloud.parent, name)
    two["tpu"]["node_spec"] *= 2
    refused(400, "exactly one node_spec", two)
    refused(400, "only one of", body(cloud.parent, name, spot={}, guaranteed={"reserved": True}))
    refused(400, 'Unknown name "slices"', {**body(cloud.parent, name), "slices": 2})
    without_comma = json.dumps(body(cloud.parent, name)).replace('"], "metadata"', '"] "metadata"')
    refused(400, "Invalid JSON payload received", without_comma)
    version_2 = body(cloud.parent, name)
    refused(
        400, 'Unknown name "multi_node_params"', version_2, where=target.replace("v2alpha1", "v2")
    )
    refused(401, "invalid authentication credentials", body(cloud.parent, name), token="ya29.none")
    refused(404, "not found", None, verb="PUT")


def enums(curl):
    """Enums are names unless the client asks for numbers."""
    target = f"v2/{curl.cloud.parent}/acceleratorTypes/v5litepod-8"
    for query, wanted in (
        ([], "V5LITE_POD"),
        (["alt=json"], "V5LITE_POD"),
        (["$alt=json;enum-encoding=int"], 9),
        (["%24alt=json%3Benum-encoding%3Dint"], 9),
    ):
        status, answer = curl.run("GET", target, query=query)
        got = answer["acceleratorConfigs"][0]["type"]
        equal((status, got), (200, wanted), f"the type, asked for with {query}")


def walk(client):
    cloud = client.cloud
    cloud.control("PUT", "capacity", {f"{cloud.zone}/v5litepod/reserved": 8})
    with tempfile.TemporaryDirectory() as directory:
        curl = Curl(cloud, directory)
        for i, tier in enumerate(TIERS):
            walk_tier(curl, client.called(tier), TIERS[tier], i % 2 == 0)
        walk_refusals(curl, client.called("refused"))
        enums(curl)
    cloud.control("PUT", "capacity", {f"{cloud.zone}/v5litepod/reserved": None})
