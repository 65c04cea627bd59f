"""Write a Kubernetes Deployment and Service for a server: vLLM's or lorakit's own."""

from collections.abc import Sequence
from typing import Any

from lorakit.files.yaml_text import yaml_text
from lorakit.launch.job_files import check_kubernetes_names


def deployment(command: Sequence[str], *, name: str, image: str, claim: str, folder: str, port: int, gpus: int) -> str:
    """Return YAML of a Deployment whose pods run ``command``, and of a Service before them.

    claim: a PersistentVolumeClaim with base and adapters, mounted read-only at ``folder``, where the command runs.
    A pod gets requests when /health answers, and has a minute to finish those under way when it is stopped.

    Raises:
        RunError: Kubernetes does not accept a name.
    """
    check_kubernetes_names(name, claim)
    labels = {"app": name}
    probe: dict[str, Any] = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10}
    container: dict[str, Any] = {
        "name": "server", "image": image, "command": list(command), "workingDir": folder,
        "ports": [{"containerPort": port}],
        "startupProbe": {**probe, "failureThreshold": 360},  # an hour, because large bases are read and compiled first
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        **({"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}),
        "volumeMounts": [
            {"name": "work", "mountPath": folder, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip
    pod = {
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # for NCCL: the default 64 MB are too small
        ],
    }
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": port}]},
        },
    ]
    return "---\n".join(yaml_text(document) for document in documents)
