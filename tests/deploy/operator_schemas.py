"""JSON schemas of operator objects with only the fields that deploy/ uses; others are errors.

The operators publish their schemas in no Python package. Field names and types are those of
monitoring.coreos.com/v1, leaderworkerset.x-k8s.io/v1, gateway.networking.k8s.io/v1,
gateway.envoyproxy.io/v1alpha1, gateway.nginx.org/v1alpha1, networking.istio.io/v1alpha3, and
serving.kserve.io/v1alpha1 and v1beta1. Pod templates inside them are checked with the Kubernetes
schema.
"""

from typing import Any

_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | optional,
        "required": sorted(required),
        "additionalProperties": False,
    }


def _kind(
    kind: str, spec: dict[str, Any], version: str = "monitoring.coreos.com/v1"
) -> dict[str, Any]:
    metadata = _object({"name": _STRING}, namespace=_STRING, labels=_STRINGS, annotations=_STRINGS)
    return _object(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        }
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
_POD = {"type": "object"}  # checked with the Kubernetes schema
_TEMPLATE = _object({"spec": _POD}, metadata=_object({}, labels=_STRINGS, annotations=_STRINGS))
_SHARE = {"type": ["integer", "string"]}
_MATCH = _object(
    {},
    path=_object(
        {"type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]}},
        value={"type": "string", "pattern": "^/"},
    ),
    method={"enum": ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]},
)
_FORMAT = _object(
    {"name": _STRING}, version=_STRING, autoSelect={"type": "boolean"}, priority=_COUNT
)
_KEY = _object({"secretName": _STRING, "secretKey": _STRING})
_STRING_LIST = {"type": "array", "items": _STRING}
_ROUTE = _object(
    {
        "group": {"const": "gateway.networking.k8s.io"},
        "kind": {"const": "HTTPRoute"},
        "name": _STRING,
    }
)
_BUFFER = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer"
# Values of vLLM's production-stack chart, with names and types from its values.schema.json.
PRODUCTION_STACK = _object(
    {
        "servingEngineSpec": _object(
            {
                "modelSpec": {
                    "type": "array",
                    "minItems": 1,
                    "items": _object(
                        {
                            "name": _STRING,
                            "repository": _STRING,
                            "tag": _STRING,
                            "modelURL": _STRING,
                            "replicaCount": {"type": "integer"},
                            "requestCPU": {"type": "integer"},
                            "requestMemory": _STRING,
                            "requestGPU": {"type": ["integer", "number", "string"]},
                        },
                        pvcStorage=_STRING,
                        pvcAccessMode=_STRING_LIST,
                        shmSize=_STRING,
                        hf_token=_KEY,
                        env={
                            "type": "array",
                            "items": _object({"name": _STRING, "value": _STRING}),
                        },
                        vllmConfig=_object(
                            {},
                            tensorParallelSize={"type": "integer"},
                            enablePrefixCaching={"type": "boolean"},
                            maxModelLen={"type": "integer"},
                            extraArgs=_STRING_LIST,
                        ),
                    ),
                }
            },
            vllmApiKey=_KEY,
            startupProbe=_object({}, periodSeconds=_COUNT, failureThreshold=_COUNT),
            securityContext=_POD,
            containerSecurityContext=_POD,
            serviceMonitor=_object(
                {"enabled": {"type": "boolean"}},
                additionalLabels=_STRINGS,
                relabelings={
                    "type": "array",
                    "items": _object({"targetLabel": _STRING, "replacement": _STRING}),
                },
            ),
        )
    },
    routerSpec=_object({"routingLogic": _STRING}, extraArgs=_STRING_LIST),
)
SCHEMAS = {
    "LeaderWorkerSet": _kind(
        "LeaderWorkerSet",
        _object(
            {
                "leaderWorkerTemplate": _object(
                    {"workerTemplate": _TEMPLATE},
                    leaderTemplate=_TEMPLATE,
                    size={"type": "integer", "minimum": 1},
                    restartPolicy={
                        "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                    },
                )
            },
            replicas=_COUNT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            rolloutStrategy=_object(
                {"type": {"const": "RollingUpdate"}},
                rollingUpdateConfiguration=_object(
                    {}, maxUnavailable=_SHARE, maxSurge=_SHARE, partition=_COUNT
                ),
            ),
            networkConfig=_object({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}),
        ),
        "leaderworkerset.x-k8s.io/v1",
    ),
    "HTTPRoute": _kind(
        "HTTPRoute",
        _object(
            {
                "parentRefs": {
                    "type": "array",
                    "items": _object(
                        {"name": _STRING}, namespace=_STRING, sectionName=_STRING, port=_COUNT
                    ),
                },
                "rules": {
                    "type": "array",
                    "items": _object(
                        {
                            "backendRefs": {
                                "type": "array",
                                "items": _object({"name": _STRING, "port": _COUNT}),
                            }
                        },
                        matches={"type": "array", "minItems": 1, "items": _MATCH},
                    ),
                },
            },
            hostnames={"type": "array", "items": _STRING},
        ),
        "gateway.networking.k8s.io/v1",
    ),
    "BackendTrafficPolicy": _kind(
        "BackendTrafficPolicy",
        _object(
            {
                "targetRefs": {"type": "array", "items": _ROUTE},
                "requestBuffer": _object({"limit": {"type": "string", "pattern": r"^\d+Mi$"}}),
            }
        ),
        "gateway.envoyproxy.io/v1alpha1",
    ),
    "ClientSettingsPolicy": _kind(
        "ClientSettingsPolicy",
        _object(
            {
                "targetRef": _ROUTE,
                "body": _object({"maxSize": {"type": "string", "pattern": r"^\d+m$"}}),
            }
        ),
        "gateway.nginx.org/v1alpha1",
    ),
    "EnvoyFilter": _kind(
        "EnvoyFilter",
        _object(
            {
                "workloadSelector": _object({"labels": _STRINGS}),
                "configPatches": {
                    "type": "array",
                    "items": _object(
                        {
                            "applyTo": {"const": "HTTP_FILTER"},
                            "match": _object({"context": {"const": "GATEWAY"}, "listener": _POD}),
                            "patch": _object(
                                {
                                    "operation": {"const": "INSERT_BEFORE"},
                                    "value": _object(
                                        {
                                            "name": _STRING,
                                            "typed_config": _object(
                                                {
                                                    "@type": {"const": _BUFFER},
                                                    "max_request_bytes": _COUNT,
                                                }
                                            ),
                                        }
                                    ),
                                }
                            ),
                        }
                    ),
                },
            }
        ),
        "networking.istio.io/v1alpha3",
    ),
    "ServingRuntime": _kind(
        "ServingRuntime",
        _object(
            {"containers": {"type": "array", "minItems": 1, "items": _POD}},
            supportedModelFormats={"type": "array", "items": _FORMAT},
            protocolVersions={"type": "array", "items": _STRING},
            multiModel={"type": "boolean"},
            annotations=_STRINGS,
            labels=_STRINGS,
            volumes={"type": "array", "items": _POD},
            tolerations={"type": "array", "items": _POD},
        ),
        "serving.kserve.io/v1alpha1",
    ),
    "InferenceService": _kind(
        "InferenceService",
        _object(
            {
                "predictor": _object(
                    {
                        "model": _object(
                            {"modelFormat": _object({"name": _STRING}, version=_STRING)},
                            runtime=_STRING,
                            storageUri=_STRING,
                            args={"type": "array", "items": _STRING},
                            env={"type": "array", "items": _POD},
                            resources=_POD,
                        )
                    },
                    minReplicas=_COUNT,
                    maxReplicas=_COUNT,
                    timeout=_COUNT,
                    serviceAccountName=_STRING,
                    automountServiceAccountToken={"type": "boolean"},
                    securityContext=_POD,
                    terminationGracePeriodSeconds=_COUNT,
                )
            }
        ),
        "serving.kserve.io/v1beta1",
    ),
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
