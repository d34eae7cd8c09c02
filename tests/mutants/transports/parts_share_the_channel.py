"""Lets a part of a group use its parent's channel."""

from __future__ import annotations

from unisono.core.group import Group
from unisono.core.transport import Transport
from unisono.wrappers.base import Wrapper

LAW = "the_messages_of_parent_and_part_do_not_mix"
COMPLAINT = r"parent, part, part brought \[2\.0, 1\.0, 0\.0\]"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def split(self, group: Group) -> Mutant:
        part = Mutant(self.inner)
        part.group = group
        return part
