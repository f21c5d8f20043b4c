"""The OpenAPI 3.1 document, made from the table of kinds and from the Structs that parse the requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from npu_gr import __version__
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.replay.recorder import RecordOrder, RecordStatus
from npu_gr.server.codec import CODECS
from npu_gr.server.codec.admin import CatalogueItemsBody, CatalogueOut, VectorsOut
from npu_gr.server.codec.base import Codec
from npu_gr.server.codec.media import JSON, MSGPACK
from npu_gr.server.problem import Problem

_ERRORS = {
    "400": "The body or a header cannot be parsed.",
    "401": "No valid API key.",
    "404": "No such model version.",
    "409": "The base prefix is not known here.",
    "413": "The body or a list is over its limit.",
    "415": "Neither JSON nor msgpack.",
    "422": "A field is unknown, missing or out of range.",
    "429": "Overloaded; see Retry-After.",
    "503": "Starting, draining, or a dependency is down.",
    "504": "The time budget ran out.",
}
_OF_A_BODY = ("404", "409", "413", "415")  # errors that only a request with a body can have
_TIME_LIMIT = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "required": False,
    "description": "How long the caller waits; the work is dropped after it.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}


def document() -> dict[str, Any]:
    """Build the document."""
    codecs = [CODECS[name] for name in KINDS]
    structs = [struct for codec in codecs for struct in (codec.body, codec.answer) if struct is not None]
    structs += [CatalogueItemsBody, CatalogueOut, VectorsOut, Problem, RecordOrder, RecordStatus]
    refs, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schema = dict(zip(structs, refs, strict=True))

    def content(struct: type[msgspec.Struct]) -> dict[str, Any]:
        return {JSON: {"schema": schema[struct]}, MSGPACK: {"schema": schema[struct]}}

    def errors(*codes: str) -> dict[str, Any]:
        body = {"application/problem+json": {"schema": schema[Problem]}}
        return {code: {"description": _ERRORS[code], "content": body} for code in codes}

    def of_kind(kind: Kind[Any, Any], codec: Codec[Any, Any, Any]) -> dict[str, Any]:
        done: dict[str, Any] = {"description": codec.done}
        if codec.answer is not None:
            done["content"] = content(codec.answer)
        codes = [code for code in _ERRORS if codec.body is not None or code not in _OF_A_BODY]
        operation: dict[str, Any] = {
            "operationId": codec.operation or kind.name,
            "summary": kind.summary,
            "parameters": [_TIME_LIMIT, *codec.parameters],
            "responses": {str(kind.status): done, **errors(*codes)},
        }
        if codec.body is not None:
            operation["requestBody"] = {"required": True, "content": content(codec.body)}
        return named({kind.method.lower(): operation}, *re.findall(r"{(\w+)}", kind.path))

    def get(name: str, summary: str, *codes: str, public: bool = False, media: str = JSON) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": name,
            "summary": summary,
            "responses": {"200": {"description": "Yes.", "content": {media: {}}}, **errors(*codes)},
        }
        if public:
            operation["security"] = []
        return {"get": operation}

    def named(paths: dict[str, Any], *names: str) -> dict[str, Any]:
        parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
        return {**paths, "parameters": parameters} if parameters else paths

    def versions(out: type[msgspec.Struct], name: str, summary: str, *codes: str) -> dict[str, Any]:
        done = {"description": "Done.", "content": content(out)}
        return {
            "operationId": name,
            "summary": summary,
            "responses": {"200": done, **errors("401", "404", "503", *codes)},
        }

    def recorder(name: str, summary: str, *codes: str) -> dict[str, Any]:
        done = {"description": "How it stands.", "content": {JSON: {"schema": schema[RecordStatus]}}}
        return {"operationId": name, "summary": summary, "responses": {"200": done, **errors("401", "404", *codes)}}

    reload_models = {
        "post": {
            "operationId": "reloadModels",
            "summary": "Read the configuration file again; serve its checkpoint and settings. The old version drains.",
            "responses": {"200": {"description": "Done.", "content": {JSON: {}}}, **errors("401", "422", "429", "503")},
        }
    }
    switch_on = recorder("recordOn", "Record requests.", "413", "422")
    switch_on["requestBody"] = {"required": False, "content": {JSON: {"schema": schema[RecordOrder]}}}
    record = {
        "get": recorder("recordStatus", "What is recorded."),
        "post": switch_on,
        "delete": recorder("recordOff", "Record no more."),
    }
    model = "/v2/models/{model}"
    version = f"{model}/versions/{{version}}"
    update_catalogue = {
        "post": {
            "operationId": "updateCatalogue",
            "summary": "Add, withdraw and restore items of the version that is served, at once.",
            "parameters": [_TIME_LIMIT],
            "requestBody": {"required": True, "content": content(CatalogueItemsBody)},
            "responses": {"200": {"description": "Done.", "content": content(CatalogueOut)}, **errors(*_ERRORS)},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "npu_gr", "version": __version__, "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}, {}],
        "paths": {
            **{kind.path: of_kind(kind, CODECS[kind.name]) for kind in KINDS.values()},
            "/v1/match/vectors": {"get": versions(VectorsOut, "vectors", "The vectors that are served.")},
            "/v1/match/reload": {"post": versions(VectorsOut, "reloadVectors", "Read and serve them anew.", "422")},
            "/v1/match/rollback": {"post": versions(VectorsOut, "rollbackVectors", "Serve the one before.", "422")},
            "/v1/catalog": {"get": versions(CatalogueOut, "catalogue", "The catalogue that is served.")},
            "/v1/catalog/items": update_catalogue,
            "/v1/catalog/reload": {
                "post": versions(CatalogueOut, "reloadCatalogue", "Read the catalogue anew and serve it.", "422")
            },
            "/v1/catalog/rollback": {
                "post": versions(CatalogueOut, "rollbackCatalogue", "Serve the version before.", "422")
            },
            "/v1/models": get("models", "What is being served, and what still drains.", "401"),
            "/v1/models/reload": reload_models,
            "/healthz": get("live", "The process is alive.", public=True),
            "/readyz": get("ready", "New work is welcome.", "503", public=True),
            "/": get("page", "The status page.", public=True, media="text/html"),
            "/debug/status": get("status", "What the status page shows.", "401"),
            "/metrics": get("metrics", "For Prometheus.", "401", media="text/plain"),
            "/debug/config": get("config", "The configuration in force.", "401"),
            "/debug/record": record,
            "/openapi.json": get("openapi", "This document.", "401"),
            "/v2": get("server", "Open Inference Protocol: server metadata.", "401"),
            "/v2/health/live": get("v2Live", "Open Inference Protocol: alive.", public=True),
            "/v2/health/ready": get("v2Ready", "Open Inference Protocol: ready.", "503", public=True),
            model: named(get("model", "Open Inference Protocol: model metadata.", "401", "404"), "model"),
            f"{model}/ready": named(get("modelReady", "The model is ready.", "401", "404", "503"), "model"),
            version: named(get("version", "Model metadata.", "401", "404"), "model", "version"),
            f"{version}/ready": named(
                get("versionReady", "The version is ready.", "401", "404", "503"), "model", "version"
            ),
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
