"""Models behind the KServe v2 protocol (Triton, and servers that speak it): what they take, what they answer, what they count inside.

Both transports are spoken: HTTP with JSON, which needs nothing, and gRPC with the messages of `tritonclient`, which is imported when a gRPC
port is measured. Which one a port speaks is found out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np

from inferscope.bench import probe, rpc
from inferscope.bench.targets import ServiceError
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Model", "Tensor", "decode_infer", "encode_infer", "http_body", "http_outputs", "requests", "stages"]

DTYPES: Final = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64", "BYTES": "object",
}  # fmt: skip
"""Tensor types of the protocol and NumPy's names of them; BF16 has none."""
SERVICE: Final = "/inference.GRPCInferenceService/"
_RANDOM: Final = 16
_STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output of a model; -1 is a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """What a server tells about a model."""

    name: str
    version: str
    platform: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def from_json(cls, found: dict[str, Any], version: str) -> Model:
        """Reads model metadata as the server tells it (shapes may be text in JSON made from messages).

        Raises:
            KeyError, TypeError, ValueError: it is no metadata.
        """

        def tensors(rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
            return tuple(Tensor(row["name"], row["datatype"], tuple(int(size) for size in row["shape"])) for row in rows)

        return cls(found["name"], version, found.get("platform", ""), tensors(found["inputs"]), tensors(found.get("outputs", [])))


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _array(tensor: Tensor, value: Any) -> NDArray[Any]:
    """An input's values, with a batch dimension in front where the model has one and the values do not."""
    if tensor.datatype not in DTYPES:
        raise InferscopeError(f"input {tensor.name} is {tensor.datatype}, which cannot be made from JSON")
    try:
        found = np.asarray(value, dtype=DTYPES[tensor.datatype])
    except (ValueError, TypeError, OverflowError) as error:
        raise InferscopeError(f"input {tensor.name} is no {tensor.datatype} tensor: {type(error).__name__}") from error
    if found.ndim == len(tensor.shape) - 1 and tensor.shape[0] == -1:
        found = found[None]
    fits = found.ndim == len(tensor.shape) and all(size in {-1, own} for size, own in zip(tensor.shape, found.shape, strict=True))
    if not fits:
        raise InferscopeError(f"input {tensor.name} has shape {list(found.shape)}, the model takes {list(tensor.shape)}")
    return found


def _given(model: Model, line: bytes) -> dict[str, NDArray[Any]]:
    """The tensors of one line of inputs: `{"NAME": values, …}`, a whole KServe request, or bare values of a model's only input."""
    value: Any = json.loads(line)
    if _is_dict(value) and isinstance(value.get("inputs"), list):
        by_name = {tensor.name: tensor for tensor in model.inputs}
        try:
            return {
                row["name"]: _array(by_name[row["name"]], np.reshape(np.asarray(row["data"], dtype=object), row["shape"]).tolist())
                for row in value["inputs"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise InferscopeError(f"an input is no request for {model.name}: {type(error).__name__} at {error}") from error
    if not _is_dict(value):
        if len(model.inputs) != 1:
            raise InferscopeError(f'{model.name} takes {len(model.inputs)} inputs; give {{"NAME": values, …}}')
        value = {model.inputs[0].name: value}
    missing = [tensor.name for tensor in model.inputs if tensor.name not in value]
    if missing:
        raise InferscopeError(f"an input has no values for {', '.join(missing)} of {model.name}")
    return {tensor.name: _array(tensor, value[tensor.name]) for tensor in model.inputs}


def _drawn(tensor: Tensor, batch: int, input_len: int | None, rng: np.random.Generator) -> NDArray[Any]:
    """Random values of a tensor's shape; free dimensions but the batch take `input_len`."""
    free = [index for index, size in enumerate(tensor.shape) if size == -1 and index]
    if free and input_len is None:
        raise InferscopeError(f"input {tensor.name} has shape {list(tensor.shape)}: give --input-len for the free dimension, or --inputs")
    shape = [(batch if not index else input_len or 1) if size == -1 else size for index, size in enumerate(tensor.shape)]
    if tensor.datatype == "BYTES":
        letters = rng.integers(97, 123, (int(np.prod(shape)), input_len or 8))
        return np.reshape(np.array(["".join(map(chr, row)) for row in letters], dtype=object), shape)
    if tensor.datatype == "BOOL":
        return rng.random(shape) < 0.5
    if tensor.datatype.startswith("FP"):
        return rng.random(shape).astype(DTYPES[tensor.datatype])
    return rng.integers(0, 100, shape).astype(DTYPES.get(tensor.datatype, "int64"))


def requests(
    model: Model, lines: Sequence[bytes], *, batch: int = 1, input_len: int | Sequence[int] | None = None, seed: int = 0
) -> list[dict[str, NDArray[Any]]]:
    """The tensors of each distinct request.

    Args:
        model: what is asked.
        lines: inputs, one JSON value each; none draws random ones of the model's shapes.
        batch: consecutive inputs in one request.
        input_len: size of free dimensions of random inputs; several make one request each.
        seed: of random inputs.

    Raises:
        InferscopeError: an input does not fit the model.
    """
    if not lines:
        rng = np.random.default_rng((seed, 2))
        sizes = [input_len] * _RANDOM if input_len is None or isinstance(input_len, int) else input_len
        return [{tensor.name: _drawn(tensor, batch, size, rng) for tensor in model.inputs} for size in sizes]
    single = [_given(model, line) for line in lines]
    if batch == 1:
        return single
    try:
        return [
            {name: np.concatenate([single[(start + step) % len(single)][name] for step in range(batch)]) for name in single[start]}
            for start in range(len(single))
        ]
    except ValueError as error:
        raise InferscopeError("inputs of different shapes make no batch") from error


def http_body(tensors: dict[str, NDArray[Any]], model: Model) -> bytes:
    """A request in the protocol's JSON."""
    types = {tensor.name: tensor.datatype for tensor in model.inputs}
    rows = [
        {"name": name, "shape": list(each.shape), "datatype": types[name], "data": each.ravel().tolist()} for name, each in tensors.items()
    ]
    return json.dumps({"inputs": rows}).encode()


def http_outputs(answer: bytes) -> Any:
    """Outputs by name as nested lists; an answer that is no such JSON stays text."""
    try:
        found: Any = json.loads(answer)
        return {row["name"]: np.reshape(np.asarray(row["data"], dtype=object), row["shape"]).tolist() for row in found["outputs"]}
    except (ValueError, KeyError, TypeError):
        return answer.decode("utf-8", errors="replace")


def encode_infer(tensors: dict[str, NDArray[Any]], model: Model) -> bytes:
    """A ModelInferRequest, serialised, with raw contents.

    Raises:
        InferscopeError: tritonclient is not installed.
    """
    messages: Any = rpc.need("tritonclient.grpc.service_pb2", "tritonclient[grpc]")
    request = messages.ModelInferRequest(model_name=model.name, model_version=model.version)
    types = {tensor.name: tensor.datatype for tensor in model.inputs}
    for name, each in tensors.items():
        row = request.inputs.add()
        row.name, row.datatype = name, types[name]
        row.shape.extend(each.shape)
        request.raw_input_contents.append(_raw(each))
    return bytes(request.SerializeToString())


def _raw(values: NDArray[Any]) -> bytes:
    """Little-endian elements; text with its length in front, as the protocol has it."""
    if values.dtype != object:
        return np.ascontiguousarray(values).tobytes()
    parts = [each.encode() if isinstance(each, str) else bytes(each) for each in values.ravel().tolist()]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def decode_infer(answer: bytes) -> Any:
    """Outputs of a serialised ModelInferResponse by name, as nested lists."""
    messages: Any = rpc.need("tritonclient.grpc.service_pb2", "tritonclient[grpc]")
    response = messages.ModelInferResponse()
    response.ParseFromString(answer)
    found: dict[str, Any] = {}
    for index, row in enumerate(response.outputs):
        shape = list(row.shape)
        if index < len(response.raw_output_contents):
            values = _from_raw(row.datatype, response.raw_output_contents[index])
        else:
            filled: list[list[Any]] = [list(content) for _, content in row.contents.ListFields()]
            values = np.asarray(filled[0] if filled else [], dtype=object)
        found[row.name] = np.reshape(values, shape).tolist()
    return found


def _from_raw(datatype: str, content: bytes) -> NDArray[Any]:
    if datatype != "BYTES":
        return np.frombuffer(content, dtype=DTYPES.get(datatype, "uint8"))
    found: list[str] = []
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        found.append(content[at + 4 : at + 4 + size].decode("utf-8", errors="replace"))
        at += 4 + size
    return np.array(found, dtype=object)


def stages(statistics: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Running totals of a model's stages inside the server: name to (how often, milliseconds); empty when it tells none."""
    found: dict[str, tuple[int, float]] = {}
    for row in statistics.get("model_stats", []):
        for name in _STAGES:
            each = row.get("inference_stats", {}).get(name)
            if _is_dict(each):
                count, total = found.get(name, (0, 0.0))
                found[name] = count + int(each.get("count", 0)), total + int(each.get("ns", 0)) / 1e6
    return found


def http_model(base: str, path: str, version: str) -> Model:
    """A model's metadata over HTTP.

    Raises:
        ServiceError: the server does not know it, or answers something else.
    """
    status, content = probe.ask(f"{base}{path}", None)
    if status != 200:
        raise ServiceError(f"{base}{path} answers {status}: there is no such model, or it is not ready")
    try:
        return Model.from_json(json.loads(content), version)
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{base}{path} answered no model metadata ({type(error).__name__})") from error


def grpc_ask(place: str, method: str, request: Any) -> dict[str, Any]:
    """A call of the inference service with a message of `tritonclient`; the answer as JSON values with the protocol's own names.

    Raises:
        ServiceError: nobody answers, or with an error.
    """
    messages: Any = rpc.need("tritonclient.grpc.service_pb2", "tritonclient[grpc]")
    formats: Any = rpc.need("google.protobuf.json_format", "protobuf")
    answer = getattr(messages, f"{method}Response")()
    answer.ParseFromString(rpc.ask(f"grpc://{place}{SERVICE}{method}", request.SerializeToString()))
    found: dict[str, Any] = formats.MessageToDict(answer, preserving_proto_field_name=True)
    return found


def grpc_model(place: str, name: str, version: str) -> Model:
    """A model's metadata over gRPC.

    Raises:
        ServiceError: the server does not know it.
    """
    messages: Any = rpc.need("tritonclient.grpc.service_pb2", "tritonclient[grpc]")
    found = grpc_ask(place, "ModelMetadata", messages.ModelMetadataRequest(name=name, version=version))
    try:
        return Model.from_json(found, version)
    except (KeyError, TypeError, ValueError) as error:
        raise ServiceError(f"{place} answered no model metadata ({type(error).__name__})") from error
