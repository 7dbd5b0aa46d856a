"""google-api-python-client for what else TPU clients call: Compute Engine, Resource Manager, OS Login, and the lists
of version 1 of the TPU API.
"""

import json
import time

import google.auth
import google_auth_httplib2
import httplib2
import paramiko
from googleapiclient import discovery, errors
from googleapiclient.discovery_cache import get_static_doc

import answers
import api_client
import cloud_tpu
from checks import check, equal
from ssh import Worker

label = api_client.label


class Api:
    """An API by its own discovery document; answers are checked against it."""

    def __init__(self, client, name, version, endpoint, defaults=False):
        self.client = client
        self.document = answers.Document(json.loads(get_static_doc(name, version)), defaults)
        credentials, _ = google.auth.default(scopes=api_client.SCOPES)
        self.account = credentials.service_account_email
        self.resources = discovery.build(
            name,
            version,
            http=google_auth_httplib2.AuthorizedHttp(credentials, http=httplib2.Http(timeout=30)),
            static_discovery=True,
            cache_discovery=False,
            client_options={"api_endpoint": endpoint},
        )

    def call(self, request):
        answer = request.execute()
        self.document.check_answer(request.methodId, answer)
        return answer

    def refuses(self, request, text):
        return self.client.raises(errors.HttpError, request.execute, text=text)


def public_key():
    """A new key, and the line that stands for it."""
    key = paramiko.ECDSAKey.generate()
    return key, f"{key.get_name()} {key.get_base64()}"


def walk_compute(client):
    """The project's metadata, changed under the guard of its fingerprint: OS Login is on afterwards.
    Returns what turns it off again.
    """
    cloud = client.cloud
    endpoint = cloud.env["CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"]
    api = Api(client, "compute", "v1", endpoint, defaults=True)
    projects, operations = api.resources.projects(), api.resources.globalOperations()
    project = api.call(projects.get(project=cloud.project))
    equal(project["name"], cloud.project, "the project")
    metadata = project["commonInstanceMetadata"]
    body = {**metadata, "items": [{"key": "enable-oslogin", "value": "TRUE"}]}
    change = projects.setCommonInstanceMetadata(project=cloud.project, body=body)
    operation = api.call(change)
    for request in (operations.get, operations.wait):
        shown = api.call(request(project=cloud.project, operation=operation["name"]))
        equal(shown["status"], "DONE", "the state of the operation")
    api.refuses(change, "fingerprint does not match")
    api.refuses(projects.get(project="somebody-elses"), "was not found")
    again = api.call(projects.get(project=cloud.project))
    equal(again["commonInstanceMetadata"]["items"], body["items"], "the metadata")
    return lambda: api.call(
        projects.setCommonInstanceMetadata(project=cloud.project, body={"items": []})
    )


def walk_resource_manager(client):
    cloud = client.cloud
    for version in ("v1", "v3"):
        endpoint = cloud.env["CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER"]
        api = Api(client, "cloudresourcemanager", version, endpoint)
        projects = api.resources.projects()
        if version == "v1":
            name, listing, arguments = cloud.project, projects.list(), {"projectId": cloud.project}
            other = {"projectId": "somebody-elses"}
        else:
            name, listing = f"projects/{cloud.project}", projects.search()
            arguments, other = {"name": name}, {"name": "projects/somebody-elses"}
        project = api.call(projects.get(**arguments))
        equal(project["projectId"], cloud.project, "the project")
        equal(api.call(listing)["projects"], [project], "all projects")
        body = {"permissions": ["tpu.nodes.create"]}
        granted = api.call(projects.testIamPermissions(resource=name, body=body))
        equal(granted, body, "the permissions")
        api.refuses(projects.get(**other), "does not have permission")
        api.refuses(projects.testIamPermissions(resource=name, body={}), "permission")


def walk_os_login(client, worker):
    """Keys of an account, and a login with one of them: OS Login is enabled in the project's metadata."""
    cloud = client.cloud
    endpoint = cloud.env["CLOUDSDK_API_ENDPOINT_OVERRIDES_OSLOGIN"]
    api = Api(client, "oslogin", "v1", endpoint)
    users = api.resources.users()
    keys, name = users.sshPublicKeys(), f"users/{api.account}"
    worker.key, line = public_key()
    body = {"key": line, "expirationTimeUsec": str(int((time.time() + 86400) * 1e6))}
    answer = api.call(users.importSshPublicKey(parent=name, projectId=cloud.project, body=body))
    account = answer["loginProfile"]["posixAccounts"][0]
    check(account["primary"], "the only account is not the primary one")
    equal(
        api.call(users.getLoginProfile(name=name)),
        answer["loginProfile"],
        "the profile that the import has answered with",
    )
    worker.user = account["username"]
    equal(worker.run("whoami"), account["username"] + "\n", "who is logged in")
    (fingerprint,) = answer["loginProfile"]["sshPublicKeys"]
    key = f"{name}/sshPublicKeys/{fingerprint}"
    equal(api.call(keys.get(name=key))["key"], line, "the key")
    soon = str(int((time.time() + 43200) * 1e6))
    patched = api.call(keys.patch(name=key, body={"expirationTimeUsec": soon}))
    equal(patched["expirationTimeUsec"], soon, "the expiry")
    _, second = public_key()
    create = keys.create(parent=name, body={"key": second})
    api.call(create)
    api.refuses(create, "already exists")
    equal(api.call(keys.delete(name=key)), {}, "the delete's answer")
    api.refuses(keys.get(name=key), "was not found")
    client.raises(paramiko.AuthenticationException, worker.run, "true")
    api.refuses(
        users.importSshPublicKey(parent=name, body={"key": "none"}), "Invalid SSH public key"
    )
    api.refuses(users.getLoginProfile(name="users/other@example.com"), "does not have permission")


def walk_version_1(client):
    """Where there are TPUs and which, as gcloud asks in its commands without alpha."""
    cloud = client.cloud
    api = Api(client, "tpu", "v1", cloud.url)
    places = api.resources.projects().locations()
    check(api.call(places.get(name=cloud.parent)), "there is no location")
    check(api.call(places.list(name=f"projects/{cloud.project}"))["locations"], "no locations")
    types = places.acceleratorTypes()
    listed = api.call(types.list(parent=cloud.parent))["acceleratorTypes"]
    shown = api.call(types.get(name=f"{cloud.parent}/acceleratorTypes/v4-8"))
    check(shown in listed, f"{shown} is not listed")


def walk(client):
    walk_version_1(client)
    walk_resource_manager(client)
    restore = walk_compute(client)
    try:
        tpu = cloud_tpu.connect(client.cloud)
        worker = Worker(client, tpu, cloud_tpu.single())
        walk_os_login(client, worker)
        cloud_tpu.done(tpu.delete_node(name=worker.name))
    finally:
        restore()
