"""What each rank does in the test of cuts in memory that several lives of a run make."""

import mmap
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import quote

from checkpoint_cases import Run

from pibroch.forkserver.link import KeptMemory
from pibroch.state import kept_rows
from pibroch.state.manifest import Progress
from pibroch.train import memory_cuts
from pibroch.train.memory_cuts import MemoryCuts

LIVES = 12


class FilesForMemory:
    """Memory by name in files that all ranks map, in place of a launcher's."""

    def __init__(self, folder):
        self._folder = Path(folder)

    def keep(self, key, tag, num_bytes):
        path = self._folder / quote(key, safe="")
        of = path.with_suffix(".tag")
        is_new = not path.exists() or of.read_text() != tag or path.stat().st_size != num_bytes
        if is_new:
            path.write_bytes(b"")
            of.write_text(tag)
        with path.open("r+b") as file:
            file.truncate(num_bytes)
            return KeptMemory(mmap.mmap(file.fileno(), num_bytes), is_new, tag)

    def kept(self, key):
        path = self._folder / quote(key, safe="")
        if not path.exists():
            return None
        return self.keep(key, path.with_suffix(".tag").read_text(), path.stat().st_size)


def cut_after_a_newer_checkpoint(channel, data, folder):
    """Cuts of several lives, each of which begins with a checkpoint newer than the last one's cut.

    Of each, the step that the next one finds in memory, and that of rank 0's state there.
    """
    run = Run(channel, data, Path(folder) / "checkpoints")
    run.session.world = SimpleNamespace(control=channel)
    link = FilesForMemory(folder)
    with ExitStack() as stack:
        for module in (kept_rows, memory_cuts):
            stack.enter_context(patch.object(module, "link_to_server", lambda: link))
        found = []
        for saved in range(0, 2 * LIVES, 2):
            cuts = MemoryCuts(run.session)
            assert cuts.newest(saved) is None
            cuts.begin(Progress(step=saved), saved or None)
            at = Progress(step=saved + 1)
            run.train(at.step, at.step)
            cuts.after_step(at.step, lambda at=at: at, saved or None, is_wanted=True)
            after = MemoryCuts(run.session)
            step = after.newest(saved)
            found.append((step, after.state_of(step).progress.step))
        return found
