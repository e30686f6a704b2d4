import tomllib

import pytest

from pibroch.config import (
    embedding,
    load_recipe,
    model_sequences,
    model_two_tower,
    model_zoo,
    recipe_names,
    to_toml,
)
from pibroch.config.recipes import check_config
from pibroch.errors import ConfigError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(
        '[data]\ndir = "x"\n[model]\nname = "dlrm"\n[train]\nepochs = 2\n'
        '[embedding.optimizer]\nname = "adam"\nlr = 0.1\nbetas = [0.8, 0.9]\n'
    )
    return path


def test_a_recipe_extends_another_and_overrides_win(recipe, tmp_path):
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[model]\nname = "dcnv2"\n[train]\nbatch_size = 7\n')
    config = load_recipe(str(child), ["train.batch_size=9", "embedding.optimizer.lr=1e-2"])
    assert config.model.name == "dcnv2"
    assert config.train.epochs == 2 and config.train.batch_size == 9
    assert config.embedding.optimizer.lr == 0.01 and config.embedding.optimizer.betas == (0.8, 0.9)


def test_a_setting_that_only_other_models_have_is_named(recipe, caplog):
    child = recipe.parent / "child.toml"
    child.write_text('extends = "base.toml"\n[model]\ncross_layers = 7\ntop = [4]\n')
    assert load_recipe(str(child)).model.top == (4,)
    (message,) = caplog.messages
    assert message.startswith("model.cross_layers is a setting of dcnv2, ")
    assert message.endswith("; the model dlrm has none and leaves it out")
    caplog.clear()
    load_recipe(str(recipe), ["model.cross_layers=7"])
    assert len(caplog.messages) == 1
    caplog.clear()
    assert load_recipe(str(child), ["model.name=dcnv2"]).model.cross_layers == 7
    assert len(caplog.messages) == 1, "the recipe sets it for a dlrm all the same"
    caplog.clear()
    load_recipe(str(recipe), ["model={name='dcnv2', cross_layers=7}"])
    assert not caplog.messages


def test_another_optimizer_does_not_inherit_settings(recipe):
    config = load_recipe(str(recipe), ["embedding.optimizer={name='sgd', lr=1.0}"])
    assert config.embedding.optimizer.model_dump() == {
        "name": "sgd",
        "lr": 1.0,
        "weight_decay": 0.0,
        "max_row_norm": None,
    }
    with pytest.raises(ConfigError, match=r"no `embedding\.optimizer\.lr`"):
        load_recipe(str(recipe), ["embedding.optimizer.name=sgd"])


@pytest.fixture
def least(tmp_path):
    """A recipe with nothing that has a default."""
    path = tmp_path / "least.toml"
    path.write_text('[data]\ndir = "x"\n[train]\nepochs = 2\n')
    return path


def test_a_setting_of_an_optimizer_that_nobody_named_is_one_of_the_default(least):
    changes = ["optimizer.lr=0.5", "embedding.optimizer.lr=0.25", "embedding.init.std=0.1"]
    config = load_recipe(str(least), changes)
    plain = load_recipe(str(least))
    assert (config.optimizer.name, config.optimizer.lr) == (plain.optimizer.name, 0.5)
    assert (config.embedding.optimizer.name, config.embedding.optimizer.lr) == ("adam", 0.25)
    assert (config.embedding.init.name, config.embedding.init.std) == ("normal", 0.1)
    with pytest.raises(ConfigError, match=r"unknown key `optimizer\.momentum`.*need one of betas"):
        load_recipe(str(least), ["optimizer.momentum=0.9"])


def test_a_recipe_without_a_model_has_the_default_one(least):
    assert load_recipe(str(least)).model.name == "dlrm"
    assert load_recipe(str(least), ["model.dim=8"]).model.dim == 8


@pytest.mark.parametrize(
    ("text", "message", "followed"),
    [
        ('[data]\ndir = "x"\n', "no `train`", "train.epochs=1"),
        ('[data]\ndir = "x"\n[train]\nbatch_size = 9\n', "need exactly one of", "train.epochs=1"),
        (
            '[data]\ndir = "x"\n[train]\nepochs = 1\nsteps = 2\n',
            "need exactly one of",
            "train.epochs=1",
        ),
        ("[train]\nepochs = 1\n", "no `data`", "data.dir='x'"),
        ("data = 3\n[train]\nepochs = 1\n", r"need a table, \[data\]", "data.dir='x'"),
    ],
)
def test_the_advice_for_a_missing_table_works(tmp_path, text, message, followed):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_recipe(str(path))
    advice = "--data DIR" if followed.startswith("data") else f"--set {followed}"
    assert advice in refused.value.do, "`--data DIR` stands for `--set data.dir=DIR`"
    load_recipe(str(path), [followed])


def test_steps_replace_epochs(recipe):
    train = load_recipe(str(recipe), ["train.steps=5"]).train
    assert train.steps == 5 and train.epochs is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.batch_sise=3",
            r"unknown key `train\.batch_sise`.*did you mean `train\.batch_size`",
        ),
        ("trian.steps=3", r"unknown key `trian`.*did you mean `train`"),
        (
            "embedding.optimizer.beta=3",
            r"unknown key `embedding\.optimizer\.beta`.*did you mean .*betas",
        ),
        (
            "embedding.optimizer.momentum=3",
            r"unknown key `embedding\.optimizer\.momentum`.*one of betas, eps, lr",
        ),
        ("model.dim=0", r"`model\.dim = 0`.*greater than or equal to 1"),
        ("embedding.optimizer.name=adm", r"`embedding\.optimizer\.name = 'adm'`.*'rowwise_adam'"),
        ("embedding.optimizer.lr=nan", r"embedding\.optimizer\.lr"),
        ("optimizer=3", r"`optimizer = 3`"),
        ("train={epochs=1, steps=1}", "exactly one of `epochs` and `steps`"),
        ("schedule.name=step", "step_every"),
        ("nonsense", "KEY=VALUE"),
        (".=1", "KEY=VALUE"),
    ],
)
def test_bad_overrides_name_the_key(recipe, override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(recipe), [override])


def test_settings_of_lookahead_survive_being_written(recipe):
    ahead = "embedding.exchange=lookahead"
    plain = load_recipe(str(recipe), [ahead]).embedding.exchange
    assert (plain.lookahead, plain.cache_rows, plain.cache, plain.delayed_sync) == (
        None,
        None,
        "lrpp",
        True,
    )
    chosen = [
        "lookahead=7",
        "cache_rows=0",
        "cache=replicated",
        "delayed_sync=false",
        "servers=2",
        "rendezvous='tcp://10.0.0.5:29600'",
        "placement={''='row_wise', C1='table_wise'}",
    ]
    config = load_recipe(str(recipe), [ahead, *(f"embedding.exchange.{each}" for each in chosen)])
    assert check_config(tomllib.loads(to_toml(config.model_dump())), "itself") == config
    assert load_recipe(str(recipe), [f"embedding.{each}" for each in chosen] + [ahead]) == config, (
        "as it was written before"
    )


def test_a_name_alone_is_a_section_and_keeps_what_another_exchange_shares(recipe):
    assert load_recipe(str(recipe)).embedding.exchange.name == "auto"
    both = [
        "embedding.exchange=lookahead",
        "embedding.exchange.lookahead=5",
        "embedding.exchange.wire=bfloat16",
    ]
    changed = load_recipe(str(recipe), [*both, "embedding.exchange=alltoall"]).embedding.exchange
    assert (changed.name, changed.wire) == ("alltoall", "bfloat16")


def test_keys_of_earlier_recipes_are_read_with_a_warning(recipe, caplog):
    embedding._warn_of_moved.cache_clear()
    old = ["embedding.cache=lrpp", "embedding.delayed_sync=true", "embedding.placement=table_wise"]
    assert load_recipe(str(recipe), old).embedding.exchange.placement == "table_wise"
    load_recipe(str(recipe), old)
    assert [record.getMessage() for record in caplog.records] == [
        "the recipe key `embedding.placement` is `embedding.exchange.placement` now; it is still"
        " read"
    ]  # not of what had its default, and once
    assert (
        load_recipe(str(recipe), [*old, "embedding.exchange=local"]).embedding.exchange.name
        == "local"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["lookahead=5"],
            r"`embedding\.lookahead = 5`.*need nothing, or `embedding\.exchange = 'lookahead'`",
        ),
        (
            ["exchange=alltoall", "cache_rows=9"],
            r"`embedding\.cache_rows = 9`.*exchange = 'lookahead'",
        ),
        (["exchange=local", "cache=partitioned"], r"`embedding\.cache = 'partitioned'`"),
        (["delayed_sync=false"], r"`embedding\.delayed_sync = False`"),
        (
            ["servers=2"],
            r"`embedding\.servers = 2`.*need nothing, or `embedding\.exchange = 'lookahead'`",
        ),
        (
            ["oracle=central"],
            r"`embedding\.oracle = .central.`.*"
            r"need nothing, or `embedding\.exchange = .lookahead.`",
        ),
        (
            ["exchange=lookahead", "exchange.lookahead=0"],
            r"`embedding\.exchange\.lookahead = 0`.*equal to 1",
        ),
        (
            ["exchange=lookahead", "lookahead=0"],
            r"`embedding\.exchange\.lookahead = 0`.*equal to 1",
        ),
        (
            ["exchange=lookahead", "exchange.cache_rows=-1"],
            r"`embedding\.exchange\.cache_rows = -1`.*equal to 0",
        ),
        (
            ["exchange=lookahead", "exchange.cache=lru"],
            r"`embedding\.exchange\.cache = 'lru'`.*'lrpp', 'partitioned'",
        ),
        (
            ["exchange=lookahead", "exchange.placement=column_wise"],
            r"`embedding\.exchange\.placement = 'column_wise'`.*row_wise or table_wise",
        ),
        (
            ["exchange=lookahead", "exchange.placement={C1='replicated'}"],
            r"`embedding\.exchange\.placement = \{'C1'",
        ),
        (
            ["exchange=lookahead", "exchange.servers=0"],
            r"`embedding\.exchange\.servers = 0`.*equal to 1",
        ),
        (
            ["exchange=lookahead", "exchange.rendezvous='tcp://a:1'"],
            r"`rendezvous` with `servers`.*or `oracle = .central.`",
        ),
        (
            ["exchange=teleport"],
            r"`embedding\.exchange\.name = 'teleport'`.*'local', 'alltoall', 'auto', 'lookahead'",
        ),
        (["exchange.cache=lrpp"], r"unknown key `embedding\.exchange\.cache`"),
    ],
)
def test_what_lookahead_takes_and_what_only_lookahead_takes(recipe, overrides, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_recipe(str(recipe), [f"embedding.{override}" for override in overrides])


def test_missing_and_circular_and_broken_recipes(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'synthetic_small'"):
        load_recipe("synthetic_smal")
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(ConfigError, match="extends itself"):
        load_recipe(str(tmp_path / "a.toml"))
    (tmp_path / "c.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="no TOML"):
        load_recipe(str(tmp_path / "c.toml"))
    (tmp_path / "d.toml").write_text("seed = 1\n[train]\nepochs = 1\n")
    with pytest.raises(ConfigError, match="no `data`"):
        load_recipe(str(tmp_path / "d.toml"))


def test_a_byte_order_mark_is_no_part_of_a_recipe(recipe, tmp_path):
    marked = tmp_path / "marked.toml"
    marked.write_text('extends = "base.toml"\n[train]\nepochs = 3\n', encoding="utf-8-sig")
    recipe.write_text(recipe.read_text(), encoding="utf-8-sig")
    assert load_recipe(str(marked)).train.epochs == 3


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_survive_being_written(name):
    config = load_recipe(name)
    assert check_config(tomllib.loads(to_toml(config.model_dump())), name) == config


def test_each_recipe_comes_for_each_model():
    specs = (*model_zoo.SPECS, *model_sequences.SPECS, *model_two_tower.SPECS)
    zoo = [spec.name for spec in specs]
    assert [load_recipe(f"synthetic_small_{name}").model.name for name in zoo] == zoo
    others = ("dcnv2", "deepfm", "wide_deep", "lookahead", "raw", "retrieve", "towers", *zoo)
    variants = tuple(f"_{name}" for name in others)
    bases = [name for name in recipe_names() if not name.endswith(variants)]
    assert bases == ["avazu_sample", "criteo_kaggle", "criteo_kaggle_sample", "synthetic_small"]
    for base in bases:
        configs = [
            load_recipe(base),
            *(load_recipe(f"{base}_{name}") for name in ("dcnv2", "deepfm", "wide_deep")),
        ]
        assert [config.model.name for config in configs] == ["dlrm", "dcnv2", "deepfm", "wide_deep"]
        assert len({config.data for config in configs}) == 1


def test_servers_and_processors_meet_at_one_place(recipe):
    servers = [
        "embedding.exchange=lookahead",
        "embedding.exchange.servers=1",
        "embedding.exchange.rendezvous='tcp://10.0.0.5:1'",
    ]
    processors = ["data.processors=2", "data.rendezvous='tcp://10.0.0.5:1'"]
    config = load_recipe(str(recipe), servers + processors)
    assert config.data.processors == 2
    assert check_config(tomllib.loads(to_toml(config.model_dump())), "itself") == config
    with pytest.raises(ConfigError, match="need one rendezvous"):
        load_recipe(str(recipe), [*servers, *processors, "data.rendezvous='tcp://10.0.0.6:1'"])
    with pytest.raises(ConfigError, match="`rendezvous` with `processors`"):
        load_recipe(str(recipe), ["data.rendezvous='tcp://10.0.0.5:1'"])


def test_a_rendezvous_is_read_by_the_name_that_it_had_before(recipe):
    where = "tcp://10.0.0.5:29600"
    before = [f"data.meet='{where}'", f"embedding.exchange.meet='{where}'"]
    own = ["data.processors=1", "embedding.exchange=lookahead", "embedding.exchange.servers=2"]
    config = load_recipe(str(recipe), [*own, *before])
    assert config.data.rendezvous == config.embedding.exchange.rendezvous == where
    assert (
        load_recipe(str(recipe), [*own, *(each.replace("meet", "rendezvous") for each in before)])
        == config
    )
