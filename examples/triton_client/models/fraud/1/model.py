"""A model of Triton's Python backend: a logistic regression over three features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from collections.abc import Sequence

WEIGHTS = np.array([[0.8], [-0.5], [1.5]], np.float32)
BIAS = -6.0


class TritonPythonModel:
    """Triton calls `execute` with the requests of one batch."""

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """One probability for each row."""
        answers: list[pb_utils.InferenceResponse] = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "FEATURES").as_numpy()
            fraud = (1 / (1 + np.exp(-(rows @ WEIGHTS + BIAS)))).astype(np.float32)
            answers.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("FRAUD", fraud)]))
        return answers
