"""Every example runs as a user would run it."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_model_learns_and_takes_few_lines():
    path = EXAMPLES / "own_model.py"
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    first, last = map(float, re.findall(r"batches (\d\.\d+)", ran.stdout))
    assert last < first - 0.03, ran.stdout
    marked = [line for line in path.read_text().splitlines() if line.endswith("# pibroch")]
    assert len(marked) <= 5
