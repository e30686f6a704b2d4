"""Manifests against the published models of JobSet and Kubernetes, and what becomes of a job."""

import copy
import re

import jsonschema
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from pibroch.config import to_toml
from pibroch.errors import ConfigError
from pibroch.launch.job import Job, Restarts
from pibroch.launch.jobset import Claim, Cluster, manifest, parse_resources
from small_run import make_config, run_command

IMAGE = "registry.local/pibroch:1"
ROLES = ["--embedding-servers", 2, "--oracle", "--data-processors", 3]
WORDS = {
    # what is a word of a few in the API; the models take any text
    "JobsetV1alpha2DependsOn.status": ["Ready", "Complete"],
    "JobsetV1alpha2FailurePolicy.restartStrategy": ["Recreate", "BlockingRecreate"],
    "JobsetV1alpha2FailurePolicyRule.action": [
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
    ],
    "JobsetV1alpha2SuccessPolicy.operator": ["All", "Any"],
    "IoK8sApiBatchV1JobSpec.completionMode": ["Indexed", "NonIndexed"],
    "IoK8sApiBatchV1PodFailurePolicyRule.action": ["FailJob", "FailIndex", "Ignore", "Count"],
    "IoK8sApiBatchV1PodFailurePolicyOnExitCodesRequirement.operator": ["In", "NotIn"],
    "IoK8sApiCoreV1PodSpec.restartPolicy": ["Always", "OnFailure", "Never"],
}
"""Of JobSet 0.8 (config/components/crd, enums) and Kubernetes' API reference."""
REASONS = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]
"""Of a failed job; JobSet's webhook refuses others."""
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.fixture(scope="module")
def schema():
    """The models as a JSON schema that knows no other fields."""
    result = JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    for name, definition in result["$defs"].items():
        if "actual_instance" in definition["properties"]:  # a number or a text
            result["$defs"][name] = {"type": ["number", "string"]}
        definition["additionalProperties"] = False
    result["additionalProperties"] = False
    for place, words in WORDS.items():
        definition, _, name = place.partition(".")
        result["$defs"][definition]["properties"][name]["enum"] = words
    rule = result["$defs"]["JobsetV1alpha2FailurePolicyRule"]["properties"]
    rule["onJobFailureReasons"] = {"type": "array", "items": {"enum": REASONS}}
    depends = result["$defs"]["JobsetV1alpha2ReplicatedJob"]["properties"]["dependsOn"]
    depends["maxItems"] = 1
    return result


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A ConfigMap and a JobSet, as the command line prints them."""
    recipe = tmp_path_factory.mktemp("job") / "mine.toml"
    config = make_config("/data/clicks", "embedding.exchange=lookahead", "train.threads=none")
    recipe.write_text(to_toml(config.model_dump()))
    sizes = ["--resources", "cpu=1500m,memory=2Gi", "--resources", "trainer:cpu=4"]
    claims = ["--claim", "runs:/runs", "--claim", "clicks:/data:ro"]
    kept = ["--run-dir", "/runs/a", *claims, *sizes]
    ended = run_command("job", "manifest", recipe, "--image", IMAGE, "--ranks", 2, *ROLES, *kept)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


@pytest.fixture(scope="module")
def jobs(documents):
    return {each["name"]: each for each in documents[1]["spec"]["replicatedJobs"]}


def container(job):
    (result,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return result


def variables(job):
    return {each["name"]: each.get("value") for each in container(job)["env"]}


def test_the_published_models_know_every_field(schema, documents):
    recipe, jobset = documents
    jsonschema.validate(jobset, schema)
    assert set(recipe) == {"apiVersion", "kind", "metadata", "data"}
    assert (recipe["apiVersion"], recipe["kind"]) == ("v1", "ConfigMap")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_secrets_of_a_recipe_are_entries_of_the_kubernetes_secret(tmp_path):
    kafka = 'kafka = { "sasl.password" = "horse", "ssl.key.password" = { env = "KEY_PASSWORD" } }'
    stream = 'kind = "kafka"\nbrokers = "b:1"\ntopic = "t"\nschema_file = "s"\n'
    recipe = tmp_path / "clicks.toml"
    recipe.write_text(f"[data.stream]\n{stream}{kafka}\n[train]\nsteps = 1\n")
    words = ["--image", IMAGE, "--ranks", 2, "--run-dir", "/runs/a", "--claim", "runs:/runs"]
    result = run_command("job", "manifest", recipe, *words)
    assert result.returncode == 0 and "horse" not in result.stdout, result.stderr
    documents = list(yaml.safe_load_all(result.stdout))
    (job,) = documents[1]["spec"]["replicatedJobs"]
    sources = {each["name"]: each.get("valueFrom") for each in container(job)["env"]}
    for name in ("KEY_PASSWORD", "PIBROCH_SECRET_KAFKA_SASL_PASSWORD"):
        assert sources[name] == {"secretKeyRef": {"name": "pibroch", "key": name}}


def set_restart(spec):
    spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["restartPolicy"] = "Sometimes"


@pytest.mark.parametrize(
    "damage",
    [
        lambda spec: spec.update(backoffLimit=3),
        lambda spec: spec["failurePolicy"]["rules"][0].update(action="Restart"),
        lambda spec: spec["replicatedJobs"][1].update(replicas="two"),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(backofLimit=0),
        lambda spec: spec["successPolicy"].pop("operator"),
        set_restart,
    ],
)
def test_other_fields_and_words_are_refused(schema, documents, damage):
    jobset = copy.deepcopy(documents[1])
    damage(jobset["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, schema)


def test_what_the_webhook_of_jobset_asks_for(documents):
    """Names of pods, of jobs that others wait for, and of those that make it a success."""
    jobset = documents[1]
    spec = jobset["spec"]
    names = []
    for job in spec["replicatedJobs"]:
        assert all(each["name"] in names for each in job.get("dependsOn", []))
        names.append(job["name"])
        last = job["template"]["spec"]["completions"] - 1
        pod = f"{jobset['metadata']['name']}-{job['name']}-{job['replicas'] - 1}-{last}-abcde"
        assert LABEL.fullmatch(pod)
    assert "dependsOn" not in spec["replicatedJobs"][0]
    assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= set(names)
    assert LABEL.fullmatch(spec["network"]["subdomain"])
    rules = [rule["name"] for rule in spec["failurePolicy"]["rules"]]
    assert len(set(rules)) == len(rules)
    assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule) for rule in rules)


def test_processes_meet_at_the_name_of_rank_0(documents, jobs):
    host = "mine-trainer-0-0.mine"
    own = variables(jobs["trainer"])
    assert own["MASTER_ADDR"] == host and own["WORLD_SIZE"] == "2"
    assert own["RANK"] == "$(PIBROCH_NUMBER)" and own["LOCAL_WORLD_SIZE"] == "1"
    for job in jobs.values():
        assert variables(job)["PIBROCH_RENDEZVOUS"].startswith(f"tcp://{host}:")
        assert container(job)["env"][0]["valueFrom"] == {
            "fieldRef": {
                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            }
        }
        assert container(job)["env"][-1] == {
            "name": "PIBROCH_RPC_SECRET",
            "valueFrom": {"secretKeyRef": {"name": "pibroch", "key": "secret"}},
        }
    assert documents[1]["spec"]["network"]["subdomain"] == "mine"


def test_a_lost_pod_is_what_the_jobs_policy_says(documents, jobs):
    def rules_of(name):
        spec = jobs[name]["template"]["spec"]
        return {key: spec[key] for key in spec if "ackoff" in key or "FailedIndexes" in key}

    assert documents[1]["spec"]["failurePolicy"]["maxRestarts"] == 10
    assert rules_of("trainer") == rules_of("embedding-server") == {"backoffLimit": 0}
    assert rules_of("oracle") == {"backoffLimitPerIndex": 10, "maxFailedIndexes": 0}
    assert rules_of("data-processor") == {"backoffLimitPerIndex": 10}
    for job in jobs.values():
        (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]


def test_each_process_has_the_threads_of_its_pod(documents, jobs):
    assert "\nthreads = 4\n" in documents[0]["data"]["mine.toml"]
    for name in ("embedding-server", "data-processor"):
        arguments = container(jobs[name])["args"]
        assert arguments[arguments.index("--threads") + 1] == "1"
        assert container(jobs[name])["resources"]["limits"] == {"cpu": "1500m", "memory": "2Gi"}
    assert container(jobs["trainer"])["resources"]["limits"] == {"cpu": "4"}


def test_a_name_that_is_too_long_and_a_run_that_is_kept_nowhere(tmp_path):
    from pibroch.train.job import training_job

    job = training_job(make_config("/data"), tmp_path, ["train"], 2, Restarts(1))
    kept = Cluster(IMAGE, "pibroch", (Claim("runs", str(tmp_path)),))
    assert len(manifest(job, "a" * 45, ("a.toml", ""), kept)) == 2
    with pytest.raises(ConfigError, match="at most 63"):
        manifest(job, "a" * 46, ("a.toml", ""), kept)
    with pytest.raises(ConfigError, match="small letters"):
        manifest(job, "My_job", ("a.toml", ""), kept)
    read_only = Cluster(IMAGE, "pibroch", (Claim("runs", str(tmp_path), is_read_only=True),))
    for cluster in (Cluster(IMAGE, "pibroch"), read_only):
        with pytest.raises(ConfigError, match="no pod could find again"):
            manifest(job, "a", ("a.toml", ""), cluster)


@pytest.mark.parametrize("text", ["cpu", "cpu=4Gi", "cpu=x", "trainer:", "=4", "cpu=.", ""])
def test_resources_that_are_none(text):
    with pytest.raises(ConfigError, match="QUANTITY"):
        parse_resources([text])


@pytest.mark.parametrize("text", ["runs", "runs:relative", "runs:/a:rw", "Runs:/a", ":/a"])
def test_claims_that_are_none(text):
    with pytest.raises(ConfigError, match="NAME:PATH"):
        Claim.parse(text)


def test_a_job_without_a_secret_of_its_own_asks_for_none():
    from pibroch.train.job import training_job

    alone: Job = training_job(make_config("/data"), "/runs/a", ["train"], 1, Restarts(1))
    cluster = Cluster(IMAGE, "pibroch", (Claim("runs", "/runs"),))
    (job,) = manifest(alone, "a", ("a.toml", ""), cluster)[1]["spec"]["replicatedJobs"]
    assert "PIBROCH_RPC_SECRET" not in variables(job)
