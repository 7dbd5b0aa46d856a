"""What a user of google-api-python-client writes to list queued resources: name and state of each.

With `fields` as its argument it asks for these alone.
"""

import os
import sys

import google.auth
import googleapiclient.discovery

credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
api = googleapiclient.discovery.build(
    "tpu",
    "v2",
    credentials=credentials,
    cache_discovery=False,
    client_options={"api_endpoint": os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"].rstrip("/")},
)
resources = api.projects().locations().queuedResources()
parameters = {
    "parent": "projects/{CLOUDSDK_CORE_PROJECT}/locations/{CLOUDSDK_COMPUTE_ZONE}".format(**os.environ)
}
if sys.argv[1:] == ["fields"]:
    parameters["fields"] = "queuedResources(name,state/state),nextPageToken"
request = resources.list(**parameters)
found = []
while request is not None:
    page = request.execute()
    found.extend(page.get("queuedResources", []))
    request = resources.list_next(request, page)
for resource in sorted(found, key=lambda resource: resource["name"]):
    print(resource["name"], resource["state"]["state"], sep="\t")
