"""Two towers and the softmax over a batch's items against plain torch."""

import pytest
import torch
from torch.nn import functional

from pibroch.errors import ConfigError
from pibroch.models import InBatchSoftmax, build_model, set_place
from pibroch.models.in_batch_softmax import Positives

NAMES = ("user", "genre", "country", "item")


def plain_loss(users, items, ids, log_q, rewards):
    """Yi et al., Eq. 3 to 5, a sample at a time."""
    total = users.new_zeros(())
    for i in range(len(users)):
        logits = [
            users[i] @ items[j] - log_q[j] for j in range(len(users)) if i == j or ids[j] != ids[i]
        ]
        own = users[i] @ items[i] - log_q[i]
        total = total + rewards[i] * (torch.stack(logits).logsumexp(0) - own)
    return total / len(users)


def cut(positives, sizes):
    columns = [getattr(positives, name).split(sizes) for name in Positives.__slots__]
    return [Positives(*each) for each in zip(*columns, strict=True)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("sizes", [[13], [7, 6], [5, 0, 8], [1, 4, 4, 4]])
def test_loss_and_gradients_are_those_of_the_equations(sizes, share):
    """Where equal items share a vector, only the sum of their gradients counts."""
    torch.manual_seed(1)
    users, items = (torch.randn(13, 5) for _ in range(2))
    ids = torch.randint(0, 6, (13,))
    if share:
        items = items[ids]
    for each in (users, items):
        each.requires_grad_()
    log_q = torch.rand(6).log()[ids]
    rewards = torch.rand(13) * (torch.rand(13) < 0.8)
    doubled = [each.double() for each in (users, items)]
    expected = plain_loss(*doubled, ids, log_q.double(), rewards.double())
    wanted = torch.autograd.grad(expected, (users, items))
    whole = Positives(users.detach(), items.detach(), ids, log_q, rewards)
    parts = cut(whole, sizes)
    calls = []  # what all ranks give in each exchange; the last one needs the norms of all

    def run(rank, known):
        count = iter(range(3))

        def gather(tensor):
            number = next(count)
            if number < len(known):
                return known[number]
            calls.append((number, tensor))
            raise StopIteration

        return InBatchSoftmax.of_vectors(parts[rank], gather, rank)

    known = []
    for _ in range(3):  # one exchange after the other, as ranks wait for each other
        calls.clear()
        for rank in range(len(sizes)):
            with pytest.raises(StopIteration):
                run(rank, known)
        known.append([tensor for _, tensor in calls])
    results = [run(rank, known) for rank in range(len(sizes))]
    for loss, _, _ in results:
        torch.testing.assert_close(loss, expected.detach().float())
    by_users, by_items = (torch.cat([each[number] for each in results]) for number in (1, 2))
    torch.testing.assert_close(by_users, wanted[0])
    of_item = functional.one_hot(ids, 6).float() if share else torch.eye(13)
    torch.testing.assert_close(of_item.T @ by_items, of_item.T @ wanted[1])


@pytest.mark.parametrize("normalize", [False, True])
def test_logits_are_products_of_two_networks(normalize):
    torch.manual_seed(2)
    options = {"dim": 3, "top": (7,), "vector_width": 4, "normalize": normalize}
    items = ("item", "genre")
    model = build_model(
        "two_tower", 2, 4, NAMES, item_features=items, temperature=0.5, **options
    ).eval()
    dense, vectors = torch.randn(9, 2), torch.randn(9, 4, 3)

    def network(mlp, x):
        first, last = mlp.layers
        x = functional.linear(x, first.weight, first.bias).relu()
        x = functional.linear(x, last.weight, last.bias)
        return x / x.norm(dim=1, keepdim=True) if normalize else x

    user = network(model.user, torch.cat([dense, vectors[:, 0], vectors[:, 2]], 1))
    item = network(model.item, torch.cat([vectors[:, 3], vectors[:, 1]], 1))
    torch.testing.assert_close(model(dense, vectors), (user * item).sum(1) / 0.5)
    torch.testing.assert_close(model.item_vectors(vectors), item)
    torch.testing.assert_close(model.user_vectors(dense, vectors), user / 0.5)


@pytest.mark.parametrize(
    ("items", "say"), [(("film",), "'film'"), (NAMES, "all of whose features")]
)
def test_features_that_make_no_two_towers_are_refused(items, say):
    with pytest.raises(ConfigError, match=say):
        build_model("two_tower", 0, 4, NAMES, item_features=items)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("is_same", [True, False])
def test_training_that_compares_items_drops_the_same_of_an_item(dropout, is_same):
    """In the whole batch and in parts of it, as on ranks; users drop each for themselves."""
    torch.manual_seed(3)
    options = {"dropout": dropout, "item_features": ("item", "country")}
    model = build_model("two_tower", 2, 4, NAMES, dim=3, top=(64,), vector_width=4, **options)
    dense, vectors = torch.randn(1, 2).expand(9, 2), torch.randn(1, 4, 3).repeat(9, 1, 1)
    items = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0, 2**40])
    rows = items.clamp(max=3)
    vectors[:, 3] = torch.randn(4, 3)[rows]
    if not is_same:  # one sample's item has another country
        vectors[4, 2] += 1
    model.train()

    def taken(samples):
        set_place(model, seed=1, step=2, first_sample=samples.start)
        model.item_ids = items[samples]
        users = model.user_vectors(dense[samples], vectors[samples])
        return model.item_vectors(vectors[samples]), users

    whole, users = taken(slice(0, 9))
    for row in range(4):
        same = torch.arange(9)[rows == row].tolist()
        if not is_same:
            same = [sample for sample in same if sample != 4]
        assert (whole[same] == whole[same][0]).all()
    assert torch.equal(whole[4], whole[0]) == is_same
    parts = [taken(slice(*bounds))[0] for bounds in ((0, 4), (4, 4), (4, 9))]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert (len(users.unique(dim=0)) > 4) == (dropout > 0)
    known = model.eval().item_vectors(vectors)
    assert torch.allclose(known, whole) == (dropout == 0)


def test_gradients_of_an_item_are_the_sum_over_its_samples():
    torch.manual_seed(4)
    model = build_model("two_tower", 0, 4, NAMES, dim=3, top=(7,), vector_width=4)
    vectors = torch.randn(9, 4, 3)
    items = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0, 3])
    vectors[:, 3] = torch.randn(4, 3)[items]
    vectors.requires_grad_()
    weights = torch.randn(9, 4)
    model.item_ids = items
    of = [*model.item.parameters(), vectors]
    found = torch.autograd.grad((model.train().item_vectors(vectors) * weights).sum(), of)
    wanted = torch.autograd.grad((model.eval().item_vectors(vectors) * weights).sum(), of)
    for one, other in zip(found[:-1], wanted[:-1], strict=True):
        torch.testing.assert_close(one, other)
    same = (items[:, None] == items).float()
    for of_vectors in (found[-1], wanted[-1]):
        assert of_vectors[:, :3].eq(0).all()
    torch.testing.assert_close(same @ found[-1][:, 3], same @ wanted[-1][:, 3])
