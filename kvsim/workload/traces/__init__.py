"""Trace files of LLM serving, read into workloads."""

from kvsim.workload.traces.formats import FORMATS
from kvsim.workload.traces.native_write import write_native
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.read import convert_trace, inspect_trace, read_trace
from kvsim.workload.traces.summary import TraceSummary

__all__ = [
    "FORMATS",
    "ReadOptions",
    "TraceSummary",
    "convert_trace",
    "inspect_trace",
    "read_trace",
    "write_native",
]
