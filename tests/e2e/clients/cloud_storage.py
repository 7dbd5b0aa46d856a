"""google-cloud-storage, pointed at the simulator by STORAGE_EMULATOR_HOST as its documentation says.

What it keeps of an answer is checked against the discovery document of Cloud Storage.
"""

import datetime
import io
import json
import os

import google.auth
import requests
from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY
from googleapiclient.discovery_cache import get_static_doc

import answers
import faults
from checks import check, equal

# A name with everything that has to be escaped somewhere.
ODD_NAME = "a dir/b+c/%41 ç?&#=;:@,.txt"

# The smallest chunk of a resumable upload.
GRANULE = 256 * 1024


class Service:
    """The client, and the document that its answers are checked against."""

    def __init__(self, client):
        self.client = client
        self.cloud = client.cloud
        self.raises = client.raises
        self.document = answers.Document(json.loads(get_static_doc("storage", "v1")), defaults=True)
        self.storage = storage.Client()

    def known(self, schema, resource):
        """A bucket or an object whose properties are those of the document."""
        self.document.check(schema, resource._properties, type(resource).__name__)
        return resource


def walk_buckets(service):
    name = service.client.called("bucket")
    bucket = service.known("Bucket", service.storage.create_bucket(name))
    check(service.storage.lookup_bucket(f"{name}-absent") is None, "a bucket that is not there")
    service.raises(exceptions.Conflict, service.storage.create_bucket, name, text="already own it")
    service.raises(exceptions.NotFound, service.storage.get_bucket, f"{name}-absent")
    service.raises(exceptions.BadRequest, service.storage.create_bucket, "Capital", text="Capital")
    equal([each.name for each in service.storage.list_buckets(prefix=name)], [name], "the buckets")
    check(bucket.exists() and not service.storage.bucket(f"{name}-absent").exists(), "exists()")
    again = service.known("Bucket", service.storage.get_bucket(name))
    equal(
        (again.name, again.location, again.storage_class, again.metageneration),
        (name, "US", "STANDARD", 1),
        "the bucket",
    )
    check(isinstance(again.time_created, datetime.datetime), "the bucket has no time")
    again.labels = {"purpose": "walk", "other": "x"}
    again.patch(if_metageneration_match=1)
    service.known("Bucket", again)
    equal((again.labels, again.metageneration), ({"purpose": "walk", "other": "x"}, 2), "labels")
    again.labels = {"purpose": "walked"}
    again.update()
    again.reload()
    equal(again.labels, {"purpose": "walked"}, "labels that were replaced")
    service.raises(exceptions.PreconditionFailed, again.patch, if_metageneration_match=1)
    return bucket


def walk_objects(service, bucket):
    raises, body = service.raises, b"0123456789" * 1000
    blob = bucket.blob(ODD_NAME)
    blob.metadata = {"run": "1", "ключ": "значение"}
    blob.cache_control = "no-store"
    blob.content_language = "pt"
    blob.content_disposition = "attachment"
    blob.upload_from_string(
        body, content_type="text/plain", checksum="crc32c", if_generation_match=0
    )
    service.known("Object", blob)
    first = blob.generation
    raises(
        exceptions.PreconditionFailed,
        bucket.blob(ODD_NAME).upload_from_string,
        b"x",
        if_generation_match=0,
        text="did not hold",
    )
    again = service.known("Object", bucket.get_blob(ODD_NAME))
    equal(
        (again.size, again.content_type, again.cache_control, again.metadata["ключ"]),
        (len(body), "text/plain", "no-store", "значение"),
        "the object",
    )
    equal((again.content_language, again.content_disposition), ("pt", "attachment"), "its headers")
    check(again.md5_hash and again.crc32c and again.etag, "the object has no hashes")
    equal(again.download_as_bytes(), body, "the bytes")
    equal(again.download_as_bytes(start=10, end=19), body[10:20], "a range of them")
    equal(again.download_as_bytes(start=-5, raw_download=True), body[-5:], "the last of them")
    raises(exceptions.RequestRangeNotSatisfiable, again.download_as_bytes, start=len(body))
    raises(exceptions.NotModified, again.reload, if_generation_not_match=first)
    again.metadata = {"run": "2", "ключ": None}
    again.patch(if_metageneration_match=1)
    equal((again.metadata, again.metageneration), ({"run": "2"}, 2), "metadata that was patched")
    again.metadata, again.content_type = {"only": "this"}, "text/html"
    again.update()
    fresh = bucket.get_blob(ODD_NAME)
    equal(
        (fresh.metadata, fresh.content_type), ({"only": "this"}, "text/html"), "what was replaced"
    )
    equal(fresh.generation, first, "the generation after changes of the metadata")
    fresh.upload_from_string(b"new", content_type="text/plain")
    check(fresh.generation > first, "a new content has no new generation")
    raises(
        exceptions.NotFound,
        bucket.blob(ODD_NAME, generation=first).download_as_bytes,
        text=str(first),
    )
    wrong = bucket.blob("wrong-hash")
    wrong.md5_hash = "AAAAAAAAAAAAAAAAAAAAAA=="
    raises(exceptions.BadRequest, wrong.upload_from_string, b"x", text="MD5")
    check(not wrong.exists(), "an object whose hash was wrong is there")
    raises(exceptions.NotFound, blob.delete, text=f"generation={first}")
    bucket.delete_blob(ODD_NAME)
    raises(exceptions.NotFound, bucket.delete_blob, ODD_NAME, text="No such object")


def walk_copies(service, bucket):
    parts = [bucket.blob(f"part-{i}") for i in range(3)]
    for i, part in enumerate(parts):
        part.upload_from_string(bytes([65 + i]) * 1000, content_type="text/x-part")
    whole = bucket.blob("whole")
    whole.content_type = "text/x-whole"
    whole.compose(parts, if_generation_match=0)
    service.known("Object", whole)
    equal(whole.component_count, 3, "the components")
    check(whole.md5_hash is None, "a composite has an MD5")
    content = b"A" * 1000 + b"B" * 1000 + b"C" * 1000
    equal(whole.download_as_bytes(), content, "the parts one after the other")
    target = bucket.blob("rewritten")
    token, done, total = target.rewrite(whole)
    equal((token, done, total), (None, 3000, 3000), "the rewrite")
    copied = service.known("Object", bucket.copy_blob(target, bucket, "copied"))
    equal(copied.download_as_bytes(), content, "the copy")
    copied.update_storage_class("NEARLINE")
    equal(bucket.get_blob("copied").storage_class, "NEARLINE", "the storage class")
    renamed = bucket.rename_blob(copied, "renamed")
    equal([bucket.blob("copied").exists(), renamed.exists()], [False, True], "the renamed object")
    bucket.delete_blobs([renamed, target, whole])


def walk_listing(service, bucket):
    names = [f"run/{step}/{part}" for step in range(3) for part in ("a", "b.txt", "c.txt")]
    for name in names:
        bucket.blob(name).upload_from_string(b"x")
    listed = [blob.name for blob in bucket.list_blobs(prefix="run/")]
    equal(listed, names, "the objects, in order")
    pager = bucket.list_blobs(prefix="run/", delimiter="/")
    equal((list(pager), sorted(pager.prefixes)), ([], ["run/0/", "run/1/", "run/2/"]), "prefixes")
    sizes, found = [], []
    for page in bucket.list_blobs(prefix="run/", page_size=4).pages:
        blobs = [service.known("Object", blob) for blob in page]
        sizes.append(len(blobs))
        found += [blob.name for blob in blobs]
    equal((sizes, found), ([4, 4, 1], names), "pages of four")
    matched = [blob.name for blob in bucket.list_blobs(match_glob="run/*/c.txt")]
    equal(matched, [name for name in names if name.endswith("c.txt")], "what matches a glob")
    bounded = bucket.list_blobs(start_offset="run/1", end_offset="run/2", fields="items(name)")
    equal([blob.name for blob in bounded], names[3:6], "what lies between two offsets")
    # Several calls in one request.
    with service.storage.batch():
        for name in names:
            bucket.blob(name).delete()
    equal(list(bucket.list_blobs(prefix="run/")), [], "what a batch of deletes has left")
    service.raises(exceptions.NotFound, delete_in_batch, service, bucket.blob(names[0]))


def delete_in_batch(service, blob):
    with service.storage.batch():
        blob.delete()


def walk_uploads(service, bucket):
    """Resumable uploads, with an answer lost on the way."""
    cloud, body = service.cloud, os.urandom(4 * GRANULE + 17)
    blob = bucket.blob("resumable", chunk_size=GRANULE)
    blob.upload_from_file(io.BytesIO(body), checksum="crc32c")
    service.known("Object", blob)
    equal((blob.size, blob.download_as_bytes() == body), (len(body), True), "what was uploaded")
    for kind in ("reset", "error"):
        before = cloud.mark()
        blob = bucket.blob(f"after-{kind}", chunk_size=GRANULE)
        reader = LosingReader(body, lambda kind=kind: cloud.fault(**LOSSES[kind]))
        blob.upload_from_file(reader, checksum="md5", retry=DEFAULT_RETRY)
        equal(blob.download_as_bytes() == body, True, f"what was uploaded in spite of a {kind}")
        log = [entry for entry in cloud.requests(before) if entry.get("method")]
        lost = [entry for entry in log if entry.get("fault") or entry["status"] == 503]
        equal(len(lost), 1, f"answers lost by a {kind}")
    with bucket.blob("written").open("wb", chunk_size=GRANULE, ignore_flush=True) as file:
        for at in range(0, len(body), 100000):
            file.write(body[at : at + 100000])
    with bucket.blob("written").open("rb", chunk_size=GRANULE) as file:
        file.seek(GRANULE - 5)
        equal(file.read(10), body[GRANULE - 5 : GRANULE + 5], "what is read like a file")
    session = bucket.blob("session").create_resumable_upload_session(size=len(body))
    part = requests.put(
        session,
        data=body[: GRANULE + 1],
        headers={"Content-Range": f"bytes 0-{GRANULE}/{len(body)}"},
        timeout=30,
    )
    equal((part.status_code, part.headers["Range"]), (308, f"bytes=0-{GRANULE - 1}"), "a part")
    asked = requests.put(session, headers={"Content-Range": f"bytes */{len(body)}"}, timeout=30)
    equal((asked.status_code, asked.headers["Range"]), (308, f"bytes=0-{GRANULE - 1}"), "the state")
    rest = requests.put(
        session,
        data=body[GRANULE:],
        headers={"Content-Range": f"bytes {GRANULE}-{len(body) - 1}/{len(body)}"},
        timeout=30,
    )
    equal(rest.status_code, 200, "the rest")
    equal(bucket.blob("session").download_as_bytes() == body, True, "what the session has stored")


LOSSES = {
    "reset": {"kind": "reset", "method": "storage.objects.insert"},
    "error": {"kind": "error", "method": "storage.objects.insert", "status": "UNAVAILABLE"},
}


class LosingReader(io.BytesIO):
    """A file that arranges for a loss when its third chunk is read."""

    def __init__(self, data, lose):
        super().__init__(data)
        self.lose = lose
        self.reads = 0

    def read(self, *arguments):
        self.reads += 1
        if self.reads == 3:
            self.lose()
        return super().read(*arguments)


def walk_credentials(service, bucket):
    """Credentials are not asked for, as by every emulator; those that are sent must be good."""
    credentials, _ = google.auth.default(
        scopes=["https://www.googleapis.com/auth/devstorage.read_only"]
    )
    client = storage.Client(credentials=credentials)
    equal(client.get_bucket(bucket.name).name, bucket.name, "the bucket, with credentials")
    answer = requests.get(
        f"{service.cloud.url}/storage/v1/b/{bucket.name}",
        headers={"Authorization": "Bearer ya29.nobody-gave-this"},
        timeout=30,
    )
    equal(answer.status_code, 401, "the status for bad credentials")


def walk_faults(client):
    credentials, _ = google.auth.default(
        scopes=["https://www.googleapis.com/auth/devstorage.read_only"]
    )
    service = storage.Client(credentials=credentials)
    name = client.called("faulty")
    bucket = service.create_bucket(name)
    bucket.blob("a").upload_from_string(b"0123456789" * 100000)

    # Not buckets.get: when one is not found the client asks for it once more, in the background.
    def listing(patience=faults.PATIENT):
        return list(service.list_blobs(name, timeout=patience, retry=None))

    def download(patience=faults.PATIENT):
        return bucket.blob("a").download_as_bytes(timeout=patience, retry=None)

    faults.each_status(client, "storage.objects.list", listing, faults.API_CORE)
    for method, ask in (("storage.objects.list", listing), ("storage.objects.get", download)):
        faults.each_loss(
            client,
            method,
            ask,
            reset=requests.exceptions.ConnectionError,
            truncate=requests.exceptions.ChunkedEncodingError,
            timeout=requests.exceptions.ReadTimeout,
        )
        faults.late(client, method, ask)
    # A download that is cut goes on where it was, when the library is let.
    client.cloud.fault(kind="truncate", method="storage.objects.get")
    equal(len(bucket.blob("a").download_as_bytes()), 1000000, "a download that was cut once")
    # What does not pass in time is told.
    client.cloud.fault(
        kind="error", method="storage.buckets.list", status="UNAVAILABLE", probability=1
    )
    hurried = DEFAULT_RETRY.with_delay(0.05, 0.1, 2).with_timeout(0.3)
    client.raises(exceptions.RetryError, lambda: list(service.list_buckets(retry=hurried)))
    client.cloud.clear_faults()
    bucket.delete(force=True)


def walk(client):
    service = Service(client)
    bucket = walk_buckets(service)
    walk_objects(service, bucket)
    walk_copies(service, bucket)
    walk_listing(service, bucket)
    walk_uploads(service, bucket)
    walk_credentials(service, bucket)
    service.raises(exceptions.Conflict, bucket.delete, text="not empty")
    bucket.delete(force=True)
    check(not bucket.exists(), "the bucket is there after all")
