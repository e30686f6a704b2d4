"""Checkpoints from and to the parameter names of other systems. Read `plain.py` first."""

from pibroch.train.convert.export import export_checkpoint
from pibroch.train.convert.formats import FORMATS
from pibroch.train.convert.load import import_checkpoint

__all__ = ["FORMATS", "export_checkpoint", "import_checkpoint"]
