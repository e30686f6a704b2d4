import numpy as np
import pytest
import torch

from pibroch.errors import ConfigError
from pibroch.planner.towers import (
    Balance,
    Centres,
    Similarity,
    balanced_groups,
    coordinates,
    partition,
)


def planted(blocks, noise, seed):
    """Similarities of features in blocks, shuffled; and the block of each."""
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.repeat(np.arange(len(blocks)), blocks))
    result = np.where(block[:, None] == block, 0.85, 0.15) + rng.uniform(
        -noise, noise, (len(block), len(block))
    )
    result = (result + result.T) / 2
    np.fill_diagonal(result, 1.0)
    return result.clip(0, 1), block


def adjusted_rand(left, right):
    """The adjusted Rand index of two labellings."""
    pairs = lambda counts: (counts * (counts - 1) / 2).sum()  # noqa: E731
    table = np.zeros((left.max() + 1, right.max() + 1))
    np.add.at(table, (left, right), 1)
    both = pairs(table)
    rows = pairs(table.sum(1))
    columns = pairs(table.sum(0))
    expected = rows * columns / pairs(np.array([len(left)]))
    return (both - expected) / ((rows + columns) / 2 - expected)


def labels(groups, size):
    result = np.full(size, -1)
    for number, group in enumerate(groups):
        result[group] = number
    assert (result >= 0).all() and sum(map(len, groups)) == size
    return result


@pytest.mark.parametrize("blocks", [(7, 7, 6, 6), (13, 13), (9, 9, 8)])
def test_planted_blocks_are_found(blocks):
    scores = []
    for seed in range(5):
        similarity, block = planted(blocks, 0.15, seed)
        groups = partition(similarity, np.ones(len(block)), len(blocks))
        scores.append(adjusted_rand(labels(groups, len(block)), block))
    assert np.mean(scores) >= 0.95, scores


def test_diverse_groups_have_some_of_each_block():
    similarity, block = planted((6, 6, 6), 0.1, 0)
    for group in partition(similarity, np.ones(18), 3, "diverse"):
        assert len(set(block[group])) >= 2


@pytest.mark.parametrize("num_towers", [1, 2, 3, 8, 26])
def test_groups_are_even_in_size_and_bytes(num_towers):
    rng = np.random.default_rng(num_towers)
    points = rng.normal(size=(26, 2))
    weights = rng.uniform(1, 2, 26)
    groups = balanced_groups(points, weights, num_towers, Balance(1.5, 1.1))
    sizes = np.array([len(group) for group in groups])
    assert sizes.sum() == 26 and (labels(groups, 26) >= 0).all()
    assert sizes.max() <= max(1.5 * sizes.min(), -(-26 // num_towers))
    most = max(weights[group].sum() for group in groups)
    if num_towers <= 3:  # with more, whole features leave no choice
        assert most <= max(1.1 * weights.sum() / num_towers, weights.max()) + 1e-9


def test_one_feature_may_weigh_more_than_all_others():
    groups = balanced_groups(
        np.zeros((4, 2)), np.array([100.0, 1.0, 1.0, 1.0]), 2, Balance(3.0, 1.1)
    )
    assert sorted(map(len, groups)) in ([1, 3], [2, 2])


def test_categories_are_not_mixed():
    similarity, _ = planted((5, 5), 0.1, 0)
    categories = ["user"] * 3 + ["item"] * 7
    groups = partition(similarity, np.ones(10), 4, categories=categories)
    assert len(groups) == 4 and (labels(groups, 10) >= 0).all()
    assert all(len({categories[feature] for feature in group}) == 1 for group in groups)
    with pytest.raises(ConfigError, match="1 towers for 2 categories"):
        partition(similarity, np.ones(10), 1, categories=categories)


def test_more_towers_than_features_are_refused():
    with pytest.raises(ConfigError, match="need from 1 to 10"):
        partition(planted((5, 5), 0.1, 0)[0], np.ones(10), 11)


def test_similarity_is_the_mean_of_absolute_cosines():
    generator = torch.Generator().manual_seed(0)
    embedded = torch.randn(50, 4, 8, generator=generator)
    embedded[:10, 2] = 0  # empty bags
    similarity = Similarity(4)
    for part in embedded.split(20):
        similarity.add(part)
    result = similarity.mean()
    for left in range(4):
        for right in range(left):
            cosines = torch.cosine_similarity(embedded[:, left], embedded[:, right], dim=1).abs()
            rows = slice(10, None) if 2 in (left, right) else slice(None)
            assert (
                result[left, right]
                == result[right, left]
                == pytest.approx(float(cosines[rows].mean()), rel=1e-5)
            )
    assert (result.diagonal() == 1).all()


def test_points_lie_as_far_from_each_other_as_features():
    corners = np.array([[0, 0], [0, 0.6], [0.6, 0], [0.6, 0.6]])
    distance = np.sqrt(((corners[:, None] - corners) ** 2).sum(2))
    result = coordinates(1 - distance, "coherent")
    again = np.sqrt(((result[:, None] - result) ** 2).sum(2))
    assert np.abs(again - distance).max() < 0.01


def test_without_means_interactions_alone_tell_what_is_alike():
    """Two pairs of features with a direction each; what all have in common hides it.

    Empty bags say nothing.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.eye(4)[[0, 1, 0, 1]]
    embedded = torch.randn(500, 4, 1, generator=generator) * directions + torch.tensor(
        [0.0, 0.0, 5.0, 5.0]
    )
    embedded[:100, 3] = 0.0
    centres = Centres(4, 4)
    for part in embedded.split(200):
        centres.add(part)
    torch.testing.assert_close(centres.mean()[3], embedded[100:, 3].mean(0))
    plain = Similarity(4)
    centred = Similarity(4, centres.mean())
    for part in embedded.split(200):
        plain.add(part)
        centred.add(part)
    assert plain.mean().min() > 0.9
    np.testing.assert_allclose(centred.mean(), (directions @ directions.T).numpy(), atol=0.01)
