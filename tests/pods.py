"""Pods of a JobSet as processes of this machine: what a kubelet makes of a manifest."""

import os
import re
from pathlib import Path

from forked import Program
from pibroch.ports import free_port


class Pods:
    """The processes of a manifest.

    Leaving the ``with`` block kills what still runs.

    Args:
        documents: a ConfigMap and a JobSet.
        folders: what stands for persistent volumes, by the name of their claim.
        folder: for what pods see of the ConfigMap.
        secret: in the Kubernetes Secret.
    """

    def __init__(self, documents, folders, folder, secret):
        self._files, self._jobset = documents
        self._folders = folders
        self._folder = folder
        self._secret = secret
        self._ports = {}
        self._programs = {}

    def __enter__(self):
        for job in self._jobset["spec"]["replicatedJobs"]:
            started = {name for name, _ in self._programs}
            assert all(each["name"] in started for each in job.get("dependsOn", []))
            for index in range(job["template"]["spec"]["completions"]):
                self._programs[job["name"], index] = self._start(job, index)
        return self

    def __exit__(self, *_):
        for program in self._programs.values():
            program.__exit__()

    def program(self, job, index):
        return self._programs[job, index]

    def end(self):
        """Exit codes and errors of those whose end is the job's success."""
        names = self._jobset["spec"]["successPolicy"]["targetReplicatedJobs"]
        ended = [each.end() for key, each in self._programs.items() if key[0] in names]
        return [(each.returncode, each.stderr) for each in ended]

    def _start(self, job, index):
        spec = job["template"]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        variables = {}
        for each in container["env"]:
            value = each["value"] if "value" in each else self._from(each["valueFrom"], index)
            variables[each["name"]] = expanded(value, variables)
        places = self._mounted(spec, container)
        variables = {name: self._here(text, places) for name, text in variables.items()}
        arguments = [self._here(expanded(each, variables), places) for each in container["args"]]
        assert container["command"] == ["pibroch"]
        return Program("-m", "pibroch", *arguments, env={**os.environ, **variables})

    def _from(self, source, index):
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["key"] == "secret"
            return self._secret
        assert "job-completion-index" in source["fieldRef"]["fieldPath"]
        return str(index)

    def _mounted(self, spec, container):
        """Folders of this machine by the path at which pods see them."""
        volumes = {each["name"]: each for each in spec["volumes"]}
        results = {}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" not in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                results[mount["mountPath"]] = self._folders[claim]
                continue
            assert volume["configMap"]["name"] == self._files["metadata"]["name"]
            results[mount["mountPath"]] = self._folder
        for name, text in self._files["data"].items():
            Path(self._folder, name).write_text(self._here(text, results))
        return results

    def _here(self, text, places):
        """Paths, names and ports of the cluster as those of this machine."""
        for path, folder in places.items():
            text = re.sub(rf"(?<![\w/]){path}(?=/|\"|$)", str(folder), text)
        name = self._jobset["metadata"]["name"]
        subdomain = self._jobset["spec"]["network"]["subdomain"]
        text = re.sub(rf"{name}-[a-z-]+-\d+-\d+\.{subdomain}\b", "127.0.0.1", text)
        return re.sub(r"\b29[56]00\b", self._port, text)

    def _port(self, match):
        return str(self._ports.setdefault(match[0], free_port()))


def expanded(text, variables):
    """With the values of variables in place of ``$(NAME)``."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)
