"""OTLP profiles, signal `v1development`: only behind INFERSCOPE_OTLP_PROFILES=1, and only with the protocol that this was written for.

The signal is in development: its messages change between versions of opentelemetry-proto, and a receiver of another version reads them as
something else. With another version nothing is sent, one line says so, and the incident has pprof files in any case.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any, Final

from inferscope import semconv
from inferscope.guard import log_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.export.otlp.series import Slices

__all__ = ["FLAG", "PROTO", "parsed", "profiles_request", "wanted"]

FLAG: Final = "INFERSCOPE_OTLP_PROFILES"
PROTO: Final = "1.45"
"""Version of opentelemetry-proto, major and minor, whose profiles these are."""


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether profiles are to be sent, and can be; one line says why not when they were asked for."""
    environ = os.environ if environ is None else environ
    if environ.get(FLAG, "").strip() not in {"1", "true"}:
        return False
    try:
        found = importlib.metadata.version("opentelemetry-proto")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found.split(".")[:2] != PROTO.split("."):
        log_once(
            "otlp-profiles",
            f"{FLAG}=1 needs opentelemetry-proto {PROTO}, whose profiles are in development; found {found}. Nothing is sent of them; "
            "the incident has them as pprof files",
        )
        return False
    return True


class _Table:
    """A dictionary's table: index 0 stands for nothing."""

    def __init__(self, empty: Any) -> None:
        self.rows: dict[Any, int] = {empty: 0}

    def __call__(self, row: Any) -> int:
        return self.rows.setdefault(row, len(self.rows))


class _Tables:
    """What profiles of one request share."""

    def __init__(self) -> None:
        self.text, self.frame, self.stack = _Table(""), _Table(("", "", 0)), _Table(())
        self.link, self.attribute = _Table(("", "")), _Table(("", None))

    def dictionary(self, pb: Any, slices: Slices) -> Any:
        """The tables as the message has them."""
        from inferscope.export.otlp.protobuf import any_value

        found = pb.ProfilesDictionary(
            mapping_table=[pb.Mapping()],
            link_table=[pb.Link(trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(span)) for trace, span in self.link.rows],
            stack_table=[pb.Stack(location_indices=row) for row in self.stack.rows],
        )
        for index, (name, file, line) in enumerate(self.frame.rows):
            found.function_table.append(pb.Function(name_strindex=self.text(name), filename_strindex=self.text(file)))
            found.location_table.append(pb.Location(lines=[pb.Line(function_index=index, line=line)] if index else []))
            slices.step()
        for key, value in self.attribute.rows:
            held = pb.KeyValueAndUnit(key_strindex=self.text(key), value=any_value(value)) if key else pb.KeyValueAndUnit()
            found.attribute_table.append(held)
        found.string_table.extend(self.text.rows)
        return found


def profiles_request(
    profiles: Sequence[Mapping[str, Any]], resource: Mapping[str, Any], incident: str, reason: str, slices: Slices
) -> bytes:
    """A serialized ExportProfilesServiceRequest.

    Args:
        profiles: As `diagnose.profiles.read` gives them.
        resource: Resource attributes.
        incident: The incident's id.
        reason: Why captures were taken: the breach's trigger.
        slices: Where to yield.
    """
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    from inferscope.export.otlp.protobuf import key_values

    pb, service = _messages()
    tables = _Tables()
    held = [_profile(pb, tables, each, (incident, reason, number), slices) for number, each in enumerate(profiles)]
    scope = pb.ScopeProfiles(scope=InstrumentationScope(name=semconv.SCOPE), profiles=held)
    about = Resource(attributes=key_values(sorted((key, value) for key, value in resource.items() if value is not None)))
    request = service.ExportProfilesServiceRequest(
        resource_profiles=[pb.ResourceProfiles(resource=about, scope_profiles=[scope])], dictionary=tables.dictionary(pb, slices)
    )
    serialized: bytes = request.SerializeToString()
    return serialized


def _profile(pb: Any, tables: _Tables, each: Mapping[str, Any], about: tuple[str, str, int], slices: Slices) -> Any:
    incident, reason, number = about
    pairs = (
        ("inferscope.incident.id", incident),
        ("inferscope.capture.id", each.get("capture")),
        ("inferscope.capture.reason", reason),
        ("inferscope.profile.truncated", bool(each.get("truncated"))),
    )
    kind = pb.ValueType(type_strindex=tables.text(str(each["kind"])), unit_strindex=tables.text(str(each["unit"])))
    profile = pb.Profile(
        sample_type=kind,
        time_unix_nano=int(each["time_unix_ns"]),
        duration_nano=int(each["duration_ns"]),
        period=int(each["period_ns"]),
        period_type=kind if each["period_ns"] else None,
        profile_id=hashlib.blake2b(f"{incident}/{each['kind']}/{each.get('capture')}/{number}".encode(), digest_size=16).digest(),
        attribute_indices=[tables.attribute(pair) for pair in pairs if pair[1] is not None],
    )
    frames = [tables.frame((str(name), str(file), int(line))) for name, file, line in each["frames"]]
    trace: list[Any] | None = each.get("trace")
    linked = tables.link((str(trace[0]), str(trace[1]))) if trace else 0
    rows: list[tuple[list[int], int]] = each["stacks"]
    for places, value in rows:
        index = tables.stack(tuple(frames[place] for place in places))
        profile.samples.append(pb.Sample(stack_index=index, link_index=linked, values=[int(value)]))
        slices.step()
    return profile


def parsed(body: bytes) -> Any:
    """A serialized ExportProfilesServiceRequest as its message; for tests of what was sent.

    Raises:
        google.protobuf.message.DecodeError: The bytes are no such request.
    """
    return _messages()[1].ExportProfilesServiceRequest.FromString(body)


def _messages() -> tuple[Any, Any]:
    """The modules of the signal's messages; a signal in development ships no types."""
    base = "opentelemetry.proto"
    return (
        importlib.import_module(f"{base}.profiles.v1development.profiles_pb2"),
        importlib.import_module(f"{base}.collector.profiles.v1development.profiles_service_pb2"),
    )
