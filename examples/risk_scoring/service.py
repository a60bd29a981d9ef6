"""What `slow.py` and `fixed.py` have in common: the endpoints, the steps of a request, the neighbours and the account of the truth.

A request is one applicant. The service values it under 256 scenarios (balance and income shocked up and down), copies them to the
device, runs the model, copies the answers back and asks the rules. Two neighbours disturb it at random instants, as neighbours do:
a table that is copied to the device anew, and rules that are loaded anew. What they do is the same in both versions; what differs is
whether a request has to wait for them.
"""

from __future__ import annotations

import abc
import argparse
import gc
import json
import os
import random
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

import inferscope as scope
from examples.risk_scoring import copy_engine, model, rules, truth

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Applicant", "Options", "Scoring", "application", "run"]

WORKERS: Final = 8
"""Threads that score at the same time."""
SHOCKS: Final = 16
"""Steps of the balance and of the income shock; a request is SHOCKS x SHOCKS scenarios."""
KERNEL_MS: Final = 5.0
"""Work of the device for one request; the network alone would be too quick to be worth a device."""
HOLD_MS: Final = (35.0, 55.0)
"""How long a neighbour is busy each time."""
MOST: Final = 1_000_000_000
"""No amount is this large."""
PAUSE_S: Final = (0.8, 2.2)
"""How long it rests in between."""


@dataclass(frozen=True, slots=True)
class Options:
    """What can be chosen at start, from RISK_SCORING_* variables so that every uvicorn worker sees the same."""

    device: str = "auto"
    seed: int = 0
    cache: Path | None = None
    truth: Path | None = None
    """Folder for truth-PID.jsonl at shutdown; None writes nothing."""

    @classmethod
    def from_environment(cls) -> Options:
        """Reads RISK_SCORING_DEVICE, _SEED, _CACHE and _TRUTH."""
        get = os.environ.get
        cache, folder = get("RISK_SCORING_CACHE"), get("RISK_SCORING_TRUTH")
        return cls(
            get("RISK_SCORING_DEVICE", "auto"),
            int(get("RISK_SCORING_SEED", "0")),
            Path(cache) if cache else None,
            Path(folder) if folder else None,
        )


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who asks."""

    student: bool
    balance: float
    income: float

    @classmethod
    def from_json(cls, body: Any) -> Applicant:
        """Checks and reads a request body.

        Raises:
            ValueError: a field is missing or of the wrong kind.
        """
        match body:
            case {"student": bool(student), "balance": int() | float() as balance, "income": int() | float() as income} if (
                0 <= balance < MOST and 0 <= income < MOST
            ):
                return cls(student, float(balance), float(income))
            case _:
                raise ValueError(f"the body is an object with student (true or false), balance and income (0 to {MOST})")


class OnDevice(torch.nn.Module):
    """The model where it runs: a forward ends when the device has finished."""

    def __init__(self, network: model.RiskModel, device: copy_engine.Device) -> None:
        super().__init__()
        self.network, self._device = network, device

    def forward(self, columns: list[torch.Tensor]) -> torch.Tensor:
        """Expected and worst probability of default, shape (2,), of columns student, balance, income and weight."""
        *features, weights = columns
        probabilities = self.network(torch.stack(features, dim=1))
        answer = torch.stack([torch.dot(probabilities, weights), probabilities.max()])
        self._device.kernel(KERNEL_MS)
        self._device.synchronize()
        return answer


class Scoring(abc.ABC):
    """One version of the service; a version says how columns reach the device and how rules are read and renewed."""

    def __init__(self, options: Options) -> None:
        self.device = copy_engine.choose(options.device)
        trained = model.load_or_train(options.cache, options.seed)
        print(f"model {'trained' if trained.fresh else 'read from the cache'}; AUC on held-out rows {trained.auc:.4f}", flush=True)
        self.model = OnDevice(trained.model.to(self.device.torch_device), self.device).eval()
        self.store = rules.RuleStore()
        self.rules = rules.parse(self.store.fetch(0))
        self.truth = truth.Log()
        steps = torch.linspace(-1.0, 1.0, SHOCKS)
        self._balance_shock = (1 + 0.3 * steps).repeat_interleave(SHOCKS)
        self._income_shock = (1 - 0.3 * steps).repeat(SHOCKS)
        likelihood = torch.exp(-2 * (steps.repeat_interleave(SHOCKS) ** 2 + steps.repeat(SHOCKS) ** 2))
        self._weights = likelihood / likelihood.sum()
        self._table = self.device.table(HOLD_MS[1])

    @abc.abstractmethod
    def upload(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        """The columns on the device."""

    @abc.abstractmethod
    def decide(self, facts: dict[str, float], trail: truth.Trail) -> rules.Verdict:
        """What the rules say of the facts."""

    @abc.abstractmethod
    def reload_rules(self, milliseconds: float) -> None:
        """Loads the rules anew, for which the store takes that long."""

    @abc.abstractmethod
    def queue(self) -> AbstractContextManager[Any]:
        """The device queue that a request works on."""

    def refresh_table(self, milliseconds: float) -> None:
        """Copies a table from pageable memory to the device, which takes about that long."""
        size = int(len(self._table) * milliseconds / HOLD_MS[1])
        self.device.to_device(self._table[:size])

    def score(self, applicant: Applicant, trail: truth.Trail) -> dict[str, Any]:
        """One request, on a worker thread."""
        with trail.worker():
            return self._score(applicant, trail)

    def _score(self, applicant: Applicant, trail: truth.Trail) -> dict[str, Any]:
        with torch.inference_mode(), self.queue():
            with scope.stage("preprocess"), trail.phase("preprocess"):
                columns = self.scenarios(applicant)
            with trail.phase("copy:h2d"):
                uploaded = self.upload(columns)
            with trail.phase("forward"):  # inferscope's torch integration times the model's call
                answer = self.model(uploaded)
            with trail.phase("copy:d2h"):
                expected, worst = (float(value) for value in self.device.to_host(answer))
        with scope.stage("rules"), trail.phase("rules"):
            facts = {
                "score": expected,
                "stress": worst,
                "student": float(applicant.student),
                "balance": applicant.balance,
                "income": applicant.income,
                "debt_ratio": applicant.balance / max(applicant.income, 1.0),
            }
            verdict = self.decide(facts, trail)
        return {"score": round(expected, 6), "stress": round(worst, 6), "decision": verdict.decision, "reasons": list(verdict.reasons)}

    def account(self) -> list[dict[str, int]]:
        """The truth of the finished requests; that of their copies is the device's own log."""
        return truth.with_copies(self.truth.rows(), self.device.copies)

    def scenarios(self, applicant: Applicant) -> list[torch.Tensor]:
        """Columns student, balance, income and weight, each of shape (scenarios,) in pageable memory."""
        return [
            torch.full_like(self._weights, float(applicant.student)),
            applicant.balance * self._balance_shock,
            applicant.income * self._income_shock,
            self._weights.clone(),
        ]


class Neighbours:
    """Threads that do something else from time to time, at seeded random instants."""

    def __init__(self, scoring: Scoring, seed: int) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._disturb, args=(name, work, seed), name=name, daemon=True)
            for name, work in (("table-refresh", scoring.refresh_table), ("rule-reload", scoring.reload_rules))
        ]

    def _disturb(self, name: str, work: Callable[[float], None], seed: int) -> None:
        draw = random.Random(f"{name} {seed}")
        while not self._stop.wait(draw.uniform(*PAUSE_S)):
            work(draw.uniform(*HOLD_MS))

    def start(self) -> None:
        """Starts them."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them and waits until they have."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


class TruthEdge:
    """Notes when a request enters the application and when the last byte of its answer has left."""

    def __init__(self, app: ASGIApp, holder: dict[str, Scoring]) -> None:
        self._app, self._holder = app, holder

    async def __call__(self, asgi: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if asgi["type"] != "http" or asgi["path"] != "/score":
            await self._app(asgi, receive, send)
            return
        trail = truth.Trail()
        asgi.setdefault("state", {})["trail"] = trail
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._holder["scoring"].truth.finish(trail, status)

        await self._app(asgi, receive, watched)


def application(version: type[Scoring]) -> Starlette:
    """The ASGI application of one version; model, device and threads come up with the server, not with the import."""
    holder: dict[str, Scoring] = {}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        options = Options.from_environment()
        torch.set_num_threads(1)  # eight workers share the cores; a forward that spreads over all of them waits for all of them
        anyio.to_thread.current_default_thread_limiter().total_tokens = WORKERS
        scoring = holder["scoring"] = version(options)
        scoring.score(Applicant(student=False, balance=1000.0, income=30000.0), truth.Trail())  # first calls allocate
        neighbours = Neighbours(scoring, options.seed)
        neighbours.start()
        gc.collect()
        gc.freeze()  # what the libraries left is not looked through again: a full collection with torch loaded takes tens of ms
        yield
        neighbours.stop()
        if options.truth:
            truth.write(options.truth / f"truth-{os.getpid()}.jsonl", scoring.account())

    async def score(request: Request) -> JSONResponse:
        try:
            applicant = Applicant.from_json(json.loads(await request.body()))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        trail: truth.Trail = request.state.trail
        return JSONResponse(await run_in_threadpool(_on_worker, holder["scoring"], applicant, trail, time.perf_counter_ns()))

    async def healthz(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def truth_of(request: Request) -> JSONResponse:
        try:
            bounds = {name: int(value) for name, value in request.query_params.items() if name in {"from_ns", "to_ns"}}
        except ValueError:
            return JSONResponse({"error": "from_ns and to_ns are whole numbers of nanoseconds"}, status_code=400)
        return JSONResponse(asdict(truth.attribute(holder["scoring"].account(), **bounds)))

    routes = [
        Route("/score", score, methods=["POST"]),
        Route("/healthz", healthz),
        Route("/truth", truth_of, name="truth"),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TruthEdge, holder)], lifespan=lifespan)


def _on_worker(scoring: Scoring, applicant: Applicant, trail: truth.Trail, queued_ns: int) -> dict[str, Any]:
    trail.add("queue:threadpool", time.perf_counter_ns() - queued_ns)
    return scoring.score(applicant, trail)


def run(app: Starlette, description: str) -> None:
    """The command line of a version: reads the options, hands them on through the environment and serves."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu", "simulated"), default="auto", help="see copy_engine.choose (auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the neighbours (0)")
    parser.add_argument("--cache", type=Path, help="where the trained weights are kept")
    parser.add_argument("--truth", type=Path, help="folder for the example's own account, written at shutdown")
    options = parser.parse_args()
    for name in ("device", "seed", "cache", "truth"):
        value = getattr(options, name)
        if value is not None:
            os.environ[f"RISK_SCORING_{name.upper()}"] = str(value)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", access_log=False)
