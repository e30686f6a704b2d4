"""From raw click logs to minibatches."""

from pibroch.data.batch import JaggedBatch, LoaderPosition

__all__ = ["JaggedBatch", "LoaderPosition"]
