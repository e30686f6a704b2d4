"""The folder in which a dataset is made."""

import os

from pibroch.data.publish import work_folder


def test_the_lock_is_its_owner_s_alone(tmp_path):
    """Whoever can read a file can lock it, and would keep the preparation from going on."""
    before = os.umask(0)
    try:
        with work_folder(tmp_path / "out.partial", {"of": "a test"}):
            assert (tmp_path / "out.partial" / "lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
