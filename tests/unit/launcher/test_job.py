"""Which rank's failure a launch raises."""

from __future__ import annotations

from unittest import SkipTest

import pytest

from unisono.errors import PeerLostError
from unisono.launcher.job import first_failure
from unisono.launcher.supervisor import Outcome


@pytest.mark.parametrize("skipped", [SkipTest(), pytest.skip.Exception(), pytest.xfail.Exception()])
def test_skip_hides_no_failure_of_another_rank(skipped: BaseException) -> None:
    lost = PeerLostError("rank 0 has left", peer=0)
    failed = ZeroDivisionError()
    ended = [Outcome(1, error=lost), Outcome(0, error=skipped), Outcome(2, error=failed)]
    assert first_failure(ended).error is failed
    assert first_failure(ended[:2]).error is skipped
