"""`inferscope run`: the same program, measured, with no line of it changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = """
import asyncio, json, sys
import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

def score(_request):
    return JSONResponse({"ok": True})

app = Starlette(routes=[Route("/score", score)])

async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service") as client:
        for _ in range(5):
            assert (await client.get("/score")).json() == {"ok": True}

asyncio.run(main())
if "inferscope" in sys.modules:
    import inferscope
    print(json.dumps({"requests": inferscope.snapshot().requests, "integrations": inferscope.status()["integrations"]}))
else:
    print("{}")
"""


def run(arguments: list[str], tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INFERSCOPE_")}
    return subprocess.run(
        [sys.executable, "-m", "inferscope", "run", *arguments],
        env={**clean, "INFERSCOPE_STATE_DIR": str(tmp_path / "state"), **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_service_is_measured_without_a_change(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVICE)
    done = run(["--slo", "score:p99_ms=20", "--", sys.executable, "serve.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["requests"]["score"]["count"] == 5
    assert seen["integrations"]["asgi"] == "active"
    assert done.stderr == ""


def test_disabled_leaves_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVICE)
    done = run(["--", sys.executable, "serve.py"], tmp_path, INFERSCOPE_DISABLED="1")
    assert (done.returncode, json.loads(done.stdout)) == (0, {})


def test_an_existing_sitecustomize_runs_too_and_children_are_measured(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'ran'\n")
    (tmp_path / "serve.py").write_text(SERVICE)
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys\nassert os.environ['THEIRS'] == 'ran'\nsys.exit(subprocess.call([sys.executable, 'serve.py']))\n"
    )
    done = run(["--", sys.executable, "parent.py"], tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"]["score"]["count"] == 5


def test_a_program_that_serves_nothing_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(
        "import sys, threading\nprint(sorted(m for m in ('numpy', 'torch', 'opentelemetry') if m in sys.modules), threading.active_count())\n"
    )
    done = run(["--", sys.executable, "quiet.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "[] 1\n")


def test_the_exit_status_and_the_output_are_the_programs_own(tmp_path: Path) -> None:
    done = run(["--", sys.executable, "-c", "print('out'); raise SystemExit(7)"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 64, "nothing to run"),
        (["--", "no-such-program-here"], 1, "no such program"),
        (["--slo", "score", "--", "true"], 1, "--slo='score' is not usable"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    done = run(arguments, tmp_path)
    assert done.returncode == status
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_json_says_what_would_run(tmp_path: Path) -> None:
    done = run(["--json", "--service", "scoring", "--", "true"], tmp_path)
    value = json.loads(done.stdout)
    assert value["command"] == ["true"]
    assert value["environment"]["INFERSCOPE_SERVICE"] == "scoring"
