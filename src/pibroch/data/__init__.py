"""From raw click logs to minibatches."""

from pibroch.data.batch import JaggedBatch, LoaderPosition
from pibroch.data.dataset import EncodedDataset, Split
from pibroch.data.loader import Loader
from pibroch.data.schema import CategoricalFeature, DenseFeature, Schema
from pibroch.data.streams.program import stream

__all__ = [
    "CategoricalFeature",
    "DenseFeature",
    "EncodedDataset",
    "JaggedBatch",
    "Loader",
    "LoaderPosition",
    "Schema",
    "Split",
    "stream",
]
