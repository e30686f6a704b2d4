"""The endpoints: the Open Inference Protocol v2, raw rows, metrics; ``/docs`` shows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

from pibroch.errors import DamagedCheckpointError, InputError
from pibroch.serve import openapi
from pibroch.serve.batcher import Batcher
from pibroch.serve.endpoints import GET, JSON_TYPE, POST, Endpoint, Reply, Request
from pibroch.serve.inference_protocol import JSON_LENGTH, InferRequest, answer, parse_infer
from pibroch.serve.inputs import Work, encoded_inputs, work_of
from pibroch.serve.predictor import Predictor
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.raw_body import LARGE_BODY_BYTES, RawColumns, parse_raw, parse_users
from pibroch.serve.retrieval import Retriever
from pibroch.serve.settings import Refusal
from pibroch.serve.store import ModelStore
from pibroch.state.event_time import age_of
from pibroch.version import __version__

T = TypeVar("T")
SCORE = "score"
LOGIT = "logit"
EMBEDDING = "embedding"
OUTPUTS = (SCORE, LOGIT, EMBEDDING)


class Service:
    """Answers of one process.

    Args:
        store: the model.
        metrics: of this process.

    Attributes:
        batcher: made when the event loop runs, before the first request.
        is_ready: false before the first batch can be scored, and while the server drains.
        gauges: what the server around it has to say, by name.
    """

    batcher: Batcher

    def __init__(self, store: ModelStore, metrics: ServerMetrics) -> None:
        self.store = store
        self.metrics = metrics
        self._parser = ThreadPoolExecutor(1, "pibroch-parse")  # starts when it is first needed
        self._retrieving = ThreadPoolExecutor(1, "pibroch-retrieve")  # likewise
        self._users_waiting = 0
        self.is_ready = False
        self.gauges: Callable[[], Mapping[str, float]] = dict

    async def infer(self, request: Request) -> Reply:
        """Scores or embeddings of encoded samples or raw columns, as JSON or binary tensors.

        Encoded samples are `dense`, `ids` and so on.
        """
        predictor = self._asked(request)  # from here on the request is this version's

        def parse() -> tuple[InferRequest, Work]:
            wanted = parse_infer(request.body, request.header(JSON_LENGTH.lower()), OUTPUTS)
            needs_dense = set(wanted.outputs) != {EMBEDDING}
            return wanted, work_of(wanted.inputs, predictor, needs_dense)

        wanted, work = await self._parsed(request, parse)
        names = set(wanted.outputs)
        outputs: dict[str, NDArray[Any]] = {}
        if EMBEDDING in names:
            outputs[EMBEDDING] = await self.batcher.embeddings(predictor, work)
        if names != {EMBEDDING}:
            logits = await self.batcher.logits(predictor, work)
            outputs |= {SCORE: predictor.scores_of(logits), LOGIT: logits}
        return self._tensors(predictor, wanted, outputs)

    async def score(self, request: Request) -> Reply:
        """Scores of raw rows: `{"rows": [...]}`, `{"columns": {...}}`, or lines (`text/csv`).

        Lines are as in the training data.
        """
        predictor, raw = await self._raw(request)
        logits = await self.batcher.logits(predictor, raw)
        scores = predictor.scores_of(logits)
        if request.headers.get(b"accept", b"").startswith(b"text/csv"):
            lines = scores.reshape(len(scores), -1).tolist()
            text = "".join(f"{','.join(map(repr, line))}\n" for line in lines)
            about: dict[str, object] = {"model_version": predictor.version, **_freshness(predictor)}
            headers = [
                (f"x-{name.replace('_', '-')}".encode(), f"{value}".encode())
                for name, value in about.items()
            ]
            return Reply(text.encode(), ((b"content-type", b"text/csv; charset=utf-8"), *headers))
        return self._outputs(predictor, {"scores": scores.tolist()})

    async def embed(self, request: Request) -> Reply:
        """Pooled embeddings of raw rows, as `/score` takes them.

        A binary tensor with `Accept: application/octet-stream`.
        """
        predictor, raw = await self._raw(request)
        embeddings = await self.batcher.embeddings(predictor, raw)
        if request.headers.get(b"accept", b"").startswith(b"application/octet-stream"):
            wanted = InferRequest({}, None, {EMBEDDING: True})
            return self._tensors(predictor, wanted, {EMBEDDING: embeddings})
        return self._outputs(
            predictor, {"features": predictor.features, "embeddings": embeddings.tolist()}
        )

    async def retrieve(self, request: Request) -> Reply:
        """The best items of all for users: `{"rows": [...], "k": 10}` or `{"columns": {...}}`.

        Rows have the columns of the user's features. Answers hold for each the ids of its `items`,
        best first, and their `scores`, logits.
        """
        retriever = self.store.retriever  # from here on the request is this version's
        if retriever is None:
            raise Refusal(404, "got /retrieve where no items are served; need `--items FILE`")
        limits = self.batcher.limits
        parse = partial(parse_users, request.body, retriever.user_columns, limits.rows)
        users, k = await self._parsed(request, parse)
        count = len(next(iter(users.values())))
        size = count * min(k, retriever.num_items) * retriever.pair_bytes
        if size > limits.body_bytes:
            got = f"got {count} rows, whose {k} best items are up to {size:,} bytes"
            need = f"need at most {limits.body_bytes:,} in an answer: fewer rows, or a smaller `k`"
            raise Refusal(400, f"{got}; {need}")
        if self._users_waiting and self._users_waiting + count > limits.queue_rows:
            got = f"got {count} rows with {self._users_waiting} waiting already"
            raise Refusal(429, f"{got}; try again", {"retry-after": "1"})
        self._users_waiting += count
        try:
            loop = asyncio.get_running_loop()
            items, scores = await loop.run_in_executor(self._retrieving, retriever, users, k)
        except DamagedCheckpointError as error:
            raise Refusal(503, str(error)) from error
        except InputError as error:
            raise Refusal(400, str(error)) from error
        finally:
            self._users_waiting -= count
        return self._outputs(retriever.predictor, {"items": items, "scores": scores})

    async def live(self, _: Request) -> Reply:
        """Whether the process answers."""
        return _json({"live": True})

    async def ready(self, _: Request) -> Reply:
        """Whether requests should be sent here.

        200, or 503 while the server starts, drains, or has files that were changed.
        """
        is_ready = self.is_ready and self.store.is_warm and self.store.current.is_intact
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def server_metadata(self, _: Request) -> Reply:
        """Name and version of the server, and the extensions that it knows."""
        return _json(
            {"name": "pibroch", "version": __version__, "extensions": ["binary_tensor_data"]}
        )

    async def model_metadata(self, request: Request) -> Reply:
        """Inputs and outputs of the model; `raw_inputs` may take the place of `inputs`."""
        predictor = self._asked(request)
        columns = predictor.columns if predictor.takes_raw else ()
        outputs = {
            SCORE: ("FP64", []),
            LOGIT: ("FP32", []),
            EMBEDDING: ("FP32", [len(predictor.features), predictor.dim]),
        }
        return _json(
            {
                "name": self.store.name,
                "versions": [predictor.version],
                "platform": "pibroch",
                "inputs": encoded_inputs(predictor.schema),
                "raw_inputs": [
                    {"name": column, "datatype": "BYTES", "shape": [-1]} for column in columns
                ],
                "outputs": [
                    {"name": name, "datatype": datatype, "shape": [-1, *shape]}
                    for name, (datatype, shape) in outputs.items()
                ],
                "features": predictor.features,
                **_freshness(predictor),
            }
        )

    async def model_ready(self, request: Request) -> Reply:
        """Whether this model, or this version of it, can be asked."""
        self._asked(request)
        return await self.ready(request)

    async def metrics_text(self, _: Request) -> Reply:
        """For Prometheus."""
        predictor = self.store.current
        gauges = {
            "pibroch_model_step": predictor.step,
            "pibroch_model_loads": self.store.num_loaded,
            "pibroch_model_load_failures": self.store.num_failed,
            "pibroch_rows_waiting": self.batcher.rows_waiting,
            **{f"pibroch_{key}": value for key, value in _freshness(predictor).items()},
            **_retrieval(self.store.retriever),
            **self.gauges(),
        }
        info = {"model": self.store.name, "version": predictor.version}
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return Reply(self.metrics.text(gauges, info), (kind,))

    async def _raw(self, request: Request) -> tuple[Predictor, RawColumns]:
        """The version that is to answer, and a request's raw rows."""
        predictor = self.store.current
        kind = request.header("content-type") or ""
        most = self.batcher.limits.rows
        parse = partial(
            parse_raw, request.body, kind, predictor.schema, predictor.columns, max_rows=most
        )
        return predictor, await self._parsed(request, parse)

    async def _parsed(self, request: Request, parse: Callable[[], T]) -> T:
        """What a body holds; a thread parses a large one, so that others are answered meanwhile."""
        if len(request.body) <= LARGE_BODY_BYTES:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse)

    def _outputs(self, predictor: Predictor, content: Mapping[str, object]) -> Reply:
        about = {"model_name": self.store.name, "model_version": predictor.version}
        return _json({**about, **_freshness(predictor), **content})

    def _tensors(
        self, predictor: Predictor, wanted: InferRequest, outputs: Mapping[str, NDArray[Any]]
    ) -> Reply:
        return answer(self.store.name, predictor.version, wanted, outputs, _freshness(predictor))

    def _asked(self, request: Request) -> Predictor:
        """The current version, where the path names it."""
        predictor = self.store.current
        name = self.store.name
        if request.model != name:
            raise Refusal(404, f"got model `{str(request.model)[:80]}`; need `{name}`")
        if request.version not in (None, predictor.version):
            got = f"got version `{str(request.version)[:80]}` of {name}"
            raise Refusal(404, f"{got}; need {predictor.version}, or none for the newest")
        return predictor


def build_endpoints(service: Service) -> dict[str, Endpoint]:
    """What answers a service's requests, by path."""
    predictor = service.store.current
    retriever = service.store.retriever
    raw = openapi.raw_body(predictor.schema, predictor.columns)
    users = openapi.users_body(() if retriever is None else retriever.user_columns)
    model = "/v2/models/{model}"
    version = f"{model}/versions/{{version}}"
    infer = openapi.INFER_BODY
    endpoints = [
        Endpoint(GET, "/v2/health/live", service.live, answers=openapi.LIVE),
        Endpoint(GET, "/v2/health/ready", service.ready, answers=openapi.READY),
        Endpoint(GET, "/v2", service.server_metadata, answers=openapi.SERVER),
        Endpoint(GET, model, service.model_metadata, answers=openapi.MODEL),
        Endpoint(GET, f"{model}/ready", service.model_ready, answers=openapi.READY),
        Endpoint(GET, version, service.model_metadata, answers=openapi.MODEL),
        Endpoint(GET, f"{version}/ready", service.model_ready, answers=openapi.READY),
        Endpoint(GET, "/metrics", service.metrics_text, answers=openapi.METRICS),
        Endpoint(POST, f"{model}/infer", service.infer, infer, openapi.TENSORS),
        Endpoint(POST, f"{version}/infer", service.infer, infer, openapi.TENSORS),
        Endpoint(POST, "/score", service.score, raw, openapi.SCORES),
        Endpoint(POST, "/embed", service.embed, raw, openapi.EMBEDDINGS),
        Endpoint(POST, "/retrieve", service.retrieve, users, openapi.BEST_ITEMS),
    ]
    page = openapi.page(f"pibroch: {service.store.name}", endpoints)

    async def shown(_: Request) -> Reply:
        return _json(page)

    async def docs(_: Request) -> Reply:
        return Reply(openapi.DOCS, ((b"content-type", b"text/html; charset=utf-8"),))

    split = service.store.split

    async def refuse(_: Request) -> Reply:
        got = f"got a request for scores at a host of part {split.part} alone"
        raise Refusal(404, f"{got}; need one with --rows-at")

    if not split.scores:
        endpoints = [
            replace(each, answer=refuse) if each.methods == POST else each for each in endpoints
        ]
    shows = Endpoint(GET, "/openapi.json", shown), Endpoint(GET, "/docs", docs)
    return {each.path: each for each in (*endpoints, *shows)}


def _json(content: Mapping[str, object], status: int = 200) -> Reply:
    return Reply(msgspec.json.encode(content), (JSON_TYPE,), status)


def _retrieval(retriever: Retriever | None) -> dict[str, float]:
    """How the best items are found, and how many of them an index was measured to find."""
    if retriever is None:
        return {}
    is_exact = {"pibroch_retrieval_is_exact": float(retriever.is_exact)}
    recall = retriever.recall
    return is_exact if recall is None else {**is_exact, "pibroch_retrieval_recall": recall}


def _freshness(predictor: Predictor) -> dict[str, float]:
    """How old a version is in event time, where that is known."""
    event_time = predictor.event_time
    if event_time is None:
        return {}
    return {
        "model_event_time_ms": event_time,
        "model_age_seconds": round(age_of(event_time, time.time()), 3),
    }
