"""Every finding that a rule can make stands in the documentation, is made by some test, and says all that a finding has to say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "inferscope" / "diagnose" / "rules"
ASKED = {
    "H2D_SYNC_PAGEABLE", "MANY_SMALL_COPIES", "D2H_IN_LOOP", "IMPLICIT_SYNC", "LOCK_CONTENTION", "LOCK_HOLDER_SLOW", "GC_PAUSE", "CPU_PREEMPTION",
    "CGROUP_THROTTLE", "THREAD_OVERSUB", "LOADER_COMPETES", "GIL_CONTENTION", "DYNAMIC_SHAPES", "LAUNCH_BOUND", "LOW_DEVICE_UTIL", "NON_TENSOR_CORE",
    "MEM_FRAGMENTATION", "OOM_NEAR", "CLOCK_THROTTLE", "BATCH_TIMEOUT", "BATCH_CAPACITY", "HEAD_OF_LINE", "GPU_QUEUE_CONTENTION", "COLD_START",
    "NCCL_STRAGGLER", "IO_IN_REQUEST", "COPY_COMPUTE_NO_OVERLAP", "TELEMETRY_OVERHEAD", "RETRY_OR_ERROR", "UNATTRIBUTED_HIGH", "COMPUTE_BOUND",
    "BANDWIDTH_BOUND", "SATURATION", "INPUT_SIZE", "CAPTURE_UNDER_OVERLOAD",
}  # fmt: skip
"""What diagnosis and issue ask for by name."""
ID = re.compile(r"[A-Z][A-Z0-9]{5,}|[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+")


def made():
    """Strings of the rules' code that have the form of an id."""
    found = set()
    for path in RULES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ID.fullmatch(node.value):
                found.add(node.value)
    return found


def documented():
    text = (ROOT / "docs" / "diagnosis.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    return {name for row in rows for name in re.findall(r"`([A-Z0-9_]+)`", row)}


def test_the_documentation_lists_what_rules_make_and_all_that_was_asked_for():
    assert documented() == made()
    assert documented() >= ASKED


def test_each_finding_is_made_by_a_test():
    tests = "".join(
        path.read_text() for folder in ("diagnose", "faults") for path in (ROOT / "tests" / folder).glob("*.py") if path != Path(__file__)
    )
    tests += (ROOT / "tests" / "integrations" / "test_tritonclient.py").read_text()
    assert not {name for name in made() if f'"{name}"' not in tests}
