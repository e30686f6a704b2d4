"""The job's secret: where it is looked for, and what is refused."""

import multiprocessing
import os
import tempfile

import pytest

from pibroch.errors import ConfigError
from pibroch.wire import secret as secret_module
from pibroch.wire.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret, new_secret

LONG = "sixteen bytes or more"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "job.secret"
    path.write_text(LONG + " in a file\n")
    path.chmod(0o600)
    return path


def find(option=None, environ=None, local=False, key="127.0.0.1:29500"):
    return find_secret(option, environ or {}, local=local, key=key)


def test_the_option_comes_before_the_environment_and_that_before_a_file(secret_file):
    environ = {
        SECRET_VARIABLE: LONG + " in the environment",
        SECRET_FILE_VARIABLE: str(secret_file),
    }
    assert find(LONG, environ) == LONG.encode()
    assert find(LONG.encode(), environ) == LONG.encode()
    assert find(None, environ) == LONG.encode() + b" in the environment"
    del environ[SECRET_VARIABLE]
    assert find(None, environ) == LONG.encode() + b" in a file"


def test_a_short_secret_is_refused_wherever_it_comes_from(secret_file):
    secret_file.write_text("too short")
    for option, environ in [
        ("x" * 15, {}),
        (None, {SECRET_VARIABLE: "x"}),
        (None, {SECRET_FILE_VARIABLE: str(secret_file)}),
    ]:
        with pytest.raises(ConfigError, match="need 16 to 4096 bytes"):
            find(option, environ)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused(secret_file, mode):
    secret_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600"):
        find(environ={SECRET_FILE_VARIABLE: str(secret_file)})


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        find(environ={SECRET_FILE_VARIABLE: str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="no regular file"):
        find(environ={SECRET_FILE_VARIABLE: str(tmp_path)})


def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        find(environ={SECRET_FILE_VARIABLE: str(tmp_path / "pipe")})


def test_several_machines_need_a_secret_and_the_error_says_how_to_make_one():
    with pytest.raises(ConfigError, match="new_secret"):
        find(local=False)


def test_new_secrets_differ_and_are_long_enough():
    assert new_secret() != new_secret() and find(new_secret())


def test_on_one_machine_all_find_the_same_secret_of_their_rendezvous(temporary):
    first = find(local=True)
    assert first == find(local=True) and len(first) == 32
    assert first != find(local=True, key="127.0.0.1:29501")
    directory = temporary / f"pibroch-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [(path.name, path.stat().st_mode & 0o777) for path in directory.iterdir()] == [
        ("secret", 0o600)
    ]


def _find_together(directory, barrier, found):
    tempfile.tempdir = directory
    barrier.wait(60)
    found.put(find(local=True))


def test_processes_that_start_together_agree(temporary):
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(8)
    found = fork.Queue()
    processes = [
        fork.Process(target=_find_together, args=(str(temporary), barrier, found)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    secrets = {found.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(secrets) == 1
    assert os.listdir(temporary / f"pibroch-{os.getuid()}") == ["secret"]


def test_a_directory_that_others_can_enter_is_refused(temporary):
    directory = temporary / f"pibroch-{os.getuid()}"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="not a directory of this user alone"):
        find(local=True)


def test_a_link_in_place_of_the_directory_is_refused(temporary):
    (temporary / "elsewhere").mkdir(mode=0o700)
    (temporary / f"pibroch-{os.getuid()}").symlink_to(temporary / "elsewhere")
    with pytest.raises(ConfigError, match="not a directory of this user alone"):
        find(local=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user_is_refused(temporary):
    directory = temporary / f"pibroch-{os.getuid()}"
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)
    with pytest.raises(ConfigError, match="not a directory of this user alone"):
        find(local=True)


def test_a_secret_file_that_others_can_read_is_refused_on_one_machine_too(temporary):
    find(local=True)
    path = temporary / f"pibroch-{os.getuid()}" / "secret"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_module.find_secret(None, {}, local=True, key="")


def test_without_a_folder_for_it_the_error_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match=r"no secret in .*Not a directory.*set TMPDIR, or PIBROCH_RPC"
    ):
        find(local=True)
