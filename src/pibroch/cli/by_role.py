"""``pibroch train --by-role``: of the processes of a launcher some train, the others serve them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pibroch.cli.console import console
from pibroch.cli.launch import redirect_output
from pibroch.title import name_of_role, show_as

if TYPE_CHECKING:
    from pibroch.config import RunConfig
    from pibroch.roles import Role
    from pibroch.roles.launched import Launcher, RankLayout, RankSplit

Begun = tuple["RunConfig", Path]


def split_of(config: RunConfig, num_ranks: int) -> RankSplit:
    """Which of the launcher's ranks do what.

    Those roles of the recipe that are met nowhere else have some.

    Raises:
        ConfigError: when none is left to train.
    """
    from pibroch.launch.roles import rendezvous_of_roles, wanted
    from pibroch.roles.launched import RankSplit

    places = rendezvous_of_roles(config)
    return RankSplit.of(
        num_ranks, {role: count for role, count in wanted(config).items() if places[role] is None}
    )


@contextmanager
def as_trainer(begin: Callable[[], Begun]) -> Iterator[tuple[str, Begun | None] | None]:
    """Within, this rank trains, with an environment that speaks of the trainers alone.

    Gives the place where it meets who serves it, and on rank 0 what ``begin`` says; or ``None``
    where this rank was one of those who serve: then the run is over.
    """
    from pibroch.roles.launched import Launcher

    launcher = Launcher()
    if launcher.rank == 0:
        with _led(launcher, begin) as (layout, begun):
            os.environ["WORLD_SIZE"] = str(layout.split.num_trainers)
            yield layout.rendezvous, begun
        return
    layout = launcher.layout()
    part = layout.split.part(launcher.rank)
    if part is not None:
        _serve(launcher, layout, *part)
        yield None
        return
    os.environ["WORLD_SIZE"] = str(layout.split.num_trainers)
    yield layout.rendezvous, None


@contextmanager
def _led(launcher: Launcher, begin: Callable[[], Begun]) -> Iterator[tuple[RankLayout, Begun]]:
    from pibroch.launch.roles import rendezvous_of_roles

    try:
        config, folder = begin()
        split = split_of(config, launcher.num_ranks)
    except BaseException:
        launcher.give_up()
        raise
    place = next(
        (place for place in rendezvous_of_roles(config).values() if place is not None), None
    )
    with launcher.leading(split, place, str(folder)) as layout:
        yield layout, (config, folder)


def _serve(launcher: Launcher, layout: RankLayout, role: Role, number: int) -> None:
    """Be one of those who serve, until the trainers are done."""
    import torch

    from pibroch.process import threads_of_rank
    from pibroch.roles.group import leave
    from pibroch.roles.serving import serve_as

    title = role.member(number, layout.split.counts[role])
    show_as(title, name_of_role(role.command, number))
    torch.set_num_threads(threads_of_rank())
    serve_as(role, layout.rendezvous, number, opens=False)
    console.quiet = True  # when a launcher stops all processes, the trainers speak
    folder = Path(layout.folder)
    has_log = False
    for _ in launcher.wait_for_end():
        if not has_log and (folder / "config.toml").exists():
            redirect_output(folder / role.folder / f"{number}.log")
            has_log = True
    leave()
    launcher.has_ended()
