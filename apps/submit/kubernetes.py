"""The manifest of a run on Kubernetes; pure.

An indexed Job has one pod a node, and a headless Service gives the first of them a name. `monarch.job.KubernetesJob` is
not used: it renders and submits in one call, and needs the MonarchMesh operator in the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from apps.submit.config import KubernetesConfig, environment, torchrun


def render(cfg: KubernetesConfig, command: Sequence[str]) -> str:
    """What kubectl is given to run `command` (an app and its options) on all nodes."""
    return yaml.safe_dump_all([_service(cfg), _job(cfg, command)], sort_keys=False, width=120)


def _service(cfg: KubernetesConfig) -> dict[str, Any]:
    # Pods find each other before any of them is ready: none ever says that it is.
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": cfg.name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(cfg), "spec": spec}


def _job(cfg: KubernetesConfig, command: Sequence[str]) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "subdomain": cfg.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cfg.stop_s + 30,
        "containers": [_container(cfg, command)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": cfg.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": cfg.shared_memory}},
        ],
    }
    pod |= {"serviceAccountName": cfg.service_account} if cfg.service_account else {}
    pod |= {"nodeSelector": dict(cfg.node_selector)} if cfg.node_selector else {}
    spec = {
        "completions": cfg.nodes,
        "parallelism": cfg.nodes,
        "completionMode": "Indexed",
        # A run that failed goes on with --resume, and somebody should look first.
        "backoffLimit": 0,
        "template": {"metadata": {"labels": {"app": cfg.name}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(cfg), "spec": spec}


def _container(cfg: KubernetesConfig, command: Sequence[str]) -> dict[str, Any]:
    # Index 0 is the first node; its host name is the job's name and the index.
    launch = torchrun(cfg, "python", '"$JOB_COMPLETION_INDEX"', f"{cfg.name}-0.{cfg.name}")
    script = "; ".join(["set -e", *cfg.setup, f'exec {" ".join(launch)} "$@"'])
    # Kubernetes itself replaces $(NAME) in what it starts, unless the $ is doubled.
    words = [word.replace("$(", "$$(") for word in ("bash", "-c", script, "bash", *command)]
    env = [{"name": key, "value": value.replace("$(", "$$(")} for key, value in environment(cfg).items()]
    amounts = {"cpu": cfg.cpus, "memory": cfg.memory}
    amounts |= {cfg.gpu_resource: str(cfg.gpus_per_node)} if cfg.gpus_per_node else {}
    return {
        "name": "node",
        "image": cfg.image,
        "command": words,
        "workingDir": cfg.folder,
        **({"env": env} if env else {}),
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "volumeMounts": [{"name": "shared", "mountPath": cfg.folder}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def _metadata(cfg: KubernetesConfig) -> dict[str, Any]:
    return {"name": cfg.name, "namespace": cfg.namespace, "labels": {"app": cfg.name}}
