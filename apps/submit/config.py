"""What a cluster is asked for, and what would be refused there; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.errors import ConfigError

_WORD = re.compile(r"[^\s\"'`$\\;&|<>]+")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
_MEMORY = re.compile(r"\d+[KMGT]?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTP]i?|k)?")
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}")


@dataclass
class JobConfig:
    """What any cluster is asked for."""

    name: str = "meshforge"
    """Of the job; lower-case letters, digits and dashes."""
    nodes: int = 2
    """Nodes of the run; the first has the controller, the replay and the rewards."""
    slots: int = 8
    """Device slots of a node (torchrun's --nproc-per-node): GPUs, or on CPUs ranks of the trainer."""
    gpus: int | None = None
    """GPUs asked for on each node. Default: as many as slots; 0 on CPUs."""
    port: int = 29500
    """Where torchrun's nodes meet, on the first node. All other ports are free ones that the kernel chooses."""
    interface: str = ""
    """Network interface over which nodes talk, such as ib0 or eth0. Default: the one that leads to the first node."""
    folder: str = ""
    """Absolute path of a folder that all nodes see at the same place; the job starts in it, with the project's code,
    and relative paths such as run.dir are below it."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that run on each node first, such as "source .venv/bin/activate"."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of every process, such as HF_HOME. No secrets: whoever sees the job sees them."""
    stop_s: int = 120
    """Seconds that the run has to end its step and write its checkpoint, after the cluster has told it to end."""
    submit: bool = False
    """Submit it; otherwise it is only printed."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs asked for on each node."""
        return self.slots if self.gpus is None else self.gpus

    def validate(self) -> None:
        """Raises ConfigError naming the key, its value and what it may be."""
        _match(_NAME, "name", self.name, "at most 52 lower-case letters, digits and dashes, a letter first")
        for key, low, high in (("nodes", 1, 10_000), ("slots", 1, 64), ("port", 1024, 65_535), ("stop_s", 0, 86_400)):
            value = getattr(self, key)
            if not low <= value <= high:
                raise ConfigError(f"{key} must lie in [{low}, {high}], got {value}")
        if self.gpus is not None and self.gpus not in (0, self.slots):
            raise ConfigError(
                f"gpus is {self.gpus}, slots {self.slots}: a slot is a GPU, unless there are none; leave gpus out, or 0"
            )
        if self.interface:
            _match(_INTERFACE, "interface", self.interface, "a network interface as `ip link` lists it, such as eth0")
        if not self.folder.startswith("/") or not _WORD.fullmatch(self.folder):
            raise ConfigError(
                f"folder must be an absolute path without spaces and quotes, got {self.folder!r}; all nodes have to "
                "see it"
            )
        for line in self.setup:
            if "\n" in line:
                raise ConfigError(f"setup has an entry of several lines, {line!r}; make each an entry")
        for key, value in self.env.items():
            _match(_VARIABLE, "a key of env", key, "the name of an environment variable")
            if "\n" in value or "\0" in value:
                raise ConfigError(f"env.{key} is {value!r}; a value has one line")


@dataclass
class SlurmConfig(JobConfig):
    """A job of Slurm."""

    partition: str = ""
    """Default: the cluster's."""
    account: str = ""
    """Who pays. Default: the user's."""
    qos: str = ""
    """Quality of service. Default: the user's."""
    time: str = "1:00:00"
    """Time limit: minutes, MM:SS, HH:MM:SS, D-HH or D-HH:MM:SS. At its end minus stop_s the run is told to end."""
    cpus: int = 0
    """Cores of each node; 0: the cluster's default."""
    memory: str = ""
    """Of each node, such as 200G; 0 is all of it. Default: the cluster's."""
    exclusive: bool = True
    """Nobody else on the nodes. Links between nodes are not authenticated: see README, "Clusters, ports and trust"."""
    options: list[str] = field(default_factory=list)
    """Further options of sbatch, such as --constraint=a100."""

    def validate(self) -> None:
        """Raises ConfigError."""
        super().validate()
        _match(_TIME, "time", self.time, "minutes, MM:SS, HH:MM:SS, D-HH or D-HH:MM:SS")
        for key in ("partition", "account", "qos"):
            if value := getattr(self, key):
                _match(_WORD, key, value, "one word")
        if self.memory:
            _match(_MEMORY, "memory", self.memory, "a number with K, M, G or T, such as 200G")
        if self.cpus < 0:
            raise ConfigError(f"cpus must be >= 0, got {self.cpus}; 0 is the cluster's default")
        for option in self.options:
            if not option.startswith("--") or not _WORD.fullmatch(option):
                raise ConfigError(f"options has {option!r}; write each as --key=value, in one word")


@dataclass
class KubernetesConfig(JobConfig):
    """An indexed Job of Kubernetes with a headless Service; no operator is needed."""

    namespace: str = "default"
    """Where the job runs; one of its own, with a NetworkPolicy, keeps others off its ports."""
    image: str = ""
    """Container image with Python and the project's dependencies."""
    claim: str = ""
    """PersistentVolumeClaim (ReadWriteMany) that is mounted at folder."""
    cpus: str = "16"
    """Cores of a pod."""
    memory: str = "128Gi"
    """Memory of a pod, shared memory included."""
    shared_memory: str = "32Gi"
    """Size of /dev/shm, where weights and engines meet; the default of a container, 64 MiB, is too small."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    service_account: str = ""
    """Default: the namespace's."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that nodes must have."""

    def validate(self) -> None:
        """Raises ConfigError."""
        super().validate()
        _match(_NAME, "namespace", self.namespace, "lower-case letters, digits and dashes")
        for key in ("image", "claim", "gpu_resource"):
            _match(_WORD, key, getattr(self, key), "one word; there is no default that could be right")
        for key in ("cpus", "memory", "shared_memory"):
            _match(_QUANTITY, key, getattr(self, key), "a Kubernetes quantity, such as 16 or 32Gi")
        if self.service_account:
            _match(_NAME, "service_account", self.service_account, "lower-case letters, digits and dashes")


def check_command(words: Sequence[str]) -> None:
    """Raises ConfigError unless `words` are an app of this project and its options."""
    if not words or not words[0].endswith(".py"):
        raise ConfigError(
            f"behind -- stand an app and its options, such as -- apps/grpo/main.py --trainer.steps=9; got {list(words)}"
        )
    for word in words:
        if "\n" in word or "\0" in word:
            raise ConfigError(f"the option {word!r} has several lines; write it in one")


def torchrun(cfg: JobConfig, python: str, node: str, first: str) -> list[str]:
    """The launcher on each node; `node` and `first` are shell that gives its number and the first node's name."""
    options = {"nnodes": cfg.nodes, "nproc-per-node": cfg.slots, "node-rank": node, "master-addr": first}
    options |= {"master-port": cfg.port, "shutdown-timeout": cfg.stop_s}
    return [python, "-m", "torch.distributed.run", *(f"--{key}={value}" for key, value in options.items())]


def environment(cfg: JobConfig) -> dict[str, str]:
    """What every process is to see."""
    return {**({"MESHFORGE_INTERFACE": cfg.interface} if cfg.interface else {}), **cfg.env}


def _match(pattern: re.Pattern[str], key: str, value: str, allowed: str) -> None:
    if not pattern.fullmatch(value):
        raise ConfigError(f"{key} is {value!r}; it must be {allowed}")
