"""google-auth: every kind of credentials that can be pointed at endpoints of one's own, and how
each is refused.

Credentials are proven by a call: a token that the simulator did not give is refused there.
"""

import json
import os
import stat
import tempfile

import google.auth
from google.auth import compute_engine, exceptions, impersonated_credentials
from google.auth.credentials import with_scopes_if_required
from google.auth.transport.requests import AuthorizedSession, Request
from google.oauth2 import credentials as oauth2_credentials
from google.oauth2 import service_account

from checks import check, equal

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]


class Kinds:
    """Makes credentials of each kind, as a user of the library would."""

    def __init__(self, cloud, directory):
        self.cloud = cloud
        self.directory = directory

    def info(self, kind, **fields):
        """The contents of a credentials file that the simulator honours."""
        return self.cloud.control("POST", "credentials", {"type": kind, **fields})

    def load(self, info):
        """What the library makes of such a file."""
        path = os.path.join(self.directory, f"{info['type']}.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(info, file)
        # With scopes the library would look up an external account's project at Google.
        return with_scopes_if_required(google.auth.load_credentials_from_file(path)[0], SCOPES)

    def authorized_user(self):
        # From a file the library always goes to Google's own endpoint; the constructor lets one say where.
        info = self.info("authorized_user")
        return oauth2_credentials.Credentials(
            None,
            refresh_token=info["refresh_token"],
            token_uri=info["token_uri"],
            client_id=info["client_id"],
            client_secret=info["client_secret"],
            scopes=SCOPES,
        )

    def service_account(self):
        return self.load(self.info("service_account"))

    def self_signed(self):
        """A service account that signs its own tokens; nothing is exchanged."""
        made = service_account.Credentials.from_service_account_info(self.info("service_account"))
        return made.with_scopes(SCOPES).with_always_use_jwt_access(True)

    def metadata_server(self):
        """The credentials of the machine, found as on Compute Engine: there is no file."""
        kept = os.environ.pop("GOOGLE_APPLICATION_CREDENTIALS")
        try:
            found, project = google.auth.default(scopes=SCOPES)
        finally:
            os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = kept
        check(isinstance(found, compute_engine.Credentials), f"found {type(found).__name__}")
        equal(project, self.cloud.project, "the project of the metadata server")
        return found

    def impersonated(self):
        info = self.info("impersonated_service_account", email="target@example.com")
        return impersonated_credentials.Credentials(
            source_credentials=self.authorized_user(),
            target_principal="target@example.com",
            target_scopes=SCOPES,
            iam_endpoint_override=info["service_account_impersonation_url"],
        )

    def external_url(self):
        """Workload identity; the subject token comes from an address."""
        return self.load(self.info("external_account"))

    def _subject(self):
        return Request()(
            url=self.info("external_account")["credential_source"]["url"],
            headers={"Metadata-Flavor": "Google"},
        ).data.decode()

    def external_file(self):
        """Workload identity; the subject token is in a file of JSON."""
        path = os.path.join(self.directory, "subject.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"id_token": self._subject()}, file)
        info = self.info("external_account")
        info["credential_source"] = {
            "file": path,
            "format": {"type": "json", "subject_token_field_name": "id_token"},
        }
        return self.load(info)

    def external_executable(self):
        """Workload identity; a program prints the subject token."""
        path = os.path.join(self.directory, "subject.sh")
        answer = {
            "version": 1,
            "success": True,
            "token_type": "urn:ietf:params:oauth:token-type:jwt",
            "id_token": self._subject(),
            "expiration_time": 4102444800,
        }
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
        os.chmod(path, stat.S_IRWXU)
        os.environ["GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES"] = "1"
        info = self.info("external_account")
        info["credential_source"] = {"executable": {"command": path, "timeout_millis": 10000}}
        return self.load(info)

    def external_impersonated(self):
        """Workload identity that goes on to impersonate a service account."""
        info = self.info("external_account")
        target = self.info("impersonated_service_account")
        info["service_account_impersonation_url"] = target["service_account_impersonation_url"]
        return self.load(info)

    def workforce_user(self):
        return self.load(self.info("external_account_authorized_user"))


KINDS = [name for name in vars(Kinds) if not name.startswith("_") and name not in ("info", "load")]


def walk_kinds(client, kinds):
    cloud = client.cloud
    for name in KINDS:
        credentials = getattr(kinds, name)()
        session = AuthorizedSession(credentials)
        answer = session.get(f"{cloud.url}/v2/{cloud.parent}/nodes", timeout=30)
        equal(answer.status_code, 200, f"the status with {name}: {answer.text}")
        check(credentials.valid, f"{name} are not valid")
        # A token that is refused is renewed, once.
        before = cloud.mark()
        cloud.fault(kind="error", method="nodes.list", status="UNAUTHENTICATED")
        answer = session.get(f"{cloud.url}/v2/{cloud.parent}/nodes", timeout=30)
        statuses = [
            entry["status"]
            for entry in cloud.requests(before)
            if entry.get("method") == "nodes.list"
        ]
        equal(statuses, [401, 200], f"the statuses of a call whose token is renewed, with {name}")


def walk_refusals(client, kinds):
    request = Request()
    user = kinds.authorized_user()
    revoked = oauth2_credentials.Credentials(
        None,
        refresh_token="1//revoked",
        token_uri=user.token_uri,
        client_id=user.client_id,
        client_secret=user.client_secret,
    )
    client.raises(exceptions.RefreshError, revoked.refresh, request, text="invalid_grant")
    changed = kinds.info("service_account")
    unknown = service_account.Credentials.from_service_account_info(
        {**changed, "client_email": "nobody@example.com"}, scopes=SCOPES
    )
    client.raises(exceptions.RefreshError, unknown.refresh, request, text="account not found")
    foreign = kinds.info("external_account")
    foreign["audience"] = "//example.com/nothing"
    client.raises(
        exceptions.OAuthError, kinds.load(foreign).refresh, request, text="invalid_target"
    )
    info = kinds.info("impersonated_service_account")
    too_long = impersonated_credentials.Credentials(
        source_credentials=kinds.authorized_user(),
        target_principal="target@example.com",
        target_scopes=SCOPES,
        lifetime=100000,
        iam_endpoint_override=info["service_account_impersonation_url"],
    )
    client.raises(exceptions.RefreshError, too_long.refresh, request, text="Invalid lifetime")
    machine = kinds.metadata_server()
    nobody = compute_engine.Credentials(service_account_email="nobody@example.com")
    client.raises(exceptions.RefreshError, nobody.refresh, request, text="Not Found")
    machine.refresh(request)
    missing = os.path.join(kinds.directory, "absent.json")
    client.raises(
        exceptions.DefaultCredentialsError,
        google.auth.load_credentials_from_file,
        missing,
        text="was not found",
    )


def walk_passing(client, kinds):
    """The token endpoints fail for a moment: the library asks again by itself."""
    cloud, request = client.cloud, Request()
    for method, name in (
        ("oauth.token", "authorized_user"),
        ("oauth.token", "service_account"),
        ("metadata", "metadata_server"),
    ):
        credentials = getattr(kinds, name)()
        before = cloud.mark()
        cloud.fault(kind="error", method=method, status="UNAVAILABLE")
        credentials.refresh(request)
        statuses = [entry["status"] for entry in cloud.requests(before) if entry.get("method")]
        check(statuses[0] == 503 and statuses[-1] == 200, f"statuses of {method}: {statuses}")


def walk(client):
    with tempfile.TemporaryDirectory() as directory:
        kinds = Kinds(client.cloud, directory)
        walk_kinds(client, kinds)
        walk_refusals(client, kinds)
        walk_passing(client, kinds)
