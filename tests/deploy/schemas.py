"""Strict validation: no field that the API server would drop, no value it would refuse."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

OLDEST, NEWEST = "1.30", "1.37"  # releases of Kubernetes
CRDS = Path(__file__).parent / "crds"


def problems(document: dict[str, Any], release: str = OLDEST) -> list[str]:
    """What is wrong with a manifest; a kind without a schema is a problem too."""
    validator = _custom(document["apiVersion"], document["kind"])
    if validator is not None:
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    try:
        kubernetes_validate.validate(document, release, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    except kubernetes_validate.ValidationError as error:
        return [f"{error.json_path}: {error.message}"]
    return []


def _custom(api_version: str, kind: str) -> Draft202012Validator | None:
    return _custom_validators().get((api_version, kind))


@cache
def _custom_validators() -> dict[tuple[str, str], Draft202012Validator]:
    definitions = [json.loads(path.read_text()) for path in sorted(CRDS.glob("*.json"))]
    return {(d["apiVersion"], d["kind"]): Draft202012Validator(_closed(d["schema"])) for d in definitions}


def _closed(node: Any) -> Any:  # noqa: ANN401 - a JSON value
    """The schema with every object closed whose fields are listed."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    is_object = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if is_object and not node.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in node:
        closed["additionalProperties"] = False
    return closed
