"""Makes a subgroup use its parent's channel."""

from __future__ import annotations

from unisono.core.group import Group
from unisono.core.transport import Transport
from unisono.wrappers.base import Wrapper

CHECK = "messages_of_parent_and_subgroup_are_separate"
ERROR = r"parent, part, part brought \[2\.0, 1\.0, 0\.0\]"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def split(self, group: Group) -> Mutant:
        part = Mutant(self.inner)
        part.group = group
        return part
