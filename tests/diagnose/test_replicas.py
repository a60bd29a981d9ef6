"""The incidents of several replicas as one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inferscope import cli
from inferscope.diagnose.replicas import explain_replicas
from inferscope.errors import EvidenceError


@pytest.fixture(scope="module")
def incidents(service, tmp_path_factory):
    """Four replicas that each broke the same objective, a minute of traffic each, and what their requests were."""
    root, found, everything = tmp_path_factory.mktemp("fleet"), [], []
    for seed in range(4):
        requests = service.simulate(90, 150, seed=seed)
        document = json.loads(json.dumps(service.evidence(requests, [20 * service.MS])))
        document |= {"instance_id": f"replica-{seed}"}
        path = root / f"replica-{seed}" / "score" / "0" / "incidents" / f"2024010{seed + 1}T000000Z-score-abcd"
        path.mkdir(parents=True)
        (path / "breach.json").write_text(json.dumps(service.breach()))
        (path / "evidence-0-1.json").write_text(json.dumps(document))
        found.append(path)
        everything.append(requests)
    return found, everything


def test_they_are_added_and_intervals_are_over_replicas(incidents, service):
    paths, everything = incidents
    incident = explain_replicas(paths)
    wall = np.concatenate([each.wall for each in everything])
    assert incident.requests == len(wall)
    assert incident.exceeding == int((wall > 20 * service.MS).sum())
    assert incident.latency_ms.p99 == pytest.approx(np.quantile(wall, 0.99) / 1e6, rel=0.01)
    truth = sum(service.truth(each, 20 * service.MS) * (each.wall > 20 * service.MS).sum() for each in everything)
    truth = truth / sum((each.wall > 20 * service.MS).sum() for each in everything)
    top = incident.attribution[0]
    assert top.share == pytest.approx(max(truth), abs=0.05)
    assert top.ci[0] < top.share < top.ci[1]
    alone = explain_replicas(paths[:1]).attribution[0]
    assert alone.ci is None, "one replica says nothing of the others"
    assert incident.what_if
    for entry in incident.what_if:
        assert entry.ci[0] <= entry.p99_ms * 1.02
        assert entry.ci[1] >= entry.p99_ms * 0.98
    assert any("4 replicas" in note for note in incident.notes)
    assert incident.device_busy is None


def test_a_replica_that_differs_widens_the_interval(incidents, service, tmp_path):
    paths, _ = incidents
    same = explain_replicas(paths).attribution[0]
    odd = service.simulate(90, 150, seed=9, copy_rate=0.02, lock_rate=1.5)
    path = tmp_path / "odd" / "score" / "0" / "incidents" / "20240109T000000Z-score-abcd"
    path.mkdir(parents=True)
    (path / "breach.json").write_text(json.dumps(service.breach()))
    document = json.loads(json.dumps(service.evidence(odd, [20 * service.MS])))
    (path / "evidence-0-1.json").write_text(json.dumps({**document, "instance_id": "odd"}))
    mixed = explain_replicas([*paths, path])
    named = {share.name: share for share in mixed.attribution}[same.name]
    assert named.ci[1] - named.ci[0] > same.ci[1] - same.ci[0]


def test_what_would_count_twice_or_does_not_add_is_refused(incidents, service, tmp_path, capsys):
    paths, _ = incidents
    other = tmp_path / "x" / "score" / "0" / "incidents" / "20240101T000000Z-score-ffff"
    other.mkdir(parents=True)
    (other / "breach.json").write_text(json.dumps(service.breach(threshold_ms=30.0)))
    (other / "evidence-0-1.json").write_text((paths[0] / "evidence-0-1.json").read_text())
    with pytest.raises(EvidenceError, match="different objectives"):
        explain_replicas([paths[0], other])
    (other / "breach.json").write_text(json.dumps(service.breach()))
    again = explain_replicas([paths[0], other])
    assert again.requests == explain_replicas(paths[:1]).requests, "the same replica and time twice counts once"
    assert cli.main(["explain", str(paths[0]), str(paths[0])]) == 1
    assert "twice" in capsys.readouterr().err
    assert cli.main(["explain", *map(str, paths)]) == 2
    assert "4 replicas" in capsys.readouterr().out
