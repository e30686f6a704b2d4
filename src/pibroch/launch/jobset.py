"""A job as a JobSet of Kubernetes (``jobset.x-k8s.io/v1alpha2``).

Each group is a replicated job of indexed pods, one process each; a pod's index is its number. Pods
find one another by the names that JobSet keeps for them. What the fields mean is checked in tests
against the models that the Kubeflow project generates from JobSet's and Kubernetes' API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pibroch.errors import ConfigError
from pibroch.launch.job import Group, Job, Place, variables

Document = dict[str, object]
MASTER_PORT = 29500
RENDEZVOUS_PORT = 29600
RECIPES = "/etc/pibroch"
"""Where the recipe lies in pods."""
SECRET_KEY = "secret"
"""The entry of the Kubernetes Secret that holds the job's."""
WRONG_INPUT = 2
"""The exit code of what starting again would not help."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_NUMBER = "PIBROCH_NUMBER"
_PROCESSORS = r"[0-9]+(\.[0-9]+)?m?"
_QUANTITY = _PROCESSORS + r"|[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)"
_LONGEST_NAME = 63
_SUFFIX = "-abcde"
"""What Kubernetes appends to a pod's name."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A persistent volume claim in all pods.

    Attributes:
        name: of the claim.
        path: where it is mounted.
        is_read_only: whether pods may only read.
    """

    name: str
    path: str
    is_read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Claim:
        """From ``NAME:PATH`` or ``NAME:PATH:ro``.

        >>> Claim.parse("clicks:/data:ro")
        Claim(name='clicks', path='/data', is_read_only=True)

        Raises:
            ConfigError: when it is neither.
        """
        match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*):(/[^:]*)(:ro)?", text)
        if match is None:
            raise ConfigError(
                f"--claim {text}", "NAME:PATH, with :ro behind it where pods may only read"
            )
        return cls(match[1], match[2], match[3] is not None)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What pods are made of.

    Attributes:
        image: with pibroch, whose command ``pibroch`` is found in it.
        secret: the Kubernetes Secret that holds the job's.
        claims: of volumes.
        resources: of each pod by role, those of ``""`` for all other roles.
        namespace: the one of ``kubectl`` when absent.
        variables: of the ranks' environment, from entries of that Secret with the same names.
    """

    image: str
    secret: str
    claims: tuple[Claim, ...] = ()
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    namespace: str | None = None
    variables: tuple[str, ...] = ()

    def of_role(self, role: str) -> Mapping[str, str]:
        """Resources of a role's pods."""
        return self.resources.get(role, self.resources.get("", {}))

    def processors(self, role: str) -> int | None:
        """Whole processors that a pod of a role may use.

        >>> Cluster("image", "secret", resources={"": {"cpu": "2500m"}}).processors("trainer")
        2
        """
        text = self.of_role(role).get("cpu")
        if text is None:
            return None
        number = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
        return max(1, int(number))


def parse_resources(texts: list[str]) -> dict[str, dict[str, str]]:
    """Resources by role from ``cpu=4,memory=8Gi``, with ``ROLE:`` before those of one role.

    >>> parse_resources(["cpu=2", "trainer:cpu=8,memory=16Gi"])
    {'': {'cpu': '2'}, 'trainer': {'cpu': '8', 'memory': '16Gi'}}

    Raises:
        ConfigError: for other texts.
    """
    results = dict[str, dict[str, str]]()
    for text in texts:
        role, _, listed = text.rpartition(":")
        pairs = dict(
            (name, value) for name, _, value in (each.partition("=") for each in listed.split(","))
        )
        are_right = all(name and re.fullmatch(_QUANTITY, value) for name, value in pairs.items())
        if not are_right or not re.fullmatch(_PROCESSORS, pairs.get("cpu", "1")):
            raise ConfigError(
                f"--resources {text}",
                "NAME=QUANTITY with commas between them, as cpu=4,memory=8Gi, and ROLE: before"
                " those of one role",
            )
        results[role] = pairs
    return results


def place_of(job: Job, name: str) -> Place:
    """Where the processes of a job set meet: rank 0's pod, by the name that stays."""
    ranks = next(group for group in job.groups if group.are_ranks)
    host = f"{name}-{ranks.role}-0-0.{name}"
    return Place(host, MASTER_PORT, f"tcp://{host}:{RENDEZVOUS_PORT}")


def manifest(job: Job, name: str, recipe: tuple[str, str], cluster: Cluster) -> list[Document]:
    """A ConfigMap with the recipe, and the JobSet.

    Args:
        job: the processes; they find the recipe in :data:`RECIPES`.
        name: of the job set.
        recipe: name and content of its file.
        cluster: what pods are made of.

    Raises:
        ConfigError: for a name that Kubernetes does not take, or a run that is kept nowhere.
    """
    _check(job, name, cluster)
    metadata = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    place = place_of(job, name)
    ranks = [group.role for group in job.groups if group.are_ranks]
    wrong_input = {
        "name": "wrongInput",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": name,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ranks},
        "failurePolicy": {
            "maxRestarts": job.restarts.most,
            "restartStrategy": "BlockingRecreate",
            "rules": [] if job.restarts.after_any_end else [wrong_input],
        },
        "replicatedJobs": [_replicated(job, group, name, place, cluster) for group in job.groups],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-recipe", **metadata},
            "data": {recipe[0]: recipe[1]},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, **metadata},
            "spec": spec,
        },
    ]


def _check(job: Job, name: str, cluster: Cluster) -> None:
    longest = max(
        (f"{name}-{group.role}-0-{group.count - 1}{_SUFFIX}" for group in job.groups), key=len
    )
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(longest) > _LONGEST_NAME:
        raise ConfigError(
            f"--name {name}",
            "small letters, digits and hyphens, of which pods named like"
            f" {longest} have at most {_LONGEST_NAME}",
            "give a shorter --name",
        )
    folder = PurePosixPath(job.folder or ".")
    if not any(
        folder.is_relative_to(claim.path) and not claim.is_read_only for claim in cluster.claims
    ):
        raise ConfigError(
            f"--run-dir {folder}, which no pod could find again",
            "a folder on a volume that all pods may write to",
            "add --claim NAME:PATH, of a persistent volume claim, and put --run-dir below PATH",
        )


def _replicated(job: Job, group: Group, name: str, place: Place, cluster: Cluster) -> Document:
    entry: Document = {"name": group.role}
    if group.needs:
        entry["dependsOn"] = [{"name": role, "status": "Ready"} for role in group.needs[:1]]
    pod = {
        "metadata": {"labels": _labels(group)},
        "spec": {
            "restartPolicy": "Never",
            "containers": [_container(job, group, place, cluster)],
            "volumes": [
                {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
                *(
                    {
                        "name": f"claim-{number}",
                        "persistentVolumeClaim": {
                            "claimName": claim.name,
                            "readOnly": claim.is_read_only,
                        },
                    }
                    for number, claim in enumerate(cluster.claims)
                ),
            ],
        },
    }
    return entry | {
        "replicas": 1,
        "template": {
            "metadata": {"labels": _labels(group)},
            "spec": {
                "completionMode": "Indexed",
                "completions": group.count,
                "parallelism": group.count,
                **_restarts(job, group),
                "template": pod,
            },
        },
    }


def _labels(group: Group) -> dict[str, str]:
    return {"app.kubernetes.io/name": "pibroch", "app.kubernetes.io/component": group.role}


def _restarts(job: Job, group: Group) -> Document:
    """A pod that ends before its time: the job is lost with it, or it is started again alone."""
    restarts = group.restarts
    if restarts is None:
        result: Document = {"backoffLimit": 0}
    else:
        result = {"backoffLimitPerIndex": restarts.most}
        if not restarts.or_without:
            result["maxFailedIndexes"] = 0
    if not (restarts or job.restarts).after_any_end:
        codes = {"containerName": "pibroch", "operator": "In", "values": [WRONG_INPUT]}
        result["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    return result


def _container(job: Job, group: Group, place: Place, cluster: Cluster) -> Document:
    number = f"$({_NUMBER})"
    values = variables(job, group, 0, place, range(1))
    if group.are_ranks:
        values["RANK"] = number
    environment: list[Document] = [
        {"name": _NUMBER, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    ]
    environment += [{"name": key, "value": value} for key, value in values.items()]
    secrets = {name: name for name in cluster.variables} if group.are_ranks else {}
    if sum(each.count for each in job.groups) > 1:
        secrets["PIBROCH_RPC_SECRET"] = SECRET_KEY
    environment += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": cluster.secret, "key": key}}}
        for name, key in secrets.items()
    ]
    own = ["--number", number] if group.is_numbered else []
    resources = dict(cluster.of_role(group.role))
    return {
        "name": "pibroch",
        "image": cluster.image,
        "command": ["pibroch"],
        "args": [*group.command, *own, *group.again],
        "env": environment,
        "resources": {"requests": resources, "limits": resources} if resources else {},
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPES, "readOnly": True},
            *(
                {"name": f"claim-{index}", "mountPath": claim.path, "readOnly": claim.is_read_only}
                for index, claim in enumerate(cluster.claims)
            ),
        ],
    }
