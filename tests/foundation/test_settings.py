"""Sources, precedence and what bad values cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope import forms, settings
from inferscope.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_STRICT", "0")


def test_keyword_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    (tmp_path / "inferscope.toml").write_text('service = "from-file"\notlp_scale = 4\nwarmup_s = 7\n')
    environ = {"INFERSCOPE_OTLP_SCALE": "6", "INFERSCOPE_STATE_DIR": str(tmp_path), "INFERSCOPE_WARMUP_S": "9"}
    loaded = settings.load({"warmup_s": 11}, environ=environ, directory=tmp_path)
    assert (loaded.service, loaded.otlp_scale, loaded.warmup_s, loaded.tick_s) == ("from-file", 6, 11.0, 1.0)
    assert loaded.problems == ()


def test_pyproject_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.inferscope]\nservice = "ranking"\n[[tool.inferscope.slo]]\nname = "rank"\np95_ms = 5\n')
    loaded = settings.load({}, environ={"INFERSCOPE_STATE_DIR": str(tmp_path)}, directory=tmp_path)
    assert loaded.service == "ranking"
    assert loaded.slo == ({"name": "rank", "p95_ms": 5},)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("otlp_scale", 9),
        ("otlp_scale", True),
        ("warmup_s", -1),
        ("trigger", "p99"),
        ("service", ""),
        ("nonsense", 1),
        ("slo", 3),
        ("protocol", "udp"),
    ],
)
def test_a_bad_keyword_raises_with_key_value_and_accepted_form(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings.load({key: value}, environ={"INFERSCOPE_STATE_DIR": str(tmp_path)}, directory=tmp_path)
    assert caught.value.key == key
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("INFERSCOPE_OTLP_SCALE", "nine"), ("INFERSCOPE_ENABLED", "maybe"), ("INFERSCOPE_SLO", "score")]
)
def test_a_bad_environment_costs_one_line_and_the_default(tmp_path: Path, name: str, value: str) -> None:
    loaded = settings.load({}, environ={name: value, "INFERSCOPE_STATE_DIR": str(tmp_path)}, directory=tmp_path)
    assert loaded.otlp_scale == 5
    assert loaded.enabled is True
    assert loaded.slo == ()
    assert len(loaded.problems) == 1
    assert name in loaded.problems[0]
    assert value in loaded.problems[0]


def test_a_newer_file_and_a_malformed_one_are_ignored_with_a_line(tmp_path: Path) -> None:
    environ = {"INFERSCOPE_STATE_DIR": str(tmp_path)}
    (tmp_path / "inferscope.toml").write_text('schema = 99\nservice = "future"\n')
    assert settings.load({}, environ=environ, directory=tmp_path).service == "unknown_service"
    (tmp_path / "inferscope.toml").write_text("service = [")
    loaded = settings.load({}, environ=environ, directory=tmp_path)
    assert loaded.service == "unknown_service"
    assert "cannot be read" in loaded.problems[0]


def test_strict_raises_for_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_STRICT", "1")
    with pytest.raises(ConfigurationError, match="INFERSCOPE_OTLP_SCALE"):
        settings.load({}, environ={"INFERSCOPE_OTLP_SCALE": "2"}, directory=tmp_path)


def test_an_unwritable_state_directory_means_memory_only(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    loaded = settings.load({}, environ={"INFERSCOPE_STATE_DIR": str(blocker / "below")}, directory=tmp_path)
    assert loaded.state_dir is None
    assert "INFERSCOPE_STATE_DIR" in loaded.problems[0]


def test_no_home_and_no_temporary_directory_mean_memory_only(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    loaded = settings.load({}, environ={"TMPDIR": str(blocker)}, directory=tmp_path)
    assert loaded.state_dir is None
    assert len(loaded.problems) == 1


def test_otel_names_are_taken_when_ours_are_not_given(tmp_path: Path) -> None:
    environ = {
        "OTEL_SERVICE_NAME": "otel",
        "OTEL_RESOURCE_ATTRIBUTES": "service.version=1.2,k8s.pod.name=x",
        "INFERSCOPE_STATE_DIR": str(tmp_path),
    }
    loaded = settings.load({}, environ=environ, directory=tmp_path)
    assert (loaded.service, loaded.version) == ("otel", "1.2")


def test_objectives_as_text() -> None:
    assert forms.parse_slo("score:p99_ms=20,min_requests=50; rank:p95_ms=5,cls=gold") == (
        {"name": "score", "p99_ms": 20.0, "min_requests": 50.0},
        {"name": "rank", "p95_ms": 5.0, "cls": "gold"},
    )
