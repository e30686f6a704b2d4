"""Ctrl-C while the command line, or what a command needs, is still being loaded.

A word and exit code 130, no traceback.
"""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return
        sys.meta_path.remove(self)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as interruption:
            if {translates}:  # as the initialisation of extension modules does
                raise ImportError("initialization failed") from interruption
            raise

# a test in the background inherits that it is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["pibroch", "train", "--data", "none"]
from pibroch.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "translates"),
    [("typer", False), ("pibroch.cli.train", False), ("torch", False), ("torch", True)],
)
def test_ctrl_c_while_modules_load(module, translates, tmp_path):
    program = PROGRAM.format(module=module, translates=translates)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.startswith("stopped") and "Traceback" not in ended.stderr, ended.stderr
