"""torch, further: values read from a device, pinned memory, the DataLoader, other engines, threads, and what stays as it is."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import threading
import weakref

import pytest

import inferscope
from inferscope import integration
from inferscope.record import core

torch = pytest.importorskip("torch")


class Remote(torch.Tensor):
    """Says of itself that it lies on a device; its data do not."""

    @property
    def is_cpu(self) -> bool:
        return False


def remote(*shape: int):
    return torch.ones(*shape).as_subclass(Remote)


def copies_of(test: str) -> list[dict]:
    return [row for row in integration.copies() if row["site"] and row["site"].startswith(test)]


READS = {
    "item": (lambda value: value.item(), 1, 4),
    "tolist": (lambda value: value.tolist(), 3, 12),
    "bool": (bool, 1, 4),
    "int": (int, 1, 4),
    "float": (float, 1, 4),
    "nonzero": (lambda value: value.nonzero(), 3, 8),
    "equal": (lambda value: value.equal(torch.ones(3)), 3, 4),
    "masked_select": (lambda value: value.masked_select(torch.ones(3, dtype=torch.bool)), 3, 8),
}


@pytest.mark.parametrize("name", READS)
def test_reading_from_a_device_is_a_copy_that_waits(seen, instrument, name: str) -> None:
    instrument("copies")
    read, size, nbytes = READS[name]
    plain = read(torch.ones(size))
    with core.default.request("predict"):
        answer = read(remote(size))
    assert torch.equal(torch.as_tensor(answer).as_subclass(torch.Tensor), torch.as_tensor(plain))
    (record,) = seen.requests()
    assert "copy:d2h" in seen.columns(record)
    (row,) = [row for row in integration.copies() if row["name"] == "d2h"]
    assert (row["count"], row["bytes"], row["sync"], row["pageable"]) == (1, nbytes, 1, 1)
    assert "(test_torch_more.py:" in row["site"]


def test_reading_on_the_host_is_nothing(seen, instrument) -> None:
    instrument("copies")
    with core.default.request("predict"):
        value = torch.ones(3)
        assert value.sum().item() == 3.0
        assert value.tolist() == [1.0, 1.0, 1.0]
        assert bool(torch.ones(1))
        assert value.numpy().tolist() == [1.0, 1.0, 1.0]
        assert [10, 20][torch.tensor(1)] == 20
    (record,) = seen.requests()
    assert not [name for name in seen.columns(record) if name.startswith("copy")]


def test_operators_and_subscripts_are_not_touched(instrument) -> None:
    before = {name: torch.Tensor.__dict__.get(name) for name in ("__add__", "__mul__", "__matmul__", "__getitem__", "__setitem__")}
    instrument("torch", "copies")
    assert {name: torch.Tensor.__dict__.get(name) for name in before} == before


def test_truth_values_work_after_everything_is_undone() -> None:
    registry = integration.Registry()
    registry.instrument(["torch", "copies", "dataloader"])
    registry.uninstrument()
    assert torch.equal(torch.Tensor([torch.tensor(False)]), torch.zeros(1))
    assert bool(torch.tensor(True)) is True
    assert int(torch.tensor(7)) == 7
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(torch.ones(2))


needs_core = pytest.mark.skipif(
    core.IMPLEMENTATION != "native", reason="a plain closure cannot pass for a built-in method; the core's callables do"
)


@needs_core
def test_methods_pickle_as_without_us(instrument) -> None:
    names = ("to", "cpu", "copy_", "item", "pin_memory")
    plain = {name: pickle.dumps(getattr(torch.Tensor, name)) for name in names}
    instrument("torch", "copies")
    assert {name: pickle.dumps(getattr(torch.Tensor, name)) for name in names} == plain
    assert pickle.loads(pickle.dumps(torch.nn.Module.__call__)) is torch.nn.Module._wrapped_call_impl
    assert inspect.signature(torch.nn.Module.__call__) == inspect.signature(torch.nn.Module._wrapped_call_impl)


@needs_core
def test_exceptions_are_torchs_own(seen, instrument) -> None:
    cases = [
        lambda: torch.Tensor.to(),
        lambda: torch.ones(1).to("nowhere"),
        lambda: torch.ones(1).to(3, 4, 5, 6, 7),
        lambda: torch.ones(2).item(),
        lambda: torch.ones(2).copy_(),
        lambda: torch.ones(2).copy_("text"),
        lambda: torch.ones(2).copy_(torch.ones(3)),
        lambda: torch.Tensor.item(5),
        lambda: torch.nn.Linear(2, 2)(torch.ones(1, 3)),
        lambda: torch.nn.Module()(1),
    ]

    def heard(case):
        with pytest.raises(Exception) as caught:
            case()
        return type(caught.value), str(caught.value)

    plain = [heard(case) for case in cases]
    instrument("torch", "copies")
    assert [heard(case) for case in cases] == plain


def test_an_exception_marks_the_forwards_span(seen, instrument) -> None:
    instrument("torch")
    with core.default.request("predict"), pytest.raises(RuntimeError):
        torch.nn.Linear(2, 2)(torch.ones(1, 3))
    (record,) = seen.requests()
    assert [span.flags & 8 for span in record.spans] == [8]


def test_inference_mode_and_gradients_are_as_without_us(instrument) -> None:
    instrument("torch", "copies")
    net = torch.nn.Linear(2, 2)
    with torch.inference_mode():
        assert net(torch.ones(1, 2)).is_inference()
        assert torch.ones(1).to(torch.float64).is_inference()
    output = net(torch.ones(1, 2))
    assert output.requires_grad
    output.sum().backward()
    assert net.weight.grad is not None
    with torch.no_grad():
        assert not net(torch.ones(1, 2)).requires_grad


def test_threads_have_a_forward_each(seen, instrument) -> None:
    instrument("torch")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def work() -> None:
        for _ in range(20):
            with core.default.request("predict"):
                net(torch.ones(1, 4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = seen.requests()
    assert len(records) == 80
    assert all("forward" in seen.columns(record) for record in records)
    assert all([span.parent for span in record.spans] == [-1] for record in records if record.spans)  # not every kept record has them


def test_while_recording_is_off_models_run_as_without_us(seen, instrument) -> None:
    instrument("torch", "copies")
    counted = seen.series("stage").get("forward", 0)
    core.default.enabled = False
    try:
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).to(torch.float64).dtype is torch.float64
    finally:
        core.default.enabled = True
    assert seen.series("stage").get("forward", 0) == counted


def test_a_watched_model_that_died_leaves_no_name(instrument) -> None:
    from inferscope_integrations.torch import _names

    instrument("torch")
    net = inferscope.watch(torch.nn.Linear(2, 2), "gone")
    assert len(_names) == 1
    del net
    assert len(_names) == 0


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        return torch.full((2,), float(index))


def test_the_data_loader_is_a_stage(seen, instrument) -> None:
    plain = [batch.tolist() for batch in torch.utils.data.DataLoader(Rows(), batch_size=2)]
    instrument("dataloader")
    with core.default.request("train"):
        batches = [batch.tolist() for batch in torch.utils.data.DataLoader(Rows(), batch_size=2)]
    assert batches == plain
    (record,) = seen.requests()
    assert seen.columns(record)["dataloader"] > 0
    assert len(record.spans) == 4  # the fourth finds the end


def test_pinning_a_batch_is_one_copy(seen, instrument, monkeypatch) -> None:
    from torch.utils.data._utils import pin_memory

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *args: self.clone())
    instrument("dataloader")
    batch = {"rows": torch.ones(4, 2), "labels": [torch.ones(4), "name"]}
    pinned = pin_memory.pin_memory(batch)
    assert torch.equal(pinned["rows"], batch["rows"])
    (row,) = [row for row in integration.copies() if row["name"] == "pin"]
    assert (row["count"], row["bytes"]) == (1, 48)


@contextlib.contextmanager
def aot_models():
    """The class that AOTInductor's models are of, over a loader that answers by itself: a real one takes minutes to compile."""
    from torch.export.pt2_archive import _package
    from torch.utils import _pytree

    class Loader:
        def get_call_spec(self):
            return [_pytree.treespec_dumps(_pytree.tree_structure(spec)) for spec in (((0,), {}), 0)]

        def boxed_run(self, inputs):
            return [inputs[0] + 1]

    yield _package.AOTICompiledModel(Loader())


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_compiled_ahead_of_time_are_forwards(seen, instrument) -> None:
    with aot_models() as model:
        plain = model(torch.ones(2))
        instrument("aotinductor")
        with core.default.request("predict"):
            assert torch.equal(model(torch.ones(2)), plain)
    (record,) = seen.requests()
    assert "forward" in seen.columns(record)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_real_model_compiled_ahead_of_time(seen, instrument, tmp_path) -> None:
    net, value = torch.nn.Linear(4, 2).eval(), torch.ones(1, 4)
    package = torch._inductor.aoti_compile_and_package(torch.export.export(net, (value,)), package_path=str(tmp_path / "model.pt2"))
    instrument("aotinductor")
    model = torch._inductor.aoti_load_package(package)
    with core.default.request("predict"):
        assert torch.equal(model(value), net(value))
    (record,) = seen.requests()
    assert "forward" in seen.columns(record)


def test_a_second_registry_patches_on_top_and_leaves_cleanly(seen) -> None:
    before = dict(vars(torch.nn.Module))
    first, second = integration.Registry(), integration.Registry()
    first.instrument(["torch"])
    second.instrument(["torch"])
    with core.default.request("predict"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    (record,) = seen.requests()
    assert seen.columns(record)["forward"] > 0
    assert len(record.spans) == 1
    second.uninstrument()
    first.uninstrument()
    assert dict(vars(torch.nn.Module)) == before


class Odd(torch.nn.Module):
    """Takes anything."""

    def forward(self, *args, **kwargs):
        return 1


class Shaped:
    def __init__(self, shape) -> None:
        self._shape = shape

    @property
    def shape(self):
        if isinstance(self._shape, type):
            raise self._shape
        return self._shape


ODD_INPUTS = {
    "a tensor": (lambda: (torch.ones(2, 3),), (2, 3), 6.0),
    "a number": (lambda: (torch.ones(()),), (), 1.0),
    "a list of tensors": (lambda: ([torch.ones(4), torch.ones(5)],), (4,), 4.0),
    "a dict of tensors": (lambda: ({"ids": torch.ones(3, 2)},), (3, 2), 6.0),
    "text": (lambda: ("text",), None, None),
    "nothing": (lambda: (), None, None),
    "what has a shape": (lambda: (Shaped((7, 2)),), (7, 2), 14.0),
    "what has no numbers in its shape": (lambda: (Shaped((torch.ones(1), 2)),), None, None),
    "what has no tuple": (lambda: (Shaped([3, 4]),), None, None),
    "what refuses": (lambda: (Shaped(RuntimeError),), None, None),
    "what has none": (lambda: (Shaped(AttributeError),), None, None),
}


@pytest.mark.parametrize("name", ODD_INPUTS)
def test_the_first_inputs_shape_is_noted_by_core_and_twin_alike(instrument, name: str) -> None:
    from inferscope import copied
    from inferscope_integrations import torch as ours

    make, shape, size = ODD_INPUTS[name]
    instrument("torch")
    model, inputs = Odd(), make()

    def by_twin() -> None:
        with contextlib.suppress(Exception):  # as both do that call it
            ours._note_shape(0, None, model, *inputs)

    found = []
    for forward in (lambda: model(*inputs), lambda: model(*inputs), by_twin):  # a shape that is new; the same again; in Python
        with core.default.request("predict") as held:
            forward()
        found.append((copied.shape_of(held.id), held.size))
    expected = None if shape is None else (shape, False)
    assert found[1] == found[2] == (expected, size)
    assert found[0] == (None if shape is None else (shape, True), size)
    with core.default.request("predict", size=3) as held:  # a size of its own stays, and the first model says the shape
        model(*inputs)
        model(torch.ones(9, 9))
    first = (9, 9) if shape is None else shape
    assert (copied.shape_of(held.id), held.size) == ((first, True), 3.0)


def test_a_noted_shape_holds_no_tensor(instrument) -> None:
    instrument("torch")
    for _ in range(2):
        value = torch.ones(2, 3)
        gone = weakref.ref(value)
        with core.default.request("predict"):
            Odd()(value)
        del value
        assert gone() is None


def test_an_interrupt_while_the_shape_is_read_is_not_swallowed(instrument) -> None:
    instrument("torch")
    with core.default.request("predict"), pytest.raises(KeyboardInterrupt):
        Odd()(Shaped(KeyboardInterrupt))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::torch.jit.TracerWarning")
def test_tracing_inside_a_request_leaves_no_tensor_behind(instrument) -> None:
    from inferscope import copied

    instrument("torch")
    net, value = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(1, 2)
    with core.default.request("predict"):
        torch.jit.trace(net, value)
    met, recent = copied.shape_tables()
    shapes = [*met, *(held[1] for held in recent if held is not None)]
    assert all(type(size) is int for shape in shapes for size in shape)
