"""A schema and its dictionaries: what turns raw values into rows, without any samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pibroch.data.dataset import EncodedDataset
from pibroch.data.encode import Encoders, FeatureEncoder
from pibroch.data.schema import Schema


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """A schema with the dictionary of each table that has one.

    Attributes:
        schema: the features.
        fingerprint: of the data sets that are encoded with it, see
            :func:`pibroch.data.writer.fingerprint`.
        codes: by table, the codes of rows 2, 3, ... as uint64; tables without a vocabulary have
            none.
        slots: by table, the index that finds codes, where it was made before; see
            :func:`pibroch.data.encode.index_of`.
    """

    schema: Schema
    fingerprint: str
    codes: Mapping[str, NDArray[np.uint64]]
    slots: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)

    @classmethod
    def of_dataset(cls, dataset: EncodedDataset) -> Vocabularies:
        """Those that a dataset was encoded with.

        Raises:
            DataError: when its files do not fit its manifest.
        """
        counted = [feature for feature in dataset.schema.owners if feature.has_vocabulary]
        codes = {feature.name: dataset.codes(feature.name) for feature in counted}
        return cls(dataset.schema, dataset.fingerprint, codes)

    def encoders(self) -> Encoders:
        """For each feature what turns raw values into rows.

        Raises:
            DataError: when a feature that needs a dictionary has none.
        """
        return Encoders(
            {
                feature.name: FeatureEncoder(
                    feature,
                    self.codes.get(feature.table),
                    self.slots.get(feature.table),
                    self.schema.text_rules,
                    self.schema.null_texts,
                )
                for feature in self.schema.categorical
            }
        )
