"""The softmax over a global batch's items as what a step minimises: see ``InBatchSoftmax``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pibroch.collectives import Channel
from pibroch.config import RunConfig
from pibroch.config.loss import InBatchSoftmaxConfig
from pibroch.data import EncodedDataset, JaggedBatch
from pibroch.data.encode import is_known
from pibroch.errors import ConfigError, DataError
from pibroch.models.in_batch_softmax import InBatchSoftmax, Positives
from pibroch.models.pairs import PairModel


class InBatchCriterion:
    """In place of :class:`pibroch.train.criterion.Criterion`, for a :class:`PairModel`.

    Args:
        config: has the loss.
        dataset: whose training split is counted.
        model: what is trained.
        channel: to the other ranks.

    Raises:
        ConfigError: for another model, or data of several labels.
        DataError: for items with raw ids, which nobody counted, where the bias is corrected.
    """

    compares = True

    def __init__(
        self, config: RunConfig, dataset: EncodedDataset, model: nn.Module, channel: Channel
    ) -> None:
        if not isinstance(model, PairModel):
            raise ConfigError(
                f"loss 'in_batch_softmax' for the model {config.model.name!r}",
                "vectors of users and items",
                'set model.name = "two_tower" or "sasrec", or choose another loss',
            )
        assert isinstance(config.loss, InBatchSoftmaxConfig)
        self._model = model
        self._channel = channel
        features = {each.name: each for each in dataset.schema.categorical}
        self._item = features[model.item_id]
        table = self._item.table
        if model.sequence is not None and features[model.sequence].table != table:
            raise ConfigError(
                f"model.all_positions with the sequence {model.sequence!r}, whose ids are not those"
                f" of {model.item_id!r}",
                "a sequence that reads its table",
                f'say shares = "{table}" in the schema and prepare the data again, or leave'
                " model.all_positions out",
            )
        self._log_q: Tensor | None = None
        if config.loss.correct_bias:
            counts = np.maximum(dataset.access_counts(table), 1)
            self._log_q = torch.from_numpy(np.log(counts / counts.sum())).float()
        model.keeps_pairs = True

    def show_items(self, batch: JaggedBatch) -> None:
        """Tell the model which items the next forward pass has, and check them.

        Each unknown or missing one is an item of its own.

        Raises:
            DataError: for a sample without exactly one item.
        """
        bags = batch.select((self._item.name,))
        if batch.batch_size and not bool((bags.lengths() == 1).all()):
            raise DataError(
                f"a sample with several or no ids of {self._item.name!r}",
                "one item a sample",
                "a feature without multi_hot first in model.item_features, or in model.histories",
            )
        ids = bags.values
        is_item = self._are_items(ids)
        if not is_item.all():  # else unknown ones would be one item of many other features
            ids = torch.where(is_item, ids, -1 - torch.arange(len(ids)))
        self._model.item_ids = ids

    def _are_items(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(is_known(self._item, ids.numpy()))

    def __call__(self, logits: Tensor, batch: JaggedBatch) -> Tensor:
        """The loss of this rank's part of a batch, whose gradient is that of the global batch.

        It is the mean over the pairs whose item is known; one that is unknown or missing is
        neither a positive nor a negative. It is multiplied with ``B / b``, as it is weighted with
        ``b / B`` afterwards. Every rank calls this at the same time, and it waits for the others.
        :meth:`show_items` came before.
        """
        pairs = self._model.take_pairs()
        ids = batch.pick((self._item.name,)).values
        users = pairs.users.float()
        items = pairs.items.float()
        size = batch.batch_size
        rewards = batch.labels.clamp(min=0)
        if batch.sample_weights is not None:
            rewards = rewards * batch.sample_weights
        if self._model.sequence is not None:
            history = batch.select((self._model.sequence,))
            ids, samples = _following(history, self._model.max_length, ids)
            rewards = rewards[samples]
        is_item = self._are_items(ids)
        if not is_item.all():
            users, items, ids, rewards = (of[is_item] for of in (users, items, ids, rewards))
        log_q = torch.zeros(len(ids)) if self._log_q is None else self._log_q[ids]
        own = Positives(users.detach(), items.detach(), ids, log_q, rewards)
        gather = self._channel.gather_tensors
        value, by_users, by_items = InBatchSoftmax.of_vectors(own, gather, self._channel.ranks.rank)
        scale = sum(self._channel.gather(size)) / max(1, size)
        if not size:
            return logits.sum()
        slope: Tensor = ((users * by_users).sum() + (items * by_items).sum()) * scale
        return slope - slope.detach() + value


def _following(history: JaggedBatch, max_length: int, last: Tensor) -> tuple[Tensor, Tensor]:
    """The items that follow those of a sequence, ``[P]``, and of which samples they are, ``[P]``.

    Args:
        history: the sequences alone, of B samples.
        max_length: items of each that are read, the last ones.
        last: of each sample the item that follows all, ``[B]``.
    """
    kept = history.lengths().clamp(max=max_length)
    counts = kept.clamp(min=1)
    samples = torch.arange(len(last)).repeat_interleave(counts)
    ends = counts.cumsum(0)
    within = torch.arange(len(samples)) - (ends - counts)[samples]
    is_last = within == counts[samples] - 1
    of_sequence = history.offsets[1:][samples] - kept[samples] + 1 + within
    ids = last[samples].clone()
    ids[~is_last] = history.values[of_sequence[~is_last]]
    return ids, samples
