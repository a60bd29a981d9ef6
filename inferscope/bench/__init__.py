"""Measure a service from outside and compare two of its versions."""
