"""OTLP: buckets, metrics and logs as values, their protobuf and JSON, targets and transport."""
