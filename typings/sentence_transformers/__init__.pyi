"""What inferscope and its examples use of it; the library is not part of the environment that types are checked in."""

import torch

class SentenceTransformer:
    def __init__(self, model_name_or_path: str, *, device: str | None = None) -> None: ...
    def encode(
        self,
        inputs: str | list[str],
        *,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        show_progress_bar: bool | None = None,
    ) -> torch.Tensor: ...
