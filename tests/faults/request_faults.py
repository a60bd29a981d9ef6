"""Planted in requests and their traffic: copies, slow models, sizes, queues, batches, errors, cold starts; pairs; and healthy services."""

from __future__ import annotations

import itertools
import threading
import time

from harness import now_and_then, work
from host_faults import gc_pauses
from planted import Batcher, Lane, OneIn, Rules, no_torch, ordinary, plant

from inferscope.clock import now_ns
from inferscope.integration import record_copy

JOINED = "a queue that grows joins its waits to a few long episodes"


@plant("H2D_SYNC_PAGEABLE", where="upload (serve.py:31)")
def pageable_copies(service):
    lane = Lane()
    service.neighbours.append(("table-refresh", now_and_then(lambda draw: lane.move(draw.uniform(42, 55)))))
    ordinary(service, preprocess=lambda _: lane.copy(0.3, 1 << 16, pageable=True, site="upload (serve.py:31)"))


@plant("MANY_SMALL_COPIES", where="features (serve.py:12)")
def small_copies(service):
    """Every request copies feature by feature; those with many features take long."""

    large = OneIn(10)

    def prepare(arrival):
        for _ in range(60 if large(arrival.draw) else 10):
            begin = now_ns()
            time.sleep(0.0008)
            record_copy("h2d", 2048, begin, now_ns(), sync=True, pageable=False, site="features (serve.py:12)")

    ordinary(service, preprocess=prepare)


@plant("MODEL_SLOW", where="forward")
def slow_model(service):
    """Some inputs, not larger than others, take the model long."""
    service.rate, hard = 66.0, OneIn(11)
    ordinary(service, forward=lambda arrival: work(38.0 if hard(arrival.draw) else 1.0))


@plant("SATURATION", few=JOINED)
def more_traffic(service):
    """60 % more requests after a third of the time; two workers serve 100 of 20 ms a second, of which the device takes most."""
    service.workers, service.objective_ms = 2, 60.0
    service.seconds *= 1.6
    service.rate_at = lambda since: 64.0 if since < service.seconds / 3 else 64.0 * 1.6
    ordinary(service, forward=lambda _: time.sleep(0.0185))


@plant("INPUT_SIZE", where="forward")
def large_inputs(service):
    service.rate, large = 62.0, OneIn(11)
    service.size = lambda draw: draw.uniform(27, 40) if large(draw) else draw.uniform(0.5, 2.0)
    ordinary(service, forward=lambda arrival: work(1.1 * arrival.size))


@plant("SATURATION", where="1 of 4 workers stopped serving", few=JOINED)
def dead_worker(service):
    """One of four workers dies after a while, without a word; three are too few for the same traffic, for ten seconds and more."""
    service.workers, service.objective_ms, service.rate = 4, 60.0, 166.0
    service.seconds *= 1.5
    begin, lock, dead = now_ns(), threading.Lock(), []

    def forward(_):
        if (now_ns() - begin) / 1e9 > 0.2 * service.seconds and not dead and lock.acquire(blocking=False):
            dead.append(threading.current_thread().name)
            raise SystemExit
        time.sleep(0.0185)

    ordinary(service, forward=forward)


@plant("STAGE_SLOW", where="pad_rows (", needs=no_torch)
def eager_padding(service):
    """Rows are padded to the longest of their batch in Python; now and then a neighbour in it is very long."""
    import torch

    rows = [torch.ones(60) for _ in range(48)]

    def pad_rows(longest):
        for row in rows:  # one after the other: memory that is fresh in each request costs what the machine likes
            torch.nn.functional.pad(row, (0, longest - len(row)))

    def milliseconds(longest):
        begin = time.thread_time()
        pad_rows(longest)
        return 1e3 * (time.thread_time() - begin)

    torch.set_num_threads(1)
    very = 60_000
    for _ in range(6):  # time does not grow as length does: long rows are not in the cache
        very = int(min(4_000_000, very * min(4.0, 27 / min(milliseconds(very) for _ in range(3)))))
    service.rate, long = 52.0, OneIn(9)
    ordinary(service, preprocess=lambda arrival: pad_rows(very if long(arrival.draw) else 300))


@plant("DYNAMIC_SHAPES", where="forward", needs=no_torch, few="four compilations a second would be most of a CPU")
def recompiled_shapes(service):
    """A compiled model meets a shape for the first time, now and then, and is compiled again."""
    import torch
    from torch._dynamo import config

    from inferscope import integration

    torch.set_num_threads(1)
    inner = torch.nn.Linear(64, 64)
    compiled = torch.compile(inner, backend="eager", dynamic=False)

    class Model(torch.nn.Module):
        def forward(self, rows):
            return compiled(rows)

    model, lengths, turns, guard = Model(), iter(range(9, 100_000)), itertools.count(), threading.Lock()
    with torch.inference_mode():
        compiled(torch.ones(8, 64))
    integration.registry.instrument(["torch"])
    service.rate, service.workers = 10.0, 2
    service.seconds *= 1.3
    recorder = service.recorder

    def handle(_):
        with recorder.stage("preprocess"):
            rows = torch.ones(8 if next(turns) % 6 else next(lengths), 64)
        with guard, torch.inference_mode():
            config.recompile_limit = config.accumulated_recompile_limit = 10_000  # of this thread
            model(rows)

    service.handle = handle


@plant("BATCH_TIMEOUT", where="queue:batch")
def batch_timeout(service):
    """Now and then traffic is too thin to fill a batch, and requests wait for its timer."""
    service.workers, service.objective_ms = 16, 36.0
    service.rate_at = lambda since: 18.0 if int(since * 8) % 4 < 3 else 150.0
    batcher = Batcher(service, 2, 42.0, lambda _: None)
    ordinary(service, forward=batcher.wait)


@plant("BATCH_CAPACITY", where="queue:batch")
def batch_capacity(service):
    """Bursts come faster than batches are served."""
    service.workers, service.objective_ms = 32, 26.0
    service.rate_at = lambda since: 620.0 if int(since * 40) % 5 == 0 else 80.0
    batcher = Batcher(service, 4, 5.0, lambda number: time.sleep(0.004 * number))
    ordinary(service, forward=batcher.wait)


@plant("HEAD_OF_LINE")
def head_of_line(service):
    """One worker; a large request now and then, and small ones behind it."""
    service.workers, service.objective_ms, service.rate = 1, 15.0, 75.0
    large = OneIn(11)
    service.size = lambda draw: draw.uniform(19, 24) if large(draw) else draw.uniform(0.8, 1.2)
    ordinary(service, forward=lambda arrival: time.sleep(0.002 * arrival.size))


@plant("COLD_START", few="a process starts once")
def cold_start(service):
    """The first seconds load weights lazily."""
    begin = now_ns()

    def forward(_):
        time.sleep(0.060 if (now_ns() - begin) / 1e9 < 2.5 else 0.0)
        work(2.0)

    ordinary(service, forward=forward)


@plant("RETRY_OR_ERROR", where="fetch")
def errors_and_retries(service):
    """A backend refuses some calls; they are tried again after a pause, and some give up."""
    recorder, refused = service.recorder, OneIn(10)

    def fetch(arrival):
        bad = refused(arrival.draw)
        for attempt in range(3):
            with recorder.stage("fetch"):
                time.sleep(0.018 if bad else 0.003)
                if not bad:
                    return
            if attempt == 2 and arrival.draw.random() < 0.5:
                raise RuntimeError("refused")

    ordinary(service, rules=fetch)


@plant("H2D_SYNC_PAGEABLE", "LOCK_CONTENTION")
def copies_and_lock(service):
    lane = Lane()
    service.neighbours.append(("table-refresh", now_and_then(lambda draw: lane.move(draw.uniform(45, 55)), 0.17, 0.25)))
    ordinary(
        service,
        preprocess=lambda _: lane.copy(0.3, 1 << 16, pageable=True, site="upload (serve.py:31)"),
        rules=Rules(service, lambda draw: work(draw.uniform(36, 44)), (0.17, 0.25)).apply,
    )


@plant("INPUT_SIZE", "LOCK_CONTENTION")
def inputs_and_lock(service):
    service.size = lambda draw: draw.uniform(35, 45) if draw.random() < 0.05 else draw.uniform(0.5, 2.0)
    ordinary(
        service,
        forward=lambda arrival: work(arrival.size),
        rules=Rules(service, lambda draw: time.sleep(draw.uniform(0.045, 0.06)), (0.2, 0.3)).apply,
    )


@plant("GC_PAUSE", "H2D_SYNC_PAGEABLE")
def gc_and_copies(service):
    gc_pauses(service)
    lane = Lane()
    service.neighbours.append(("table-refresh", now_and_then(lambda draw: lane.move(draw.uniform(35, 45)), 0.2, 0.3)))
    ordinary(
        service,
        preprocess=lambda _: lane.copy(0.3, 1 << 16, pageable=True, site="upload (serve.py:31)"),
        forward=lambda _: time.sleep(0.012),
    )


@plant()
def healthy(service):
    service.objective_ms = 120.0
    ordinary(service)


@plant()
def healthy_with_locks_and_copies(service):
    """Short holds and quick copies under contention that costs nobody the objective."""
    service.objective_ms, service.rate = 120.0, 60.0
    lane = Lane()
    ordinary(
        service,
        preprocess=lambda _: lane.copy(0.2, 1 << 16, pageable=True, site="upload (serve.py:31)"),
        rules=Rules(service, lambda _: work(4.0)).apply,
    )


@plant()
def healthy_in_bursts(service):
    service.objective_ms = 200.0
    service.rate_at = lambda since: 110.0 if int(since) % 4 == 0 else 30.0
    service.size = lambda draw: draw.lognormvariate(0.0, 0.6)
    ordinary(service, forward=lambda arrival: work(min(8.0, 2.0 * arrival.size)))
