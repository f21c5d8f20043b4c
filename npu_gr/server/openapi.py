"""Builds the OpenAPI 3.1 document from `KINDS` and the Structs that parse the requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from npu_gr import __version__
from npu_gr.core.kinds import KINDS, Kind, Scored
from npu_gr.core.served import ShadowInfo
from npu_gr.replay.recorder import RecordOrder, RecordStatus
from npu_gr.server.auth.rules import rules
from npu_gr.server.debug.routes import DEFAULT_S
from npu_gr.server.debug.stacks import MAX_S, MIN_S
from npu_gr.server.http import Problem
from npu_gr.server.middleware import OCTETS
from npu_gr.server.oip.models import BYTES, DTYPES, MOST_TENSORS, TIMEOUT
from npu_gr.server.oip.routes import BINARY_OUTPUT, InferOut
from npu_gr.server.schemas import CODECS
from npu_gr.server.schemas.admin import (
    CatalogueItemsBody,
    CatalogueOut,
    RollbackBody,
    ShadowBody,
    VectorsOut,
)
from npu_gr.server.schemas.fields import MOST_ITEMS, Codec, ItemOut, ObjectsOut, UserBody
from npu_gr.server.schemas.lookups import MOST_FOUND, FoundItemsOut, UserOut
from npu_gr.server.schemas.media import JSON, MSGPACK

_Json = dict[str, Any]

_ERRORS = {
    "400": "The body or a header cannot be parsed.",
    "401": "No valid API key.",
    "403": "The key lacks the scope, or a page of another site sent the request.",
    "404": "No such model version.",
    "409": "The instance does not know the base prefix; send the whole history.",
    "413": "The body or a list is over its limit.",
    "415": "The body is neither JSON nor msgpack.",
    "422": "A field is unknown, missing or out of range.",
    "429": "Overloaded; see Retry-After.",
    "503": "Starting, draining, or a dependency is down.",
    "504": "The time limit of the request passed.",
}
_OF_A_BODY = ("404", "409", "413", "415")  # errors that only a request with a body can have
_TIME_LIMIT = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "required": False,
    "description": "Time limit in milliseconds; the server stops working on the request after it.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}


_TENSOR: _Json = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "datatype": {"enum": [BYTES, *DTYPES]},
        "shape": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 1,
            "maxItems": 1,
        },
        "data": {"type": "array"},
        "parameters": {
            "type": "object",
            "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
        },
    },
}
_WANTED: _Json = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
    },
}
_INFER: _Json = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "maxLength": 128},
        "model_name": {"type": "string"},
        "inputs": {"type": "array", "items": _TENSOR, "maxItems": MOST_TENSORS},
        "outputs": {"type": "array", "items": _WANTED, "maxItems": MOST_TENSORS},
        "parameters": {
            "type": "object",
            "additionalProperties": {"type": ["boolean", "number", "string"]},
            "properties": {
                BINARY_OUTPUT: {"type": "boolean"},
                TIMEOUT: {"type": "integer", "minimum": 0},
            },
        },
    },
}


def document() -> dict[str, Any]:
    """Build the whole document."""
    schemas = _Schemas()
    paths = _kind_paths(schemas)
    for path, operations in _lookup_paths(schemas).items():  # the user's has an erasure, too
        paths[path] = paths.get(path, {}) | operations
    paths |= {
        **_admin_paths(schemas),
        **_record_paths(schemas),
        **_health_paths(schemas),
        **_inference_paths(schemas),
        **_observability_paths(schemas),
    }
    for (method, path), rule in rules().items():
        addresses = (("public", rule.is_public), ("admin", rule.is_admin))
        paths[path][method.lower()]["tags"] = [name for name, serves in addresses if serves]
    return {
        "openapi": "3.1.0",
        "info": {"title": "npu_gr", "version": __version__, "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}, {}],
        "tags": [
            {"name": "public", "description": "Served at server.host and server.port."},
            {"name": "admin", "description": "Served at server.admin_host and server.admin_port."},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Schemas:
    """The schemas of all bodies and answers, and parts of operations that refer to them."""

    def __init__(self) -> None:
        codecs = [CODECS[name] for name in KINDS]
        structs = [
            struct
            for codec in codecs
            for struct in (codec.body, codec.answer, codec.begun)
            if struct
        ]
        structs += [
            CatalogueItemsBody,
            RollbackBody,
            ShadowBody,
            ShadowInfo,
            UserBody,
            CatalogueOut,
            VectorsOut,
            ItemOut,
            ObjectsOut,
            UserOut,
            FoundItemsOut,
            Problem,
            RecordOrder,
            RecordStatus,
        ]
        structs += [InferOut]
        refs, components = msgspec.json.schema_components(
            structs, ref_template="#/components/schemas/{name}"
        )
        # defaults may be tuples, which only JSON turns into arrays
        self.components = msgspec.json.decode(msgspec.json.encode(components))
        self._refs = dict(zip(structs, refs, strict=True))

    def ref(self, struct: type[msgspec.Struct]) -> _Json:
        return self._refs[struct]

    def json(self, struct: type[msgspec.Struct]) -> _Json:
        return {JSON: {"schema": self._refs[struct]}}

    def any_media(self, struct: type[msgspec.Struct]) -> _Json:
        return {JSON: {"schema": self._refs[struct]}, MSGPACK: {"schema": self._refs[struct]}}

    def errors(self, *codes: str) -> _Json:
        content = {"application/problem+json": {"schema": self._refs[Problem]}}
        if "401" in codes:  # a route with a key may also answer 403 (scope) and 429 (rate limit)
            codes = tuple(code for code in _ERRORS if code in (*codes, "403", "429"))
        return {code: {"description": _ERRORS[code], "content": content} for code in codes}

    def get(
        self, name: str, summary: str, *codes: str, is_public: bool = False, media: str = JSON
    ) -> _Json:
        """Describe a GET that answers 200 without a schema, or one of the errors `codes`."""
        operation: _Json = {
            "operationId": name,
            "summary": summary,
            "responses": {
                "200": {"description": "Success.", "content": {media: {}}},
                **self.errors(*codes),
            },
        }
        if is_public:
            operation["security"] = []
        return {"get": operation}


def _kind_paths(schemas: _Schemas) -> _Json:
    paths: _Json = {}
    for kind in KINDS.values():
        path = paths.setdefault(kind.path, {})  # kinds may share a path and differ by their method
        path[kind.method.lower()] = _kind_operation(schemas, kind, CODECS[kind.name])
        if names := re.findall(r"{(\w+)}", kind.path):
            path["parameters"] = _path_parameters(*names)
    return paths


def _kind_operation(schemas: _Schemas, kind: Kind[Any, Any], codec: Codec[Any, Any, Any]) -> _Json:
    done: _Json = {"description": codec.done}
    if codec.answer is not None:
        done["content"] = schemas.any_media(codec.answer)
        if kind.scored is Scored.ITEMS:  # by the field `format`
            both = {"anyOf": [schemas.ref(codec.answer), schemas.ref(ObjectsOut)]}
            done["content"] = {JSON: {"schema": both}, MSGPACK: {"schema": both}}
    responses = {str(kind.status): done}
    if codec.begun is not None:
        responses["202"] = {
            "description": "Accepted, not yet complete.",
            "content": schemas.any_media(codec.begun),
        }
    codes = [code for code in _ERRORS if codec.body is not None or code not in _OF_A_BODY]
    operation: _Json = {
        "operationId": codec.operation or kind.name,
        "summary": kind.summary,
        "parameters": [_TIME_LIMIT, *codec.parameters],
        "responses": {**responses, **schemas.errors(*codes)},
    }
    if codec.body is not None:
        operation["requestBody"] = {"required": True, "content": schemas.any_media(codec.body)}
    return operation


def _admin_paths(schemas: _Schemas) -> _Json:
    def versions(out: type[msgspec.Struct], name: str, summary: str, *codes: str) -> _Json:
        done = {"description": "Done.", "content": schemas.any_media(out)}
        return {
            "operationId": name,
            "summary": summary,
            "responses": {"200": done, **schemas.errors("401", "404", "503", *codes)},
        }

    reload_models = {
        "operationId": "reloadModels",
        "summary": "Read the configuration file again; serve its checkpoint and settings. "
        "Requests in progress keep the old version.",
        "responses": {
            "200": {"description": "Done.", "content": {JSON: {}}},
            **schemas.errors("401", "422", "429", "503"),
        },
    }
    rollback_models = {
        "operationId": "rollbackModels",
        "summary": "Serve the models of before the last reload that changed one. Requests in "
        "progress keep their version.",
        "requestBody": {"required": False, "content": schemas.any_media(RollbackBody)},
        "responses": reload_models["responses"],
    }
    add_delta = {
        "operationId": "addDelta",
        "summary": "Make a delta of the ranker's weights durable, and serve it between two passes.",
        "requestBody": {
            "required": True,
            "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}},
        },
        "responses": {
            "200": {"description": "Done.", "content": {JSON: {}}},
            **schemas.errors("401", "404", "413", "422", "429", "503"),
        },
    }

    def of_shadow(name: str, summary: str, *codes: str) -> _Json:
        done = {"description": "Done.", "content": schemas.any_media(ShadowInfo)}
        return {
            "operationId": name,
            "summary": summary,
            "responses": {"200": done, **schemas.errors("401", *codes)},
        }

    shadow = {
        "get": of_shadow("shadow", "A ranker that scores next to the served one, and its figures."),
        "post": {
            **of_shadow(
                "openShadow",
                "Load a ranker that scores a share of the ranks when the device has time.",
                *("404", "413", "422", "503"),
            ),
            "requestBody": {"required": True, "content": schemas.any_media(ShadowBody)},
        },
        "delete": of_shadow("dropShadow", "Free the shadow and its prefixes.", "404"),
    }
    promote_shadow = of_shadow(
        "promoteShadow",
        "Serve the shadow; a guard watches it, and rolls back if it is worse.",
        *("404", "422", "503"),
    )
    update_catalogue = {
        "operationId": "updateCatalogue",
        "summary": "Add, withdraw and restore items of the served version.",
        "parameters": [_TIME_LIMIT],
        "requestBody": {"required": True, "content": schemas.any_media(CatalogueItemsBody)},
        "responses": {
            "200": {"description": "Done.", "content": schemas.any_media(CatalogueOut)},
            **schemas.errors(*_ERRORS),
        },
    }
    items = {
        "operationId": "items",
        "summary": "Id, name and title of items.",
        "parameters": [
            _query("ids", "Ids, comma-separated."),
            _query("names", "Names, comma-separated."),
            _query("name", "One name, which may contain commas."),
        ],
        "responses": {
            "200": {
                "description": "The items of ids, then of names, in the order of the request; "
                f"at most {MOST_ITEMS}.",
                "content": {JSON: {"schema": {"type": "array", "items": schemas.ref(ItemOut)}}},
            },
            **schemas.errors("401", "413", "422"),
        },
    }
    reload_catalogue = versions(
        CatalogueOut, "reloadCatalogue", "Read the catalogue file again and serve it.", "422"
    )
    return {
        "/v1/items": {"get": items},
        "/v1/models": schemas.get(
            "models", "The served models, and those that still drain.", "401"
        ),
        "/v1/models/delta": {"post": add_delta},
        "/v1/models/reload": {"post": reload_models},
        "/v1/models/rollback": {"post": rollback_models},
        "/v1/models/shadow": shadow,
        "/v1/models/shadow/promote": {"post": promote_shadow},
        "/v1/catalog": {"get": versions(CatalogueOut, "catalogue", "The served catalogue.")},
        "/v1/catalog/items": {"post": update_catalogue},
        "/v1/catalog/reload": {"post": reload_catalogue},
        "/v1/catalog/rollback": {
            "post": versions(
                CatalogueOut,
                "rollbackCatalogue",
                "Serve the previous version of the catalogue.",
                "422",
            )
        },
        "/v1/match/vectors": {"get": versions(VectorsOut, "vectors", "The served vectors.")},
        "/v1/match/reload": {
            "post": versions(
                VectorsOut, "reloadVectors", "Read the vectors' file again and serve it.", "422"
            )
        },
        "/v1/match/rollback": {
            "post": versions(
                VectorsOut, "rollbackVectors", "Serve the previous version of the vectors.", "422"
            )
        },
    }


def _lookup_paths(schemas: _Schemas) -> _Json:
    def lookup(name: str, summary: str, out: type[msgspec.Struct], *parameters: _Json) -> _Json:
        return {
            "operationId": name,
            "summary": summary,
            "parameters": [_TIME_LIMIT, *parameters],
            "responses": {
                "200": {"description": "Found.", "content": schemas.json(out)},
                **schemas.errors("400", "401", "404", "422", "503", "504"),
            },
        }

    num_items = _query("num_items", f"Most items, 1 to {MOST_FOUND}; absent: 10.")
    tenant = _query("tenant", "Tenant; absent: that of the key.")
    return {
        "/v1/items/{item_id}/similar": {
            "parameters": _path_parameters("item_id"),
            "get": lookup(
                "similarItems",
                "Items most like another one.",
                FoundItemsOut,
                num_items,
                _query("attribute", "name:value that the items must have; may be repeated."),
            ),
        },
        "/v1/trending": {
            "get": lookup(
                "trendingItems",
                "Items with the most events lately, else popular ones.",
                FoundItemsOut,
                num_items,
                tenant,
                _query("window_s", "Seconds, up to 86400; absent: 3600."),
            )
        },
        "/v1/users/{user_id}": {
            "get": lookup(
                "user",
                "What this instance knows of a user.",
                UserOut,
                tenant,
                _query("num_events", f"Newest events, 1 to {MOST_FOUND}; absent: 20."),
            )
        },
    }


def _record_paths(schemas: _Schemas) -> _Json:
    def operation(name: str, summary: str, *codes: str) -> _Json:
        done = {"description": "Status of the recorder.", "content": schemas.json(RecordStatus)}
        return {
            "operationId": name,
            "summary": summary,
            "responses": {"200": done, **schemas.errors("401", "404", *codes)},
        }

    switch_on = operation("recordOn", "Start recording requests.", "400", "413", "415", "422")
    switch_on["requestBody"] = {"required": False, "content": schemas.any_media(RecordOrder)}
    return {
        "/debug/record": {
            "get": operation("recordStatus", "Status of the recorder."),
            "post": switch_on,
            "delete": operation("recordOff", "Stop recording."),
        }
    }


def _health_paths(schemas: _Schemas) -> _Json:
    get = schemas.get
    return {
        "/healthz": get("live", "The process is alive, and moves.", "503", is_public=True),
        "/readyz": get("ready", "The instance accepts requests.", "503", is_public=True),
        "/v2/health/live": get("v2Live", "Open Inference Protocol: alive.", is_public=True),
        "/v2/health/ready": get(
            "v2Ready", "Open Inference Protocol: ready.", "503", is_public=True
        ),
    }


def _inference_paths(schemas: _Schemas) -> _Json:
    def of_model(path: _Json) -> _Json:
        return {**path, "parameters": _path_parameters("model")}

    def of_version(path: _Json) -> _Json:
        return {**path, "parameters": _path_parameters("model", "version")}

    def infer(name: str, summary: str) -> _Json:
        out = {JSON: {"schema": schemas.ref(InferOut)}, OCTETS: {}}
        return {
            "operationId": name,
            "summary": summary,
            "parameters": [_TIME_LIMIT],
            "requestBody": {"required": True, "content": {JSON: {"schema": _INFER}, OCTETS: {}}},
            "responses": {
                "200": {
                    "description": "Tensors as JSON, followed by raw bytes where requested.",
                    "content": out,
                },
                **schemas.errors(*_ERRORS),
            },
        }

    get = schemas.get
    model = "/v2/models/{model}"
    version = f"{model}/versions/{{version}}"
    paths = {
        "/v2": get("server", "Open Inference Protocol: server metadata.", "401"),
        "/v2/models/stats": get("statistics", "Statistics of all models.", "401", "403"),
        model: of_model(get("model", "Open Inference Protocol: model metadata.", "401", "404")),
        f"{model}/ready": of_model(get("modelReady", "The model is ready.", "401", "404", "503")),
        f"{model}/stats": of_model(
            get("modelStatistics", "Statistics of the model.", "401", "403", "404")
        ),
        version: of_version(get("version", "Model metadata.", "401", "404")),
        f"{version}/ready": of_version(
            get("versionReady", "The version is ready.", "401", "404", "503")
        ),
        f"{version}/stats": of_version(
            get("versionStatistics", "Statistics of the model.", "401", "403", "404")
        ),
    }
    for kind in KINDS.values():
        for path in kind.paths[1:]:
            names = re.findall(r"{(\w+)}", path)
            of_one = "Version" if names else ""
            paths[path] = {
                "post": infer(
                    f"{kind.name}Infer{of_one}", f"Open Inference Protocol: {kind.summary}"
                )
            }
            if names:
                paths[path]["parameters"] = _path_parameters(*names)
    return paths


def _observability_paths(schemas: _Schemas) -> _Json:
    get = schemas.get
    profile = get(
        "profile",
        "Sampled profile of all threads, as folded stacks.",
        "400",
        "401",
        "429",
        media="text/plain",
    )
    seconds = {"type": "number", "minimum": MIN_S, "maximum": MAX_S, "default": DEFAULT_S}
    profile["get"]["parameters"] = [{"name": "seconds", "in": "query", "schema": seconds}]
    runbooks = get(
        "runbooks", "A runbook, or the names of all runbooks.", "401", "404", media="text/plain"
    )
    runbooks["get"]["parameters"] = [{"name": "name", "in": "query", "schema": {"type": "string"}}]
    known: _Json = {
        "operationId": "knowsUser",
        "summary": "Which stores and caches of this process hold data of a user.",
        "requestBody": {"required": True, "content": schemas.any_media(UserBody)},
        "responses": {
            "200": {"description": "Each store or cache: true or false.", "content": {JSON: {}}},
            **schemas.errors("400", "401", "413", "415", "422"),
        },
    }
    return {
        "/": get("page", "The status page.", is_public=True, media="text/html"),
        "/debug/status": get("status", "The data of the status page.", "401"),
        "/metrics": get("metrics", "Metrics for Prometheus.", "401", media="text/plain"),
        "/debug/stacks": get(
            "stacks", "Stacks of all threads and tasks.", "401", media="text/plain"
        ),
        "/debug/profile": profile,
        "/debug/runbooks": runbooks,
        "/debug/bundle": get(
            "bundle",
            "Archive for a bug report: configuration, status, metrics, stacks, log.",
            "401",
            media="application/gzip",
        ),
        "/debug/user": {"post": known},
        "/debug/config": get("config", "The current configuration, without secrets.", "401"),
        "/openapi.json": get("openapi", "This document.", "401"),
        "/debug/openapi": get("openapiOfConsole", "This document, for the console.", "401"),
        "/debug/console": get(
            "console",
            "Page to try every route, with example bodies.",
            is_public=True,
            media="text/html",
        ),
    }


def _query(name: str, description: str) -> _Json:
    """Describe a query parameter that may be repeated."""
    many = {"type": "array", "items": {"type": "string"}}
    return {
        "name": name,
        "in": "query",
        "required": False,
        "description": description,
        "schema": many,
    }


def _path_parameters(*names: str) -> list[_Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
