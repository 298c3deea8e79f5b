"""The Prometheus Operator's objects, as far as deploy/ uses them; any other field is an error.

No package of the index carries the operator's own schemas. Field names and types are those of
monitoring.coreos.com/v1.
"""

from typing import Any

_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | optional,
        "required": sorted(required),
        "additionalProperties": False,
    }


def _kind(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object({"name": {"type": "string"}}, labels=_STRINGS, annotations=_STRINGS)
    version = {"const": "monitoring.coreos.com/v1"}
    return _object(
        {"apiVersion": version, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


_ENDPOINT = _object(
    {"port": {"type": "string"}},
    path={"type": "string", "pattern": "^/"},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    scheme={"enum": ["http", "https"]},
    honorLabels={"type": "boolean"},
)
_ALERT = _object(
    {"alert": {"type": "string"}, "expr": {"type": "string"}},
    **{"for": _DURATION},
    labels=_STRINGS,
    annotations=_STRINGS,
)
SCHEMAS = {
    "ServiceMonitor": _kind(
        "ServiceMonitor",
        _object(
            {
                "selector": _object({"matchLabels": _STRINGS}),
                "endpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
            },
            jobLabel={"type": "string"},
        ),
    ),
    "PrometheusRule": _kind(
        "PrometheusRule",
        _object(
            {
                "groups": {
                    "type": "array",
                    "items": _object(
                        {"name": {"type": "string"}, "rules": {"type": "array", "items": _ALERT}},
                        interval=_DURATION,
                    ),
                }
            }
        ),
    ),
}
