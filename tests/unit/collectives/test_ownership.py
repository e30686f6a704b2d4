from torch import nn

from pibroch.collectives import Ranks, data_parallel
from pibroch.collectives.ownership import all_parts, is_within, own_parts


def test_parts_are_the_outermost_modules_of_groups_by_name():
    ranks = Ranks(1, 4)
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    data_parallel(inner, ranks.group([1]))
    outer.append(inner)
    data_parallel(outer, ranks.patient(1.0).group([1]))
    model = nn.ModuleDict({"tower": outer, "over": other})
    assert own_parts(model) == {"tower": (1,)}
    assert own_parts(outer) == {"1": (1,)}
    assert own_parts(other) == {} == all_parts(model)


def test_one_process_holds_everything():
    model = nn.Sequential(nn.Linear(2, 2))
    data_parallel(model[0], Ranks.alone())
    assert own_parts(model) == {}


def test_names_belong_to_a_part_by_whole_words():
    assert is_within("a.b.weight", ["c", "a.b"]) and is_within("a.b.c.weight", ["a.b"])
    assert (
        not is_within("a.bc.weight", ["a.b"])
        and not is_within("a.b", ["a.b"])
        and not is_within("x", [])
    )
