"""The blocks of the guides: their languages, and Python's run as a reader would run it.

In a process of their own.
"""

import importlib
import os
import re
import traceback
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from forked import context, fork_children

ROOT = Path(__file__).parents[1]
GUIDES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "design" not in path.parts),
]
NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 200


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: relative to the repository.
        line: of the page, where its text begins.
        language: as the fence says.
        text: what is in it.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def source(self):
        """Python at its place in the page.

        ``, ...`` at the end of a list or dictionary, and so on, is left out.
        """
        return "\n" * (self.line - 1) + re.sub(r", \.\.\.(?=[\]}])", "", self.text)


def blocks_of(path):
    text = path.read_text()
    page = path.relative_to(ROOT).as_posix()
    assert text.count("\n```") + text.startswith("```") == 2 * len(FENCE.findall(text)), (
        f"{page}: an odd fence"
    )
    return [
        Block(page, text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in FENCE.finditer(text)
    ]


BLOCKS = [block for path in (*GUIDES, *NOTES) for block in blocks_of(path)]
PYTHON = defaultdict(list)
for _block in BLOCKS:
    if _block.language == "python":
        PYTHON[_block.page].append(_block)


def run_page(page, stand_ins, folder):
    """Run the blocks of a page one after the other, in a process of their own.

    Args:
        page: of :data:`PYTHON`.
        stand_ins: a module whose ``fresh(page, number)`` gives the names that block ``number``
            takes from its reader's program.
        folder: to run in.
    """
    ours, child_pipe = context().Pipe()
    process = context().Process(
        target=_run, args=(child_pipe, PYTHON[page], stand_ins, str(folder))
    )
    process.start()
    child_pipe.close()
    try:
        assert ours.poll(TIMEOUT_S), f"{page} did not end"
        problem = ours.recv()
    finally:
        process.kill()
        process.join()
    assert problem is None, problem


def source_of(block):
    """With a port that is free in place of the one that pages name."""
    return block.source.replace("127.0.0.1:29500", f"127.0.0.1:{os.environ['MASTER_PORT']}")


def _run(pipe, blocks, stand_ins, folder):
    os.chdir(folder)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch.setattr)
        names = {"__name__": "a_page"}
        problem = None
        try:
            for number, block in enumerate(blocks):
                names |= importlib.import_module(stand_ins).fresh(block, number)
                exec(compile(source_of(block), str(block), "exec"), names)
        except BaseException:
            problem = traceback.format_exc()
        if "_server" in names:
            names["_server"].__exit__(
                None, None, None
            )  # who waits for the page kills its process, and no other
        pipe.send(problem)
