"""The README's way from raw clicks to an answer.

Its own four commands, by a shell, in an empty folder.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pibroch.ports import free_port
from served import until

README = Path(__file__).parents[3] / "README.md"


def readme_commands():
    text = README.read_text(encoding="utf-8")
    block = re.search(r"four commands:\n\n```\w*\n(.*?)```", text, re.DOTALL)[1]
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]


def write_log(path, count):
    """Criteo's form: a label, 13 numbers, 26 texts, tabs."""
    rng = np.random.default_rng(7)
    with gzip.open(path, "wt") as file:
        for _ in range(count):
            numbers = [
                "" if rng.random() < 0.1 else str(value) for value in rng.integers(0, 50, 13)
            ]
            texts = [
                "" if rng.random() < 0.1 else f"{value:08x}" for value in rng.integers(0, 30, 26)
            ]
            file.write("\t".join([str(int(rng.random() < 0.3)), *numbers, *texts]) + "\n")


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("zcat")), reason="needs curl and zcat"
)
def test_from_raw_clicks_to_an_answer(tmp_path):
    prepare, train, serve, ask = readme_commands()
    assert serve == "pibroch serve" and ask.count(":8000") == 1
    write_log(tmp_path / "train.tsv.gz", 1500)
    here = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    shell = {"shell": True, "cwd": tmp_path, "env": environment, "text": True}
    for command in (prepare, train):
        ran = subprocess.run(command, capture_output=True, timeout=250, check=False, **shell)
        assert ran.returncode == 0, ran.stderr
    port = free_port()  # another server may have 8000 here
    with (tmp_path / "said").open("w+") as log:
        server = subprocess.Popen(f"exec {serve} --port {port}", stdout=log, stderr=log, **shell)
        try:
            until(
                lambda: server.poll() is not None or f":{port}" in (tmp_path / "said").read_text()
            )
            assert server.poll() is None, (tmp_path / "said").read_text()
            answer = subprocess.run(
                ask.replace(":8000", f":{port}"),
                capture_output=True,
                timeout=60,
                check=True,
                **shell,
            )
        finally:
            server.terminate()
            server.wait(60)
    scores = json.loads(answer.stdout)
    assert scores["model_name"].startswith("criteo_kaggle_sample") and len(scores["scores"]) == 2
    assert all(0 < score < 1 for score in scores["scores"])
