"""What users may import.

A change here is a change of the public interface: mention it in CHANGELOG.md.
"""

import inspect

import pibroch

OPTIMIZER = (
    "*, lr: float, weight_decay: float = 0.0, max_row_norm: float | None = None, average: float |"
    " None = None"
)
OPTIMIZER += ", decoupled: bool = False, max_element: float | None = None"
ADAGRAD = f"({OPTIMIZER}, eps: float = 1e-10, initial_accumulator: float = 0.0) -> None"
ADAM = f"({OPTIMIZER}, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08) -> None"
PLACED = (
    "placement: str | Mapping[str, str] | Plan = row_wise, plan: str | Path | None = None,"
    " wire: str = float32, compress: bool = False"
)
SNAPSHOT = {
    "Adagrad": ADAGRAD,
    "Adam": ADAM,
    "AfterCount": ("(count: int = 1, sketch: bool = False, candidates: int | None = None) -> None"),
    "BoundedLagOptions": (
        "(bound: int | None = None, transport: str | None = None, slot_bytes: int = 65536) -> None"
    ),
    "BoundedLagPipeline": (
        "(model: Callable[..., Any], embeddings: Embeddings, bound: int | str | None = None,"
        " transport: str | None = None) -> None"
    ),
    "EmbeddingOutput": (
        "(places: Mapping[str, ReaderPlace], groups: Sequence[Tensor],"
        " offsets: Sequence[Tensor | None]) -> None"
    ),
    "Embeddings": (
        "(tables: Sequence[Table], optimizer: Optimizers, exchange: str |"
        " ExchangeOptions = local, seed: int | None = 0, channel: Channel | None = None, device:"
        " torch.device | str | None = None, **options: object) -> None"
    ),
    "Frozen": f"({OPTIMIZER.replace('lr: float', 'lr: float = 0.0')}) -> None",
    "Hashed": (
        "(admit: AfterCount = <factory>, evict: EvictionPolicy = <factory>,"
        " expire_after: int | None = None, unknown_row: bool = False,"
        " expire_after_seconds: float | None = None) -> None"
    ),
    "JaggedBatch": (
        "(dense: Tensor, keys: tuple[str, ...], values: Tensor, offsets: Tensor, labels: Tensor,"
        " weights: Tensor | None = None, position: LoaderPosition | StreamPosition | None = None,"
        " first_sample: int = 0, by_id: bool = False, fresh: FreshRows | None = None,"
        " sample_weights: Tensor | None = None,"
        " groups: Tensor | None = None, event_times: Tensor | None = None,"
        " assigned: Assigned | None = None) -> None"
    ),
    "LeastFrequent": "(half_life: int | None = None) -> None",
    "LeastRecent": "() -> None",
    "AllToAll": f"({PLACED}, replicas: str = gather, assign: str = given) -> None",
    "Local": "() -> None",
    "Lookahead": (
        f"({PLACED}, lookahead: int | None = None, cache_rows: int | None = None, cache: str ="
        " lrpp, delayed_sync: bool = True, servers: Sequence[str] = (), oracle: str | None ="
        " None, assign: str = given) -> None"
    ),
    "Retrieve": (
        f"({PLACED}, replicas: str = gather, assign: str = given, hosts: Sequence[int] | None ="
        " None) -> None"
    ),
    "Towers": (
        f"({PLACED}, ranks_per_host: int | None = None, hosts_per_tower: int | None = None,"
        " groups: Sequence[Sequence[str]] | None = None) -> None"
    ),
    "Normal": "(std: float = 0.01, zero_columns: int = 0) -> None",
    "PibrochError": "(got: str, need: str = , do: str = ) -> None",
    "Plan": (
        "(*, num_shards: int, placements: dict[str, pibroch.planner.plan.Placement], made_from:"
        " dict[str, typing.Any] = {}, row_map: pibroch.planner.row_map.RowMap | None = None) ->"
        " None"
    ),
    "Predictor": "(model: OpenedModel) -> None",
    "RowWiseAdagrad": ADAGRAD,
    "RowWiseAdam": ADAM,
    "SGD": f"({OPTIMIZER}) -> None",
    "Table": (
        "(name: str, num_rows: int, dim: int, features: tuple[str, ...] = (), pooling: Pooling ="
        " sum, initializer: Initializer = <factory>, dtype: Dtype = float32, rows: IndexKind ="
        " <factory>) -> None"
    ),
    "Uniform": "(bound: float | None = None, center: float = 0.0) -> None",
    "Zeros": "() -> None",
    "load": (
        "(path: str | Path, embeddings: Embeddings, *, model: Named[nn.Module] = None, optimizer:"
        " Named[torch.optim.Optimizer] = None, scheduler: Named[HasState] = None, row_state: bool ="
        " True, missing_ok: bool = False) -> Saved"
    ),
    "save": (
        "(folder: str | Path, embeddings: Embeddings, *, model: Named[nn.Module] = None, optimizer:"
        " Named[torch.optim.Optimizer] = None, scheduler: Named[HasState] = None, position:"
        " Position | None = None, extra: object = None, step: int | None = None, keep: int | None ="
        " 2) -> Path"
    ),
    "data_parallel": (
        "(model: M, ranks: Ranks | None = None, reduction: Reduction = mean,"
        " num_samples: Callable[..., int] | None = None) -> M"
    ),
}


def test_names_and_signatures():
    results = {name: getattr(pibroch, name) for name in pibroch.__all__}
    callables = {name: thing for name, thing in results.items() if callable(thing)}
    assert set(results) - set(callables) == {
        "__version__",
        "data",
        "errors",
        "metrics",
        "torchrec",
    }
    signatures = {
        name: str(inspect.signature(thing)).replace("'", "") for name, thing in callables.items()
    }
    assert signatures == SNAPSHOT
