"""The tutorial, as a reader would follow it: its files, its commands and its request, in order."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from doc_pages import ROOT, blocks_of
from pibroch.ports import free_port
from served import until

TUTORIAL = ROOT / "docs" / "tutorial.md"


def file_names():
    """The names under which the page's TOML is to be saved, in their order."""
    return re.findall(r"[Ss]ave\s+it\s+as\s+`([\w.]+)`", TUTORIAL.read_text())


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_from_a_csv_to_a_served_model(tmp_path):
    blocks = blocks_of(TUTORIAL)
    files = dict(
        zip(file_names(), [block.text for block in blocks if block.language == "toml"], strict=True)
    )
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    here = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    shell = {"shell": True, "cwd": tmp_path, "env": environment, "text": True}
    (program,) = [block.text for block in blocks if block.language == "python"]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=True)
    (sample,) = [block.text for block in blocks if block.language == "text"]
    assert (tmp_path / "clicks.csv").read_text().startswith(sample)

    console = "".join(block.text for block in blocks if block.language == "console")
    commands = re.sub(r" *\\\n *", " ", console).splitlines()
    *before, serve, request = commands
    assert serve.startswith("pibroch serve") and request.startswith("curl")
    outputs = {}
    for command in before:
        ran = subprocess.run(command, capture_output=True, timeout=280, check=False, **shell)
        assert ran.returncode == 0, (command, ran.stderr)
        outputs[command.split()[1]] = ran.stdout + ran.stderr
    assert float(re.search(r"test AUC 0?(\.\d+)", outputs["train"])[1]) > 0.72
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(f"exec {serve} --port {port}", stdout=file, stderr=file, **shell)
        try:
            until(lambda: server.poll() is not None or f":{port}" in log.read_text())
            assert server.poll() is None, log.read_text()
            answer = subprocess.run(
                request.replace(":8000", f":{port}"),
                capture_output=True,
                timeout=60,
                check=True,
                **shell,
            )
        finally:
            server.terminate()
            server.wait(60)
    scored = json.loads(answer.stdout)
    assert scored["model_name"] == "clicks" and len(scored["scores"]) == 1
    assert 0 < scored["scores"][0] < 1
