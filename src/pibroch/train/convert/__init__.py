"""Checkpoints from and to the parameter names of other systems. Read `plain.py` first."""

from pibroch.train.convert.checkpoints import export_checkpoint, import_checkpoint
from pibroch.train.convert.formats import FORMATS

__all__ = ["FORMATS", "export_checkpoint", "import_checkpoint"]
