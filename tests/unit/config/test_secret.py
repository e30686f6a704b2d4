"""Secrets of recipes: known to a run's processes, and written nowhere."""

import os
import tomllib

import pytest

from pibroch.cli.train import _begin
from pibroch.config import load_recipe, to_toml
from pibroch.config.recipes import change_config, check_config
from pibroch.config.secret import GIVEN, hand_on, refuse_in_full, secrets_in
from pibroch.errors import ConfigError
from pibroch.train.run_directory import RunDirectory

PASSWORD = "correct-horse-battery"
VARIABLE = f"{GIVEN}KAFKA_SASL_PASSWORD"
KEY = "data.stream.kafka.sasl.password"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("BROKERS_PASSWORD", PASSWORD)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


@pytest.fixture
def write(tmp_path):
    """Writes a recipe of a stream of Kafka, and gives its name."""

    def write(kafka):
        path = tmp_path / "clicks.toml"
        stream = '[data.stream]\nkind = "kafka"\nbrokers = "b:1"\ntopic = "t"\nschema_file = "s"\n'
        path.write_text(f"{stream}{kafka}\n[train]\nsteps = 1\n")
        return str(path)

    return write


def password(config):
    return config.data.stream.kafka["sasl.password"].read("the password")


def spellings(config):
    """All that is made of a configuration to be written or shown."""
    return [repr(config), config.model_dump_json(), to_toml(config.model_dump(mode="json"))]


@pytest.mark.parametrize(
    "kafka",
    [
        'kafka = { "sasl.password" = { env = "BROKERS_PASSWORD" } }',
        f'kafka = {{ "sasl.password" = "{PASSWORD}" }}',
        f'kafka.sasl.password = "{PASSWORD}"',
        f'[data.stream.kafka]\nsasl.password = "{PASSWORD}"\nsasl.username = "u"',
    ],
)
def test_a_secret_is_read_and_not_written(write, kafka):
    config = load_recipe(write(kafka))
    assert password(config) == PASSWORD
    assert not any(PASSWORD in text for text in spellings(config))
    hand_on(config)
    again = check_config(tomllib.loads(to_toml(config.model_dump())), "config.toml")
    assert password(again) == PASSWORD


def test_a_secret_of_digits_is_a_text(write):
    config = load_recipe(write(""), [f"{KEY}=1234567"])
    assert password(config) == "1234567"
    assert not any("1234567" in text for text in spellings(config))


def test_a_file_is_read_unless_others_can(write, tmp_path):
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    file.chmod(0o600)
    config = load_recipe(write(""), [f"{KEY}.file={file}"])
    hand_on(config)
    assert password(config) == PASSWORD
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        hand_on(config)


def test_the_last_place_that_is_said_counts(write, tmp_path):
    recipe = write('kafka = { "sasl.password" = { env = "BROKERS_PASSWORD" } }')
    by_file = change_config(load_recipe(recipe), ['data.stream.kafka={"sasl.password"={file="f"}}'])
    (secret,) = secrets_in(by_file)
    assert (secret.env, secret.file) == (None, "f")
    (secret,) = secrets_in(load_recipe(recipe, [f"{KEY}.env=OTHER"]))
    assert (secret.env, secret.file) == ("OTHER", None)


@pytest.mark.parametrize(
    "kafka",
    [
        f'kafka = {{ "sasl.password" = ["{PASSWORD}"] }}',
        f'kafka = {{ "sasl.password" = "{PASSWORD}" }}\nformat = "parquet"',
        f'kafka = {{ "sasl.password" = "{PASSWORD}", "group.id" = "g" }}',
        f'kafka = {{ "sasl.password" = "{PASSWORD}", "client.id" = [1] }}',
        f'kafka = {{ "sasl.password" = "{PASSWORD}" }}\npassword = "{PASSWORD}"',
    ],
)
def test_no_message_has_a_secret(write, kafka):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(kafka))
    assert PASSWORD not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("auto.offset.reset", '"earliest"'),
        ("bootstrap.servers", '"b:1"'),
        ("enable.auto.commit", "true"),
        ("enable.partition.eof", "false"),
        ("group.instance.id", '"g"'),
        ("isolation.level", '"read_uncommitted"'),
        ("session.timeout.ms", "1000"),
        ("test.mock.num.brokers", "1"),
    ],
)
def test_settings_that_make_a_stream_inexact_are_refused_by_name(write, setting, value):
    with pytest.raises(ConfigError, match=f"takes no `{setting}"):
        load_recipe(write(f'kafka = {{ "{setting}" = {value} }}'))


def test_settings_that_say_what_holds_anyway_are_none(write):
    kafka = '"auto.offset.reset" = "error", "enable.auto.commit" = false, "client.id" = "me"'
    assert len(load_recipe(write(f"kafka = {{ {kafka} }}")).data.stream.kafka) == 3


def begin_run(recipe, folder, *changes):
    config, path = _begin(recipe, list(changes), folder, False)
    run = RunDirectory(path)
    run.create(config)
    for file in filter(os.path.isfile, path.rglob("*")):
        assert PASSWORD not in file.read_text()
    os.environ.pop(VARIABLE, None)


def test_a_run_goes_on_with_a_secret_by_reference(write, tmp_path):
    begin_run(write(""), tmp_path / "run", f"{KEY}.env=BROKERS_PASSWORD")
    config, _ = _begin(None, [], tmp_path / "run", True)
    assert password(config) == PASSWORD


def test_a_run_goes_on_with_a_secret_that_is_given_again(write, tmp_path, monkeypatch):
    recipe = write(f'kafka = {{ "sasl.password" = "{PASSWORD}" }}')
    begin_run(recipe, tmp_path / "run")
    with pytest.raises(ConfigError, match=f"is kept nowhere; need .* set {VARIABLE}, or"):
        _begin(None, [], tmp_path / "run", True)
    for words in ((recipe, []), (None, [f"{KEY}={PASSWORD}"]), (None, [f"{KEY}.env=X"])):
        monkeypatch.setenv("X", PASSWORD)
        config, _ = _begin(*words, tmp_path / "run", True)
        assert password(config) == PASSWORD
        os.environ.pop(VARIABLE, None)


def test_a_missing_secret_is_named_before_a_run_begins(write, tmp_path):
    with pytest.raises(ConfigError, match="the variable NOWHERE, and is not"):
        _begin(write(""), [f"{KEY}.env=NOWHERE"], tmp_path / "run", False)
    assert not (tmp_path / "run").exists()


def test_overrides_that_are_written_down_may_not_be_secrets():
    refuse_in_full(
        [
            "data.dir=/secret/passwords",
            f"{KEY}.env=X",
            'data.stream.kafka={"sasl.password"={env="X"}}',
        ]
    )
    for text in (f"{KEY}={PASSWORD}", f'data.stream.kafka={{"sasl.password"="{PASSWORD}"}}'):
        with pytest.raises(ConfigError, match="a secret in full") as caught:
            refuse_in_full([text])
        assert PASSWORD not in str(caught.value)
