"""What all tests share: one thread per rank, and how hard Hypothesis tries."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples every time in `make test`, so that what passed passes again; new ones in `make soak`.
settings.register_profile("test", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=500)
settings.load_profile("test")
