"""Trace files of LLM serving, read into workloads."""

from kvsim.workload.traces.formats import FORMATS
from kvsim.workload.traces.native_write import write_native
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.read import convert_trace, inspect_trace, read_trace
from kvsim.workload.traces.summary import TraceSummary
from kvsim.workload.traces.vllm_measured import Timings, read_timings

__all__ = [
    "FORMATS",
    "ReadOptions",
    "Timings",
    "TraceSummary",
    "convert_trace",
    "inspect_trace",
    "read_timings",
    "read_trace",
    "write_native",
]
