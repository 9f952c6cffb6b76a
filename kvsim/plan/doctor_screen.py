"""A diagnosis as a screen."""

from __future__ import annotations

from kvsim.plan.advice import remedy_lines
from kvsim.plan.doctor import Diagnosis


def diagnosis_lines(found: Diagnosis) -> list[str]:
    lines = [f"kvsim doctor  {found.label}", ""]
    if found.rows:
        heads = ("figure", "printed", "computed", "says")
        rows = [heads, *found.rows]
        widths = [max(len(row[n]) for row in rows) for n in range(3)]
        lines += [
            f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows
        ]
    else:
        lines.append("  no figure of a pool's size is in it")
    lines.append("")
    lines += [f"  {finding.kind.upper()}: {finding.text}" for finding in found.findings]
    if not found.findings and found.rows:
        lines.append("  no figure contradicts another")
    if found.binds:
        lines.append(f"  binding limit: {found.binds}")
    if found.fails and found.remedies:
        lines += remedy_lines(found.remedies)
    elif found.fails:
        lines.append("  remedies need the GPU: add --gpu NAME, and the flags of its serve line")
    if found.why_no_model:
        lines.append(f"  note: only ratios were checked: {found.why_no_model}")
    return lines
