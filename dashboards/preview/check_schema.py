"""check_schema.py SCHEMA.json DASHBOARD.json... - check dashboards against a JSON Schema.

The schema is made of Grafana's own TypeScript types. Where those leave an object open (a panel's
options, a query) the schema's maker closes it without naming any property; such ones are opened
again. A misspelt field anywhere else is an error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator


def opened(node: Any) -> Any:
    """The schema with objects that name no property left open."""
    if isinstance(node, list):
        return [opened(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("additionalProperties") is False and not node.get("properties"):
        node = {name: value for name, value in node.items() if name != "additionalProperties"}
    return {name: opened(value) for name, value in node.items()}


def main(schema: str, *boards: str) -> int:
    """Print what does not fit; how many boards have something."""
    validator = Draft7Validator(opened(json.loads(Path(schema).read_text())))
    wrong = 0
    for path in boards:
        errors = list(validator.iter_errors(json.loads(Path(path).read_text())))
        wrong += bool(errors)
        for error in errors:
            reasons = sorted({each.message[:200] for each in error.context or [error]})
            print(path, list(error.absolute_path), *reasons, sep="\n  ")  # noqa: T201
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
