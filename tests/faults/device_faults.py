"""Planted on the device: the simulated accelerator, and ranks that wait for each other."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from harness import now_and_then, spin, work
from planted import OneIn, forked, ordinary, plant
from simulated import UUID, Card, driver


def no_sim():
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return None if any(shutil.which(name) for name in ("g++", "clang++", "c++")) else "no C++ compiler for the simulated accelerator"


RARE = {}


def rare(arrival, many=10):
    return RARE.setdefault(many, OneIn(many))(arrival.draw)


@plant("D2H_IN_LOOP", where="read_boxes (", needs=no_sim)
def reads_in_loop(service):
    """Results are brought back row by row; some requests have many."""
    card = Card(service, "torch", "copies")
    card.sim.configure(pageable_us=400)
    model, inputs = card.model(1.0), card.torch.ones(8, 16)

    def read_boxes(rows, number):
        for row in range(number):
            rows[row % 8].cpu()

    def score(arrival):
        with card.torch.inference_mode():
            read_boxes(model(inputs.to("sim")), 60 if rare(arrival) else 4)

    ordinary(service, preprocess=score, forward=lambda _: None)


@plant("IMPLICIT_SYNC", where="decide (", needs=no_sim)
def implicit_syncs(service):
    """A decision in Python reads one value after another off the device; some requests have many."""
    card = Card(service, "torch", "copies")
    card.sim.configure(pageable_us=400)
    model, inputs = card.model(1.0), card.torch.ones(8, 16)

    def decide(rows, number):
        for row in range(number):
            if rows[row % 8, 0].item() == 7.0:
                return

    def score(arrival):
        with card.torch.inference_mode():
            decide(model(inputs.to("sim")), 60 if rare(arrival) else 3)

    ordinary(service, preprocess=score, forward=lambda _: None)


@plant("LAUNCH_BOUND", needs=no_sim)
def tiny_kernels(service):
    """Some requests take a path of hundreds of tiny kernels, which Python launches one by one."""
    card = Card(service)

    def forward(arrival):
        for _ in range(380 if rare(arrival) else 12):
            spin(0.06)
            card.sim.kernel(0.004, "elementwise_kernel")
        card.torch.accelerator.synchronize()

    service.rate = 55.0
    ordinary(service, forward=forward)


@plant("NON_TENSOR_CORE", where="sgemm", needs=no_sim)
def fp32_matmul(service):
    """Some requests run in float32, on ordinary units, the others in half precision on tensor cores."""
    card = Card(service)

    def forward(arrival):
        if rare(arrival):
            card.sim.kernel(24.0, "ampere_sgemm_128x64_nn")
        else:
            card.sim.kernel(1.5, "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn")
        card.torch.accelerator.synchronize()

    service.rate = 55.0
    ordinary(service, forward=forward)


@plant("COPY_COMPUTE_NO_OVERLAP", needs=no_sim)
def no_overlap(service):
    """Large inputs come in pieces: each is copied from pinned memory and computed before the next, on one stream."""
    card = Card(service)
    card.sim.configure(h2d_gb_s=1.0)
    small, large = (card.torch.ones(elements).pin_memory() for elements in (1 << 14, 2 << 20))
    where = {id(small): card.torch.empty_like(small, device="sim"), id(large): card.torch.empty_like(large, device="sim")}

    def forward(arrival):
        chosen, pieces = (large, 2) if rare(arrival) else (small, 2)
        for _ in range(pieces):
            where[id(chosen)].copy_(chosen, non_blocking=True)
            card.sim.kernel(7.0 if chosen is large else 0.5, "volta_fp16_s884gemm")
        card.torch.accelerator.synchronize()

    service.rate = 55.0
    ordinary(service, forward=forward)


@plant("GPU_QUEUE_CONTENTION", where="foreign work", needs=no_sim)
def foreign_queue(service):
    """Another process on the same card runs a long kernel now and then."""
    shared = tempfile.mkdtemp(prefix="card-") + "/shared"

    def tenant(lines, ready):
        from inferscope.testing import accelerator

        sim = accelerator.load()
        sim.share(shared)
        ready()
        for line in lines:
            sim.kernel(float(line), "another_tenant")

    tell, wait = forked(service, tenant)
    card = Card(service, "torch", "copies")
    card.sim.share(shared)
    wait()
    service.neighbours.append(("tenant", now_and_then(lambda draw: tell(draw.uniform(38, 48)))))
    model, inputs = card.model(2.0), card.torch.ones(8, 16)
    card.traced = False
    service.rate = 80.0

    def score(_):
        with card.torch.inference_mode():
            model(inputs.to("sim")).cpu()

    ordinary(service, preprocess=score, forward=lambda _: None)


@plant("GPU_QUEUE_CONTENTION", where="behind", needs=no_sim)
def own_queue(service):
    """Reports of the same process take the device for long, now and then, on the stream that requests use."""
    card = Card(service, "torch", "copies")
    model, inputs = card.model(2.0), card.torch.ones(8, 16)
    card.sim.operator_cost("aten::tanh", 42_000)
    large, rows = card.torch.nn.Tanh(), card.torch.ones(8, 16, device="sim")
    card.traced = False
    service.rate = 80.0

    def report(_):
        with card.torch.inference_mode(), service.recorder.request("reports"), service.recorder.stage("report"):
            large(rows).cpu()

    def score(_):
        with card.torch.inference_mode():
            model(inputs.to("sim")).cpu()

    service.neighbours.append(("reports", now_and_then(report)))
    ordinary(service, preprocess=score, forward=lambda _: None)


@plant("CLOCK_THROTTLE", where="sw_thermal", needs=no_sim)
def slowed_clocks(service):
    """The card gets hot now and then and runs at a fifth of its clock for a while; only large batches become too slow by that."""
    card, state = Card(service), driver()
    card.sim.identify(UUID.removeprefix("GPU-"))
    card.torch.ones(1).to("sim")
    from inferscope.device.events import timer

    timer.channel(card.torch.device("sim", 0))
    factor = [1.0]

    def heat(stop, draw):
        while not stop.wait(draw.uniform(0.35, 0.45)):
            factor[0], state["clock"], state["reasons"] = 5.0, 390, 0x20
            if stop.wait(0.4):
                return
            factor[0], state["clock"], state["reasons"] = 1.0, 1980, 0

    def forward(arrival):
        card.sim.kernel(factor[0] * (5.0 if rare(arrival, 2) else 1.0), "ampere_fp16_s16816gemm")
        card.torch.accelerator.synchronize()

    service.neighbours.append(("heat", heat))
    service.rate = 40.0
    card.traced, card.look_s = False, 0.06
    ordinary(service, forward=forward)


@plant("OOM_NEAR", needs=no_sim)
def allocator_retries(service):
    """The allocator is full now and then: for a while each large allocation gives its cache back first, which stops the device."""
    card = Card(service)
    from inferscope.device import memory
    from inferscope.device.events import timer

    timer.channel(card.torch.device("sim", 0))
    counts = {"retries": 0}
    full = [0.0]

    def read(_device):
        rows = {"allocated_bytes": 70 << 30, "reserved_bytes": 74 << 30, "inactive_split_bytes": 1 << 30}
        return {
            **{name: {"all": {"current": value, "peak": value}} for name, value in rows.items()},
            "num_alloc_retries": counts["retries"],
        }

    memory.read = read

    def fill(stop, draw):
        while not stop.wait(draw.uniform(0.45, 0.55)):
            full[0] = time.monotonic() + 0.45
            if stop.wait(0.45):
                return

    def forward(arrival):
        if time.monotonic() < full[0] and rare(arrival, 3):
            counts["retries"] += 1
            card.sim.kernel(24.0, "cudaFree")
        card.sim.kernel(2.0, "ampere_fp16_s16816gemm")
        card.torch.accelerator.synchronize()

    service.neighbours.append(("peak", fill))
    service.rate = 50.0
    card.traced, card.look_s = False, 0.25
    ordinary(service, forward=forward)


def no_gloo():
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch.distributed

    return None if torch.distributed.is_available() and torch.distributed.is_gloo_available() else "torch has no gloo"


def second_rank(port, out):
    """The other process; slow over some of its parts."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    begin, total, draw = torch.zeros(2), torch.zeros(64), random.Random(7)
    with torch.profiler.profile() as profile:
        while True:
            dist.broadcast(begin, 0)
            if begin[0] < 0:
                break
            time.sleep(draw.uniform(0.028, 0.034) if begin[1] > 0 else 0.002)
            dist.all_reduce(total)
    profile.export_chrome_trace(out)
    dist.destroy_process_group()


@plant("NCCL_STRAGGLER", where="rank 1", needs=no_gloo)
def late_rank(service):
    """Two ranks share each request's work; the second takes long over some of it, and the first waits in the sum."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _, wait = forked(service, lambda _lines, ready: (second_rank(port, str(folder / "1.json")), ready()))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
    begin, total, one = torch.zeros(2), torch.zeros(64), threading.Lock()
    with torch.profiler.profile():
        torch.zeros(1)  # the first session of a process takes a second
    profile, started = torch.profiler.profile(), []

    def forward(arrival):
        with one:
            if not started:  # a profile records the thread that begins it
                started.append(True)
                profile.start()
            begin[1] = 1.0 if rare(arrival, 4) else 0.0
            dist.broadcast(begin, 0)
            work(1.0)
            dist.all_reduce(total)

    def finish(document):
        begin[0] = -1.0
        dist.broadcast(begin, 0)
        profile.export_chrome_trace(str(folder / "0.json"))
        wait()
        dist.destroy_process_group()
        return list(pieces(folder, document))

    service.finish, service.leave = finish, profile.stop
    service.workers, service.rate = 1, 28.0
    ordinary(service, forward=forward)


def pieces(folder, document):
    """The two ranks' traces cut to some slow and some ordinary requests, as captures of each of them would be."""
    rows = document["host"]["requests"]
    slow = [row for row in rows if row["slow"]][-6:]
    usual = [row for row in rows if not row["slow"]][-6:]
    for rank in (0, 1):
        trace = json.loads((folder / f"{rank}.json").read_text())
        base, events = trace["baseTimeNanoseconds"], trace["traceEvents"]
        offset = document["unix_offset_ns"]
        for row in (*slow, *usual):
            low, high = ((row["start_ns"] + offset - base) / 1e3, (row["start_ns"] + row["wall_ns"] + offset - base) / 1e3)
            inside = [
                event for event in events if event.get("ph") == "X" and event["ts"] < high and event["ts"] + event.get("dur", 0) > low
            ]
            path = folder / f"{rank}-{row['id']}.trace.json"
            path.write_text(json.dumps({**trace, "traceEvents": inside}))
            side = {
                "id": f"{rank}-{row['id']}", "tier": 1, "request_id": row["id"], "slow": row["slow"], "events": len(inside), "stall_ms": {},
                "threads": [row["thread"]], "trace": f"captures/{path.name}", "unix_offset_ns": offset, "spans": [],
            }  # fmt: skip
            yield side, path
