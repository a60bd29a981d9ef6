"""Are the outputs still right? A faster version that answers something else is not a faster version.

Outputs are kept as JSON values; numbers agree within a tolerance that follows the precision, everything else exactly. A NaN, an
infinity, another shape or another key is wrong whatever the tolerance. Quantised models are judged by their
label, the largest score, and by how many scores stay within a band.
"""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np

from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["PRECISIONS", "Agreement", "Tolerance", "agree", "plain", "read", "save", "tolerance"]

SCHEMA: Final = 1
KIND: Final = "inferscope.golden"
_ABOUT: Final = "inferscope"
PRECISIONS: Final = {"fp32": (1e-5, 1e-5), "tf32": (1e-3, 1e-3), "fp16": (1e-2, 1e-3), "bf16": (2e-2, 2e-2), "int8": (0.05, 0.05)}
"""Relative and absolute tolerance of each precision; int8 is judged by labels and by the share of scores within this band."""
LABELS: Final = 0.99
"""Share of outputs whose label must agree when labels decide."""
BANDS: Final = 0.95
"""Share of scores that must lie within the band when labels decide."""
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual - golden| <= atol + rtol·|golden|; with `labels`, score lists need the same largest score, and most scores within it."""

    rtol: float
    atol: float
    labels: bool = False


def tolerance(precision: str, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """The tolerance of a precision, or what the user named."""
    default = PRECISIONS.get(precision, PRECISIONS["fp32"])
    labels = precision == "int8" and rtol is None and atol is None
    return Tolerance(default[0] if rtol is None else rtol, default[1] if atol is None else atol, labels)


@dataclass(slots=True)
class Agreement:
    """How outputs compare with golden ones."""

    outputs: int = 0
    numbers: int = 0
    wrong: int = 0
    """Outputs that disagree."""
    worst_absolute: float = 0.0
    labelled: int = 0
    """Outputs that have scores, so that a label can be read off."""
    labels_agree: int = 0
    scores: int = 0
    """Scores of those outputs."""
    scores_in_band: int = 0
    rtol: float = 0.0
    atol: float = 0.0
    by_labels: bool = False
    problems: list[str] = field(default_factory=list[str])
    """The first few disagreements, by place; values of outputs are not shown."""

    @property
    def correct(self) -> bool:
        """Whether the outputs are right; no output at all is not."""
        if not self.outputs:
            return False
        if self.by_labels and self.labelled and self.labels_agree / self.labelled < LABELS:
            return False
        if self.by_labels and self.scores and self.scores_in_band / self.scores < BANDS:
            return False
        return not self.wrong

    def text(self) -> str:
        """The verdict in one line."""
        label = f", label agreement {100 * self.labels_agree / self.labelled:.2f} %" if self.labelled else ""
        if self.by_labels and self.scores:
            label += f", scores in band {100 * self.scores_in_band / self.scores:.2f} %"
        rule = "by labels" if self.by_labels else f"rtol {self.rtol:g}, atol {self.atol:g}"
        counts = (
            f"{self.outputs - self.wrong} of {self.outputs} outputs agree ({rule}), largest difference {self.worst_absolute:.3g}{label}"
        )
        first = f": {self.problems[0]}" if self.problems else ""
        return f"{'CORRECT' if self.correct else 'INCORRECT'}, {counts}{'' if self.correct else first}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as data."""
        return {
            **asdict(self),
            "correct": self.correct,
            "label_agreement": self.labels_agree / self.labelled if self.labelled else None,
            "band_agreement": self.scores_in_band / self.scores if self.scores else None,
        }


def plain(value: Any) -> Any:
    """An output as JSON types: tensors and arrays become lists, tuples too.

    Raises:
        InferscopeError: a type that holds no numbers or text.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "detach"):  # a torch tensor, without naming torch
        value = value.detach().cpu()
    if hasattr(value, "tolist"):
        return value.tolist()
    if _is_dict(value):
        return {str(key): plain(item) for key, item in value.items()}
    if _is_list(value) or _is_tuple(value):
        return [plain(item) for item in value]
    raise InferscopeError(
        f"an output of type {type(value).__name__} cannot be compared; return numbers, text, lists, dicts, arrays or tensors"
    )


def agree(golden: Sequence[Any], actual: Sequence[Any], rule: Tolerance) -> Agreement:
    """Compare outputs with golden ones, output by output."""
    found = Agreement(rtol=rule.rtol, atol=rule.atol, by_labels=rule.labels)
    if len(golden) != len(actual):
        found.outputs = found.wrong = max(len(golden), len(actual))
        found.problems.append(f"{len(actual)} outputs, golden has {len(golden)}")
        return found
    for index, (expected, output) in enumerate(zip(golden, actual, strict=True)):
        found.outputs += 1
        problem = _Walk(rule, found).compare(expected, output, f"output {index}")
        if problem:
            found.wrong += 1
            if len(found.problems) < _SHOWN:
                found.problems.append(problem)
    return found


class _Walk:
    """Goes through one output beside its golden one; the first problem ends it."""

    def __init__(self, rule: Tolerance, found: Agreement) -> None:
        self._rule, self._found = rule, found

    def compare(self, golden: Any, actual: Any, place: str) -> str | None:
        if isinstance(golden, bool) or isinstance(actual, bool) or not _number(golden) or not _number(actual):
            return self._structure(golden, actual, place)
        return self._numbers(float(golden), float(actual), place)

    def _numbers(self, golden: float, actual: float, place: str) -> str | None:
        self._found.numbers += 1
        if not math.isfinite(actual):
            return f"{place} is {actual}"
        difference = abs(actual - golden)
        self._found.worst_absolute = max(self._found.worst_absolute, difference)
        if difference <= self._rule.atol + self._rule.rtol * abs(golden):
            return None
        return f"{place} differs by {difference:.3g}"

    def _structure(self, golden: Any, actual: Any, place: str) -> str | None:
        if _is_list(golden) and _is_list(actual):
            return self._lists(golden, actual, place)
        if _is_dict(golden) and _is_dict(actual):
            if golden.keys() != actual.keys():
                return f"{place} has other keys: {', '.join(sorted(map(str, golden.keys() ^ actual.keys()))[:_SHOWN])}"
            return next((problem for key in golden if (problem := self.compare(golden[key], actual[key], f"{place}.{key}"))), None)
        if type(golden) is not type(actual):
            return f"{place} is {type(actual).__name__}, golden is {type(golden).__name__}"
        return None if golden == actual else f"{place} differs"

    def _lists(self, golden: list[Any], actual: list[Any], place: str) -> str | None:
        if len(golden) != len(actual):
            return f"{place} has {len(actual)} elements, golden has {len(golden)}"
        scores = len(golden) > 1 and all(_number(value) for value in (*golden, *actual))
        if scores:
            for value in actual:
                if not math.isfinite(value):
                    return f"{place} holds {value}"
            self._found.labelled += 1
            same = golden.index(max(golden)) == actual.index(max(actual))
            self._found.labels_agree += same
            if self._rule.labels:
                self._found.numbers += len(golden)
                differences = [abs(a - b) for a, b in zip(actual, golden, strict=True)]
                self._found.worst_absolute = max(self._found.worst_absolute, *differences)
                limits = [self._rule.atol + self._rule.rtol * abs(each) for each in golden]
                self._found.scores += len(golden)
                self._found.scores_in_band += sum(each <= limit for each, limit in zip(differences, limits, strict=True))
                return None
        pairs = enumerate(zip(golden, actual, strict=True))
        return next((problem for index, (a, b) in pairs if (problem := self.compare(a, b, f"{place}[{index}]"))), None)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def _finite(value: Any) -> bool:
    if _is_dict(value):
        return all(map(_finite, value.values()))
    if _is_list(value):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def save(path: Path, outputs: Sequence[Any], *, precision: str, inputs_sha256: str | None) -> None:
    """Keep outputs as golden ones: as JSON, or as NumPy's arrays in a file that ends in `.npz`.

    Raises:
        InferscopeError: there are none, one holds a NaN or infinity, one is no array for an `.npz`, or the file cannot be written.
    """
    if not outputs or not all(map(_finite, outputs)):
        raise InferscopeError("no golden outputs were saved: " + ("one holds NaN or infinity" if outputs else "there are no outputs"))
    about = {"schema": SCHEMA, "kind": KIND, "precision": precision, "inputs_sha256": inputs_sha256}
    try:
        if path.suffix == ".npz":
            with path.open("wb") as file:
                held: dict[str, Any] = {_ABOUT: np.array(json.dumps(about)), **_arrays(outputs)}
                np.savez_compressed(file, **held)
        else:
            path.write_text(json.dumps({**about, "outputs": list(outputs)}, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InferscopeError(f"{path}: cannot be written ({error.strerror})") from error


def _arrays(outputs: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Outputs as `arr_0`, `arr_1`, …: the names that `numpy.savez` gives."""
    found: dict[str, NDArray[Any]] = {}
    for index, output in enumerate(outputs):
        try:
            found[f"arr_{index}"] = np.asarray(output)
        except ValueError:
            found[f"arr_{index}"] = np.array(None)
        if found[f"arr_{index}"].dtype.kind not in "bifu":
            raise InferscopeError(f"output {index} is no array of numbers, as an .npz holds; save golden outputs as JSON")
    return found


def _read_npz(path: Path) -> dict[str, Any]:
    """An `.npz` of `save`, or one that somebody's own script made: `arr_0` … are the outputs to the first inputs, a single array holds one a row.

    Raises:
        EvidenceError: it is damaged or holds something else.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read ({error.strerror or 'not an .npz file'})") from error
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise EvidenceError(f"{path} is damaged: not an .npz file of numbers") from error
    about: dict[str, Any] = json.loads(str(arrays.pop(_ABOUT))) if _ABOUT in arrays else {"schema": SCHEMA, "kind": KIND}
    if any(each.dtype.kind not in "bifu" for each in arrays.values()):
        raise EvidenceError(f"{path} holds no golden outputs: something else than numbers")
    names = sorted(arrays, key=lambda name: (len(name), name))
    ours = "precision" in about
    rows = list(arrays[names[0]]) if len(names) == 1 and not ours and arrays[names[0]].ndim else [arrays[name] for name in names]
    return {**about, "outputs": [plain(row) for row in rows]}


def read(path: Path) -> dict[str, Any]:
    """A file that `save` made: `outputs`, `precision`, `inputs_sha256` (the last two are absent in somebody else's `.npz`).

    Raises:
        EvidenceError: it is missing, damaged, something else, or from a newer version.
    """
    try:
        found: Any = _read_npz(path) if path.suffix == ".npz" else json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} is damaged: not JSON") from error
    document: dict[str, Any] = found if _is_dict(found) else {}
    if document.get("kind") != KIND or not isinstance(document.get("outputs"), list):
        raise EvidenceError(f"{path} holds no golden outputs; make them with --save-golden")
    if document.get("schema") != SCHEMA:
        raise EvidenceError(f"{path} has schema {document.get('schema')!r}, this version reads {SCHEMA}")
    return document
