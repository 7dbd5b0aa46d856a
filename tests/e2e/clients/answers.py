"""Answers in JSON, checked against a discovery document that the client brought along.

What is checked is proto3 JSON as Google's services write it: no field that the document does not
have, 64-bit integers as strings, times in UTC, enums by name, `@type` of a message that the
document knows, and no field that holds its default.
"""

import re

from google.protobuf import any_pb2, json_format
from google.rpc import code_pb2, error_details_pb2  # noqa: F401 - the messages that errors bring along

from checks import Unmet, check, equal

_FORMATS = {
    "int64": re.compile(r"-?[0-9]+"),
    "uint64": re.compile(r"[0-9]+"),
    "google-datetime": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6}|\.\d{9})?Z"),
    "date-time": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"),
    "google-duration": re.compile(r"-?\d+(\.\d{1,9})?s"),
    "google-fieldmask": re.compile(r"[a-zA-Z0-9_.,]*"),
}

# The HTTP status of each canonical code, as google/rpc/code.proto has it.
_STATUSES = {
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
}

_TYPES = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list}


def _is_default(spec, value):
    if isinstance(value, (list, str)) and not value:
        return True
    if value in (0, False) and not isinstance(value, str):
        return True
    return (
        spec.get("format") in ("int64", "uint64")
        and value == "0"
        or value in spec.get("enum", [])[:1]
    )


def check_detail(value, where):
    """Check one of the details of a google.rpc.Status: protobuf itself reads it."""
    try:
        json_format.ParseDict(value, any_pb2.Any())
    except (json_format.ParseError, TypeError) as error:
        raise Unmet(f"{where}: {error}") from error


def check_error(status, body):
    """Check the body of a refusal: the HTTP status, the canonical code's name, a message and details."""
    check(isinstance(body, dict) and list(body) == ["error"], f"an error's body is {body!r}")
    error = body["error"]
    check(error.get("status") in code_pb2.Code.keys(), f"an error's status: {error!r}")
    equal(error.get("code"), status, "an error's code")
    equal(_STATUSES[error["status"]], status, f"the HTTP status of {error['status']}")
    check(isinstance(error.get("message"), str) and error["message"], "an error has no message")
    for i, detail in enumerate(error.get("details", [])):
        check_detail(detail, f"error.details[{i}]")


class Document:
    """A discovery document. `defaults` allows fields that hold their default, as the older APIs send them."""

    def __init__(self, document, defaults=False):
        self.schemas = document["schemas"]
        self.package = f"type.googleapis.com/google.cloud.{document['name']}.{document['version']}."
        self.defaults = defaults
        self.methods = {}
        self._collect(document)

    def _collect(self, resource):
        for method in resource.get("methods", {}).values():
            self.methods[method["id"]] = method
        for child in resource.get("resources", {}).values():
            self._collect(child)

    def check_answer(self, method_id, answer):
        """Check the answer to a call of a method; Unmet says where it is not what the document says."""
        self.check(self.methods[method_id]["response"]["$ref"], answer, method_id)

    def check(self, schema, value, where):
        """Check one message."""
        self._message(self.schemas[schema], value, where)

    def _message(self, schema, value, where):
        if not isinstance(value, dict):
            raise Unmet(f"{where}: {value!r} is no {schema['id']} message")
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            spec = properties.get(name) or others
            if spec is None:
                raise Unmet(f"{where}: a {schema.get('id', 'map')} has no field {name!r}")
            if item is None:
                raise Unmet(f"{where}.{name} is null")
            self._value(spec, item, f"{where}.{name}")
            if name in properties and not self.defaults and _is_default(spec, item):
                raise Unmet(f"{where}.{name} holds its default, {item!r}")

    def _any(self, value, where):
        """A google.protobuf.Any: one of the API's own messages, or one of the well-known ones."""
        kind = value.get("@type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise Unmet(f"{where}: {value!r} has no @type")
        fields = {name: item for name, item in value.items() if name != "@type"}
        if kind.startswith(self.package) and kind.removeprefix(self.package) in self.schemas:
            self.check(kind.removeprefix(self.package), fields, where)
        elif kind == "type.googleapis.com/google.protobuf.Empty":
            if fields:
                raise Unmet(f"{where}: an Empty has fields: {fields!r}")
        elif kind.startswith("type.googleapis.com/google.rpc."):
            check_detail(value, where)
        else:
            raise Unmet(f"{where}: a client of this version does not know the @type {kind!r}")

    def _value(self, spec, value, where):
        if "$ref" in spec:
            return self._message(self.schemas[spec["$ref"]], value, where)
        kind = spec.get("type")
        if kind == "any":
            return None
        if kind == "object":
            if spec.get("additionalProperties", {}).get("type") == "any":
                return self._any(value, where)
            return self._message(spec, value, where)
        if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
            raise Unmet(f"{where}: {value!r} is no {spec.get('format', kind)} as JSON has it")
        if kind == "array":
            for i, item in enumerate(value):
                self._value(spec["items"], item, f"{where}[{i}]")
        elif "enum" in spec and value not in spec["enum"]:
            raise Unmet(f"{where}: {value!r} is none of {', '.join(spec['enum'])}")
        elif spec.get("format") in _FORMATS and not _FORMATS[spec["format"]].fullmatch(value):
            raise Unmet(f"{where}: {value!r} is no {spec['format']}")
        return None
