"""Strict validation: no field that the API server would drop, no value it would refuse."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
from celpy.adapter import json_to_cel
from jsonschema import Draft202012Validator

OLDEST, NEWEST = "1.30", "1.37"  # releases of Kubernetes
CRDS = Path(__file__).parent / "crds"


def problems(document: dict[str, Any], release: str = OLDEST) -> list[str]:
    """Return the problems of a manifest; a kind without a schema is one too."""
    validator = _custom(document["apiVersion"], document["kind"])
    if validator is not None:
        wrong = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
        return wrong or list(_broken_rules(validator.schema, document, "$"))
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
    return {
        (d["apiVersion"], d["kind"]): Draft202012Validator(_closed(d["schema"]))
        for d in definitions
    }


def _broken_rules(schema: Any, value: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - JSON values
    """Evaluate the CEL rules of a definition as the API server does, at every value that has
    one."""
    for rule in schema.get("x-kubernetes-validations", []):
        if not _program(rule["rule"]).evaluate({"self": json_to_cel(value)}):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, item in value.items():
            if name in schema.get("properties", {}):
                yield from _broken_rules(schema["properties"][name], item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), item, f"{path}[{index}]")


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _closed(node: Any) -> Any:  # noqa: ANN401 - a JSON value
    """Return the schema with every object closed whose fields are listed."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    is_object = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if (
        is_object
        and not node.get("x-kubernetes-preserve-unknown-fields")
        and "additionalProperties" not in node
    ):
        closed["additionalProperties"] = False
    return closed
