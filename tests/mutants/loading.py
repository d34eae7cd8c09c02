"""Mutants are modules that are read from their files: they are in no package."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["load", "mutants"]


def mutants(folder: str) -> list[Path]:
    return sorted((Path(__file__).parent / folder).glob("*.py"))


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"mutant_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
