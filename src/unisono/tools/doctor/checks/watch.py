"""Report whether `unisono watch` sees all calls on torch's own process groups."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.tools.doctor.checks.torch import load_torch
from unisono.tools.doctor.examination import Finding, Target, info, ok

__all__ = ["ORDER", "check"]

ORDER = 45


def check(target: Target) -> Iterator[Finding]:
    """Look in torch's dispatcher for the operators that implement the calls of process groups."""
    try:
        if not load_torch().distributed.is_available():
            return
    except (ImportError, OSError):
        # The check `torch` already reports that torch cannot be imported.
        return
    from unisono.interop.call_signatures import unseen

    if missing := unseen():
        yield info(f"this torch lacks operators, and `unisono watch` does not see their calls: {', '.join(missing)}")
    else:
        yield ok("`unisono watch` sees all collectives of torch's groups in its dispatcher")
