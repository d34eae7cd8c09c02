"""The frames of all threads, of which reports of hangs are made."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Start = Callable[..., "subprocess.Popen[str]"]


def test_a_collection_meanwhile_is_no_deadlock(start: Start) -> None:
    process = start(
        """
        import gc, threading, time
        from unisono.core.flight_recorder import thread_frames

        class Cycle:
            def __init__(self):
                self.me = self

            def __del__(self):
                time.sleep(0)

        def look():
            for _ in range(1000):
                Cycle()
                assert threading.get_ident() in thread_frames()

        gc.set_threshold(5)
        end = threading.Event()
        idle = [threading.Thread(target=end.wait) for _ in range(12)]
        looking = [threading.Thread(target=look) for _ in range(2)]
        for thread in idle + looking:
            thread.start()
        for thread in looking:
            thread.join()
        end.set()
        print(gc.isenabled())
        """
    )
    assert process.communicate(timeout=60) == ("True\n", "")
