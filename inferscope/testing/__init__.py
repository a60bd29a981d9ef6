"""Doubles for tests of services that use inferscope; imports nothing heavy by itself."""
