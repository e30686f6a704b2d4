"""Training in one process needs neither Linux nor POSIX: users have laptops."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("one_process.py")


def run(*arguments):
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    environment = os.environ | {"PIBROCH_CACHE": str(arguments[-1])}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.endswith("done\n")


def test_embeddings_train_without_what_other_systems_lack():
    run("embeddings")


def test_a_run_trains_resumes_and_is_evaluated_without_it(tmp_path):
    run("run", tmp_path)
